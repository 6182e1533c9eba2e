"""A wrong kind of argument raises a typed error that names it, at every public function."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import models
from kvpatch_jax import store as stores
from kvpatch_jax.batch import BatchItem, answer_batch, read_answers
from kvpatch_jax.cache import Antecedent, PatchMetadata
from kvpatch_jax.core import Channel
from kvpatch_jax.errors import ConfigError, InputError, KVPatchError, PoolError, ShapeError
from kvpatch_jax.plan import Certificate, DeviceCosts
from kvpatch_jax.pool import SlotAllocator
from kvpatch_jax.session import Session, Sessions, saved
from kvpatch_jax.store import ChunkStore, PatchKey
from kvpatch_jax.traces import Recorder, Trace
from tests.shared.operator_cases import chunk_of, conditioned_of
from tests.shared.session_cases import reader

WRONG = (None, 5, -1, True, "", "x", b"x", [], {}, (1, 2), [None], math.nan, 1.5, 10**400, Path("none/there"), object())
READER = types.SimpleNamespace(fingerprint="f" * 64, layout=None, prepare=None, embed=None, prefill=None)
Call = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some of what is wrong in one place is a folder's name in another."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def raw_errors(calls: Mapping[str, tuple[Call, Mapping[str, Any]]], values: Sequence[Any] = WRONG) -> list[str]:
    """Replaces each argument by each wrong value; returns what was raised that is none of the library's errors."""
    raised = []
    for call_name, (call, arguments) in calls.items():
        for name in arguments:
            for wrong in values:
                try:
                    result = call(**{**arguments, name: wrong})
                except KVPatchError:
                    continue
                except Exception as error:
                    raised.append(f"{call_name}, {name}={wrong!r:.40}: {type(error).__name__}: {error}")
                else:
                    if hasattr(result, "close"):
                        result.close()
    return raised


# --------------------------------------------------------------------------- any error of the library, and no other


def test_a_store(tmp_path: Path):
    options = dict.fromkeys(("root_budget", "share", "ttl", "secret", "key", "remote")) | {"tenant": "a", "memory": 0}
    numbers = iter(range(10**6))
    makers = {
        "options": (lambda **options: ChunkStore(f"store {next(numbers)}", **options), options),
        "root": (ChunkStore, {"root": "store"}),
    }
    assert not raw_errors(makers)
    with ChunkStore(tmp_path / "store") as store:
        chunk = chunk_of("gqa")
        store.put(chunk)
        store.put_patches([kvp.form_patch(chunk, conditioned_of(chunk), 5, ["a"])])
        assert not raw_errors(store_calls(store))
        with pytest.raises(InputError, match=r"get_patches: got 'id'; expected .*PatchKey\(chunk\.id, chunk\.backbone"):
            store.get_patches("id")


def store_calls(store: ChunkStore) -> dict[str, tuple[Call, dict[str, Any]]]:
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 5, ["a"])
    library, dynamic = stores.StaticLibrary(store, quota="1 MB"), stores.DynamicLibrary(store)
    named = {"id": chunk.id, "backbone": chunk.backbone}
    served = {"orbit": False, "base": "canonical", "base_antecedent": None}
    served |= {"chunk": "c", "backbone": "b", "antecedent": ["a"], "content": None, "lead": None}
    entry = {"name": "A", "content": [1, 2], "chunk": None, "kind": None, "vector": None}
    retriever, linker = stores.ExactRetriever(3), stores.Linker("b", library, dynamic)
    return {
        "put": (store.put, {"chunk": chunk, "encoding": None, "ttl": None}),
        "put_many": (store.put_many, {"chunks": [chunk]}),
        "get": (store.get, {**named, "encoding": None, "placement": None, "lead": None}),
        "contains": (store.contains, named),
        "delete": (store.delete, named),
        "put_encoder": (store.put_encoder, {**named, "output": np.ones((2, 3), np.float32)}),
        "put_patches": (store.put_patches, {"patches": [patch]}),
        "get_patches": (store.get_patches, {"served": patch.metadata}),
        "put_basis": (store.put_basis, {"basis": None}),
        "get_basis": (store.get_basis, {"digest": "a", "layout": chunk.layout, "backbone": "b"}),
        "PatchKey": (lambda **given: store.get_patches(PatchKey(**given)), served),
        "StaticLibrary": (stores.StaticLibrary, {"store": store, "quota": 1, "ttl": None}),
        "DynamicLibrary": (stores.DynamicLibrary, {"store": store}),
        "library.put": (library.put, entry),
        "library.get": (library.get, {"kind": "TEXT", "name": "A"}),
        "publish": (dynamic.publish, entry),
        "open": (dynamic.open, {"kind": "TEXT", "name": "A", "version": None}),
        "link": (linker.link, {"prompt": "x"}),
        "parse_prompt": (stores.parse_prompt, {"prompt": "x"}),
        "escape": (stores.escape, {"text": "x"}),
        "save": (store.save, {"directory": "snapshot"}),
        "restore": (store.restore, {"directory": "none"}),
        "open_remote": (stores.open_remote, {"url": "memory://", "timeout": 1.0}),
        "add": (retriever.add, {"id": "a", "vector": np.ones(3)}),
        "search": (retriever.search, {"query": np.ones(3), "k": 1}),
        "pooled": (stores.pooled, {"output": np.ones((2, 3))}),
    }


def test_a_session(backbone):
    options = dict.fromkeys(("store", "keep", "certificate", "reuse", "lead", "rank", "runtime", "name", "encoding"))
    options |= {"backbone": backbone, "pages": 8, "kl": 0.05, "memory": 0, "around": ("", ""), "chat": False}
    several = {"backbone": backbone, "pages": 8, "page_size": 16, "dtype": None, "batch": 1}
    assert not raw_errors({"Session": (Session, options), "Sessions": (Sessions, several)})
    with Session(backbone, keep=2, memory="1 MiB") as session:
        assert session.config.memory == 1 << 20
        session.add([1, 2])
        asked = {"question": [3, 4], "steps": 1, "temperature": 0.0, "top_p": 1.0, "top_k": None, "stop": None}
        # A number here makes an answer, and programs for it.
        calls = {"ask": (session.ask, asked | {"look": 1})}
        assert not raw_errors(calls, [x for x in WRONG if x not in (5, 1.5, (1, 2), None)])


def fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def test_an_operator(backbone):
    chunk = chunk_of("gqa")
    kv, layout = conditioned_of(chunk), chunk.layout
    patch, placed = kvp.form_patch(chunk, kv, 5, ["a"]), kvp.apply_patch(chunk, None, 3)
    served = {"chunk": chunk, "patch": patch, "start": 0, "antecedent": ["a"], "base": None}
    served_by = {"chunk": chunk, "conditioned": kv, "rank": 5, "antecedent": ["a"]}
    calls = {
        "make_chunk": (kvp.make_chunk, {"backbone": backbone, "items": [[1, 2]], "encoder": None, "lead": None}),
        "conditioned": (kvp.conditioned, {"backbone": backbone, "units": [[[1, 2]]], "lead": None}),
        "form_patch": (kvp.form_patch, served_by),
        "apply_patch": (kvp.apply_patch, served),
        "Placed": (kvp.Placed, served),
        "accumulate": (kvp.accumulate, {"acc": None, "conditioned": kv, "chunk": chunk, "antecedent": ["a"]}),
        "orbit_patch": (kvp.orbit_patch, {"acc": kvp.accumulate(None, kv, chunk, ["a"]), "rank": 5}),
        "removal_patch": (kvp.removal_patch, {**served_by, "target": chunk.kv, "base_antecedent": ["b"]}),
        "correction_patch": (kvp.correction_patch, {**served_by, "patch": patch}),
        "update_patch": (kvp.update_patch, {"patch": patch, "correction": patch}),
        "truncate": (kvp.truncate, {"patch": patch, "rank": 2}),
        "keep_layers": (kvp.keep_layers, {"patch": patch, "layers": [0]}),
        "quantise": (kvp.quantise, {"patch": patch, "dtype": "int8"}),
        "to_engine": (kvp.to_engine, {"layout": layout, "kv": chunk.kv, "local": chunk.local, "start": 0}),
        "to_phase_free": (kvp.to_phase_free, {"layout": layout, "kv": placed, "local": chunk.local}),
        "merge_readouts": (lambda readouts: kvp.core.merge_readouts(readouts), {"readouts": None}),
        "Chunk": (kvp.Chunk, fields_of(chunk)),
        "Patch": (kvp.Patch, {"factors": patch.factors, "metadata": patch.metadata}),
        "PatchMetadata": (PatchMetadata, fields_of(patch.metadata)),
        "Channel": (Channel, fields_of(layout.channels[0])),
        "KVLayout": (kvp.KVLayout, fields_of(layout)),
        "Rope": (kvp.Rope, fields_of(layout.rope)),
        "Antecedent": (Antecedent, {"members": ()}),
    }
    assert not raw_errors(calls)
    for name in ("form_patch", "apply_patch", "accumulate", "removal_patch", "correction_patch"):
        with pytest.raises(InputError, match=r"antecedent.*expected"):
            calls[name][0](**calls[name][1] | {"antecedent": "abc"})


def test_a_model(backbone):
    tokens = backbone.embed(**backbone.prepare([[1, 2]]))
    generated = {"tokens": tokens, "steps": 1}
    generated |= dict.fromkeys(("context", "mask", "sampling", "key", "stop"))
    calls = {
        "prepare": (backbone.prepare, {"items": [[1]]}),
        "chat": (backbone.chat, {"messages": []}),
        "content": (lambda content: backbone.chat([{"role": "user", "content": content}]), {"content": "x"}),
        "text": (backbone.text, {"token_ids": [1]}),
        "ids": (backbone.ids, {"text": "x"}),
        "pad_rows": (models.pad_rows, {"prompts": [tokens]}),
        "Sampling": (models.Sampling, {"temperature": 1.0, "top_p": 1.0, "top_k": None}),
        "Buckets": (models.Buckets, {"smallest": 64, "steps": 4}),
        "save": (lambda backbone: models.save(backbone, "model"), {"backbone": None}),
    }
    assert not raw_errors(calls)
    wrong = [x for x in WRONG if x not in (5, True, (1, 2), None)]
    assert not raw_errors({"generate": (backbone.generate, generated)}, wrong)
    models.save(backbone, "model")
    options = dict.fromkeys(("dtype", "regime", "buckets", "mesh", "adapter")) | {"angles": "exact"}
    loading = {"load": (lambda **options: models.load("model", **options), options)}
    assert not raw_errors(loading, [5, "x", [], math.nan, object()])


# ------------------------------------------------------------------------------------- refused, before anything changes

NO_FILE = {
    "DeviceCosts.read": DeviceCosts.read,
    "DeviceCosts.write": lambda path: DeviceCosts.assumed("cpu").write(path),
    "Certificate.read": lambda path: Certificate.read(path, backbone=None),
    "Trace.read": Trace.read,
    "Trace.write": lambda path: Trace(()).write(path),
    "Recorder": Recorder,
    "read_answers": read_answers,
    "answer_batch": lambda path: answer_batch(READER, None, [BatchItem(["r1"], "t2")], out=path),
    "saved.read": saved.read,
}


@pytest.mark.parametrize("name", NO_FILE)
def test_what_names_no_file(name: str):
    for path in (None, "", "a\0b"):
        with pytest.raises(KVPatchError, match="expected a file's name"):
            NO_FILE[name](path)


def sessions(backbone: Any = READER, store: Any = None, **options: Any):
    return Sessions(backbone, store, pages=8, **options)


def batch(backbone: Any = READER, store: Any = None, **options: Any):
    return answer_batch(backbone, store, [BatchItem(["r1"], "t2")], out="answers.jsonl", **options)


@pytest.mark.parametrize(
    ("call", "wrong", "error", "message"),
    [
        (models.load, [{"directory": value} for value in (None, "", 1.5)], ConfigError, "expected a checkpoint's dir"),
        (
            SlotAllocator,
            [{"pages": pages, "page_size": size} for pages, size in ((0, 16), (8, 1.5), ("8", 16), (10**15, 16))],
            PoolError,
            "expected whole numbers from 1",
        ),
        (
            sessions,
            [{"backbone": None}, {"store": "a folder"}, {"rank": "x"}, {"rank": -1}],
            InputError,
            r"sessions: .*expected",
        ),
        (sessions, [{"dtype": "int32"}], ShapeError, r"sessions: .*expected"),
        (
            batch,
            [{"backbone": None}, {"store": "a folder"}, {"batch": 2.0}, {"shard": "01"}],
            InputError,
            r"(answer_batch|sessions): .*expected",
        ),
    ],
)
def test_options_are_refused_by_name(call: Call, wrong: list[dict[str, Any]], error: type[Exception], message: str):
    for options in wrong:
        with pytest.raises(error, match=message):
            call(**options)
    assert not list(Path().iterdir())


def test_the_users_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backbone):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ChunkStore("~/store").close()
    assert (tmp_path / "home" / "store" / "data").is_dir()
    assert not Path("~").exists()
    with pytest.raises(ConfigError, match="home/model"):
        models.load("~/model")
    models.save(backbone, "~/model")
    assert models.load(Path("~/model")).fingerprint == backbone.fingerprint
