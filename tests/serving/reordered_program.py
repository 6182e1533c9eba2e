"""Prompts whose images stand in another order than before: `python reordered_program.py WORK CONTEXTS`.

It writes WORK/reordered-CONTEXTS.json.
The engine has just answered behind each context's images in one order, and has that prompt in its prefix cache. Then
questions come behind the same images, as before or with the sheets in another order, where no prefix is the same. Each
way is asked the same; ways take turns, and the first question's whole way through the engine is timed.
"""
# pyright: reportMissingImports=false

import itertools
import sys
import time
from pathlib import Path

import numpy as np
import rig_engine
import trained_model
from rig_engine import Engine
from trained_program import NAME, OPTIONS, UNBOUNDED
from trained_task import FRAME, QUESTION, Drawn, prefilled, prompt_of, shares

SEED, RANK, TENANT = 61129, 16, "reordered"
COUNTS = {"chain": 3, "override": 3}
"""An override question is about an item that is on two sheets. The later one counts: order decides."""
ORDERS = {"as before": (0, 1, 2), "reordered": (1, 2, 0)}
WAYS = {
    "re-prefill": {},
    "prefix cache": {},
    "leading": {"tenant": TENANT, "save": False},
    f"rank {RANK}": {**UNBOUNDED, "tenant": TENANT},
}


def form(engine, drawn, index):
    """Each image from a request of it alone, and patches behind those in front in both orders."""
    engine.ask(*(prompt_of([image], QUESTION) for image in drawn["as before"].images[index]), steps=1, tenant=TENANT)
    for own in drawn.values():
        engine.one(prompt_of(own.images[index], QUESTION), steps=1, tenant=TENANT)


def served(engine, before, prompts, way, index):
    """Answers in one way behind what the engine has answered before; the first one alone, with its seconds."""
    engine.one(before, steps=1)
    salts = [f"{index} {place}" for place in range(len(prompts))] if way == "re-prefill" else None
    cut = lambda part: {} if salts is None else {"salts": salts[part]}
    began = time.perf_counter()
    first = engine.ask(prompts[0], steps=1, fresh=False, **cut(slice(0, 1)), **WAYS[way])
    seconds = time.perf_counter() - began
    return first + engine.ask(*prompts[1:], steps=1, fresh=False, **cut(slice(1, None)), **WAYS[way]), seconds


def measured(engine, drawn, count):
    """Every way in both orders, for all contexts."""
    cases = list(itertools.product(ORDERS, WAYS))
    answers, seconds = ({case: [] for case in cases} for _ in range(2))
    for index in range(count):
        form(engine, drawn, index)
        before = prompt_of(drawn["as before"].images[index], QUESTION)
        for order, way in cases[index % len(cases) :] + cases[: index % len(cases)]:
            own = drawn[order]
            prompts = [prompt_of(own.images[index], question) for question in own.asked(index)]
            found, took = served(engine, before, prompts, way, index)
            answers[order, way].append(found)
            seconds[order, way].append(took)
        print(f"context {index}", flush=True)

    def row(order, way):
        own, computed = answers[order, way], prefilled(answers[order, way])
        return {
            "right": shares(drawn[order], own, tuple(COUNTS)),
            "prefilled_tokens_of_the_first_question": float(computed[:, 0].mean()),
            "prefilled_tokens_of_the_others": float(computed[:, 1:].mean()),
            # The first contexts compile.
            "seconds_of_the_first_question": np.percentile(seconds[order, way][len(cases) :], [25, 50, 75]).tolist(),
            "served": own[0][0]["told"].get("served", []),
        }

    found = {order: {way: row(order, way) for way in WAYS} for order in ORDERS}
    return {
        "contexts": count,
        "timed": count - len(cases),
        "orders": found,
        "prompt_tokens": answers[cases[0]][0][0]["prompt"],
    }


def main(work: str, contexts: str) -> None:
    """Draws, serves, and writes what was found."""
    folder, count = Path(work), int(contexts)
    settings = {"backbone": NAME, "image_frame": list(FRAME), "rank": RANK}
    model = trained_model.write(folder / "model-reordered")
    engine = Engine(model, folder / "store-reordered", settings, **OPTIONS)
    drawn = {name: Drawn(count, SEED, COUNTS, order) for name, order in ORDERS.items()}
    path = folder / f"reordered-{contexts}.json"
    rig_engine.written(path, engine, lambda engine: measured(engine, drawn, count), seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
