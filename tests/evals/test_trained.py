"""What the shipped instances show on held-out contexts, and what their directories say of their training."""

import json
from pathlib import Path

import numpy as np
import pytest

from evals.harness.methods import parse
from evals.task.dataset import ALIKE, DOCUMENTS, PLAIN, TaskBatch
from evals.task.questions import KINDS
from evals.trained import shipped, shipped_names
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import load
from kvpatch_jax.models.checkpoints import flatten_params

MAIN, CONTROL = "documents/qwen2_5_vl", "documents/qwen2_5_vl_no_window"
SEED, CONTEXTS = 60_221, 8
OTHERS = [name for name in shipped_names() if name not in (MAIN, CONTROL)]


@pytest.fixture(scope="module", params=[MAIN, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)])
def batch(request: pytest.FixtureRequest) -> TaskBatch:
    """A shipped instance before contexts that it was never shown while it was made."""
    dataset = PLAIN if request.param.startswith("plain") else DOCUMENTS
    # Multi-head latent attention was trained on documents that all look alike.
    probe = ALIKE if "kimi_vl" in request.param else "4"
    return dataset.batch(load(shipped(request.param), dtype="float32"), probe, 0, CONTEXTS, SEED)


def accuracy(batch: TaskBatch, answers, kind: str) -> float:
    asked = batch.questions.valid & (batch.questions.kind == KINDS.index(kind))
    return float(answers.predicted[asked].mean())


def test_a_patch_brings_back_what_blind_reuse_loses(batch: TaskBatch):
    """Chain questions: answered by re-prefill, fewer blind, again with a patch of rank 8.

    What the page alone tells loses less: pages between lists were met in training, so reading depends on them a little.
    """
    exact, blind = batch.read(batch.reference), batch.read(batch.splice.cache)
    patched = batch.read(parse("patch.rank=8").repair(batch.backbone, batch.splice).cache)
    assert accuracy(batch, exact, "chain") > 0.75
    assert accuracy(batch, blind, "chain") < accuracy(batch, exact, "chain") - 0.3
    assert accuracy(batch, patched, "chain") > accuracy(batch, exact, "chain") - 0.15
    lost = {kind: accuracy(batch, exact, kind) - accuracy(batch, blind, kind) for kind in ("page", "chain")}
    assert abs(lost["page"]) < 0.5 * lost["chain"]
    assert patched.divergence_from(exact).mean() < 0.2 * blind.divergence_from(exact).mean()


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_directory_is_small_and_discloses_its_training(name: str):
    """At most 4 MB, bf16, every training choice beside the weights and no other than its name says."""
    root = shipped(name)
    assert sum(path.stat().st_size for path in root.iterdir()) <= 4_000_000
    training = json.loads((root / "training.json").read_text())
    backbone, _, seed = Path(name).name.removesuffix("_no_window").partition("_seed")
    assert training["recipe"]["seed"] == int(seed or 0)
    assert training["recipe"].get("backbone", "qwen2_5_vl") == backbone
    assert (training["recipe"]["window"] == 0) == (name == CONTROL)
    assert training["steps_taken"] == training["recipe"]["steps"]
    assert {"jax", "numpy", "optax"} <= set(training["versions"])
    loaded = load(root)
    assert loaded.answer_tokens == 1  # it never learnt to end a longer answer
    # Rates of linear attention and corrections of routers, a number a head or an expert, are kept in float32.
    wide = [leaf for leaf in flatten_params(loaded.parameters).values() if leaf.size > 64]
    assert {str(leaf.dtype) for leaf in wide} == {"bfloat16"}
    assert np.isfinite(np.asarray(loaded.parameters["decoder"]["embedding"], np.float32)).all()


def test_instances_are_found_by_name_or_path():
    """A documents instance goes without its drawing; all shipped weights together are at most 25 MB."""
    path = shipped("documents/qwen2_5_vl_seed3")
    assert shipped("qwen2_5_vl_seed3") == path == shipped(str(path))
    sizes = [path.stat().st_size for name in shipped_names() for path in shipped(name).iterdir()]
    assert sum(sizes) <= 25_000_000
    with pytest.raises(InputError, match="plain/qwen3_5"):
        shipped("nowhere")
