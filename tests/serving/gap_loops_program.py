"""Loops whose prompts lack chunks inside, with ranges and without: `python gap_loops_program.py WORK TURNS LOOP`.

LOOP is one of `LOOPS`. WORK/gaps-LOOP-TURNS.json is written, and WORK/gaps-LOOP.json, its certificate. The engine
has the change of `ranges_patch.py`; "without" it is not asked for, so that the same engine, at the same turn, serves
what the released one would.

reopened   as there: every turn opens a few of six images, in another order.
replaced   every turn shows four images that stay, and a new one in their middle.
lost       every turn of a task brings an image, and is served by an engine whose prefix cache is empty and whose store
           has lost one of the images.
"""
# pyright: reportMissingImports=false

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import loops_program
import numpy as np
import ranges_patch
import rig_engine
import trained_model
from loops_program import OPTIONS, SEED, Scene, Turn
from rig_engine import Engine
from trained_task import FRAME

from kvpatch_jax.serving.vllm import ConnectorConfig

STAY = 4
"""Images that stay where the middle one is replaced."""
POLICIES = {"exact": {"policy": "exact"}, "forget": {"policy": "approximate"}, "blind": {"policy": "blind"}}
WAYS = ("re-prefill", "prefix cache", *(f"{policy}{ranges}" for policy in POLICIES for ranges in ("", ", ranges")))


def replaced(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns with a new image in the middle."""
    for turn in range(turns):
        yield scene.turn([*range(STAY // 2), STAY + turn, *range(STAY // 2, STAY)], rng)


LOOPS = {"reopened": loops_program.reopened, "replaced": replaced, "lost": loops_program.appended}
RECORDED_TURNS = {"reopened": (1,), "replaced": (1,), "lost": loops_program.RECORDED_TURNS["appended"]}


def lose(engine: Engine, image: int) -> None:
    """Has an image of the next prompts, counted behind the lead, count as not stored."""
    scheduler = engine.scheduler
    assert scheduler is not None
    plan = type(scheduler)._plan

    def losing(state: Any) -> Any:
        scheduler._unplaced = {(state.options.tenant, state.segments[1 + image].id): None}
        return plan(scheduler, state)

    scheduler._plan = losing


def measured(engine: Engine, turns: Sequence[Turn], scene: Scene, loses: bool) -> dict[str, Any]:
    """Answers every turn in every way.

    Args:
      loses: whether an image is lost in every turn, and the prefix cache emptied.
    """
    assert engine.scheduler is not None
    answers: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    config, logits, began = engine.scheduler.config, engine.note_logits(), time.perf_counter()
    for number, turn in enumerate(turns):
        prompt = scene.prompt(turn.images, turn.question)
        if loses:
            lose(engine, 7 * number % len(turn.images))
        for way in WAYS:
            policy, _, ranges = way.partition(", ")
            engine.scheduler.config = config if ranges else dataclasses.replace(config, ranges=None)
            asked = POLICIES.get(policy)
            own: dict[str, Any] = {} if asked is None else {**asked, "tenant": way.replace(", ", "-")}
            salt, start = f"{way} {number}" if way == "re-prefill" else way, time.perf_counter()
            answers[way].append(loops_program.answer_with(engine, logits, prompt, salt, loses, **own))
            seconds[way].append(time.perf_counter() - start)
        if number % 20 == 19:
            print(f"turn {number + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    return {way: loops_program.row(answers[way], answers["re-prefill"], turns, seconds[way]) for way in WAYS}


def main(work: str, turns: str, loop: str) -> None:
    """Draws, serves, and writes what was found."""
    folder, count = Path(work), int(turns)
    ranges_patch.install()
    certificate = loops_program.certify(folder, f"gaps-{loop}", LOOPS[loop], RECORDED_TURNS[loop])
    saved = json.loads(certificate.read_text())
    settings = {"backbone": saved["certificate"]["backbone"], "certificate": str(certificate), "uncertified": True}
    settings |= {"image_frame": list(FRAME), "patch_after": ConnectorConfig.patch_after, "ranges": 1}
    rng = np.random.default_rng(SEED)
    scene = Scene(count + loops_program.PAGES, rng)
    listed = list(LOOPS[loop](scene, count, rng))
    model = trained_model.write(folder / "model-loops", loops_program.MODEL)
    engine = Engine(model, folder / f"store-gaps-{loop}", settings, **OPTIONS)

    def scenario(engine: Engine) -> dict[str, Any]:
        found = measured(engine, listed, scene, loop == "lost")
        failures = dict(engine.core.scheduler.connector.failures)
        return {"loop": loop, "turns": count, "ways": found, "failures": failures, "certificate": saved["digest"]}

    rig_engine.written(folder / f"gaps-{loop}-{count}.json", engine, scenario, seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
