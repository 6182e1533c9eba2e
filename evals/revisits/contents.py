"""Contents of a trace: the lead, the pieces that a session is shown, and what is asked after each of them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import kvpatch_jax as kvp
from models import ModelBackbone

from .. import small_task
from ..certify.window_sources import LEAD
from ..datasets import PackedDataset
from ..documents_task.dataset import DOCUMENTS_DATASET
from ..probes.window.probe_images import LEAD as LEAD_WORDS
from ..sheets_task.dataset import SHEETS_DATASET
from ..small_task import VOCABULARY, scenes
from ..texts import corpus as texts
from .visits import PIECES

CHUNK, SCORED = 64, 16
"""Tokens of a text's chunk, and of what follows it in its document, which is scored."""
PACKED_LEAD = 4
"""Tokens of the packed tasks' lead: words of the vocabulary."""


class Question(NamedTuple):
    """What is asked after a window.

    Attributes:
      ids: its tokens, and those that follow where what follows is scored.
      tokens: how many of them come before the first scored token.
      answers: the right token at each scored place; -1 where none is known.
    """

    ids: tuple[int, ...]
    tokens: int
    answers: tuple[int, ...]


Asker = Callable[[np.random.Generator, int, Sequence[int]], Question]
"""Asks about a context by its number, of which these pieces (0 …) stand together at the end of the window, in order."""


@dataclasses.dataclass(frozen=True, eq=False)
class RevisitContents:
    """What a trace shows and asks.

    Attributes:
      lead: token ids, pinned in front.
      pieces: of all contexts in order: uint8 images [H, W, 3], or token ids.
      ask: the asker.
      answered: whether right answers are known.
    """

    lead: list[int]
    pieces: list[Any]
    ask: Asker

    def question(self, rng: np.random.Generator, shown: Sequence[int]) -> Question:
        """Asks about the context of the last piece.

        Args:
          shown: numbers of the pieces of the window, the last one last.
        """
        context, together = shown[-1] // PIECES, list[int]()
        # Pieces of other contexts in between would say otherwise about the same names.
        for piece in reversed(shown):
            if piece // PIECES != context or piece % PIECES in together:
                break
            together.insert(0, piece % PIECES)
        return self.ask(rng, context, together)


def _kind_of(together: Sequence[int], legends: str) -> str:
    """Returns what can be asked: of a page behind its legends, of a page alone, or of the last legend."""
    if together[-1] != PIECES - 1:
        return legends
    return "chain" if len(together) > 1 else "page"


def _shown(together: Sequence[int], last: bool) -> np.ndarray:
    """Marks the legends that are there, [1, legends]; with `last`, the last one alone."""
    marked = np.zeros((1, PIECES - 1), bool)
    legends = [piece for piece in together if piece != PIECES - 1]
    marked[0, legends[-1:] if last else legends] = True
    return marked


def small_contents(backbone: ModelBackbone, contexts: int, seed: int) -> RevisitContents:
    """Draws contexts of the small task: three legends and a page each."""
    rng = np.random.default_rng(seed)
    drawn = [small_task.sample_contexts(rng, 1) for _ in range(contexts)]
    form = scenes.form_of(backbone.config, backbone.image_config)
    pieces = []
    for context in drawn:
        legends, pages = small_task.render(context, canvas=form.legend_shape)
        pieces += [*legends[0], pages[0]]

    def ask(rng: np.random.Generator, context: int, together: Sequence[int]) -> Question:
        kind = _kind_of(together, "legend")
        asked = small_task.ask(drawn[context], rng, {kind: 1}, _shown(together, kind == "legend"))
        answer = int(asked.answer[0, 0]) if asked.valid[0, 0] else -1
        return Question((int(asked.ask[0, 0]), int(asked.argument[0, 0])), 2, (answer,))

    return RevisitContents([VOCABULARY.names.index(word) for word in LEAD_WORDS], pieces, ask)


def packed_contents(backbone: ModelBackbone, contexts: int, seed: int, dataset: PackedDataset) -> RevisitContents:
    """Draws contexts of the sheets or documents task: three sheets and a page each."""
    rng, task = np.random.default_rng(seed), dataset.spec
    drawn = [task.sample(rng, 1, task.sizes[str(PIECES)]) for _ in range(contexts)]
    pieces = [image for context in drawn for image in task.images(context)]

    def ask(rng: np.random.Generator, context: int, together: Sequence[int]) -> Question:
        kind = _kind_of(together, "sheet")
        asked = task.ask(drawn[context], rng, {kind: 1}, _shown(together, kind == "sheet"))
        # Of two tokens or three; what is asked last is answered.
        return Question(tuple(asked.ids[0].tolist()), asked.ids.shape[1], (int(asked.answer[0, -1]),))

    return RevisitContents((np.arange(PACKED_LEAD) + task.vocabulary.fill).tolist(), pieces, ask)


def text_contents(backbone: ModelBackbone, contexts: int, seed: int, domain: str) -> RevisitContents:
    """Reads documents of a domain, four chunks each; scored is what follows a chunk in its document.

    Args:
      seed: number of the trace: no two read the same documents.
    """
    stride, first = CHUNK + SCORED, seed * contexts
    read = _documents(backbone, domain, first + contexts, PIECES * stride + 1)[first:]
    pieces, tails = [], []
    for document in read:
        for start in range(0, PIECES * stride, stride):
            ids = document.ids[start : start + stride + 1].tolist()
            pieces.append(ids[:CHUNK])
            tails.append(ids[CHUNK:])

    def ask(rng: np.random.Generator, context: int, together: Sequence[int]) -> Question:
        ids = tails[context * PIECES + together[-1]]
        return Question(tuple(ids[:-1]), 1, tuple(ids[1:]))

    return RevisitContents(np.asarray(backbone.prepare([kvp.Text(LEAD)])["input_ids"])[0].tolist(), pieces, ask)


@functools.lru_cache(maxsize=4)
def _documents(backbone: Any, domain: str, count: int, tokens: int) -> list[texts.Document]:
    return texts.documents(backbone, domain, count, tokens, tokens)


CONTENTS: dict[str, Callable[[ModelBackbone, int, int], RevisitContents]] = {
    "small": small_contents,
    "sheets": functools.partial(packed_contents, dataset=SHEETS_DATASET),
    "documents": functools.partial(packed_contents, dataset=DOCUMENTS_DATASET),
    "prose": functools.partial(text_contents, domain="prose"),
    "code": functools.partial(text_contents, domain="code"),
}
"""Makers of a trace's contents by task: of a backbone, so many contexts, and a seed."""
TEXTS = ("prose", "code")
