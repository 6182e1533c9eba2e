"""Whether the window pays: the loop beside re-prefill and prefix caches, break-even of a patch, cost against length.

Parts are measured one by one and kept in `--out` as they are finished (`window_parts.json`): the same command goes on
from there, and measures again what was deleted. Parts of another seed, number of repeats or size are refused.
"""

import functools
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError

from ..command_line import errors_as_one_line
from ..results.environment import environment
from ..results.parts import make_out
from ..results.tables import markdown_table
from . import window_break_even, window_lengths, window_loop
from .checkpoints import tiny_config
from .window_material import Material, largest_shipped, random_material, shipped_material

IMAGES, WINDOWS = 40, (4, 16)
RECALLS = 6
"""Steps that recall an image, the one that warms up included."""
PARTS = "window_parts.json"
FLOPS_BAR, HIT_BAR, FASTER_BAR, REMEMBER_BAR = 1.05, 1.3, 3.0, 1e-4
"""FLOPs over the image's prefill behind the window and the question's; seconds over a prefix hit's; re-prefill's
seconds over ours, at 16 images on Qwen2-0.5B's shape; nats to what the window promises."""
Part = dict[str, Any]


def run(*, repeats: int = 5, seed: int = 0, out: str | None = None, large: bool = False, quick: bool = False) -> Part:
    """Measures all parts that `out` does not have yet.

    Args:
      repeats: turns of what is timed by itself. seed: of images, weights and questions.
      out: folder of the parts and the figure; None keeps nothing.
      large: also a random model of Qwen2-0.5B's shape with images of 256 tokens.
      quick: a tiny random model and short windows: shows that it runs.
    """
    folder = None if out is None else Path(out)
    config = {"seed": seed, "repeats": repeats, "quick": quick}
    with errors_as_one_line():
        parts = {} if folder is None else kept_parts(folder, config)
    for name, measure in _parts(repeats, seed, large, quick).items():
        if name in parts:
            continue
        parts[name] = measure() | {"environment": environment()}
        print(f"{name}: measured", flush=True)
        if folder is not None:
            keep_parts(folder, config, parts)
    if folder is not None:
        window_lengths.draw(parts["lengths"], folder / "window_lengths.png")
    return {"config": config, "environment": environment(), "parts": parts}


def kept_parts(folder: Path, config: Mapping[str, Any]) -> dict[str, Part]:
    """Reads the parts that a folder has, and makes the folder.

    Raises:
      InputError: `folder` is a file, or holds parts of another `config`, or a file that is not of parts.
    """
    make_out(folder)
    file = folder / PARTS
    if not file.exists():
        return {}
    try:
        kept = json.loads(file.read_bytes())
        found, parts = kept["config"], dict(kept["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is not a file of parts ({error!r}): delete it, or choose another --out") from error
    if found != config:
        raise InputError(f"{file} holds parts of {found}; expected {dict(config)}: choose another --out")
    return parts


def keep_parts(folder: Path, config: Mapping[str, Any], parts: Mapping[str, Part]) -> None:
    """Writes all parts: whole, or not at all."""
    new = folder / f"{PARTS}.new"
    new.write_text(json.dumps({"config": config, "parts": parts}, indent=1) + "\n")
    os.replace(new, folder / PARTS)


def _parts(repeats: int, seed: int, large: bool, quick: bool) -> dict[str, Callable[[], Part]]:
    """What is measured, by name; models are made when they are needed, and once."""
    if quick:
        tiny = functools.cache(lambda: random_material(8, seed, tiny_config("Qwen2ForCausalLM"), tokens=32))
        lengths = lambda: window_lengths.measure((1, 4, 16), repeats=1, run_tokens=32)
        return {"lengths": lengths, **_of_material("tiny", tiny, (3,), 2, 1, rank=4)}
    shipped = functools.cache(lambda: shipped_material(largest_shipped(), IMAGES, seed))
    found = {"lengths": lambda: window_lengths.measure(repeats=repeats)}
    found |= _of_material("shipped", shipped, WINDOWS, 3, repeats)
    if large:
        shaped = functools.cache(lambda: random_material(IMAGES, seed))
        found |= _of_material("0.5B", shaped, WINDOWS, 1, min(repeats, 3), steps=3, once=True)
    return found


def _of_material(
    name: str,
    make: Callable[[], Material],
    windows: Sequence[int],
    apart: int,
    repeats: int,
    steps: int | None = None,
    rank: int = window_loop.RANK,
    once: bool = False,
) -> dict[str, Callable[[], Part]]:
    """The parts of one backbone: loops, compared at `steps` (None: all) steps that lie `apart`, and break-even.

    Steps of which a re-prefill takes a minute (`once`) are compared early on, where the history is short that the
    reference of remembering runs whole; recalls and break-even are measured at the shortest window alone.
    """
    found: dict[str, Callable[[], Part]] = {}
    for size in windows:

        def loop(size: int = size) -> Part:
            material = make()
            full = tuple(range(size, len(material.images), apart))
            recalls = RECALLS if not once else 2 * (size == windows[0])
            return window_loop.one_loop(material, size, full[:steps], recalls, once)

        found[f"loop, {name}, window {size}"] = loop
    behind = windows[0] if once else windows[-1]
    found[f"break-even, {name}"] = lambda: window_break_even.measure(make(), behind, repeats, rank)
    return found


# -------------------------------------------------------------------------------------------------------- rows


def rows(parts: Mapping[str, Part]) -> list[dict[str, Any]]:
    """Figures of all parts: what, value, spread, bar, and whether it is within."""
    found: list[dict[str, Any]] = []
    for name, part in parts.items():
        if name.startswith("loop"):
            found += [{"part": name} | row for row in loop_rows(part)]
        elif name.startswith("break-even"):
            found += [{"part": name} | row for row in break_even_rows(part)]
        else:
            found += [{"part": name} | _row(bar["what"], [bar["value"]], bar["at_most"]) for bar in part["bars"]]
    return found


def loop_rows(part: Part) -> list[dict[str, Any]]:
    """Figures of one loop; steps whose window is full, without the one that warms up."""
    config, flops, first = part["config"], part["flops"], part["config"]["window"]
    over = lambda way, other: [a / b for a, b in zip(flops[way][first:], flops[other][first:], strict=True)]
    padded = [sum(tally["padded_flops"] for tally in step["kinds"].values()) for step in part["warm"]["steps"]]
    with_padding = [own / bar for own, bar in zip(padded[first:], flops["bar"][first:], strict=True)]
    found = [
        _row("FLOPs over image behind the window and question", over("window", "bar"), FLOPS_BAR, judged=max),
        _row("the same with the padding of buckets", with_padding),
        _row("FLOPs of re-prefill over ours", over("re-prefill", "window")),
        _row("FLOPs of a prefix cache over ours", over("prefix cache", "window")),
    ]
    for unit in ("seconds", "cpu"):
        times = _times(part, unit)
        word = {"seconds": "time", "cpu": "CPU time"}[unit]
        ratio = lambda way, other, times=times: [
            times[way][step] / times[other][step] for step in times[way] if step in times[other]
        ]
        judged = unit == "seconds"
        found.append(_row(f"{word} over a prefix hit's", ratio("window", "prefix hit"), HIT_BAR if judged else None))
        faster = FASTER_BAR if judged and first == 16 and "0.5B" in config["backbone"] else None
        found.append(_row(f"{word} of re-prefill over ours", ratio("re-prefill", "window"), at_least=faster))
        found.append(_row(f"{word} of a prefix cache over ours", ratio("prefix cache", "window")))
        found.append(_row(f"{word} of a step, seconds", list(times["window"].values())))
        canonical = list(times["canonical"].values())
        found.append(_row(f"{word} of storing a canonical, off the answer's path, seconds", canonical))
    own = [entry for entry in part["compared"] if entry["way"] == "window"]
    found += [
        _row("KL to what the window promises (remember)", [e["remember"]["kl"] for e in own], REMEMBER_BAR, judged=max),
        _row("flips against it", [entry["remember"]["flip"] for entry in own], 0.0, judged=max),
        _row("KL to re-prefill (forget)", [entry["forget"]["kl"] for entry in own], judged=_mean),
        _row("flips against it", [entry["forget"]["flip"] for entry in own], judged=_mean),
    ]
    found += recall_rows(part.get("recalls", ()))
    for name in ("cold", "warm"):
        if name not in part:
            continue
        loop = part[name]
        moved = sum(tally["bytes"] for tally in loop["ledger"].values())
        found += [
            _row(f"{name} loop: seconds", [float(loop["seconds"])]),
            _row(f"{name} loop: forwards", [float(loop["forwards"])]),
            _row(f"{name} loop: programs compiled", [float(loop["compilations"])]),
            _row(f"{name} loop: MB of KV moved", [moved / 1e6]),
        ]
    return found


def recall_rows(recalls: Sequence[Part]) -> list[dict[str, Any]]:
    """Figures of steps that bring an image back by a stored patch; the first warms up."""
    counted = [step for step in recalls if not step["warm_up"]]
    if not counted:
        return []
    over = lambda unit, way, other: [step[unit][way] / step[unit][other] for step in counted]
    found = []
    for unit, word in (("seconds", "time"), ("cpu", "CPU time"), ("flops", "FLOPs")):
        found.append(_row(f"recall by a patch: {word} over a prefix hit's", over(unit, "window", "prefix hit")))
        found.append(_row(f"recall by a patch: {word} of re-prefill over ours", over(unit, "re-prefill", "window")))
    found.append(_row("recall by a patch: FLOPs of a prefix cache over ours", over("flops", "prefix cache", "window")))
    for word in ("to a prefill behind the window", "forget"):
        to = "to re-prefill (forget)" if word == "forget" else word
        found.append(_row(f"recall by a patch: KL {to}", [step[word]["kl"] for step in counted], judged=_mean))
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _times(part: Part, unit: str) -> dict[str, dict[int, float]]:
    """Seconds of each way, by step, at the steps that count."""
    found: dict[str, dict[int, float]] = {}
    for entry in part["compared"]:
        if not entry["warm_up"]:
            found.setdefault(entry["way"], {})[entry["step"]] = entry[unit]
    return found


def break_even_rows(part: Part) -> list[dict[str, Any]]:
    """Figures of break-even: reuses by case, and what each part of it takes."""
    found = []
    for unit, word in (("seconds", "time"), ("cpu", "CPU time")):
        for case, value in part["reuses"][unit].items():
            bar = window_break_even.BARS.get(case) if unit == "seconds" else None
            found.append(_row(f"reuses until it pays, {case}, {word}", [value], bar))
    for what, taken in part["measured"].items():
        found.append(_row(f"{what}, seconds", [taken["seconds"]]))
    found.append(_row("FLOPs of a reuse over a prefill's", [_share(part["flops"])]))
    return found


def _share(flops: Mapping[str, int]) -> float:
    return flops["patch placed"] / flops["prefill behind the window"]


def _row(
    what: str,
    values: Sequence[float],
    at_most: float | None = None,
    *,
    at_least: float | None = None,
    judged: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, Any]:
    """A figure of several values: `judged` of them is held against the bar, where there is one."""
    value = judged(values)
    row = {"what": what, "value": value, "low": min(values), "high": max(values), "n": len(values)}
    if at_most is not None:
        row |= {"bar": f"at most {at_most:g}", "within": bool(value <= at_most)}
    if at_least is not None:
        row |= {"bar": f"at least {at_least:g}", "within": bool(value >= at_least)}
    return row


def table(result: Part) -> str:
    """The result as Markdown."""
    lines = []
    for row in rows(result["parts"]):
        spread = f"{row['low']:.3g} to {row['high']:.3g}" if row["n"] > 1 else ""
        within = {True: "yes", False: "no", None: ""}[row.get("within")]
        lines.append([row["part"], row["what"], f"{row['value']:.3g}", spread, row.get("bar", ""), within])
    return markdown_table(("part", "what", "value", "from … to", "bar", "within"), lines) + "\n"
