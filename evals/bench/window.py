"""An agent's loop: chunks come, the window keeps the last ones, a question follows each; by a session and by others.

* `session`: ours. Survivors rotate, the new chunk alone is prefilled behind them, the question after it.
* `re-prefill`: lead, window and question in one forward.
* `prefix cache`: an engine's: what the last window has in common with this one from the front on is not run again,
  which is the lead where a window slides.
* `prefix hit`: what such a cache would cost if nothing in front had changed: one forward over chunk and question. No
  engine gets it here; it is the bar.

Models are settings of the one loop: random weights of a decoder's and of a hybrid's shape, and SmolLM2-135M over texts.
Random weights say nothing of quality: their KL shows that a window that only grows is what a re-prefill computes.
"""

import functools
import itertools
import pydoc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import kvpatch_jax as kvp
from models import ModelBackbone, load
from models.random_weights import random_backbone

from .benchmark import Benchmark, BenchOptions, Sides, timed
from .operators import MEDIUM
from .shapes import LARGE, SHAPES, random_ids, tiny_config, with_buckets

EXACT = 1e-4
"""Most KL to a re-prefill, in nats, while nothing has left."""


class LoopSizes(NamedTuple):
    """Tokens of a chunk, of a question and of the pinned lead; chunks in the window."""

    chunk: int = 256
    question: int = 8
    lead: int = 16
    window: int = 4


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields the loop of every model."""
    if options.quick:
        tiny = LoopSizes(chunk=16, question=4, lead=4, window=2)
        models = {"tiny decoder": "Qwen2ForCausalLM", "tiny hybrid": "Qwen3_5ForCausalLM"}
        for name, architecture in models.items():
            make = functools.partial(random_backbone, tiny_config(architecture), options.seed)
            yield Benchmark("window.step", name, functools.partial(loop, make, tiny, options.seed))
        return

    hybrid = SHAPES["Qwen3.5-0.8B"]
    hybrid = hybrid | {"text_config": hybrid["text_config"] | {"num_hidden_layers": 4}}
    shapes = {"a twelfth of Qwen2-0.5B": (MEDIUM, False), "Qwen3.5-0.8B, 4 layers": (hybrid, False)}
    shapes["Qwen2-0.5B"] = (LARGE, True)
    for name, (raw, large) in shapes.items():
        for window in (4, 16):
            make = functools.partial(random_backbone, raw, options.seed)
            prepare = functools.partial(loop, make, LoopSizes(window=window), options.seed)
            yield Benchmark("window.step", f"{name}, {window} of 256 tokens", prepare, large)
    prepare = functools.partial(loop, pretrained, LoopSizes(chunk=96, window=6), options.seed)
    yield Benchmark("window.step", "SmolLM2-135M, 6 of 96 tokens", prepare, large=True)


def pretrained() -> ModelBackbone:
    """Loads SmolLM2-135M. Raises InputError where its package is not installed."""
    from ..real_weights import weights_file

    return load(weights_file("smollm2"), dtype="float32")


def chunks_of(backbone: ModelBackbone, count: int, length: int, seed: int) -> list[list[int]]:
    """Makes chunks of token ids: documentation of the standard library where the model reads text, else drawn ones."""
    if backbone.tokenizer is None:
        return [random_ids(length, seed + number) for number in range(count)]
    text = "\n".join(pydoc.plain(pydoc.render_doc(name)) for name in ("argparse", "subprocess", "decimal"))
    ids = np.asarray(backbone.prepare([text])["input_ids"])[0].tolist()
    return [ids[first : first + length] for first in range(0, length * min(count, len(ids) // length), length)]


class Prompts:
    """The peers: prompts of lead, window and question in one forward, whole or behind what is cached."""

    def __init__(self, backbone: ModelBackbone):
        self.backbone = backbone
        self.flops: dict[str, list[float]] = {}

    def run(self, name: str, context: Any, ids: Sequence[int], hit: int) -> Callable[[], jax.Array]:
        """Makes a forward of what follows the first `hit` tokens, and counts its FLOPs."""
        costs = self.backbone.forward_costs
        self.flops.setdefault(name, []).append(float(costs.flops(len(ids) - hit, hit) + costs.logit))
        tokens = self.backbone.embed(**self.backbone.prepare([list(ids)]))
        rest = tokens.take(hit, len(ids)) if hit else tokens
        return lambda: self.backbone.prefill(rest, context=context).logits

    def context(self, ids: Sequence[int]) -> Any:
        """Computes the engine-frame cache of the first tokens, off the clock; None of none."""
        if not ids:
            return None
        tokens = self.backbone.embed(**self.backbone.prepare([list(ids)]))
        kv = self.backbone.prefill(tokens).kv
        return jax.block_until_ready(kvp.to_engine(self.backbone.layout, kv, tokens.positions, 0))


class Loop:
    """One loop: the chunks, the session, and the window as a list of ids."""

    def __init__(self, backbone: ModelBackbone, sizes: LoopSizes, seed: int, steps: int = 64):
        self.sizes, self.prompts, self.number = sizes, Prompts(backbone), 0
        self.chunks = chunks_of(backbone, steps, sizes.chunk, seed)
        self.lead, self.question = random_ids(sizes.lead, seed + 1000), random_ids(sizes.question, seed + 1001)
        bucketed = with_buckets(backbone)
        self.session = kvp.Session(bucketed, keep=sizes.window, lead=[self.lead], prefills=0, rank=0)
        self.flops: list[float] = []
        self.kl: list[float] = []
        self.flips: list[float] = []

    def step(self) -> None:
        """Adds the next chunk, which makes the oldest one leave, and asks."""
        before = self.session.stats().flops
        # Names are of steps: chunks come again once all have been shown.
        chunk = self.chunks[self.number % len(self.chunks)]
        self.session.add(list(chunk), id=f"chunk {self.number}", kind="chunk")
        self.number += 1
        assert self.session.ask(self.question, steps=1, stop=()).ids
        costs, front = self.prompts.backbone.forward_costs, self.session.stats().tokens_held
        question = costs.flops(len(self.question), front) + costs.logit
        self.flops.append(float(self.session.stats().flops - before + question))

    def window(self) -> list[list[int]]:
        """Lists the chunks that are in the window."""
        first = max(0, self.number - self.sizes.window)
        return [self.chunks[number % len(self.chunks)] for number in range(first, self.number)]

    def audit(self) -> float:
        """Asks once more beside a re-prefill, off the clock; returns the KL in nats."""
        audit = self.session.ask(self.question, steps=1, stop=(), audit=True).audit
        assert audit is not None
        self.kl.append(audit.kl)
        self.flips.append(float(audit.flips))
        return audit.kl


def loop(make: Callable[[], ModelBackbone], sizes: LoopSizes, seed: int) -> Sides:
    """Prepares a loop: fills the window, where the session must be exact, and then slides it step by step."""
    state = Loop(make(), sizes, seed)
    for _ in range(sizes.window):
        state.step()
    exact = state.audit()
    # The first slides compile.
    for _ in range(2):
        state.step()
    for values in (state.flops, state.kl, state.flips):
        values.clear()
    runs: dict[str, Callable[[], jax.Array]] = {}

    def prepare() -> None:
        """Prepares the peers' forwards on the window as it is after the session's step."""
        state.audit()
        ids = state.lead + list(itertools.chain.from_iterable(state.window())) + state.question
        hit = len(ids) - sizes.chunk - sizes.question
        runs["re-prefill"] = state.prompts.run("re-prefill", None, ids, 0)
        runs["prefix cache"] = state.prompts.run("prefix cache", state.prompts.context(state.lead), ids, sizes.lead)
        runs["prefix hit"] = state.prompts.run("prefix hit", state.prompts.context(ids[:hit]), ids, hit)

    def figures() -> dict[tuple[str, str], list[float]]:
        found = {("session", "KL"): state.kl, ("session", "flips"): state.flips, ("session", "FLOPs"): state.flops}
        found |= {(name, "FLOPs"): flops for name, flops in state.prompts.flops.items()}
        state.session.close()
        return found

    calls = {"session": timed(state.step), "re-prefill": timed(lambda: runs["re-prefill"](), before=prepare)}
    for name in ("prefix cache", "prefix hit"):
        calls[name] = timed(lambda name=name: runs[name]())
    return Sides(calls, lambda: {"session": exact / EXACT}, figures=figures)
