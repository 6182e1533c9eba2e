"""A window of images whose KV is held image by image: of a hybrid model, what is composed cannot be cut again.

Everything is a batch of contexts that share all but their pixels. KV of images is phase-free, what is read is in the
engine frame. Axis letters: B contexts, L layers, T tokens of an image, K KV heads, H head width.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvpatch_jax as kvp
from models import ModelBackbone

from ..arms.reused_page import KV, joined
from ..probes.window.image_sequence import Image
from ..sheets_task.packed_answers import PackedAnswers, read_packed
from ..sheets_task.reader import images_alone
from ..sheets_task.task import SheetsContexts, SheetsQuestions
from ..small_task.prefix import Prefix, positions_behind


@dataclasses.dataclass(frozen=True, eq=False)
class WindowImages:
    """The images of one batch of contexts.

    Attributes:
      backbone: reads them.
      contexts: what they mean.
      clusters: each context's number, [B].
      form: how the images are laid out as tokens.
      sheets, page: the contexts' own.
    """

    backbone: ModelBackbone
    contexts: SheetsContexts
    clusters: np.ndarray
    form: Prefix
    sheets: tuple[Image, ...]
    page: Image

    def window(self, images: Sequence[Image]) -> "ImageWindow":
        """Places images behind one another."""
        return ImageWindow(self.backbone, self.form, tuple(images))

    def foreign_sheets(self, by: int) -> list[Image]:
        """Lists the sheets of the context `by` further on."""
        return [sheet.of_others(by) for sheet in self.sheets]


def load_images(backbone: ModelBackbone, contexts: SheetsContexts, clusters: np.ndarray) -> WindowImages:
    """Draws, reads and prefills every image of a batch of contexts alone."""
    form, _, images = images_alone(backbone, contexts)
    *sheets, page = (Image(tokens, chunk) for tokens, chunk in images)
    return WindowImages(backbone, contexts, clusters, form, tuple(sheets), page)


@dataclasses.dataclass(frozen=True, eq=False)
class ImageWindow:
    """Images in the order in which they stand, the first one's positions from 0.

    Attributes:
      backbone: reads them.
      form: how images are laid out as tokens.
      images: in their order.
    """

    backbone: ModelBackbone
    form: Prefix
    images: tuple[Image, ...]

    def __len__(self) -> int:
        return len(self.images)

    def start(self, place: int) -> int:
        """Finds the position that an image begins at; with the number of images, the one behind all."""
        return sum(image.chunk.span for image in self.images[:place])

    def antecedent(self, place: int) -> tuple[str, ...]:
        """Lists the ids of what stands in front of a place."""
        return tuple(image.chunk.id for image in self.images[:place])

    def prefilled(self) -> list[KV]:
        """Prefills every image behind those in front of it; phase-free KV of each."""
        return [dict(kv) for kv in kvp.patching.conditioned(self.backbone, [image.tokens for image in self.images])]

    def behind(self, parts: Sequence[KV], image: Image) -> KV:
        """Prefills an image behind the window as it is kept, `parts` the KV of each; phase-free KV of the image."""
        context = joined([self.placed(place, kv) for place, kv in enumerate(parts)])
        return dict(self.backbone.prefill(image.tokens.shift(np.int32(self.start(len(self)))), context).kv)

    def placed(self, place: int, kv: KV) -> KV:
        """Turns an image's phase-free KV to its place."""
        image = self.images[place]
        return dict(kvp.to_engine(image.chunk.layout, kv, image.tokens.positions, self.start(place)))

    def served(self, place: int, patch: kvp.Patch | None = None, **base: Any) -> KV:
        """Serves an image from its canonical, or from a base with its `base_antecedent`, turned and patched.

        A patch that was formed behind others is served all the same: what that costs is what is measured.
        """
        chunk, start = self.images[place].chunk, self.start(place)
        return dict(kvp.apply_patch(kvp.Placed(chunk, patch, start, self.antecedent(place), allow_stale=True, **base)))

    def ask(self, pieces: Sequence[KV], questions: SheetsQuestions) -> PackedAnswers:
        """Asks questions behind the window, over the engine-frame KV of every image."""
        behind = np.full(len(questions.ids), self.start(len(self)))
        positions = positions_behind(self.form, behind, questions.step)
        return read_packed(self.backbone, questions, positions, joined(list(pieces)))
