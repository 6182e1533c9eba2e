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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rig_engine
import tiny_model
from bounded_program import OPTIONS, OWN, Traffic
from rig_engine import Engine

from kvpatch_jax.store.remotes.local_adapter import LocalAdapter

SEED, REQUESTS, STEPS, KIND = 41077, 40, 24, "128"
BLOCKS = 60
"""Fewer than eight requests need."""
CALLS = ("read", "write", "delete", "paths")
"""Of a remote store's adapter."""


@contextlib.contextmanager
def replaced(owner: Any, names: tuple[str, ...], function: Any) -> Iterator[None]:
    """Replaces functions, and puts them back."""
    own = {name: getattr(owner, name) for name in names}
    for name in names:
        setattr(owner, name, function)
    yield
    for name, function in own.items():
        setattr(owner, name, function)


def no_room(*given: Any, **more: Any) -> Any:
    """What a system call says on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def failing(engine: Engine) -> dict[str, Any]:
    """Sends the requests of every phase."""
    traffic, answered = Traffic(np.random.default_rng(SEED)), threading.Event()
    drawn = [traffic.request() for _ in range(REQUESTS)]
    prompts = [prompt for prompt, _ in drawn]
    each = [{**own, "policy": "exact", "tenant": "everybody", "save": True} for _, own in drawn]
    reference = engine.ask(*prompts, steps=STEPS)
    preempted, free = engine.note_preemptions(), engine.free_blocks()

    def phase() -> dict[str, Any]:
        counts, formed = dict(engine.scheduler.counts), dict(engine.worker.former.counts)
        preempted.clear()
        engine.abandon(prompts[0], **each[0])
        began = time.perf_counter()
        answers = engine.ask(*prompts, steps=STEPS, each=each)
        seconds = time.perf_counter() - began
        changed = lambda now, before: {name: own - before.get(name, 0) for name, own in now.items()}
        return {
            "requests": REQUESTS,
            "equal": sum(own["tokens"] == other["tokens"] for own, other in zip(answers, reference, strict=True)),
            "served": sum(len(own["told"].get("served", [])) for own in answers),
            "seconds": round(seconds, 1),
            "preemptions": len(preempted),
            "free_blocks": [free, engine.free_blocks()],
            "tracked": len(engine.scheduler._requests),
            "counts": changed(engine.scheduler.counts, counts),
            "formed": changed(engine.worker.former.counts, formed),
        }

    found = {}
    with replaced(os, ("pwritev", "posix_fallocate"), no_room):
        found["disk full"] = phase()
    found["room again"] = phase()
    found["served from the store"] = phase()
    shutil.rmtree(engine.store)
    found["store removed"] = phase()
    found["after it"] = phase()
    with replaced(LocalAdapter, CALLS, lambda *given, **more: answered.wait(600)):
        found["remote hangs"] = phase()
        found["it still hangs"] = phase()
    answered.set()
    found["remote answers"] = phase()
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
