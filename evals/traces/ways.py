"""Ways of serving a trace's windows: whole prompts, prompts behind a prefix cache, and windows of ours.

Each way answers the same questions over the same pieces. Forwards, FLOPs and bytes are those of answering; what patches
are formed of is kept behind the answer's back by a `Stock`, whose forwards are counted apart.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.patching import one_behind_the_other
from kvpatch_jax.window import (
    KEEP,
    PREFILL,
    Costs,
    Edits,
    Entry,
    PagedExecutor,
    PatchNote,
    PlacedPiece,
    ServingChoice,
    Window,
    arrange,
)
from models import ModelBackbone

from ..bench.window_loop import PrefixCache, canonical_of
from ..oracles import HostExecutor
from .tracking import Asked, Closed, Contents, Forked, Moment, Shape

PAGE = 16
Policy = Literal["prefill", "patch", "blind"]


class Taken(NamedTuple):
    """What one question took: logits, forwards, FLOPs and bytes of KV read and written."""

    logits: Float[np.ndarray, " V"]
    forwards: int
    flops: int
    bytes: int


class Prompts:
    """Prefills every question's whole prompt."""

    def __init__(self, backbone: ModelBackbone, contents: Contents):
        """Remembers nothing."""
        self.backbone, self.contents = backbone, contents
        self.costs = Costs.of(backbone, np.float32)

    def see(self, moment: Moment) -> Taken | None:
        """Answers what is asked; forks and ends cost nothing."""
        return self.ask(moment) if isinstance(moment, Asked) else None

    def ask(self, asked: Asked) -> Taken:
        """Runs the whole prompt."""
        named, prompt = self.prompt(asked)
        out = self.backbone.prefill(prompt)
        return Taken(np.asarray(out.logits)[0, -1], 1, *self.spent(len(named), 0))

    def prompt(self, asked: Asked) -> tuple[list[tuple[str, int]], Tokens]:
        """What tells the tokens of a prompt apart, and the tokens in their places."""
        parts, named, start = [], [], 0
        for entry in asked.pieces:
            tokens = self.contents.pieces[entry.content or ""]
            parts.append(tokens.shift(start))
            named += [(entry.content or "", place) for place in range(entry.tokens)]
            start += entry.span
        question = self.contents.questions[asked.text]
        parts.append(question.shift(start))
        named += [(f"question {asked.text}", place) for place in range(question.embeddings.shape[1])]
        return named, one_behind_the_other(parts)

    def spent(self, tokens: int, behind: int) -> tuple[int, int]:
        """FLOPs and bytes of a forward with one token's logits."""
        cost = self.costs.prefill(tokens, behind, logits=1)
        return cost["flops"], cost["bytes"]


class Prefixes(Prompts):
    """An engine's prefix cache that lets nothing go: the longest prefix of any earlier prompt, in blocks of 16."""

    def __init__(self, backbone: ModelBackbone, contents: Contents):
        """Holds nothing yet."""
        super().__init__(backbone, contents)
        self.cache = PrefixCache()
        self.kept: list[tuple[list[tuple[str, int]], Mapping[str, Array], np.ndarray]] = []

    def ask(self, asked: Asked) -> Taken:
        """Runs what no earlier prompt began with."""
        named, prompt = self.prompt(asked)
        hit, context = self.cache.hit(named), None
        if hit:
            front = next(each for each in self.kept if each[0][:hit] == named[:hit])
            kv = {name: value[:, :, :hit] for name, value in front[1].items()}
            context = kvp.to_engine(self.backbone.layout, kv, front[2][:, :hit], 0)
        out = self.backbone.prefill(prompt.take(hit, len(named)), context)
        kv = dict(out.kv)
        if hit:
            kv = {name: np.concatenate([front[1][name][:, :, :hit], value], 2) for name, value in kv.items()}
        self.kept.append((named, {name: np.asarray(value) for name, value in kv.items()}, np.asarray(prompt.positions)))
        return Taken(np.asarray(out.logits)[0, -1], 1, *self.spent(len(named) - hit, hit))


class Stock:
    """What prefills left that patches are formed of, and canonicals: what a store would hold.

    Attributes:
      forwards, flops: of canonicals, behind the answer's back. patches: by chunk, antecedent and rank.
    """

    def __init__(self, backbone: ModelBackbone, contents: Contents):
        """Holds nothing yet."""
        self.backbone, self.contents = backbone, contents
        self.forwards = self.flops = 0
        self._left: dict[tuple[str, str], tuple[Antecedent, Mapping[str, np.ndarray]]] = {}
        self._chunks: dict[tuple[str, str], kvp.Chunk] = {}
        self.patches: dict[tuple[str, str, int], kvp.Patch] = {}

    def __call__(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Takes a prefill down, as `Former` does."""
        piece = window.piece(id)
        seen = piece.state.kind == "conditioned" and piece.state.behind == piece.front
        if piece.entry.kind != "chunk" or not seen:
            return
        behind = window.antecedent(id)
        rows = {name: np.asarray(value)[:, 0, :length] for name, value in kv.items()}
        self._left[_key(piece.entry, behind)] = behind, rows
        self.chunk(piece.entry, None if behind.members else rows)

    def knows(self, entry: Entry) -> bool:
        """Whether it holds a canonical."""
        return (entry.id, entry.content or "") in self._chunks

    def chunk(self, entry: Entry, alone: Mapping[str, np.ndarray] | None = None) -> kvp.Chunk:
        """A canonical, of a prefill that had nothing in front, or of one forward more."""
        key = entry.id, entry.content or ""
        if key not in self._chunks:
            tokens = self.contents.pieces[key[1]]
            chunk = None
            if alone is None:
                self.forwards += 1
                self.flops += self.backbone.forward_costs.flops(entry.tokens)
                chunk = canonical_of(self.backbone, tokens, entry.id)
                alone = {name: np.asarray(value) for name, value in chunk.kv.items()}
            self._chunks[key] = kvp.Chunk(
                kv=dict(alone),
                local=np.asarray(tokens.positions)[0],
                span=entry.span,
                length=entry.tokens,
                id=entry.id,
                layout=self.backbone.layout,
                backbone=self.backbone.fingerprint,
                content=entry.content,
            )
        return self._chunks[key]

    def patch(self, entry: Entry, target: Antecedent, rank: int) -> kvp.Patch | None:
        """The patch of a chunk behind this very antecedent; None where no prefill was ever there."""
        key = _key(entry, target)
        if key not in self._left or not target.members:
            return None
        wanted = (*key, rank)
        if wanted not in self.patches:
            behind, kv = self._left[key]
            self.patches[wanted] = kvp.form_patch(self.chunk(entry), kv, rank, behind)
        return self.patches[wanted]

    def nbytes(self, rank: int) -> tuple[int, int, int]:
        """Bytes of the canonicals and of the patches of a rank that were served, and how many these are."""
        own = [patch for key, patch in self.patches.items() if key[2] == rank]
        return sum(chunk.nbytes for chunk in self._chunks.values()), sum(patch.nbytes for patch in own), len(own)


def _key(entry: Entry, behind: Antecedent) -> tuple[str, str]:
    return f"{entry.id} {entry.content}", behind.digest


class Windows:
    """Windows of ours: what stays keeps its KV and turns; what comes in, back or elsewhere is served by a policy.

    * `prefill`: by a forward behind what stands in front; no patch, no canonical.
    * `patch`: by a stored patch where one was formed behind the very same, else by a forward, which leaves one. Where
      windows forget, all of a window by patches or all by forwards: what patches are formed behind must be exact.
    * `blind`: by its canonical alone.
    """

    def __init__(
        self,
        backbone: ModelBackbone,
        contents: Contents,
        shape: Shape,
        policy: Policy,
        *,
        stock: Stock | None = None,
        rank: int = 0,
        learn: bool = True,
        host: bool = False,
        pages: int = 512,
    ):
        """No windows yet.

        Args:
          stock: what patches and canonicals come from. rank: of the patches. learn: whether prefills add to the stock.
          host: on plain arrays, the reference.
        """
        self.contents, self.shape, self.policy, self.stock, self.rank = contents, shape, policy, stock, rank
        self.costs = Costs.of(backbone, np.float32)
        self.executor = HostExecutor(backbone) if host else PagedExecutor(backbone, pages, PAGE, "float32")
        if stock is not None and learn:
            self.executor.formers.append(stock)
        self.windows: dict[str, Window] = {}
        self.trees = 0
        self.hits = self.misses = 0

    def see(self, moment: Moment) -> Taken | None:
        """Answers what is asked; brings what is forked up to date first."""
        before = self.executor.ledger
        if isinstance(moment, Asked):
            window, edits = self.served(moment.session, moment.pieces)
            question = self.contents.questions[moment.text]
            logits = np.asarray(self.executor.ask(window, edits, question))[0, -1]
            self.windows[moment.session] = window
            return self._taken(logits, before)
        if isinstance(moment, Forked):
            window, edits = self.served(moment.session, moment.pieces)
            self.executor.run(window, edits)
            self.windows[moment.session] = window
            branch, edits = window.fork(moment.branch.replace("/", "-"))
            self.executor.run(branch, edits)
            self.windows[moment.branch] = branch
            return self._taken(np.zeros(0, np.float32), before)
        self.close(moment)
        return None

    def close(self, moment: Closed) -> None:
        """Lets go of a session's window."""
        window = self.windows.pop(moment.session, None)
        if window is not None and isinstance(self.executor, PagedExecutor):
            self.executor.release(window.branch)

    def _taken(self, logits: np.ndarray, before: Any) -> Taken:
        done = self.executor.ledger - before
        runs = (done.of("Prefill").launches + done.of("Recompute").launches) // 2
        return Taken(logits, runs + done.of("question").launches, done.total.flops, done.total.bytes)

    # ---------------------------------------------------------------------------------------------- edits

    def served(self, session: str, wanted: Sequence[Entry]) -> tuple[Window, Edits]:
        """The session's window with these pieces, and the edits that lead there from what it holds."""
        window = self.windows.get(session)
        if window is None:
            self.trees += 1
            window = Window.empty(
                self.costs, promise=self.shape.promise, lead=self.shape.lead, branch=f"replay {self.trees}"
            )
        for entry in wanted:
            tokens = self.contents.pieces[entry.content or ""]
            self.executor.provide(entry.id, tokens=tokens, content=entry.content)
        arranged = arrange(window, wanted)
        stored = self._all_stored(wanted)
        services = []
        for piece, kept in zip(arranged.window.pieces, arranged.kept, strict=True):
            stays = kept and self._stays(arranged.window, piece, stored)
            services.append(KEEP if stays else self._service(arranged.window, piece.entry, stored))
        return arranged.serve(services)

    def _all_stored(self, wanted: Sequence[Entry]) -> bool:
        """Whether patches may be used: where windows forget, whether every piece behind the first has one."""
        if self.policy != "patch" or self.stock is None or self.shape.promise == "remember":
            return self.policy == "patch"
        front: list[Member] = []
        for entry in wanted:
            if front and self.stock.patch(entry, Antecedent(tuple(front)), self.rank) is None:
                return False
            front.append(Member(entry.id, entry.content))
        return True

    def _stays(self, window: Window, piece: PlacedPiece, stored: bool) -> bool:
        """Whether a piece that is there may stay as it is."""
        if piece.fidelity == "exact":
            return True
        index = window.index(piece.id)
        if self.shape.promise == "remember":  # it stays where it has seen all that stands in front of it
            return index == 0 or window.pieces[index - 1].latest <= piece.born
        if self.policy == "blind" or (stored and not index):
            return piece.state.kind == "bare"
        return stored and piece.state.kind == "patched" and piece.state.behind == window.target(piece.id).digest

    def _service(self, window: Window, entry: Entry, stored: bool) -> ServingChoice:
        """How the policy serves a piece that comes in, or that cannot stay as it is."""
        target = window.target(entry.id)
        if self.stock is None or entry.kind == "text":
            return PREFILL
        leading = stored and self.shape.promise == "forget" and not target.members and self.stock.knows(entry)
        if self.policy == "blind" or leading:
            self.executor.provide(entry.id, chunk=self.stock.chunk(entry))
            return ServingChoice("bare")
        patch = self.stock.patch(entry, target, self.rank) if stored else None
        self.hits += patch is not None
        self.misses += patch is None and bool(target.members)
        if patch is None:
            return PREFILL
        self.executor.provide(entry.id, chunk=self.stock.chunk(entry), patch=patch)
        return ServingChoice("patch", PatchNote.of(patch))


def log_softmax(logits: Float[np.ndarray, " V"]) -> np.ndarray:
    """Log-probabilities in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def divergence(reference: Float[np.ndarray, " V"], logits: Float[np.ndarray, " V"]) -> tuple[float, bool]:
    """KL(reference‖logits) in nats, and whether the best token is another."""
    true, own = log_softmax(reference), log_softmax(logits)
    return float((np.exp(true) * (true - own)).sum()), bool(reference.argmax() != logits.argmax())
