"""An agent's loop: images through a window that slides, one question each step, served by several arms.

* `re-prefill`: lead, window and question in one forward, each step.
* `prefix cache`: an engine's, in blocks of 16 tokens: the longest prefix that was computed before is not run again. Of
  a window that slides, that is the lead.
* `prefix hit`: what such a cache would cost if nothing in front had changed, an append-only step: one forward over
  image and question after a contiguous cache of the rest. No engine gets it here; it is the bar.
* `window`: ours, through `PagedExecutor`: survivors rotate, image and question run after them in one forward, and the
  image's KV is written into the pool.

Times are of steps with a full window; FLOPs are exact, from the backbone's own costs and the executor's ledger.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.patching import one_behind_the_other
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, PatchNote, Window, padded_tokens
from models import ModelBackbone

from ..compilation import Compilations
from .banded_mask import banded_mask, history
from .loop_workload import LoopWorkload, join_pieces, length_of, span
from .timing import timed

BLOCK = 16
"""Tokens of a block of the prefix cache."""
PAGE = 16
RANK = 32
"""Of the patches that images are recalled by."""
Logits = Float[np.ndarray, " V"]
Part = dict[str, Any]
"""What one part of the benchmark measured, ready for JSON."""


class LoopStep(NamedTuple):
    """One step of one arm: logits after the question, seconds on the clock, FLOPs."""

    logits: Logits
    seconds: float
    flops: int


# ------------------------------------------------------------------------------------------------------------ ours


class AgentWindow:
    """Our arm: a window of `size` images on a paged pool, from an empty pool.

    Attributes:
      steps: what each step took, ready for JSON.
      forwards: forwards run so far.
    """

    def __init__(self, workload: LoopWorkload, size: int):
        """Places the lead."""
        backbone, dtype = workload.backbone, workload.images[0].embeddings.dtype
        lead = 0 if workload.lead is None else length_of(workload.lead)
        pages = -(-lead // PAGE) + (size + 2) * -(-max(map(length_of, workload.images)) // PAGE)
        self.workload, self.size = workload, size
        self.executor = PagedExecutor(backbone, pages, PAGE, dtype)
        self.window = Window.empty(Costs.of(backbone, dtype), lead=int(workload.lead is not None))
        self.steps: list[dict[str, Any]] = []
        self.forwards = 0

        # As `embed_padded` gives images: the padding of buckets is no work of a step.
        self.padded = []
        for image in workload.images:
            length = length_of(image)
            self.padded.append(padded_tokens(image, backbone.buckets.round_up(length) if backbone.buckets else length))
        if workload.lead is not None:
            self.append("lead", workload.lead, "text")

    def append(self, id: str, tokens: Tokens, kind: Any) -> None:
        """Prefills tokens at the end of the window."""
        self.executor.provide(id, tokens=tokens, content=id)
        self.window, edits = self.window.append(Entry.of_tokens(id, tokens, id, kind=kind))
        self.executor.run(self.window, edits)
        self.forwards += 1

    def step(self, number: int) -> LoopStep:
        """Slides, appends an image and asks after it: one run of edits, one forward."""
        executor, image, before = self.executor, self.workload.images[number], self.executor.ledger
        id = f"image {number}"

        def run() -> Logits:
            self.window, slid = self.window.slide(self.size - 1)
            executor.provide(id, tokens=self.padded[number], length=length_of(image), content=id)
            self.window, placed = self.window.append(Entry.of_tokens(id, image, id, kind="chunk"))
            return self._ask((*slid, *placed), self.workload.questions[number])

        logits, seconds = timed(run)[:2]
        self.forwards += 1
        spent = executor.ledger - before
        kinds = {kind: dataclasses.asdict(entry) for kind, entry in spent.items()}
        self.steps.append({"seconds": seconds, "kinds": kinds})
        if number >= self.size:
            executor.forget(f"image {number - self.size}")
        return LoopStep(logits, seconds, spent.total.flops)

    def recall(self, id: str, question: Tokens, rank: int) -> tuple[LoopStep, Logits]:
        """Slides, brings an evicted image back by a stored patch and asks after it: no forward but the question's.

        The patch is formed from a prefill after that very window, off the clock, as if it had been met before.

        Returns:
          The recall; and the logits of the same window after that prefill, the patch's reference.
        """
        executor, before = self.executor, self.executor.ledger

        def slide() -> object:
            self.window, edits = self.window.slide(self.size - 1)
            executor.run(self.window, edits)
            return executor.pool.vectors

        slide_seconds = timed(slide)[1]
        slid = executor.ledger - before

        # On a fork, which is released afterwards: the prefill that the patch is formed from, and its answer.
        tokens, antecedent = self.workload.images[int(id.split()[-1])], self.window.target()
        executor.provide(id, tokens=tokens, content=id)
        branch, edits = self.window.fork("prefilled")
        executor.run(branch, edits)
        branch, edits = branch.recall(id, "prefill")
        reference = np.asarray(executor.ask(branch, edits, question))[0, -1]
        chunk, conditioned = canonical_of(self.workload.plain, tokens, id), executor.read(branch, id)
        executor.release(branch.branch)
        patch = kvp.form_patch(chunk, conditioned, rank, antecedent)
        executor.provide(id, chunk=chunk, patch=patch)
        before = executor.ledger

        def run() -> Logits:
            self.window, edits = self.window.recall(id, "patch", PatchNote.of(patch), fetched=True)
            return self._ask(edits, question)

        logits, seconds = timed(run)[:2]
        flops = slid.total.flops + (executor.ledger - before).total.flops
        return LoopStep(logits, slide_seconds + seconds, flops), reference

    def _ask(self, edits: Edits, question: Tokens) -> Logits:
        logits = np.asarray(self.executor.ask(self.window, edits, question))[0, -1]
        # Writes into the pool belong to the step, though no answer waits for them.
        jax.block_until_ready(self.executor.pool.vectors)
        return logits


def canonical_of(backbone: ModelBackbone, tokens: Tokens, id: str) -> kvp.Chunk:
    """Prefills tokens alone: their canonical, whose content is its id."""
    return kvp.Chunk(
        kv={name: value[:, 0] for name, value in backbone.prefill(tokens).kv.items()},
        local=np.asarray(tokens.positions)[0],
        span=span(tokens),
        length=length_of(tokens),
        id=id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=id,
    )


# ---------------------------------------------------------------------------------------------------------- prompts


class PrefixCache:
    """Blocks of prompts that were computed before: by a digest of all tokens up to their end, as engines have it."""

    def __init__(self, block: int = BLOCK):
        """Holds nothing yet, and evicts nothing: no cache hits more often."""
        self.block = block
        self._known: set[bytes] = set()

    def hit(self, prompt: Sequence[tuple[str, int]]) -> int:
        """Counts the leading tokens that need not be run, and stores the prompt. The last token always runs.

        Args:
          prompt: identifies its tokens: here each piece's name and the token's number in it.
        """
        chain, hit, unbroken = hashlib.blake2b(digest_size=16), 0, True
        for end in range(self.block, len(prompt) + 1, self.block):
            chain.update(repr(prompt[end - self.block : end]).encode())
            known = chain.digest() in self._known
            unbroken = unbroken and known
            hit = end if unbroken else hit
            self._known.add(chain.digest())
        return min(hit, (len(prompt) - 1) // self.block * self.block)


class PromptEngine:
    """The arms that prefill the window as a prompt."""

    def __init__(self, workload: LoopWorkload, size: int):
        """Holds no prompt yet."""
        self.workload, self.size = workload, size
        self.cache = PrefixCache()
        self.kv: Mapping[str, Array] | None = None

    def prompt(self, number: int, images: Sequence[int] | None = None) -> tuple[Tokens, int]:
        """Joins lead, images (the last ones of the step by default) and question; counts what the prefix cache has."""
        workload = self.workload
        images = range(max(0, number - self.size + 1), number + 1) if images is None else images
        pieces = [] if workload.lead is None else [("lead", workload.lead)]
        pieces += [(f"image {image}", workload.images[image]) for image in images]
        pieces.append((f"question {number}", workload.questions[number]))

        names, tokens = join_pieces(pieces)
        return tokens, self.cache.hit(names)

    def run(self, tokens: Tokens, hit: int = 0) -> LoopStep:
        """Runs what follows the first `hit` tokens, over their KV as a contiguous cache has it.

        Without a hit the whole prompt runs, and its KV is kept for the arms that hit.
        """
        context = None
        if hit:
            assert self.kv is not None
            front = {name: value[:, :, :hit] for name, value in self.kv.items()}
            layout = self.workload.plain.layout
            context = jax.block_until_ready(kvp.to_engine(layout, front, np.asarray(tokens.positions)[:, :hit], 0))
        rest = tokens.take(hit, length_of(tokens)) if hit else tokens

        def forward() -> tuple[Logits, Mapping[str, Array]]:
            out = self.workload.plain.prefill(rest, context=context)
            return np.asarray(out.logits)[0, -1], out.kv

        (logits, kv), seconds = timed(forward)[:2]
        self.kv = self.kv if hit else kv
        return LoopStep(logits, seconds, self.flops(length_of(rest), hit))

    def flops(self, tokens: int, hit: int) -> int:
        """Counts FLOPs of a forward with one token's logits."""
        costs = self.workload.plain.forward_costs
        return costs.flops(tokens, hit) + costs.logit


# -------------------------------------------------------------------------------------------------------- references


def remembered_logits(workload: LoopWorkload, size: int, asked: Sequence[int]) -> dict[int, Logits]:
    """Computes what a window that remembers promises at some steps: one forward over the whole history."""
    spans = [span(image) for image in workload.images[: max(asked) + 1]]
    segments = history(spans, size, 0 if workload.lead is None else span(workload.lead), asked)
    sources = {"chunk": workload.images, "question": workload.questions}
    parts = []
    for segment in segments:
        tokens = workload.lead if segment.kind == "lead" else sources[segment.kind][segment.index]
        assert tokens is not None
        parts.append(tokens.shift(segment.start))

    counts = [length_of(part) for part in parts]
    mask = banded_mask(segments, counts)[None, None]
    ends = np.cumsum(counts)[-len(asked) :] - 1
    out = workload.plain.prefill(one_behind_the_other(parts), mask=mask, logits=ends[None].astype(np.int32))
    return dict(zip(asked, np.asarray(out.logits)[0], strict=True))


def divergence(reference: Logits, logits: Logits) -> tuple[float, bool]:
    """Returns KL(reference‖logits) in nats, computed in float64, and whether the most likely token differs."""
    true, own = _log_softmax(reference), _log_softmax(logits)
    return float((np.exp(true) * (true - own)).sum()), bool(reference.argmax() != logits.argmax())


def _difference(reference: Logits, logits: Logits) -> dict[str, float]:
    kl, flip = divergence(reference, logits)
    return {"kl": kl, "flip": float(flip)}


def _log_softmax(logits: Logits) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


# -------------------------------------------------------------------------------------------------------------- loop


def measure_loop(
    workload: LoopWorkload, size: int, compared: Sequence[int], recalls: int = 0, once: bool = False
) -> Part:
    """Runs a loop twice, cold and warm; at the `compared` steps of the second run the other arms too.

    Args:
      size: images in the window.
      compared: steps with a full window, ascending; the first warms the other arms up.
      recalls: steps after the loop that bring an image back by a stored patch; the first warms up.
      once: one run alone, for models whose steps take seconds each: what it compiles is among its times, and a prefix
        cache, which runs as many tokens as a re-prefill but for the lead, is timed at the last step alone.

    Returns:
      {"config", "cold" (but for `once`), "warm": sums and steps of a whole loop, "compared": an entry per step and arm,
      "recalls": likewise, "flops": of every step, by arm; "bar" is the image's prefill after the window and the
      question's}.
    """
    compilations, part = Compilations(), Part()
    part["config"] = {
        "backbone": workload.name,
        "images": len(workload.images),
        "window": size,
        "image_tokens": sorted({length_of(image) for image in workload.images}),
        "question_tokens": length_of(workload.questions[0]),
        "lead_tokens": 0 if workload.lead is None else length_of(workload.lead),
        "dtype": str(workload.images[0].embeddings.dtype),
        "logit_flops": workload.plain.forward_costs.logit,
    }
    if not once:
        part["cold"] = _Loop(workload, size, compilations).run(())
    loop = _Loop(workload, size, compilations)
    part["warm"] = loop.run(compared, compared[-1:] if once else compared)
    part["recalls"] = [_recall(loop, warm_up=number == 0) for number in range(recalls)]

    promised = remembered_logits(workload, size, compared)
    part["compared"] = []
    for step, arms in loop.compared.items():
        for arm, taken in arms.items():
            entry: dict[str, Any] = {"step": step, "arm": arm, "warm_up": step == compared[0]}
            entry |= {"seconds": taken.seconds, "flops": taken.flops}
            entry["forget"] = _difference(arms["re-prefill"].logits, taken.logits)
            entry["remember"] = _difference(promised[step], taken.logits)
            part["compared"].append(entry)

    return part | {"flops": loop.flops}


class _Loop:
    """One pass through all images: the window and the engine that serve it, and what the arms took.

    Attributes:
      compared: steps of the arms, by number and arm.
      flops: of every step, by arm.
    """

    def __init__(self, workload: LoopWorkload, size: int, compilations: Compilations):
        self.workload, self.compilations, self.before = workload, compilations, compilations.count
        self.agent, self.engine = AgentWindow(workload, size), PromptEngine(workload, size)
        self.compared: dict[int, dict[str, LoopStep]] = {}
        self.flops: dict[str, list[int]] = {}

    def run(self, compared: Sequence[int], cached: Sequence[int] = ()) -> dict[str, Any]:
        """Steps once through all images, the other arms at the steps `compared`, the prefix cache at those `cached`."""
        workload, engine = self.workload, self.engine
        compiled = self.compilations.count - self.before
        for number, image in enumerate(workload.images):
            before = self.compilations.count
            step = self.agent.step(number)
            compiled += self.compilations.count - before

            # Counted at every step, also where nothing but ours is run.
            tokens, hit = engine.prompt(number)
            length, asked, new = length_of(tokens), length_of(workload.questions[number]), length_of(image)
            survivors = length - new - asked
            counted = {
                "re-prefill": engine.flops(length, 0),
                "prefix cache": engine.flops(length - hit, hit),
                "prefix hit": engine.flops(new + asked, survivors),
                "window": step.flops,
                "bar": workload.plain.forward_costs.flops(new, survivors) + engine.flops(asked, survivors + new),
            }
            for arm, flops in counted.items():
                self.flops.setdefault(arm, []).append(flops)

            if number in compared:
                # A re-prefill first: the arms after it read its KV.
                arms = {"window": step, "re-prefill": engine.run(tokens), "prefix hit": engine.run(tokens, survivors)}
                self.compared[number] = arms
                if number in cached:
                    arms["prefix cache"] = engine.run(tokens, hit)

        steps, ledger = self.agent.steps, self.agent.executor.ledger
        return {
            "seconds": sum(step["seconds"] for step in steps),
            "forwards": self.agent.forwards,
            "compilations": compiled,
            "ledger": {kind: dataclasses.asdict(entry) for kind, entry in ledger.items()},
            "steps": steps,
        }


def _recall(loop: _Loop, warm_up: bool) -> dict[str, Any]:
    """Measures one step that recalls an image, beside the other arms: what each took, and KL to a prefill."""
    workload, agent, engine = loop.workload, loop.agent, loop.engine
    evicted = agent.window.evicted[-agent.size].entry.id
    question = workload.questions[-1]
    step, reference = agent.recall(evicted, question, RANK)

    images = [int(id.split()[-1]) for id in agent.window.ids if id != "lead"]
    tokens, hit = engine.prompt(len(workload.images) - 1, images)
    length = length_of(tokens)
    survivors = length - length_of(workload.images[images[-1]]) - length_of(question)
    arms = {"window": step, "re-prefill": engine.run(tokens), "prefix hit": engine.run(tokens, survivors)}
    flops = {"prefix cache": engine.flops(length - hit, hit)} | {arm: taken.flops for arm, taken in arms.items()}
    return {
        "seconds": {arm: taken.seconds for arm, taken in arms.items()},
        "flops": flops,
        "to a prefill in the window": _difference(reference, step.logits),
        "forget": _difference(arms["re-prefill"].logits, step.logits),
        "warm_up": warm_up,
    }
