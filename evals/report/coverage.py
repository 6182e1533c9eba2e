"""What five papers show, and which of our rows show the same: the page docs/experiments/coverage.md.

    python -m evals.report.coverage                              # writes the page anew
    python -m evals.report.coverage default=out/run/results.json # says which of the rows named here a run lacks

Rows are named (suite, probe, arm, metric), as results.json names them. Those of "engine" are in
tests/serving/results.json: its part, the way of serving, and the number.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..results.tables import markdown_table

PAGE = Path(__file__).parents[2] / "docs" / "experiments" / "coverage.md"
SUITES = {
    "default": "`python -m evals.run`",
    "window": "`--suite=window`",
    "pretrained": "`--suite=pretrained`",
    "sheets": "`--task=sheets`",
    "documents": "`--task=documents`",
    "engine": "`tests/serving/run`, shown in [In vLLM](vllm.md)",
}
RowName = tuple[str, str, str, str]


class CoverageItem(NamedTuple):
    """A table or figure. rows: ours, none where it is not covered; note: how ours differs, or why there is none."""

    where: str
    shows: str
    rows: tuple[RowName, ...]
    note: str


def _rows(suite: str, probe: str, metric: str, *arms: str) -> tuple[RowName, ...]:
    return tuple((suite, probe, arm, metric) for arm in arms)


_VISIBLE = "repair.visible"
_SCALE = "it needs GPUs and large released checkpoints"
_ON_CPU = "a small model in vLLM on a CPU, which says nothing of a GPU or TPU"
_ENGINE_WAYS = ("reuse off", "prefix cache", "chunks and patches")
_PATCHES = ("patch.rank=8", "patch.rank=16", "patch.rank=32")
_SHEETS = "sheets.4"

PAPERS: Mapping[str, tuple[CoverageItem, ...]] = {
    "Kamera: Unified Position-Invariant Multimodal KV Cache for Training-Free Reuse (arXiv 2606.23581)": (
        CoverageItem("Fig. 1, 2", "the idea, drawn", (), "diagrams, no measurement"),
        CoverageItem(
            "Fig. 3",
            "structure of the deficit: rank, depth",
            (
                *_rows("default", "deficit", "relative_norm", "layer=0.v", "layer=5.v"),
                *_rows("default", "deficit", "e90", "layer=5.k", "layer=5.v"),
                *_rows("pretrained", "deficit", "relative_norm", "layer=0.v", "layer=1.v"),
                *_rows("pretrained", "deficit", "e90", "layer=1.k", "layer=1.v"),
                *_rows("sheets", _SHEETS, "e90", "layer=3.k", "layer=3.v"),
                *_rows("sheets", _SHEETS, "class_mean_share.ink", "layer=3.v"),
            ),
            "every layer has its rows",
        ),
        CoverageItem(
            "Table 1",
            "eviction: recall needs a fresh patch, survivors the rotation alone",
            (
                *_rows("default", "recall", "eta.aggregate", "stale.turnover=3", "fresh.turnover=3"),
                *_rows("default", "slide", "kl.survivor", "keep", "removal", "blind"),
                *_rows("window", "window.recall", "kl.aggregate", "stale.turnover=3.lead=1", "fresh.turnover=3.lead=1"),
                *_rows("window", "window.slide", "kl.survivor", "keep.gone=1.lead=0", "keep.gone=1.lead=1"),
                *_rows("pretrained", "slide", "kl", "keep", "removal.rank=16", "blind"),
                *_rows("pretrained", "drift.replaced 3", "eta", "stored.rank=16", "oracle.rank=16"),
            ),
            "small models and text, not video",
        ),
        CoverageItem("Table 2", "a menu of operating points", (), "a list of cases, no measurement"),
        CoverageItem(
            "Fig. 4",
            "no cheap signal says where the deficit is",
            _rows("window", "window.gate", "rank_correlation", "all"),
            "one signal alone, the gate's divergence of antecedents; attention mass and motion are not measured as "
            "predictors of Δ",
        ),
        CoverageItem(
            "Table 3",
            "accuracy of answers that need both chunks",
            (
                *_rows(
                    "default", _VISIBLE, "accuracy.chain", "re-prefill", "blind", *_PATCHES, "cacheblend.budget=0.15"
                ),
                *_rows("sheets", _SHEETS, "accuracy.chain", "re-prefill", "blind", *_PATCHES, "cacheblend.budget=0.15"),
            ),
            "tasks of ours in place of MM-NIAH, which needs large vision-language checkpoints",
        ),
        CoverageItem(
            "Table 4",
            "patch against token methods at one budget",
            (
                *_rows("default", _VISIBLE, "accuracy.aggregate", "patch.rank=16", "first_k.bytes_of_rank=16"),
                *_rows("default", _VISIBLE, "bytes", "patch.rank=16", "patch.rank=64"),
                *_rows("pretrained", "text", "eta", "patch.rank=16", "first_k.budget=0.15", "query_aware.budget=0.15"),
                *_rows("sheets", _SHEETS, "accuracy.list", "patch.rank=16", "first_k.budget=0.15", "quantised.bits=2"),
                *_rows(
                    "sheets", _SHEETS, "stored_bytes.antecedents=1", "patch.rank=16", "quantised.bits=2", "svd.rank=16"
                ),
                *_rows("documents", "documents.4", "accuracy.list", "patch.rank=16", "first_k.budget=0.15"),
            ),
            "documents are drawn by us, for small models; document QA as published needs large checkpoints",
        ),
        CoverageItem(
            "Fig. 5",
            "KL against rank",
            (
                *_rows("default", _VISIBLE, "kl.chain", "patch.rank=4", *_PATCHES, "patch.rank=64"),
                *_rows("pretrained", "text", "kl", "patch.rank=4", *_PATCHES, "patch.rank=64"),
            ),
            "widths 128 and 192; no model of width 1024",
        ),
        CoverageItem(
            "Fig. 6",
            "choosing tokens, layers or heads misses",
            (
                *_rows("default", _VISIBLE, "eta.chain", "oracle_delta.budget=0.5", "patch.deepest_half.rank=16"),
                *_rows("default", "deficit", "head_share_max", "layer=5.k", "layer=5.v"),
                *_rows("pretrained", "text", "eta", "oracle_delta.budget=0.5", "patch.deep_half.rank=16"),
                *_rows("pretrained", "deficit", "token_share_90", "layer=1.k", "layer=1.v"),
            ),
            "injection of single layers is not covered",
        ),
        CoverageItem(
            "Fig. 7, Table 5",
            "flipped answers that come back",
            (
                *_rows("default", _VISIBLE, "flip_recover.chain", "patch.rank=64", "cacheblend.budget=0.15"),
                *_rows("pretrained", "text", "flips", "blind", "patch.rank=32", "cacheblend.budget=0.15"),
            ),
            "tasks of ours and text in place of MuirBench and MileBench",
        ),
        CoverageItem(
            "Table 6",
            "at the bytes of rank 16 and 64",
            (
                *_rows(
                    "default",
                    _VISIBLE,
                    "eta.chain",
                    "patch.rank=16",
                    "first_k.bytes_of_rank=16",
                    "cacheblend.bytes_of_rank=16",
                    "oracle_delta.bytes_of_rank=16",
                ),
                *_rows("pretrained", "text", "eta", "shadowkv.rank=16", "shadowkv.rank=32", "kv.svd.rank=32"),
                *_rows("sheets", _SHEETS, "accuracy.chain", "shadowkv.rank=8", "shadowkv.keys_alone.rank=8"),
            ),
            "at the bytes of ranks 8 and 16; low-rank keys (ShadowKV) in two readings, at bytes of their own",
        ),
        CoverageItem(
            "Fig. 8",
            "shallow layers are reused as they are",
            _rows("pretrained", "deficit", "relative_norm", "layer=0.k", "layer=1.k"),
            "norms by layer, not a map of features by tokens",
        ),
        CoverageItem(
            "Table 7, Fig. 9",
            "the deficit by a mask, over six backbones",
            (
                *_rows("default", "mask", "probability_difference", "mask_4d"),
                *_rows("default", _VISIBLE, "kl.chain", "blind"),
                *_rows("pretrained", "text", "kl", "blind"),
            ),
            "over our small models of five architectures with `--backbone=all`; of released checkpoints SmolLM2-135M "
            "alone, on text",
        ),
        CoverageItem(
            "Table 8",
            "repair frontier: layers re-prefilled, tokens recomputed",
            (
                *_rows("default", _VISIBLE, "eta.chain", "patch.rank=64", "cacheblend.budget=0.5"),
                *_rows("sheets", _SHEETS, "accuracy.chain", "residual.layer=1", "residual.layer=3"),
                *_rows("sheets", _SHEETS, "serving_flops", "residual.layer=1", "residual.layer=3"),
                *_rows(
                    "window", "window.drift", "eta.aggregate", "deep.replaced=1.lead=0", "shallow.replaced=1.lead=0"
                ),
            ),
            "layers are re-prefilled in drift, and from the residual in the sheets task",
        ),
        CoverageItem(
            "Fig. 10",
            "modalities: text is a negative control",
            _rows("pretrained", "text", "loss_difference", "blind", "patch.rank=16"),
            "text alone; audio and video are not covered: no small model of ours takes them",
        ),
        CoverageItem(
            "Fig. 11",
            "roofline and time to the first token on an H100",
            _rows("engine", "trained", "median_seconds_of_the_first_question", "re-prefill", "blind", "rank 16"),
            f"time to the first token alone, of {_ON_CPU}; the roofline is not covered: {_SCALE}",
        ),
        CoverageItem(
            "Fig. 12",
            "inside SGLang's kernel and pool",
            _rows("engine", "trained", "right", "re-prefill", "leading", "blind", "rank 8", "rank 16"),
            "vLLM's pool with tpu-inference, its Pallas attention replaced by XLA on a CPU; no SGLang",
        ),
        CoverageItem(
            "App. D",
            "drift: what a stored patch survives",
            (
                *_rows(
                    "window", "window.drift", "kl.aggregate", "transfer.replaced=1.lead=0", "update.replaced=1.lead=0"
                ),
                *_rows("pretrained", "drift.replaced 1", "eta", "stored.rank=16", "oracle.rank=16"),
                *_rows("pretrained", "drift.dropped and doubled", "eta", "stored.rank=16"),
                *_rows("pretrained", "reorder", "eta", "transfer.rank=16", "orbit.rank=16", "oracle.rank=16"),
            ),
            "more context in front: the window's suite alone",
        ),
    ),
    "MPIC: position-independent multimodal context caching": (
        CoverageItem("Fig. 1 to 3, 5 to 7", "the system, drawn, and its prefix baseline's time", (), "no row of ours"),
        CoverageItem(
            "Fig. 4, 8, 11, 12",
            "attention is on the first tokens of an image",
            _rows("pretrained", "text", "eta", "first_k.budget=0.15", "random.budget=0.15"),
            "what recomputing the first tokens brings, against random ones; no map of attention",
        ),
        CoverageItem(
            "Fig. 9, 13",
            "score and time to the first token, by number of images",
            (
                *_rows("default", _VISIBLE, "accuracy.chain", "first_k.budget=0.15", "first_k.budget=0.5"),
                *_rows("window", "window.many", "accuracy.chain", "blind.chunks=8.lead=0", "kept.chunks=8.lead=0"),
                *_rows("engine", "load", "first_token_ms", *_ENGINE_WAYS),
            ),
            f"scores; time to the first token with one number of images, of {_ON_CPU}",
        ),
        CoverageItem(
            "Fig. 10",
            "throughput under load",
            (
                *_rows("engine", "load", "output_tokens_per_second", *_ENGINE_WAYS),
                *_rows("engine", "load", "first_token_ms", *_ENGINE_WAYS),
            ),
            f"{_ON_CPU}: Poisson arrivals, prompts of 173 tokens",
        ),
    ),
    "VLCache: computing 2 % of the vision tokens": (
        CoverageItem("Fig. 1, 4", "the system, drawn", (), "diagrams, no measurement"),
        CoverageItem(
            "Fig. 2, 3, 5",
            "earlier tokens and layers correct more than later ones",
            (
                *_rows("default", _VISIBLE, "eta.chain", "first_k.budget=0.1", "first_k.budget=0.25"),
                *_rows("pretrained", "text", "eta", "first_k.budget=0.15", "vlcache.budget=0.15"),
            ),
            "budgets by layer are fitted on text, on one model, by blocks of layers as they are served",
        ),
        CoverageItem("Tables 1, 2, 6, 8, 10", "speedup", (), f"not covered: {_SCALE}"),
        CoverageItem(
            "Tables 3, 4, 7, 9, 11",
            "accuracy on released checkpoints",
            (),
            f"not covered: {_SCALE}; of released weights SmolLM2-135M's alone were run, on text",
        ),
        CoverageItem(
            "Table 5",
            "against CacheBlend (KV distance) and KVShare (attention distance)",
            _rows("pretrained", "text", "eta", "vlcache.budget=0.15", "cacheblend.budget=0.15", "kvshare.budget=0.15"),
            "KVShare's prefill stage, as these papers describe it",
        ),
    ),
    "InfoFlow KV: information-flow-aware recomputation for long context": (
        CoverageItem("Fig. 1", "the method, drawn", (), "a diagram, no measurement"),
        CoverageItem(
            "Tables 1, 2", "geometries of positions", (), "not covered: chunks always stand at their true positions"
        ),
        CoverageItem(
            "Tables 3, 4, Fig. 2",
            "tokens chosen by the query's attention, by budget",
            (
                *_rows(
                    "pretrained",
                    "text",
                    "eta",
                    "query_aware.budget=0.05",
                    "query_aware.budget=0.15",
                    "query_aware.budget=0.5",
                    "prophetkv.budget=0.15",
                ),
                *_rows("pretrained", "text", "serving", "query_aware.budget=0.15", "patch.rank=16"),
                *_rows(
                    "sheets", _SHEETS, "accuracy.chain", "query_attention.budget=0.01", "query_attention.budget=0.15"
                ),
            ),
            "on text and questions of ours; tasks of ours",
        ),
        CoverageItem("Tables 5, 6", "sequence parallelism on four H100s", (), f"not covered: {_SCALE}"),
        CoverageItem(
            "Fig. 3, 4",
            "a needle in long contexts",
            _rows(
                "pretrained",
                "behaviour.retrieve from what stands in front",
                "right",
                "re-prefill",
                "blind",
                "query_aware.budget=0.15",
            ),
            "a fact among 64 tokens, not among tens of thousands: the model is small",
        ),
    ),
    "Cross-query KV segment reuse for template-heavy agents": (
        CoverageItem(
            "§5 (announced, no table or figure)",
            "quality against exact prefixes, of text at a moved place",
            _rows("pretrained", "text", "loss_difference", "blind", "first_k.budget=0.15"),
            "the paper has no figures of its own to set beside these",
        ),
        CoverageItem("§5, int8", "cached values at 8 bits", _rows("pretrained", "text", "eta", "kv.bits=8"), ""),
        CoverageItem("§5, agents", "ReAct and ToolBench", (), f"not covered: {_SCALE}"),
    ),
}


def names(suite: str) -> list[RowName]:
    """Returns all rows of a suite that the table names."""
    every = [row for items in PAPERS.values() for item in items for row in item.rows]
    return [row for row in dict.fromkeys(every) if row[0] == suite]


def of_the_engine(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lists what tests/serving/results.json has as rows: under load by the way of serving, of a trained model by it."""
    rows = [("load", row["way"], metric) for row in found["load"]["rows"] for metric in row]
    rows += [("trained", way, metric) for way, numbers in found["trained"]["ways"].items() for metric in numbers]
    return [{"probe": probe, "arm": arm, "metric": metric} for probe, arm, metric in rows]


def missing(suite: str, rows: Iterable[Mapping[str, Any]]) -> list[RowName]:
    """Returns those that a run of the suite does not have; of its results' rows."""
    have = {(row["probe"], row["arm"], row["metric"]) for row in rows}
    return [row for row in names(suite) if row[1:] not in have]


def markdown() -> str:
    """Makes the page."""
    covered = sum(bool(item.rows) for items in PAPERS.values() for item in items)
    count = sum(len(items) for items in PAPERS.values())
    lines = [
        "# What the papers show, and where ours is",
        "",
        f"{covered} of {count} lines have rows of ours; the others say why not. Rows are named as in `results.json`:",
        "probe, metric, arm. Suites: " + ", ".join(f"*{name}* is {command}" for name, command in SUITES.items()) + ".",
        "Written by `python -m evals.report.coverage`.",
    ]
    for paper, items in PAPERS.items():
        table = [[item.where, item.shows, _ours(item.rows), item.note] for item in items]
        lines += ["", f"## {paper}", "", markdown_table(["there", "shows", "our rows", "what differs"], table)]
    return "\n".join(lines) + "\n"


def _ours(rows: Iterable[RowName]) -> str:
    """Returns rows of one probe and metric together."""
    together: dict[tuple[str, str, str], list[str]] = {}
    for suite, probe, arm, metric in rows:
        together.setdefault((suite, probe, metric), []).append(f"`{arm}`")
    said = [f"*{suite}* `{probe}`, `{metric}`: {', '.join(arms)}" for (suite, probe, metric), arms in together.items()]
    return "; ".join(said) or "not covered"


def main(arguments: list[str]) -> None:
    """Writes the page, or says which of its rows some results lack."""
    if not arguments:
        PAGE.write_text(markdown(), encoding="utf-8")
        print(PAGE)
    for argument in arguments:
        suite, _, path = argument.partition("=")
        found = json.loads(Path(path).read_text())
        lacking = missing(suite, of_the_engine(found) if suite == "engine" else found["rows"])
        count = len(names(suite))
        print(f"{path}: {count - len(lacking)} of the {count} rows of {suite} that the page names are there")
        print("".join(f"  not: {', '.join(row[1:])}\n" for row in lacking), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
