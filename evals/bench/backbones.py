"""Backbones: prefill and decode of every family, beside transformers on the CPU where another interpreter has it.

Both sides read the same float32 checkpoint and run the same prompt, in turns, on the same cores with as many threads.
What is timed:

* `prefill`: embedding and forward of the prompt, with its KV and the logits of every token. tokens/s of the prompt.
* `generate`: the prompt and the tokens that follow it greedily, whole calls (ours one compiled program). new tokens/s.
* `step`: the same tokens one call each, with the host in between, without the prompt. new tokens/s.
* `embed`: an image family's tower and projector over one small image. Ours also embeds the prompt and puts the features
  in place. images/s.

A ratio is ours over theirs in rates; above 1 ours is faster. Compilation is in no timing.
"""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jaxtyping import Array

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import to_engine
from models import ModelBackbone, save

from ..harness.environment import environment
from .benchmark import Benchmark, Row, comparison_row
from .checkpoints import LARGE, TINY, UNTIMED, pad_cache, prompt, random_backbone, tiny_config, tiny_pictures
from .timing import LEAST_SECONDS, interleave, mean_seconds, stopwatch
from .transformers_side import TransformersSide, agreement_row


@dataclasses.dataclass(frozen=True)
class PromptSize:
    """A prompt, the tokens that follow, and the ratio of tokens per second to reach."""

    name: str
    prompt: int
    new_tokens: int
    bar: float


TINY_SIZE = PromptSize("tiny", prompt=128, new_tokens=32, bar=1.0)
LARGE_SIZE = PromptSize("0.5B", prompt=128, new_tokens=16, bar=1 / 1.5)

_ALONE = "not run: no --torch-python, so these are our numbers alone"
_THREADS = (
    "both processes kept on the same `threads` cores; ours: XLA's own pool, one thread a core; "
    "theirs: torch.set_num_threads and OMP_NUM_THREADS"
)


def run(
    *,
    repeats: int = 5,
    seed: int = 0,
    torch_python: str | None = None,
    threads: int = 0,
    large: bool = False,
    architectures: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Times the tiny model of every architecture; with `large` one of Qwen2-0.5B's shape too.

    Args:
      repeats: turns of each side.
      seed: of the weights.
      torch_python: an interpreter with torch and transformers; None times ours alone.
      threads: of each side, on as many cores; 0 for all that this process may use.
      large: also a Qwen2 of 0.5 billion float32 parameters, which are drawn and written to a temporary directory.
      architectures: names in `config.json`; all that are timed when None.

    Raises:
      InputError: `torch_python` cannot be run or lacks the packages. ConfigError: an unknown architecture.
      WorkerError: the other side fails.
    """
    names = list(TINY) if architectures is None else [name for name in architectures if name]
    configs = {name: tiny_config(name) for name in names}

    with pinned(threads) as count, contextlib.ExitStack() as stack:
        rows: list[Row] = []
        theirs = None if torch_python is None else stack.enter_context(TransformersSide(torch_python, count))
        for name, raw in configs.items():
            rows += compare(raw, tiny_pictures(name), TINY_SIZE, theirs, repeats, seed)
        if large:
            rows += compare(LARGE, {}, LARGE_SIZE, theirs, repeats, seed)
        versions = {} if theirs is None else theirs.versions

    config = {"repeats": repeats, "seed": seed, "threads": count, "dtype": "float32", "least_seconds": LEAST_SECONDS}
    config |= {"sizes": [dataclasses.asdict(size) for size in (TINY_SIZE, *([LARGE_SIZE] if large else []))]}
    config |= {"untimed": UNTIMED, "threads_are": _THREADS, "other_side": versions or _ALONE}
    return {"config": config, "environment": environment(), "rows": rows}


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[int]:
    """Keeps this process and those it starts on as many cores (0: all it may use); gives their number.

    XLA makes as many threads as it may use cores when its first array is made, so that this must come before.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield threads or os.cpu_count() or 1
        return

    def keep_on(cores: Sequence[int]) -> None:
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
                os.sched_setaffinity(int(task), cores)

    before = sorted(os.sched_getaffinity(0))
    chosen = before[: threads or None]
    keep_on(chosen)

    try:
        yield len(chosen)
    finally:
        keep_on(before)


def compare(
    raw: Mapping[str, Any],
    pictures: Mapping[str, np.ndarray],
    size: PromptSize,
    theirs: TransformersSide | None,
    repeats: int,
    seed: int,
) -> list[Row]:
    """Makes all rows of one model."""
    labels: dict[str, Any] = {"size": size.name, "architecture": raw["architectures"][0]}
    logging.info("timing %s %s", *labels.values())
    backbone = random_backbone(raw, seed)
    ours = OurSide(backbone, pictures, size)
    if theirs is None:
        return list(timed_rows(ours, None, labels, size, repeats, True))

    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        vision = {name: value for name, value in pictures.items() if name != "input_ids"}
        np.savez(arrays, **(vision | {"input_ids": ours.ids}))  # type: ignore[arg-type]
        directory = str(save(backbone, Path(folder) / "checkpoint"))
        labels |= theirs.ask("load", directory=directory, arrays=str(arrays), new_tokens=size.new_tokens)
        agreed = agreement_row(ours.outputs(), theirs.outputs(Path(folder)), **labels)
        return [agreed, *timed_rows(ours, theirs, labels, size, repeats, agreed["passed"])]


def timed_rows(
    ours: "OurSide",
    theirs: TransformersSide | None,
    labels: Mapping[str, Any],
    size: PromptSize,
    repeats: int,
    agrees: bool,
) -> Iterator[Row]:
    """Yields a row for each thing that is timed."""
    items = {"prefill": size.prompt, "generate": size.new_tokens, "step": size.new_tokens}
    if ours.pictures:
        items["embed"] = 1

    for metric, count in items.items():
        measure = getattr(ours, metric)
        first = stopwatch(measure)  # compiles
        sides: dict[str, Callable[[], float]] = {"ours": lambda measure=measure: mean_seconds(measure)}
        if theirs is not None:
            theirs.seconds(metric)
            sides["theirs"] = lambda metric=metric: theirs.seconds(metric)
        options = {"items": count, "valid": agrees, "first_call_seconds": first}
        yield comparison_row(metric, interleave(sides, repeats), at_least=size.bar, **options, **labels)


class OurSide:
    """Our side of the comparison; `prefill`, `generate`, `step` and `embed` return the seconds of what they time."""

    def __init__(self, backbone: ModelBackbone, arrays: Mapping[str, np.ndarray], size: PromptSize):
        self.backbone, self.new_tokens, self.ids = backbone, size.new_tokens, prompt(size.prompt)
        self.pictures = dict(arrays)

    def prefill(self) -> float:
        """Times the prompt's forward, from ids, with the KV and the logits of every token."""
        return stopwatch(lambda: jax.block_until_ready(self.backbone.prefill(self.backbone.embed(self.ids))))

    def generate(self) -> float:
        """Times the prompt and the tokens that follow, greedily."""
        return stopwatch(lambda: jax.block_until_ready(self._generated()))

    def step(self) -> float:
        """Times the tokens after the prompt, one `decode` each, without the prompt's prefill."""
        tokens = self.backbone.embed(self.ids)
        out = self.backbone.prefill(tokens)
        cache = pad_cache(to_engine(self.backbone.layout, out.kv, tokens.positions, 0), self.new_tokens)
        logits, cache = jax.block_until_ready((out.logits[:, -1:], cache))
        shape = (1, 1) if self.backbone.layout.rope.axes is None else (1, 1, self.backbone.layout.rope.axes)

        def steps(logits: Array = logits, cache: dict[str, Array] = cache) -> None:
            for position in range(self.ids.shape[1], self.ids.shape[1] + self.new_tokens):
                token = np.asarray(jnp.argmax(logits, axis=-1))
                embedded: Tokens = self.backbone.embed(token, np.full(shape, position, np.int32))
                logits, cache = self.backbone.decode(embedded, cache, np.array([[position]], np.int32))
            jax.block_until_ready(logits)

        return stopwatch(steps)

    def embed(self) -> float:
        """Times the tower, its projector, and putting the features among the embeddings."""
        return stopwatch(lambda: jax.block_until_ready(self.backbone.embed(**self.pictures)))

    def outputs(self) -> dict[str, np.ndarray]:
        """Computes the prompt's logits [1,T,V], the tokens that follow [1,n], and an image's features [E,D]."""
        logits = self.backbone.prefill(self.backbone.embed(self.ids), logits="all").logits
        outputs = {"logits": np.asarray(logits), "tokens": np.asarray(self._generated())}
        if self.pictures:
            # The image's placeholders are the id that is repeated; their embeddings are the features.
            ids = self.pictures["input_ids"]
            (image,) = {int(ids[0, at]) for at in range(1, ids.shape[1]) if ids[0, at] == ids[0, at - 1]}
            embeddings = self.backbone.embed(**self.pictures).embeddings[0]
            outputs["features"] = np.asarray(embeddings[ids[0] == image])

        return outputs

    def _generated(self) -> Array | np.ndarray:
        return self.backbone.generate(self.backbone.embed(self.ids), self.new_tokens)


BENCHMARK = Benchmark("backbones", run, ("size", "architecture"))
