"""Our side of the large comparison, a process of its own: `python -m evals.bench.large_worker REQUEST`, JSON both ways.

Two models of some gigabytes are never in memory together, and each side's peak is its own.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.core import to_engine
from models import load, save
from models.checkpoints.filling import PIECE
from models.inputs.qwen_images import ImageConfig

from .checkpoints import pad_cache, random_backbone
from .large_model import MATMUL, MERGE, PATCH, LargeSize, prompt_arrays
from .timing import peak_bytes, stopwatch, timed


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
    """Loads, runs the tower, prefills and decodes; seconds of each, and peaks of memory."""
    jnp.zeros(()).block_until_ready()  # the client is there before anything is timed
    backbone, seconds, peaks = None, dict[str, float](), {"start": peak_bytes()}
    for name in ("bfloat16", "float32"):
        del backbone
        gc.collect()
        begin = time.perf_counter()
        backbone = load(folder / name, dtype="float32", progress=False)
        jax.block_until_ready(backbone.parameters)
        seconds[f"load {name}"] = time.perf_counter() - begin
        peaks[f"load {name}"] = peak_bytes()
    seconds["plain copy"] = copy_seconds(folder / "float32" / "model.safetensors")

    assert backbone is not None

    def run_timed(name: str, call: Callable[[], Any]) -> Any:
        jax.block_until_ready(call())  # compiles
        value, seconds[name], _ = timed(call)
        peaks[name] = peak_bytes()
        return value

    arrays = prompt_arrays(size, seed)
    new_ids = arrays.pop("new_ids")
    features = run_timed("tower", lambda: backbone.encode(**arrays))
    tokens = backbone.embed(**arrays, features=features)
    out = run_timed("prefill", lambda: backbone.prefill(tokens))
    logits, step_seconds = [np.asarray(out.logits[:, -1:])], []
    cache = pad_cache(to_engine(backbone.layout, out.kv, tokens.positions, 0), size.new_tokens)
    del out  # the cache is a copy: both at once would be the peak

    length, place = tokens.embeddings.shape[1], int(np.max(tokens.positions)) + 1
    for index, token in enumerate(new_ids):
        begin = time.perf_counter()
        embedded = backbone.embed(np.full((1, 1), token), np.full((1, 1, 3), place + index, np.int32))
        step_logits, cache = backbone.decode(embedded, cache, np.array([[length + index]], np.int32))
        logits.append(np.asarray(step_logits))
        step_seconds.append(time.perf_counter() - begin)

    # The first step compiles.
    seconds["step"], peaks["step"] = float(np.median(step_seconds[1:])), peak_bytes()
    np.savez(folder / "ours.npz", logits=np.concatenate(logits, 1), features=np.asarray(features[0]))

    # One product of square matrices: what the other numbers are compared with.
    square, product = jnp.ones((MATMUL, MATMUL), jnp.float32), jax.jit(jnp.matmul)
    jax.block_until_ready(product(square, square))
    seconds["matmul"] = min(stopwatch(lambda: jax.block_until_ready(product(square, square))) for _ in range(5))
    return {"seconds": seconds, "peaks": peaks}


def copy_seconds(path: Path) -> float:
    """Measures the seconds in which a thread for each core reads a file into new memory: the least that a load which
    copies can take. The file's pages are in the page cache.
    """
    size, cores = path.stat().st_size, len(os.sched_getaffinity(0))

    def read(part: int) -> None:
        place, stop = part * size // cores, (part + 1) * size // cores
        with path.open("rb", buffering=0) as file:
            file.seek(place)
            while place < stop:
                place += file.readinto(room[place : min(stop, place + PIECE)])

    begin = time.perf_counter()
    room = memoryview(np.empty(size, np.uint8))  # its pages come with the first write, as a load's do
    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(read, range(cores)))
    return time.perf_counter() - begin


def main(request: str) -> None:
    """Answers a request {"call", "size", "folder", "seed"}; prints the answer as the last line."""
    fields = json.loads(request)
    call = {"make": make, "measure": measure}[fields["call"]]
    print(json.dumps(call(LargeSize(**fields["size"]), Path(fields["folder"]), fields["seed"])))


if __name__ == "__main__":
    main(sys.argv[1])
