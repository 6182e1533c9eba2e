"""An agent's loop on a hybrid model: images through a window that slides, a question at each step, by three ways.

* `re-prefill`: lead, window and question in one forward, at every step.
* `snapshots`: an engine's prefix cache that keeps the state of the linear layers at the end of every chunk, and evicts
  nothing. It goes on from the longest prefix of the window that it has met: all of a window that grows, and of one that
  slides, or whose order changed, what stands in front of the change, which is the pinned lead.
* `window`: ours, through `PagedExecutor`: survivors' rows rotate, their transitions compose, and the new image alone is
  prefilled behind them.

FLOPs are the backbone's own costs of what is run, and ours are the executor's ledger, compositions included.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.core import KVLayout
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, Window
from kvpatch_jax.window.costs import ROTATION, composing_flops

from .checkpoints import random_backbone
from .hybrid_shapes import HYBRIDS
from .loop_workload import LoopWorkload, join_pieces, length_of, text_tokens, with_buckets
from .timing import timed
from .window_loop import PAGE, LoopStep, Part, canonical_of, divergence

WAYS = ("re-prefill", "snapshots", "window")
VARIANTS = ("reordered", "reordered, and a new image", "recalled")


@dataclasses.dataclass(frozen=True)
class HybridLoopSizes:
    """Images of the loop and in the window, and tokens of an image, of a question and of the lead."""

    images: int = 16
    window: int = 8
    image_tokens: int = 256
    question_tokens: int = 8
    lead_tokens: int = 16


def hybrid_workload(raw: dict[str, Any], name: str, sizes: HybridLoopSizes, seed: int) -> LoopWorkload:
    """Draws a hybrid of this `config.json`, and images as embeddings at the positions of a grid, drawn alike."""
    plain = random_backbone(raw, seed)
    generator, width = np.random.default_rng([seed, 2]), plain.config.text.width
    rows = 2 ** (int(math.log2(sizes.image_tokens)) // 2)
    place = np.arange(sizes.image_tokens, dtype=np.int32)
    positions = np.stack([0 * place, place % rows, place // rows], axis=1)[None]

    images = []
    for _ in range(sizes.images + len(VARIANTS)):
        drawn = generator.standard_normal((1, sizes.image_tokens, width), np.float32) / math.sqrt(width)
        images.append(Tokens(jnp.asarray(drawn), positions))

    def text(count: int) -> Tokens:
        return text_tokens(plain, generator.integers(3, 290, (1, count)).astype(np.int32))

    questions = [text(sizes.question_tokens) for _ in images]
    return LoopWorkload(name, with_buckets(plain), plain, images, questions, text(sizes.lead_tokens))


def shape_of(layers: int) -> dict[str, Any]:
    """Returns `config.json` of Qwen3.5-0.8B with as many layers, float32."""
    raw = HYBRIDS["Qwen3.5-0.8B"]
    return raw | {"text_config": raw["text_config"] | {"num_hidden_layers": layers}}


# ----------------------------------------------------------------------------------------------------------- counted


class SnapshotCache:
    """Chunk ends at which an engine has the state of what stands in front: prefixes of windows, by their names."""

    def __init__(self) -> None:
        """Holds nothing yet, and evicts nothing."""
        self._known: set[tuple[str, ...]] = set()

    def hit(self, names: Sequence[str]) -> int:
        """Counts the leading chunks that need not be run, and keeps all prefixes of the window."""
        prefixes = [tuple(names[: count + 1]) for count in range(len(names))]
        known = [prefix in self._known for prefix in prefixes]
        self._known.update(prefixes)
        return known.index(False) if False in known else len(names)


def counted_flops(forward: ForwardCosts, layout: KVLayout, sizes: HybridLoopSizes) -> dict[str, list[int]]:
    """Counts the FLOPs of every step of the loop by way, and under "bar" the new image's and question's alone.

    Args:
      forward: costs of the model's forwards. layout: of its KV.
    """
    image, question, lead = sizes.image_tokens, sizes.question_tokens, sizes.lead_tokens
    composing = composing_flops(layout)
    rotation = ROTATION * sum(
        layout.depth(channel.name) * channel.heads * channel.rotary for channel in layout.channels
    )
    cache, flops = SnapshotCache(), {way: list[int]() for way in (*WAYS, "bar")}

    for number in range(sizes.images):
        names = ["lead", *(f"image {each}" for each in window_of(number, sizes.window))]
        survivors = len(names) - 2
        tokens, front = lead + (survivors + 1) * image, lead + survivors * image
        flops["re-prefill"].append(forward.flops(tokens + question) + forward.logit)

        # What it has met is a prefix of lead and images.
        hit = cache.hit(names)
        met = lead + (hit - 1) * image if hit else 0
        flops["snapshots"].append(forward.flops(tokens + question - met, met) + forward.logit)

        new = forward.flops(image, front) + forward.flops(question, tokens) + 2 * forward.logit
        flops["bar"].append(new)
        # Behind a slide survivors rotate and compose; behind a growing window the last question's context holds.
        slides = number >= sizes.window
        moved = survivors * (composing + rotation * image) if slides else 0
        flops["window"].append(new + moved + (survivors + 1) * composing)
    return flops


def window_of(number: int, size: int) -> range:
    """Returns the images in a window of this size when image `number` has come in."""
    return range(max(0, number - size + 1), number + 1)


# -------------------------------------------------------------------------------------------------------------- ours


class HybridAgent:
    """Our way: a window of `size` images behind a pinned lead, from an empty pool."""

    def __init__(self, workload: LoopWorkload, size: int):
        """Prefills the lead."""
        assert workload.lead is not None
        backbone, dtype = workload.backbone, workload.images[0].embeddings.dtype
        longest = max(length_of(tokens) for tokens in (*workload.images, workload.lead))
        self.workload, self.size = workload, size
        self.executor = PagedExecutor(backbone, (size + 3) * -(-longest // PAGE), PAGE, dtype)
        self.window = Window.empty(Costs.of(backbone, dtype), lead=1)
        self.executor.provide("lead", tokens=workload.lead, content="lead")
        self.window, edits = self.window.append(Entry.of_tokens("lead", workload.lead, "lead", kind="text"))
        self.executor.run(self.window, edits)

    def step(self, number: int) -> LoopStep:
        """Slides, appends an image and asks after it."""
        return self._timed(lambda: (self._slid(), self._appended(number)), number)

    def reorder(self, number: int, new: bool) -> LoopStep:
        """Exchanges the first and the last image and asks; with `new`, slides and appends an image as well."""

        def edits() -> tuple[Edits, ...]:
            slid = self._slid() if new else ()
            ids = self.window.ids[1:]
            self.window, moved = self.window.reorder([ids[-1], *ids[1:-1], ids[0]])
            return slid, moved, self._appended(number) if new else ()

        return self._timed(edits, number)

    def recall(self, id: str, number: int) -> LoopStep:
        """Slides, brings an evicted image back from its canonical, behind all others, and asks."""
        chunk = canonical_of(self.workload.plain, self.workload.images[int(id.split()[-1])], id)
        self.executor.provide(id, chunk=chunk, content=id)

        def edits() -> tuple[Edits, ...]:
            slid = self._slid()
            self.window, placed = self.window.recall(id, "bare", fetched=True)
            return slid, placed

        return self._timed(edits, number)

    def _slid(self) -> Edits:
        self.window, edits = self.window.slide(self.size - 1)
        return edits

    def _appended(self, number: int) -> Edits:
        image, id = self.workload.images[number], f"image {number}"
        self.executor.provide(id, tokens=image, content=id)
        entry = Entry.of_tokens(id, image, id, kind="chunk", order_free=True)
        self.window, edits = self.window.append(entry)
        return edits

    def _timed(self, edits: Callable[[], Sequence[Edits]], number: int) -> LoopStep:
        before = self.executor.ledger

        def run() -> np.ndarray:
            made = tuple(edit for each in edits() for edit in each)
            logits = np.asarray(self.executor.ask(self.window, made, self.workload.questions[number]))[0, -1]
            # Writes into the pool belong to the step, though no answer waits for them.
            jax.block_until_ready(self.executor.pool.vectors)
            return logits

        logits, seconds = timed(run)[:2]
        return LoopStep(logits, seconds, (self.executor.ledger - before).total.flops)


class HybridPrompts:
    """The other ways: windows as prompts, whole or behind the lead."""

    def __init__(self, workload: LoopWorkload):
        """Prefills the lead, off the clock."""
        assert workload.lead is not None
        self.workload = workload
        kv, self.lead = workload.plain.prefill(workload.lead).kv, length_of(workload.lead)
        context = kvp.to_engine(workload.plain.layout, kv, np.asarray(workload.lead.positions), 0)
        self.context = jax.block_until_ready(context)

    def run(self, ids: Sequence[str], number: int, behind_lead: bool = False) -> LoopStep:
        """Prefills the images of these ids and the question, with the lead or behind its KV and state."""
        workload = self.workload
        assert workload.lead is not None
        pieces = [("lead", workload.lead)]
        pieces += [(id, workload.images[int(id.split()[-1])]) for id in ids]
        pieces.append(("question", workload.questions[number]))
        tokens = join_pieces(pieces)[1]
        hit = self.lead if behind_lead else 0
        rest = tokens.take(hit, length_of(tokens)) if hit else tokens

        def forward() -> np.ndarray:
            return np.asarray(workload.plain.prefill(rest, context=self.context if hit else None).logits)[0, -1]

        logits, seconds = timed(forward)[:2]
        costs = workload.plain.forward_costs
        return LoopStep(logits, seconds, costs.flops(length_of(rest), hit) + costs.logit)


# -------------------------------------------------------------------------------------------------------------- loop


def measure_hybrid_loop(workload: LoopWorkload, sizes: HybridLoopSizes) -> Part:
    """Runs the loop and the variants by every way, in turns, once to warm up and once on the clock.

    Behind a window that grows the snapshots' step is ours without the compositions: its time there is ours.

    Returns:
      {"steps": per step {way: {"seconds", "flops"}, "kl": of ours to re-prefill, "flip"}, "variants": likewise by name,
      "counted": FLOPs by `counted_flops`}.
    """
    prompts, counted = (
        HybridPrompts(workload),
        counted_flops(workload.plain.forward_costs, workload.plain.layout, sizes),
    )
    ids = [f"image {number}" for number in range(len(workload.images))]
    steps: list[Part] = []
    variants: dict[str, Part] = {}
    for warm_up in (True, False):
        agent = HybridAgent(workload, sizes.window)
        for number in range(sizes.images):
            seen, slides = [ids[each] for each in window_of(number, sizes.window)], number >= sizes.window
            ours = agent.step(number)
            # A window that is full compiles nothing more.
            if warm_up and number > sizes.window:
                continue
            whole = prompts.run(seen, number)
            behind = prompts.run(seen, number, behind_lead=True) if slides else None
            if warm_up:
                continue
            snapshots = {
                "seconds": ours.seconds if behind is None else behind.seconds,
                "flops": counted["snapshots"][number] if behind is None else behind.flops,
            }
            steps.append(_compared(ours, whole, snapshots))

        for place, name in enumerate(VARIANTS):
            number = sizes.images + place
            if name == "recalled":
                ours = agent.recall(agent.window.evicted[0].entry.id, number)
            else:
                ours = agent.reorder(number, new=name != "reordered")
            seen = list(agent.window.ids[1:])
            whole = prompts.run(seen, number)
            behind = prompts.run(seen, number, behind_lead=True)
            variants[name] = _compared(ours, whole, {"seconds": behind.seconds, "flops": behind.flops})
            variants[name]["bar"] = _new_flops(workload.plain.forward_costs, sizes, new="new" in name)

    return {"steps": steps, "variants": variants, "counted": counted}


def _compared(ours: LoopStep, whole: LoopStep, snapshots: Mapping[str, float]) -> Part:
    kl, flip = divergence(whole.logits, ours.logits)
    part: Part = {"kl": kl, "flip": float(flip), "snapshots": dict(snapshots)}
    for way, step in (("window", ours), ("re-prefill", whole)):
        part[way] = {"seconds": step.seconds, "flops": step.flops}
    return part


def _new_flops(forward: ForwardCosts, sizes: HybridLoopSizes, new: bool) -> int:
    """Counts the FLOPs of what no way is spared of a full window: the question, and a new image if there is one."""
    full = sizes.lead_tokens + sizes.window * sizes.image_tokens
    flops = forward.flops(sizes.question_tokens, full) + forward.logit
    if new:
        flops += forward.flops(sizes.image_tokens, full - sizes.image_tokens) + forward.logit
    return flops
