"""The pool holds for each piece the KV that plain forwards over its history, or one prefill of the window, give."""
# pyright: reportArgumentType=false

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import BAR, Loop, owners, same
from window_programs import Pair, Term

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.window import Entry, Executor, PatchNote, Service, StoredPrefills
from tests.shared.memory_store import MemoryStore
from tests.shared.window_oracle import Naive, NaivePart, added, backbone_of, expect_equal, span_of, tokens_of

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
