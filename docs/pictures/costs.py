"""Draws accuracy against cost: `python docs/pictures/costs.py` from the checkout's root, from docs/results.json."""

import json
from pathlib import Path

import matplotlib

from evals.harness.frame import Rows
from evals.report.figures import arm_label
from evals.results.headline import headline_results

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

ROOT = Path(__file__).parents[2]
PROBE = "repair.visible"
ARMS = {
    "re-prefill": "#222222",
    "blind": "#d55e00",
    "patch.rank=1": "#0072b2",
    "patch.rank=2": "#0072b2",
    "patch.rank=4": "#0072b2",
    "patch.rank=8": "#0072b2",
    "quantised.bits=3": "#555555",
    "quantised.bits=16": "#555555",
    "residual.layer=1": "#555555",
    "prophetkv.budget=0.15": "#555555",
    "cacheblend.budget=0.15": "#555555",
}
MARKS = ((1, "o", "1"), (4, "s", "4"), (16, "D", "16"))
"""Numbers of antecedents that share a canonical, and their marks."""


def main() -> None:
    """Draws a row per arm: accuracy, bytes stored and serving FLOPs, beside each other."""
    mean = headline_results(json.loads((ROOT / "docs/results.json").read_text("utf-8")))
    assert mean is not None
    rows = Rows(mean)
    figure, axes = plt.subplots(1, 3, figsize=(6.6, 6.2), layout="constrained", sharey=True)
    for row, (arm, colour) in enumerate(ARMS.items()):
        for kind, mark in (("chain", "o"), ("aggregate", "D")):
            axes[0].plot(rows.get(PROBE, arm, f"accuracy.{kind}").value, row, mark, color=colour, markersize=7)
        for count, mark, _ in MARKS:
            stored = rows.get(PROBE, arm, f"stored_bytes.antecedents={count}").value
            axes[1].plot(stored, row, mark, color=colour, markersize=7, fillstyle="full" if count == 4 else "none")
        axes[2].plot(rows.get(PROBE, arm, "serving_flops").value, row, "o", color=colour, markersize=7)
    labels = [arm_label(arm).replace(", 15 % of tokens", "\n15 % of tokens").replace("KV in", "KV\nin") for arm in ARMS]
    labels = [label.replace("again from", "again\nfrom") for label in labels]
    axes[0].set_yticks(range(len(ARMS)), labels, fontsize=11)
    axes[0].invert_yaxis()
    heads = ("accuracy", "stored bytes,\nshare of the KV", "serving FLOPs,\nshare of re-prefill")
    legends = (
        "○ chain   ◇ aggregate",
        "antecedents:\n○ 1   ■ 4   ◇ 16",
        "",
    )
    for axis, head, legend in zip(axes, heads, legends, strict=True):
        axis.set_title(head, fontsize=11.5)
        axis.set_xlabel(legend, fontsize=11)
        axis.grid(color="#e5e7eb")
        axis.set_axisbelow(True)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[0].set_xlim(0, 1.05)
    for axis, ticks in ((axes[1], (0.01, 0.1, 1)), (axes[2], (0.001, 0.01, 0.1, 1))):
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(FixedLocator(ticks))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xticklabels([f"{100 * tick:g}%" for tick in ticks], fontsize=9.5)
    figure.savefig(ROOT / "docs/pictures/costs.png", dpi=105)


if __name__ == "__main__":
    main()
