"""One engine process on the trained Qwen2.5-VL: `python trained_program.py WORK CONTEXTS [ENGINE]`.

It writes WORK/ENGINE-CONTEXTS.json, where ENGINE is one of `ENGINES`: "trained", or that in bfloat16 or on two devices.
Every context is three sheets and a page as images, four chunks, and questions of two tokens behind them; an answer is
the next token. Each way of serving them is asked the same questions: what the engine computes itself ("re-prefill",
with its prefix cache "prefix cache"), the first chunk alone from the store ("leading"), all chunks without patches
("blind"), and with patches of two ranks. Our own executor, in float32, answers the questions of the first contexts too.
"""
# pyright: reportMissingImports=false

import dataclasses
import itertools
import sys
import time
from pathlib import Path

import cpu_rig
import jax
import numpy as np
import rig_engine
import trained_model
from rig_engine import Engine, apart
from trained_task import FRAME, QUESTION, Drawn, prefilled, prompt_of, shares

import kvpatch_jax as kvp
import models

SEED, NAME = 70117, "trained"
COUNTS = {"page": 1, "sheet": 1, "chain": 4, "aggregate": 3}
RANKS = (8, 16)
OWN_CONTEXTS, LIKELY = 8, 20
"""Contexts that our own executor is asked too; log-probabilities that the engine gives of each answer."""
UNBOUNDED = {"policy": "blind", "save": False}
WAYS = {
    "re-prefill": None,
    "prefix cache": None,
    "leading": {"tenant": "blind", "save": False},
    "blind": {**UNBOUNDED, "tenant": "blind"},
    **{f"rank {rank}": {**UNBOUNDED, "tenant": f"rank{rank}"} for rank in RANKS},
}
ENGINES = {
    NAME: {"dtype": "float32", "tensor_parallel_size": 1},
    "bfloat16": {"dtype": "bfloat16", "tensor_parallel_size": 1},
    "divided": {"dtype": "float32", "tensor_parallel_size": 2},
}
OPTIONS = {
    "max_model_len": 192,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 200,
    "async_scheduling": False,
    "limit_mm_per_prompt": {"image": 4, "video": 0},
    "disable_chunked_mm_input": True,
    "skip_mm_profiling": True,
}


def form(engine, images):
    """Has the engine form each chunk from a request of it alone, and patches of two ranks from whole prompts."""
    settings = engine.worker.config
    for tenant, rank in (("blind", None), *((f"rank{rank}", rank) for rank in RANKS)):
        alone = [prompt_of([image], QUESTION) for image in images]
        engine.ask(*alone, steps=1, tenant=tenant)
        if rank is not None:
            engine.worker.former.config = dataclasses.replace(settings, rank=rank)
            engine.one(prompt_of(images, QUESTION), steps=1, tenant=tenant)


def served(engine, images, questions, way, index):
    """Answers to all questions of a context in one way; the first one is asked alone, with its seconds."""
    prompts = [prompt_of(images, question) for question in questions]
    asked = WAYS[way] or {}
    salts = [f"{index} {place}" for place in range(len(prompts))] if way == "re-prefill" else None
    cut = lambda part: {} if salts is None else {"salts": salts[part]}
    began = time.perf_counter()
    first = engine.ask(prompts[0], steps=1, likely=LIKELY, **cut(slice(0, 1)), **asked)
    seconds = time.perf_counter() - began
    others = engine.ask(*prompts[1:], steps=1, likely=LIKELY, fresh=False, **cut(slice(1, None)), **asked)
    return first + others, seconds


def own_answers(drawn):
    """What our own executor says of the first contexts: way → log-probabilities [contexts, questions, vocabulary]."""
    backbone = models.load(trained_model.SHIPPED, dtype="float32")
    answers = {}
    for index in range(min(OWN_CONTEXTS, len(drawn.images))):
        units = [[image] for image in drawn.images[index]]
        chunks = [kvp.make_chunk(backbone, unit, id=str(place)) for place, unit in enumerate(units)]
        conditioned = kvp.conditioned(backbone, units)
        ids = [chunk.id for chunk in chunks]
        starts = np.cumsum([0, *(chunk.span for chunk in chunks)]).tolist()

        def placed(rank, chunks=chunks, conditioned=conditioned, ids=ids, starts=starts):
            pieces = []
            for place, chunk in enumerate(chunks):
                front = ids[:place]
                patch = kvp.form_patch(chunk, conditioned[place], rank, front) if rank and place else None
                pieces.append(kvp.apply_patch(kvp.Placed(chunk, patch, starts[place], front)))
            return kvp.joined(*pieces)

        places = zip(conditioned, chunks, starts, strict=False)
        exact = kvp.joined(*[kvp.to_engine(backbone.layout, kv, chunk.local, start) for kv, chunk, start in places])
        caches = {"re-prefill": exact, "prefix cache": exact, "leading": exact, "blind": placed(0)}
        caches |= {f"rank {rank}": placed(rank) for rank in RANKS}
        questions = backbone.embed(drawn.tokens[index]).shift(starts[-1])
        for way, cache in caches.items():
            rows = {name: np.repeat(value, len(drawn.kind), axis=1) for name, value in cache.items()}
            logits = backbone.prefill(questions, rows).logits[:, -1]  # pyright: ignore[reportArgumentType]
            answers.setdefault(way, []).append(np.asarray(jax.nn.log_softmax(logits)))
    return {way: np.stack(rows) for way, rows in answers.items()}


def from_our_own(drawn, answers, own):
    """How far an engine's log-probabilities are from our own executor's."""
    differences = [
        max(abs(own[index, place, int(token)] - value) for token, value in answers[index][place]["likely"].items())
        for index in range(len(own))
        for place in np.flatnonzero(drawn.valid[index])
    ]
    return {
        "largest": float(np.max(differences)),
        "median": float(np.median(differences)),
        "within_1e-3": float(np.mean(np.array(differences) <= 1e-3)),
        "answers": len(differences),
    }


def from_the_prefix_cache(answers, cached):
    """How far log-probabilities are from those behind the engine's own blocks."""
    pairs = zip(itertools.chain(*answers), itertools.chain(*cached), strict=True)
    differences = [apart(own["likely"], other["likely"]) for own, other in pairs]
    return {"largest": float(np.max(differences)), "median": float(np.median(differences))}


def summary(drawn, answers, seconds, plain, cached):
    """One way's row: accuracy of each kind with its interval, what was prefilled, how far from the prefix cache."""
    valid = drawn.valid
    predicted = np.array([[answer["tokens"][0] for answer in row] for row in answers])
    computed = prefilled(answers)
    told = answers[0][0]["told"]
    return {
        "right": shares(drawn, answers, tuple(COUNTS)),
        "first_tokens_equal_to_the_engine_alone": float((predicted == plain)[valid].mean()),
        "prefilled_tokens_of_the_first_question": float(computed[:, 0].mean()),
        "prefilled_tokens_of_the_others": float(computed[:, 1:].mean()),
        "median_seconds_of_the_first_question": float(np.median(seconds)),
        "difference_from_the_prefix_cache": from_the_prefix_cache(answers, cached),
        "served": told.get("served", []),
    }


def measured(engine, drawn, dtype):
    """Every way, all contexts; then, in float32, what our own executor says."""
    answers, seconds = {way: [] for way in WAYS}, {way: [] for way in WAYS}
    began = time.perf_counter()
    for index, images in enumerate(drawn.images):
        form(engine, images)
        for way in WAYS:
            found, took = served(engine, images, drawn.asked(index), way, index)
            answers[way].append(found)
            seconds[way].append(took)
        print(f"context {index}: {time.perf_counter() - began:.0f} s", flush=True)
    plain = np.array([[answer["tokens"][0] for answer in row] for row in answers["re-prefill"]])
    cached = answers["prefix cache"]
    ways = {way: summary(drawn, answers[way], seconds[way], plain, cached) for way in WAYS}
    if dtype == "float32":
        for way, own in own_answers(drawn).items():
            ways[way]["difference_from_our_executor"] = from_our_own(drawn, answers[way], own)
    return {
        "dtype": dtype,
        "contexts": len(drawn.images),
        "questions": int(drawn.valid.sum()),
        "prompt_tokens": answers["re-prefill"][0][0]["prompt"],
        "ways": ways,
        "formed": dict(engine.worker.former.counts),
        "scheduled": dict(engine.scheduler.counts),
        "free_blocks": engine.free_blocks(),
    }


def main(work: str, contexts: str, engine: str = NAME) -> None:
    """Draws, serves, and writes what was found."""
    folder, options = Path(work), {**ENGINES[engine], **OPTIONS}
    cpu_rig.have_devices(options["tensor_parallel_size"])
    settings = {"backbone": engine, "image_frame": list(FRAME)}
    model = trained_model.write(folder / f"model-{engine}", devices=options["tensor_parallel_size"])
    started = Engine(model, folder / f"store-{engine}", settings, **options)
    drawn = Drawn(int(contexts), SEED, COUNTS)
    run = lambda started: measured(started, drawn, options["dtype"])
    rig_engine.written(folder / f"{engine}-{contexts}.json", started, run, seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
