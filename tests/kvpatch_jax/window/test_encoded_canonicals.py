"""Windows over encoded canonicals: placed as their decoded twins are, kept packed, and never taken for a prefill."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false

import jax.numpy as jnp
import numpy as np
import pytest
from memory_store import MemoryStore
from window_drill import Drill, backbone_of, canonical
from window_oracle import rows_of, tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PackedArray
from kvpatch_jax.errors import InputError, PatchMismatchError
from kvpatch_jax.window import (
    CanonicalEncoding,
    Costs,
    Entry,
    PagedExecutor,
    PatchFormer,
    PatchNote,
    StoredPrefills,
    Window,
    padded_chunk,
    programs,
)

WORD = "k6v6g32"


def executor_of(store=None, **options) -> PagedExecutor:
    return PagedExecutor(backbone_of("gqa"), 48, 8, jnp.float32, store=store, **options)


def window_of(executor: PagedExecutor) -> Window:
    return Window.empty(Costs.of(executor.backbone, jnp.float32))


def chunk_of(seed: int, length: int = 7) -> tuple[kvp.Chunk, Tokens]:
    tokens = tokens_of(backbone_of("gqa"), seed, length)
    return canonical(backbone_of("gqa"), f"c{seed}", tokens), tokens


def run(executor: PagedExecutor, changed):
    window, edits = changed
    executor.run(window, edits)
    return window


def conditioned_of(tokens: Tokens, executor: PagedExecutor, window: Window):
    out = executor.prefill(window, tokens)
    return {name: np.asarray(value)[:, 0, : tokens.embeddings.shape[1]] for name, value in out.kv.items()}


def served(chunk: kvp.Chunk, patch: kvp.Patch | None) -> dict[str, np.ndarray]:
    """The pool's rows of a chunk behind another one, from what an executor is given."""
    executor, (first, tokens) = executor_of(), chunk_of(0)
    executor.provide("c0", tokens=tokens)
    window = run(executor, window_of(executor).append(Entry.of(first)))
    if patch is None:
        executor.provide(chunk.id, chunk=chunk)
        window = run(executor, window.append(Entry.of(chunk), "bare", fetched=True))
    else:
        executor.provide(chunk.id, chunk=chunk)
        executor.provide(chunk.id, patch=patch)
        window = run(executor, window.append(Entry.of(chunk), "patch", PatchNote.of(patch), fetched=True))
    assert any(isinstance(leaf, PackedArray) for leaf in executor.sources[chunk.id].chunk.kv.values()) == any(
        isinstance(leaf, PackedArray) for leaf in chunk.kv.values()
    )
    return rows_of(executor, window)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", None])
def test_an_encoded_chunk_serves_a_window_as_its_twin(dtype):
    executor, (first, tokens) = executor_of(), chunk_of(0)
    executor.provide("c0", tokens=tokens)
    window = run(executor, window_of(executor).append(Entry.of(first)))
    chunk, own = chunk_of(1)
    encoded, patch = kvp.encode_chunk(chunk, WORD), None
    if dtype is not None:
        kv = conditioned_of(own, executor, window)
        patch = kvp.form_patch(encoded, kv, 4, window.target(), dtype=dtype)
        assert patch.metadata.encoding == WORD
        assert PatchNote.of(patch).rank == 0, "no certificate was measured on encoded canonicals"
    found, wanted = served(encoded, patch), served(kvp.decode_chunk(encoded), patch)
    plain = served(chunk, None) if patch is None else None
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)
        if plain is not None:
            assert (found[name] != plain[name]).any()
            assert np.abs(found[name] - plain[name]).max() < 0.1 * np.abs(plain[name]).max()


def test_a_store_is_read_in_the_encodings_that_are_asked_for():
    store, (chunk, _) = MemoryStore(), chunk_of(1)
    first, own = chunk_of(0)
    for word in ("k8v8", "k4v4"):
        store.put(kvp.encode_chunk(chunk, word))
    for encodings, expected in ((("k4v4", "k8v8"), "k4v4g32"), ((None, "k8v8"), "k8v8g32")):
        executor = executor_of(store, encodings=encodings)
        executor.provide("c0", tokens=own)
        window = run(executor, window_of(executor).append(Entry.of(first)))
        window = run(executor, window.append(Entry.of(chunk), "bare"))
        assert executor.sources["c1"].chunk.encoding == expected
        held = executor.sources.canonical_bytes
        assert 0 < held < 0.55 * padded_chunk(chunk, 16).nbytes
    executor = executor_of(store)
    executor.provide("c0", tokens=own)
    window = run(executor, window_of(executor).append(Entry.of(first)))
    with pytest.raises(InputError, match="no store has the canonical"):
        executor.run(*window.append(Entry.of(chunk), "bare"))
    with pytest.raises(InputError, match="encoding"):
        executor_of(store, encodings=("k9v9",))


def test_what_stands_for_a_prefill_is_not_encoded():
    """At the front of a window a canonical is the prefill, so that only the one as it was prefilled is placed."""
    store, (chunk, tokens) = MemoryStore(), chunk_of(1)
    store.put(kvp.encode_chunk(chunk, WORD))
    executor = executor_of(store, encodings=(WORD, None))
    leading = window_of(executor).append(Entry.of(chunk), "leading")
    with pytest.raises(InputError, match="c1"):
        executor.run(*leading)
    executor.provide("c1", chunk=kvp.encode_chunk(chunk, WORD))
    with pytest.raises(InputError, match="c1"):
        executor.run(*leading)
    store.put(chunk)
    window = run(executor, leading)
    assert window.fidelity("c1") == "exact"
    other = executor_of()
    other.provide("c1", tokens=tokens)
    for name, value in rows_of(other, run(other, window_of(other).append(Entry.of(chunk)))).items():
        np.testing.assert_allclose(rows_of(executor, window)[name], value, atol=2e-5)


@pytest.mark.slow
def test_a_patch_is_placed_on_the_base_that_it_was_formed_on():
    """A canonical as it was prefilled is encoded for it; one in another encoding is replaced by the store's."""
    (first, tokens), (chunk, _) = chunk_of(0), chunk_of(1)
    encoded = kvp.encode_chunk(chunk, WORD)
    conditioned = {name: np.asarray(value) * 1.5 for name, value in chunk.kv.items()}

    def behind_the_first(store) -> tuple[PagedExecutor, Window]:
        executor = executor_of(store)
        executor.provide("c0", tokens=tokens)
        return executor, run(executor, window_of(executor).append(Entry.of(first)))

    patch = kvp.form_patch(encoded, conditioned, 4, behind_the_first(None)[1].target())
    note, wanted = PatchNote.of(patch), served(encoded, patch)
    for given, stored in ((chunk, None), (kvp.encode_chunk(chunk, "k2v2"), encoded)):
        store = MemoryStore()
        if stored is not None:
            store.put(stored)
        executor, window = behind_the_first(store)
        executor.provide("c1", chunk=given)
        executor.provide("c1", patch=patch)
        after = run(executor, window.append(Entry.of(chunk), "patch", note, fetched=True))
        for name, value in rows_of(executor, after).items():
            np.testing.assert_array_equal(value, wanted[name])
        assert executor.sources["c1"].chunk.encoding == WORD

    executor, window = behind_the_first(None)
    executor.provide("c1", chunk=kvp.encode_chunk(chunk, "k2v2"))
    executor.provide("c1", patch=patch)
    with pytest.raises(InputError, match=WORD):
        executor.run(*window.append(Entry.of(chunk), "patch", note, fetched=True))


@pytest.mark.slow
def test_a_former_forms_on_the_encoded_canonical_and_keeps_the_front_as_it_is():
    store, drill = MemoryStore(), Drill("gqa")
    with PatchFormer(drill.backbone, store, 4, encoding=CanonicalEncoding("k8v8")) as former:
        former.watch(drill.paged)
        for id in ("c0", "c1", "c2"):
            drill.append(id)
        former.flush()
        assert not former.errors
        assert (former.done.canonicals, former.done.encoded, former.done.patches) == (3, 2, 2)
        assert former.done.canonical_bytes == sum(chunk.nbytes for chunk in store.chunks.values())
    assert store.encodings_of("c0") == {None}
    assert store.encodings_of("c1") == {"k8v8g32"}
    for patch in store.patches:
        chunk = store.get(patch.metadata.chunk, "", encoding="k8v8g32")
        assert patch.metadata.encoding == "k8v8g32"
        assert chunk.nbytes == kvp.encode_chunk(kvp.Chunk(**_fields(drill.chunks[chunk.id], chunk)), "k8v8").nbytes
        placed = kvp.Placed(chunk, patch, 0, patch.metadata.behind)
        plain = kvp.Placed(kvp.decode_chunk(chunk), patch, 0, patch.metadata.behind)
        for name, value in kvp.apply_patch(placed).items():
            np.testing.assert_array_equal(value, kvp.apply_patch(plain)[name])
    # What is stored is not formed again, and a canonical as it was prefilled is encoded without a forward.
    plain = MemoryStore()
    plain.put(padded_chunk(drill.chunks["c2"], 16))
    for known, counts in ((store, (0, 0, 0)), (plain, (3, 1, 2))):
        other = Drill("gqa")
        with PatchFormer(other.backbone, known, 4, encoding=CanonicalEncoding("k8v8")) as again:
            again.watch(other.paged)
            for id in ("c0", "c1", "c2"):
                other.append(id)
            again.flush()
            assert not again.errors
            assert (again.done.canonicals, again.done.forwards, again.done.patches) == counts
    assert plain.encodings_of("c2") == {None, "k8v8g32"}


def _fields(given: kvp.Chunk, padded: kvp.Chunk) -> dict:
    """A chunk's fields, with its KV padded by zeros to another chunk's tokens."""
    more = padded.tokens - given.tokens
    kv = {name: np.pad(np.asarray(value), [(0, 0), (0, more), (0, 0), (0, 0)]) for name, value in given.kv.items()}
    local = np.pad(np.asarray(given.local, np.float32), [(0, more)])
    names = ("span", "length", "id", "layout", "backbone")
    return {"kv": kv, "local": local, **{name: getattr(given, name) for name in names}}


def test_auto_takes_fewer_bits_once_its_budget_is_spent():
    chunk, _ = chunk_of(1)
    small = kvp.encode_chunk(chunk, "k8v8gall").nbytes
    assert 2 * small < chunk.nbytes, "float32 KV"
    choice = CanonicalEncoding("auto", 2 * chunk.nbytes)
    found = [choice.encoded(chunk).encoding for _ in range(14)]
    most = 2 * chunk.nbytes // small
    assert found == [None] * 2 + ["k8v8gall"] * min(12, most) + ["k5v5gall"] * max(0, 12 - most)
    assert choice.kept[None] == 2 * chunk.nbytes
    assert choice.kept["k8v8gall"] <= 2 * chunk.nbytes
    assert CanonicalEncoding("auto", 0).encoded(chunk).encoding == "k5v5gall"
    assert CanonicalEncoding(kvp.core.KVEncoding(3, 2)).words == ("k3v2g32", None)
    assert CanonicalEncoding().encoded(chunk) is chunk
    for wrong in ("k0v1", "automatic", "int8"):
        with pytest.raises(InputError, match="encoding"):
            CanonicalEncoding(wrong)


def test_stored_prefills_are_never_encoded():
    store, (chunk, _) = MemoryStore(), chunk_of(1)
    prefills = StoredPrefills(store, chunk.backbone, jnp.float32)
    front = "0" * 32
    prefill = kvp.Chunk(**{**_fields(chunk, chunk), "lead": prefills.lead(front)})
    prefills.put(prefill, front, {})
    assert prefills.contains("c1", front)
    for name, value in prefills.get("c1", front).kv.items():
        np.testing.assert_array_equal(value, chunk.kv[name])
    store.chunks.clear()
    MemoryStore.put(store, kvp.encode_chunk(prefill, "k4v4"))
    assert prefills.get("c1", front) is None


def test_a_canonical_of_another_content_is_refused_in_any_encoding():
    executor, (chunk, _), (other, _) = executor_of(), chunk_of(1), chunk_of(2)
    executor.provide("c1", chunk=kvp.encode_chunk(chunk, WORD))
    entry = Entry("c1", other.content, chunk.length, chunk.span)
    with pytest.raises(PatchMismatchError, match="content"):
        executor.run(*window_of(executor).append(entry, "bare", fetched=True))


@pytest.mark.slow
def test_nothing_compiles_for_encoded_canonicals_after_a_warm_up():
    store, (first, own) = MemoryStore(), chunk_of(0)
    chunks = [chunk_of(seed, length)[0] for seed, length in ((1, 7), (2, 11), (3, 16))]
    for chunk in chunks:
        store.put(kvp.encode_chunk(chunk, "k8v8"))
    executor = executor_of(store, encodings=("k8v8", None))
    executor.warm_up([7, 16], keys=64)
    executor.provide("c0", tokens=own)
    window = run(executor, window_of(executor).append(Entry.of(first)))
    before = programs.write_piece._cache_size()
    for chunk in chunks:
        window = run(executor, window.append(Entry.of(chunk), "bare"))
    assert programs.write_piece._cache_size() == before
