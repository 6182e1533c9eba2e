"""Contexts of the packed tasks as prompts of stored images: their KV was made behind a substitute prompt.

Axis letters: B contexts, T tokens of the images, M tokens of all questions, P scored ones, L layers, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import KV, Tokens
from kvpatch_jax.core import EngineKV
from kvpatch_jax.repair import SplicedCache, behind_substitute
from models import ModelBackbone

from ..datasets import PackedDataset
from ..documents_task.dataset import DOCUMENTS_DATASET
from ..sheets_task.dataset import SHEETS_DATASET
from ..sheets_task.packed_answers import PackedAnswers
from ..sheets_task.reader import PackedReader
from ..sheets_task.task import KINDS
from ..small_task.prefix import within_own
from ..small_task.scenes import log_probabilities

PROBE = "4"
"""Three sheets and a page, the contexts with the largest images."""
CHAIN = KINDS.index("chain")
TASKS: dict[str, tuple[PackedDataset, str]] = {
    "sheets": (SHEETS_DATASET, "sheets/qwen2_5_vl"),
    "sheets, DeepStack": (SHEETS_DATASET, "sheets_qwen3_vl/qwen3_vl"),
    "documents": (DOCUMENTS_DATASET, "documents/qwen2_5_vl"),
}
"""Data set and instance of each task, by its name in rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImagePrompts:
    """A batch of contexts: images from the store, and packed questions behind them.

    Attributes:
      reader: the contexts' images, prefilled whole and alone, and their questions.
      clusters: number of each context, [B].
    """

    reader: PackedReader
    clusters: Int[np.ndarray, " B"]

    @property
    def backbone(self) -> ModelBackbone:
        """The model that reads them."""
        return self.reader.backbone

    @property
    def reference(self) -> KV:
        """Engine-frame KV of a prefill of all images, {channel: [L,B,T,K,H]}."""
        return self.reader.page.reference

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """First and one past the last token of each image."""
        return tuple((where.start, where.stop) for where in self.reader.form.slices)

    @functools.cached_property
    def scored(self) -> Int[np.ndarray, " P"]:
        """Tokens of the questions behind which something is asked, of any context."""
        return np.flatnonzero((self.reader.questions.answer >= 0).any(axis=0)).astype(np.int32)

    def question(self, number: int) -> Int[np.ndarray, "B n"]:
        """Returns the ids of one question, up to the token behind which its answer begins."""
        columns = np.flatnonzero(self.reader.questions.own == number)
        asked = (self.reader.questions.answer[:, columns] >= 0).any(axis=0)
        return self.reader.questions.ids[:, columns[: int(asked.argmax()) + 1]]

    def alone(self, place: int) -> Tokens:
        """Returns the tokens of one image at positions from its own start."""
        first, last = self.parts[place]
        own = self.reader.page.tokens.take(first, last)
        local = self.reader.form.chunk_local[place]
        return own._replace(positions=np.broadcast_to(local, own.positions.shape).astype(np.int32))

    def at(self, ids: Int[np.ndarray, "B n"], start: int | Int[np.ndarray, " B"]) -> Tokens:
        """Embeds ids at positions from `start`, on every axis."""
        places = np.broadcast_to(np.asarray(start), len(ids))[:, None] + np.arange(ids.shape[1])
        axes = self.backbone.layout.rope.axes
        if axes is not None:
            places = np.repeat(places[..., None], axes, axis=2)
        return self.backbone.embed(ids.astype(np.int32), places.astype(np.int32))

    @functools.cached_property
    def substitute(self) -> Tokens:
        """The substitute prompt: the first question of the next context, which is about something else."""
        return self.at(np.roll(self.question(0), -1, axis=0), 0)

    @functools.cached_property
    def splice(self) -> SplicedCache:
        """All images as VLCache has them: made behind the substitute prompt, moved to their places."""
        page, parts = self.reader.page, []
        for place, (first, last) in enumerate(self.parts):
            kv = behind_substitute(self.backbone, self.substitute, self.alone(place))
            positions = np.asarray(page.tokens.positions)[:, first:last]
            parts.append(kvp.to_engine(self.backbone.layout, kv, positions, 0))
        cache = {name: jnp.concatenate([part[name] for part in parts], axis=2) for name in self.backbone.layout.names}
        size = self.parts[-1][1]
        slots = np.broadcast_to(np.arange(size, dtype=np.int32), (len(self.clusters), size))
        return SplicedCache(page.tokens, EngineKV(cache), jnp.asarray(slots), chunks=self.parts)

    def read(self, cache: KV, hidden_at: tuple[int, ...] = ()) -> tuple[Float[Array, "B P V"], dict[int, Array]]:
        """Asks all questions over a cache: logits of the scored tokens, and residuals of all of them."""
        reader = self.reader
        ids, size = reader.questions.ids, self.parts[-1][1]
        own = np.broadcast_to(within_own(reader.questions.own), (len(ids), *[ids.shape[1]] * 2))
        mask = np.concatenate([np.ones((*ids.shape, size), bool), own], axis=2)[:, None]
        rows = jnp.asarray(np.broadcast_to(self.scored, (len(ids), len(self.scored))))
        out = self.backbone.prefill(
            self._asked, EngineKV(dict(cache)), jnp.asarray(mask), hidden_at=hidden_at, logits=rows
        )
        return out.logits, out.hidden

    @functools.cached_property
    def _asked(self) -> Tokens:
        return self.backbone.embed(self.reader.questions.ids, self.reader.behind)

    def answers(self, cache: KV) -> PackedAnswers:
        """Asks all questions over a cache."""
        logits = np.asarray(self.read(cache)[0])
        whole = np.zeros((*self.reader.questions.ids.shape, logits.shape[-1]), np.float32)
        whole[:, self.scored] = log_probabilities(logits)
        return PackedAnswers(whole, self.reader.questions)

    @functools.cached_property
    def chain(self) -> np.ndarray:
        """Questions of the kind "chain" that count, bool [B,Q]: they need another image than the page."""
        asked = self.reader.asked("")
        return asked.valid & (asked.kind == CHAIN)


def load_prompts(task: str, backbone: ModelBackbone, seed: int, number: int, batch: int) -> ImagePrompts:
    """Draws a batch of contexts of a task and prefills their images."""
    dataset, _ = TASKS[task]
    reader: Any = dataset.reader(backbone, PROBE, seed, number, batch)
    return ImagePrompts(reader, number * batch + np.arange(batch))
