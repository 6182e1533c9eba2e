"""Documents in a sliding window on SmolLM2's released weights: `python documents_program.py WORK TURNS`.

It writes WORK/documents-TURNS.json, with the ways of `loops_program`, and WORK/prose.json, the certificate. A prompt is
a lead that stays, the last six chunks of documents that an agent reads on, and the words that follow them; the answer
is the next token. Requests declare where their chunks end. The weights are those of `pretrained_program`.
"""
# pyright: reportMissingImports=false

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rig_engine
from loops_program import WAYS, Turn, measured
from rig_engine import Engine

import models
from evals.certify.sources import PIECE
from evals.certify.windows import LEAD
from evals.real_weights import weights_file
from evals.texts.corpus import SOURCES, documents
from kvpatch_jax import Text
from kvpatch_jax.serving.vllm import ConnectorConfig

WINDOW, BATCH, QUESTION = 6, 12, 8
"""Chunks in the window; those at which batched eviction evicts; tokens of what follows them."""
CHUNKS = 20
"""Of a document; what is left of it is not read."""
MOST_KL = 0.5
"""The operator's limit in nats: above the certificate's bound of survivors, so that they are served."""
OPTIONS = {
    "max_model_len": 1024,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 4000,
    "async_scheduling": False,
    "skip_tokenizer_init": True,
}


class Reading:
    """Documents of language reference, one after another, in chunks as long as those of certificates.

    Attributes:
      names: the documents' names.
    """

    def __init__(self, backbone: Any, turns: int):
        read = documents(backbone, "prose", -(-turns // CHUNKS) + 1, CHUNKS * PIECE, CHUNKS * PIECE)
        self.names = [document.name for document in read]
        self.lead = np.asarray(backbone.prepare([Text(LEAD)])["input_ids"])[0].tolist()
        self.tokens = [token for document in read for token in document.ids.tolist()]

    def prompts(self, turn: Turn) -> dict[str, list[int]]:
        """Returns the prompt of every way: the lead, chunks, and what follows them."""

        def prompt(chunks: tuple[int, ...]) -> list[int]:
            shown = [token for chunk in chunks for token in self.tokens[chunk * PIECE : (chunk + 1) * PIECE]]
            return [*self.lead, *shown, *turn.question]

        return dict.fromkeys(WAYS, prompt(turn.images)) | {"batched eviction": prompt(turn.evicted)}

    def declared(self, turn: Turn) -> dict[str, Any]:
        """Returns the ends of the lead and of the chunks."""
        return {"segments": [len(self.lead) + PIECE * place for place in range(len(turn.images) + 1)]}

    def turns(self, count: int) -> list[Turn]:
        """Returns turns of a window of the last chunks; a turn's "images" are chunks."""
        found, first = [], 0
        for turn in range(count):
            if turn - first + 1 > BATCH:
                first = turn - WINDOW + 1
            chunks = tuple(range(max(0, turn - WINDOW + 1), turn + 1))
            end = (turn + 1) * PIECE
            question, answer = tuple(self.tokens[end : end + QUESTION]), self.tokens[end + QUESTION]
            found.append(Turn(chunks, tuple(range(first, turn + 1)), chunks[0], question, answer))
        return found


def certify(folder: Path, model: Path, read: list[str]) -> Path:
    """Certifies the model on documents of the same kind that are not read in the loop; returns the file."""
    path, texts = folder / "prose.json", folder / "prose"
    if path.exists():
        return path
    texts.mkdir(parents=True, exist_ok=True)
    for name, text in SOURCES["prose"]():
        if name not in read:
            (texts / f"{name.replace('/', ' ')}.txt").write_text(text)
    flags = [f"--model={model}", "--dtype=float32", f"--texts={texts}", f"--out={path}", f"--chunks={WINDOW}"]
    flags += ["--n=40", "--batch=2", "--ranks=16", "--skip=orbit,update,fresh,mean,near,repair"]
    subprocess.run([sys.executable, "-m", "evals.certify", *flags], check=True)
    return path


def main(work: str, turns: str) -> None:
    """Reads the weights, certifies, serves, and writes what was found."""
    folder, count = Path(work), int(turns)
    file = weights_file("smollm2")
    backbone = models.load(file, dtype="float32")
    model = models.save(backbone, folder / "model-documents")
    reading = Reading(backbone, count)
    settings = {"backbone": backbone.fingerprint, "uncertified": False, "most_kl": MOST_KL}
    del backbone
    certificate = certify(folder, file, reading.names)
    settings |= {"certificate": str(certificate), "patch_after": ConnectorConfig.patch_after}  # as it comes
    engine = Engine(model, folder / "store-documents", settings, **OPTIONS)

    def scenario(engine: Engine) -> dict[str, Any]:
        assert engine.scheduler is not None
        found = measured(engine, reading.turns(count), reading)
        return {
            "turns": count,
            "documents": reading.names,
            "ways": found,
            "most_kl": MOST_KL,
            "survivor_bytes": engine.scheduler.survivors.nbytes,
            "certificate": json.loads(certificate.read_text())["digest"],
        }

    rig_engine.written(folder / f"documents-{count}.json", engine, scenario, weights=file.stem)


if __name__ == "__main__":
    main(*sys.argv[1:])
