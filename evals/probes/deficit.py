"""What the page's deficit looks like, layer by layer."""

import jax
import numpy as np

from kvpatch_jax import deficit

from ..results import intervals
from .repair import PageReuse
from .results_table import ResultsTable


@jax.jit
def _profile(delta, reference):
    across = lambda function, *trees: jax.vmap(function, in_axes=1)(*trees)
    return {
        "relative_norm": across(deficit.relative_norm, delta, reference),
        "e90": across(deficit.e90, delta),
        "token_share_90": across(deficit.token_spread, delta),
        "head_share_max": jax.tree.map(lambda share: share.max(axis=-1), across(deficit.head_spread, delta)),
    }


def deficit_shape(ledger: ResultsTable, reuses: list[PageReuse]) -> None:
    """Depth profile, 90 % energy rank (phase-free and rotated), token and head spread per channel, over contexts."""
    profiles = [_profile(reuse.delta, reuse.canonical) for reuse in reuses]
    turned = [_profile(reuse.rotated_delta(), reuse.canonical) for reuse in reuses]
    for metric in profiles[0]:
        _rows(ledger, metric, [profile[metric] for profile in profiles])
    _rows(ledger, "e90_rotated", [profile["e90"] for profile in turned])


def _rows(ledger: ResultsTable, metric: str, tables: list[dict]) -> None:
    for channel in tables[0]:
        values = np.concatenate([np.asarray(table[channel], np.float64) for table in tables])
        for layer in range(values.shape[1]):
            interval = intervals.mean(values[:, layer], np.arange(len(values)))
            ledger.row("deficit", f"layer={layer}.{channel}", metric, interval)
