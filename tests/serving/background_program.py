"""Canonicals formed in the background, in an engine: `python background_program.py WORK KIND`.

KIND is one of `tiny_model.KINDS`, or "images": the trained model. It writes WORK/background-KIND.json: what is formed
of a chunk that a request has behind another one, beside what a request of the chunk alone leaves; how it is served at
the front; and which engine forms what another one has been killed over.
"""
# pyright: reportMissingImports=false, reportOptionalMemberAccess=false

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cpu_rig
import numpy as np
import rig_engine
import tiny_model
import trained_model
from rig_engine import Engine, compared
from trained_task import FRAME, Drawn, prompt_of

from kvpatch_jax.serving.vllm import canonical_former
from kvpatch_jax.store.remotes import leases

IMAGES, SEED = "images", 50119
LENGTH = 200
"""Tokens of a text: two slices, the second one not full."""
FIRST, SECOND, OTHER = ([(step * place + 3) % 250 + 2 for place in range(LENGTH)] for step in (7, 11, 17))
LEAD, LAST = FIRST[:48], [(13 * place + 1) % 250 + 2 for place in range(9)]
LEASE = 30.0
"""Seconds for which a killed holder has a lease here."""


def started(folder: Path, kind: str) -> Engine:
    """Starts an engine that forms as fast as it can."""
    cpu_rig.have_devices(1)
    settings = {"backbone": kind, "forming_rate": 1e6}
    common: dict[str, Any] = {
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 2,
        "num_gpu_blocks_override": 96,
    }
    if kind == IMAGES:
        model = trained_model.write(folder / "model-background")
        settings["image_frame"] = list(FRAME)
        common |= {"limit_mm_per_prompt": {"image": 4, "video": 0}, "disable_chunked_mm_input": True}
        common |= {"skip_mm_profiling": True, "async_scheduling": False}
    else:
        own = tiny_model.KINDS[kind]
        model = tiny_model.write(folder / f"model-background-{kind}", own)
        common |= {"skip_tokenizer_init": True, "async_scheduling": True, "dtype": own.dtype}
    return Engine(model, folder / f"store-background-{kind}", settings, **common)


def prompts(kind: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Returns prompts by name, with what is said of their chunks: one chunk behind two fronts, and in front of two."""
    if kind == IMAGES:
        drawn = Drawn(1, SEED, {"chain": 4, "aggregate": 2})
        images, question = drawn.images[0], drawn.asked(0)[0]
        orders = {"behind": (0, 1), "front": (1, 2), "alone": (1,)}
        return {name: (prompt_of([images[own] for own in order], question), {}) for name, order in orders.items()}

    def text(*parts: list[int]) -> tuple[Any, dict[str, Any]]:
        ends = np.cumsum([len(part) for part in parts]).tolist()
        return [token for part in (*parts, LAST) for token in part], {"segments": ends}

    return {"behind": text(LEAD, SECOND), "front": text(SECOND, OTHER), "alone": text(SECOND)}


def background(engine: Engine, kind: str) -> dict[str, Any]:
    """Forms a canonical in the background, serves it, and compares both with a request of the chunk alone."""
    given, worker = prompts(kind), engine.worker
    reference = engine.one(given["front"][0])
    noted: list[tuple[str, str]] = []
    put = worker.former.store_canonical

    def noting(tenant: str, id: str, *more: Any) -> None:
        noted.append((tenant, id))
        put(tenant, id, *more)

    worker.former.store_canonical = noting
    engine.one(given["behind"][0], **given["behind"][1], policy="approximate", tenant="background", steps=1)
    worker.canonicals.flush()
    ((_, id),) = noted
    engine.one(given["alone"][0], **given["alone"][1], tenant="alone", steps=1)
    own, other = (worker.stores.canonical(tenant, id) for tenant in ("background", "alone"))
    kv = {name: [np.asarray(each.kv[name], np.float32) for each in (own, other)] for name in own.kv}
    apart = {name: float(np.abs(one - two).max() / np.abs(two).max()) for name, (one, two) in kv.items()}
    served = {
        tenant: engine.one(given["front"][0], **given["front"][1], tenant=tenant, save=False)
        for tenant in ("background", "alone")
    }
    return {
        "counts": dict(worker.canonicals.counts),
        "apart": apart,
        "same_positions": bool((own.local == other.local).all() and own.span == other.span),
        "leading": compared(served["background"], reference),
        "as_alone": compared(served["background"], served["alone"]),
        "held_bytes": worker.former.held_bytes,
    }


def killed(engine: Engine, kind: str) -> None:
    """Dies while it forms, with the lease."""
    given = prompts(kind)
    engine.worker.canonicals._forward.prefill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    engine.one(given["behind"][0], **given["behind"][1], policy="approximate", tenant="killed", steps=1)
    time.sleep(30)
    raise AssertionError("the process lives; expected it to be killed")


def revived(engine: Engine, kind: str, folder: Path) -> dict[str, Any]:
    """Has another engine killed over a canonical, and forms it once the lease is over."""
    command = [sys.executable, __file__, str(folder), kind, "killed"]
    made = subprocess.run(command, check=False, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
    prompt, asked = prompts(kind)["behind"]
    reference, answers, counts = engine.one(prompt), [], []
    for pause in (0.0, LEASE):
        time.sleep(pause)
        answers.append(engine.one(prompt, **asked, policy="approximate", tenant="killed"))
        engine.worker.canonicals.flush()
        counts.append(dict(engine.worker.canonicals.counts))
    return {
        "killed_by": -made.returncode,
        "counts": counts,
        "answers": [compared(answer, reference) for answer in answers],
    }


def main(work: str, kind: str, part: str = "") -> None:
    """Runs it and writes what was found."""
    folder = Path(work)
    canonical_former.LEASE_SECONDS = LEASE
    leases.SKEW = 0.0  # one machine, one clock
    engine = started(folder, kind)
    if part == "killed":
        killed(engine, kind)

    def scenario(engine: Engine) -> dict[str, Any]:
        found = background(engine, kind)
        return found if kind == IMAGES else {**found, "revived": revived(engine, kind, folder)}

    rig_engine.written(folder / f"background-{kind}.json", engine, scenario, kind=kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
