"""Sliding windows that slide: against transformers, behind contexts, in buckets, and in some layers only."""

import dataclasses

import numpy as np
import pytest

from kvpatch_jax.core import to_engine
from kvpatch_jax.models import Buckets, load, save
from tests.goldens.load_text import text_arrays, write_text_checkpoint

WINDOW, GOLDEN, OWN = 5, 2e-4, 1e-5
LAYERS = {"mistral": None, "qwen2": (1, 2), "qwen3": (0, 2)}


pytestmark = pytest.mark.usefixtures("highest_precision")


SLOW = ("mistral", "qwen2")
"""Of a window in all layers, and in two in a row: qwen3's lies below and above a full layer."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYERS]
)
def windowed(request, tmp_path_factory):
    """Name, directory, backbone, and transformers' arrays for a prompt of 14 tokens over a window of 5."""
    directory = tmp_path_factory.mktemp(request.param)
    write_text_checkpoint(f"windows/{request.param}", directory)
    return request.param, directory, load(directory), text_arrays(f"windows/{request.param}")


def close(found, expected, bar, what=""):
    scale = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(np.asarray(found), expected, atol=bar * scale, rtol=0, err_msg=what)


@pytest.mark.slow
def test_windows_equal_transformers(windowed):
    name, _, backbone, gold = windowed
    config = backbone.config.text
    assert (config.window, config.window_layers) == (WINDOW, LAYERS[name])
    tokens = backbone.embed(gold["input_ids"][None])
    close(backbone.prefill(tokens, logits="all").logits[0], gold["logits"], GOLDEN)
    assert backbone.generate(tokens, len(gold["generated"]))[0].tolist() == gold["generated"].tolist()


@pytest.mark.slow
def test_a_context_counts_in_the_window(windowed):
    """Behind a context, in buckets and under a mask of the caller's own: the same as in one piece."""
    _, directory, backbone, gold = windowed
    tokens = backbone.embed(gold["input_ids"][None])
    whole, cut = backbone.prefill(tokens), 6
    engine = to_engine(backbone.layout, whole.kv, tokens.positions, 0)
    context = {name: value[:, :, :cut] for name, value in engine.items()}
    rest = tokens.take(cut, 14)
    causal = np.tri(8, 14, cut, dtype=bool)[None, None]
    bucketed = load(directory, buckets=Buckets(smallest=16))
    for served in (backbone, bucketed):
        for mask in (None, causal):
            close(served.prefill(rest, context, mask, logits="all").logits[0], gold["logits"][cut:], GOLDEN)
            answer = served.generate(rest, len(gold["generated"]), context, mask)
            assert answer[0].tolist() == gold["generated"].tolist()
    slots = np.arange(cut, 14)[None]
    room = {name: value.at[:, :, cut:].set(0) for name, value in engine.items()}
    for mask in (None, causal):
        step = backbone.recompute(rest, room, slots, mask=mask, logits="all")
        close(step.logits[0], gold["logits"][cut:], GOLDEN)
        for name, value in step.cache.items():
            close(value, engine[name], OWN, name)


def test_windows_are_saved_and_read_again(windowed, tmp_path):
    _, _, backbone, _ = windowed
    assert load(save(backbone, tmp_path)).config.text == backbone.config.text


@pytest.mark.slow
def test_a_window_that_reaches_over_all_changes_nothing(windowed):
    _, _, backbone, gold = windowed
    tokens = backbone.embed(gold["input_ids"][None])
    text = dataclasses.replace(backbone.config.text, window=14)
    wide = type(backbone)(dataclasses.replace(backbone.config, text=text), backbone.parameters)
    none = dataclasses.replace(text, window=None, window_layers=None)
    plain = type(backbone)(dataclasses.replace(backbone.config, text=none), backbone.parameters)
    close(wide.prefill(tokens, logits="all").logits, plain.prefill(tokens, logits="all").logits, OWN)
