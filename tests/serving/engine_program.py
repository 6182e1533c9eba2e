"""One engine process on the small Llama: `python engine_program.py SCENARIO WORK KIND`, one of `tiny_model.KINDS`.

It writes WORK/SCENARIO-KIND.json.

"forms" forms chunks from its own traffic and measures what serving them does; "serves" starts anew on the same store,
one object of which it damages before it is read; "mixed" has eight requests at once in a small pool, without async
scheduling; "preempted" has eight plain ones there with it and without a connector, before and behind what mends the
engine; "mended" is "mixed" with both. "wider" serves on two devices what "forms" formed on one.
"""
# pyright: reportMissingImports=false

import sys
import time
from pathlib import Path

import cpu_rig
import numpy as np
import rig_engine
import tiny_model
from rig_engine import Engine, compared

from kvpatch_jax.serving.vllm import request_plan, segments_of
from kvpatch_jax.serving.vllm.messages import slots_of
from kvpatch_jax.serving.vllm.stores import StoreCatalog
from kvpatch_jax.store import ChunkStore

STEPS, NAME = 40, "tiny"
"""Tokens of an answer where requests compete for blocks."""
FIRST = [(7 * place + 3) % 250 + 2 for place in range(48)]
SECOND = [(11 * place + 5) % 250 + 2 for place in range(40)]  # ends in the middle of a block
QUESTION = [(13 * place + 1) % 250 + 2 for place in range(9)]
SLOW = 0.5
"""Seconds that a chunk takes to be read, where the store is to be slow."""
ENDS = [len(FIRST), len(FIRST) + len(SECOND)]
PROMPT = FIRST + SECOND + QUESTION


def forms(engine):
    """Everything in one process: formed, served, contaminating and not."""
    reference = engine.one(PROMPT)
    found = {"again": compared(engine.one(PROMPT), reference)}
    for tenant in ("full", "blind"):
        engine.one(FIRST + QUESTION, segments=ENDS[:1], tenant=tenant, steps=1)
        engine.one(SECOND + QUESTION, segments=[len(SECOND)], tenant=tenant, steps=1)
    engine.one(PROMPT, segments=ENDS, tenant="full", steps=1)
    engine.one(PROMPT, segments=ENDS[1:], tenant="whole", steps=1)
    found["formed"] = dict(engine.worker.former.counts)

    found["exact"] = compared(engine.one(PROMPT, segments=ENDS[1:], tenant="whole", save=False), reference)
    found["leading"] = compared(engine.one(PROMPT, segments=ENDS, tenant="full", save=False), reference)
    ask = {"segments": ENDS, "policy": "blind", "save": False}
    found["stored"] = compared(engine.one(PROMPT, tenant="full", **ask), reference)
    found["bare"] = compared(engine.one(PROMPT, tenant="blind", **ask), reference)
    # Before the engine has the same prompt in its own blocks: then it needs no chunks.
    found["bare_again"] = compared(engine.one(PROMPT, fresh=False, tenant="blind", **ask), reference)
    found["plain_after_bare"] = compared(engine.one(PROMPT, fresh=False), reference)

    salt = request_plan.RequestPlan.salt
    request_plan.RequestPlan.salt = lambda self, config, options, own_salt: own_salt
    engine.one(PROMPT, tenant="blind", **ask)
    found["plain_after_bare_without_salt"] = compared(engine.one(PROMPT, fresh=False), reference)
    request_plan.RequestPlan.salt = salt
    return {**found, "first_layer": first_layer(engine), "pages": pages(engine), "ahead": ahead(engine, reference)}


def pages(engine):
    """How a layer's pages lie, on all devices and on each."""
    page = engine.worker._runner.kv_caches[0]
    return {"shape": page.shape, "on_each": page.sharding.shard_shape(page.shape), "devices": len(page.devices())}


def first_layer(engine):
    """How far a moved chunk is from the engine's own prefill in the lowest layer, where nothing in front conditions it.

    Shares of the prefill's largest number. A rope other than the engine's would show here, and not in a leading chunk.
    """
    own, other = (second_chunk(engine, **ask) for ask in ({}, {"tenant": "blind", "policy": "blind"}))
    return {name: float(np.abs(own[name] - other[name]).max() / np.abs(own[name]).max()) for name in own}


def second_chunk(engine, **ask):
    """What the lowest layer's pages hold of the second chunk, once a prompt was answered."""
    noted, allocated = [], engine.scheduler.order_load

    def noting(request, blocks, count):
        noted.append(blocks)
        allocated(request, blocks, count)

    engine.scheduler.order_load = noting
    engine.one(PROMPT, steps=1, segments=ENDS, save=False, **ask)
    engine.scheduler.order_load = allocated
    worker, slots = engine.worker, slots_of(noted[-1], rig_engine.BLOCK, *ENDS)
    kv = worker._format.read(worker.layout, list(worker._runner.kv_caches), slots)
    return {name: np.asarray(value[0], np.float32) for name, value in kv.items()}


def ahead(engine, reference):
    """A store that is slow to read: a plain request that comes behind one of chunks is answered before it."""
    other = PROMPT[::-1]  # or the engine would have the prompt in its own cache before the chunks are read
    references = {"chunks": reference, "plain": engine.one(other)}
    read, finished, done = StoreCatalog.has_canonical, engine.scheduler.finish, {}

    def slow(self, id):
        time.sleep(SLOW)
        return read(self, id)

    def noting(request):
        done["plain" if request.kv_transfer_params is None else "chunks"] = time.perf_counter() - began
        return finished(request)

    StoreCatalog.has_canonical, engine.scheduler.finish = slow, noting
    ask = {"segments": ENDS, "tenant": "full", "policy": "blind", "save": False}
    before, began = engine.scheduler.counts["asked_again"], time.perf_counter()
    answers = engine.ask(PROMPT, other, each=[ask, {}])
    asked_again = engine.scheduler.counts["asked_again"] - before
    engine.abandon(PROMPT, **ask)
    StoreCatalog.has_canonical, engine.scheduler.finish = read, finished
    return {
        "seconds_of_a_read": SLOW,
        "seconds": done,
        "asked_again": asked_again,
        "behind_one_that_was_abandoned": compared(engine.one(PROMPT, **ask), answers[0]),
        "tracked": len(engine.scheduler._requests),
        **{name: compared(own, references[name]) for name, own in zip(references, answers, strict=True)},
    }


def damage(engine, tenant, segment):
    """Turns the bits of one byte of a stored canonical, on the disk."""
    backbone = engine.worker.config.backbone
    store = ChunkStore(engine.store, tenant=tenant)
    name = store.names.canonical(backbone, segment.id)
    ((file,),) = store.objects.index.rows("SELECT file FROM objects WHERE name = ?", name)
    path = engine.store / "data" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    store.close()


def serves(engine):
    """What another process formed is served; what was damaged since is computed."""
    damage(engine, "whole", segments_of(engine.worker.config.backbone, PROMPT, ends=ENDS[1:])[0])
    reference = engine.one(PROMPT)
    ask = {"segments": ENDS, "policy": "blind", "tenant": "full", "save": False}
    found = {
        "leading": compared(engine.one(PROMPT, segments=ENDS, tenant="full", save=False), reference),
        "stored": compared(engine.one(PROMPT, **ask), reference),
        "damaged": compared(engine.one(PROMPT, segments=ENDS[1:], tenant="whole", save=False), reference),
        "plain_after_damaged": compared(engine.one(PROMPT, fresh=False), reference),
        **not_loaded(engine, reference),
        "refused": compared(engine.one(PROMPT, segments=[9, 5], tenant="full"), reference),
    }
    return {**found, "counts": dict(engine.scheduler.counts), "free_blocks": engine.free_blocks()}


def wider(engine):
    """What another process formed on one device is served on two, which repeat its only KV head."""
    reference = engine.one(PROMPT)
    ask = {"segments": ENDS, "tenant": "full", "save": False}
    return {
        "leading": compared(engine.one(PROMPT, **ask), reference),
        "stored": compared(engine.one(PROMPT, policy="blind", **ask), reference),
        "bare": compared(engine.one(PROMPT, policy="blind", **{**ask, "tenant": "blind"}), reference),
        "plain_after_bare": compared(engine.one(PROMPT, fresh=False), reference),
        "pages": pages(engine),
    }


def not_loaded(engine, reference):
    """What happens where splicing itself fails, though all was planned: told by its blocks, and recomputed."""
    write = engine.worker._write

    def fails(load, place):
        if place == 1:
            raise RuntimeError("on purpose")
        write(load, place)

    engine.worker._write = fails
    ask = {"segments": ENDS, "policy": "blind", "tenant": "full", "save": False}
    found = {"not_loaded": compared(engine.one(PROMPT, **ask), reference)}
    engine.worker._write = write
    return {**found, "plain_after_not_loaded": compared(engine.one(PROMPT, fresh=False), reference)}


def mixed(engine):
    """Eight at once, with different plans, in a pool that does not hold them all; then one at a time."""
    unbounded = {"segments": ENDS, "policy": "blind", "save": False}
    each = [
        {},
        {**unbounded, "tenant": "full"},
        {**unbounded, "tenant": "blind"},
        {"segments": ENDS, "tenant": "full", "save": False},
    ] * 2
    prompts = [PROMPT] * 4 + [FIRST + SECOND + QUESTION[::-1]] * 4
    free = engine.free_blocks()
    alone = [engine.one(prompt, steps=STEPS, **own) for prompt, own in zip(prompts, each, strict=True)]
    before, preempted = engine.scheduler.counts["loaded_tokens"], engine.note_preemptions()
    # Plans are dropped where the engine has the prompt in its own cache: each kind has a part of its own there.
    salts = [f"kind {place % 4}" for place in range(len(each))]
    together = engine.ask(*prompts, steps=STEPS, each=each, salts=salts)
    return {
        "together": [compared(own, other) for own, other in zip(together, alone, strict=True)],
        "loaded_tokens": engine.scheduler.counts["loaded_tokens"] - before,
        "preemptions": len(preempted),
        "free_blocks": [free, engine.free_blocks()],
    }


def mended(engine):
    """As `mixed`, with async scheduling and with the engine mended."""
    cpu_rig.mend_resumed_requests()
    return mixed(engine)


def preempted(engine):
    """Eight plain requests, no connector: what a preempted one goes on behind, and what mends it."""
    prompts = [[*FIRST, *SECOND, *QUESTION[:-1], last] for last in range(10, 18)]
    alone = [engine.one(prompt, steps=STEPS) for prompt in prompts]
    noted = engine.note_preemptions()
    together = engine.ask(*prompts, steps=STEPS)
    found = []
    for prompt, own, other in zip(prompts, together, alone, strict=True):
        kept = rig_engine.in_front(own["tokens"], other["tokens"])
        entry = {"tokens_equal_in_front": kept, "of": STEPS}
        if kept < STEPS:
            # What the engine answers when a 0 stands in place of the last token before the answers part.
            behind = engine.one([*prompt, *own["tokens"][: kept - 1], 0], steps=STEPS - kept)
            entry["equal_to_the_answer_behind_a_0"] = behind["tokens"] == own["tokens"][kept:]
        found.append(entry)
    count = len(noted)
    cpu_rig.mend_resumed_requests()
    again = engine.ask(*prompts, steps=STEPS)
    kept = [rig_engine.in_front(own["tokens"], other["tokens"]) for own, other in zip(again, alone, strict=True)]
    return {
        "together": found,
        "preemptions": count,
        "mended": kept,
        "preemptions_mended": len(noted) - count,
    }


SMALL = {"num_gpu_blocks_override": 40, "max_num_seqs": 8}
SCENARIOS = {
    "forms": (forms, {}),
    "serves": (serves, {"recompute": True, "async_scheduling": False}),
    "wider": (wider, {"tensor_parallel_size": 2}),
    "mixed": (mixed, {**SMALL, "async_scheduling": False}),
    "mended": (mended, {**SMALL, "async_scheduling": True}),
    "preempted": (preempted, {**SMALL, "num_gpu_blocks_override": 30, "connector": False}),
}


def started(folder: Path, kind: str, store: str, connector: bool = True, **options) -> Engine:
    """An engine on the small Llama."""
    common = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 2}
    own = tiny_model.KINDS[kind]
    common |= {"num_gpu_blocks_override": 64, "async_scheduling": True, "dtype": own.dtype}
    common |= {"tensor_parallel_size": own.devices, **options}
    cpu_rig.have_devices(common["tensor_parallel_size"])
    model = tiny_model.write(folder / f"model-{kind}", own)
    settings = {"backbone": f"{NAME}{kind}"} if connector else None
    return Engine(model, folder / f"{store}-{kind}", settings, **common)


def main(scenario: str, work: str, kind: str) -> None:
    """Runs a scenario and writes what it found."""
    run, options = SCENARIOS[scenario]
    folder = Path(work)
    engine = started(folder, kind, "store", **options)
    rig_engine.written(folder / f"{scenario}-{kind}.json", engine, run, kind=kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
