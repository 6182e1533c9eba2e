"""Images one behind the other, as a window has them: placed, prefilled, served piece by piece, asked about.

Everything is a batch of contexts that share all but their pixels. KV of images is phase-free; what is read is in the
engine frame. Axis letters as in `small_task.scenes`. Between forwards everything lies on the host, where cutting,
joining and padding compile nothing: a line in another order, or of another length in a bucket, runs programs that are
there.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from models import ModelBackbone

from ...arms.reused_page import cut
from ...small_task import Questions, scenes, sequences
from ...small_task.scenes import Answers
from ...small_task.sequences import QuestionTokens

KV = dict[str, Float[Array | np.ndarray, "L B _ _ _"]]
"""{channel: [L, B, T, K, H]}, mostly on the host."""


def on_host(tree: Any) -> Any:
    """Brings the arrays of a pytree to the host; on a CPU that copies none."""
    return jax.tree.map(np.asarray, tree)


def joined(parts: Sequence[KV]) -> KV:
    """Joins pieces of KV behind one another, along their tokens."""
    whole = {}
    for name in parts[0]:
        whole[name] = np.concatenate([np.asarray(part[name]) for part in parts], axis=2)
    return whole


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """What is placed: an image of every context, or the pinned lead.

    Attributes:
      tokens: [B, T, …], positions from its own start.
      chunk: its canonical, a batch of chunks.
    """

    tokens: Tokens
    chunk: kvp.Chunk

    @property
    def size(self) -> int:
        """Tokens of it."""
        return self.chunk.length

    @property
    def canonical(self) -> KV:
        """Its phase-free KV alone."""
        return on_host(dict(self.chunk.kv))

    def of_others(self, by: int) -> "Image":
        """Gives each context the image that the context `by` further on has in this place."""
        rolled = jax.tree.map(lambda array: jnp.asarray(np.roll(array, -by, axis=0)), self.tokens)
        tokens = rolled._replace(positions=self.tokens.positions)
        kv = {name: np.roll(np.asarray(value), -by, axis=1) for name, value in self.chunk.kv.items()}
        name = f"{self.chunk.id}+{by}"
        return Image(tokens, dataclasses.replace(self.chunk, kv=kv, id=name, content=name))


class ImageSequence:
    """Images in the order in which they stand, the first one's positions from 0.

    Attributes:
      backbone: reads them.
      images: the lead first where there is one.
      starts: the position each begins at; end: the one behind the last.
      slices: where each stands among the tokens.
    """

    def __init__(self, backbone: ModelBackbone, images: Sequence[Image]):
        self.backbone, self.images = backbone, tuple(images)
        edges = np.cumsum([0, *(image.chunk.span for image in self.images)])
        self.starts, self.end = edges[:-1].astype(np.int32), int(edges[-1])
        sizes = np.cumsum([0, *(image.size for image in self.images)])
        self.slices = [slice(int(first), int(last)) for first, last in itertools.pairwise(sizes)]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> int:
        """Tokens of all images."""
        return self.slices[-1].stop

    @functools.cached_property
    def tokens(self) -> Tokens:
        """All images as one prompt."""
        return _one_behind_the_other(
            [image.tokens.shift(start) for image, start in zip(self.images, self.starts, strict=True)]
        )

    def antecedent(self, place: int) -> tuple[str, ...]:
        """Returns the ids of what stands in front of a place."""
        return tuple(image.chunk.id for image in self.images[:place])

    def prefill(self, sees: Bool[np.ndarray, "n n"] | None = None) -> list[KV]:
        """Prefills everything in one forward; phase-free KV of each image.

        Args:
          sees: which image looks at which (its own tokens causally); all in front when None.
        """
        mask = None if sees is None else self.band(sees)
        return self.parts(prefilled(self.backbone, self.tokens, mask, chunk=PIECE))

    def parts(self, kv: KV) -> list[KV]:
        """Cuts KV of the line into its images."""
        return [cut(kv, where) for where in self.slices]

    def engine(self, parts: Sequence[KV]) -> KV:
        """Turns phase-free KV of every image to its place and joins it."""
        room = bucket(self.backbone, self.size)
        held = {name: filled(value, room, 2) for name, value in joined(parts).items()}
        turned = kvp.to_engine(self.backbone.layout, held, filled(self.tokens.positions, room, 1), 0)
        return cut(on_host(dict(turned)), slice(self.size))

    def band(self, sees: Bool[np.ndarray, "n n"]) -> Bool[np.ndarray, "B 1 T T"]:
        """Makes the mask [B,1,T,T] under which image i looks at image j where `sees[i, j]`."""
        owner = np.repeat(np.arange(len(self)), [image.size for image in self.images])
        mask = np.tri(self.size, dtype=bool) & np.asarray(sees, bool)[owner[:, None], owner[None, :]]
        return np.broadcast_to(mask, (len(self.tokens.embeddings), 1, *mask.shape))

    def serve(
        self,
        place: int,
        patch: kvp.Patch | None = None,
        *,
        base: KV | None = None,
        base_antecedent: Sequence[str] = (),
    ) -> KV:
        """Serves one image in the engine frame from what is cached: its canonical or a base, turned and patched.

        A patch that was formed behind others is served all the same: what that costs is what the probes measure.
        """
        chunk, start = self.images[place].chunk, self.starts[place]
        more = {} if base is None else {"base": base, "base_antecedent": base_antecedent}
        served = kvp.apply_patch(kvp.Placed(chunk, patch, start, self.antecedent(place), allow_stale=True, **more))
        return cut(on_host(dict(served)), slice(chunk.length))

    def with_served(self, cache: KV, pieces: dict[int, KV]) -> KV:
        """Replaces some images of an engine-frame cache of the line."""
        parts = self.parts(cache)
        return joined([pieces.get(place, part) for place, part in enumerate(parts)])


PIECE = 512
"""Tokens that are run at a time where many images stand in the window."""


def prefilled(backbone: ModelBackbone, tokens: Tokens, mask: np.ndarray | None = None, **more: Any) -> KV:
    """Prefills tokens; phase-free KV of theirs. Padded on the host: another length in a bucket compiles nothing."""
    size = tokens.embeddings.shape[1]
    room = bucket(backbone, size)
    if mask is not None:
        mask = filled(filled(mask, room, 2), room, 3)
    return cut(on_host(dict(backbone.prefill(roomy(tokens, room), mask=mask, **more).kv)), slice(size))


def roomy(tokens: Tokens, room: int) -> Tokens:
    """Returns tokens [B, room, …], padded on the host as the backbone itself would."""
    if tokens.embeddings.shape[1] == room:
        return tokens
    whole = jax.tree.map(lambda value: filled(value, room, 1), tokens)
    return jax.tree.map(jnp.asarray, whole)._replace(positions=whole.positions)


def read(line: ImageSequence, caches: Mapping[str, KV], questions: Questions) -> dict[str, Answers]:
    """Asks every question behind the line, over each of its engine-frame caches; answers by the caches' names."""
    tail, number = _tail(line, questions), questions.answer.shape[1]
    return {name: read_behind(line, cache, tail, number) for name, cache in caches.items()}


def read_behind(line: ImageSequence, cache: KV, tail: QuestionTokens, number: int | None = None) -> Answers:
    """Runs packed tokens behind the line over one of its engine-frame caches; what they say, the first `number`."""
    # Padded here, and not by the backbone, which would compile that for every length.
    room, rows = bucket(line.backbone, line.size), len(tail.ids)
    seen = np.broadcast_to(np.arange(room) < line.size, (rows, 1, len(tail.among), room))
    mask = np.concatenate([seen, np.broadcast_to(tail.among, (rows, 1, *tail.among.shape))], axis=3)
    held = {channel: jnp.asarray(filled(value, room, 2)) for channel, value in cache.items()}
    tokens = line.backbone.embed(tail.ids, tail.positions)
    asked = np.broadcast_to(tail.asked, (rows, tail.asked.shape[-1]))
    logits = line.backbone.prefill(tokens, held, mask, logits=asked).logits
    return Answers(scenes.log_probabilities(logits)[:, :number])


def read_in_one(
    line: ImageSequence, questions: Questions, band: Bool[np.ndarray, "n n"], sees: Sequence[bool] | None = None
) -> Answers:
    """Asks every question in one forward over images and questions, under the mask of `ImageSequence.band`.

    Nothing is cached. It is the model that remembers: positions are those at which everything was first seen.

    Args:
      sees: which images the questions look at; all when None.
    """
    tail, count = _tail(line, questions), len(questions.answer)
    looks = np.ones(len(line), bool) if sees is None else np.asarray(sees, bool)
    seen = np.repeat(looks, [image.size for image in line.images])
    prefix = np.broadcast_to(seen, (count, 1, len(tail.among), line.size))
    mask = np.concatenate([prefix, np.broadcast_to(tail.among, (count, 1, *tail.among.shape))], axis=3)
    asked = np.broadcast_to(tail.asked, (count, tail.asked.shape[-1]))
    tokens = _one_behind_the_other([line.tokens, line.backbone.embed(tail.ids, tail.positions)])
    none = np.zeros((*mask.shape[:2], line.size, mask.shape[2]), bool)
    whole = np.concatenate([np.concatenate([line.band(band), none], axis=3), mask], axis=2)
    logits = line.backbone.prefill(tokens, mask=whole, logits=line.size + asked).logits
    return Answers(scenes.log_probabilities(logits)[:, : questions.answer.shape[1]])


def _tail(line: ImageSequence, questions: Questions) -> QuestionTokens:
    """Returns the questions' tokens behind the line; the last question is repeated until a bucket of tokens is full."""
    backbone, (count, number) = line.backbone, questions.answer.shape
    per = sequences.QUESTION_TOKENS
    more = bucket(backbone, per * number) // per - number
    repeated = jax.tree.map(lambda column: np.pad(column, [(0, 0), (0, more)], mode="edge"), vars(questions))
    form = scenes.form_of(backbone.config, backbone.image_config)
    return sequences.question_tokens(form, Questions(**repeated), np.full(count, line.end))


def bucket(backbone: ModelBackbone, size: int) -> int:
    """Returns the size that the backbone would pad one to."""
    return size if backbone.buckets is None else backbone.buckets.round_up(size)


def _one_behind_the_other(parts: Sequence[Tokens]) -> Tokens:
    """Joins tokens as `kvpatch_jax.patching.one_behind_the_other` does, but on the host, which compiles nothing."""
    arrays = [on_host(part) for part in parts]
    known = [part.deepstack for part in arrays if part.deepstack is not None]
    if known:

        def none(part):
            return np.zeros((*part.embeddings.shape[:2], *known[0].shape[2:]), known[0].dtype)

        arrays = [part if part.deepstack is not None else part._replace(deepstack=none(part)) for part in arrays]

    whole = jax.tree.map(lambda *columns: np.concatenate(columns, axis=1), *arrays)
    return jax.tree.map(jnp.asarray, whole)._replace(positions=whole.positions)


class AgentLoop:
    """An agent's window as an engine keeps it: what is appended is prefilled behind what is held, once.

    What stays keeps the KV it was given and is only turned to its new place.

    Attributes:
      held: images in the window with their phase-free KV, the lead first.
      room: keys that the window is padded to, so that every append of one length runs the same program.
    """

    def __init__(self, backbone: ModelBackbone, room: int, lead: Image | None = None):
        self.backbone, self.room = backbone, bucket(backbone, room)
        self.held: list[tuple[Image, KV]] = []
        if lead is not None:
            self.append(lead)

    @property
    def line(self) -> ImageSequence:
        """What is held, in its order."""
        return ImageSequence(self.backbone, [image for image, _ in self.held])

    @property
    def parts(self) -> list[KV]:
        """The phase-free KV of what is held."""
        return [kv for _, kv in self.held]

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of what is held, in its order."""
        return tuple(image.chunk.id for image, _ in self.held)

    def only(self, places: Sequence[int]) -> "AgentLoop":
        """Gives the window without the others, in which everything keeps its KV."""
        loop = AgentLoop(self.backbone, self.room)
        loop.held = [self.held[place] for place in places]
        return loop

    def prefill(self, image: Image) -> KV:
        """Prefills an image behind what is held, which stays as it is; phase-free KV."""
        if not self.held:
            return prefilled(self.backbone, image.tokens)

        line = self.line
        if line.size > self.room:
            raise ValueError(f"window: got {line.size} tokens; expected at most the room of {self.room}")

        held = {name: filled(kv, self.room, 2) for name, kv in joined(self.parts).items()}
        places = filled(line.tokens.positions, self.room, 1)
        context = kvp.to_engine(self.backbone.layout, held, places, 0)

        size = bucket(self.backbone, image.size)
        mask = np.concatenate([np.arange(self.room) < line.size, np.zeros(size, bool)])[None] | np.pad(
            np.tri(size, dtype=bool), [(0, 0), (self.room, 0)]
        )
        mask = np.broadcast_to(mask, (len(image.tokens.embeddings), 1, *mask.shape))
        tokens = roomy(image.tokens.shift(np.int32(line.end)), size)
        return cut(on_host(dict(self.backbone.prefill(tokens, context, mask).kv)), slice(image.size))

    def append(self, image: Image) -> None:
        """Prefills an image behind the window and keeps what that gave."""
        self.held.append((image, self.prefill(image)))

    def slid(self, images: Sequence[Image], most: int, pinned: int) -> "AgentLoop":
        """Gives the window after more images: at most `most` behind those `pinned`, the oldest leaving for each."""
        loop = self
        for image in images:
            full = len(loop.held) - pinned >= most
            loop = loop.only([*range(pinned), *range(pinned + full, len(loop.held))])
            loop.append(image)
        return loop


def filled(values: Array | np.ndarray, size: int, axis: int) -> np.ndarray:
    """Fills an axis up with zeros, on the host."""
    array = np.asarray(values)
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, size - array.shape[axis])
    return np.pad(array, widths)
