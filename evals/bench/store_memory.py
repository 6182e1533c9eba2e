"""Memory of several processes that hold the same chunks in their host tiers: files copied, and files mapped.

    python -m evals.bench.store_memory --processes=4 --chunks=24

Each process reads every chunk of a root and keeps it. When all hold all, each sums what the kernel says of its memory:
PSS divides a page among the processes that map it, and private pages are those of this process alone. Then it uses
every chunk once: a sum over all numbers, and jax arrays of them.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvpatch_jax.store import Budget, ChunkStore

from .store_workload import BACKBONE, StoreSizes, chunk_of

SIZES = StoreSizes(tokens=300)  # 17 MB


def memory() -> dict[str, int]:
    """Returns bytes of this process: PSS, of files and anonymous, and private ones."""
    found: dict[str, int] = {}
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        for line in file.readlines()[1:]:
            name, count = line.split()[:2]
            found[name.rstrip(":")] = int(count) << 10
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"pss": found["Pss"], "anonymous": found["Anonymous"], "private": private}


def child(root: str, count: int, mapped: bool, barrier: Barrier, results: Any) -> None:
    """Reads, holds and uses all chunks, and sends what that took."""
    with ChunkStore(root, budget=Budget(host=4 << 30)) as store:
        store.disk.mapped = mapped
        jax.block_until_ready(jax.numpy.zeros(1))
        before = memory()
        barrier.wait()
        began, cpu = time.perf_counter(), time.process_time()
        held = [store.get(f"chunk {number}", BACKBONE) for number in range(count)]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        barrier.wait()
        grown = {name: value - before[name] for name, value in memory().items()}
        barrier.wait()
        began = time.process_time()
        for chunk in held:
            assert chunk is not None
            for value in chunk.kv.values():
                int(np.asarray(value).view(np.uint16).sum(dtype=np.uint64))
        numpy_cpu, began = time.process_time() - began, time.process_time()
        for chunk in held:
            assert chunk is not None
            jax.block_until_ready([jax.device_put(value) for value in chunk.kv.values()])
        results.put(
            grown
            | {"get_seconds": seconds, "get_cpu": cpu, "sum_cpu": numpy_cpu}
            | {"device_put_cpu": time.process_time() - began, "mapped": store.counters["mapped"]}
        )
        barrier.wait()


def main() -> None:
    """Prints one line per arm: megabytes summed over the processes, seconds as means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument("--out", default=None, help="folder of the root")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    if options.out is not None:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out) as root:
        with ChunkStore(root, budget=Budget(host=0)) as store:
            for number in range(options.chunks):
                store.put(chunk_of(SIZES, number, f"chunk {number}"))
            nbytes = sum(entry.size for entry in store.disk.scan())
        for mapped in (False, True):
            barrier, results = context.Barrier(options.processes), context.Queue()
            arguments = (root, options.chunks, mapped, barrier, results)
            children = [context.Process(target=child, args=arguments) for _ in range(options.processes)]
            for process in children:
                process.start()
            rows = [results.get(timeout=300) for _ in children]
            for process in children:
                process.join()
            line: dict[str, Any] = {"mapped": mapped, "files MB": round(nbytes / 1e6)}
            for name in ("pss", "anonymous", "private"):
                line[f"{name} MB, all"] = round(sum(row[name] for row in rows) / 1e6)
            for name in ("get_seconds", "get_cpu", "sum_cpu", "device_put_cpu"):
                line[name] = round(sum(row[name] for row in rows) / len(rows), 3)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
