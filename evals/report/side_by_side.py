"""Several backbones side by side: one line each, out of their own results. Writes backbones.md, .png and .json."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from ..harness.frame import VISIBLE, Rows, without_nan
from ..harness.tables import markdown_table
from ..results.headline import headline_arms, headline_results, seeds_of
from ..small_task import KINDS
from .comparison import smallest_rank
from .figures import MULTI_HOP, Results
from .summary import TOKEN_METHODS
from .table import comparison_table
from .wording import number, show

RANK = 8
HEAD = (
    "backbone",
    "parameters",
    "KV per token and layer",
    "re-prefill: page, legend",
    "chain: re-prefill → blind",
    f"chain: rank {RANK}",
    "aggregate: re-prefill → blind",
    f"aggregate: rank {RANK}",
    "order effect",
    f"bytes of rank {RANK}",
    f"best token recompute at the bytes of rank {RANK} (chain)",
    "smallest rank within .01",
)


def line(results: Results) -> list[str]:
    """Makes the cells of one backbone, as HEAD names them."""
    rows, config = Rows(results), results["config"]
    patch, rank = f"patch.rank={RANK}", smallest_rank(results, VISIBLE)
    cells = {}
    for kind in MULTI_HOP:
        whole, blind, mended = (show(rows.accuracy(arm, kind)) for arm in ("re-prefill", "blind", patch))
        cells[kind] = f"{whole} → {blind}", mended
    tokens = [rows.accuracy(f"{method}.bytes_of_rank={RANK}", "chain") for method in TOKEN_METHODS]
    return [
        str(config["backbone"]),
        f"{config['parameters'] / 1e6:.2f} M",
        " + ".join(f"{name} {features}" for name, features in config["kv"].items()),
        ", ".join(number(rows.accuracy("re-prefill", kind).value) for kind in ("page", "legend")),
        *cells["chain"],
        *cells["aggregate"],
        show(rows.get("reorder", "order", "relative_order_effect")),
        f"{rows.get(VISIBLE, patch, 'bytes').value:.0%}",
        show(max(tokens, key=lambda got: got.value if math.isfinite(got.value) else -1.0)),
        "none tried" if rank is None else str(rank),
    ]


def write(results: Mapping[str, Results], folder: Path) -> Path:
    """Writes the table, the figure and the numbers of both; returns the table's path."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [markdown_table(HEAD, [line(each) for each in results.values()])]
    kept, own = {}, []
    for name, each in results.items():
        # Rows of other seeds and of the control are other runs' here; the file keeps what its table and figure show.
        own += [row for row in each["rows"] if row["model"] == Rows(each).model]
        shown = [row for row in each["rows"] if row["probe"] == VISIBLE or row["metric"] == "relative_order_effect"]
        kept[name] = {"config": each["config"], "rows": without_nan(shown)}

    mean = headline_results({"config": {}, "rows": own})
    if mean is not None:
        parts += [
            f"Means over the training seeds {', '.join(seeds_of(mean))}, the least and the largest in brackets.",
            markdown_table(*comparison_table(Rows(mean), headline_arms(mean))),
        ]
        kept["headline"] = mean

    table = folder / "backbones.md"
    table.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (folder / "backbones.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    draw(results, folder / "backbones.png")
    return table


def draw(results: Mapping[str, Results], path: Path) -> Path:
    """Draws accuracy by question kind: re-prefill, a patch of rank 8 and blind reuse, one panel per backbone."""
    arms = {"re-prefill": "#222222", f"patch.rank={RANK}": "#0072B2", "blind": "#D55E00"}
    figure = Figure(figsize=(2.1 * len(results) + 1, 3.2), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axis, (name, each) in zip(axes, results.items(), strict=True):
        rows = Rows(each)
        for shift, (arm, colour) in zip((-0.2, 0.0, 0.2), arms.items(), strict=True):
            got = [rows.accuracy(arm, kind) for kind in KINDS]
            spread = [[x.value - x.low for x in got], [x.high - x.value for x in got]]
            places = [number + shift for number in range(len(KINDS))]
            axis.errorbar([x.value for x in got], places, xerr=spread, fmt="o", ms=4, color=colour, label=arm)

        axis.set(title=name, xlim=(-0.03, 1.03), ylim=(len(KINDS) - 0.5, -0.5), yticks=range(len(KINDS)))
        axis.set_yticklabels(KINDS)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", color="#e6e6e6")

    handles, labels = axes[0].get_legend_handles_labels()
    labels = ["re-prefill", f"patch, rank {RANK}", "blind reuse"][: len(labels)]
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel("accuracy (95 % intervals)", fontsize=9)
    figure.savefig(path, dpi=120)
    return path
