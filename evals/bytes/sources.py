"""Where chunks with several antecedents come from: the small tasks' pages, and text on real weights.

A page of a small task is met behind the same legends (or sheets) in other colours: nothing of the page changes, and
every answer that needs both does. A passage of text is met behind the text before it, and behind other documents.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax.core import to_engine
from kvpatch_jax.patching import InformationWeights
from models import ModelBackbone

from .. import small_task
from ..arms.reused_page import KV
from ..documents_task.dataset import DOCUMENTS_DATASET
from ..pretrained.passages import Passages, placed
from ..pretrained.plan import DOMAINS
from ..sheets_task.dataset import SHEETS_DATASET
from ..sheets_task.reader import PackedReader, move_page
from ..sheets_task.task import COLOURS
from ..small_task import scenes
from ..small_task.reader import SceneReader
from ..texts import corpus as texts
from .versions import MetChunks, PassageVersion, QuestionVersion, mean_embedding

SMALL_QUESTIONS = {"chain": 4, "aggregate": 3}
PACKED_QUESTIONS = {"chain": 8, "aggregate": 5}
DATASETS = {"sheets": SHEETS_DATASET, "documents": DOCUMENTS_DATASET}


def scene_chunks(backbone: ModelBackbone, seed: int, number: int, batch: int, versions: int, folder: Path) -> MetChunks:
    """Draws pages of the small task, each behind legends in `versions` colourings."""
    rng = np.random.default_rng([seed, number])
    contexts, known, readers = small_task.sample_contexts(rng, batch), None, []
    for version in range(versions):
        if version:
            contexts = small_task.recolour(contexts, rng, small_task.LEGENDS)
        known = scenes.load_scene(backbone, contexts, folder, known)
        readers.append(SceneReader(known, small_task.ask(contexts, rng, SMALL_QUESTIONS)))
    return _of_readers(readers)


def packed_chunks(task: str, backbone: ModelBackbone, seed: int, number: int, batch: int, versions: int) -> MetChunks:
    """Draws pages of the sheets or documents task, of the first size, each behind sheets in `versions` colourings."""
    dataset = DATASETS[task]
    probe, described = next(iter(dataset.probes.items()))
    size = dataset.spec.sizes[described.size]
    rng = np.random.default_rng([seed, number, size.sheets])
    contexts, readers = dataset.spec.sample(rng, batch, size, **described.options), []
    for version in range(versions):
        if version:
            fill, stripe = (
                (own + rng.integers(1, COLOURS, own.shape)) % COLOURS
                for own in (contexts.sheet_fill, contexts.sheet_stripe)
            )
            contexts = dataclasses.replace(contexts, sheet_fill=fill, sheet_stripe=stripe)
        questions = dataset.spec.ask(contexts, rng, PACKED_QUESTIONS)
        readers.append(PackedReader(f"{task}.{probe}", move_page(backbone, contexts, dataset.spec), questions))
    return _of_readers(readers)


def _of_readers(readers: Sequence[Any]) -> MetChunks:
    embeddings = []
    for reader in readers:
        embeddings.append(mean_embedding(reader.page.tokens.embeddings[:, : reader.page.slots.start]))
    return MetChunks([QuestionVersion(reader) for reader in readers], embeddings)


# --------------------------------------------------------------------------------------------------------------- text


class TextSizes(NamedTuple):
    """Tokens of an antecedent, of a passage, and of the text that is read after it."""

    antecedent: int = 192
    chunk: int = 192
    scored: int = 24


class TextCorpus:
    """Documents of four domains; the last of each is calibrated on and never measured.

    Args:
      backbone: whose tokenizer reads them.
      documents: of a domain that are measured.
      passages: of a document.
    """

    def __init__(self, backbone: ModelBackbone, documents: int, passages: int, sizes: TextSizes):
        self.backbone, self.sizes, self.passages = backbone, sizes, passages
        least = sizes.antecedent + passages * (sizes.chunk + sizes.scored)
        self.by_domain = {}
        for domain in DOMAINS:
            self.by_domain[domain] = texts.documents(backbone, domain, documents + 1, least, least)

    @property
    def measured(self) -> list[texts.Document]:
        """Every document that is measured."""
        return [document for found in self.by_domain.values() for document in found[:-1]]

    def chunks(self, number: int, versions: int, first: int = 0, count: int | None = None) -> MetChunks:
        """Returns passages of the document with this number in every domain, behind several antecedents.

        Args:
          versions: the first is behind the text before the passage, the others behind other documents: one of the
            domain, then of the other domains in turn.
          first, count: passages of each document; None: all.
        """
        found = [own[:-1][number] for own in self.by_domain.values()]
        return self._chunks(found, number, versions, first, self.passages if count is None else count)

    def calibration(self) -> MetChunks:
        """Returns a passage of each document that is never measured, behind the text before it and another's."""
        return self._chunks([own[-1] for own in self.by_domain.values()], len(self.measured), 2, 0, 1)

    def _chunks(
        self, documents: Sequence[texts.Document], number: int, versions: int, first: int, count: int
    ) -> MetChunks:
        before, length, scored = self.sizes
        starts = [before + place * (length + scored) for place in range(first, first + count)]
        ids = np.stack([own.ids[start : start + length] for own in documents for start in starts])
        behind = np.stack([own.ids[start + length :][:scored] for own in documents for start in starts])
        own_front = np.stack([own.ids[start - before : start] for own in documents for start in starts])

        embedded = self.backbone.embed(np.concatenate([ids, behind], axis=1))
        canonical = dict(self.backbone.prefill(placed(embedded.take(0, length), 0)).kv)
        readers, embeddings = [], []
        for version in range(versions):
            front = own_front if not version else self._others(number, version, len(documents))
            tokens = placed(self.backbone.embed(front), 0)
            kv, embedding = dict(self.backbone.prefill(tokens).kv), mean_embedding(tokens.embeddings)
            if version and count > 1:
                # Passages of one document share their antecedents.
                kv = {name: jnp.repeat(value, count, axis=1) for name, value in kv.items()}
                embedding = jnp.repeat(embedding, count, axis=0)
            passages = Passages(self.backbone, kv, canonical, ids, behind, embedded)
            readers.append(PassageVersion(passages))
            embeddings.append(embedding)
        return MetChunks(readers, embeddings)

    def _others(self, number: int, version: int, rows: int) -> Int[np.ndarray, "rows A"]:
        """Cuts an antecedent for each domain's document out of another document."""
        domains, before = list(self.by_domain.values()), self.sizes.antecedent
        front = []
        for row in range(rows):
            measured = domains[(row + version - 1) % len(domains)][:-1]
            # Never the row's own document: the numbers differ, unless there is one document alone.
            other = measured[(number + 1 + (version - 1) // len(domains)) % len(measured)]
            place = (version // 2) % 2 * (len(other.ids) - before)
            front.append(other.ids[place : place + before])
        return np.stack(front)


# ------------------------------------------------------------------------------------------------------- calibration


def fisher_weights(chunks: MetChunks, samples: int = 2) -> dict[str, Float[np.ndarray, "L F"]]:
    """Measures how much an error in each feature of KV(B|A) changes what follows: the root of the Fisher information.

    The mean over tokens of (∂ log p(y) / ∂ kv)², y drawn from the model's own prediction: to second order, KL is half
    the sum of squared errors with these weights. One gradient for each version and sample. A rotary pair has one
    weight, so that it is the same in every frame.

    Args:
      chunks: passages that nothing is measured on.
      samples: draws of y.
    """
    layout, count = chunks.backbone.layout, 0
    total: dict[str, Any] = dict.fromkeys(layout.names, 0.0)
    for reader, kv in zip(chunks.readers, chunks.conditioned, strict=True):
        assert isinstance(reader, PassageVersion)
        passages, start = reader.passages, reader.page.slots.start
        front = {name: value[:, :, :start] for name, value in reader.page.front.items()}
        positions = np.asarray(reader.page.tokens.positions)[:, reader.page.slots]

        def likelihood(
            kv: KV, drawn: Array, passages: Any = passages, front: Any = front, positions: Any = positions
        ) -> Array:
            placed_kv = to_engine(layout, dict(kv), positions, 0)
            cache = {name: jnp.concatenate([front[name], placed_kv[name]], axis=2) for name in front}
            found = jax.nn.log_softmax(passages.read(cache))
            return jnp.take_along_axis(found, drawn[..., None], axis=-1).sum()

        for sample in range(samples):
            drawn = jax.random.categorical(jax.random.key(sample), passages.logits)
            gradient = jax.grad(likelihood)(kv, drawn)
            for name, value in gradient.items():
                square = np.square(np.asarray(value, np.float64)).mean((1, 2))
                total[name] = total[name] + square.reshape(len(square), -1)
            count += 1
    information = {name: np.asarray(value) / count for name, value in total.items()}
    weights = InformationWeights.of_information(information, layout, chunks.backbone.fingerprint).weights
    return {name: np.asarray(value) for name, value in weights.items()}
