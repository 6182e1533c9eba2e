"""Data sets: contexts, questions and a scorer. Every arm is measured alike on all of them.

A data set whose chunk is reused behind others implements `Dataset`; the harness applies every method to its splice.
What is no single splice (a window's operations, agents' loops) implements `RecordedDataset`: parts that yield records,
and the rows made of them.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from kvpatch_jax.backbone import KV, Tokens
from kvpatch_jax.core import AnyArray
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import Repaired, SplicedCache

from .frame import Row
from .parts import Part, Record

DATASETS = {
    "documents": "evals.task.dataset:DOCUMENTS",
    "plain": "evals.task.dataset:PLAIN",
    "facts": "evals.texts.dataset:FACTS",
    "two_hops": "evals.texts.dataset:TWO_HOPS",
    "passages": "evals.texts.dataset:PASSAGES",
    "corpus": "evals.texts.held_out:CORPUS",
    "held_out": "evals.texts.held_out:HELD_OUT",
    "corpus_versions": "evals.texts.held_out:CORPUS_VERSIONS",
    "versions": "evals.texts.held_out:VERSIONS",
    "infoflow": "evals.texts.infoflow:INFOFLOW",
    "bytes": "evals.task.versions:VERSIONS",
    "windows": "evals.windows.operations:WINDOWS",
    "tolerance": "evals.windows.tolerance:TOLERANCE",
    "sinks": "evals.windows.sinks:SINKS",
    "revisits": "evals.windows.revisits:REVISITS",
    "loops": "evals.loops.dataset:LOOPS",
}
"""Where each data set is, by the name that configurations use."""


class QuestionTable(NamedTuple):
    """Questions of a batch of contexts: kind (index into the data set's kinds), whether it counts, and the right
    answer, [B, Q] each.
    """

    kind: np.ndarray
    valid: np.ndarray
    answer: np.ndarray

    def columns(self, clusters: np.ndarray) -> Record:
        """Lists kind, cluster and right answer of every question that counts, for the reference's record.

        Args:
          clusters: number of each context [B].
        """
        valid = self.valid
        return {
            "kind": self.kind[valid].tolist(),
            "cluster": (clusters[:, None] + 0 * valid)[valid].tolist(),
            "answer": self.answer[valid].tolist(),
        }


@runtime_checkable
class Answers(Protocol):
    """What was answered: predictions [B, Q], as `QuestionTable.answer`, and KL from a reference's answers."""

    @property
    def predicted(self) -> np.ndarray: ...

    def divergence_from(self, reference: Any) -> np.ndarray:
        """Computes KL(reference ‖ this) per question, [B, Q] in nats."""
        ...


@runtime_checkable
class Batch(Protocol):
    """A batch of contexts whose last chunk is reused.

    Attributes:
      splice: what methods start from, a row per context.
      reference: the cache {channel: [L,B,S,K,H]} as re-prefill leaves it, in the engine frame.
      clusters: number of each context [B]; intervals resample contexts.
      questions: what is asked.
    """

    splice: SplicedCache
    reference: KV
    clusters: np.ndarray
    questions: QuestionTable

    def read(self, cache: KV, visible: Any = None) -> Answers:
        """Answers every question over one cache per context; `visible` [B,S] marks the keys that it may see."""
        ...

    def asked(self) -> SplicedCache:
        """Returns a splice with a row per question, which has `question`."""
        ...

    def read_asked(self, repaired: Repaired) -> Answers:
        """Answers every question over its own row of a repaired cache."""
        ...


def repeated_rows(tree: Any, count: int, axis: int = 0) -> Any:
    """Repeats the rows of every array of a tree, the repetitions of a row behind one another."""
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), count, axis=axis), tree)


def row_per_question(splice: SplicedCache, count: int, question: Tokens) -> SplicedCache:
    """Makes a splice with a row for each of `count` questions per context; a question sees the whole cache."""
    tokens, slots = repeated_rows((splice.tokens, splice.slots), count)
    cache = repeated_rows(dict(splice.cache), count, axis=1)
    return SplicedCache(tokens, cache, slots, question=question, chunks=splice.chunks)


def question_mask(visible: Bool[AnyArray, "R S"], width: int) -> Bool[Array, "R 1 W keys"]:
    """Makes the mask of questions of `width` tokens: the visible keys of the cache, and each question up to itself."""
    rows, keys = visible.shape
    seen = jnp.broadcast_to(jnp.asarray(visible)[:, None, None], (rows, 1, width, keys))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((width, width), bool)), (rows, 1, width, width))
    return jnp.concatenate([seen, causal], axis=-1)


class Run(NamedTuple):
    """What a data set is asked for.

    Attributes:
      models: paths of the models, by name.
      probes: names of the data set's settings; empty: its first.
      methods: names of arms, the reference and blind reuse first.
      n, batch, seed: contexts, how many at once, and their seed.
      settings: the data set's own, from the configuration; `deficit = true` describes the deficit by layer as well.
    """

    models: Mapping[str, str]
    probes: tuple[str, ...]
    methods: tuple[str, ...]
    n: int
    batch: int
    seed: int
    settings: Mapping[str, Any]

    @property
    def batches(self) -> list[tuple[int, int]]:
        """Numbers and sizes of the batches that the contexts make; the last one may be smaller."""
        starts = range(0, self.n, self.batch)
        return [(number, min(self.batch, self.n - start)) for number, start in enumerate(starts)]

    def probes_of(self, dataset: Any, default: int = 1) -> tuple[str, ...]:
        """Returns the probes asked for, or the data set's first ones.

        Raises:
          InputError: an unknown probe.
        """
        probes = self.probes or dataset.probes[:default]
        if unknown := [probe for probe in probes if probe not in dataset.probes]:
            raise InputError(f"{dataset.name}.probes: got {unknown[0]!r}; expected some of {', '.join(dataset.probes)}")
        return probes


@runtime_checkable
class Dataset(Protocol):
    """Contexts of which one chunk is reused.

    A data set may also have `prepare(backbone, run)`, which fits what methods need ahead, on contexts that are not
    measured: settings by method; and `groups`, kinds that are measured together, by their name in rows.

    Attributes:
      name: in rows, "<name>.<probe>".
      kinds: names of the kinds of question. probes: its settings, the first by default.
    """

    name: str
    kinds: tuple[str, ...]
    probes: tuple[str, ...]

    def batch(self, backbone: Any, probe: str, number: int, size: int, seed: int) -> Batch:
        """Draws one batch of contexts and prefills what is reused."""
        ...


@runtime_checkable
class RecordedDataset(Protocol):
    """A data set that is measured part by part, in its own way."""

    name: str

    def parts(self, run: Run) -> Sequence[Part]:
        """Lists all parts, in the order in which they are measured."""
        ...

    def rows(self, records: Mapping[str, Iterable[Record]]) -> list[Row]:
        """Makes rows of the records of finished parts, by their keys."""
        ...


def find_dataset(name: str) -> Any:
    """Imports a data set by its name in configurations, or by "module:attribute".

    Raises:
      InputError: it is not known.
    """
    where = DATASETS.get(name, name)
    module, colon, attribute = where.partition(":")
    if not colon:
        raise InputError(f"dataset: got {name!r}; expected module:attribute, or one of {', '.join(DATASETS)}")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(str(error.name)):
            raise
        raise InputError(f"dataset: got {name!r}, which is not found ({error}); expected module:attribute") from error
