"""Bytes that a chunk of a hybrid takes, by its length, beside a full-attention model of like size: from layouts alone.

Rows grow with the tokens; a transition (map, state, tail) takes the same whatever the length.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from kvpatch_jax.core import KVLayout

from .hybrid_shapes import BESIDE, HYBRIDS, decoder_of

LENGTHS = (64, 128, 256, 512, 1024, 1280, 2048, 4096, 8192, 16384)
RANK = 8
FORMS = ("float32", "bfloat16", f"bfloat16, map of rank {RANK}", "bfloat16, no map")
"""Of transitions. Rows are bfloat16 in all."""


def transition_bytes(layout: KVLayout) -> dict[str, int]:
    """Counts the bytes of a chunk's transition, by form."""
    # Factors of a map [R, W]: R + W numbers for each direction and head.
    directions = 0
    for channel in layout.parts:
        if channel.name == "map":
            own = RANK * ((channel.rows or 0) + channel.width)
            directions += layout.depth(channel.name) * channel.heads * own
    numbers = {
        channel.name: layout.depth(channel.name) * (channel.rows or 0) * channel.features for channel in layout.parts
    }
    size, without = jnp.dtype(jnp.bfloat16).itemsize, layout.transition_numbers - numbers["map"]
    counts = (
        layout.transition_bytes(),
        layout.transition_bytes(jnp.bfloat16),
        size * (without + directions),
        size * without,
    )
    return dict(zip(FORMS, counts, strict=True))


def describe_bytes(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Describes the chunks of every hybrid.

    Returns:
      For each {"model", "row_bytes" of a token, "transition_bytes" by form, "chunk_bytes" by form and length; and with a
      full-attention model "beside": its name, its "beside_row_bytes", and by form the "even_length" from which a chunk
      of the hybrid is the smaller one}.
    """
    rows = []
    for name in HYBRIDS:
        layout = decoder_of(name).layout
        row_bytes, transitions = layout.bytes_per_token(), transition_bytes(layout)
        chunks = {form: [row_bytes * length + own for length in lengths] for form, own in transitions.items()}
        row: dict[str, Any] = {"model": name, "row_bytes": row_bytes, "transition_bytes": transitions}
        row |= {"lengths": list(lengths), "chunk_bytes": {"rows alone": [row_bytes * each for each in lengths], **chunks}}
        if name in BESIDE:
            beside = decoder_of(BESIDE[name]).layout.bytes_per_token()
            even = {form: math.ceil(own / (beside - row_bytes)) for form, own in transitions.items()}
            row |= {"beside": BESIDE[name], "beside_row_bytes": beside, "even_length": even}
        rows.append(row)
    return rows


def draw_bytes(described: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the bytes of a chunk against its tokens: a panel for each hybrid with a full-attention model beside it."""
    from matplotlib.figure import Figure

    panels = [row for row in described if "beside" in row]
    figure = Figure(figsize=(3.1 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    styles = {"float32": "-", "bfloat16": "--", FORMS[2]: "-.", FORMS[3]: ":"}
    for axis, row in zip(axes, panels, strict=True):
        lengths = row["lengths"]
        beside = [row["beside_row_bytes"] * length / 2**20 for length in lengths]
        axis.plot(lengths, beside, color="#d55e00", label="full attention")
        for form, style in styles.items():
            mebibytes = [nbytes / 2**20 for nbytes in row["chunk_bytes"][form]]
            axis.plot(lengths, mebibytes, style, color="#0072b2", label=f"hybrid, {form}")
        alone = [nbytes / 2**20 for nbytes in row["chunk_bytes"]["rows alone"]]
        axis.plot(lengths, alone, color="#999999", linewidth=1, label="hybrid, rows alone")
        axis.set_title(f"{row['model']}\n{row['beside'].partition('/')[2].removesuffix('-Instruct')}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens of the chunk")
        axis.grid(color="#e5e7eb")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MiB")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=105)
