"""The pool holds for each piece the KV that plain forwards over its history, its canonical, patch or store give."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import BAR, Loop, distance, patched, same
from window_programs import Pair, Term

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import zero_padded
from kvpatch_jax.errors import InputError, PatchMismatchError, ShapeError
from kvpatch_jax.window import BARE, Entry, Executor, PatchNote, Service, StoredPrefills
from tests.shared.memory_store import MemoryStore
from tests.shared.window_oracle import Naive, NaivePart, added, backbone_of, expect_equal, owners, span_of, tokens_of

NIGHTLY = pytest.mark.nightly
HYBRID_BAR = 1e-4
"""States are composed in another order of sums than a recurrence takes: 4.7e-5 over 100 programs of float32."""


class Definition:
    """The KV of terms: each prefill is one forward behind the dense KV of the terms in front of it."""

    def __init__(self, backbone: Any):
        self.backbone = backbone
        self.tokens: dict[str, Tokens] = {}
        self.patches: dict[str, kvp.Patch] = {}
        self.canonicals: dict[str, kvp.Chunk] = {}
        self._kv: dict[Term, dict[str, np.ndarray]] = {}

    def tokens_of(self, content: str) -> Tokens:
        """Returns the tokens of an image; of every third content, of a text of as many tokens."""
        if content not in self.tokens:
            seed = int(content.split()[1])
            pixels = np.random.default_rng(seed).integers(0, 255, (28, 56, 3), np.uint8)
            image = self.backbone.embed(**self.backbone.prepare([pixels]))
            # Few programs compile where all lengths are one.
            length = image.embeddings.shape[1]
            self.tokens[content] = tokens_of(self.backbone, seed, length) if seed % 3 == 1 else image
        return self.tokens[content]

    def sequence(self, line: list[tuple[str, Term]]) -> Naive:
        """Returns contents in the KV of their terms, right behind one another."""
        sequence = Naive(self.backbone)
        sequence.parts = [NaivePart("", self.tokens_of(content), 0, self.kv(term)) for content, term in line]
        sequence.close()
        return sequence

    def kv(self, term: Term) -> dict[str, np.ndarray]:
        """Computes the phase-free KV of a term, [L,1,T,K,H]."""
        if term not in self._kv:
            if term.kind in ("prefill", "bare"):
                front = self.sequence([(other.content, other) for other in term.front])
                start = sum(part.span for part in front.parts)
                kv: Mapping[str, Any] = front.run(self.tokens_of(term.content), start).kv
            elif term.kind == "restored":
                assert term.base is not None
                kv = self.kv(term.base)
            else:
                assert term.base is not None
                assert term.patch is not None
                kv = added(self.chunk(term.base, ""), self.patches[term.patch])
            self._kv[term] = {name: np.asarray(value) for name, value in kv.items()}
        return self._kv[term]

    def chunk(self, term: Term, id: str, **fields: Any) -> kvp.Chunk:
        """Returns the KV of a term as a chunk."""
        tokens, backbone = self.tokens_of(term.content), self.backbone
        kv = {name: value[:, 0] for name, value in self.kv(term).items()}
        local = np.asarray(tokens.positions)[0]
        span, fingerprint = span_of(tokens), backbone.fingerprint
        return kvp.Chunk(
            kv, local, span, len(local), id or "chunk", backbone.layout, fingerprint, content=term.content, **fields
        )


class ArrayPair(Pair):
    """A window, its symbols, and an executor that has run it."""

    def __init__(self, name: str, seed: int):
        backbone = backbone_of(name)
        super().__init__(seed, backbone, most=4)
        self.backbone, self.definition, self.store = backbone, Definition(backbone), MemoryStore()
        self.prefills = StoredPrefills(self.store, backbone.fingerprint, jnp.float32)
        self.executor = Executor(backbone, 64, 8, jnp.float32, store=self.store)

    def entry(self) -> Entry:
        abstract = super().entry()
        tokens = self.definition.tokens_of(abstract.key)
        count, text = int(np.asarray(tokens.positions).shape[1]), abstract.kind == "text"
        entry = Entry(abstract.id, abstract.content, count, span_of(tokens), abstract.kind, order_free=not text)
        self.entries[entry.id] = entry
        chunk = self.definition.chunk(self.terms("bare", entry.key), entry.id)
        self.executor.provide(entry.id, tokens=tokens, chunk=chunk, content=entry.content)
        return entry

    def patch(self, entry: Entry, index: int, before: str | None, old: bool) -> tuple[Service, tuple[str, Any], bool]:
        """Forms a patch of a piece where it is promised to be, of its canonical or of its KV in the window."""
        definition, target = self.definition, self.window.target(before)
        promised = self.terms("prefill", entry.key, self.symbols.promised(index))
        here = [piece.term for piece in self.symbols.pieces[:index]]
        term = self.symbols.pieces[index].term if old else None
        canonical = definition.chunk(self.terms("bare", entry.key), entry.id)
        conditioned = {name: value[:, 0] for name, value in definition.kv(promised).items()}
        removal = index > 0 and term is self.terms("prefill", entry.key, here) and self.random.random() < 0.5
        if removal:
            assert term is not None
            behind = self.window.antecedent(before)
            base = {name: value[:, 0] for name, value in definition.kv(term).items()}
            patch = kvp.removal_patch(canonical, conditioned, base, 3, target, behind)
        else:
            patch = kvp.form_patch(canonical, conditioned, 3, target)
        digest = self.executor.provide(entry.id, patch=patch)
        assert digest is not None
        definition.patches[digest] = patch
        return Service("patch", PatchNote.of(patch)), ("patched", digest), removal

    def run(self) -> None:
        """Brings the window into the pool, and compares every piece, and what a question reads."""
        for piece, symbol in zip(self.window.pieces, self.symbols.pieces, strict=True):
            if piece.method == "restored":
                stored, source = symbol.term.base or symbol.term, piece.source or piece.made
                self.store.put(self.definition.chunk(stored, piece.id, lead=self.prefills.lead(source)))
        self.executor.run(self.window)
        assert (owners(self.executor) == self.executor.slots.counts).all()
        expected = self.definition.sequence([(piece.content, piece.term) for piece in self.symbols.pieces])
        expect_equal(self.executor, self.window, expected, HYBRID_BAR if self.executor.layout.parts else BAR)

    def ask(self) -> None:
        question = tokens_of(self.backbone, 99, 7)
        expected = self.definition.sequence([(piece.content, piece.term) for piece in self.symbols.pieces])
        logits = np.asarray(expected.run(question, self.window.next_start).logits)
        found = np.asarray(self.executor.prefill(self.window, question).logits)
        assert np.abs(found - logits).max() <= BAR * np.abs(logits).max()


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *(("mrope", (3, 7, 8, 14, 18, 26, 29, 37)), ("gemma3", (18,)), ("hybrid", (18,))),
        *(pytest.param(name, range(100, 300), marks=NIGHTLY) for name in ("mrope", "kimi", "deepstack", "hybrid")),
    ],
)
def test_random_programs_give_the_kv_that_their_terms_say(name: str, seeds: Iterable[int]):
    """Compared after every step; at the end a question is asked, and every slot is given back."""
    methods = set[str]()
    for seed in seeds:
        pair, log = ArrayPair(name, seed), []
        try:
            for _ in range(11):
                log.append(pair.step())
                pair.check()
                pair.run()
                methods |= {piece.method for piece in pair.window.pieces}
            pair.ask()
            for window, _ in pair.branches:
                pair.executor.release(window.branch)
            assert pair.executor.slots.counts.sum() == 0
        except BaseException as error:
            error.add_note(f"{name}, seed {seed}: {', '.join(log)}\n{pair.window}")
            raise
    assert methods >= {"prefill", "bare", "patch", "restored"}


def test_a_hundred_rotations_in_bfloat16_are_one():
    """All begin at the phase-free source, so that none rounds what another has rounded."""
    loop, random = Loop("mrope", dtype=jnp.bfloat16), np.random.default_rng(0)
    loop.append("c0", "c1", "c2", "c3")
    first, rows = loop.window, loop.rows()
    other = Loop("mrope", dtype=jnp.bfloat16)
    other.append("c0", "c1", "c2", "c3")
    rotations = 0
    while rotations < 100:
        step = loop.run(loop.window.reorder([f"c{index}" for index in random.permutation([1, 2, 3])]))
        assert {action.kind for action in step} <= {"rotate"}
        rotations += len(step)
    other.run(other.window.reorder(loop.window.ids[1:]))
    assert same(loop.rows(), other.rows())
    loop.run(loop.window.reorder(["c1", "c2", "c3"]))
    assert (loop.window, same(loop.rows(), rows)) == (first, True)


def test_answers_behind_a_window_are_those_behind_its_prompt():
    """Logits, and tokens one by one too; those of a longer input are cut to its length."""
    loop = Loop()
    loop.append("c0", "c1", "c2", "c3")
    loop.run(loop.window.evict("c3", "c1"))
    assert [loop.window.fidelity(id) for id in loop.window.ids] == ["exact", "survivor"]
    loop.run(loop.window.recall("c1", before="c2"))
    assert {loop.window.fidelity(id) for id in loop.window.ids} == {"exact"}
    prompt = loop.prompt("c0", "c1", "c2", question=True)
    logits = np.asarray(loop.backbone.prefill(prompt).logits)
    assert np.abs(loop.logits() - logits).max() <= BAR * np.abs(logits).max()
    expected = loop.backbone.generate(prompt, 5).tolist()
    assert loop.executor.generate(loop.window, loop.question(), 5).tolist() == expected
    streamed = [piece.ids.tolist() for piece in loop.executor.stream(loop.window, loop.question(), 5)]
    assert np.array(streamed).T.tolist() == expected
    long = loop.question(6)
    cut = loop.executor.generate(loop.window, long, 5, 3)
    assert cut.tolist() == loop.executor.generate(loop.window, long.take(0, 3), 5).tolist()
    every = loop.executor.prefill(loop.window, long, 3, logits="all").logits
    last = loop.executor.prefill(loop.window, long, 3).logits
    assert np.abs(np.asarray(every[:, 2] - last[:, 0])).max() <= BAR * np.abs(np.asarray(last)).max()


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
