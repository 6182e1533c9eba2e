"""What is placed without a forward is what its canonical, patch or stored KV says, in every encoding and form."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from window_cases import BAR, Loop, distance, patched, same

import kvpatch_jax as kvp
from kvpatch_jax.core import zero_padded
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.window import BARE, PatchNote, Service
from tests.shared.memory_store import MemoryStore

LEADING = Service("leading")


def loop_of(name: str = "gqa", **options: Any) -> Loop:
    loop = Loop(name, **options)
    loop.append("c0", "c1")
    return loop


def applied(placed: kvp.Placed) -> dict[str, np.ndarray]:
    """What the operator gives for a placed chunk, without padding."""
    return {name: np.asarray(value)[:, : placed.chunk.length] for name, value in placed.apply().items()}


@pytest.mark.parametrize(
    ("name", "word"), [("mrope", "k4v4"), ("kimi", None), pytest.param("gemma3", "k8v8", marks=pytest.mark.nightly)]
)
def test_a_bare_chunk_is_its_canonical_at_its_place(name: str, word: str | None):
    """Encoded ones stay packed, and are placed as the numbers that they decode to, bit for bit."""
    loop = loop_of(name, encoding=word)
    chunk = loop.canonical("c2")
    encoded = chunk if word is None else kvp.encode_chunk(chunk, word)
    loop.executor.provide("c2", chunk=encoded)
    held = loop.executor.sources.canonical_bytes
    loop.append("c2", service=BARE)
    rows, start = loop.rows_of("c2"), loop.window.piece("c2").start
    assert loop.executor.sources.canonical_bytes == held
    assert distance(rows, applied(kvp.Placed(chunk, None, start))) <= (BAR if word is None else 0.2)
    if word is not None:
        assert held < 0.55 * chunk.nbytes
        twin = loop_of(name, encoding=word)
        twin.executor.provide("c2", chunk=kvp.cache.decode_chunk(encoded))
        twin.append("c2", service=BARE)
        assert same(rows, twin.rows_of("c2"))


def test_a_canonical_at_the_front_is_its_prefill_bit_for_bit():
    loop, other = Loop(), Loop()
    loop.append("c0")
    other.executor.provide("c0", chunk=other.canonical("c0"))
    other.append("c0", service=LEADING)
    assert same(loop.rows(), other.rows())
    assert loop.window.pieces[0].made == other.window.pieces[0].made


def test_a_store_is_read_in_the_encoding_that_is_asked_for():
    """If it has none, a canonical as it was prefilled is taken, and kept so."""
    store, chunk = MemoryStore(), loop_of().canonical("c2")
    for word, encoding, expected in (("k4v4", "k4v4", "k4v4g32"), (None, "k8v8", None), ("k8v8", "k8v8", "k8v8g32")):
        store.put(chunk if word is None else kvp.encode_chunk(chunk, word))
        loop = loop_of(store=store, encoding=encoding)
        step = loop.append("c2", service=BARE)
        assert [action.kind for action in step] == ["fetch", "copy"]
        assert loop.executor.sources["c2"].chunk.encoding == expected
    with pytest.raises(InputError, match=r"got no canonical; expected .* or one stored in no encoding"):
        loop_of(store=MemoryStore()).append("c2", service=BARE)
    # A canonical of another content is refused, and takes nothing away that is known of the piece.
    loop = loop_of(store=store)
    store.put(dataclasses.replace(chunk, content="another"))
    with pytest.raises(PatchMismatchError, match="got content 'another'; expected 'content of c2'"):
        loop.append("c2", service=BARE)
    loop.append("c2")


FORMS: dict[str, Callable[..., kvp.Patch]] = {
    "low rank": lambda *args: kvp.form_patch(*args),
    "dense": lambda chunk, kv, _, target: kvp.form_patch(chunk, kv, 8, target),
    "some layers": lambda *args: kvp.keep_layers(kvp.form_patch(*args), [1]),
    "int4": lambda *args: kvp.form_patch(*args, dtype="int4"),
    "orbit": lambda chunk, kv, rank, target: kvp.orbit_patch(kvp.accumulate(None, kv, chunk, target), rank),
}


@pytest.mark.parametrize(("form", "word"), [*((form, None) for form in FORMS), ("int4", "k8v8")])
def test_a_patched_chunk_is_what_the_operator_gives(form: str, word: str | None):
    loop = loop_of(encoding=word)
    chunk = loop.canonical("c2")
    chunk = chunk if word is None else kvp.encode_chunk(chunk, word)
    patch = FORMS[form](chunk, loop.conditioned("c2"), 3, loop.window.target())
    note = PatchNote.of(patch)
    # A canonical as it was prefilled is encoded for the patch, and one in another encoding is not taken for it.
    loop.executor.provide("c2", chunk=loop.canonical("c2") if word is not None else chunk)
    assert loop.executor.provide("c2", patch=patch) == note.digest
    loop.append("c2", service=patched(note))
    placed = kvp.Placed(chunk, patch, loop.window.piece("c2").start, loop.window.antecedent("c2"))
    assert distance(loop.rows_of("c2"), applied(placed)) <= BAR
    bare = kvp.Placed(chunk, None, loop.window.piece("c2").start)
    assert distance(loop.rows_of("c2"), applied(bare)) > 100 * BAR
    # It moves as any other, and serves in place.
    rows = loop.rows_of("c2")
    loop.run(loop.window.insert(loop.entry("c3"), before="c2"))
    loop.run(loop.window.evict("c3").serve({"c2": BARE}))
    loop.run(loop.window.serve({"c2": patched(note)}))
    assert same(loop.rows_of("c2"), rows)


def test_a_removal_patch_is_added_to_what_a_survivor_has():
    loop = loop_of()
    loop.append("c2")
    base, behind = loop.executor.read(loop.window, "c2"), loop.window.antecedent("c2")
    loop.run(dataclasses.replace(loop.window.evict("c1"), promise="forget"))
    front = loop.window.evict("c2").fork()
    loop.executor.run(front)
    chunk, conditioned = loop.canonical("c2"), loop.conditioned("c2", front)
    # What was read has no padding, which the canonical has.
    base = {name: zero_padded(value, -3, chunk.tokens) for name, value in base.items()}
    patch = kvp.removal_patch(chunk, conditioned, base, 3, loop.window.target("c2"), behind)
    loop.executor.provide("c2", chunk=chunk, patch=patch)
    target, start = loop.window.target("c2"), loop.window.piece("c2").start
    loop.run(loop.window.serve({"c2": patched(PatchNote.of(patch))}))
    expected = kvp.Placed(chunk, patch, start, target, base=base, base_antecedent=behind)
    assert distance(loop.rows_of("c2"), applied(expected)) <= BAR
    # Its base was in the old pool alone.
    loop.executor.renew()
    loop.run(loop.window.anew())
    assert [loop.window.fidelity(id) for id in loop.window.ids] == ["exact", "exact"]


@pytest.mark.usefixtures("unchecked")
def test_inputs_of_another_chunk_are_refused():
    loop = loop_of()
    chunk, tokens, known = loop.canonical("c1"), loop.tokens["c1"], loop.executor.sources["c1"]
    patch = kvp.form_patch(loop.canonical("c2"), loop.conditioned("c2"), 2, loop.window.target())
    for error, inputs in (
        (PatchMismatchError, {"chunk": loop.canonical("c2")}),
        (PatchMismatchError, {"chunk": dataclasses.replace(chunk, backbone="f" * 64)}),
        (PatchMismatchError, {"patch": patch}),
        (ShapeError, {"tokens": tokens, "length": 99}),
        (ShapeError, {"chunk": chunk, "tokens": tokens.take(0, 3)}),
    ):
        with pytest.raises(error, match="expected"):
            loop.executor.provide("c1", **inputs)
        assert loop.executor.sources["c1"] is known
    # Another content is another chunk, of which nothing is known.
    loop.executor.provide("c1", content="another")
    assert loop.executor.sources["c1"].tokens is None
