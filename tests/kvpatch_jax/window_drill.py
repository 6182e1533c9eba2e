"""A window driven through the executor and a naive one at once, operation by operation, everything compared."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from window_oracle import Naive, added, expect_equal, span_of, tiny, tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.window import Compact, Compose, Costs, Drop, Entry, PagedExecutor, Window

BAR = 2e-5
LENGTHS = (5, 7, 8)
_BACKBONES: dict[str, Any] = {}


def backbone_of(name: str) -> Any:
    """One backbone of a layout for all tests of a process."""
    if name not in _BACKBONES:
        _BACKBONES[name] = tiny(name)
    return _BACKBONES[name]


def canonical(backbone: Any, id: str, tokens: Tokens) -> kvp.Chunk:
    """A chunk of tokens prefilled alone."""
    kv = {name: np.asarray(value)[:, 0] for name, value in backbone.prefill(tokens).kv.items()}
    local = np.asarray(tokens.positions)[0]
    return kvp.Chunk(kv, local, span_of(tokens), len(local), id, backbone.layout, backbone.fingerprint)


class Drill:
    """One loop's windows, by branch; pieces are called c0, c1, …"""

    def __init__(self, name: str, pages: int = 48, page_size: int = 8, **options: Any):
        self.backbone = backbone_of(name)
        self.paged = PagedExecutor(self.backbone, pages, page_size, jnp.float32, **options)
        window = Window.empty(Costs.of(self.backbone, jnp.float32))
        self.windows, self.naive = {"": window}, {"": Naive(self.backbone)}
        self.tokens: dict[str, Tokens] = {}
        self.chunks: dict[str, kvp.Chunk] = {}
        self.branch = ""
        self.bar = BAR

    @property
    def window(self) -> Window:
        return self.windows[self.branch]

    @property
    def model(self) -> Naive:
        return self.naive[self.branch]

    def make(self, id: str) -> Entry:
        """An entry whose tokens and canonical the executor has."""
        if id not in self.tokens:
            seed = int(id[1:])
            self.tokens[id] = tokens_of(self.backbone, seed, LENGTHS[seed % len(LENGTHS)])
            self.chunks[id] = canonical(self.backbone, id, self.tokens[id])
            self.paged.provide(id, tokens=self.tokens[id], chunk=self.chunks[id])
        return Entry.of(self.chunks[id], order_free=True)

    def do(self, changed: tuple[Window, tuple[Any, ...]], naive: Naive | None = None) -> None:
        """Runs edits; the costs that the ledger counts must be those that the edits state."""
        window, edits = changed
        ledger = self.paged.run(window, edits)
        for kind in {type(edit) for edit in edits} - {Drop, Compact, Compose}:
            stated, tally = [edit for edit in edits if isinstance(edit, kind)], ledger.of(kind.__name__)
            assert tally.bytes == sum(edit.bytes for edit in stated), (kind, ledger)
            assert tally.flops == sum(edit.flops for edit in stated), (kind, ledger)
        # What was composed before need not be composed again.
        stated, tally = [edit for edit in edits if isinstance(edit, Compose)], ledger.of("transition")
        assert tally.bytes <= sum(edit.bytes for edit in stated)
        assert tally.flops <= sum(edit.flops for edit in stated)
        self.windows[window.branch] = window
        if naive is not None:
            self.naive[window.branch] = naive
        self.compare()

    def compare(self) -> None:
        """The branch at hand against the naive window, and the books against the slots."""
        expect_equal(self.paged, self.window, self.model, self.bar)
        books = self.paged.books
        assert (books.owners() == books.allocator.counts).all()
        assert set(books.branches) == {name for name, window in self.windows.items() if window.pieces}

    # ------------------------------------------------------------------------------------------ operations

    def append(self, id: str) -> None:
        changed = self.window.append(self.make(id))
        self.model.place(id, self.tokens[id], len(self.model.parts))
        self.do(changed)

    def insert(self, id: str, before: str) -> None:
        index, changed = self.window.index(before), self.window.insert(self.make(id), before)
        self.model.place(id, self.tokens[id], index)
        self.do(changed)

    def evict(self, *ids: str) -> None:
        changed = self.window.evict(*ids)
        self.model.remove(*ids)
        self.do(changed)

    def slide(self, keep: int) -> None:
        changed = self.window.slide(keep)
        kept = {piece.entry.id for piece in changed[0].pieces}
        self.model.remove(*(part.id for part in self.model.parts if part.id not in kept))
        self.do(changed)

    def patch(self, id: str, rank: int = 4, base: str = "canonical") -> kvp.Patch:
        """A patch of a piece behind the pieces in front of where it is, or at the end."""
        ids = [part.id for part in self.model.parts]
        index = ids.index(id) if id in ids else len(ids)
        there = id if id in ids else None
        start = sum(part.span for part in self.model.parts[:index])
        conditioned = self.model.run(self.tokens[id], start, index).kv
        kv = {name: np.asarray(value)[:, 0] for name, value in conditioned.items()}
        made = kvp.form_patch(self.chunks[id], kv, rank, self.window.target(there))
        self.paged.provide(id, patch=made)
        return made

    def recall(self, id: str, how: str) -> None:
        index = len(self.model.parts)
        if how == "prefill":
            changed = self.window.recall(id, "prefill")
            self.model.place(id, self.tokens[id], index)
        elif how == "bare":
            changed = self.window.recall(id, "bare", fetched=True)
            self.model.place(id, self.tokens[id], index, self._bare(id))
        else:
            made = self.patch(id)
            changed = self.window.recall(id, "patch", made, fetched=True)
            self.model.place(id, self.tokens[id], index, added(self.chunks[id], made))
        self.do(changed)

    def replace(self, id: str, other: str) -> None:
        index, changed = self.window.index(id), self.window.replace(id, self.make(other))
        self.model.remove(id)
        self.model.place(other, self.tokens[other], index)
        self.do(changed)

    def reorder(self, order: list[str]) -> None:
        changed = self.window.reorder(order)
        places = sorted(self.window.index(id) for id in order)
        parts = list(self.model.parts)
        for place, id in zip(places, order, strict=True):
            parts[place] = self.model.find(id)
        self.model.parts = parts
        self.model.close()
        self.do(changed)

    def bare(self, id: str) -> None:
        changed = self.window.bare(id)
        if changed[1]:
            part = self.model.find(id)
            part.kv = self._bare(id)
            self.do(changed)

    def patch_in_place(self, id: str) -> None:
        """Serves a piece by a patch from now on."""
        made = self.patch(id)
        changed = self.window.condition(id, made, fetched=True)
        part = self.model.find(id)
        part.kv = added(self.chunks[id], made)
        self.do(changed)

    def recompute(self, id: str, start_layer: int = 0) -> None:
        tokens, part, index = self.tokens[id], self.model.find(id), self.window.index(id)
        if start_layer:
            hidden = {start_layer: self.backbone.prefill(tokens, hidden_at=(start_layer,)).hidden[start_layer]}
            self.paged.provide(id, hidden=hidden)
            tokens = tokens._replace(embeddings=hidden[start_layer])
        context = self.model.context(index)
        out = self.backbone.prefill(tokens.shift(part.start), context, start_layer=start_layer)
        changed = self.window.recompute(id, start_layer)
        own = {name: np.asarray(value) for name, value in out.kv.items()}
        # What each channel's arrays hold of the layers below stays.
        part.kv = {name: np.concatenate([kv[: len(kv) - len(own[name])], own[name]]) for name, kv in part.kv.items()}
        self.do(changed)

    def fork(self, name: str) -> None:
        changed = self.window.fork(name)
        naive = self.model.copy()
        self.branch = changed[0].branch
        self.windows[self.branch], self.naive[self.branch] = changed[0], naive
        self.do(changed, naive)

    def abandon(self) -> None:
        """Lets go of the branch at hand."""
        self.paged.release(self.branch)
        del self.windows[self.branch], self.naive[self.branch]
        self.branch = self.branch.rpartition("/")[0]
        self.compare()

    def compact(self) -> None:
        self.do(self.window.compact())

    def ask(self, seed: int = 99) -> None:
        question = tokens_of(self.backbone, seed, 7)
        expected = self.model.run(question, self.window.next_start).logits
        logits = self.paged.prefill(self.window, question).logits
        assert np.abs(np.asarray(logits - expected)).max() <= self.bar * np.abs(np.asarray(expected)).max()

    def _bare(self, id: str) -> dict[str, np.ndarray]:
        return {name: np.asarray(value)[:, None] for name, value in self.chunks[id].kv.items()}
