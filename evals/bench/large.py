"""A Qwen2.5-VL of about 3 GB, loaded, run over a 3-megapixel image and 4k tokens, and decoded, beside transformers.

Sides take turns as processes of their own, so that only one model is in memory and each peak is one side's.

* `load float32`, `load bfloat16`: a float32 model from a file of that type, page cache warm. transformers maps a file
  of the model's own type and reads nothing: its time counts until every page was touched.
* `tower`: the tower and its projector over the image.
* `prefill`: the forward of all embeddings, with KV and the last token's logits.
* `step`: one token behind them, the host in between.

A ratio is theirs over ours, of neighbouring turns; above 1 ours is faster. Compilation is in no timing.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from kvpatch_jax.errors import KVPatchError

from .large_prompt import LARGE, MATMUL, LargeSize
from .timing import spread
from .transformers_side import TransformersSide

BARS = {"load float32": 1.0, "load bfloat16": 1.0, "tower": 1.0, "prefill": 1.0, "step": 0.8}
AGREEMENT = 2e-4
"""Largest difference of logits and features, over the largest magnitude, at which both sides are one function."""
TURNS = 2
ROOT = Path(__file__).parents[2]
Side = Callable[[], TransformersSide]


class LargeRunError(KVPatchError):
    """Our side's process ended with an error."""


def run_ours(call: str, size: LargeSize, folder: Path, seed: int) -> dict[str, Any]:
    """Runs `large_ours` and reads its answer.

    Raises:
      LargeRunError: it failed; its last words are in the message.
    """
    request = json.dumps({"call": call, "size": dataclasses.asdict(size), "folder": str(folder), "seed": seed})
    command = [sys.executable, "-m", "evals.bench.large_ours", request]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LargeRunError(f"{call} of the {size.name} model ended with {done.returncode}: {done.stderr[-2000:]!r}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(side: Side | None, repeats: int, seed: int, size: LargeSize = LARGE) -> list[dict[str, Any]]:
    """Makes the rows of the large model.

    Args:
      side: starts transformers' process; None measures ours alone.
      repeats: turns of each side, two at most.
      seed: of weights and prompt.
    """
    row = {"size": size.name, "architecture": size.config()["architectures"][0]}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logging.info("writing the %s model to %s", size.name, folder)
        made = run_ours("make", size, folder, seed)
        for turn in range(min(repeats, TURNS)):
            _warm(folder)
            logging.info("turn %d: ours", turn)
            ours.append(run_ours("measure", size, folder, seed))
            if side is not None:
                logging.info("turn %d: theirs", turn)
                with side() as process:
                    theirs.append(process.ask("large", folder=str(folder)))
        agreed = [] if side is None else [_agreement(row, folder)]
    return [*agreed, *_timed(row, ours, theirs, agreed), *_explained(row | made, size, ours, theirs)]


def _warm(folder: Path) -> None:
    """Reads both files once, into the page cache."""
    for path in folder.glob("*/model.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _agreement(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    with np.load(folder / "ours.npz") as found, np.load(folder / "theirs.npz") as expected:
        differences = {
            name: float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max())
            for name in ("logits", "features")
        }
    worst = max(differences.values())
    checked = {"differences": differences, "value": worst, "bar": AGREEMENT, "passed": worst <= AGREEMENT}
    return {**row, "metric": "agreement", **checked}


def _timed(
    row: Mapping[str, Any],
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
    agreed: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """A row per thing that is timed, in calls per second as the other rows of the suite."""
    rows = []
    for metric, bar in BARS.items():
        seconds = {"ours": [turn["seconds"][metric] for turn in ours]}
        if theirs:
            seconds["theirs"] = [turn["seconds"][metric] for turn in theirs]
        rates = {side: 1 / statistics.median(values) for side, values in seconds.items()}
        made = {**row, "metric": metric, **rates, "seconds": seconds}
        if theirs:
            ratios = [other / own for own, other in zip(seconds["ours"], seconds["theirs"], strict=True)]
            made |= spread(ratios) | {"bar": bar}
            made["passed"] = bool(agreed[0]["passed"] and made["value"] >= bar)
        rows.append(made)
    return rows


def _explained(
    row: Mapping[str, Any],
    size: LargeSize,
    ours: Sequence[Mapping[str, Any]],
    theirs: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Where the time goes: work per second of each part beside one plain product of matrices; peaks of memory."""
    work, rows = size.work(), []
    counts = {"tower": work["tower"], "prefill": work["prefill"], "matmul": 2.0 * MATMUL**3}
    for metric, count in counts.items():
        rates = {
            side: count / statistics.median(turn["seconds"][metric] for turn in turns) / 1e9
            for side, turns in (("ours", ours), ("theirs", theirs))
            if turns
        }
        rows.append({**row, "metric": f"{metric}: GFLOP/s", **rates})
    rates = {
        side: work["step_bytes"] / statistics.median(turn["seconds"]["step"] for turn in turns) / 1e9
        for side, turns in (("ours", ours), ("theirs", theirs))
        if turns
    }
    rows.append({**row, "metric": "step: GB/s of weights", **rates})
    for metric in [name for name in (theirs[0]["seconds"] if theirs else ()) if name.endswith("returned")]:
        rows.append(
            {**row, "metric": metric, "theirs": 1 / statistics.median(each["seconds"][metric] for each in theirs)}
        )
    for kind, profile in ours[-1]["load_profiles"].items():
        rows += [{**row, "metric": f"load {kind}: CPU s, {part}", "ours": value} for part, value in profile.items()]
    for stage in ours[-1]["peaks"]:
        peaks = {
            side: max(turn["peaks"][stage] for turn in turns) / 1e9
            for side, turns in (("ours", ours), ("theirs", theirs))
            if turns and stage in turns[0]["peaks"]
        }
        rows.append({**row, "metric": f"peak GB: {stage}", **peaks})
    return rows
