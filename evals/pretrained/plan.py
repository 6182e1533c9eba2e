"""What the suite measures: sizes, and its parts, each of which is kept when it is done.

A part is one call of a few programs over one document or one batch of questions, about half a minute of a core.
"""

import dataclasses
from typing import NamedTuple

DOMAINS = ("prose", "code", "tables", "transcripts")
TASKS = ("copy", "retrieve from what stands in front", "retrieve from the reused chunk", "coreference")


@dataclasses.dataclass(frozen=True)
class SuitePlan:
    """Sizes of the suite: `chunk`, `scored`, `greedy`, `facts` and the lengths of `long` in tokens, others counts.

    Attributes:
      chunk: tokens of a passage, and of its antecedent.
      scored: the text's next tokens, that every arm reads.
      passages: of a document.
      documents: per domain.
      wide: every so many documents one has all arms, spectra and greedy continuations; 0: none has.
      long: longer passages, (tokens, how many).
      windows: per domain, documents whose antecedents are varied.
      slides: batches of documents whose first antecedent leaves.
      greedy: tokens of a continuation.
      items, batch: questions per task, and at a time.
      facts: tokens of a chunk that is asked about.
      fitted: passages of one more document of each domain, on which VLCache's shares by layer are fitted; 0 leaves
        that arm out.
    """

    chunk: int = 192
    scored: int = 32
    passages: int = 4
    documents: int = 24
    wide: int = 12
    long: tuple[tuple[int, int], ...] = ((512, 10), (1024, 4), (2048, 2))
    windows: int = 2
    slides: int = 3
    greedy: int = 32
    items: int = 32
    batch: int = 8
    facts: int = 64
    fitted: int = 2

    @property
    def piece(self) -> int:
        """Tokens of one of the three antecedents of a window."""
        return self.chunk // 3

    def is_wide(self, number: int) -> bool:
        """Returns whether a domain's document with this number has all arms."""
        return self.wide > 0 and number % self.wide == 0


FULL = SuitePlan()
QUICK = SuitePlan(
    chunk=32,
    scored=8,
    passages=2,
    documents=1,
    wide=0,
    long=(),
    windows=0,
    slides=0,
    greedy=8,
    items=2,
    batch=2,
    fitted=0,
)


class SuitePart(NamedTuple):
    """One piece of work.

    Attributes:
      kind: what is measured.
      group: the domain, length or task.
      number: in the group.
      share: its place among its kind, 0 … 1; parts of all kinds are done evenly.
      tokens: that it runs, about.
    """

    kind: str
    group: str
    number: int
    share: float
    tokens: int

    @property
    def name(self) -> str:
        """Its key in the file of parts."""
        return f"{self.kind}, {self.group}, {self.number}"


def parts(plan: SuitePlan) -> list[SuitePart]:
    """Lists all parts, kinds interleaved, so that an unfinished run is a picture of the whole."""
    found = []
    size, scored = plan.chunk, plan.scored

    def add(kind: str, groups: tuple[str, ...], count: int, tokens: int) -> None:
        for number in range(count):
            share = (number + 0.5) / count
            found.extend(SuitePart(kind, group, number, share, tokens) for group in groups)

    # A share below 0 puts it first: other parts need what it finds.
    if plan.fitted:
        found.append(SuitePart("fit", "layers", 0, -1.0, 30 * plan.fitted * len(DOMAINS) * scored))
    # Tokens that a part runs: prefills of passages and antecedents, then every arm's reading of the scored text.
    base = (2 * plan.passages + 1) * size + 9 * plan.passages * scored + plan.passages * size // 2

    for number in range(plan.documents):
        wide = 0 if not plan.is_wide(number) else plan.passages * (38 * scored + 11 * plan.greedy + 4 * size)
        for place, domain in enumerate(DOMAINS):
            share = (number + (place + 0.5) / len(DOMAINS)) / plan.documents
            found.append(SuitePart("text", domain, number, share, base + wide))

    for length, count in plan.long:
        add("long", (str(length),), count, size + 2 * length + 9 * scored + length // 2)
    add("window", DOMAINS, plan.windows, 8 * (2 * size + scored) + 32 * scored)
    add("slide", ("all",), plan.slides, plan.passages * (4 * size + 6 * scored))
    add("behaviour", TASKS, -(-plan.items // plan.batch), plan.batch * (3 * plan.facts + 9 * 24))
    return sorted(found, key=lambda part: (part.share, part.kind, part.group))
