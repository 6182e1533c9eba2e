"""Prompts with chunks that are missing in the middle, on the small Llama: `python gaps_program.py SCENARIO WORK KIND`.

WORK/SCENARIO-KIND.json is written. The engine has the change of `ranges_patch.py`. Of five chunks the second and the
fourth are missing; all but the first begin in the middle of a block.

"gaps" has no async scheduling, and recomputes loads that fail; "gaps_async" has it, with the engine mended.
"""
# pyright: reportMissingImports=false

import dataclasses
import itertools
import sys
from pathlib import Path

import cpu_rig
import ranges_patch
import rig_engine
import tiny_model
from engine_program import FIRST, QUESTION, SECOND
from rig_engine import Engine, compared

from kvpatch_jax.serving.vllm import segments_of

CHUNKS = [FIRST, SECOND]
CHUNKS += [
    [(place * step + step) % 250 + 2 for place in range(count)] for step, count in ((17, 37), (19, 21), (23, 30))
]
ENDS = list(itertools.accumulate(map(len, CHUNKS)))
PROMPT = [*itertools.chain(*CHUNKS), *QUESTION]
MISSING = (1, 3)
STEPS, AT_ONCE, SEATS = 24, 48, 8


def forget(engine, tenant, *places):
    """Has chunks of the prompt count as not stored, as those do that could not be placed."""
    segments = segments_of(engine.worker.config.backbone, PROMPT, ends=ENDS)
    for place in places:
        engine.scheduler._unplaced[tenant, segments[place].id] = None


def form(engine):
    """Stores the chunks: as they are prefilled here for "exact", and alone for "bare"; "whole" has the second too."""
    engine.one(PROMPT, segments=ENDS, tenant="exact", steps=1)
    for tenant in ("bare", "whole"):
        for place in (0, 2, 4):
            engine.one(CHUNKS[place] + QUESTION, segments=[len(CHUNKS[place])], tenant=tenant, steps=1)
    engine.one(PROMPT[: ENDS[1]] + QUESTION, segments=ENDS[:2], tenant="whole", steps=1)
    return dict(engine.worker.former.counts)


def served(engine):
    """One at a time: exact and approximate plans with gaps, beside the engine alone and the same without ranges."""
    reference, ask = engine.one(PROMPT), {"segments": ENDS, "save": False}
    found = {"whole": compared(engine.one(PROMPT, tenant="exact", **ask), reference)}
    forget(engine, "exact", *MISSING)
    found["exact"] = compared(engine.one(PROMPT, tenant="exact", **ask), reference)
    # The engine has a part of a range, and of the prompt's first chunk.
    engine.one(PROMPT[: ENDS[2] - 3])
    found["exact_behind_own_blocks"] = compared(engine.one(PROMPT, fresh=False, tenant="exact", **ask), reference)
    found["plain_after_exact"] = compared(engine.one(PROMPT, fresh=False), reference)
    blind = {**ask, "tenant": "bare", "policy": "blind"}
    found["bare"] = compared(engine.one(PROMPT, **blind), reference)
    found["bare_again"] = compared(engine.one(PROMPT, fresh=False, **blind), reference)
    found["plain_after_bare"] = compared(engine.one(PROMPT, fresh=False), reference)
    # A chunk that is prefilled in a gap is what a prefill left behind the same chunk: so are the answers.
    for way, tenant in (("first_gap", "bare"), ("no_gap", "whole")):
        own = {"segments": ENDS[:3], "save": False, "policy": "blind", "tenant": tenant}
        found[way] = engine.one(PROMPT, **own)
    found["first_gap"] = compared(found["first_gap"], found["no_gap"])
    found["no_gap"] = compared(found["no_gap"], reference)
    config = engine.scheduler.config
    engine.scheduler.config = dataclasses.replace(config, ranges=None)
    for way, own in (("exact", {**ask, "tenant": "exact"}), ("bare", blind)):
        found[f"{way}_without_ranges"] = compared(engine.one(PROMPT, **own), reference)
    engine.scheduler.config = config
    return found


def not_loaded(engine):
    """A range that cannot be spliced, the second one: recomputed, and nothing is loaded behind it."""
    write, reference = engine.worker._write, engine.one(PROMPT)

    def fails(load, place):
        if load.first >= ENDS[1]:
            raise RuntimeError("on purpose")
        write(load, place)

    engine.worker._write = fails
    ask = {"segments": ENDS, "tenant": "exact", "save": False}
    found = {"not_loaded": compared(engine.one(PROMPT, **ask), reference)}
    engine.worker._write = write
    engine.scheduler._unplaced.popitem()
    found["plain_after_not_loaded"] = compared(engine.one(PROMPT, fresh=False), reference)
    engine.abandon(PROMPT, **ask)
    return {**found, "behind_one_that_was_abandoned": compared(engine.one(PROMPT, **ask), reference)}


def together(engine):
    """Some dozens at once, in a pool that does not hold eight of them; and each alone."""
    ask = {"segments": ENDS, "save": False}
    kinds = [{}, {**ask, "tenant": "exact"}, {**ask, "tenant": "bare", "policy": "blind"}]
    each = [kinds[place % 3] for place in range(AT_ONCE)]
    prompts = [[*PROMPT[:-1], place // 3 + 2] for place in range(AT_ONCE)]
    free, counts = engine.free_blocks(), engine.scheduler.counts
    alone = [engine.one(prompt, steps=STEPS, **own) for prompt, own in zip(prompts, each, strict=True)]
    before, preempted = counts["loaded_tokens"], engine.note_preemptions()
    salts = [f"own {place}" for place in range(AT_ONCE)]  # or they would share the engine's blocks
    answers = engine.ask(*prompts, steps=STEPS, each=each, salts=salts)
    found = [compared(own, other) for own, other in zip(answers, alone, strict=True)]
    return {
        "together": [{name: own[name] for name in own if name not in ("told", "cached")} for own in found],
        "loaded_tokens": counts["loaded_tokens"] - before,
        "preemptions": len(preempted),
        "free_blocks": [free, engine.free_blocks()],
        "tracked": len(engine.scheduler._requests),
        "held": engine.scheduler.reading,
    }


def gaps(engine):
    """Everything, in one process."""
    found = {"formed": form(engine), **served(engine)}
    if not engine.core.scheduler.scheduler_config.async_scheduling:
        found |= not_loaded(engine)
    from_hooks = dict(engine.core.scheduler.connector.failures)
    return {**found, **together(engine), "failures": from_hooks, "lines": ranges_patch.changed_lines()}


def main(scenario: str, work: str, kind: str) -> None:
    """Runs a scenario and writes what it found."""
    folder, is_async = Path(work), scenario == "gaps_async"
    ranges_patch.install()
    if is_async:
        cpu_rig.mend_resumed_requests()
    own = tiny_model.KINDS[kind]
    options = {"skip_tokenizer_init": True, "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": SEATS}
    options |= {"num_gpu_blocks_override": 64, "async_scheduling": is_async, "dtype": own.dtype}
    model, store = tiny_model.write(folder / f"model-{kind}", own), folder / f"store-{scenario}-{kind}"
    engine = Engine(model, store, {"backbone": f"tiny{kind}", "ranges": 16}, recompute=not is_async, **options)
    rig_engine.written(folder / f"{scenario}-{kind}.json", engine, gaps, kind=kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
