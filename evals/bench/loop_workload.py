"""What an agent's loop reads: images as tokens, a question after each, perhaps a lead; and the backbone."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Buckets
from kvpatch_jax.patching import one_behind_the_other
from models import ModelBackbone, load

from .. import small_task
from ..small_task import sequences
from ..trained import backbone_names, shipped
from .checkpoints import LARGE, random_backbone

IMAGE_TOKENS, QUESTION_TOKENS, LEAD_TOKENS = 256, 8, 16


class LoopWorkload(NamedTuple):
    """A backbone and what it reads, each at positions from 0.

    Attributes:
      name: of the row.
      backbone: with buckets, as a loop uses it.
      plain: the same without buckets, whose forwards pad nothing.
      images, questions: one for each step.
      lead: what is pinned in front, or None.
    """

    name: str
    backbone: ModelBackbone
    plain: ModelBackbone
    images: list[Tokens]
    questions: list[Tokens]
    lead: Tokens | None


def largest_shipped() -> str:
    """Names the shipped backbone with the largest file of weights."""
    return max(backbone_names(), key=lambda name: (shipped(name) / "model.safetensors").stat().st_size)


def shipped_workload(name: str, images: int, seed: int) -> LoopWorkload:
    """Draws contexts of the small task: legends with questions about them, and pages, whose questions need both."""
    plain = load(shipped(name), dtype="float32")
    contexts = small_task.sample_contexts(np.random.default_rng(seed), math.ceil(images / sequences.CHUNKS))
    form = sequences.form_of(plain.config, plain.image_config)
    drawn = small_task.ask(contexts, np.random.default_rng([seed, 1]), {"legend": 3, "chain": 1})
    pictures = sequences.context_images(form, contexts, "held_out")[:images]

    embedded, questions = [], []

    for number, picture in enumerate(pictures):
        context, place = divmod(number, sequences.CHUNKS)
        embedded.append(plain.embed(**plain.prepare([picture])))
        ids = [[drawn.ask[context, place], drawn.argument[context, place]]]
        questions.append(text_tokens(plain, np.asarray(ids, np.int32)))

    return LoopWorkload(name, with_buckets(plain), plain, embedded, questions, None)


def random_workload(
    images: int, seed: int, sizes: dict[str, Any] | None = None, tokens: int = IMAGE_TOKENS
) -> LoopWorkload:
    """Draws a model of Qwen2-0.5B's shape (or of another `config.json`), and images as embeddings drawn alike."""
    plain = random_backbone(LARGE if sizes is None else sizes, seed)
    generator = np.random.default_rng([seed, 2])
    width = plain.config.text.width
    embedded = []

    for _ in range(images):
        # As large as token embeddings are.
        drawn = generator.standard_normal((1, tokens, width), np.float32) / math.sqrt(width)
        embedded.append(Tokens(jnp.asarray(drawn), np.arange(tokens, dtype=np.int32)[None]))

    def text(count: int) -> Tokens:
        return text_tokens(plain, generator.integers(3, 290, (1, count)).astype(np.int32))

    questions = [text(QUESTION_TOKENS) for _ in range(images)]
    name = "Qwen2-0.5B's shape" if sizes is None else "tiny"
    return LoopWorkload(name, with_buckets(plain), plain, embedded, questions, text(LEAD_TOKENS))


def join_pieces(pieces: Sequence[tuple[str, Tokens]]) -> tuple[list[tuple[str, int]], Tokens]:
    """Joins named pieces, from position 0 on.

    Returns:
      What identifies each token: its piece's name and its number there; and all tokens.
    """
    names, placed, start = [], [], 0
    for name, tokens in pieces:
        names += [(name, index) for index in range(length_of(tokens))]
        placed.append(tokens.shift(start))
        start += span(tokens)
    return names, one_behind_the_other(placed)


def text_tokens(backbone: ModelBackbone, ids: np.ndarray) -> Tokens:
    """Embeds ids at positions from 0, on every axis where the rope has axes."""
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    if backbone.layout.rope.axes is not None:
        positions = np.repeat(positions[..., None], backbone.layout.rope.axes, axis=2)
    return backbone.embed(ids, positions)


def with_buckets(backbone: ModelBackbone) -> ModelBackbone:
    """Returns the same model over the same arrays, with the default buckets."""
    other = backbone.replaced(backbone.parameters)
    other.buckets = Buckets()
    return other


def length_of(tokens: Tokens) -> int:
    """Counts tokens."""
    return tokens.embeddings.shape[1]


def span(tokens: Tokens) -> int:
    """Returns how far tokens at positions from 0 move what follows."""
    return int(np.asarray(tokens.positions).max()) + 1
