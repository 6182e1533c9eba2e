"""Windows of a user's own images: of a folder, as an agent had them, or a data set's contexts, texts included."""

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from kvpatch_jax import Text
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, KVPatchError
from models import ModelBackbone

from ..measure.contexts import prepared
from ..measure.items import DataSet, content_key
from ..probes.window.image_sequence import Image, bucket, filled
from ..probes.window.probe_images import of_tokens
from .packed_questions import packed, packed_by_row, questions_of, tokens_of
from .recorded_windows import RecordedWindow
from .window_sizes import CertifiedSizes, halves
from .window_sources import WindowBatch, WindowSource, WindowSpec, digest_of, files_in, lead_of

MOST_ASKED = 16
"""Questions behind one recorded window that are asked at most: the first ones."""
LEAST_CHUNKS = 3
"""Chunks of the smallest window that is measured."""

Asked = tuple[Int[np.ndarray, " _"], ...]
"""Tokens of each question behind one window."""


@dataclasses.dataclass(frozen=True, eq=False)
class OwnImageSource(WindowSource):
    """Windows of a user's images.

    Attributes:
      questions: asked behind every window; none of recorded windows, which have their own.
      longest, most_asked: tokens of the longest question of recorded windows, and the most questions behind one.
    """

    questions: tuple[str, ...] = ()
    longest: int = 0
    most_asked: int = 0

    @classmethod
    def of(
        cls, backbone: ModelBackbone, folder: Path, sizes: CertifiedSizes, seed: int, questions: Sequence[str]
    ) -> "OwnImageSource":
        """Plans windows of the images in a folder, each drawn from one half of them.

        A window shows images of similar sizes, as one agent's images have, so that few shapes occur.

        Raises:
          InputError: too few images, or no question in words that the tokenizer knows. ImageError: one that cannot be
            read.
        """
        questions_of(backbone, questions, 1)  # refuses them before anything is computed
        images, rng = _Images.of_folder(backbone, folder), np.random.default_rng(seed)
        names = [*images.contents]
        order = rng.permutation(len(names))
        pools = order[: (len(names) + 1) // 2], order[(len(names) + 1) // 2 :]
        if len(pools[1]) < 2 * sizes.most:
            raise InputError(
                f"certify: got {len(names)} images in {folder}; expected {4 * sizes.most} or more: two halves with "
                f"windows of {sizes.most} and as many that were there before"
            )

        shapes = [images.shape(name) for name in names]
        specs, disjoint, first = list[WindowSpec](), True, 0
        dealings = itertools.product(zip(sizes.chunks, sizes.counts, strict=True), enumerate(pools))
        for (chunks, count), (side, pool) in dealings:
            windows = halves(count)[side]
            dealt, apart = deal(pool, windows, chunks + sizes.most, rng, dict(enumerate(shapes)))
            disjoint &= apart
            shown = [[names[image] for image in row] for row in dealt.tolist()]
            specs += images.specs(chunks, shown, first, sizes.batch_of(chunks), held_out=bool(side))
            first += windows

        content = f"{len(names)} images of {folder.name or folder}, like sizes together, digest "
        content += digest_of([*images.contents.values()])
        return cls(content, sizes, disjoint, tuple(specs), tuple(questions))

    @classmethod
    def recorded(
        cls, backbone: ModelBackbone, folder: Path, windows: Sequence[RecordedWindow], sizes: CertifiedSizes, seed: int
    ) -> "OwnImageSource":
        """Plans recorded windows. Of each size the earlier half calibrates, and the later half is held out.

        Args:
          folder: of the images. windows: in the order in which they were recorded.
          sizes: those to measure, as `recorded_sizes` finds them.
          seed: of what was there before a window where that was not recorded: images of other windows of its half.

        Raises:
          InputError: a name of no image, or a question without a word that the tokenizer knows. ImageError: an image
            that cannot be read.
        """
        images = _Images.of_folder(backbone, folder)
        chosen = _measured(windows, sizes)
        shown = sorted({name for window in chosen for name in (*window.images, *window.before)})
        digest = digest_of([images.path(name) for name in shown])
        return cls._planned(
            images, chosen, sizes, seed, f"{len(chosen)} recorded windows of {len(shown)} images", digest
        )

    @classmethod
    def of_items(
        cls,
        backbone: ModelBackbone,
        data: DataSet,
        sizes: CertifiedSizes,
        seed: int,
        windows: Sequence[RecordedWindow],
        *,
        least: int = 2,
    ) -> "OwnImageSource":
        """Plans the contexts of a data set as windows, and asks its questions behind them.

        A context of which the backbone cannot read a piece or any question is left out with a printed line, and another
        of its size takes its place where there is one.

        Args:
          sizes: those to measure, as `recorded_sizes` finds them. windows: as `windows_of_items` makes them.
          least: windows of one size that are needed.

        Raises:
          InputError: fewer windows than that of every size.
        """
        contents, where = dict[str, Any](), dict[tuple[str, ...], str]()
        for item in data.items:
            contents |= {content_key(piece.content): piece.content for piece in item.pieces}
            where.setdefault(tuple(content_key(piece.content) for piece in item.pieces), item.where or item.id)
        pieces = _Images(backbone, contents, str(data.source))
        readable = _readable(pieces, windows, sizes, where)
        sizes = recorded_sizes(readable, least, max(sizes.counts), sizes.batch, "--data")
        chosen = _measured(readable, sizes)
        content = f"{len(chosen)} contexts of {data.source.name} ({data.name})"
        source = cls._planned(pieces, chosen, sizes, seed, content, data.digest[:16])
        names = [name for window in chosen for name in window.images]
        kinds = {"text" if isinstance(contents[name], Text) else "image" for name in names}
        return dataclasses.replace(source, modalities=tuple(sorted(kinds)))

    @classmethod
    def _planned(
        cls,
        images: "_Images",
        chosen: Sequence[RecordedWindow],
        sizes: CertifiedSizes,
        seed: int,
        content: str,
        digest: str,
    ) -> "OwnImageSource":
        """Plans windows that are measured, of each size the earlier half for calibration."""
        rng = np.random.default_rng(seed)
        specs, first, disjoint, asked = list[WindowSpec](), 0, True, list[Asked]()
        by_size = _by_size(chosen)
        for chunks, count in zip(sizes.chunks, sizes.counts, strict=True):
            of_size, batch = by_size[chunks], sizes.batch_of(chunks)
            disjoint &= len({name for window in of_size for name in window.images}) == chunks * count
            earlier = halves(count)[0]
            for side, own in enumerate((of_size[:earlier], of_size[earlier:])):
                pool = sorted({name for window in own for name in window.images})
                shown = [[*window.images, *_before(window, pool, sizes.most, rng)] for window in own]
                tokens = [_asked(images.backbone, window) for window in own]
                asked += tokens
                specs += images.specs(chunks, shown, first, batch, held_out=bool(side), asked=tokens)
                first += len(own)

        longest, most = max(len(ids) for own in asked for ids in own), max(map(len, asked))
        return cls(f"{content}, digest {digest}", sizes, disjoint, tuple(specs), (), longest, most)

    def load(self, backbone: ModelBackbone, spec: WindowSpec, folder: Path) -> WindowBatch:
        """Prefills a batch."""
        mark = hashlib.blake2b(spec.clusters.tobytes(), digest_size=8).hexdigest()
        images = []
        for place, tokens in enumerate(spec.batch):
            image = of_tokens(backbone, tokens, f"image {place}", f"{mark} image {place}")
            images.append(roomy_image(image, backbone))

        rows, axes = len(spec.clusters), backbone.layout.rope.axes
        if spec.asked:
            questions = packed_by_row(spec.asked, self.most_asked, self.longest, axes)
        else:
            parts = questions_of(backbone, self.questions, rows)
            questions = packed(parts, axes, f"{len(parts)} questions, the next token behind each")
        questions.valid[spec.count :] = False
        pieces, older = tuple(images[: spec.chunks]), tuple(images[spec.chunks :])
        return WindowBatch(
            backbone=backbone,
            lead=lead_of(backbone, rows),
            pieces=pieces,
            older=older,
            other=older[0],
            questions=questions,
            clusters=spec.clusters,
            held_out=spec.held_out,
        )

    def size(self, backbone: ModelBackbone, spec: WindowSpec) -> int:
        """Returns the tokens of the chunks of one window."""
        return sum(tokens.embeddings.shape[1] for tokens in spec.batch[: spec.chunks])


def windows_of_items(data: DataSet) -> list[RecordedWindow]:
    """Makes a window of each context of images and texts, with all questions that are asked behind it.

    Videos are left out: what was measured of a clip's frames holds for no other number of frames.

    Raises:
      InputError: there is no such context.
    """
    asked: dict[tuple[str, ...], list[str]] = {}
    for item in data.items:
        if all(isinstance(piece.content, Text | Path) for piece in item.pieces):
            asked.setdefault(tuple(content_key(piece.content) for piece in item.pieces), []).append(item.question)
    if not asked:
        raise InputError(
            f"--data: got {data.source}, of whose {len(data.items)} items none has a context of images and texts; "
            "expected such items"
        )
    return [RecordedWindow(images, tuple(questions)) for images, questions in asked.items()]


def _readable(
    pieces: "_Images", windows: Sequence[RecordedWindow], sizes: CertifiedSizes, where: Mapping[tuple[str, ...], str]
) -> list[RecordedWindow]:
    """Returns as many windows of each size as are measured, or all that can be read; prints a line for each other.

    Args:
      where: windows are from, by what they show.
    """
    found, by_size = list[RecordedWindow](), _by_size(windows)
    for chunks, count in zip(sizes.chunks, sizes.counts, strict=True):
        own = list[RecordedWindow]()
        for window in by_size[chunks]:
            if len(own) == count:
                break
            try:
                _asked(pieces.backbone, window)
                for name in window.images:
                    pieces.tokens(name)
            except (KVPatchError, OSError) as error:
                print(f"left out: {where[window.images]}: {' '.join(str(error).split())}", flush=True)
            else:
                own.append(window)
        found += own
    return found


def _measured(windows: Sequence[RecordedWindow], sizes: CertifiedSizes) -> list[RecordedWindow]:
    """Returns the windows of the sizes that are measured, as many of each, size by size."""
    by_size, chosen = _by_size(windows), list[RecordedWindow]()
    for chunks, count in zip(sizes.chunks, sizes.counts, strict=True):
        chosen += by_size[chunks][:count]
    return chosen


def recorded_sizes(
    windows: Sequence[RecordedWindow], least: int, most: int, batch: int, flag: str = "--windows"
) -> CertifiedSizes:
    """Returns the sizes that are recorded often enough.

    Args:
      least, most: windows of one size that are needed, and that are measured. batch: as of `CertifiedSizes`.
      flag: where they come from, for messages.

    Raises:
      InputError: no size is recorded so often.
    """
    counts = {size: len(own) for size, own in sorted(_by_size(windows).items())}
    enough = {size: min(count, most) for size, count in counts.items() if size >= LEAST_CHUNKS and count >= least}
    if not enough:
        found = ", ".join(f"{count} of {size}" for size, count in counts.items())
        pieces = "images" if flag == "--windows" else "pieces"
        raise InputError(
            f"{flag}: got windows {found or 'none'} {pieces}; expected {least} or more of a size, from {LEAST_CHUNKS} "
            f"{pieces} on"
        )
    return CertifiedSizes(tuple(enough), tuple(enough.values()), batch)


def _by_size(windows: Sequence[RecordedWindow]) -> dict[int, list[RecordedWindow]]:
    """Returns the windows by their number of images."""
    found = collections.defaultdict[int, list[RecordedWindow]](list)
    for window in windows:
        found[len(window.images)].append(window)
    return found


def _asked(backbone: ModelBackbone, window: RecordedWindow) -> Asked:
    """Returns the tokens of the questions behind a window."""
    tokens = tokens_of(backbone, window.questions)
    if not tokens:
        raise InputError(
            f"--windows: got {window.questions[0]!r:.60} behind {window.images[0]!r:.60}, without a word that the "
            "tokenizer knows; expected questions in its vocabulary"
        )
    return tuple(tokens[:MOST_ASKED])


def _before(window: RecordedWindow, pool: Sequence[str], count: int, rng: np.random.Generator) -> list[str]:
    """Returns the images that were there before a window, filled up at the front by others that it does not show."""
    known = list(window.before[-count:])
    others = [name for name in pool if name not in {*window.images, *known}] or [*window.images]
    more = max(0, count - len(known))
    drawn = (
        rng.permutation(len(others))[:more].tolist() if more <= len(others) else rng.integers(len(others), size=more)
    )
    return [*(others[int(number)] for number in drawn), *known]


class _Images:
    """The images in a folder, or images and texts of a data set, and batches of windows that show them.

    Attributes:
      backbone: that sees them.
      contents: of the pieces, by their names.
    """

    def __init__(self, backbone: ModelBackbone, contents: Mapping[str, Any], source: str):
        """Takes images, which are read when they are asked for. `source`: where they are from, for messages."""
        self.backbone, self.contents = backbone, contents
        self._source, self._read = source, dict[str, Tokens]()

    @classmethod
    def of_folder(cls, backbone: ModelBackbone, folder: Path) -> "_Images":
        """Lists the images of a folder, by their paths from the folder on."""
        files = {path.relative_to(folder).as_posix(): path for path in files_in(folder, "images")}
        return cls(backbone, files, str(folder))

    def path(self, name: str) -> Any:
        """Returns an image by its name.

        Raises:
          InputError: there is none of this name.
        """
        if name not in self.contents:
            raise InputError(f"--windows: got {name!r:.80}; expected the name of an image in {self._source}")
        return self.contents[name]

    def tokens(self, name: str) -> Tokens:
        """Reads and embeds an image.

        Raises:
          InputError: there is none of this name. ImageError: it cannot be read.
        """
        if name not in self._read:
            self._read[name] = self.backbone.embed(**prepared(self.backbone, self.path(name)))
        return self._read[name]

    def shape(self, name: str) -> tuple[Any, ...]:
        """Returns a sort key that puts images of one shape next to one another, in order of their tokens."""
        tokens = self.tokens(name)
        return tokens.embeddings.shape, np.asarray(tokens.positions).tobytes()

    def specs(
        self,
        chunks: int,
        shown: Sequence[Sequence[str]],
        first: int,
        batch: int,
        *,
        held_out: bool,
        asked: Sequence[Asked] = (),
    ) -> list[WindowSpec]:
        """Plans batches of windows of one shape.

        Args:
          shown: names of the images of each window, and of those that were there before.
          first: number of the first window. batch: windows in a batch at most.
          asked: tokens of the questions behind each window, where they have their own.
        """
        by_shape: dict[Any, list[int]] = {}
        for row, names in enumerate(shown):
            by_shape.setdefault(tuple(self.shape(name) for name in names), []).append(row)

        specs = []
        for rows in by_shape.values():
            for start in range(0, len(rows), batch):
                part = rows[start : start + batch]
                padded = min(batch, 1 << (len(part) - 1).bit_length())  # a power of two
                repeated = [*part, *part[-1:] * (padded - len(part))]
                columns = zip(*(shown[row] for row in repeated), strict=True)
                tokens = [_stacked([self.tokens(name) for name in column]) for column in columns]
                clusters, own = first + np.asarray(repeated), tuple(asked[row] for row in repeated if asked)
                specs.append(WindowSpec(chunks, tokens, clusters, held_out, len(part), own))
        return specs


def deal(
    pool: np.ndarray, windows: int, count: int, rng: np.random.Generator, sizes: Mapping[int, Any] | None = None
) -> tuple[Int[np.ndarray, "n k"], bool]:
    """Draws what each window shows, [windows, count]; and whether no two windows show the same.

    If the pool is too small, windows share items; one window never shows an item twice.

    Args:
      sizes: of all items in the pool: then a window shows neighbours by size.
    """

    def by_size(drawn: np.ndarray) -> np.ndarray:
        return np.array(sorted(drawn.tolist(), key=sizes.__getitem__), int) if sizes else drawn

    if len(pool) >= windows * count:
        return by_size(rng.permutation(pool)[: windows * count]).reshape(windows, count), True

    rows = []
    for _ in range(windows):
        drawn, first = by_size(rng.permutation(pool)), int(rng.integers(len(pool) - count + 1))
        rows.append(drawn[first : first + count] if sizes else drawn[:count])

    return np.stack(rows), False


def roomy_image(image: Image, backbone: ModelBackbone) -> Image:
    """Pads an image's chunk to its bucket, on the host, so that one program serves all sizes of a bucket."""
    chunk, room = image.chunk, bucket(backbone, image.chunk.length)
    kv = {name: filled(value, room, 2) for name, value in chunk.kv.items()}
    return Image(image.tokens, dataclasses.replace(chunk, kv=kv, local=filled(chunk.local, room, 0)))


def _stacked(rows: Sequence[Tokens]) -> Tokens:
    # Positions stay on the host, where they are read.
    whole = jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *rows)
    return jax.tree.map(jnp.asarray, whole)._replace(positions=whole.positions)
