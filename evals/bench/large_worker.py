"""Our side of the large comparison, a process of its own: `python -m evals.bench.large_worker REQUEST`, JSON both ways.

Two models of some gigabytes are never in memory together, and each side's peak is its own.
"""

import contextlib
import gc
import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import to_engine
from models import ModelBackbone, load, save
from models.checkpoints import filling
from models.checkpoints.source import OpenFile
from models.inputs.qwen_images import ImageConfig

from .checkpoints import pad_cache, random_backbone
from .large_model import MATMUL, MERGE, PATCH, LargeSize, prompt_arrays
from .timing import stopwatch, timed


def peak_bytes() -> int:
    """Reads the largest memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def make(size: LargeSize, folder: Path, seed: int) -> dict[str, Any]:
    """Writes the checkpoint in float32 and in bfloat16, and the prompt with its positions."""
    backbone = random_backbone(size.config(), seed)
    backbone.image_config = ImageConfig(patch_size=PATCH, merge_size=MERGE)  # a directory has to have one
    save(backbone, folder / "float32")
    save(backbone, folder / "bfloat16", "bfloat16")
    arrays = prompt_arrays(size, seed)
    grid = {"image_grid_thw": arrays["image_grid_thw"]}
    positions = backbone.family.positions(backbone.config, arrays["input_ids"][0], grid)
    prompt: dict[str, Any] = {**arrays, "position_ids": np.moveaxis(np.asarray(positions)[None], -1, 0)}
    np.savez(folder / "arrays.npz", **prompt)
    sizes = {name: (folder / name / "model.safetensors").stat().st_size for name in ("float32", "bfloat16")}
    return {"file_bytes": sizes}


def measure(size: LargeSize, folder: Path, seed: int) -> dict[str, Any]:
    """Loads, runs the tower, prefills and decodes; seconds of each, the first call's too, and peaks of memory."""
    jnp.zeros(()).block_until_ready()  # the client is there before anything is timed
    seconds: dict[str, float] = {}
    first: dict[str, float] = {}
    peaks = {"start": peak_bytes()}
    backbone, profiles = None, {}

    for name in ("bfloat16", "float32"):
        del backbone
        gc.collect()
        with _profiled() as profiles[name]:
            begin = time.perf_counter()
            backbone = load(folder / name, dtype="float32", progress=False)
            jax.block_until_ready(backbone.parameters)
            seconds[f"load {name}"] = time.perf_counter() - begin
        peaks[f"load {name}"] = peak_bytes()

    assert backbone is not None

    def run_timed(name: str, call: Callable[[], Any]) -> Any:
        # The first call compiles.
        first[name] = stopwatch(lambda: jax.block_until_ready(call()))
        value, seconds[name], _ = timed(call)
        peaks[name] = peak_bytes()
        return value

    arrays = prompt_arrays(size, seed)
    new_ids = arrays.pop("new_ids")
    features = run_timed("tower", lambda: backbone.encode(**arrays))
    tokens = backbone.embed(**arrays, features=features)
    out = run_timed("prefill", lambda: backbone.prefill(tokens))
    logits = [np.asarray(out.logits[:, -1:])]
    cache = pad_cache(to_engine(backbone.layout, out.kv, tokens.positions, 0), size.new_tokens)
    del out
    logits += _decoded(backbone, tokens, cache, new_ids, seconds, first)
    peaks["step"] = peak_bytes()
    np.savez(folder / "ours.npz", logits=np.concatenate(logits, 1), features=np.asarray(features[0]))
    seconds["matmul"] = _matmul()
    return {"seconds": seconds, "first": first, "peaks": peaks, "load_profiles": profiles}


def _decoded(
    backbone: ModelBackbone,
    tokens: Tokens,
    cache: dict[str, Any],
    ids: np.ndarray,
    seconds: dict[str, float],
    first: dict[str, float],
) -> list[np.ndarray]:
    """Decodes the new tokens: the logits after each; the median of a step goes into `seconds`."""
    length, step_seconds, logits = tokens.embeddings.shape[1], [], []
    place = int(np.max(tokens.positions)) + 1
    for index, token in enumerate(ids):
        begin = time.perf_counter()
        embedded = backbone.embed(np.full((1, 1), token), np.full((1, 1, 3), place + index, np.int32))
        step_logits, cache = backbone.decode(embedded, cache, np.array([[length + index]], np.int32))
        logits.append(np.asarray(step_logits))
        step_seconds.append(time.perf_counter() - begin)

    first["step"], seconds["step"] = step_seconds[0], float(np.median(step_seconds[1:]))
    return logits


def _matmul() -> float:
    """Times one product of square float32 matrices: what the other numbers are compared with."""
    square = jnp.ones((MATMUL, MATMUL), jnp.float32)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    return min(stopwatch(lambda: jax.block_until_ready(product(square, square))) for _ in range(5))


@contextlib.contextmanager
def _profiled() -> Iterator[dict[str, float]]:
    """Measures CPU seconds of the threads that load: reading, looking for NaN, casting and placing; all together."""
    spent: defaultdict[str, float] = defaultdict(float)
    file: Any = OpenFile
    work: Any = filling
    before = file.read_into, work.check_finite, work.convert

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                spent[name] += time.thread_time() - begin

        return run

    file.read_into, work.check_finite, work.convert = (
        counted(name, call) for name, call in zip(("read", "finite", "place"), before, strict=True)
    )
    begin = time.process_time()
    profile: dict[str, float] = {}

    try:
        yield profile
    finally:
        file.read_into, work.check_finite, work.convert = before
        profile |= spent | {"all": time.process_time() - begin}


def main(request: str) -> None:
    """Answers a request {"call", "size", "folder", "seed"}; prints the answer as the last line."""
    fields = json.loads(request)
    call = {"make": make, "measure": measure}[fields["call"]]
    print(json.dumps(call(LargeSize(**fields["size"]), Path(fields["folder"]), fields["seed"])))


if __name__ == "__main__":
    main(sys.argv[1])
