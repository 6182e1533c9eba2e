"""Documents of 24 to 512 tokens in pairs and triples, the last of which is reused: of the corpus, and of other texts.

Sizes and bases of patches are chosen on the corpus and reported on the others. Probes are bases: what the reused
document was prefilled behind.
"""

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvpatch_jax.repair import OtherAntecedent

from ..harness.datasets import QuestionTable
from . import corpus
from .dataset import INSTRUCTION
from .splices import TextBatch, encode, spliced, start_tokens

LENGTHS = {24: 8, 48: 8, 96: 8, 192: 4, 512: 2}
"""Tokens of a document, and contexts of a batch at most: long ones are fewer."""
TURNS = (24, 48, 96, 24, 48, 192, 24, 48, 96, 512)
"""Lengths of batches, three of each, one for each kind of text."""
SCORED = 8
"""Tokens read after the reused document."""
LONGEST = 2 * max(LENGTHS) + 80
"""Tokens of a text: two of the longest documents, from somewhere near its beginning, and those that are read."""
BASES = {"system": None, "lead": 4, "alone": 0}
"""Tokens of the instruction that the document was prefilled behind; None: all."""


class DocumentSet:
    """Pairs and triples of documents; see `harness.datasets.Dataset`.

    A batch is of one kind of text and one length. Every second context continues one document; in the others each
    document is another one.

    Args:
      probes: bases; or numbers of antecedents behind which the document's KV is known, one of which is served.
      sources: of the texts. texts: of each kind. turns: lengths of batches, by turns.
    """

    def __init__(
        self,
        name: str,
        probes: tuple[str, ...],
        sources: Mapping[str, Any],
        texts: int,
        turns: tuple[int, ...] = TURNS,
    ):
        self.name, self.probes, self._sources, self._count, self._turns = name, probes, sources, texts, turns
        self.kinds = tuple(f"{kind}.{length}" for kind in sources for length in LENGTHS)
        self.groups = {"all": self.kinds}
        for word in (*sources, *map(str, LENGTHS)):
            self.groups[word] = tuple(kind for kind in self.kinds if word in kind.split("."))

    def batch(self, backbone: Any, probe: str, number: int, size: int, seed: int) -> TextBatch:
        """Cuts the documents of one batch: of at most `size` contexts, and of fewer where documents are long."""
        kinds = list(self._sources)
        turn, kind = divmod(number, len(kinds))
        length = self._turns[turn % len(self._turns)]
        size, count = min(size, LENGTHS[length]), 2 + (turn + kind) % 2
        texts, rows = self._texts(backbone, kinds[kind]), []
        others = int(probe) - 1 if probe not in BASES else 0
        for row in range(size):
            rng = np.random.default_rng([seed, number, row])
            place, begin = (turn * size + row) % len(texts), int(rng.integers(0, 64))
            rows.append(_cut(texts, place, begin, length, count + others, row % 2 == 0))
        cut, following = np.stack([ids for ids, _ in rows]), np.stack([ids for _, ids in rows])

        lead = np.concatenate([start_tokens(backbone), encode(backbone, INSTRUCTION)])
        front, chunk = cut[:, others * length : -length], cut[:, -length:]
        splice, reference = spliced(backbone, lead, front, chunk, BASES.get(probe))
        versions = []
        for other in range(others):
            # Another antecedent of the same length: an earlier document in the place of the first.
            before = np.concatenate([cut[:, other * length : (other + 1) * length], front[:, length:]], axis=1)
            again, _ = spliced(backbone, lead, before, chunk)
            assert again.recorded is not None
            versions.append(OtherAntecedent(again.recorded))
        splice = splice.replace(others=tuple(versions))

        number_of_kind = self.kinds.index(f"{kinds[kind]}.{length}")
        asked = np.full((size, SCORED), number_of_kind)
        questions = QuestionTable(asked, np.ones(asked.shape, bool), following[:, 1:])
        at = np.broadcast_to(np.arange(SCORED, dtype=np.int32), (size, 1, SCORED))
        clusters = number * 1000 + np.arange(size)
        return TextBatch(backbone, splice, reference, clusters, questions, following[:, None, :SCORED], at)

    def _texts(self, backbone: Any, kind: str) -> list[corpus.Document]:
        cached = _READ.setdefault(backbone, {})
        if kind not in cached:
            found = corpus.long_documents(backbone, self._sources[kind](), kind, self._count, LONGEST, LONGEST)
            cached[kind] = found
        return cached[kind]


def _cut(
    texts: list[corpus.Document], place: int, begin: int, length: int, count: int, continued: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Cuts `count` documents of equal length, the last of them reused, and the tokens that follow it.

    Args:
      place: of the text that the last one is of; `continued`: those in front of it are the same text's, as far as it
        reaches.
    """
    own = texts[place].ids
    last = begin + (length if continued else 0)
    chunk = own[last : last + length]
    following = own[last + length : last + length + SCORED + 1]
    parts = [own[begin:last]] if continued else []
    while len(parts) < count - 1:
        place = (place + 1) % len(texts)
        parts.insert(0, texts[place].ids[begin : begin + length])
    return np.concatenate([*parts, chunk]), following


_READ: weakref.WeakKeyDictionary[Any, dict[str, list[corpus.Document]]] = weakref.WeakKeyDictionary()

CORPUS = DocumentSet("corpus", tuple(BASES), corpus.SOURCES, 24)
HELD_OUT = DocumentSet("held_out", tuple(BASES), corpus.HELD_OUT, 60)
CORPUS_VERSIONS = DocumentSet("corpus_versions", ("2", "4", "16"), corpus.SOURCES, 24, (96, 192))
VERSIONS = DocumentSet("versions", ("2", "4", "16"), corpus.HELD_OUT, 60, (96, 192))
