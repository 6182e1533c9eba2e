"""One engine process on the small Llama that has much to do, or dies.

`python endurance_program.py SCENARIO WORK HEAD_DIM`:
"many" answers 500 requests with five kinds of plans, in a small pool; "killed" is killed while it saves a chunk;
"revived" starts on what that one left. They write WORK/SCENARIO-HEAD_DIM.json, except "killed".
"""
# pyright: reportMissingImports=false

import os
import signal
import sys
from pathlib import Path

import numpy as np
import rig_engine
from engine_program import ENDS, FIRST, PROMPT, QUESTION, SECOND, SMALL, damage, started
from rig_engine import compared, in_front

from kvpatch_jax.serving.vllm import segments_of

REQUESTS, STEPS, SEED = 500, 24, 0
APPROXIMATE = ("stored", "bare")


def plans(engine):
    """Kinds of plans by name; the object that the last one asks for is damaged on the disk, and not read before."""
    engine.one(PROMPT, segments=ENDS[1:], tenant="hurt", steps=1)
    damage(engine, "hurt", segments_of(engine.worker.config.backbone, PROMPT, ends=ENDS[1:])[0])
    unbounded = {"segments": ENDS, "policy": "blind", "save": False}
    return {
        "plain": {},
        "stored": {**unbounded, "tenant": "full"},
        "bare": {**unbounded, "tenant": "blind"},
        "leading": {"segments": ENDS, "tenant": "full", "save": False},
        "damaged": {"segments": ENDS[1:], "tenant": "hurt", "save": False},
    }


def many(engine):
    """Mixed requests, each compared with its answer when it is asked alone, or with the plain one where it says that it
    is exact; then what is left behind.
    """
    kinds = plans(engine)
    prompts = [FIRST + SECOND + QUESTION[place:] + QUESTION[:place] for place in range(5)]
    free = engine.free_blocks()
    alone = {
        (name, place): engine.one(prompt, steps=STEPS, **asked)
        for name, asked in kinds.items()
        for place, prompt in enumerate(prompts)
    }
    random = np.random.default_rng(SEED)
    names = [str(name) for name in random.choice(list(kinds), REQUESTS)]
    places = [int(place) for place in random.integers(0, len(prompts), REQUESTS)]
    # Where the engine has a prompt in its own cache, it needs no chunks: half of the approximate ones share none.
    salts = ["own" if name in APPROXIMATE and number % 2 else "shared" for number, name in enumerate(names)]
    preempted, each = engine.note_preemptions(), [kinds[name] for name in names]
    answers = engine.ask(*(prompts[place] for place in places), steps=STEPS, each=each, salts=salts)
    exact = [name in APPROXIMATE and own["told"]["exact"] for own, name in zip(answers, names, strict=True)]
    kept = [
        in_front(answer["tokens"], alone["plain" if is_exact else name, place]["tokens"])
        for answer, name, place, is_exact in zip(answers, names, places, exact, strict=True)
    ]
    equal = {name: [own == STEPS for own, other in zip(kept, names, strict=True) if other == name] for name in kinds}
    return {
        "requests": {name: len(own) for name, own in equal.items()},
        "equal_to_alone": {name: sum(own) for name, own in equal.items()},
        "left_to_the_engine": {
            name: sum(own for own, other in zip(exact, names, strict=True) if other == name) for name in APPROXIMATE
        },
        "plain_is_not_bare": alone["plain", 0]["tokens"] != alone["bare", 0]["tokens"],
        "damaged_matched": alone["damaged", 0]["cached"],
        "preemptions": len(preempted),
        "free_blocks": [free, engine.free_blocks()],
        "tracked": len(engine.scheduler._requests),
        "counts": dict(engine.scheduler.counts),
    }


def killed(engine):
    """One chunk is saved; the process dies while it saves the second, when its bytes are written and not yet synced."""
    engine.one(FIRST + QUESTION, segments=ENDS[:1], tenant="full", steps=1)
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    engine.one(SECOND + QUESTION, segments=[len(SECOND)], tenant="full", steps=1)
    raise AssertionError("the process lives; expected it to be killed")


def revived(engine):
    """What was left is served, or formed again."""
    reference = engine.one(PROMPT)
    ask = {"segments": ENDS, "tenant": "full"}
    left = engine.one(PROMPT, **ask, policy="blind", save=False)
    engine.one(SECOND + QUESTION, segments=[len(SECOND)], tenant="full", steps=1)
    engine.one(PROMPT, **ask, steps=1)
    again = engine.one(PROMPT, **ask, policy="blind", save=False)
    formed = dict(engine.worker.former.counts)
    return {"left": compared(left, reference), "formed": formed, "again": compared(again, reference)}


SCENARIOS = {
    "many": (many, "store", {**SMALL, "num_gpu_blocks_override": 26, "async_scheduling": False}),
    "killed": (killed, "killed", {}),
    "revived": (revived, "killed", {}),
}


def main(scenario: str, work: str, kind: str) -> None:
    """Runs a scenario and writes what it found."""
    run, store, options = SCENARIOS[scenario]
    folder = Path(work)
    engine = started(folder, kind, store, **options)
    rig_engine.written(folder / f"{scenario}-{kind}.json", engine, run, kind=kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
