"""Sizes are numbers or as people write them, read in one place by all that take bytes."""
# pyright: reportArgumentType=false

import math
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.store import ChunkStore, StaticLibrary
from kvpatch_jax.utils.sizes import size_of
from tests.shared.session_cases import reader

WRITTEN = {"0": 0, "512": 512, "512 bytes": 512, "1 byte": 1, "10GB": 10**10, "10 gb": 10**10, " 10G ": 10**10}
WRITTEN |= {"512MB": 512 * 10**6, "1 kB": 1000, "2T": 2 * 10**12, "1_000 MB": 10**9, "1.5 GiB": 3 << 29}
WRITTEN |= {"64MiB": 64 << 20, "1 KiB": 1024, "1Ki": 1024, "0.1 KiB": 102, 7: 7, 1e9: 10**9, np.int64(5): 5}
WRONG = [math.nan, math.inf, -math.inf, -1, "-1 GB", True, False, 1.5, "", " ", "GB", "ten", "1 XB", "1e9", "1.5.2 GB"]
WRONG += ["1 iB", "10 G B", "9" * 5000 + "GB", 10**400, None, [], {}, b"1GB", 1 << 62, "5000 PB"]


@hypothesis.given(st.integers(0, (1 << 62) - 1))
def test_a_number_of_bytes_is_itself_written_or_not(size: int):
    assert size_of(size, "x") == size_of(str(size), "x") == size_of(f"{size} B", "x") == size


def test_a_size_is_read_as_people_write_it(unchecked: None):
    assert {size: size_of(size, "x") for size in WRITTEN} == WRITTEN
    for size in WRONG:
        with pytest.raises(InputError, match=r"^x: got .*; expected bytes, 0 or more, such as .*'10 GB'"):
            size_of(size, "x")


def test_every_budget_takes_a_written_size(tmp_path: Path, unchecked: None):
    """A wrong one is refused when it is given, not at the first put, and no directory is made."""
    with ChunkStore(tmp_path / "store", root_budget="10GB", share="5 GiB", memory="1 GiB") as store:
        assert StaticLibrary(store, quota="1 MB").quota == 10**6
        budgets = store.objects.index.rows("SELECT bytes FROM budgets ORDER BY bytes")
        assert budgets == [(5 << 30,), (10**10,)]
    for size in WRONG[:4]:
        for word in ("root_budget", "share", "memory"):
            with pytest.raises(InputError, match=rf"store: {word}: got .*expected bytes"):
                ChunkStore(tmp_path / "other", **{word: size})
    assert not (tmp_path / "other").exists()

    backbone = reader()
    with kvp.Session(backbone, memory="1 MiB", pages=8) as session:
        assert session.config.memory == 1 << 20
    for size in (math.nan, -1, "lots", None, True):
        with pytest.raises(KVPatchError, match=r"session\.memory: got .*expected bytes"):
            kvp.Session(backbone, memory=size, pages=8)
