"""Backbones: prefill and decode of every family, beside transformers on the CPU where another interpreter has it.

Both sides read the same float32 checkpoint and run the same prompt, in turns, on the same cores with as many threads.
What is timed, and where the two are alike or not:

* `prefill`: embedding and forward of the prompt, with its KV and the logits of every token. tokens/s of the prompt.
* `generate`: the prompt and the tokens that follow it greedily, whole calls (ours one compiled program). new tokens/s.
* `step`: the same tokens one call each, with the host in between, without the prompt. new tokens/s.
* `embed`: an image family's tower and projector over one small image. Ours also embeds the prompt and puts the features
  in place. images/s.
* with `large`, what `large.py` says; rows without a bar there are the profile.

A ratio is ours over theirs, of neighbouring turns; above 1 ours is faster. Compilation is in no timing.
"""

import contextlib
import dataclasses
import functools
import os
import statistics
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

from ..results.environment import environment
from ..results.tables import aligned_table
from .checkpoints import LARGE, TINY, UNTIMED, pad_cache, prompt, random_backbone, tiny_config, tiny_pictures
from .large import compare as compare_large
from .timing import LEAST_SECONDS, Turns, mean_seconds, spread, stopwatch, take_turns
from .transformers_side import TransformersSide

AGREEMENT = 2e-4
"""Largest difference of logits and features, over the largest magnitude, at which both sides are one function."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A prompt, the tokens that follow, and the ratio of tokens per second to reach."""

    name: str
    prompt: int
    new_tokens: int
    bar: float


TINY_SIZE = Size("tiny", prompt=128, new_tokens=32, bar=1.0)
LARGE_SIZE = Size("0.5B", prompt=128, new_tokens=16, bar=1 / 1.5)


class Ours:
    """Our side of the comparison; `prefill`, `generate`, `step` and `embed` return the seconds of what they time."""

    def __init__(self, backbone: ModelBackbone, arrays: Mapping[str, np.ndarray], size: Size):
        self.backbone, self.new_tokens, self.ids = backbone, size.new_tokens, prompt(size.prompt)
        self.pictures = dict(arrays)

    def prefill(self) -> float:
        """Times the prompt's forward, from ids, with the KV and the logits of every token."""
        return stopwatch(lambda: jax.block_until_ready(self.backbone.prefill(self.backbone.embed(self.ids))))

    def generate(self) -> float:
        """Times the prompt and the tokens that follow, greedily."""
        return stopwatch(lambda: jax.block_until_ready(self._generated()))

    def step(self) -> float:
        """Times the tokens behind the prompt, one `decode` each, without the prompt's prefill."""
        logits, cache = self._filled()
        return stopwatch(lambda: self._steps(logits, cache))

    def embed(self) -> float:
        """Times the tower, its projector, and putting the features among the embeddings."""
        return stopwatch(lambda: jax.block_until_ready(self.backbone.embed(**self.pictures)))

    def outputs(self) -> dict[str, np.ndarray]:
        """Computes the prompt's logits [1,T,V], the tokens that follow [1,n], and an image's features [E,D]."""
        logits = self.backbone.prefill(self.backbone.embed(self.ids), logits="all").logits
        found = {"logits": logits, "tokens": self._generated()}
        if self.pictures:
            found["features"] = self._features()
        return {name: np.asarray(value) for name, value in found.items()}

    def _features(self) -> Array:
        """Embeddings at the places that an image changes: those of its placeholders."""
        ids = self.pictures["input_ids"]
        (image,) = {int(ids[0, at]) for at in range(1, ids.shape[1]) if ids[0, at] == ids[0, at - 1]}
        return self.backbone.embed(**self.pictures).embeddings[0][ids[0] == image]

    def _generated(self) -> Array | np.ndarray:
        return self.backbone.generate(self.backbone.embed(self.ids), self.new_tokens)

    def _filled(self) -> tuple[Array, dict[str, Array]]:
        tokens = self.backbone.embed(self.ids)
        out = self.backbone.prefill(tokens)
        cache = pad_cache(to_engine(self.backbone.layout, out.kv, tokens.positions, 0), self.new_tokens)
        return jax.block_until_ready((out.logits[:, -1:], cache))

    def _steps(self, logits: Array, cache: dict[str, Array]) -> None:
        shape = (1, 1) if self.backbone.layout.rope.axes is None else (1, 1, self.backbone.layout.rope.axes)
        for at in range(self.ids.shape[1], self.ids.shape[1] + self.new_tokens):
            token = np.asarray(jnp.argmax(logits, axis=-1))
            tokens: Tokens = self.backbone.embed(token, np.full(shape, at, np.int32))
            logits, cache = self.backbone.decode(tokens, cache, np.array([[at]], np.int32))
        jax.block_until_ready(logits)


def _rates(row: dict[str, Any], turns: Turns, items: int) -> dict[str, Any]:
    rates = {name: [items / seconds for seconds in taken] for name, taken in turns.items()}
    return row | {name: statistics.median(values) for name, values in rates.items()} | {"all": rates}


def _against(row: dict[str, Any], agrees: bool, bar: float) -> dict[str, Any]:
    """The row with the ratio of neighbouring turns and whether it is within the bar; as it is without another side."""
    if "theirs" not in row:
        return row
    ratios = [ours / theirs for ours, theirs in zip(row["all"]["ours"], row["all"]["theirs"], strict=True)]
    row = row | spread(ratios)
    return row | {"bar": bar, "passed": bool(agrees and row["value"] >= bar)}


def measure(ours: Ours, theirs: TransformersSide | None, row: dict[str, Any], size: Size, repeats: int, agrees: bool):
    """Yields a row for each thing that is timed."""
    items = {"prefill": size.prompt, "generate": size.new_tokens, "step": size.new_tokens}
    for metric, count in (items | ({"embed": 1} if ours.pictures else {})).items():
        timed = getattr(ours, metric)
        first = stopwatch(timed)
        sides: dict[str, Callable[[], float]] = {"ours": lambda timed=timed: mean_seconds(timed)}
        if theirs is not None:
            theirs.seconds(metric)
            sides["theirs"] = lambda metric=metric: theirs.seconds(metric)
        rated = _rates(row | {"metric": metric}, take_turns(sides, repeats), count)
        yield _against(rated, agrees, size.bar) | {"first_call_seconds": first}


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Measures the largest difference over the largest magnitude; infinite where the shapes differ."""
    return float(np.abs(found - expected).max() / np.abs(expected).max()) if found.shape == expected.shape else np.inf


def agreement(ours: Ours, theirs: TransformersSide, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Checks that both sides compute the same function: differences of logits and features, share of equal tokens."""
    found, expected = ours.outputs(), theirs.outputs(folder)
    same = float(np.mean(found["tokens"] == expected["tokens"]))
    differences = {name: relative(found[name], expected[name]) for name in expected if name != "tokens"}
    worst = max(differences.values())
    checked = {"differences": differences, "equal_tokens": same, "value": worst, "bar": AGREEMENT}
    return row | {"metric": "agreement", **checked, "passed": worst <= AGREEMENT}


def compare(
    raw: Mapping[str, Any],
    pictures: Mapping[str, np.ndarray],
    size: Size,
    theirs: TransformersSide | None,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Makes all rows of one model."""
    row: dict[str, Any] = {"size": size.name, "architecture": raw["architectures"][0]}
    logging.info("timing %s %s", *row.values())
    backbone = random_backbone(raw, seed)
    ours = Ours(backbone, pictures, size)
    if theirs is None:
        return list(measure(ours, None, row, size, repeats, True))
    with tempfile.TemporaryDirectory() as folder:
        arrays = Path(folder) / "arrays.npz"
        vision = {name: value for name, value in pictures.items() if name != "input_ids"}
        np.savez(arrays, **(vision | {"input_ids": ours.ids}))  # type: ignore[arg-type]
        directory = str(save(backbone, Path(folder) / "checkpoint"))
        row |= theirs.ask("load", directory=directory, arrays=str(arrays), new_tokens=size.new_tokens)
        agreed = agreement(ours, theirs, row, Path(folder))
        return [agreed, *measure(ours, theirs, row, size, repeats, agreed["passed"])]


@contextlib.contextmanager
def pinned(threads: int) -> Iterator[int]:
    """Keeps this process and those it starts on as many cores (0: all it may use); gives their number.

    XLA makes as many threads as it may use cores when its first array is made, so that this must come before.
    """
    if not hasattr(os, "sched_getaffinity"):
        yield threads or os.cpu_count() or 1
        return
    before = sorted(os.sched_getaffinity(0))
    chosen = before[: threads or None]
    _keep_on(chosen)
    try:
        yield len(chosen)
    finally:
        _keep_on(before)


def _keep_on(cores: Sequence[int]) -> None:
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended meanwhile
            os.sched_setaffinity(int(task), cores)


def run(
    *,
    repeats: int = 5,
    seed: int = 0,
    torch_python: str | None = None,
    threads: int = 0,
    large: bool = False,
    architectures: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Times the tiny model of every architecture; with `large` that of `large.py` and one of Qwen2-0.5B's shape too.

    Args:
      repeats: turns of each side.
      seed: of the weights.
      torch_python: an interpreter with torch and transformers; None times ours alone.
      threads: of each side, on as many cores; 0 for all that this process may use.
      large: also a Qwen2.5-VL of 0.8 and a Qwen2 of 0.5 billion float32 parameters, which are drawn and written to a
        temporary directory.
      architectures: names in `config.json`; all that are timed when None.

    Returns:
      {"config", "environment", "rows"}, ready for JSON.

    Raises:
      InputError: `torch_python` cannot be run or lacks the packages. ConfigError: an unknown architecture.
      WorkerError, LargeRunError: the other side, or our own process of the large model, fails.
    """
    names = list(TINY if architectures is None else architectures)
    with pinned(threads) as count, contextlib.ExitStack() as stack:
        rows: list[dict[str, Any]] = []
        if large:  # first, while no other model is in memory
            start = functools.partial(TransformersSide, torch_python, count) if torch_python else None
            rows += compare_large(start, repeats, seed)
        theirs = None if torch_python is None else stack.enter_context(TransformersSide(torch_python, count))
        for name in names:
            rows += compare(tiny_config(name), tiny_pictures(name), TINY_SIZE, theirs, repeats, seed)
        if large:
            rows += compare(LARGE, {}, LARGE_SIZE, theirs, repeats, seed)
        versions = {} if theirs is None else theirs.versions
    config = {"repeats": repeats, "seed": seed, "threads": count, "dtype": "float32", "least_seconds": LEAST_SECONDS}
    config |= {"sizes": [dataclasses.asdict(size) for size in (TINY_SIZE, *([LARGE_SIZE] if large else []))]}
    config |= {"untimed": UNTIMED, "threads_are": _THREADS, "other_side": versions or _ALONE}
    return {"config": config, "environment": environment(), "rows": rows}


_ALONE = "not run: no --torch-python, so these are our numbers alone"
_THREADS = (
    "both processes kept on the same `threads` cores; ours: XLA's own pool, one thread a core; "
    "theirs: torch.set_num_threads and OMP_NUM_THREADS"
)
_HEADS = ("size", "architecture", "metric", "ours/s", "theirs/s", "ratio", "low", "high", "bar", "")


def table(result: Mapping[str, Any]) -> str:
    """Formats the rows for reading: rates per second, ratios (above 1 ours is faster), pass or fail."""
    text = aligned_table(_HEADS, [_cells(row) for row in result["rows"]])
    other = result["config"]["other_side"]
    return f"{text}\n{other if isinstance(other, str) else _verdict(result['rows'])}"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [_number(row.get(name)) for name in ("ours", "theirs", "value", "low", "high", "bar")]
    verdict = {None: "", True: "pass", False: "FAIL"}[row.get("passed")]
    return (row["size"], row["architecture"], row["metric"], *numbers, verdict)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    judged = [row for row in rows if "passed" in row]
    failed = [f"{row['size']} {row['architecture']} {row['metric']}" for row in judged if not row["passed"]]
    summary = f"{len(judged) - len(failed)} of {len(judged)} rows within their bars"
    return summary + "".join(f"\n  not: {each}" for each in failed)
