"""First tokens while canonicals are formed in the background, and while none are.

`python background_load_program.py WORK` writes WORK/background-load-128.json. Requests arrive as a Poisson process at
two rates, shares of what the engine can do; each is a lead and four of many texts in an order of its own, so that most
texts are met behind other fronts and become canonicals. Runs with forming and without take turns, with the same
arrivals and prompts. They also differ by the machine's other work; so it is noted how long each request waits for the
forward that it finds in progress, and what first tokens would be without these waits.
"""
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import dataclasses
import gc
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_rig
import jax
import numpy as np
import rig_engine
import tiny_model
from rig_engine import Engine
from vllm import SamplingParams

from kvpatch_jax.serving.vllm.canonical_former import CanonicalFormer

SEED, TEXTS, LENGTH, SHOWN, STEPS = 61001, 150, 120, 4, 4
LOADS = (0.25, 0.5)
"""Shares of what the engine can do."""
REQUESTS, PAIRS = 40, 4
LEAD = [(7 * place + 3) % 250 + 2 for place in range(48)]
LAST = [(13 * place + 1) % 250 + 2 for place in range(9)]
ENDS = [len(LEAD) + LENGTH * count for count in range(SHOWN + 1)]
RATE = 512
"""Tokens that may be formed in a second."""


def prompts_of(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Draws prompts of the lead, some of the texts and a question."""
    texts = rng.integers(2, 250, (TEXTS, LENGTH)).tolist()
    chosen = [rng.permutation(TEXTS)[:SHOWN] for _ in range(count)]
    return [[*LEAD, *(token for text in own for token in texts[text]), *LAST] for own in chosen]


class Runs:
    """Runs on one engine, with forming or without.

    Args:
      engine: it was started with forming.
    """

    def __init__(self, engine: Engine):
        self._engine, self._forward = engine, engine.worker.canonicals._forward
        engine.worker.canonicals.close(5.0)
        self._config = engine.scheduler.config
        self._forwards: list[tuple[float, float]] = []
        forward = self._forward._slice

        def noting(*given: Any) -> Any:
            began = time.perf_counter()
            pages = jax.block_until_ready(forward(*given))
            self._forwards.append((began, time.perf_counter()))
            return pages

        self._forward._slice = noting

    def run(self, name: str, prompts: Sequence[Sequence[int]], gaps: Sequence[float], forms: bool) -> dict[str, Any]:
        """Sends prompts at their times. Returns the seconds to their first tokens, and what was formed meanwhile."""
        engine, worker, own = self._engine, self._engine.worker, self._engine.llm.llm_engine
        config = self._config if forms else dataclasses.replace(self._config, forming_rate=0)
        engine.scheduler._admission._config = config
        canonicals = CanonicalFormer(config, worker.stores, worker.former, self._forward) if forms else None
        worker.canonicals = canonicals
        engine.llm.reset_prefix_cache()
        gc.collect()
        asked = {"segments": ENDS, "tenant": name, "policy": "approximate"}
        params = SamplingParams(
            max_tokens=STEPS,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvpatch": asked}},
        )
        self._forwards.clear()
        began = time.perf_counter()
        due, first, sent = began + np.cumsum(gaps), {}, 0
        while len(first) < len(prompts) or own.has_unfinished_requests():
            while sent < len(prompts) and time.perf_counter() >= due[sent]:
                own.add_request(f"{name} {sent}", {"prompt_token_ids": list(prompts[sent])}, params)
                sent += 1
            if not own.has_unfinished_requests():
                # As a served engine waits for its queue.
                time.sleep(max(0.0, due[sent] - time.perf_counter()))
                continue
            for output in own.step():
                number = int(output.request_id.split()[-1])
                if number not in first and output.outputs[0].token_ids:
                    first[number] = time.perf_counter() - due[number]
        seconds = time.perf_counter() - began
        counts = {}
        if canonicals is not None:
            counts = dict(canonicals.counts)
            canonicals.close(30.0)
        worker.canonicals = None
        worker.former.flush()
        waits = [max((end - at for start, end in self._forwards if start <= at < end), default=0.0) for at in due]
        return {
            "first": [first[number] for number in range(len(prompts))],
            "waits": waits,
            "forwards": [end - start for start, end in self._forwards],
            "seconds": seconds,
            "counts": counts,
        }


def measured(engine: Engine, pairs: int) -> dict[str, Any]:
    """Finds what the engine can do, then runs pairs at each load."""
    runs, rng = Runs(engine), np.random.default_rng(SEED)
    prompts = prompts_of(rng, 16)
    for forms in (True, False):
        runs.run(f"warm {forms}", prompts, [0.1] * len(prompts), forms)
    one_by_one = [runs.run(f"alone{number}", [prompt], [0.0], False) for number, prompt in enumerate(prompts[:16])]
    alone = float(np.median([own["seconds"] for own in one_by_one]))
    print(f"a request alone: {1000 * alone:.1f} ms", flush=True)
    rows = []
    for load in LOADS:
        kept: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
        for pair in range(pairs):
            prompts, gaps = prompts_of(rng, REQUESTS), rng.exponential(alone / load, REQUESTS)
            for way in ("on", "off") if pair % 2 else ("off", "on"):
                found = runs.run(f"{way}{load}-{pair}", prompts, gaps.tolist(), way == "on")
                kept[way].append({**found, "load_average": os.getloadavg()[0]})
                middle, late = np.percentile(found["first"], [50, 99]) * 1000
                print(f"{load} {pair} {way}: {middle:.1f} {late:.1f} ms {found['counts']}", flush=True)
        rows.append(row_of(load, load / alone, kept))
    return {"alone_ms": 1000 * alone, "requests": REQUESTS, "pairs": pairs, "rate": RATE, "rows": rows}


def row_of(load: float, arrivals: float, kept: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """What the runs at one load say together: percentiles of all requests, and of each run."""
    result: dict[str, Any] = {"load": load, "requests_per_second": arrivals}
    for way, found in kept.items():
        every = np.concatenate([own["first"] for own in found])
        counts = [own["counts"].get("background", 0) for own in found]
        result[way] = {
            "p50_ms": 1000 * float(np.percentile(every, 50)),
            "p99_ms": 1000 * float(np.percentile(every, 99)),
            "mean_ms": 1000 * float(every.mean()),
            "p50_of_runs": [1000 * float(np.percentile(own["first"], 50)) for own in found],
            "p99_of_runs": [1000 * float(np.percentile(own["first"], 99)) for own in found],
            "formed_tokens_per_second": LENGTH * sum(counts) / sum(own["seconds"] for own in found),
            "load_average": [round(own["load_average"], 1) for own in found],
        }
    first, waits, forwards = (
        np.concatenate([np.asarray(own[name]) for own in kept["on"]]) for name in ("first", "waits", "forwards")
    )
    result["waits"] = {
        "share": float((waits > 0).mean()),
        "mean_ms": 1000 * float(waits.mean()),
        "largest_ms": 1000 * float(waits.max()),
        "forward_ms": 1000 * float(np.median(forwards)),
        "forwards": len(forwards),
        "share_of_time": float(forwards.sum() / sum(own["seconds"] for own in kept["on"])),
        "p50_ratio": float(np.percentile(first, 50) / np.percentile(first - waits, 50)),
        "p99_ratio": float(np.percentile(first, 99) / np.percentile(first - waits, 99)),
    }
    for name in ("p50", "p99", "mean"):
        result[f"{name}_ratio"] = result["on"][f"{name}_ms"] / result["off"][f"{name}_ms"]
    return result


def main(work: str, pairs: str = str(PAIRS)) -> None:
    """Starts, measures, and writes what was found."""
    folder = Path(work)
    cpu_rig.have_devices(1)
    model = tiny_model.write(folder / "model-background-load", tiny_model.KINDS["128"])
    options = {"skip_tokenizer_init": True, "max_model_len": 640, "max_num_batched_tokens": 640, "max_num_seqs": 4}
    options |= {"num_gpu_blocks_override": 400, "async_scheduling": False}
    settings = {"backbone": "tiny", "forming_rate": RATE, "patch_after": 2}
    engine = Engine(model, folder / "store-background-load", settings, **options)
    rig_engine.written(folder / "background-load-128.json", engine, lambda own: measured(own, int(pairs)), seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
