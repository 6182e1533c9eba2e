"""Sources of windows to measure on: images of the small task, or texts. `own_images` has a user's own.

Half of the windows are for calibration and half are held out; which are which is decided before anything is computed.
All windows of a batch have the same shape.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

import kvpatch_jax as kvp
from kvpatch_jax.errors import ImageError, InputError
from models import ModelBackbone

from .. import small_task
from ..probes.window.image_sequence import Image
from ..probes.window.probe_images import lead_image, of_ids
from ..small_task import VOCABULARY, scenes, sequences
from ..texts.corpus import documentation, library_modules
from .packed_questions import PackedQuestions, packed, questions_of
from .window_sizes import CertifiedSizes, halves

LEAD = "The following is looked at from the first to the last."
PIECE, CONTINUED = 64, 16
"""Tokens of a text's chunk, and of the continuation behind a window, which is scored."""
SUFFIXES = {
    "images": {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"},
    "texts": {".txt", ".md", ".rst"},
}
SMALL_TASK_QUESTIONS = {"page": 2, "legend": 2, "chain": 3, "aggregate": 2, "override": 2}
"""Number of the small task's questions behind a window, by kind."""


class WindowSpec(NamedTuple):
    """Windows of one batch before they are computed.

    Attributes:
      chunks: of a window, the lead not counted.
      batch: what the windows show, as their source needs it.
      clusters: number of each window, [B].
      held_out: whether they are held out.
      count: rows from here on repeat others, so that batches have few sizes; they are not scored. None: none do.
      asked: tokens of the questions behind each window, where windows have their own.
    """

    chunks: int
    batch: Any
    clusters: np.ndarray
    held_out: bool
    count: int | None = None
    asked: tuple[tuple[Int[np.ndarray, " _"], ...], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class WindowBatch:
    """A batch of windows of one shape.

    Attributes:
      backbone: whose windows they are.
      lead: pinned in front.
      pieces: the chunks of the windows, in order.
      older: chunks that were there before, as many as the largest windows have.
      other: replaces the first piece where an antecedent is to have changed.
      questions: what is asked.
      clusters: number of each window, [B].
      held_out: whether they are held out.
    """

    backbone: ModelBackbone
    lead: Image
    pieces: tuple[Image, ...]
    older: tuple[Image, ...]
    other: Image
    questions: PackedQuestions
    clusters: np.ndarray
    held_out: bool

    @property
    def spans(self) -> list[int]:
        """Spans of the pieces and of those that were there before."""
        return [image.chunk.span for image in (*self.older, *self.pieces)]


@dataclasses.dataclass(frozen=True)
class WindowSource:
    """A plan of windows to measure on.

    Attributes:
      content: what they show, in words.
      sizes: chunks of a window besides the lead, and how many windows.
      disjoint: whether no two windows of one size share a chunk.
      specs: the batches.
      modalities: of the chunks, "image" and "text".
    """

    content: str
    sizes: CertifiedSizes
    disjoint: bool
    specs: tuple[WindowSpec, ...]
    modalities: tuple[str, ...] = dataclasses.field(default=("image",), kw_only=True)

    def load(self, backbone: ModelBackbone, spec: WindowSpec, folder: Path) -> WindowBatch:
        """Reads and prefills what a batch shows. `folder` is for temporary files."""
        raise NotImplementedError

    def size(self, backbone: ModelBackbone, spec: WindowSpec) -> int:
        """Returns the tokens of the chunks of one window of a batch."""
        raise NotImplementedError


# ---------------------------------------------------------------------------------------------------- small task


@dataclasses.dataclass(frozen=True)
class DrawnImageSource(WindowSource):
    """Windows of three legends and a page of the small task, after those of another context."""

    @classmethod
    def of(cls, sizes: CertifiedSizes, seed: int) -> "DrawnImageSource":
        """Plans windows. Each context is drawn for one window alone.

        Raises:
          InputError: windows without room for a context's images.
        """
        if sizes.chunks[0] < sequences.CHUNKS:
            raise InputError(f"--chunks: got {sizes.chunks[0]}; expected {sequences.CHUNKS} or more of drawn images")
        specs = []
        for chunks, held_out, start, clusters in sizes.batches():
            own = [] if chunks == sequences.CHUNKS else [chunks]
            specs.append(WindowSpec(chunks, [seed, int(held_out), start, *own], clusters, held_out))
        return cls(f"images drawn by the small task, seed {seed}", sizes, True, tuple(specs))

    def load(self, backbone: ModelBackbone, spec: WindowSpec, folder: Path) -> WindowBatch:
        """Draws and prefills a batch. PNG files go to the folder."""
        rng, rows = np.random.default_rng(spec.batch), len(spec.clusters)
        number = spec.chunks + self.sizes.most
        contexts, *others = (small_task.sample_contexts(rng, rows) for _ in range(-(-number // sequences.CHUNKS)))

        # The contexts that are asked about come last. Of others the page comes first, so that their legends are near.
        shown = list[Image]()
        for drawn in (contexts, *others):
            scene = scenes.load_scene(backbone, drawn, folder)
            images = [Image(tokens, chunk) for tokens, chunk in zip(scene.images, scene.chunks, strict=True)]
            shown = [*([images[-1], *images[:-1]] if shown else images), *shown]

        pieces, older = shown[-spec.chunks :], shown[-number : -spec.chunks]

        asked = small_task.ask(contexts, rng, SMALL_TASK_QUESTIONS)
        form = scenes.form_of(backbone.config, backbone.image_config)
        tail = sequences.question_tokens(form, asked, np.zeros(rows, int))
        answers = asked.answer.shape[1]
        description = f"{answers} questions of the small task, a token each"
        return WindowBatch(
            backbone=backbone,
            lead=lead_image(backbone, rows),
            pieces=tuple(pieces),
            older=tuple(older),
            other=shown[1],  # a legend, as is the first piece of the least windows
            questions=PackedQuestions(tail, np.arange(answers), asked.valid, description),
            clusters=spec.clusters,
            held_out=spec.held_out,
        )

    def size(self, backbone: ModelBackbone, spec: WindowSpec) -> int:
        """Returns the tokens of the chunks of one window."""
        whole = scenes.form_of(backbone.config, backbone.image_config).sizes
        others = [whole[-1], *whole[:-1]] * (spec.chunks // sequences.CHUNKS)
        return sum([*others, *whole][-spec.chunks :])


def drawn_images_fit(backbone: ModelBackbone) -> bool:
    """Returns whether the small task can be asked: its words are the backbone's vocabulary."""
    if backbone.image_config is None or backbone.tokenizer is None:
        return False
    try:
        ids = np.asarray(backbone.prepare([kvp.Text(" ".join(VOCABULARY.names[6:10]))])["input_ids"])[0]
    except (InputError, ImageError):
        return False
    return ids.tolist() == list(range(6, 10))


# --------------------------------------------------------------------------------------------------------- texts


@dataclasses.dataclass(frozen=True)
class TextSource(WindowSource):
    """Windows of consecutive pieces of documents, after the pieces in front of them."""

    modalities: tuple[str, ...] = dataclasses.field(default=("text",), kw_only=True)
    questions: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, backbone: ModelBackbone, folder: Path | None, sizes: CertifiedSizes, seed: int, questions: Sequence[str]
    ) -> "TextSource":
        """Plans windows, one of each document, of a folder or of the standard library's documentation.

        Windows of all sizes end where the text goes on, and those of one half are of the same documents.

        Raises:
          InputError: too few documents that are long enough.
        """
        size, count = 2 * sizes.most * PIECE + CONTINUED, max(sizes.counts)
        paths = files_in(folder, "texts") if folder is not None else library_modules()
        rng, documents = np.random.default_rng(seed), []

        for place in rng.permutation(len(paths)):
            path = paths[place]
            text = path.read_text(encoding="utf-8", errors="replace") if folder is not None else documentation(path)
            if len(text) < 2 * size:  # no tokenizer takes fewer than two characters of prose a token
                continue

            ids = np.asarray(backbone.prepare([kvp.Text(text[: 16 * size])])["input_ids"])[0]
            if len(ids) >= size:
                documents.append(ids[:size].astype(np.int32))
            if len(documents) == count:
                break

        if len(documents) < 4:
            where = folder or "the standard library's documentation"
            raise InputError(f"certify: got {len(documents)} texts of {size} tokens in {where}; expected 4 or more")

        sizes, specs = sizes.up_to(len(documents)), []
        for chunks, held_out, start, clusters in sizes.batches():
            first = start + held_out * halves(max(sizes.counts))[0]
            ids = np.stack(documents[first : first + len(clusters)])
            specs.append(WindowSpec(chunks, ids, clusters, held_out))

        digest = hashlib.blake2b(np.stack(documents).tobytes(), digest_size=8).hexdigest()
        where = "the standard library's documentation" if folder is None else folder.name or str(folder)
        content = f"{len(documents)} texts of {where}, {PIECE} tokens a chunk, digest {digest}"
        return cls(content, sizes, True, tuple(specs), tuple(questions))

    def load(self, backbone: ModelBackbone, spec: WindowSpec, folder: Path) -> WindowBatch:
        """Prefills a batch."""
        ids, rows, most = spec.batch, len(spec.clusters), self.sizes.most
        mark = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
        pieces = []
        for place in range(most - spec.chunks, 2 * most):
            part = ids[:, place * PIECE : (place + 1) * PIECE]
            pieces.append(of_ids(backbone, part, f"piece {place}", f"{mark} piece {place}"))

        # The continuation is scored in two halves, the second of them given the first.
        behind = ids[:, 2 * most * PIECE :]
        half = behind.shape[1] // 2
        parts: list[Any] = [(behind[:, :half], range(half)), (behind, range(half, behind.shape[1]))]
        with contextlib.suppress(InputError):  # no known words: the continuation is scored anyway
            parts += questions_of(backbone, self.questions, rows)
        description = f"the next {behind.shape[1]} tokens in two halves, and {len(parts) - 2} questions, a token each"
        return WindowBatch(
            backbone=backbone,
            lead=lead_of(backbone, rows),
            pieces=tuple(pieces[most:]),
            older=tuple(pieces[:most]),
            other=pieces[0],
            questions=packed(parts, backbone.layout.rope.axes, description),
            clusters=spec.clusters,
            held_out=spec.held_out,
        )

    def size(self, backbone: ModelBackbone, spec: WindowSpec) -> int:
        """Returns the tokens of the chunks of one window."""
        return spec.chunks * PIECE


# ---------------------------------------------------------------------------------------------------- common


def lead_of(backbone: ModelBackbone, rows: int) -> Image:
    """Returns the pinned lead: a sentence, or the small task's if the tokenizer knows none of its words."""
    try:
        ids = np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])
    except InputError:
        ids = np.zeros((1, 0), int)
    if not ids.shape[1]:
        return lead_image(backbone, rows)
    return of_ids(backbone, np.repeat(ids.astype(np.int32), rows, axis=0), "lead", LEAD)


def files_in(folder: Path, kind: str) -> list[Path]:
    """Returns the images or texts in a folder and below it, by name.

    Raises:
      InputError: the folder is missing, or holds none.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES[kind] and path.is_file())
    if not paths:
        reason = "is no folder" if not folder.is_dir() else f"holds no {kind}"
        suffixes = ", ".join(sorted(SUFFIXES[kind]))
        raise InputError(f"--{kind}: got {folder}, which {reason}; expected a folder with files {suffixes}")
    return paths


def digest_of(paths: Sequence[Path]) -> str:
    """Digests the files' bytes: 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for path in paths:
        total.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
    return total.hexdigest()
