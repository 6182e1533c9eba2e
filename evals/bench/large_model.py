"""A Qwen2.5-VL of about 3 GB, loaded, run over a 3-megapixel image and 4k tokens, and decoded, beside transformers.

Sides take turns as processes of their own (ours is `large_worker`), so that only one model is in memory and each peak
is one side's.

* `load float32`, `load bfloat16`: a float32 model from a file of that type, page cache warm. transformers maps a file
  of the model's own type and reads nothing: its time counts until every page was touched. Ours copies: layers of one
  kind lie in one array, and matrices as [in, out], of which files have the transpose.
* `load float32 / plain copy`: how many times longer ours takes than reading the file's bytes into new memory.
* `tower`: the tower and its projector over the image.
* `prefill`: the forward of all embeddings, with KV and the last token's logits.
* `step`: one token after them, the host in between.

Rows without a bar are the profile. Compilation is in no timing.
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
from jaxtyping import Float32, Int32

from kvpatch_jax.errors import KVPatchError

from .benchmark import Row, comparison_row
from .checkpoints import qwen2_config
from .transformers_side import TransformersSide, agreement_row

BARS = {"load float32": 1.0, "load bfloat16": 1.0, "tower": 1.0, "prefill": 1.0, "step": 0.8}
TURNS = 2
ROOT = Path(__file__).parents[2]
Side = Callable[[], TransformersSide]

IMAGE, VIDEO, START, END = 1, 2, 3, 4  # ids of a prompt's special tokens
PATCH, MERGE = 14, 2
MATMUL = 2048  # rows and columns of the product that speeds are held against


@dataclasses.dataclass(frozen=True)
class LargeSize:
    """A Qwen2.5-VL's sizes, and the prompt that it reads.

    Attributes:
      side: patches along each side of the image, an even number. tokens: of the prompt, the image's included.
      new_tokens: decoded after the prompt.
    """

    name: str
    width: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    vision_width: int
    vision_intermediate: int
    vision_depth: int
    vision_heads: int
    side: int
    tokens: int
    new_tokens: int

    def config(self) -> dict[str, Any]:
        """Makes `config.json` as the released checkpoints have it."""
        sections = [self.width // self.heads // 8] + [self.width // self.heads * 3 // 16] * 2
        vision = {
            "depth": self.vision_depth,
            "fullatt_block_indexes": [self.vision_depth // 2 - 1, self.vision_depth - 1],
            "hidden_act": "silu",
            "hidden_size": self.vision_width,
            "in_chans": 3,
            "intermediate_size": self.vision_intermediate,
            "num_heads": self.vision_heads,
            "out_hidden_size": self.width,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
        }
        sizes = (self.width, self.intermediate, self.heads, self.layers, self.kv_heads, self.vocabulary)
        return qwen2_config(
            *sizes,
            architectures=["Qwen2_5_VLForConditionalGeneration"],
            model_type="qwen2_5_vl",
            max_position_embeddings=128000,
            rope_scaling={"type": "mrope", "mrope_section": sections},
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            vision_config=vision,
        )


LARGE = LargeSize(
    "3 GB",
    width=2048,
    intermediate=11008,
    layers=6,
    heads=16,
    kv_heads=2,
    vocabulary=65536,
    vision_width=1280,
    vision_intermediate=3420,
    vision_depth=8,
    vision_heads=16,
    side=124,  # 1736 x 1736 pixels
    tokens=4096,
    new_tokens=16,
)
_TOWER = {"vision_width": 128, "vision_intermediate": 256, "vision_depth": 4, "vision_heads": 4, "side": 16}
SMALL = dataclasses.replace(
    LARGE, name="small", width=256, intermediate=512, layers=2, heads=4, vocabulary=512, tokens=96, **_TOWER
)
"""To see that it runs."""


def prompt_arrays(size: LargeSize, seed: int) -> dict[str, Float32[np.ndarray, "P F"] | Int32[np.ndarray, "..."]]:
    """Draws the prompt: text, the image between its marks, text; and the tokens that follow.

    Returns:
      input_ids [1,T], pixel_values [P, 3·2·14²], image_grid_thw [1,3], new_ids [new_tokens].
    """
    generator = np.random.default_rng(seed)
    image = (size.side // MERGE) ** 2
    before = (size.tokens - image - 2) // 2
    after = size.tokens - image - 2 - before

    def text(count: int) -> np.ndarray:
        return generator.integers(END + 1, size.vocabulary, count)

    ids = np.concatenate([text(before), [START], np.full(image, IMAGE), [END], text(after)])
    return {
        "input_ids": ids[None].astype(np.int32),
        "pixel_values": generator.standard_normal((size.side**2, 6 * PATCH**2), np.float32),
        "image_grid_thw": np.array([[1, size.side, size.side]], np.int32),
        "new_ids": text(size.new_tokens).astype(np.int32),
    }


class LargeRunError(KVPatchError):
    """Our side's process ended with an error."""


def compare(side: Side | None, repeats: int, seed: int, size: LargeSize = LARGE) -> list[Row]:
    """Makes the rows of the large model.

    Args:
      side: starts transformers' process; None measures ours alone.
      repeats: turns of each side, two at most.
      seed: of weights and prompt.
    """
    labels = {"size": size.name, "architecture": size.config()["architectures"][0]}
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    agreed: list[Row] = []

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        logging.info("writing the %s model to %s", size.name, folder)
        files = run_ours("make", size, folder, seed)

        for turn in range(min(repeats, TURNS)):
            # Files are read once, so that neither side waits for the disk.
            for path in folder.glob("*/model.safetensors"):
                with path.open("rb") as file:
                    while file.read(1 << 24):
                        pass

            logging.info("turn %d: ours", turn)
            ours.append(run_ours("measure", size, folder, seed))
            if side is not None:
                logging.info("turn %d: theirs", turn)
                with side() as process:
                    theirs.append(process.ask("large", folder=str(folder)))

        if side is not None:
            with np.load(folder / "ours.npz") as found, np.load(folder / "theirs.npz") as expected:
                agreed = [agreement_row(dict(found), dict(expected), **labels)]

    return [*agreed, *timed_rows(ours, theirs, agreed, labels), *profile_rows(ours, theirs, labels | files)]


def run_ours(call: str, size: LargeSize, folder: Path, seed: int) -> dict[str, Any]:
    """Runs `large_worker` and reads its answer.

    Raises:
      LargeRunError: it failed; its last words are in the message.
    """
    request = json.dumps({"call": call, "size": dataclasses.asdict(size), "folder": str(folder), "seed": seed})
    command = [sys.executable, "-m", "evals.bench.large_worker", request]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr[-2000:]
        raise LargeRunError(f"{call} of the {size.name} model: got status {done.returncode}: {words!r}; expected 0")
    return json.loads(done.stdout.splitlines()[-1])


Turns = Sequence[Mapping[str, Any]]
"""Answers of one side's process, turn by turn."""


def timed_rows(ours: Turns, theirs: Turns, agreed: Sequence[Row], labels: Mapping[str, Any]) -> list[Row]:
    """Makes a row per thing that is timed, in calls per second as the other rows of the benchmark."""
    valid = all(row["passed"] for row in agreed)
    rows = []
    for metric, bar in BARS.items():
        samples = _samples(ours, theirs, lambda turn, metric=metric: turn["seconds"][metric])
        rows.append(comparison_row(metric, samples, at_least=bar, items=1, valid=valid, **labels))
    return rows


def profile_rows(ours: Turns, theirs: Turns, labels: Mapping[str, Any]) -> list[Row]:
    """Makes rows of one plain product of matrices, which the seconds are held against, and of peaks of memory."""
    samples = _samples(ours, theirs, lambda turn: 2 * MATMUL**3 / turn["seconds"]["matmul"] / 1e9)
    rates = {side: statistics.median(values) for side, values in samples.items()}
    rows = [{"metric": "matmul: GFLOP/s", **labels, **rates}]
    copies = [turn["seconds"]["load float32"] / turn["seconds"]["plain copy"] for turn in ours]
    rows.append({"metric": "load float32 / plain copy", **labels, "ours": statistics.median(copies)})
    for stage in ours[-1]["peaks"]:
        with_stage = theirs if theirs and stage in theirs[0]["peaks"] else []
        samples = _samples(ours, with_stage, lambda turn, stage=stage: turn["peaks"][stage] / 1e9)
        rows.append(
            {"metric": f"peak GB: {stage}", **labels, **{side: max(values) for side, values in samples.items()}}
        )
    return rows


def _samples(ours: Turns, theirs: Turns, figure: Callable[[Mapping[str, Any]], float]) -> dict[str, list[float]]:
    """Reads a figure of each turn, by side; without a side that did not run."""
    samples = {}
    for side, turns in (("ours", ours), ("theirs", theirs)):
        if turns:
            samples[side] = [figure(turn) for turn in turns]
    return samples
