"""A scene: held-out contexts as PNG files, read by the real preprocessing, embedded, prefilled, ready to be asked.

Axis letters: B contexts, T tokens, Q questions, S keys, L layers, V vocabulary. The prefix is [legend][legend][legend]
[page]; the page is the chunk that is reused. KV of the prefix travels phase-free; what a question reads is an
engine-frame cache.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvpatch_jax import ops
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.layout import to_engine
from models import ModelBackbone

from . import sequences, task
from .sequences import Form, form_of
from .task import Contexts, Questions

KV = dict[str, Array]


class Answers(NamedTuple):
    """What an arm answers: log-probabilities [B,Q,V] float32."""

    log_probabilities: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        """Token ids [B,Q]."""
        return self.log_probabilities.argmax(axis=-1)

    def divergence_from(self, reference: "Answers") -> np.ndarray:
        """KL(reference ‖ this) per question, [B,Q], in nats."""
        p = reference.log_probabilities.astype(np.float64)
        return np.sum(np.exp(p) * (p - self.log_probabilities), axis=-1)


@dataclasses.dataclass(frozen=True)
class Scene:
    """One batch of contexts, embedded.

    chunks: Tokens of each image with its start and end tokens, by storage (three legends, the page), positions local.
    canonical: phase-free KV of every image prefilled alone, by storage.
    """

    backbone: ModelBackbone
    contexts: Contexts
    chunks: tuple[Tokens, ...]
    canonical: tuple[KV, ...]

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

    def prefix(self, shown: np.ndarray | None = None) -> Tokens:
        """The prefix [B,T,…] in the contexts' order, positions from 0; legends not `shown` (by place) take no room."""
        order = self.contexts.order
        *legends, page = self.chunks
        by_place = lambda parts: [_pick(parts, order[:, place]) for place in range(order.shape[1])]
        whole = lambda parts, last: jnp.concatenate([*by_place(parts), last], axis=1)
        embeddings = whole([chunk.embeddings for chunk in legends], page.embeddings)
        deepstack = None
        if page.deepstack is not None:
            deepstack = whole([chunk.deepstack for chunk in legends], page.deepstack)
        here = np.ones((len(self), sequences.CHUNKS), bool)
        if shown is not None:
            here[:, :-1] = shown
        positions, _ = sequences.prefix_positions(self.form, here, np.zeros(len(self), int))
        return Tokens(embeddings, jnp.asarray(positions), deepstack)

    def legends_canonical(self) -> KV:
        """Phase-free canonical KV of the legends in their order, {channel: [L,B,T,K,H]}."""
        order = self.contexts.order
        by_place = lambda name: [
            _pick([jnp.moveaxis(kv[name], 1, 0) for kv in self.canonical[:-1]], order[:, place]) for place in range(3)
        ]
        return {name: jnp.moveaxis(jnp.concatenate(by_place(name), axis=2), 0, 1) for name in self.canonical[0]}


def _pick(arrays: list[Array], which: np.ndarray) -> Array:
    return jnp.stack(arrays)[which, jnp.arange(len(which))]


def write_images(
    contexts: Contexts, folder: Path, split: str = "held_out", canvas: tuple[int, int] = (task.LEGEND_ROWS, 3)
) -> list[list[Path]]:
    """Render each context's images to PNG files: [B][three legends by storage, page].

    canvas: cells (rows, columns) of a legend's image.
    """
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    legends, pages = task.render(contexts, split, canvas)
    mark = "x".join(map(str, canvas))
    paths = []
    for index, seed in enumerate(contexts.ink_seed):
        names = [
            folder / f"{seed}_{_colour_mark(contexts, index)}_legend{number}_{mark}.png"
            for number in range(task.LEGENDS)
        ]
        names.append(folder / f"{seed}_page.png")
        for path, pixels in zip(names, [*legends[index], pages[index]], strict=True):
            Image.fromarray(pixels).save(path, compress_level=1)
        paths.append(names)
    return paths


def _colour_mark(contexts: Contexts, index: int) -> str:
    """Tells recoloured legends of the same seed apart."""
    import hashlib

    colours = np.stack([contexts.legend_fill[index], contexts.legend_stripe[index]])
    return hashlib.blake2b(np.ascontiguousarray(colours, np.int8).tobytes(), digest_size=4).hexdigest()


def load_scene(backbone: ModelBackbone, contexts: Contexts, folder: Path) -> Scene:
    """Write the contexts' PNG files, read them back through `prepare`, embed each image and prefill it alone."""
    paths = write_images(contexts, folder, canvas=form_of(backbone.config, backbone.image_config).legend_shape)
    chunks = []
    for number in range(sequences.CHUNKS):
        prompts = [backbone.prepare([files[number]]) for files in paths]
        joined = {name: np.concatenate([prompt[name] for prompt in prompts]) for name in prompts[0]}
        chunks.append(backbone.embed(**joined))
    canonical = tuple(backbone.prefill(chunk).kv for chunk in chunks)
    return Scene(backbone, contexts, tuple(chunks), canonical)


def scenes(
    backbone: ModelBackbone, seed: int, count: int, folder: Path, batch: int
) -> Iterator[tuple[Scene, np.random.Generator]]:
    """Held-out scenes of `batch` contexts each, `count` contexts in all, and a generator for their questions."""
    for number in range(-(-count // batch)):
        rng = np.random.default_rng([seed, number])
        yield load_scene(backbone, task.sample_contexts(rng, batch), folder), rng


# --------------------------------------------------------------------------------------------------- caches


def engine(scene: Scene, kv: KV, tokens: Tokens) -> KV:
    """Phase-free KV of tokens turned to their positions."""
    return _engine(scene.backbone.layout, kv, tokens.positions)


_engine = jax.jit(lambda layout, kv, positions: to_engine(layout, kv, positions, 0), static_argnums=0)


def place_page(
    scene: Scene,
    page: KV,
    tokens: Tokens,
    factors: Mapping[str, tuple[Array, Array]] | None = None,
    frame: ops.PatchFrame = "phase_free",
) -> KV:
    """The page in the engine frame, R(p)·(page + U Vᵀ): one jitted call, no forward pass."""
    local = scene.chunks[-1].positions
    start = (tokens.positions[:, scene.page.start] - local[:, 0]).astype(jnp.int32)
    return ops.jitted_apply(scene.backbone.layout, page, {**(factors or {})}, local, start, frame=frame)


def with_page(scene: Scene, prefix: KV, page: KV) -> KV:
    """An engine-frame cache of the prefix with its page replaced."""
    before = scene.page.start
    return {name: jnp.concatenate([value[:, :, :before], page[name]], axis=2) for name, value in prefix.items()}


# ------------------------------------------------------------------------------------------------ questions


def read(
    scene: Scene,
    cache: KV,
    questions: Questions,
    *,
    sees_legends: bool,
    shown: np.ndarray | None = None,
) -> Answers:
    """Ask every question of every context over an engine-frame cache of the prefix.

    Args:
      sees_legends: whether questions look at the legends, or only at the page (the legends have slid out).
      shown: bool [B, legends] by place, legends that are there at all.
    """
    ids, positions, mask, asked = _question_arrays(scene, questions, sees_legends, shown)
    tokens = scene.backbone.embed(ids, positions)
    logits = scene.backbone.prefill(tokens, cache, mask).logits[:, asked]
    return Answers(np.asarray(jax.nn.log_softmax(logits, axis=-1)))


def _question_arrays(scene: Scene, questions: Questions, sees_legends: bool, shown: np.ndarray | None):
    count = len(questions.answer)
    here = np.ones((count, sequences.CHUNKS), bool)
    if shown is not None:
        here[:, :-1] = shown
    _, behind = sequences.prefix_positions(scene.form, here, np.zeros(count, int))
    tail = sequences.question_tokens(scene.form, questions, behind)
    looks = here & ((np.arange(sequences.CHUNKS) == task.LEGENDS) | sees_legends)
    seen = looks[:, scene.form.owner]
    mask = np.concatenate(
        [
            np.broadcast_to(seen[:, None], (count, len(tail.among), scene.form.prefix_tokens)),
            np.broadcast_to(tail.among, (count, *tail.among.shape)),
        ],
        axis=2,
    )
    return tail.ids, tail.positions, mask[:, None], tail.asked


def prefix_mask(scene: Scene, shown: np.ndarray | None = None, page_sees_legends: bool = True) -> np.ndarray:
    """Causal mask [B,1,T,T] over the prefix, without the legends not shown, or with the page blind to all of them."""
    here = np.ones((len(scene), sequences.CHUNKS), bool)
    if shown is not None:
        here[:, :-1] = shown
    mask = np.tri(scene.form.prefix_tokens, dtype=bool)[None] & here[:, scene.form.owner][:, None]
    if not page_sees_legends:
        mask[:, scene.page, : scene.page.start] = False
    return mask[:, None]
