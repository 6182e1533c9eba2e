"""Accuracy of the tower alone: how often the nearest embedding is the right one, in seen and unseen fonts."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from ..pretrained.rows import means
from ..results.rows import Row, measured_rows
from . import fonts, pages
from .pieces import Pieces
from .tower import PageReadingModel, Tower

SIZE = 13
BATCH = 1024
METRICS = ("nearest", "nearest_drawn", "missed")
GROUPS = {"seen": (fonts.SEEN, 6), "unseen": (fonts.UNSEEN, 1)}
"""Families, and every how many of them the tower is measured on, each in its first face."""


def measure(reader: PageReadingModel, group: str, folders: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Reads every drawn piece in the faces of a group with the model's tower: a record per face."""
    families, every = GROUPS[group]
    found = fonts.find(families, folders, every=False)
    faces = {family: files[:1] for family, files in list(found.items())[::every]}

    model = reader.model
    tower = nnx.eval_shape(lambda: Tower(model.config, nnx.Rngs(0)))
    state = nnx.state(tower, nnx.Param)
    nnx.replace_by_pure_dict(state, {name: model.parameters[name] for name in ("visual", "projector")})
    nnx.update(tower, state)
    return records(tower, reader.pieces, np.asarray(model.parameters["decoder"]["embedding"]), faces)


def records(
    tower: Tower, pieces: Pieces, table: Float[np.ndarray, "vocabulary D"], faces: Mapping[str, Sequence[Path]]
) -> Iterator[dict[str, Any]]:
    """Reads every drawn piece in every face, black on white: a record per face.

    nearest: the share whose nearest row of the whole table, by distance, is the right one. nearest_drawn: among the
    rows of pieces that are drawn. missed: squared distance as a share of the drawn embeddings' spread.
    """
    graph, state = nnx.split(tower)
    ids = np.asarray(pieces.ids)
    everything, own = jnp.asarray(table), jnp.asarray(table[ids])
    # Distances are shares of it: 1 is what the mean embedding would miss.
    spread = float(jnp.square(own - own.mean(0)).sum(-1).mean())

    @jax.jit
    def look(state, everything, own, ink, right):  # the tables are arguments: as constants they would be folded
        tiles = 1 - 2 * ink.astype(jnp.float32) / 255
        read = nnx.merge(graph, state)(jnp.repeat(tiles[:, None], 3, axis=1))
        missed = jnp.square(read - everything[right]).sum(-1) / spread
        nearest = [(read @ rows.T - jnp.square(rows).sum(-1) / 2).argmax(-1) for rows in (everything, own)]
        return *nearest, missed

    for family, files in faces.items():
        for file in files:
            ink = pages.cells(pages.glyphs(str(file), SIZE), pieces.letters)
            found = []
            # The last batch is padded to the others' size, so that one program reads all.
            for first in range(0, len(ids), BATCH):
                part, right = ink[first : first + BATCH], ids[first : first + BATCH]
                room = BATCH - len(part)
                made = look(state, everything, own, np.pad(part, ((0, room), (0, 0), (0, 0))), np.pad(right, (0, room)))
                found.append([np.asarray(values)[: len(part)] for values in made])

            best, best_drawn, missed = (np.concatenate(column) for column in zip(*found, strict=True))
            yield {
                "family": family,
                "face": file.stem,
                "nearest": float((best == ids).mean()),
                "nearest_drawn": float((best_drawn == np.arange(len(ids))).mean()),
                "missed": float(missed.mean()),
                "wrong": [int(number) for number in ids[best != ids]],
            }


def rows(found: Sequence[Mapping[str, Any]], group: str, model: str) -> list[Row]:
    """Makes rows of the mean over faces with its interval over families, and of every family over its faces."""
    records = [{**record, "group": group, "arm": f"{group}.{record['family']}"} for record in found]
    every = means("pieces", records, METRICS, "family", "group")
    return measured_rows([*every, *means("pieces", records, METRICS, "face")], model)
