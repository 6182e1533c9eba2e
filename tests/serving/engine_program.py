"""One engine process: `python engine_program.py SCENARIO WORK HEAD_DIM`, which writes WORK/SCENARIO-HEAD_DIM.json.

"forms" forms chunks from its own traffic and measures what serving them does; "serves" starts anew on the same store,
one object of which it damages before it is read; "mixed" has eight requests at once in a small pool.
"""
# pyright: reportMissingImports=false

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import cpu_rig

cpu_rig.prepare()

import numpy as np  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

cpu_rig.install()

import tiny_model  # noqa: E402

from kvpatch_jax.serving.vllm import planning  # noqa: E402
from kvpatch_jax.serving.vllm.segments import segments_of  # noqa: E402
from kvpatch_jax.store import ChunkStore  # noqa: E402

BLOCK, STEPS, NAME = 16, 8, "tiny"
FIRST = [(7 * place + 3) % 250 + 2 for place in range(48)]
SECOND = [(11 * place + 5) % 250 + 2 for place in range(40)]  # ends in the middle of a block
QUESTION = [(13 * place + 1) % 250 + 2 for place in range(9)]
ENDS = [len(FIRST), len(FIRST) + len(SECOND)]
PROMPT = FIRST + SECOND + QUESTION


class Engine:
    """An engine with the connector, and its two sides, which live in this process."""

    def __init__(self, work: Path, head_dim: int, blocks: int = 64, requests: int = 2, recompute: bool = False):
        began = time.perf_counter()
        model = tiny_model.write(work / f"model{head_dim}", head_dim)
        self.store = work / f"store{head_dim}"
        extra = {"store": str(self.store), "backbone": f"{NAME}{head_dim}", "rank": 16, "uncertified": True}
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=256,
            max_num_seqs=requests,
            max_num_batched_tokens=256,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=True,
            enforce_eager=True,
            async_scheduling=not recompute,
            kv_transfer_config={
                "kv_connector": "TPUOffloadConnector",
                "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute" if recompute else "fail",
                "kv_connector_extra_config": extra,
            },
        )
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler, self.worker = core.scheduler.connector.scheduler_side, get_kv_transfer_group().worker_side
        self.core = core
        self.seconds = time.perf_counter() - began

    def ask(self, *prompts, steps=STEPS, salts=None, fresh=True, **asked):
        """Answers prompts together; `asked` goes to the connector of all of them."""
        several = asked.pop("each", [asked] * len(prompts))
        if fresh:
            self.llm.reset_prefix_cache()
        given, options = [], []
        for place, prompt in enumerate(prompts):
            salt = None if salts is None else salts[place]
            given.append({"prompt_token_ids": list(prompt), **({} if salt is None else {"cache_salt": salt})})
            own = {"kv_transfer_params": {"kvpatch": several[place]}} if several[place] else None
            options.append(
                SamplingParams(
                    max_tokens=steps, temperature=0, detokenize=False, logprobs=10, ignore_eos=True, extra_args=own
                )
            )
        outputs = self.llm.generate(given, options, use_tqdm=False)
        self.worker.former.flush()
        return [answer_of(output) for output in outputs]

    def one(self, prompt, **asked):
        """Answers one prompt."""
        return self.ask(prompt, **asked)[0]

    def free_blocks(self):
        """Blocks that nobody holds."""
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def answer_of(output):
    """What the tests look at."""
    first = output.outputs[0]
    told = (output.kv_transfer_params or {}).get("kvpatch", {})
    likely = {str(token): own.logprob for token, own in first.logprobs[0].items()}
    return {"tokens": list(first.token_ids), "cached": output.num_cached_tokens, "likely": likely, "told": told}


def compared(answer, reference):
    """An answer beside that of the engine alone."""
    same = [own == other for own, other in zip(answer["tokens"], reference["tokens"], strict=True)]
    both = reference["likely"].keys() & answer["likely"].keys()
    apart = max((abs(reference["likely"][token] - answer["likely"][token]) for token in both), default=float("nan"))
    return {
        "tokens_equal_in_front": int(np.cumprod(same).sum()),
        "of": len(same),
        "largest_difference_of_log_probabilities": apart,
        "cached": answer["cached"],
        "told": answer["told"],
    }


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
    ask = {"segments": ENDS, "policy": "approximate"}
    found["stored"] = compared(engine.one(PROMPT, tenant="full", **ask), reference)
    found["bare"] = compared(engine.one(PROMPT, tenant="blind", **ask), reference)
    found["plain_after_bare"] = compared(engine.one(PROMPT, fresh=False), reference)
    found["bare_again"] = compared(engine.one(PROMPT, fresh=False, tenant="blind", **ask), reference)

    salt = planning.RequestPlan.salt
    planning.RequestPlan.salt = lambda self, settings, asked, own: own
    engine.one(PROMPT, tenant="blind", **ask)
    found["plain_after_bare_without_salt"] = compared(engine.one(PROMPT, fresh=False), reference)
    planning.RequestPlan.salt = salt
    return found


def serves(engine):
    """What another process formed is served; what was damaged since is computed."""
    backbone = engine.worker.settings.backbone
    (whole,) = segments_of(backbone, PROMPT, ends=ENDS[1:])
    store = ChunkStore(engine.store, tenant="whole")
    (entry,) = store.disk.of_chunk(store.names.canonical(backbone, whole.id))
    path = engine.store / entry.path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    store.close()

    reference = engine.one(PROMPT)
    ask = {"segments": ENDS, "policy": "approximate", "tenant": "full", "save": False}
    found = {
        "leading": compared(engine.one(PROMPT, segments=ENDS, tenant="full", save=False), reference),
        "stored": compared(engine.one(PROMPT, **ask), reference),
        "damaged": compared(engine.one(PROMPT, segments=ENDS[1:], tenant="whole", save=False), reference),
        "plain_after_damaged": compared(engine.one(PROMPT, fresh=False), reference),
        **not_loaded(engine, reference),
        "refused": compared(engine.one(PROMPT, segments=[9, 5], tenant="full"), reference),
    }
    return {**found, "counts": dict(engine.scheduler.counts), "free_blocks": engine.free_blocks()}


def not_loaded(engine, reference):
    """What happens where splicing itself fails, though all was planned: told by its blocks, and recomputed."""
    write = engine.worker._write

    def fails(load, place):
        if place == 1:
            raise RuntimeError("on purpose")
        write(load, place)

    engine.worker._write = fails
    ask = {"segments": ENDS, "policy": "approximate", "tenant": "full", "save": False}
    found = {"not_loaded": compared(engine.one(PROMPT, **ask), reference)}
    engine.worker._write = write
    return {**found, "plain_after_not_loaded": compared(engine.one(PROMPT, fresh=False), reference)}


def mixed(engine):
    """Eight at once, with different plans, in a pool that does not hold them all; then one at a time."""
    approximate = {"segments": ENDS, "policy": "approximate", "save": False}
    each = [
        {},
        {**approximate, "tenant": "full"},
        {**approximate, "tenant": "blind"},
        {"segments": ENDS, "tenant": "full", "save": False},
    ] * 2
    prompts = [PROMPT] * 4 + [FIRST + SECOND + QUESTION[::-1]] * 4
    free = engine.free_blocks()
    alone = [engine.one(prompt, steps=40, **own) for prompt, own in zip(prompts, each, strict=True)]
    before = engine.scheduler.counts["loaded_tokens"]
    together = engine.ask(*prompts, steps=40, each=each)
    return {
        "together": [compared(own, other) for own, other in zip(together, alone, strict=True)],
        "loaded_tokens": engine.scheduler.counts["loaded_tokens"] - before,
        "free_blocks": [free, engine.free_blocks()],
    }


SCENARIOS = {
    "forms": (forms, {}),
    "serves": (serves, {"recompute": True}),
    "mixed": (mixed, {"blocks": 40, "requests": 8}),
}


def main(scenario: str, work: str, head_dim: str) -> None:
    """Runs a scenario and writes what it found."""
    run, options = SCENARIOS[scenario]
    engine = Engine(Path(work), int(head_dim), **options)
    found = {"engine_seconds": round(engine.seconds, 1), "head_dim": int(head_dim), **run(engine)}
    names = ("vllm-tpu", "tpu-inference", "jax", "torch", "transformers", "numpy")
    found["versions"] = {name: importlib.metadata.version(name) for name in names}
    (Path(work) / f"{scenario}-{head_dim}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
