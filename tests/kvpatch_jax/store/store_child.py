"""What processes of the tests do to a store. One program imports everything and forks them, so that they start fast."""

import json
import os
import random
import signal
import sys
import time

import numpy as np
from store_cases import BACKBONE, host_chunk, patch_of, same_chunk

from kvpatch_jax.store import Budget, ChunkStore


def number_of(worker: int, count: int) -> str:
    return f"w{worker}.{count}"


def write(root: str, worker: int) -> None:
    """Puts chunks and patches for ever; says which once they are acknowledged."""
    store = ChunkStore(root, budget=Budget(host=0))
    count = int(time.time_ns())
    while True:
        count += 1
        chunk = host_chunk(number_of(worker, count), count % 1000)
        if count % 3 == 0:
            store.put(chunk)
            print("kv", chunk.id, count % 1000, flush=True)
        elif count % 3 == 1:
            store.put_async(chunk).result()
            print("kv", chunk.id, count % 1000, flush=True)
        else:
            store.put_patches([patch_of(chunk, antecedent, array=np.asarray) for antecedent in (("A",), ("other",))])
            print("patch", chunk.id, count % 1000, flush=True)


def operate(root: str, worker: int, steps: int) -> None:
    """Random puts, gets and deletes of a few names; the history of calls, with times on one clock, on the way out."""
    rng = random.Random(worker)
    store = ChunkStore(root, budget=Budget(host=1 << 20))
    chunks = [host_chunk(f"K{number}", number) for number in range(4)]
    history = []
    for _ in range(steps):
        key = rng.randrange(len(chunks))
        what = rng.choices(["get", "put", "delete"], [5, 2, 2])[0]
        begin = time.monotonic_ns()
        if what == "put":
            store.put(chunks[key])
            answer = True
        elif what == "delete":
            answer = store.delete(f"K{key}", BACKBONE)
        else:
            found = store.get(f"K{key}", BACKBONE)
            answer = found is not None
            assert found is None or same_chunk(found, chunks[key]), "a bad read"
        history.append((what, key, answer, begin, time.monotonic_ns()))
    assert store.counters["quarantined"] == 0
    print(json.dumps(history))


def serve() -> None:
    """Forks a process per line `what root worker steps output`, and says its number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        what, root, worker, steps, output = line.split()
        if process := os.fork():
            print(process, flush=True)
            continue
        sys.stdout = os.fdopen(os.open(output, os.O_WRONLY | os.O_CREAT), "w")
        status = 1
        try:
            write(root, int(worker)) if what == "write" else operate(root, int(worker), int(steps))
            sys.stdout.close()
            status = 0
        finally:
            os._exit(status)


if __name__ == "__main__":
    serve()
