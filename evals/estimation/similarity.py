"""How a deficit's size goes with the likeness of antecedent and chunk: pairs of pages, from equal to unrelated.

Kamera's Figure 4b finds it anti-correlated with motion and uncorrelated with frame similarity; "only an actual
vision-embedding difference tracks it". It does not define the three. Here, of two images of one size: motion is the
mean absolute difference of pixels; frame similarity is the cosine of pixels less their mean; the embedding difference
is ‖a − b‖ over ‖b‖ of what the tower gives, token by token. The instances were trained on pages behind legends, so a
page behind a page is out of their training. Axis letters: B contexts, T tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt8

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from models import ModelBackbone

from ..arms.reused_page import difference
from ..small_task import task
from ..small_task.sequences import form_of
from .structure import feature_norm

Pixels = UInt8[np.ndarray, "B height width 3"]


def _other_cells(share: float) -> Callable[[task.Contexts, np.random.Generator], Pixels]:
    def draw(contexts: task.Contexts, rng: np.random.Generator) -> Pixels:
        own, other = (task.render(of)[1] for of in (contexts, task.sample_contexts(rng, len(contexts))))
        # Cell by cell, so that what stays is the same to the pixel; headers always stay.
        count, cells = len(contexts), task.ROWS * task.CELLS
        chosen = np.argsort(rng.random((count, cells)), axis=1) < round(share * cells)
        grid = np.pad(chosen.reshape(count, task.ROWS, task.CELLS), [(0, 0), (0, 0), (1, 0)])
        changed = np.repeat(np.repeat(grid, task.CELL_PIXELS, axis=1), task.CELL_PIXELS, axis=2)
        return np.where(changed[..., None], other, own)

    return draw


def _scrolled(rows: int) -> Callable[[task.Contexts, np.random.Generator], Pixels]:
    return lambda contexts, rng: np.roll(task.render(contexts)[1], rows * task.CELL_PIXELS, axis=1)


def _dimmed(contexts: task.Contexts, rng: np.random.Generator) -> Pixels:
    return (task.render(contexts)[1] * 0.6).astype(np.uint8)


def _unrelated(contexts: task.Contexts, rng: np.random.Generator) -> Pixels:
    return task.render(task.sample_contexts(rng, len(contexts)))[1]


PAIRS: Mapping[str, Callable[[task.Contexts, np.random.Generator], Pixels]] = {
    "the same image": lambda contexts, rng: task.render(contexts)[1],
    "10 % of cells redrawn": _other_cells(0.1),
    "25 % of cells redrawn": _other_cells(0.25),
    "50 % of cells redrawn": _other_cells(0.5),
    "all cells redrawn": _other_cells(1.0),
    "dimmed": _dimmed,
    "scrolled by 1 row": _scrolled(1),
    "scrolled by 5 rows": _scrolled(5),
    "another page": _unrelated,
}
"""Antecedent images of a page."""


class PairMeasures(NamedTuple):
    """What is measured of pairs, [B] each: `deficit` is ‖Δ‖ / ‖KV(B|∅)‖, the mean over layers."""

    deficit: Float[np.ndarray, " B"]
    motion: Float[np.ndarray, " B"]
    frame_similarity: Float[np.ndarray, " B"]
    embedding_difference: Float[np.ndarray, " B"]


def motion(first: Pixels, second: Pixels) -> Float[np.ndarray, " B"]:
    """Computes the mean absolute difference of pixels, 0 … 1."""
    return np.abs(first.astype(float) - second.astype(float)).mean(axis=(1, 2, 3)) / 255


def frame_similarity(first: Pixels, second: Pixels) -> Float[np.ndarray, " B"]:
    """Computes the cosine of pixels less their mean over the image."""
    flat = [image.reshape(len(image), -1).astype(float) for image in (first, second)]
    a, b = (image - image.mean(axis=1, keepdims=True) for image in flat)
    return (a * b).sum(axis=1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-12)


def embedding_difference(
    first: Float[np.ndarray, "B T D"], second: Float[np.ndarray, "B T D"]
) -> Float[np.ndarray, " B"]:
    """Computes ‖a − b‖ / ‖b‖ of embeddings, all tokens together."""
    apart, whole = (np.linalg.norm(value.reshape(len(value), -1), axis=1) for value in (first - second, second))
    return apart / np.maximum(whole, 1e-12)


def measure_pairs(
    backbone: ModelBackbone, contexts: task.Contexts, rng: np.random.Generator
) -> dict[str, PairMeasures]:
    """Prefills every page behind each of its antecedent images, and measures the pairs."""
    pages = task.render(contexts)[1]
    own = _embedded(backbone, pages)
    canonical = dict(backbone.prefill(own).kv)
    span = int(np.asarray(own.positions).max()) + 1
    found = {}
    for name, draw in PAIRS.items():
        images = draw(contexts, rng)
        front = _embedded(backbone, images)
        kv = dict(backbone.prefill(front).kv)
        engine = dict(kvp.to_engine(backbone.layout, kv, np.asarray(front.positions), 0))
        delta = difference(dict(backbone.prefill(own.shift(span), engine).kv), canonical)
        embeddings = [np.asarray(tokens.embeddings, np.float64) for tokens in (front, own)]
        found[name] = PairMeasures(
            feature_norm(delta, canonical),
            motion(images, pages),
            frame_similarity(images, pages),
            embedding_difference(*embeddings),
        )
    return found


def _embedded(backbone: ModelBackbone, images: Pixels) -> Tokens:
    """Embeds images of the page's size, with positions from 0."""
    form = form_of(backbone.config, backbone.image_config)
    ids, local = form.chunk_ids[-1], form.chunk_local[-1]
    arrays: dict[str, Any] = backbone.config.family.vision.process(list(images), backbone.image_config)
    positions = np.broadcast_to(local, (len(images), *local.shape))
    tokens = backbone.embed(np.tile(ids, (len(images), 1)), positions, **arrays)
    return tokens._replace(positions=jnp.asarray(positions))
