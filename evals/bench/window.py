"""An agent's loop: chunks come, the window keeps the last ones, a question follows each; by a session and by others.

* `session`: ours. Survivors rotate, the new chunk alone is prefilled behind them, the question after it.
* `re-prefill`: lead, window and question in one forward.
* `prefix cache`: an engine's: what the last window has in common with this one from the front on is not run again,
  which is the lead where a window slides.
* `prefix hit`: what such a cache would cost if nothing in front had changed: one forward over chunk and question. No
  engine gets it here; it is the bar.

Models have random weights of a decoder's and of a hybrid's shape. A window that only grows must be what a re-prefill
computes; what a slide loses is measured by the data set `windows`.
"""

import collections
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.models.random_weights import random_backbone
from pallas_kernels import preferring
from pallas_kernels._dispatch import kernel_module
from pallas_kernels._target import interpretation, platform

from .benchmark import Benchmark, BenchOptions, Sides, timed
from .kernels import units
from .operators import MEDIUM
from .shapes import LARGE, SHAPES, qwen2_config, random_ids, tiny_config

EXACT = 1e-4
"""Most KL to a re-prefill, in nats, while nothing has left."""
SAME = 16.0
"""Most of bfloat16's last places between what two sides leave in a pool."""


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


class Loop:
    """The chunks, a session over them, and the peers' prompts; figures of every step by side and metric."""

    def __init__(self, backbone: ModelBackbone, sizes: LoopSizes, seed: int):
        self.backbone, self.sizes, self.steps, self.seed = backbone, sizes, 0, seed
        self.lead, self.question = random_ids(sizes.lead, seed + 1000), random_ids(sizes.question, seed + 1001)
        self.session = kvp.Session(backbone, keep=sizes.window, lead=[self.lead], rank=0)
        self.figures: dict[tuple[str, str], list[float]] = collections.defaultdict(list)

    def chunk(self, step: int) -> list[int]:
        """Draws the token ids of a step's chunk."""
        return random_ids(self.sizes.chunk, self.seed + step)

    def step(self) -> None:
        """Adds the next chunk, which makes the oldest one leave, and asks."""
        before, costs = self.session.stats().flops, self.backbone.forward_costs
        self.session.add(self.chunk(self.steps), id=f"chunk {self.steps}", kind="chunk")
        self.steps += 1
        assert self.session.ask(self.question, steps=1, stop=()).ids
        after = self.session.stats()
        question = costs.flops(len(self.question), after.tokens_held) + costs.logit
        self.figures["session", "FLOPs"].append(float(after.flops - before + question))

    def prompts(self) -> dict[str, Callable[[], jax.Array]]:
        """Makes the peers' forwards on the window at hand, behind what each has cached, and counts their FLOPs."""
        steps = range(max(0, self.steps - self.sizes.window), self.steps)
        ids = [*self.lead, *itertools.chain.from_iterable(map(self.chunk, steps)), *self.question]
        tokens = self.backbone.embed(**self.backbone.prepare([ids]))
        hits = {"re-prefill": 0, "prefix cache": self.sizes.lead}
        hits["prefix hit"] = len(ids) - self.sizes.chunk - self.sizes.question

        forwards, costs = {}, self.backbone.forward_costs
        for name, hit in hits.items():
            rest, context = tokens, None
            if hit:
                cached, rest = tokens.take(0, hit), tokens.take(hit, len(ids))
                kv = self.backbone.prefill(cached).kv
                context = jax.block_until_ready(kvp.to_engine(self.backbone.layout, kv, cached.positions, 0))
            self.figures[name, "FLOPs"].append(float(costs.flops(len(ids) - hit, hit) + costs.logit))
            forwards[name] = functools.partial(_logits, self.backbone, rest, context)
        return forwards


def _logits(backbone: ModelBackbone, tokens: Tokens, context: Any) -> jax.Array:
    return backbone.prefill(tokens, context=context).logits


def loop(make: Callable[[], ModelBackbone], sizes: LoopSizes, seed: int) -> Sides:
    """Prepares a loop: fills the window, where the session must be exact, and then slides it step by step."""
    state = Loop(make(), sizes, seed)
    for _ in range(sizes.window):
        state.step()
    audit = state.session.ask(state.question, steps=1, stop=(), audit=True).audit
    assert audit is not None
    # The first slides compile.
    for _ in range(2):
        state.step()
    state.figures.clear()
    forwards: dict[str, Callable[[], jax.Array]] = {}

    def prepare() -> None:
        """Prepares the peers on the window as it is after the session's step."""
        forwards.update(state.prompts())

    def figures() -> dict[tuple[str, str], list[float]]:
        state.session.close()
        return state.figures

    calls = {"session": timed(state.step), "re-prefill": timed(lambda: forwards["re-prefill"](), before=prepare)}
    for name in ("prefix cache", "prefix hit"):
        calls[name] = timed(lambda name=name: forwards[name]())
    return Sides(calls, lambda: {"session": audit.kl / EXACT}, figures=figures)


# ------------------------------------------------------------------------------------------------------------- kernels


def with_kernels(tiny: bool, steps: int = 32) -> Sides:
    """Prepares a session's step in bfloat16 with the platform's kernels preferred, and by XLA alone.

    Programs choose when they are traced: one side runs after the other, each with programs of its own. Then what both
    left in the pool is compared.
    """
    sizes = LoopSizes(chunk=16, question=4, lead=4, window=2) if tiny else LoopSizes(chunk=1024)
    layers, kv_heads, vocabulary = (2, 2, 320) if tiny else (28, 4, 8192)
    width, steps = 256 * kv_heads, 4 if tiny else steps
    raw = qwen2_config(width, width, 2 * kv_heads, layers, kv_heads, vocabulary, torch_dtype="bfloat16")
    drawn = random_backbone(raw)
    backbone = drawn.replaced(jax.tree.map(lambda value: value.astype(jnp.bfloat16), drawn.parameters))

    kernel, seconds, written, taken = platform(), {}, [], collections.Counter[str]()
    with contextlib.ExitStack() as patches:
        for operation in ("rotate_patch", "splice"):
            module = kernel_module(operation, kernel)
            patches.enter_context(mock.patch.object(module, "kernel", _counted(module.kernel, operation, taken)))
        for side, preferred in (("with kernels", [kernel]), ("with XLA", [])):
            jax.clear_caches()
            with preferring(*preferred):
                state = Loop(backbone, sizes, seed=0)
                for _ in range(sizes.window + 2):
                    state.step()
                run = timed(state.step)
                seconds[side] = [run() for _ in range(steps)]
            written.append(dict(state.session.runtime.executor.pools.engine))
            state.session.close()
    error = max(units(ours, written[1][name]) for name, ours in written[0].items())
    same = [float((ours == written[1][name]).mean()) for name, ours in written[0].items()]

    calls = {side: itertools.cycle(samples).__next__ for side, samples in seconds.items()}
    calls = {} if interpretation() else calls
    notes = {"with kernels": ", ".join(f"{count} calls of {name}" for name, count in taken.items()) or "no call taken"}
    # Chunks are prefilled behind what was written, so that one last place may become several.
    figures = {("with kernels", "same numbers"): same, ("with kernels", "last places"): [error]}
    return Sides(calls, lambda: {"with kernels": error / SAME}, figures=lambda: figures, notes=notes)


def _counted(kernel: Callable[..., Any], name: str, taken: collections.Counter[str]) -> Callable[..., Any]:
    """Returns a kernel that counts the calls that it takes, as they are traced."""

    def run(*arguments: Any, **options: Any) -> Any:
        result = kernel(*arguments, **options)
        taken[name] += 1
        return result

    return run
