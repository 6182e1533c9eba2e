"""What the page's deficit looks like, layer by layer."""

from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax import deficit

from ..arms.class_mean import class_means, explained
from ..arms.reused_page import ReusedPage
from ..harness import intervals
from .results_table import ResultsTable


@jax.jit
def _profile(
    delta: Mapping[str, Float[Array, "L B T _ _"]], reference: Mapping[str, Float[Array, "L B T _ _"]]
) -> dict[str, dict[str, Float[Array, "B L"] | Int[Array, "B L"]]]:
    """Returns every metric of every context's deficit."""

    def across(function, *trees):
        return jax.vmap(function, in_axes=1)(*trees)

    return {
        "relative_norm": across(deficit.relative_norm, delta, reference),
        "e90": across(deficit.e90, delta),
        "token_share_90": across(deficit.token_spread, delta),
        "head_share_max": jax.tree.map(lambda share: share.max(axis=-1), across(deficit.head_spread, delta)),
    }


def deficit_shape(table: ResultsTable, pages: list[ReusedPage]) -> None:
    """Adds rows "deficit" per channel and layer: size, 90 % energy rank (also rotated), spread, class means.

    "class_mean_share" is the share of ‖Δ‖² explained by the mean of Δ over the tokens of a page that show the same
    glyph: where it is near 1, the task has built a low rank in.
    """
    batches = []
    for page in pages:
        metrics = dict(_profile(page.delta, dict(page.page.kv)))
        metrics["class_mean_share"] = explained(page.delta, class_means(page))
        # The paper's listing takes the deficit after the rotation, which needs more directions.
        metrics["e90_rotated"] = _profile(page.rotated_delta, dict(page.page.kv))["e90"]
        batches.append(metrics)

    for metric, by_channel in batches[0].items():
        for channel in by_channel:
            values = np.concatenate([np.asarray(batch[metric][channel], np.float64) for batch in batches])
            for layer in range(values.shape[1]):
                interval = intervals.mean(values[:, layer], np.arange(len(values)))
                table.row("deficit", f"layer={layer}.{channel}", metric, interval)
