"""What strangers give to traces, sessions and batches: every surprise is a typed error that names it."""
# pyright: reportArgumentType=false

import types
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.batch import BatchItem, answer_batch, read_answers
from kvpatch_jax.errors import (
    InputError,
    KVPatchError,
    PoolError,
    SessionError,
    ShapeError,
)
from kvpatch_jax.plan import Certificate, DeviceCosts
from kvpatch_jax.pool import SlotAllocator
from kvpatch_jax.session import Session, Sessions, saved
from kvpatch_jax.traces import Recorder, Trace

BACKBONE = "f" * 64
DEVICES = DeviceCosts.assumed("cpu")
READER = types.SimpleNamespace(fingerprint=BACKBONE, layout=None, prepare=None, embed=None, prefill=None)
NO_PATHS = [None, "", "a\0b"]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize("path", NO_PATHS)
def test_what_names_no_file_is_refused(path: Any):
    makers = [
        lambda: DeviceCosts.read(path),
        lambda: DEVICES.write(path),
        lambda: Certificate.read(path, backbone=None),
        lambda: Trace.read(path),
        lambda: Trace(()).write(path),
        lambda: Recorder(path),
        lambda: read_answers(path),
        lambda: answer_batch(READER, None, [BatchItem(["r1"], "t2")], out=path),
        lambda: saved.read(path),
    ]
    for make in makers:
        with pytest.raises(KVPatchError, match="expected a file's name"):
            make()


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (8, 1.5), ("8", 16), (10**15, 16)])
def test_a_pool_has_a_number_of_pages(pages: Any, size: Any):
    with pytest.raises(PoolError, match="expected whole numbers from 1"):
        SlotAllocator(pages, size)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"backbone": None}, InputError),
        ({"store": "a folder"}, InputError),
        ({"rank": "x"}, InputError),
        ({"rank": -1}, InputError),
        ({"dtype": "float17"}, ShapeError),
        ({"dtype": "int32"}, ShapeError),
    ],
)
def test_sessions_of_nonsense_are_refused(changed: dict[str, Any], error: type[Exception]):
    given = {"backbone": READER, "store": None} | changed
    backbone, store = (given.pop(word) for word in ("backbone", "store"))
    with pytest.raises(error, match=r"sessions: .*expected"):
        Sessions(backbone, store, pages=8, **given)


@pytest.mark.parametrize(
    "changed",
    [{"backbone": None}, {"store": "a folder"}, {"batch": 2.0}, {"shard": "01"}],
)
def test_a_batch_is_refused_before_it_writes(changed: dict[str, Any], tmp_path: Path):
    out, call = tmp_path / "answers.jsonl", {"backbone": READER, "store": None} | changed
    with pytest.raises(InputError, match=r"(answer_batch|sessions): .*expected"):
        answer_batch(call.pop("backbone"), call.pop("store"), [BatchItem(["r1"], "t2")], out=out, **call)
    assert not out.exists()


@pytest.mark.parametrize(
    "given",
    [
        {"around": "x"},
        {"reuse": "some"},
        {"reuse": "certified"},
        {"memory": "lots"},
        {"name": 3},
        {"kl": "0.05"},
        {"linker": 3},
        {"runtime": 3},
    ],
)
def test_settings_of_a_session_are_looked_at_first(given: dict[str, Any]):
    with pytest.raises(SessionError, match=r"session\..*: got .*expected"):
        Session(READER, **given)
