"""Figure of revisits: what comes back without a forward, and what answers lose, by way and window."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from .rows import OTHER, SMALL_LOSS, RevisitRows, Row
from .ways import DEFAULT, UNCERTIFIED

matplotlib.use("Agg")
STYLES = {
    DEFAULT: ("tab:blue", "-", "o"),
    UNCERTIFIED: ("tab:red", "-", "v"),
}
"""Colour, line and marker of each way."""
FLOOR = 1e-5
"""KL below this is drawn here: exact ways lose nothing."""


def draw(rows: RevisitRows, path: Path) -> Path:
    """Draws revisits in other orders: a column for each task, hits above and KL below, by window."""
    tasks = list(rows.mains)
    figure = Figure(figsize=(2.5 * len(tasks) + 0.6, 5.0), layout="constrained")
    panels = figure.subplots(2, len(tasks), squeeze=False, sharex=True, sharey="row")
    places = {window: place for place, window in enumerate(rows.windows)}
    for column, task in enumerate(tasks):
        hits, losses = panels[0][column], panels[1][column]
        for number, (way, (colour, line, marker)) in enumerate(STYLES.items()):
            found = [row for window in rows.windows if (row := rows.get(task, window, way, OTHER)) is not None]
            found = [row for row in found if row.get("revisits") and "kl" in row]
            # Side by side, so that what is equal can be told apart.
            where = [places[row["window"]] + 0.06 * (number - 1) for row in found]
            look: dict[str, Any] = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5, "label": way}
            hits.plot(where, [100 * row.get("hits", 0) / row["revisits"] for row in found], **look)
            losses.errorbar(where, [max(row["kl"], FLOOR) for row in found], _spread(found), capsize=2, **look)

        losses.axhline(SMALL_LOSS, color="black", linewidth=0.8, linestyle=":", label=f"{SMALL_LOSS:g} nats")
        hits.set(title=task, ylim=(-4, 104))
        losses.set(yscale="log", ylim=(FLOOR / 2, 10), xlabel="window, chunks")
        losses.set_xticks(list(places.values()), [str(window) for window in places])
        for axis in (hits, losses):
            axis.grid(alpha=0.3)

    panels[0][0].set_ylabel("without a forward, %")
    panels[1][0].set_ylabel("KL of an answer, nats")
    handles, labels = panels[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8)
    figure.savefig(path, dpi=90)
    return path


def _spread(rows: Sequence[Row]) -> list[list[float]]:
    """Returns the lengths of the error bars below and above; none where there is no interval."""
    below, above = [], []
    for row in rows:
        kl, low, high = max(row["kl"], FLOOR), row.get("kl low"), row.get("kl high")
        if low is None or high is None or low != low:
            low = high = kl
        below.append(max(kl - max(low, FLOOR), 0.0))
        above.append(max(high - kl, 0.0))
    return [below, above]
