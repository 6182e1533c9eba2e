"""A batch of chunks, each met behind several antecedents: the pages that are reused, and how what is kept is scored.

Axis letters: B chunks, T tokens of a chunk, n tokens that follow, Q questions, L layers, K KV heads, H head width.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvpatch_jax.core import AnyArray
from kvpatch_jax.repair import OtherAntecedent, SplicedCache
from models import ModelBackbone

from ..arms.reused_page import KV, ReusedPage
from ..pretrained.passages import Passages
from ..small_task.task import KINDS


class ScoredItems(NamedTuple):
    """What an arm answers, item by item [items].

    Attributes:
      kl: KL(re-prefill ‖ arm), nats. flips: share of predictions that differ from re-prefill's.
      right: whether a question is answered right; None where there are no questions.
      row: number of the chunk in its batch.
    """

    kl: Float[np.ndarray, " items"]
    flips: Float[np.ndarray, " items"]
    right: Float[np.ndarray, " items"] | None
    row: np.ndarray


@runtime_checkable
class VersionReader(Protocol):
    """A batch of chunks behind one antecedent each."""

    @property
    def page(self) -> ReusedPage: ...

    def score(self, cache: KV) -> ScoredItems:
        """Reads what follows over an engine-frame cache of antecedent and chunk."""
        ...


class QuestionVersion:
    """Scores the questions of a task that need antecedent and page both.

    Args:
      reader: an `evals.datasets.PageReader`; its first probe is read.
    """

    KINDS = ("chain", "aggregate")

    def __init__(self, reader: Any):
        self.reader, self.page = reader, reader.page
        self.probe = reader.probes[0]
        self.reference = reader.read(self.page.reference, self.probe)
        asked = reader.asked(self.probe)
        wanted = [KINDS.index(kind) for kind in self.KINDS] if reader.kinds is KINDS else None
        wanted = [reader.kinds.index(kind) for kind in self.KINDS] if wanted is None else wanted
        self.keep, self.answer = asked.valid & np.isin(asked.kind, wanted), asked.answer

    def score(self, cache: KV) -> ScoredItems:
        """Asks the questions over a cache."""
        answers, keep = self.reader.read(cache, self.probe), self.keep
        rows = np.broadcast_to(np.arange(len(keep))[:, None], keep.shape)
        flips = answers.predicted != self.reference.predicted
        right = (answers.predicted == self.answer)[keep].astype(float)
        kl = answers.divergence_from(self.reference)[keep]
        return ScoredItems(np.asarray(kl, float), flips[keep].astype(float), right, rows[keep])


class PassageVersion:
    """Scores the text that follows passages: an item is a passage, its numbers are means over the tokens after it."""

    def __init__(self, passages: Passages):
        self.passages, self.page = passages, passages.page

    def score(self, cache: KV) -> ScoredItems:
        """Reads the text over a cache."""
        scores = self.passages.scored(self.passages.read(cache))
        kl, flips = (np.array([score[name] for score in scores]) for name in ("kl", "flips"))
        return ScoredItems(kl, flips, None, np.arange(len(scores)))


class MetChunks:
    """Chunks that were met behind several antecedents.

    Args:
      readers: one for each antecedent, in the order in which they were met; of one canonical.
      embeddings: mean embeddings [B, D] of each antecedent.
    """

    def __init__(self, readers: Sequence[VersionReader], embeddings: Sequence[AnyArray]):
        self.readers, self.embeddings = tuple(readers), tuple(embeddings)

    def __len__(self) -> int:
        return len(self.readers)

    @property
    def first(self) -> ReusedPage:
        """The pages behind the first antecedent."""
        return self.readers[0].page

    @property
    def backbone(self) -> ModelBackbone:
        """What reads them."""
        return self.first.backbone

    @property
    def rows(self) -> int:
        """Chunks."""
        return next(iter(self.canonical.values())).shape[1]

    @functools.cached_property
    def canonical(self) -> KV:
        """The chunks' KV alone, float32."""
        return {name: jnp.asarray(value, jnp.float32) for name, value in self.first.page.kv.items()}

    @functools.cached_property
    def conditioned(self) -> tuple[KV, ...]:
        """The chunks' KV behind each antecedent, phase-free, float32."""
        return tuple(
            {name: jnp.asarray(value, jnp.float32) for name, value in reader.page.page_conditioned.items()}
            for reader in self.readers
        )

    def splice(self, version: int) -> SplicedCache:
        """Returns what repairs start from: the blind cache behind an antecedent, its own KV and that behind others."""
        page = self.readers[version].page
        others = []
        for number, kv in enumerate(self.conditioned):
            if number != version:
                others.append(OtherAntecedent(kv, jnp.asarray(self.embeddings[number])))
        front = page.tokens.take(0, page.slots.start)
        return page.splice().replace(others=tuple(others), front=front)


def mean_embedding(embeddings: Float[AnyArray, "B A D"]) -> Float[Array, "B D"]:
    """Computes the mean embedding of antecedents' tokens, in float32."""
    return jnp.asarray(embeddings, jnp.float32).mean(1)
