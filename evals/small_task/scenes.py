"""A scene: held-out contexts as PNG files, read by the real preprocessing, embedded, prefilled, ready to be asked.

Axis letters: B contexts, T tokens, Q questions, S keys, L layers, K KV heads, H head width, V vocabulary. The prefix is
[legend][legend][legend][page]; the page is the chunk that is reused. Contexts of a scene share all but their pixels, so
each image is one batched chunk. KV of the prefix travels phase-free; what a question reads is an engine-frame cache.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import AnyArray
from models import ModelBackbone

from ..arms.reused_page import KV as KV
from ..arms.reused_page import ReusedPage, chunk_of, cut
from ..arms.reused_page import joined as joined
from . import sequences, task
from .prefix import prefix_positions
from .sequences import Form, form_of
from .task import Contexts, Questions


class Answers(NamedTuple):
    """What an arm answers: log-probabilities, float32."""

    log_probabilities: Float[np.ndarray, "B Q V"]

    @property
    def predicted(self) -> np.ndarray:
        """Token ids [B,Q]."""
        return self.log_probabilities.argmax(axis=-1)

    def divergence_from(self, reference: "Answers") -> np.ndarray:
        """Computes KL(reference ‖ this) per question, [B,Q], in nats."""
        return divergence(reference.log_probabilities, self.log_probabilities)


def log_probabilities(logits: Float[AnyArray, "*lead V"]) -> Float[np.ndarray, "*lead V"]:
    """Computes log-probabilities, and brings them to the host."""
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))


def divergence(
    expected: Float[np.ndarray, "*lead V"], found: Float[np.ndarray, "*lead V"]
) -> Float[np.ndarray, "*lead"]:
    """Computes KL(expected ‖ found) of log-probabilities, in nats."""
    # In float64: differences of log-probabilities near 0 would vanish in float32.
    wide = expected.astype(np.float64)
    return np.sum(np.exp(wide) * (wide - found), axis=-1)


@dataclasses.dataclass(frozen=True)
class Scene:
    """One batch of contexts, embedded, every image prefilled alone.

    Attributes:
      backbone: reads the contexts.
      contexts: what the images mean.
      images: tokens of each image with its start and end tokens, by storage (three legends, the page), [B, T, …];
        positions count from the image's own start.
      chunks: the canonicals of these images, by storage; kv is {channel: [L, B, T, K, H]}. A chunk's id and content are
        a digest of its PNG files.
    """

    backbone: ModelBackbone
    contexts: Contexts
    images: tuple[Tokens, ...]
    chunks: tuple[kvp.Chunk, ...]

    def __len__(self) -> int:
        return len(self.contexts)

    @property
    def form(self) -> Form:
        """How this backbone lays the images out as tokens."""
        return form_of(self.backbone.config, self.backbone.image_config)

    @property
    def page(self) -> slice:
        """Where the page stands in the prefix."""
        return self.form.page

    @property
    def standing(self) -> tuple[kvp.Chunk, ...]:
        """The chunks by their place in the prefix, the page last.

        Raises:
          ValueError: the contexts' orders differ, so that no one chunk stands at a place.
        """
        order = self.contexts.order
        if (order != order[0]).any():
            raise ValueError(f"orders of a scene's legends: got {order.tolist()}; expected one order in all contexts")
        return (*(self.chunks[which] for which in order[0]), self.chunks[-1])

    @property
    def antecedent(self) -> tuple[str, ...]:
        """Ids of the legends in front of the page, in their order."""
        return tuple(chunk.id for chunk in self.standing[:-1])

    def prefix(self, shown: Bool[np.ndarray, "B legends"] | None = None) -> Tokens:
        """Joins the images in the contexts' order, [B,T,…], positions from 0; legends not `shown` take no room."""
        order = self.contexts.order
        *legends, page = self.images

        # Orders may differ from context to context: each place picks its own legend in each.
        def by_place(parts):
            stacked, item = jnp.stack(parts), jnp.arange(len(order))
            return [stacked[order[:, place], item] for place in range(order.shape[1])]

        def whole(parts, last):
            return jnp.concatenate([*by_place(parts), last], axis=1)

        embeddings = whole([image.embeddings for image in legends], page.embeddings)
        deepstack = None
        if page.deepstack is not None:
            deepstack = whole([image.deepstack for image in legends], page.deepstack)
        positions, _ = prefix_positions(self.form, _chunks_shown(len(self), shown), np.zeros(len(self), int))
        return Tokens(embeddings, jnp.asarray(positions), deepstack)

    def start_of(self, tokens: Tokens, place: int) -> np.ndarray:
        """Finds where the chunk at a place starts in a prefix: int32, a scalar or one per axis."""
        positions = np.asarray(tokens.positions)[:, self.form.slices[place].start]
        if (positions != positions[0]).any():
            raise ValueError(f"starts of chunk {place}: got {positions.tolist()}; expected one start in all contexts")
        # One position an axis is a scalar to NumPy, no array.
        return np.asarray(positions[0] - np.asarray(self.standing[place].local)[0], np.int32)


def write_images(
    contexts: Contexts, folder: Path, split: str = "held_out", canvas: tuple[int, int] = (task.LEGEND_ROWS, 3)
) -> list[list[Path]]:
    """Renders each context's images to PNG files: [B][three legends by storage, page].

    canvas: cells (rows, columns) of a legend's image.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    legends, pages = task.render(contexts, split, canvas)
    mark = "x".join(map(str, canvas))
    paths = []

    for index, seed in enumerate(contexts.ink_seed):
        # Their colours' digest tells recoloured legends of the same seed apart.
        colours = np.stack([contexts.legend_fill[index], contexts.legend_stripe[index]])
        digest = hashlib.blake2b(np.ascontiguousarray(colours, np.int8).tobytes(), digest_size=4).hexdigest()
        names = [folder / f"{seed}_{digest}_legend{number}_{mark}.png" for number in range(task.LEGENDS)]
        names.append(folder / f"{seed}_page.png")
        for path, pixels in zip(names, [*legends[index], pages[index]], strict=True):
            Image.fromarray(pixels).save(path, compress_level=1)
        paths.append(names)

    return paths


def load_scene(backbone: ModelBackbone, contexts: Contexts, folder: Path, known: Scene | None = None) -> Scene:
    """Writes the contexts' PNG files, reads them back through `prepare`, embeds each image and prefills it alone.

    known: an earlier scene of this backbone, whose chunks are taken where their files are the same.
    """
    form = form_of(backbone.config, backbone.image_config)
    paths = write_images(contexts, folder, canvas=form.legend_shape)
    before = {} if known is None else {chunk.id: at for at, chunk in enumerate(known.chunks)}
    images, chunks = [], []

    for number in range(sequences.CHUNKS):
        files = [of_context[number] for of_context in paths]
        # The files' digest is the content: another look at the same PNG is the same chunk, recoloured legends are not.
        shown = hashlib.blake2b(b"".join(path.read_bytes() for path in files), digest_size=16).hexdigest()
        name = f"{'page' if number == task.LEGENDS else f'legend{number}'}:{shown}"
        if known is not None and name in before:
            images.append(known.images[before[name]])
            chunks.append(known.chunks[before[name]])
            continue

        prompts = [backbone.prepare([path]) for path in files]
        batch = jax.tree.map(lambda *arrays: np.concatenate(arrays), *prompts)
        tokens = backbone.embed(**batch)
        images.append(tokens)
        local = np.asarray(tokens.positions)[0]
        chunks.append(chunk_of(backbone, backbone.prefill(tokens).kv, local, name, shown))

    return Scene(backbone, contexts, tuple(images), tuple(chunks))


def scene_at(
    backbone: ModelBackbone, seed: int, number: int, folder: Path, batch: int
) -> tuple[Scene, np.random.Generator]:
    """Makes the held-out scene of this number, of `batch` contexts, and a generator for its questions."""
    rng = np.random.default_rng([seed, number])
    return load_scene(backbone, task.sample_contexts(rng, batch), folder), rng


# --------------------------------------------------------------------------------------------------- caches


def engine(scene: Scene, kv: KV, tokens: Tokens) -> KV:
    """Turns phase-free KV of tokens to their positions."""
    return dict(kvp.to_engine(scene.backbone.layout, kv, tokens.positions, 0))


def reused_page(scene: Scene) -> ReusedPage:
    """Prefills a scene's prefix, whose page is then reused behind the legends.

    The legends stand as re-prefill has them: they did not move, only the page is reused.
    """
    tokens = scene.prefix()
    # The causal mask, written out: one program with the prefills that have another mask.
    conditioned = dict(scene.backbone.prefill(tokens, mask=prefix_mask(scene)).kv)
    reference = engine(scene, conditioned, tokens)
    starts = tuple(scene.start_of(tokens, place) for place in range(sequences.CHUNKS))
    return ReusedPage(
        backbone=scene.backbone,
        contexts=scene.contexts,
        form=scene.form,
        chunks=scene.standing,
        starts=starts,
        tokens=tokens,
        alone=scene.images[-1],
        conditioned=conditioned,
        reference=reference,
        front=reference,
    )


# ------------------------------------------------------------------------------------------------ questions


def read(
    scene: Scene,
    cache: KV,
    questions: Questions,
    *,
    sees_legends: bool,
    shown: Bool[np.ndarray, "B legends"] | None = None,
) -> Answers:
    """Asks every question of every context over an engine-frame cache of the prefix.

    Args:
      sees_legends: whether questions look at the legends, or only at the page (the legends have slid out).
      shown: bool [B, legends] by place, legends that are there at all.
    """
    ids, positions, mask, asked = question_arrays(scene, questions, sees_legends, shown, in_common=True)
    if not sees_legends:
        # Nobody looks at what has left: it is no part of what is read.
        cache, mask = cut(cache, scene.page), mask[..., scene.page.start :]

    tokens = scene.backbone.embed(ids, positions)
    # All questions of a context in one prefill: the mask keeps them apart.
    wanted = np.broadcast_to(asked, (len(ids), len(asked)))
    logits = scene.backbone.prefill(tokens, cache, mask, logits=wanted).logits
    return Answers(log_probabilities(logits))


def question_arrays(
    scene: Scene,
    questions: Questions,
    sees_legends: bool,
    shown: Bool[np.ndarray, "B legends"] | None,
    *,
    in_common: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Makes the tokens that ask: ids [B, 2Q], positions, mask [B, 1, 2Q, S + 2Q], index [Q] of their last tokens.

    in_common: questions that begin alike share their first token, so that there are fewer (`sequences.in_common`).
    """
    count = len(questions.answer)
    here = _chunks_shown(count, shown)
    _, behind = prefix_positions(scene.form, here, np.zeros(count, int))
    tail = (sequences.in_common if in_common else sequences.question_tokens)(scene.form, questions, behind)
    looks = here & ((np.arange(sequences.CHUNKS) == task.LEGENDS) | sees_legends)
    seen = looks[:, scene.form.owner]
    mask = np.concatenate(
        [
            np.broadcast_to(seen[:, None], (count, tail.ids.shape[1], scene.form.prefix_tokens)),
            np.broadcast_to(tail.among, (count, *tail.among.shape[-2:])),
        ],
        axis=2,
    )
    return tail.ids, tail.positions, mask[:, None], tail.asked


def prefix_mask(
    scene: Scene, shown: Bool[np.ndarray, "B legends"] | None = None, page_sees_legends: bool = True
) -> np.ndarray:
    """Makes a causal mask [B,1,T,T] over the prefix, without legends not shown, or with the page blind to all."""
    owner = scene.form.owner
    mask = np.tri(len(owner), dtype=bool)[None] & _chunks_shown(len(scene), shown)[:, None, owner]
    if not page_sees_legends:
        mask[:, scene.page, : scene.page.start] = False
    return mask[:, None]


def _chunks_shown(count: int, legends: Bool[np.ndarray, "B legends"] | None) -> Bool[np.ndarray, "B chunks"]:
    """Marks the chunks that are there, by place: the page always, legends as given, all of them when None."""
    shown = np.ones((count, sequences.CHUNKS), bool)
    if legends is not None:
        shown[:, :-1] = legends
    return shown
