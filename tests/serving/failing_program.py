"""Drawn requests while stores fail: `python failing_program.py WORK`.

The disk is full, the store's directory is removed, the remote store hangs. It writes WORK/failing-128.json. In every
phase, requests of `bounded_program` with policy "exact" come to the small Llama in a pool that does not hold those that
are served at once, so that some are preempted; one is abandoned. Each answer is compared with the engine's own, which
was asked before anything failed.
"""
# pyright: reportMissingImports=false

import contextlib
import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rig_engine
import tiny_model
from bounded_program import OPTIONS, OWN, Traffic
from rig_engine import Engine

from kvpatch_jax.store.remotes.local_adapter import LocalAdapter

SEED, REQUESTS, STEPS, KIND = 41077, 20, 24, "128"
BLOCKS = 40
"""Fewer than eight requests need."""
TENANT = "everybody"
PHASES = (
    "nothing fails",
    "disk full",
    "room again",
    "remote hangs",
    "it still hangs",
    "remote answers",
    "store removed",
    "after that",
)
"""In each, the first phase's requests come again, and as many new ones; the phases' order counts."""


@contextlib.contextmanager
def replaced(owner: Any, names: Sequence[str], wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Wraps functions, and puts them back."""
    own = {name: getattr(owner, name) for name in names}
    for name, function in own.items():
        setattr(owner, name, wrap(function))
    yield
    for name, function in own.items():
        setattr(owner, name, function)


def full(call: Any) -> Any:
    """Has a system call say what it says on a full disk."""

    def called(*given: Any, **more: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return called


def of_remote(engine: Any) -> dict[str, int]:
    """What the store counts of its remote store."""
    counts = engine.scheduler.stores.shared.of(TENANT).statistics().counts
    return {name: count for name, count in counts.items() if name.startswith("remote")}


def failing(engine: Any) -> dict[str, Any]:
    """Sends the requests of every phase."""
    traffic, released = Traffic(np.random.default_rng(SEED)), threading.Event()
    drawn = [traffic.request() for _ in range(REQUESTS * len(PHASES))]
    prompts = [prompt for prompt, _ in drawn]
    each = [{**own, "policy": "exact", "tenant": TENANT, "save": True} for _, own in drawn]
    reference = [answer["tokens"] for answer in engine.ask(*prompts, steps=STEPS)]
    preempted, free = engine.note_preemptions(), engine.free_blocks()

    def hanging(call: Any) -> Any:
        def called(*given: Any, **more: Any) -> Any:
            released.wait(600)
            return call(*given, **more)

        return called

    def phase(name: str) -> dict[str, Any]:
        counts, formed, remote = dict(engine.scheduler.counts), dict(engine.worker.former.counts), of_remote(engine)
        preempted.clear()
        began = PHASES.index(name) * REQUESTS
        chosen = [*range(REQUESTS), *range(began, began + REQUESTS)]
        engine.abandon(prompts[began], **each[began])
        start = time.perf_counter()
        asked = [each[index] for index in chosen]
        answers = engine.ask(*(prompts[index] for index in chosen), steps=STEPS, each=asked)
        seconds = time.perf_counter() - start
        changed = lambda now, before: {name: own - before.get(name, 0) for name, own in now.items()}
        found = {
            "requests": len(chosen),
            "equal": sum(own["tokens"] == reference[index] for own, index in zip(answers, chosen, strict=True)),
            "served": sum(len(own["told"].get("served", [])) for own in answers),
            "seconds": round(seconds, 1),
            "preemptions": len(preempted),
            "free_blocks": [free, engine.free_blocks()],
            "tracked": len(engine.scheduler._requests),
            "counts": changed(engine.scheduler.counts, counts),
            "formed": changed(engine.worker.former.counts, formed),
            "remote": changed(of_remote(engine), remote),
        }
        print(name, found, flush=True)
        return found

    found = {"nothing fails": phase("nothing fails")}
    with replaced(os, ("pwritev", "posix_fallocate"), full):
        found["disk full"] = phase("disk full")
    found["room again"] = phase("room again")
    with replaced(LocalAdapter, ("read", "write", "delete", "paths"), hanging):
        found |= {name: phase(name) for name in ("remote hangs", "it still hangs")}
    released.set()
    found["remote answers"] = phase("remote answers")
    shutil.rmtree(engine.store)
    found |= {name: phase(name) for name in ("store removed", "after that")}
    return {"phases": found}


def main(work: str) -> None:
    """Serves, and writes what was found."""
    folder = Path(work)
    model = tiny_model.write(folder / "model-failing", tiny_model.KINDS[KIND])
    settings = {"backbone": "failing", "remote": f"file://{(folder / 'remote-failing').absolute()}", "patience": 5.0}
    settings |= {"chunking": OWN["chunking"], "survivor_bytes": 0, "host": 0}
    options = {**OPTIONS, "num_gpu_blocks_override": BLOCKS}
    engine = Engine(model, folder / "store-failing", settings, **options)
    rig_engine.written(folder / f"failing-{KIND}.json", engine, failing, seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
