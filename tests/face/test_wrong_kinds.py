"""What a newcomer passes by mistake is a typed error that names it, wherever the public names take it."""
# pyright: reportArgumentType=false, reportCallIssue=false

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax import models
from kvpatch_jax import store as stores
from kvpatch_jax.cache import Antecedent, PatchMetadata
from kvpatch_jax.core import Channel
from kvpatch_jax.errors import ConfigError, InputError, KVPatchError, StalePatchError
from kvpatch_jax.store import ChunkStore, PatchKey
from tests.shared.operator_cases import chunk_of, conditioned_of
from tests.shared.session_cases import image_of, reader

WRONG = (None, 5, -1, True, "", "x", b"x", [], {}, (1, 2), [None], math.nan, 1.5, 10**400, Path("none/there"), object())
Call = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Some of what is wrong in one place is a folder's name in another."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def raw_errors(call: Call, given: Mapping[str, Any], values: Sequence[Any] = WRONG) -> list[str]:
    """Replaces each argument by each wrong value; returns what was raised that is none of the library's errors."""
    found = []
    for name in given:
        for wrong in values:
            try:
                result = call(**{**given, name: wrong})
            except KVPatchError:
                continue
            except Exception as error:
                found.append(f"{name}={wrong!r:.40}: {type(error).__name__}: {error}")
            else:
                if hasattr(result, "close"):
                    result.close()
    return found


# ------------------------------------------------------------------------------------------------------- the store


@pytest.fixture
def store(tmp_path: Path):
    with ChunkStore(tmp_path / "store") as store:
        chunk = chunk_of("gqa")
        store.put(chunk)
        store.put_patches([kvp.form_patch(chunk, conditioned_of(chunk), 4, ["a"])])
        yield store


def test_stores_refuse_what_they_are_not_made_with():
    options = dict.fromkeys(("root_budget", "share", "ttl", "secret", "key", "remote")) | {
        "tenant": "a",
        "memory": 0,
    }
    made = iter(range(10**6))
    assert not raw_errors(lambda **given: ChunkStore(f"store {next(made)}", **given), options)
    assert not raw_errors(ChunkStore, {"root": "store"})


def store_calls(store: ChunkStore) -> dict[str, tuple[Call, dict[str, Any]]]:
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ["a"])
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


def test_every_call_of_a_store_refuses_what_it_does_not_take(store: ChunkStore):
    found = {name: raw_errors(*call) for name, call in store_calls(store).items()}
    assert not {name: errors for name, errors in found.items() if errors}


def test_a_name_in_place_of_what_patches_serve_says_what_is_expected(store: ChunkStore):
    with pytest.raises(InputError, match=r"get_patches: got 'id'; expected .*PatchKey\(chunk\.id, chunk\.backbone"):
        store.get_patches("id")


def test_a_store_prints_where_it_is_and_nothing_secret(tmp_path: Path):
    with ChunkStore(tmp_path / "store", tenant="acme", key=b"k" * 32, secret=b"s" * 16) as store:
        assert repr(store) == f"ChunkStore({str(tmp_path / 'store')!r})"
    assert repr(store).endswith(", closed)")


def test_the_users_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    ChunkStore("~/store").close()
    assert (tmp_path / "home" / "store" / "data").is_dir()
    assert not Path("~").exists()
    with pytest.raises(ConfigError, match="home/model"):
        models.load("~/model")
    models.save(reader(), "~/model")
    assert models.load(Path("~/model")).fingerprint


# -------------------------------------------------------------------------------------------------------- sessions


def test_sessions_refuse_what_they_are_not_made_with(backbone):
    options = dict.fromkeys(("store", "keep", "certificate", "reuse", "lead", "rank", "runtime", "name", "encoding"))
    options |= {"backbone": backbone, "pages": 8, "kl": 0.05, "memory": 0, "around": ("", ""), "chat": False}
    assert not raw_errors(kvp.Session, options)
    assert not raw_errors(kvp.Sessions, {"backbone": backbone, "pages": 8, "page_size": 16, "dtype": None, "batch": 1})


def test_every_call_of_a_session_refuses_what_it_does_not_take(backbone):
    with kvp.Session(backbone, keep=2, pages=64) as session:
        session.add([1, 2])
        session.add(image_of(0), id="shot")
        asked = {"question": [3], "steps": 1, "stop": None, "temperature": 0.0, "top_p": 1.0, "top_k": None, "look": 1}
        calls = {
            "add": (session.add, {"item": [3], "id": None, "kind": None}),
            "insert": (session.insert, {"item": [3], "before": "none", "id": None}),
            "recall": (session.recall, {"item": "shot"}),
            "evict": (session.evict, {"id": "none"}),
            "replace": (session.replace, {"id": "none", "item": [1]}),
            "reorder": (session.reorder, {"ids": []}),
            "fork": (session.fork, {"keep": 1}),
            # What is a number here makes an answer, and programs for it.
            "ask": (session.ask, asked, [value for value in WRONG if value not in (5, 1.5, (1, 2), None)]),
        }
        found = {name: raw_errors(*call) for name, call in calls.items()}
    assert not {name: errors for name, errors in found.items() if errors}


def test_a_window_lists_its_ids_as_a_session_does(backbone):
    with kvp.Session(backbone, keep=1, pages=64) as session:
        session.add([1, 2], id="text")
        for number in range(3):
            session.add(image_of(number), id=f"shot {number}")
        window = session.window
        assert isinstance(window.ids, tuple)
        assert window.ids == tuple(piece.entry.id for piece in window.pieces)
        assert window.gone == tuple(entry.id for entry in window.evicted)
        assert (len(session.ids), len(session.gone)) == (len(window.ids), len(window.gone))
        assert [window.places[id] for id in window.ids] == list(range(len(window)))
        assert [] not in window


# -------------------------------------------------------------------------------------------------- models, patches


def fields_of(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


def test_every_operator_refuses_what_it_does_not_take(backbone):
    chunk = chunk_of("gqa")
    kv, layout = conditioned_of(chunk), chunk.layout
    patch, placed = kvp.form_patch(chunk, kv, 4, ["a"]), kvp.apply_patch(chunk, None, 3)
    calls = {
        "make_chunk": (kvp.make_chunk, {"backbone": backbone, "items": [[1]], "encoder": None, "lead": None}),
        "conditioned": (kvp.conditioned, {"backbone": backbone, "units": [[[1]]], "lead": None}),
        "form_patch": (kvp.form_patch, {"chunk": chunk, "conditioned": kv, "rank": 4, "antecedent": ["a"]}),
        "apply_patch": (
            kvp.apply_patch,
            {"chunk": chunk, "patch": patch, "start": 0, "antecedent": ["a"], "base": None},
        ),
        "Placed": (kvp.Placed, {"chunk": chunk, "patch": patch, "start": 0, "antecedent": ["a"], "base": None}),
        "accumulate": (kvp.accumulate, {"acc": None, "conditioned": kv, "chunk": chunk, "antecedent": ["a"]}),
        "orbit_patch": (kvp.orbit_patch, {"acc": kvp.accumulate(None, kv, chunk, ["a"]), "rank": 4}),
        "correction_patch": (lambda patch: kvp.correction_patch(chunk, patch, kv, 4, ["a"]), {"patch": patch}),
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
    found = {name: raw_errors(*call) for name, call in calls.items()}
    assert not {name: errors for name, errors in found.items() if errors}


def test_every_call_of_a_model_refuses_what_it_does_not_take(backbone):
    tokens = backbone.embed(**backbone.prepare([[1, 2]]))
    generated = {
        "tokens": tokens,
        "steps": 1,
        "context": None,
        "mask": None,
        "sampling": None,
        "key": None,
        "stop": None,
    }
    made = [value for value in WRONG if value not in (5, True, (1, 2), None)]  # what is a number here makes a program
    calls = {
        "prepare": (backbone.prepare, {"items": [[1]]}),
        "chat": (backbone.chat, {"messages": []}),
        "content": (lambda content: backbone.chat([{"role": "user", "content": content}]), {"content": "x"}),
        "text": (backbone.text, {"token_ids": [1]}),
        "ids": (backbone.ids, {"text": "x"}),
        "generate": (backbone.generate, generated, made),
        "pad_rows": (models.pad_rows, {"prompts": [tokens]}),
        "Sampling": (models.Sampling, {"temperature": 1.0, "top_p": 1.0, "top_k": None}),
        "Buckets": (models.Buckets, {"smallest": 64, "steps": 4}),
        "save": (lambda backbone: models.save(backbone, "model"), {"backbone": None}),
    }
    found = {name: raw_errors(*call) for name, call in calls.items()}
    assert not {name: errors for name, errors in found.items() if errors}


def test_a_model_is_not_loaded_with_what_it_does_not_take():
    models.save(reader(), "model")
    options = {"dtype": None, "angles": "exact", "regime": None, "buckets": None, "mesh": None, "adapter": None}
    wrong = [5, "x", [], math.nan, object()]
    assert not raw_errors(lambda **given: models.load("model", **given), options, wrong)


@pytest.mark.parametrize("wrong", [None, "", 1.5])
def test_what_is_no_directory_is_not_loaded(wrong):
    with pytest.raises(ConfigError, match=r"load: .*expected a checkpoint's directory or GGUF file"):
        models.load(wrong)


def test_a_forgotten_antecedent_is_told():
    chunk = chunk_of("gqa")
    patch = kvp.form_patch(chunk, conditioned_of(chunk), 4, ["a", "b"])
    with pytest.raises(StalePatchError, match=r"got no antecedent; expected antecedent=\('a', 'b'\)"):
        kvp.apply_patch(chunk, patch, 0)
    with pytest.raises(StalePatchError, match=r"formed behind \('a', 'b'\); expected \('b',\)"):
        kvp.apply_patch(chunk, patch, 0, ["b"])
