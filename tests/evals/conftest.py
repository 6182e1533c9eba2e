"""Shared by the tests of the evaluation: tiny checkpoints that chat, and shipped models before contexts of the task."""

import functools

import pytest

SEED, CONTEXTS = 60_221, 8
"""Of contexts that neither a training nor a configuration draws."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """`checkpoint(family)`: a tiny checkpoint with random weights, a tokenizer and a chat template."""
    from tests.goldens.load import write_chatting

    return functools.cache(lambda family: write_chatting(family, tmp_path_factory.mktemp("checkpoint") / family))


@pytest.fixture(scope="session")
def loaded(checkpoint):
    """`loaded(family)`: its backbone, with buckets."""
    from kvpatch_jax.models import load
    from tests.shared.window_oracle import BUCKETS

    return functools.cache(lambda family: load(checkpoint(family), dtype="float32", buckets=BUCKETS))


@pytest.fixture(scope="session")
def shipped_instance():
    """`shipped_instance(name)`: a trained model of the task, with its words."""
    from evals.trained import shipped
    from kvpatch_jax.models import load
    from tests.shared.window_oracle import BUCKETS

    return functools.cache(lambda name: load(shipped(name), dtype="float32", buckets=BUCKETS))


@pytest.fixture(scope="session")
def task_batch(shipped_instance):
    """`task_batch(name)`: a shipped instance before eight contexts."""
    from evals.task.dataset import ALIKE, DOCUMENTS, PLAIN

    @functools.cache
    def make(name):
        dataset = PLAIN if name.startswith("plain") else DOCUMENTS
        # Multi-head latent attention was trained on documents that all look alike.
        probe = ALIKE if "kimi_vl" in name else "4"
        return dataset.batch(shipped_instance(name), probe, 0, CONTEXTS, SEED)

    return make
