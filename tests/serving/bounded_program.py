"""Thousands of drawn requests under budgets that bind: `python bounded_program.py WORK REQUESTS`.

It writes WORK/bounded-REQUESTS.json: memory, and the bytes of the store, of survivors and of the host's copies, as
requests go on. Requests are of 80 tenants and of agents that come and go; windows slide, grow, shrink and come
back in another order; policies, promises and how chunks are declared are drawn, one in a hundred is abandoned. The
model is the small Llama.
"""
# pyright: reportMissingImports=false

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import rig_engine
import tiny_model
from rig_engine import Engine

SEED, EVERY, KIND = 70207, 100, "128"
LIMITS = {"disk": 48 << 20, "survivor_bytes": 6 << 20, "host": 8 << 20}
"""Bytes; a chunk of 32 tokens has 96 KiB."""
TENANTS, AGENTS, MOST_CHUNKS, STEPS = 80, 3, 4, 2
"""Tenants; agents of each at one time; chunks of a window; tokens of an answer."""
SEPARATOR, LEAD = 1, [(7 * place + 3) % 250 + 2 for place in range(16)]
PROBE = [(11 * place + 5) % 250 + 2 for place in range(90)]
OWN = {
    **LIMITS,
    "patch_after": 2,
    "pending_bytes": 2 << 20,
    "ttl": 600,
    "chunking": {"separators": [[SEPARATOR]], "mean": 64, "least": 16, "most": 128},
    "default": {"policy": "exact", "tenant": "everybody"},
}
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 100,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
}


class Traffic:
    """Requests of agents that each have a window of chunks: drawn anew, or earlier ones of their tenants."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.known: dict[str, list[list[int]]] = {}
        self.windows: dict[str, list[list[int]]] = {}

    def request(self) -> tuple[list[int], dict[str, Any]]:
        """Draws a prompt, and what it asks of the connector."""
        rng = self.rng
        tenant = f"tenant {min(rng.zipf(1.3), TENANTS)}"
        agent = f"{tenant} {rng.integers(AGENTS)}"
        window = self.windows.setdefault(agent, [])
        if rng.random() < 0.02:  # the task has ended
            window.clear()
        if rng.random() < 0.3:
            window[:] = [window[place] for place in rng.permutation(len(window))[: rng.integers(1, MOST_CHUNKS + 1)]]
        window.append(self._chunk(tenant))
        del window[:-MOST_CHUNKS]

        shown = [LEAD, *window]
        prompt = [token for chunk in shown for token in (*chunk, SEPARATOR)] + rng.integers(2, 252, 8).tolist()
        asked: dict[str, Any] = {
            "policy": str(rng.choice(["exact", "approximate", "blind"], p=[0.4, 0.2, 0.4])),
            "promise": str(rng.choice(["forget", "remember"])),
            "save": bool(rng.random() < 0.9),
            "tenant": tenant,
            # Names of agents are a process's or a task's: new ones come all the time.
            "agent": f"{agent} {rng.integers(10)}" if rng.random() < 0.5 else agent,
        }
        if rng.random() < 0.5:
            asked["segments"] = np.cumsum([len(chunk) + 1 for chunk in shown]).tolist()
        return prompt, asked if rng.random() < 0.95 else {}

    def _chunk(self, tenant: str) -> list[int]:
        known, rng = self.known.setdefault(tenant, []), self.rng
        if known and rng.random() < 0.4:
            return known[rng.integers(len(known))]
        # Few lengths, because the engine and the connector compile programs for each.
        known.append(rng.integers(2, 252, int(rng.choice([23, 31, 39]))).tolist())
        del known[:-20]
        return known[-1]


def resident() -> int:
    """Bytes of this process's memory that are in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def sample(engine: Any, count: int, began: float) -> dict[str, Any]:
    """What is held after so many requests."""
    gc.collect()
    scheduler = engine.scheduler
    files = [file.stat().st_size for file in engine.store.rglob("*") if file.is_file()]
    return {
        "requests": count,
        "seconds": round(time.perf_counter() - began, 1),
        "resident": resident(),
        "disk_files": sum(files),
        "disk": scheduler.stores.shared._open["everybody"].disk.index.usage()[1],
        "survivors": scheduler.survivors.nbytes,
        "host": scheduler.stores.shared.host_tier.nbytes,
        "open_stores": scheduler.stores.shared.tenants,
        "tracked": len(scheduler._requests),
        "free_blocks": engine.free_blocks(),
    }


def many(engine: Any, requests: int) -> dict[str, Any]:
    """Sends all, in batches of drawn size; a prompt of which the answer is known is asked between them."""
    traffic = Traffic(np.random.default_rng(SEED))
    probe = {"tenant": "everybody", "segments": [40, 80]}
    reference = engine.one(PROBE, steps=8)["tokens"]
    samples, points, equal, sent = [], dict[str, int](), 0, 0
    began = time.perf_counter()
    while sent < requests:
        drawn = [traffic.request() for _ in range(min(EVERY, requests - sent))]
        *kept, last = drawn
        engine.abandon(last[0], **last[1])
        answers = engine.ask(
            *(prompt for prompt, _ in kept), steps=STEPS, likely=1, fresh=False, each=[own for _, own in kept]
        )
        for answer in answers:
            for point, _ in answer["told"].get("served", []):
                points[point] = points.get(point, 0) + 1
        sent += len(drawn)
        plain, exact = engine.one(PROBE, steps=8), engine.one(PROBE, steps=8, **probe)
        equal += plain["tokens"] == exact["tokens"] == reference
        samples.append(sample(engine, sent, began))
        if len(samples) % 10 == 0:
            print(samples[-1], flush=True)
    return {
        "limits": LIMITS,
        "samples": samples,
        "probes": len(samples),
        "probes_equal": equal,
        "chunks_served": points,
        "counts": dict(engine.scheduler.counts),
        "formed": dict(engine.worker.former.counts),
    }


def main(work: str, requests: str) -> None:
    """Serves, and writes what was found."""
    folder, count = Path(work), int(requests)
    model = tiny_model.write(folder / "model-bounded", tiny_model.KINDS[KIND])
    settings = {"backbone": "bounded", **OWN}
    engine = Engine(model, folder / "store-bounded", settings, **OPTIONS)
    rig_engine.written(folder / f"bounded-{count}.json", engine, lambda engine: many(engine, count), seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
