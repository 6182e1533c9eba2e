"""The certificate decides what the engine serves: `python certified_program.py WORK CONTEXTS`.

It writes WORK/certified-CONTEXTS.json.
The connector has the certificate that ships with the trained model, and serves nothing uncertified. Chunks of three
tenants (bare ones, patches of rank 8 and 16) are asked for under bounds in nats. Every answer is compared with the
engine's own: KL over the whole vocabulary, and whether the bound that was told held.
"""
# pyright: reportMissingImports=false

import json
import sys
from pathlib import Path

import numpy as np
import rig_engine
import trained_model
from rig_engine import Engine
from trained_program import OPTIONS
from trained_program import form as form_all
from trained_task import FRAME, Drawn, prompt_of

from evals.task.instances import instance

SEED = 33211
COUNTS = {"page": 1, "sheet": 1, "chain": 4, "aggregate": 2}
CERTIFICATE = trained_model.SHIPPED / "certificate.json"
WORDS = instance("qwen2_5_vl").config.text.vocabulary
MOST = 0.05
"""The operator's bound in nats."""
BOUNDS = (0.001, 0.01, 10.0)
"""Those of requests; the last is beyond the operator's."""
TENANTS = ("blind", "rank8", "rank16")


def divergence(own, other):
    """KL(own ‖ other) of two answers' first tokens, over the whole vocabulary."""
    first, second = (np.array([likely[str(token)] for token in range(WORDS)]) for likely in (own, other))
    return float(np.sum(np.exp(first) * (first - second)))


def measured(engine, drawn):
    """Every tenant under every bound, for all contexts."""
    found = {f"{tenant} {bound:g}": {"kl": [], "told": []} for tenant in TENANTS for bound in BOUNDS}
    likely = {"steps": 1, "likely": WORDS}
    for index, images in enumerate(drawn.images):
        form_all(engine, images)
        prompts = [prompt_of(images, question) for question in drawn.asked(index)]
        plain = engine.ask(*prompts, **likely)
        for tenant in TENANTS:
            for bound in BOUNDS:
                asked = {"tenant": tenant, "policy": "approximate", "kl": bound, "save": False}
                answers = engine.ask(*prompts, **likely, **asked)
                own = found[f"{tenant} {bound:g}"]
                own["told"] += [answer["told"] for answer in answers]
                own["kl"] += [
                    divergence(*(each["likely"] for each in pair)) for pair in zip(plain, answers, strict=True)
                ]
        print(f"context {index}", flush=True)
    return {name: summary(own["kl"], own["told"]) for name, own in found.items()}


def summary(kl, told):
    """One tenant under one bound: what was served, what was promised, what was lost."""
    (served,) = {json.dumps(own["served"]) for own in told}
    (promised,) = {own["kl"] for own in told}
    return {
        "served": json.loads(served),
        "promised": promised,
        "why": told[0]["why"],
        "answers": len(kl),
        "mean": float(np.mean(kl)),
        "largest": float(np.max(kl)),
        # Two prefills of one prompt differ by rounding.
        "within": float(np.mean(np.array(kl) <= max(promised, 1e-6))),
    }


def main(work: str, contexts: str) -> None:
    """Draws, serves, and writes what was found."""
    folder, count = Path(work), int(contexts)
    fingerprint = json.loads(CERTIFICATE.read_text())["certificate"]["backbone"]
    settings = {"backbone": fingerprint, "certificate": str(CERTIFICATE), "uncertified": False, "most_kl": MOST}
    model = trained_model.write(folder / "model-certified")
    options = {**OPTIONS, "max_logprobs": WORDS}
    engine = Engine(model, folder / "store-certified", {**settings, "image_frame": list(FRAME)}, **options)
    drawn = Drawn(count, SEED, COUNTS)
    path = folder / f"certified-{contexts}.json"
    scenario = lambda engine: {"contexts": count, "bounds": measured(engine, drawn), "most_kl": MOST}
    rig_engine.written(path, engine, scenario, seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
