"""Released weights give the tokens, logits and texts that transformers gives for them."""

from pathlib import Path

import numpy as np
import pytest

from evals.real_weights import weights_file
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from tests.goldens.load import GOLDENS

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("highest_precision")]


def installed(name: str) -> Path:
    """Returns the weights in packages that are installed by hand."""
    try:
        return weights_file(name)
    except InputError as error:
        if "got no package" not in str(error):
            raise
        pytest.skip(str(error))


def test_ids_logits_and_continuation_are_transformers() -> None:
    backbone = load(installed("smollm2"), dtype="float32", angles="float32")
    with np.load(GOLDENS / "smollm2.npz") as arrays:
        golden = dict(arrays)
    ids = backbone.prepare([str(golden["text"])])["input_ids"]
    assert ids[0].tolist() == golden["input_ids"].tolist()
    assert backbone.text(ids[0]) == str(golden["text"])
    prompt = backbone.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert backbone.text(prompt["input_ids"][0]) == str(golden["chat"])

    tokens = backbone.embed(ids)
    logits = np.asarray(backbone.prefill(tokens, logits="all").logits[0])
    assert np.abs(logits[:, golden["columns"]] - golden["logits"]).max() < 2e-4 * np.abs(golden["logits"]).max()
    sums = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    assert np.abs(sums - golden["log_sum"]).max() < 1e-3
    sure = golden["margin"] > 1e-2
    assert sure.mean() > 0.9
    assert np.array_equal(logits.argmax(-1)[sure], golden["best"][sure])
    continued = backbone.generate(tokens, len(golden["continued"]))
    assert np.asarray(continued)[0].tolist() == golden["continued"].tolist()


def test_the_capital_of_france() -> None:
    gemma = load(installed("gemma3-270m"), dtype="float32", angles="float32")
    prompt = gemma.prepare(["The capital of France is called"])
    # The start token that the file asks for, then words with their spaces.
    assert prompt["input_ids"][0].tolist() == [2, 818, 5279, 529, 7001, 563, 2760]
    assert gemma.text(np.asarray(gemma.generate(gemma.embed(**prompt), 2))[0]).startswith(" Paris")
