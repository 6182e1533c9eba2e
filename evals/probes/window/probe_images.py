"""What the window's probes place: own images, images of other contexts, legends that do not matter, a lead."""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Int

from kvpatch_jax.backbone import Tokens
from models import ModelBackbone

from ... import small_task
from ...arms.reused_page import chunk_of
from ...small_task import GLYPHS, VOCABULARY, Contexts, scenes
from ...small_task.scenes import Scene
from .image_sequence import Image, prefilled

LEAD = ("r0", "r1", "r2", "r3")
"""The pinned lead, a text of constant words. No model was trained with one: they do not need it to answer."""


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeImages:
    """The images of one batch of contexts.

    Attributes:
      backbone: reads them.
      contexts: what they mean.
      clusters: each context's number, [B].
      legends, page: the contexts' own.
      distractors: legends whose glyphs are not on the page, so that no answer about the page depends on them.
      lead: the pinned lead.
    """

    backbone: ModelBackbone
    contexts: Contexts
    clusters: np.ndarray
    legends: tuple[Image, ...]
    page: Image
    distractors: tuple[Image, ...] = ()
    lead: Image | None = None

    def front(self, lead: bool) -> list[Image]:
        """Returns what a line begins with."""
        return [self.lead] if lead and self.lead is not None else []


def scene_images(scene: Scene, clusters: np.ndarray) -> ProbeImages:
    """Takes a scene's own images, without distractors and a lead."""
    *legends, page = (Image(tokens, chunk) for tokens, chunk in zip(scene.images, scene.chunks, strict=True))
    return ProbeImages(scene.backbone, scene.contexts, clusters, tuple(legends), page)


def load_probe_images(
    backbone: ModelBackbone, contexts: Contexts, clusters: np.ndarray, seed: int, folder: Path
) -> ProbeImages:
    """Renders, reads and prefills everything of a batch of contexts; PNG files go to `folder`."""
    own = scene_images(scenes.load_scene(backbone, contexts, folder), clusters)
    rng = np.random.default_rng([seed, int(clusters[0]), 11])
    others = scenes.load_scene(backbone, irrelevant(contexts, rng), folder)
    distractors = []
    for number, (tokens, chunk) in enumerate(zip(others.images[:-1], others.chunks[:-1], strict=True)):
        distractors.append(Image(tokens, dataclasses.replace(chunk, id=f"distractor{number}")))
    return dataclasses.replace(own, distractors=tuple(distractors), lead=lead_image(backbone, len(contexts)))


def irrelevant(contexts: Contexts, rng: np.random.Generator) -> Contexts:
    """Makes legends that define only glyphs which are not on the page (in rows that repeat), in other handwriting."""
    on_page = (contexts.page_glyph[..., None] == np.arange(GLYPHS)).any(axis=(1, 2))
    shape = contexts.legend_glyph.shape[1:]
    glyph = np.empty_like(contexts.legend_glyph)

    for index, taken in enumerate(on_page):
        absent = rng.permutation(np.flatnonzero(~taken))
        for legend in range(shape[0]):
            glyph[index, legend] = rng.permutation(np.resize(absent, shape[1]))

    # One colour per glyph and legend, so that its rows agree with each other.
    item, legend = np.arange(len(contexts))[:, None, None], np.arange(shape[0])[None, :, None]

    def draw():
        return rng.integers(0, small_task.COLOURS, (len(contexts), shape[0], GLYPHS))[item, legend, glyph]

    ink = rng.integers(0, 2**62, len(contexts))
    return dataclasses.replace(contexts, legend_glyph=glyph, legend_fill=draw(), legend_stripe=draw(), ink_seed=ink)


def lead_image(backbone: ModelBackbone, count: int) -> Image:
    """Makes the pinned lead, the same in every context."""
    ids = np.array([VOCABULARY.names.index(word) for word in LEAD], np.int32)
    return of_ids(backbone, np.repeat(ids[None], count, axis=0), "lead", "lead " + " ".join(LEAD))


def of_ids(backbone: ModelBackbone, ids: Int[np.ndarray, "B T"], id: str, content: str) -> Image:
    """Makes what is placed of token ids of texts, a row each; prefilled alone."""
    axes = backbone.layout.rope.axes
    local = np.arange(ids.shape[1], dtype=np.int32)
    places = local if axes is None else np.repeat(local[:, None], axes, axis=1)
    return of_tokens(backbone, backbone.embed(ids, np.repeat(places[None], len(ids), axis=0)), id, content)


def of_tokens(backbone: ModelBackbone, tokens: Tokens, id: str, content: str) -> Image:
    """Makes what is placed of embedded tokens, whose rows share their positions; prefilled alone."""
    local = np.asarray(tokens.positions)[0]
    return Image(tokens, chunk_of(backbone, prefilled(backbone, tokens), local, id, content))


def with_foreign(contexts: Contexts, which: np.ndarray, by: int) -> Contexts:
    """Gives the meaning after some legends were swapped for those of the context `by` further on.

    Args:
      which: bool [legends], by storage.
    """

    def swap(own):
        return np.where(which[None, :, None], np.roll(own, -by, axis=0), own)

    return dataclasses.replace(
        contexts,
        legend_glyph=swap(contexts.legend_glyph),
        legend_fill=swap(contexts.legend_fill),
        legend_stripe=swap(contexts.legend_stripe),
    )


def foreign_legends(stock: ProbeImages, by: int) -> list[Image]:
    """Lists the legends of the context `by` further on."""
    return [image.of_others(by) for image in stock.legends]
