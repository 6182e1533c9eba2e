"""A file is replaced as a unit, and JSON and sizes of strangers are read exactly or refused."""
# pyright: reportArgumentType=false

import math
import threading
from pathlib import Path

import numpy as np
import pytest

from kvpatch_jax.errors import InputError
from kvpatch_jax.store import ChunkStore, StaticLibrary
from kvpatch_jax.utils import strict_json
from kvpatch_jax.utils.atomic_files import replace
from kvpatch_jax.utils.sizes import size_of

WRITTEN = {"0": 0, "512": 512, "512 bytes": 512, "1 byte": 1, "10 gb": 10**10, " 10G ": 10**10, "2T": 2 * 10**12}
WRITTEN |= {"1_000 MB": 10**9, "1.5 GiB": 3 << 29, "1Ki": 1024, "0.1 KiB": 102, 7: 7, 1e9: 10**9, np.int64(5): 5}
WRONG = [math.nan, math.inf, -1, "-1 GB", True, 1.5, "", "GB", "ten", "1 XB", "1e9", "1.5.2 GB"]
WRONG += ["10 G B", "9" * 5000 + "GB", 10**400, None, [], b"1GB", 1 << 62, "5000 PB"]


def test_of_many_writers_the_file_of_one_stays_and_no_other(tmp_path: Path):
    path = tmp_path / "a[1]*.json"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=replace, args=(path, content)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_json_with_repeated_names_or_infinities_is_refused():
    cases = {
        '{"a": 1, "a": 2}': "there twice",
        "NaN": "NaN is no number",
        "[-Infinity]": "-Infinity is no number",
        "[" * 100_000: "too deeply|Expecting",
    }
    for text, message in cases.items():
        for content in (text, text.encode()):
            with pytest.raises(ValueError, match=message):
                strict_json.loads(content)
    assert strict_json.loads('{"a": [1, 2.5, null], "b": {"a": 1}}') == {"a": [1, 2.5, None], "b": {"a": 1}}


@pytest.mark.usefixtures("unchecked")
def test_a_size_is_read_as_people_write_it(tmp_path: Path):
    assert {size: size_of(size, "x") for size in WRITTEN} == WRITTEN
    for size in WRONG:
        with pytest.raises(InputError, match=r"^x: got .*; expected bytes, 0 or more, such as .*'10 GB'"):
            size_of(size, "x")
    with ChunkStore(tmp_path / "store", root_budget="10GB", share="5 GiB", memory="1 GiB") as store:
        assert StaticLibrary(store, quota="1 MB").quota == 10**6
        budgets = store.objects.index.rows("SELECT bytes FROM budgets ORDER BY bytes")
        assert budgets == [(5 << 30,), (10**10,)]
    for word in ("root_budget", "share", "memory"):
        with pytest.raises(InputError, match=rf"store: {word}: got .*expected bytes"):
            ChunkStore(tmp_path / "other", **{word: math.nan})
    assert not (tmp_path / "other").exists()  # it is refused when it is given, not at the first put
