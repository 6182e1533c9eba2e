"""What trained transitions keep, layer by layer and head by head, measured on contexts of the sheets task.

Axis letters: C contexts, L layers with linear attention, K heads, D width of a key, V width of a value.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from kvpatch_jax.core import fold, through_map, transition_of
from kvpatch_jax.errors import InputError
from models import ModelBackbone

from ...arms import ReusedPage
from ...datasets import PackedDataset
from ...results import intervals
from ...results.rows import Row, measured_row
from ...results.tables import markdown_table

SHARE = 0.999
"""Of the energy that directions are counted for."""


def directions(matrix: Float[Array, "*lead D _"], share: float = SHARE) -> Int[Array, "*lead"]:
    """Counts the fewest directions that hold a share of a matrix's energy; 0 of zeros."""
    energy = jnp.cumsum(jnp.square(jnp.linalg.svd(matrix, compute_uv=False)), axis=-1)
    whole = energy[..., -1:]
    return jnp.where(whole[..., 0] > 0, jnp.sum(energy < share * whole, axis=-1) + 1, 0)


@jax.jit
def statistics(own: Mapping[str, Array], front: Mapping[str, Array] | None = None) -> dict[str, Num[Array, "L C K"]]:
    """Measures a chunk's transition: the norm of M, directions of M and B, and what of the state is from in front.

    Args:
      own: the transition of the chunk's tokens, [L,C,R,K,W] by part. front: that of what is in front; None: nothing.
    """
    map_, state = (jnp.moveaxis(own[part].astype(jnp.float32), 3, 2) for part in ("map", "state"))
    found = {
        "map_norm": jnp.linalg.svd(map_, compute_uv=False)[..., 0],
        "map_directions": directions(map_),
        "state_directions": directions(state),
    }
    if front is not None:
        passed = jnp.moveaxis(through_map(own["map"], front["state"]), 3, 2)
        norms = [jnp.sqrt(jnp.sum(jnp.square(part), axis=(-2, -1))) for part in (passed, passed + state)]
        found["from_front"] = norms[0] / jnp.where(norms[1] > 0, norms[1], 1.0)
    return found


def chunk_statistics(page: ReusedPage) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Measures every chunk of a prefix behind those in front of it: its tokens, and arrays [L,C,K] by metric."""
    measured = []
    for place, size in enumerate(page.form.sizes):
        front = fold([transition_of(own) for own in page.transitions[:place]]) if place else None
        found = statistics(dict(page.transitions[place]), front)
        measured.append((size, {name: np.asarray(value) for name, value in found.items()}))
    return measured


def measure(backbone: ModelBackbone, model: str, dataset: PackedDataset, seed: int, contexts: int) -> list[Row]:
    """Measures contexts of every size; rows "transition.<tokens>" by layer and head."""
    if not backbone.layout.parts:
        raise InputError(
            f"backbone {model}: got channels {backbone.layout.names}; expected a hybrid's, with transitions"
        )

    layers, by_size = backbone.layout.layers_of("map"), dict[int, dict[str, list[np.ndarray]]]()
    for probe in dataset.probes:
        page = dataset.reader(backbone, probe, seed, 0, contexts).page
        for size, found in chunk_statistics(page):
            for metric, values in found.items():
                by_size.setdefault(size, {}).setdefault(metric, []).append(values)

    rows = []
    for size, metrics in sorted(by_size.items()):
        for metric, pieces in metrics.items():
            # Chunks of one context are no independent draws: contexts of one size are clusters.
            values = np.concatenate(pieces, axis=1)
            clusters = np.concatenate([np.arange(piece.shape[1]) for piece in pieces])
            for row, layer in enumerate(layers):
                for head in range(values.shape[2]):
                    interval = intervals.mean(values[row, :, head].astype(float), clusters)
                    rows.append(
                        measured_row(f"transition.{size}", model, f"layer={layer}.head={head}", metric, interval)
                    )
    return rows


def table(rows: list[Row]) -> str:
    """Writes the rows as a table: a line for each layer and head, a column for each number of tokens and metric."""
    names = {
        "map_norm": "‖M‖₂",
        "map_directions": "rank M",
        "state_directions": "rank B",
        "from_front": "from in front",
    }
    values = {(row["probe"], row["arm"], row["metric"]): row["value"] for row in rows}
    probes = list(dict.fromkeys(row["probe"] for row in rows))
    columns = [(probe, metric) for metric in names for probe in probes if (probe, rows[0]["arm"], metric) in values]
    head = ("layer, head", *(f"{names[metric]}, {probe.partition('.')[2]} tokens" for probe, metric in columns))
    lines = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        lines.append([arm, *(f"{values[probe, arm, metric]:.3g}" for probe, metric in columns)])
    return markdown_table(head, lines)
