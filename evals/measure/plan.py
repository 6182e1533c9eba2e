"""What is measured: a sample of the items, grouped into parts of one context each, and what that takes.

A part is a context with the questions behind it, at most `QUESTIONS` of them: the context is prefilled once, and a kill
costs one part. Shards take parts in turn, and measure each as one process alone would.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import KVPatchError
from kvpatch_jax.utils import strict_json
from models import ModelBackbone

from .arms import MeasureArm
from .contexts import prepared
from .frame import PromptFrame
from .items import Item, Piece, PieceContent, StoredImage

QUESTIONS = 8
"""Questions of one part at most."""
PROBED = 4
"""Contexts whose tokens are counted to estimate the time."""
READINGS = 2
"""Forwards of a question and an answer, about, that one arm takes: reading re-prefill's answer, and half of the times
writing another."""
CACHES = 6
"""Caches of one context that are in memory at once: re-prefill's, blind, the splice, an arm's and two of its making."""


class PlannedContext(NamedTuple):
    """One part.

    Attributes:
      name: unique in the plan.
      pieces: of the context. items: asked behind it.
    """

    name: str
    pieces: tuple[Piece, ...]
    items: tuple[Item, ...]


class WorkShard(NamedTuple):
    """A share of the parts: every `count`-th from `index` on."""

    index: int = 0
    count: int = 1

    @property
    def file(self) -> str:
        """Name of its file of parts."""
        return "parts.jsonl" if self.count == 1 else f"parts-{self.index:05d}-of-{self.count:05d}.jsonl"

    def of(self, parts: Sequence[PlannedContext]) -> Sequence[PlannedContext]:
        """Returns its parts."""
        return parts[self.index :: self.count]


def sampled(items: Sequence[Item], limit: int, seed: int) -> list[Item]:
    """Draws `limit` items without replacement, in the data's order; all of them for 0."""
    if not limit or limit >= len(items):
        return list(items)
    chosen = np.random.default_rng(seed).permutation(len(items))[:limit]
    return [items[number] for number in sorted(chosen.tolist())]


def contexts_of(items: Sequence[Item]) -> list[PlannedContext]:
    """Groups items by their contexts, in order of appearance."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        groups.setdefault((item.cluster, *(content_key(piece.content) for piece in item.pieces)), []).append(item)

    planned = []
    for group in groups.values():
        for first in range(0, len(group), QUESTIONS):
            part = tuple(group[first : first + QUESTIONS])
            planned.append(PlannedContext(f"{len(planned)}: {part[0].id}", part[0].pieces, part))
    return planned


def content_key(content: PieceContent) -> str:
    """Returns what a piece's content is known by: equal keys show the same."""
    if isinstance(content, Text):
        return f"text {content}"
    if isinstance(content, StoredImage):
        return f"stored {content.name}"
    return f"{type(content).__name__} {content}"


class WorkEstimate(NamedTuple):
    """What a plan takes.

    Attributes:
      forwards: runs of the decoder, about.
      tokens: that they run, about, by part.
      tokens_per_second: of this machine; compilation is not in it.
      memory: bytes of the parameters, the caches of the longest context that was looked at, and logits.
    """

    forwards: int
    tokens: tuple[int, ...]
    tokens_per_second: float
    memory: int

    @property
    def seconds(self) -> float:
        """How long all parts take, about."""
        return sum(self.tokens) / self.tokens_per_second


def estimate(
    backbone: ModelBackbone,
    frame: PromptFrame,
    contexts: Sequence[PlannedContext],
    arms: Sequence[MeasureArm],
    steps: int,
) -> WorkEstimate:
    """Estimates forwards, time and memory from the tokens of a few contexts and the time of one piece's forward."""
    served = [arm for arm in arms if not arm.exact]
    sizes = dict[str, list[int]](image=[], text=[])
    longest = most = 0
    probe = None
    for place in np.unique(np.linspace(0, len(contexts) - 1, PROBED).astype(int)).tolist():
        total = 0
        for piece in contexts[place].pieces:
            try:
                prompt = prepared(backbone, piece.content)
            except (KVPatchError, OSError):
                continue
            own = int(prompt["input_ids"].shape[1])
            sizes["text" if isinstance(piece.content, Text) else "image"].append(own)
            total += own
            if own > most:
                most, probe = own, prompt
        longest = max(longest, total)
    mean = {sort: float(np.mean(found)) if found else 0.0 for sort, found in sizes.items()}

    tokens, forwards = [], 0
    for context in contexts:
        size = sum(mean["text" if isinstance(piece.content, Text) else "image"] for piece in context.pieces)
        asked = 0.0
        for item in context.items:
            question = len(frame.question_ids(backbone, item.question))
            asked += (1 + READINGS * len(served)) * (question + steps)
            forwards += 2 + len(served) + sum(arm.asks for arm in served)
        again = size * sum(0.5 if arm.uniform else 0.05 for arm in served if not arm.asks)
        again += len(context.items) * size * sum(0.5 for arm in served if arm.asks)
        tokens.append(int(2 * size + again + asked) + 1)
        forwards += len(context.pieces) + 1 + sum(arm.uniform and not arm.asks for arm in served)

    numbers = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backbone.parameters))
    cache = longest * backbone.layout.bytes_per_token(np.float32)
    logits = 2 * QUESTIONS * steps * backbone.config.text.vocabulary * 4
    return WorkEstimate(forwards, tuple(tokens), _pace(backbone, probe), numbers + CACHES * cache + logits)


def _pace(backbone: ModelBackbone, prompt: dict | None) -> float:
    """Times the forward of one piece, its second run; tokens a second."""
    if prompt is None:
        prompt = {"input_ids": np.zeros((1, 16), np.int32)}
    embedded, length = backbone.embed_padded(**prompt)
    for _ in range(2):
        began = time.perf_counter()
        jax.block_until_ready(backbone.prefill(embedded).logits)
        seconds = time.perf_counter() - began
    return length / max(seconds, 1e-6)


def longest_prompt(model: str) -> int | None:
    """Reads how many tokens a checkpoint was made for, from its config.json; None where that does not say."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return None
    raw = strict_json.object_of(path.read_bytes(), f"{path}", KVPatchError)
    text = raw.get("text_config") or raw.get("language_config") or raw.get("llm_config") or {}
    for found in (text, raw):
        most = found.get("max_position_embeddings")
        if isinstance(most, int) and most > 0:
            return most
    return None
