"""Windows to measure on: images of the small task, a user's own images, or texts. Batches share their shapes.

Half of the windows are for calibration, half are held out, and which is which is drawn before anything is computed.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import ImageError, InputError
from models import ModelBackbone

from .. import small_task
from ..pretrained.texts import LIBRARY, documentation
from ..probes.window.image_sequence import Image, bucket, filled
from ..probes.window.probe_images import lead_image, of_ids, of_tokens
from ..small_task import VOCABULARY, scenes, sequences
from .asking import Asked, packed, questions_of

LEAD = "The following is looked at from the first to the last."
PIECE, CONTINUED = 64, 16
"""Tokens of a text's chunk, and of what follows a window of them and is scored."""
SUFFIXES = {
    "images": {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"},
    "texts": {".txt", ".md", ".rst"},
}
ASKED = {"page": 2, "legend": 2, "chain": 3, "aggregate": 2, "override": 2}
"""Questions of the small task behind a window, by kind."""


class Planned(NamedTuple):
    """Windows before they are computed: what a batch shows, whose they are, and on which side they are.

    Rows from `count` on repeat others, so that batches have few sizes; they are not scored.
    """

    batch: Any
    clusters: np.ndarray
    held_out: bool
    count: int | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """Where windows come from.

    Attributes:
      content: in words. chunks: of a window, beside the lead. windows: (calibration, held out), in clusters.
      disjoint: whether no two windows share a chunk.
      planned: the batches.
      modality: of the chunks.
    """

    content: str
    chunks: int
    windows: tuple[int, int]
    disjoint: bool
    planned: tuple[Planned, ...]
    modality: ClassVar[str] = "image"

    def load(self, backbone: ModelBackbone, planned: Planned, folder: Path) -> "Windows":
        """Reads and prefills what a batch shows."""
        raise NotImplementedError

    def size(self, backbone: ModelBackbone, planned: Planned) -> int:
        """Tokens of the chunks of one window of a batch."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """A batch of windows of one shape.

    Attributes:
      lead: pinned in front. pieces: the window's chunks, in order. older: what stood there before they came, as many.
      other: what the first piece is replaced by where an antecedent is to have changed.
      asked: what is asked. clusters: whose windows they are, [B].
    """

    backbone: ModelBackbone
    lead: Image
    pieces: tuple[Image, ...]
    older: tuple[Image, ...]
    other: Image
    asked: Asked
    clusters: np.ndarray
    held_out: bool

    @property
    def spans(self) -> list[int]:
        """Spans of the pieces, and of what stood there before."""
        return [image.chunk.span for image in (*self.older, *self.pieces)]


def halves(count: int) -> tuple[int, int]:
    """How many of so many windows are for calibration, and how many are held out."""
    return (count + 1) // 2, count // 2


# ---------------------------------------------------------------------------------------------------- small task


@dataclasses.dataclass(frozen=True)
class DrawnImages(Source):
    """Windows of three legends and a page of the small task; other contexts' stood there before."""

    @classmethod
    def of(cls, count: int, batch: int, seed: int) -> "DrawnImages":
        """Plans so many windows; every context is drawn for one window alone."""
        planned, first = [], 0
        for side, windows in enumerate(halves(count)):
            for start in range(0, windows, batch):
                rows = min(batch, windows - start)
                planned.append(Planned([seed, side, start], first + np.arange(rows), bool(side)))
                first += rows
        content = f"images drawn by the small task, seed {seed}"
        return cls(content, sequences.CHUNKS, halves(count), True, tuple(planned))

    def load(self, backbone: ModelBackbone, planned: Planned, folder: Path) -> Windows:
        """See `Source.load`. PNG files go to the folder."""
        rng, rows = np.random.default_rng(planned.batch), len(planned.clusters)
        contexts, others = (small_task.sample_contexts(rng, rows) for _ in range(2))
        pieces, older = ([*_images(scenes.load_scene(backbone, each, folder))] for each in (contexts, others))
        questions = small_task.ask(contexts, rng, ASKED)
        form = scenes.form_of(backbone.config, backbone.image_config)
        tail = sequences.question_tokens(form, questions, np.zeros(rows, int))
        number = questions.answer.shape[1]
        asked = Asked(tail, np.arange(number), questions.valid, f"{number} questions of the small task, a token each")
        return Windows(
            backbone=backbone,
            lead=lead_image(backbone, rows),
            pieces=tuple(pieces),
            older=(older[-1], *older[:-1]),
            other=older[0],
            asked=asked,
            clusters=planned.clusters,
            held_out=planned.held_out,
        )

    def size(self, backbone: ModelBackbone, planned: Planned) -> int:
        """See `Source.size`."""
        return sum(scenes.form_of(backbone.config, backbone.image_config).sizes)


def _images(scene: scenes.Scene) -> Iterator[Image]:
    for tokens, chunk in zip(scene.images, scene.chunks, strict=True):
        yield Image(tokens, chunk)


# -------------------------------------------------------------------------------------------------- own images


@dataclasses.dataclass(frozen=True)
class OwnImages(Source):
    """Windows of a user's images, drawn at random from one half of them or the other."""

    questions: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        backbone: ModelBackbone,
        folder: Path,
        count: int,
        batch: int,
        seed: int,
        chunks: int,
        questions: Sequence[str],
    ) -> "OwnImages":
        """Plans so many windows of the images in a folder; those of one shape go into a batch.

        Windows show images of like sizes, as those of one agent do, so that few shapes come together.

        Raises:
          InputError: too few images. ImageError: one that cannot be read.
        """
        paths, rng = files_in(folder, "images"), np.random.default_rng(seed)
        order = rng.permutation(len(paths))
        pools = order[: (len(paths) + 1) // 2], order[(len(paths) + 1) // 2 :]
        if len(pools[1]) < chunks + 1:
            raise InputError(
                f"certify: {len(paths)} images in {folder}; expected {2 * chunks + 2} or more, for windows of "
                f"{chunks} in two halves"
            )
        embedded = {int(each): backbone.embed(**backbone.prepare([paths[each]])) for each in order}
        planned, disjoint, first = [], True, 0
        for side, (pool, windows) in enumerate(zip(pools, halves(count), strict=True)):
            dealt, apart = deal(pool, windows, 2 * chunks, rng, {own: _size(embedded[own]) for own in pool.tolist()})
            disjoint &= apart
            groups: dict[Any, list[int]] = {}
            for row, shown in enumerate(dealt):
                groups.setdefault(tuple(_shape(embedded[int(each)]) for each in shown), []).append(row)
            for rows in groups.values():
                for start in range(0, len(rows), batch):
                    part = rows[start : start + batch]
                    repeated = [*part, *part[-1:] * (min(batch, 1 << (len(part) - 1).bit_length()) - len(part))]
                    tokens = [
                        _stacked([embedded[int(dealt[row, place])] for row in repeated]) for place in range(2 * chunks)
                    ]
                    planned.append(Planned(tokens, first + np.asarray(repeated), bool(side), len(part)))
            first += windows
        content = f"{len(paths)} images of {folder.name or folder}, like sizes together, digest {digest_of(paths)}"
        return cls(content, chunks, halves(count), disjoint, tuple(planned), tuple(questions))

    def load(self, backbone: ModelBackbone, planned: Planned, folder: Path) -> Windows:
        """See `Source.load`."""
        mark = hashlib.blake2b(planned.clusters.tobytes(), digest_size=8).hexdigest()
        images = [
            roomy_image(of_tokens(backbone, tokens, f"image {place}", f"{mark} image {place}"), backbone)
            for place, tokens in enumerate(planned.batch)
        ]
        rows, axes = len(planned.clusters), backbone.layout.rope.axes
        parts = questions_of(backbone, self.questions, rows)
        pieces, older = tuple(images[: self.chunks]), tuple(images[self.chunks :])
        asked = packed(parts, axes, f"{len(parts)} questions, the next token behind each")
        asked.valid[planned.count :] = False
        return Windows(
            backbone=backbone,
            lead=lead_of(backbone, rows),
            pieces=pieces,
            older=older,
            other=older[0],
            asked=asked,
            clusters=planned.clusters,
            held_out=planned.held_out,
        )

    def size(self, backbone: ModelBackbone, planned: Planned) -> int:
        """See `Source.size`."""
        return sum(tokens.embeddings.shape[1] for tokens in planned.batch[: self.chunks])


def deal(
    pool: np.ndarray, windows: int, each: int, rng: np.random.Generator, sizes: Mapping[int, Any] | None = None
) -> tuple[Int[np.ndarray, "n k"], bool]:
    """Draws what each window shows, [windows, each]; and whether nothing is shown by two of them.

    Where the pool is too small, windows share; where it is smaller than a window with what stood there before, what
    stood there before repeats in other order what is shown.

    Args:
      sizes: of all that is in the pool: then a window shows neighbours by size.
    """
    alike = (lambda drawn: np.array(sorted(drawn.tolist(), key=sizes.__getitem__), int)) if sizes else np.asarray
    if len(pool) >= windows * each:
        return alike(rng.permutation(pool)[: windows * each]).reshape(windows, each), True
    rows = []
    for _ in range(windows):
        drawn, first = alike(rng.permutation(pool)), int(rng.integers(max(len(pool) - each, 0) + 1))
        drawn = drawn[first : first + each] if sizes else drawn[:each]
        rows.append(np.concatenate([drawn, rng.permutation(drawn)])[:each])
    return np.stack(rows), False


def roomy_image(image: Image, backbone: ModelBackbone) -> Image:
    """Pads an image's chunk to its bucket, on the host: operators then have one program for all sizes in it."""
    chunk, room = image.chunk, bucket(backbone, image.chunk.length)
    kv = {name: filled(value, room, 2) for name, value in chunk.kv.items()}
    return Image(image.tokens, dataclasses.replace(chunk, kv=kv, local=filled(chunk.local, room, 0)))


def _size(tokens: Tokens) -> tuple[int, bytes]:
    """By which images are neighbours: those of one shape next to one another, and by how many tokens they have."""
    return tokens.embeddings.shape[1], np.asarray(tokens.positions).tobytes()


def _shape(tokens: Tokens) -> tuple[Any, ...]:
    return tokens.embeddings.shape, np.asarray(tokens.positions).tobytes()


def _stacked(rows: Sequence[Tokens]) -> Tokens:
    whole = jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *rows)
    return jax.tree.map(jnp.asarray, whole)._replace(positions=whole.positions)


# --------------------------------------------------------------------------------------------------------- texts


@dataclasses.dataclass(frozen=True)
class Texts(Source):
    """Windows of consecutive pieces of documents; what stood there before are the pieces in front of them."""

    modality: ClassVar[str] = "text"
    questions: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        backbone: ModelBackbone,
        folder: Path | None,
        count: int,
        batch: int,
        seed: int,
        chunks: int,
        questions: Sequence[str],
    ) -> "Texts":
        """Plans so many windows, one of each document, of a folder or of the standard library's documentation.

        Raises:
          InputError: too few documents that are long enough.
        """
        size = 2 * chunks * PIECE + CONTINUED
        paths = files_in(folder, "texts") if folder is not None else _library()
        rng, found = np.random.default_rng(seed), []
        for place in rng.permutation(len(paths)):
            path = paths[place]
            text = path.read_text(encoding="utf-8", errors="replace") if folder is not None else documentation(path)
            if len(text) < 2 * size:  # fewer than two characters a token no tokenizer makes of prose
                continue
            ids = np.asarray(backbone.prepare([kvp.Text(text[: 16 * size])])["input_ids"])[0]
            if len(ids) >= size:
                found.append(ids[:size].astype(np.int32))
            if len(found) == count:
                break
        if len(found) < 4:
            where = folder or "the standard library's documentation"
            raise InputError(f"certify: {len(found)} texts of {size} tokens in {where}; expected 4 or more")
        planned, first = [], 0
        for side, windows in enumerate(halves(len(found))):
            for start in range(0, windows, batch):
                clusters = first + np.arange(start, min(start + batch, windows))
                planned.append(Planned(np.stack([found[own] for own in clusters]), clusters, bool(side)))
            first += windows
        shown = hashlib.blake2b(np.stack(found).tobytes(), digest_size=8).hexdigest()
        where = "the standard library's documentation" if folder is None else folder.name or str(folder)
        content = f"{len(found)} texts of {where}, {PIECE} tokens a chunk, digest {shown}"
        return cls(content, chunks, halves(len(found)), True, tuple(planned), tuple(questions))

    def load(self, backbone: ModelBackbone, planned: Planned, folder: Path) -> Windows:
        """See `Source.load`."""
        ids, rows = planned.batch, len(planned.clusters)
        mark = hashlib.blake2b(ids.tobytes(), digest_size=8).hexdigest()
        cut = [ids[:, place * PIECE : (place + 1) * PIECE] for place in range(2 * self.chunks)]
        pieces = [of_ids(backbone, part, f"piece {place}", f"{mark} piece {place}") for place, part in enumerate(cut)]
        behind = ids[:, 2 * self.chunks * PIECE :]
        half = behind.shape[1] // 2
        continued = [(behind[:, :half], range(half)), (behind, range(half, behind.shape[1]))]
        parts = [*continued, *_known_questions(backbone, self.questions, rows)]
        what = f"the next {behind.shape[1]} tokens in two halves, and {len(parts) - 2} questions, a token each"
        return Windows(
            backbone=backbone,
            lead=lead_of(backbone, rows),
            pieces=tuple(pieces[self.chunks :]),
            older=tuple(pieces[: self.chunks]),
            other=pieces[0],
            asked=packed(parts, backbone.layout.rope.axes, what),
            clusters=planned.clusters,
            held_out=planned.held_out,
        )

    def size(self, backbone: ModelBackbone, planned: Planned) -> int:
        """See `Source.size`."""
        return self.chunks * PIECE


def _known_questions(backbone: ModelBackbone, questions: Sequence[str], rows: int) -> list[Any]:
    try:
        return questions_of(backbone, questions, rows)
    except InputError:
        return []  # what follows a text is asked anyway


def _library() -> list[Path]:
    paths = [*LIBRARY.glob("[a-z]*.py"), *LIBRARY.glob("[a-z]*/[a-z_]*.py")]
    return sorted(path for path in paths if path.parts[-2] not in ("site-packages", "test"))


# ---------------------------------------------------------------------------------------------------- common


def lead_of(backbone: ModelBackbone, rows: int) -> Image:
    """The pinned lead: a sentence, or of a tokenizer that knows none of its words the small task's."""
    try:
        ids = np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])
    except InputError:
        ids = np.zeros((1, 0), int)
    if not ids.shape[1]:
        return lead_image(backbone, rows)
    return of_ids(backbone, np.repeat(ids.astype(np.int32), rows, axis=0), "lead", LEAD)


def files_in(folder: Path, kind: str) -> list[Path]:
    """The images or texts in a folder and those below it, by name.

    Raises:
      InputError: no folder, or none in it.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES[kind] and path.is_file())
    if not paths:
        said = "is no folder" if not folder.is_dir() else f"holds no {kind}"
        raise InputError(f"--{kind}={folder} {said}; expected a folder with files {', '.join(sorted(SUFFIXES[kind]))}")
    return paths


def digest_of(paths: Sequence[Path]) -> str:
    """Digests the files' bytes: 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for path in paths:
        total.update(hashlib.blake2b(path.read_bytes(), digest_size=16).digest())
    return total.hexdigest()


def drawn_images_fit(backbone: ModelBackbone) -> bool:
    """Whether the small task can be asked: its words are the backbone's vocabulary."""
    if backbone.image_config is None or backbone.tokenizer is None:
        return False
    try:
        ids = np.asarray(backbone.prepare([kvp.Text(" ".join(VOCABULARY.names[6:10]))])["input_ids"])[0]
    except (InputError, ImageError):
        return False
    return ids.tolist() == list(range(6, 10))
