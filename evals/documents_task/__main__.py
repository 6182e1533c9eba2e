"""Draws the documents' picture: `python -m evals.documents_task --out=docs/pictures/documents.png`.

A bill, a chart and a screen with what stands in front of them, what is asked, and what each way of reuse answers.
"""

from .. import extra as extra  # isort: split

from pathlib import Path

import numpy as np
from absl import app, flags

from kvpatch_jax.errors import InputError
from models import load

from ..arms import make_arms, make_query_aware, query_aware_names
from ..command_line import errors_as_one_line
from ..compilation import use_compilation_cache
from ..console import quiet_backends
from ..sheets_task.reader import PackedReader, move_page
from ..task_language import check_language
from . import picture, task
from .dataset import DOCUMENTS_DATASET

_OUT = flags.DEFINE_string("out", "out/documents.png", "the picture")
_BACKBONE = flags.DEFINE_string("backbone", "qwen2_5_vl", "an instance of evals/trained/documents, or a directory")
_SEED = flags.DEFINE_integer("seed", 7, "of the contexts; each kind's first one and first questions are shown")
ASKED = {"chain": 2, "override": 1, "aggregate": 1}
SHOWN = ("re-prefill", "blind", "patch.rank=8", "query_attention.budget=0.05", "cacheblend.budget=0.15")


def main(arguments: list[str]) -> None:
    """Reads one context of each kind in every way that is shown, and draws them."""
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}; see --help")

    quiet_backends()
    use_compilation_cache()
    with errors_as_one_line():
        path, *others = DOCUMENTS_DATASET.instances(_BACKBONE.value)
        if others:
            raise InputError(f"--backbone={_BACKBONE.value}: got {1 + len(others)} models; expected one")
        check_language(
            path, task.VOCABULARY.names, "documents", [own.name for own in DOCUMENTS_DATASET.instances("all")]
        )

    rng = np.random.default_rng([_SEED.value, 99])
    documents = task.sample_documents(rng, 16)
    first = [int(np.flatnonzero(documents.document == kind)[0]) for kind in range(len(task.DOCUMENTS))]
    chosen = documents.taken(np.array(first))
    questions = task.ask(chosen, rng, ASKED)
    page = move_page(load(path, dtype="float32"), chosen, DOCUMENTS_DATASET.spec)
    reader = PackedReader("documents", page, questions)
    answers = {name: reader.read(arm.cache) for name, arm in make_arms(page, SHOWN)}
    chosen_names = [name for name in query_aware_names(page.page.layout) if name in SHOWN]
    by_question = make_query_aware(reader, chosen_names)
    answers |= {arm.name: arm.answers for arm in by_question}
    said = {name: answer.log_probabilities.argmax(axis=-1) for name, answer in answers.items()}
    drawn = picture.draw(chosen, questions, {name: said[name] for name in SHOWN}, Path(_OUT.value))
    print(f"picture: {drawn}")


if __name__ == "__main__":
    app.run(main)
