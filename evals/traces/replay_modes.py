"""Modes of serving a trace's windows: whole prompts, prompts behind a prefix cache, and our windows.

Every mode answers the same questions about the same pieces. Its forwards, FLOPs and bytes are those of answering.
Patches are formed in the background by `ReplayPatches`, whose forwards are counted apart.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.window import (
    KEEP,
    PREFILL,
    Costs,
    Edits,
    Entry,
    PagedExecutor,
    PatchNote,
    PlacedPiece,
    Prefill,
    Recompute,
    ServingChoice,
    Window,
    arrange,
)
from models import ModelBackbone

from ..arms.reused_page import cut
from ..measure.contexts import HostKV, joined, on_host
from ..oracles import HostExecutor
from .cached_prefix import computed_behind
from .held_prompts import HeldPrompt, HoldingRule
from .prefix_cache import PrefixCache, canonical_of, length_of, span
from .window_tracker import Moment, TraceConfig, TraceContents, TracedClose, TracedFork, TracedQuestion

PAGE = 16
PAGES = 512
Policy = Literal["prefill", "patch", "blind"]


class ReplayStep(NamedTuple):
    """Answer to one question, with its forwards, its FLOPs, the bytes of KV read and written, and tokens computed.

    `own` are the logits of a re-prefill of what the mode itself showed, where that is not the trace's window.
    """

    logits: Float[np.ndarray, " V"]
    forwards: int
    flops: int
    bytes: int
    tokens: int
    own: Float[np.ndarray, " V"] | None = None


# -------------------------------------------------------------------------------------------------------- prompts


def host_prompt(pieces: Sequence[tuple[str, Tokens]]) -> tuple[list[tuple[str, int]], Tokens]:
    """Joins named pieces on the host, from position 0 on: what identifies each token, and all tokens."""
    names, placed, start = list[tuple[str, int]](), list[Tokens](), 0
    for name, tokens in pieces:
        names += [(name, index) for index in range(length_of(tokens))]
        placed.append(on_host(tokens).shift(start))
        start += span(tokens)
    return names, joined(placed)


class PromptReplay:
    """Replay by prefilling every question's whole prompt."""

    def __init__(self, backbone: ModelBackbone, contents: TraceContents):
        """Starts without any history."""
        self.backbone, self.contents = backbone, contents
        self.costs = Costs.of(backbone, np.float32)

    def see(self, moment: Moment) -> ReplayStep | None:
        """Answers a question. Forks and ends cost nothing."""
        return self.ask(moment) if isinstance(moment, TracedQuestion) else None

    def ask(self, question: TracedQuestion) -> ReplayStep:
        """Prefills the whole prompt."""
        keys, prompt = self.prompt(question)
        logits, _, _ = computed_behind(self.backbone, prompt, None)
        return self.step(logits, len(keys), 0)

    def prompt(self, question: TracedQuestion) -> tuple[list[tuple[str, int]], Tokens]:
        """Returns what identifies each token of a prompt, and the tokens at their positions."""
        shown = self.shown(question)
        pieces = [(entry.content or "", self.contents.pieces[entry.content or ""]) for entry in shown]
        return host_prompt([*pieces, (f"question {question.text}", self.contents.questions[question.text])])

    def shown(self, question: TracedQuestion) -> Sequence[Entry]:
        """Returns the pieces of a prompt: those of the trace's window."""
        return question.pieces

    def step(self, logits: Float[np.ndarray, " V"], tokens: int, preceding: int) -> ReplayStep:
        """Returns the answer of one forward with one token's logits."""
        cost = self.costs.prefill(tokens, preceding, logits=1)
        return ReplayStep(logits, 1, cost["flops"], cost["bytes"], tokens)


class CachedPrompt(NamedTuple):
    """A prompt that was computed: keys of its tokens, and its KV, engine frame."""

    keys: list[tuple[str, int]]
    kv: HostKV


class PrefixReplay(PromptReplay):
    """Replay behind an engine's prefix cache without eviction: the longest prefix of any prompt, in blocks."""

    def __init__(self, backbone: ModelBackbone, contents: TraceContents, block: int = PAGE):
        """Starts with an empty cache."""
        super().__init__(backbone, contents)
        self.cache = PrefixCache(block)
        self.prompts: list[CachedPrompt] = []

    def ask(self, question: TracedQuestion) -> ReplayStep:
        """Prefills what no earlier prompt began with."""
        keys, prompt = self.prompt(question)
        hit, before = self.cache.hit(keys), None
        if hit:
            # The latest first: it is where most of a prompt's beginning is found.
            cached = next(earlier for earlier in reversed(self.prompts) if earlier.keys[:hit] == keys[:hit])
            before = cut(cached.kv, slice(hit))
        logits, _, kv = computed_behind(self.backbone, prompt, before)
        self.prompts.append(CachedPrompt(keys, kv))
        return self.step(logits, len(keys) - hit, hit)


class HeldPrompts:
    """The prompt of each session under a rule, followed moment by moment."""

    def __init__(self, rule: HoldingRule):
        """Starts without sessions."""
        self.rule = rule
        self._sessions: dict[str, HeldPrompt] = {}

    def see(self, moment: Moment) -> None:
        """Follows forks and ends."""
        if isinstance(moment, TracedFork):
            parent = self._sessions.get(moment.session, HeldPrompt(self.rule))
            parent.show(moment.pieces)
            self._sessions[moment.branch] = parent.branch()
        elif isinstance(moment, TracedClose):
            self._sessions.pop(moment.session, None)

    def show(self, session: str, wanted: Sequence[Entry]) -> tuple[Entry, ...]:
        """Returns what a session shows for a window's pieces."""
        return self._sessions.setdefault(session, HeldPrompt(self.rule)).show(wanted)


class HeldReplay(PrefixReplay):
    """Replay behind a prefix cache by an agent that lets pieces leave under a rule: exact for what it shows."""

    def __init__(
        self, backbone: ModelBackbone, contents: TraceContents, rule: HoldingRule, block: int = PAGE, every: int = 1
    ):
        """Starts with an empty cache and without sessions. Compares each `every`-th answer with its own prompt's."""
        super().__init__(backbone, contents, block)
        self._every = every
        self.held = HeldPrompts(rule)
        self._shown: Sequence[Entry] = ()

    def see(self, moment: Moment) -> ReplayStep | None:
        """Answers a question; follows forks and ends, which cost nothing."""
        self.held.see(moment)
        return super().see(moment)

    def ask(self, question: TracedQuestion) -> ReplayStep:
        """Prefills what no earlier prompt began with, and off the count all that is shown, to compare with."""
        self._shown = self.held.show(question.session, question.pieces)
        step = super().ask(question)
        if question.number % self._every:
            return step
        return step._replace(own=computed_behind(self.backbone, self.prompt(question)[1], None)[0])

    def shown(self, question: TracedQuestion) -> Sequence[Entry]:
        """Returns the pieces of a prompt: those of the window, and what has not left yet."""
        return self._shown


# -------------------------------------------------------------------------------------------------------- patches


class ReplayPatches:
    """Canonicals and patches, and the prefills that patches are formed of: what a store would hold.

    Attributes:
      forwards, flops: of canonicals, in the background.
      patches: by chunk, antecedent and rank.
    """

    def __init__(self, backbone: ModelBackbone, contents: TraceContents):
        """Starts empty."""
        self.backbone, self.contents = backbone, contents
        self.forwards = self.flops = 0
        self._prefills: dict[tuple[str, str], tuple[Antecedent, Mapping[str, np.ndarray]]] = {}
        self._chunks: dict[tuple[str, str], kvp.Chunk] = {}
        self.patches: dict[tuple[str, str, int], kvp.Patch] = {}

    def __call__(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Records a prefill, as `PatchFormer` does."""
        piece = window.piece(id)
        behind_own_front = piece.state.kind == "conditioned" and piece.state.behind == piece.front
        if piece.entry.kind != "chunk" or not behind_own_front:
            return

        antecedent = window.antecedent(id)
        rows = {name: np.asarray(value)[:, 0, :length] for name, value in kv.items()}
        self._prefills[_prefill_key(piece.entry, antecedent)] = antecedent, rows
        self.chunk(piece.entry, None if antecedent.members else rows)

    def has_chunk(self, entry: Entry) -> bool:
        """Returns whether it has a canonical."""
        return (entry.id, entry.content or "") in self._chunks

    def chunk(self, entry: Entry, kv: Mapping[str, np.ndarray] | None = None) -> kvp.Chunk:
        """Returns a canonical: of `kv`, a prefill without anything in front, or of one more forward."""
        key = entry.id, entry.content or ""
        if key not in self._chunks:
            tokens = self.contents.pieces[key[1]]
            if kv is None:
                self.forwards += 1
                self.flops += self.backbone.forward_costs.flops(entry.tokens)
                canonical = canonical_of(self.backbone, tokens, entry.id)
                kv = {name: np.asarray(value) for name, value in canonical.kv.items()}

            self._chunks[key] = kvp.Chunk(
                kv=dict(kv),
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
        """Returns the patch of a chunk behind exactly this antecedent; None if no prefill happened there."""
        key = _prefill_key(entry, target)
        if key not in self._prefills or not target.members:
            return None
        if (*key, rank) not in self.patches:
            antecedent, kv = self._prefills[key]
            self.patches[*key, rank] = kvp.form_patch(self.chunk(entry), kv, rank, antecedent)
        return self.patches[*key, rank]

    def sizes(self, rank: int) -> tuple[int, int, int]:
        """Returns the bytes of all canonicals, the bytes of the patches of a rank, and how many these are."""
        of_rank = [patch for key, patch in self.patches.items() if key[2] == rank]
        canonicals = sum(chunk.nbytes for chunk in self._chunks.values())
        return canonicals, sum(patch.nbytes for patch in of_rank), len(of_rank)


def _prefill_key(entry: Entry, antecedent: Antecedent) -> tuple[str, str]:
    return f"{entry.id} {entry.content}", antecedent.digest


# -------------------------------------------------------------------------------------------------------- windows


def prefilled(window: Window, edits: Edits) -> int:
    """Counts the tokens of a window's pieces that edits compute."""
    computed = [edit.id for edit in edits if isinstance(edit, Prefill | Recompute)]
    return sum(window.piece(id).entry.tokens for id in computed)


@dataclasses.dataclass(frozen=True)
class WindowPolicy:
    """How windows serve pieces that come in, return or move.

    * `prefill`: by a forward behind the pieces in front; no patch, no canonical.
    * `patch`: by a stored patch if one was formed behind exactly the same, else by a forward, which leaves one. Windows
      that forget are served all by patches or all by forwards, because patches are formed behind exact pieces.
    * `blind`: by its canonical alone.

    Attributes:
      name: one of these.
      patches: where patches and canonicals come from.
      rank: of the patches.
      learn: whether prefills add to `patches`.
      host: whether to run on plain arrays, the reference.
    """

    name: Policy
    patches: ReplayPatches | None = None
    rank: int = 0
    learn: bool = True
    host: bool = False


class WindowReplay:
    """Replay by our windows: pieces that stay keep their KV, and their keys rotate.

    Attributes:
      hits, misses: pieces behind others that a patch served, and that lacked one.
    """

    def __init__(
        self,
        backbone: ModelBackbone,
        contents: TraceContents,
        config: TraceConfig,
        policy: WindowPolicy,
    ):
        """Starts without windows."""
        self.backbone, self.contents, self.config, self.policy = backbone, contents, config, policy
        self.costs = Costs.of(backbone, np.float32)
        self.executor = HostExecutor(backbone) if policy.host else PagedExecutor(backbone, PAGES, PAGE, "float32")
        if policy.patches is not None and policy.learn:
            self.executor.formers.append(policy.patches)
        self.windows: dict[str, Window] = {}
        self.trees = 0
        self.hits = self.misses = 0

    def see(self, moment: Moment) -> ReplayStep | None:
        """Answers a question, brings a window up to date and forks it, or releases it."""
        before = self.executor.ledger
        if isinstance(moment, TracedQuestion):
            window, edits = self._served(moment.session, moment.pieces)
            question = self.contents.questions[moment.text]
            logits = np.asarray(self.executor.ask(window, edits, question))[0, -1]
            self.windows[moment.session] = window
            return self._step(logits, before, prefilled(window, edits) + length_of(question))

        if isinstance(moment, TracedFork):
            window, edits = self._served(moment.session, moment.pieces)
            self.executor.run(window, edits)
            self.windows[moment.session], tokens = window, prefilled(window, edits)
            branch, edits = window.fork(moment.branch.replace("/", "-"))
            self.executor.run(branch, edits)
            self.windows[moment.branch] = branch
            return self._step(np.zeros(0, np.float32), before, tokens)

        assert isinstance(moment, TracedClose)
        closed = self.windows.pop(moment.session, None)
        if closed is not None and isinstance(self.executor, PagedExecutor):
            self.executor.release(closed.branch)
        return None

    def _step(self, logits: np.ndarray, before: Any, tokens: int) -> ReplayStep:
        spent = self.executor.ledger - before
        # A forward over a piece counts as two launches: itself, and the one that writes its KV.
        forwards = (spent.of("Prefill").launches + spent.of("Recompute").launches) // 2
        return ReplayStep(
            logits, forwards + spent.of("question").launches, spent.total.flops, spent.total.bytes, tokens
        )

    def _served(self, session: str, wanted: Sequence[Entry]) -> tuple[Window, Edits]:
        """Returns a session's window with these pieces, and the edits that lead there."""
        window = self.windows.get(session)
        if window is None:
            self.trees += 1
            config, branch = self.config, f"replay {self.trees}"
            window = Window.empty(self.costs, promise=config.promise, lead=config.lead, branch=branch)

        for entry in wanted:
            tokens = self.contents.pieces[entry.content or ""]
            self.executor.provide(entry.id, tokens=tokens, content=entry.content)

        arranged = arrange(window, wanted)
        by_patches = self._may_patch(wanted)
        choices = []
        for piece, kept in zip(arranged.window.pieces, arranged.kept, strict=True):
            stays = kept and self._may_stay(arranged.window, piece, by_patches)
            choices.append(KEEP if stays else self._choice(arranged.window, piece.entry, by_patches))
        return arranged.serve(choices)

    def _may_patch(self, wanted: Sequence[Entry]) -> bool:
        """Returns whether patches may be used. In a window that forgets, every piece behind the first must have one."""
        patches = self.policy.patches
        if self.policy.name != "patch" or patches is None or self.config.promise == "remember":
            return self.policy.name == "patch"

        front: list[Member] = []
        for entry in wanted:
            if front and patches.patch(entry, Antecedent(tuple(front)), self.policy.rank) is None:
                return False
            front.append(Member(entry.id, entry.content))

        return True

    def _may_stay(self, window: Window, piece: PlacedPiece, by_patches: bool) -> bool:
        """Returns whether a piece that is in the window may stay as it is."""
        if piece.fidelity == "exact":
            return True
        index = window.index(piece.id)
        if self.config.promise == "remember":  # if it has seen all that precedes it
            return index == 0 or window.pieces[index - 1].latest <= piece.born
        if self.policy.name == "blind" or (by_patches and not index):
            return piece.state.kind == "bare"
        return by_patches and piece.state.kind == "patched" and piece.state.behind == piece.target

    def _choice(self, window: Window, entry: Entry, by_patches: bool) -> ServingChoice:
        """Returns how the policy serves a piece that comes in, or that cannot stay as it is."""
        patches, target = self.policy.patches, window.target(entry.id)
        if patches is None or entry.kind == "text":
            return PREFILL

        # With nothing in front the canonical is what a prefill gives.
        leads = by_patches and self.config.promise == "forget" and not target.members and patches.has_chunk(entry)
        if self.policy.name == "blind" or leads:
            self.executor.provide(entry.id, chunk=patches.chunk(entry))
            return ServingChoice("bare")

        patch = patches.patch(entry, target, self.policy.rank) if by_patches else None
        self.hits += patch is not None
        self.misses += patch is None and bool(target.members)
        if patch is None:
            return PREFILL
        self.executor.provide(entry.id, chunk=patches.chunk(entry), patch=patch)
        return ServingChoice("patch", PatchNote.of(patch))
