"""Documents in a sliding window on SmolLM2's released weights: `python documents_program.py WORK TURNS`.

It writes WORK/documents-TURNS.json, with the ways of `loops_program`. A prompt is a lead of some tokens that stays, the
last six chunks of texts that an agent reads on, and a question: what follows them. Requests declare their chunks' ends.
"""
# pyright: reportMissingImports=false

import sys
from pathlib import Path
from typing import Any

import numpy as np
import rig_engine
from loops_program import Turn, measured
from rig_engine import Engine

import models
from evals.pretrained.texts import documents
from evals.real_weights import checkpoint
from kvpatch_jax import Text
from kvpatch_jax.serving.vllm import ConnectorConfig

CHUNK, QUESTION, WINDOW, BATCH, CHUNKS = 96, 8, 6, 12, 20
LEAD = "You read a text from its beginning, part by part, and say how it goes on."
OPTIONS = {
    "max_model_len": 1536,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1536,
    "num_gpu_blocks_override": 4000,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
}


class Reading:
    """Texts in chunks of equal size, one text after another."""

    def __init__(self, backbone: Any, turns: int):
        self.lead = np.asarray(backbone.prepare([Text(LEAD)])["input_ids"])[0].tolist()
        size = CHUNKS * CHUNK
        texts = documents(backbone, "prose", -(-turns // CHUNKS) + 1, size + CHUNK, 2 * size)
        self.tokens = [token for text in texts for token in text.ids[:size].tolist()]

    def prompt(self, images: Any, question: Any, old: int = 0) -> list[int]:
        """Returns the lead, a token in place of each old chunk, chunks and what follows them."""
        chunks = [token for own in images for token in self.tokens[own * CHUNK : (own + 1) * CHUNK]]
        return [*self.lead, *self.tokens[:1] * old, *chunks, *question]

    def declared(self, turn: Turn) -> dict[str, Any]:
        """Returns the ends of the lead and of the chunks."""
        first = len(self.lead)
        return {"segments": [first + CHUNK * place for place in range(len(turn.images) + 1)]}

    def turns(self, count: int) -> list[Turn]:
        """Returns turns of a window of the last chunks, each asked what follows."""
        found, first = [], 0
        for turn in range(count):
            if turn - first + 1 > BATCH:
                first = turn - WINDOW + 1
            images = tuple(range(max(0, turn - WINDOW + 1), turn + 1))
            end = (turn + 1) * CHUNK
            question = tuple(self.tokens[end : end + QUESTION])
            found.append(Turn(images, tuple(range(first, turn + 1)), images[0], question, self.tokens[end + QUESTION]))
        return found


def main(work: str, turns: str) -> None:
    """Reads the weights, serves, and writes what was found."""
    folder, count = Path(work), int(turns)
    file = checkpoint(None)
    backbone = models.load(file, dtype="float32")
    model = models.save(backbone, folder / "model-documents")
    reading = Reading(backbone, count)
    vocabulary = backbone.config.text.vocabulary
    settings = {"backbone": backbone.fingerprint, "patch_after": ConnectorConfig.patch_after}
    del backbone
    engine = Engine(model, folder / "store-documents", settings, max_logprobs=vocabulary, **OPTIONS)
    scenario = lambda engine: {"turns": count, "ways": measured(engine, reading.turns(count), reading, vocabulary)}
    rig_engine.written(folder / f"documents-{count}.json", engine, scenario, weights=file.stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
