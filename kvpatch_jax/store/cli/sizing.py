"""`python -m kvpatch_jax.store sizing`: prints what a store needs for one engine, ten, a thousand."""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core import KVLayout
from ...errors import InputError
from ...traces import Trace
from ...utils import strict_json
from ...utils.sizes import size_of
from ..object_bytes import ObjectBytes, canonical_bytes, layout_of_config, patch_bytes
from ..reuse import DAY, RequestLog, RevisitCurve
from ..sizing import FleetSize, TierSettings, Workload, size_fleet

USAGE = """usage: python -m kvpatch_jax.store sizing --config=DIR --trace=FILE [flags]
       python -m kvpatch_jax.store sizing --config=DIR --chunks-per-day=N --revisits=CURVE [flags]

Prints disk, memory, network and remote requests of a store. Nothing is opened but the named files.
"""
_LARGEST_CONFIG = 1 << 24
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY}
_POINT = re.compile(r"(\d+(?:\.\d+)?)([smhd]):(0|1|0?\.\d+|1\.0*|\d{1,2}(?:\.\d+)?%)")


def _flags() -> tuple[Any, type[Exception]]:
    from absl import flags

    values = flags.FlagValues()

    def text(name: str, default: str | None, what: str) -> None:
        flags.DEFINE_string(name, default, what, flag_values=values)

    text("config", None, "Directory of the served model with its config.json, that file, or FILE#NAME of several.")
    text("trace", None, "A trace, as kvpatch_jax.traces.Recorder writes it: its requests, at its rate.")
    flags.DEFINE_float("chunks-per-day", None, "Requests for chunks of one engine; of a trace too.", flag_values=values)
    text("revisits", None, "Share of requests whose chunk was last asked for within a time: 1m:0.2,1h:0.5,1d:0.6.")
    flags.DEFINE_integer("tokens", 1200, "Tokens of a chunk, where a trace does not say them.", flag_values=values)
    flags.DEFINE_list("encoding", ["unreduced"], "Encodings of canonicals, a table each.", flag_values=values)
    flags.DEFINE_integer("patches", 0, "Patches that are kept and read with a chunk.", flag_values=values)
    flags.DEFINE_integer("rank", 32, "Rank of the patches.", flag_values=values)
    text("host", "1 GiB", "Budget of an engine's host tier.")
    text("disk", None, "Budget of an engine's disk; without it, it grows.")
    flags.DEFINE_bool("remote", True, "Whether there is a remote store, shared by all engines.", flag_values=values)
    text("retention", None, "How long after its last use the remote store keeps an object, such as 7d.")
    flags.DEFINE_float("stay", 1.0, "Share of revisits that come to the engine asked last.", flag_values=values)
    flags.DEFINE_float("deleted", 0.0, "Chunks that are deleted over chunks that are put.", flag_values=values)
    flags.DEFINE_list("engines", ["1", "10", "1000"], "Numbers of engines.", flag_values=values)
    flags.DEFINE_bool("json", False, "Print one JSON object.", flag_values=values)
    flags.DEFINE_bool("help", False, "Print this.", flag_values=values)
    return values, flags.Error


def lines(arguments: Sequence[str]) -> Iterator[str]:
    """Yields what the program prints. Raises InputError and other errors of the library if the flags are wrong."""
    values, wrong = _flags()
    try:
        extra = values(["sizing", *arguments])[1:]
    except wrong as error:
        raise InputError(f"sizing: {error}") from None
    if values.help:
        yield USAGE + values.get_help()
        return
    if extra:
        raise InputError(f"sizing: got {extra[0]!r:.80}; expected flags only")
    sized = _sized(values)
    yield json.dumps(_without_infinity(sized)) if values.json else "\n\n".join(map(table, sized))


def _sized(values: Any) -> list[dict[str, Any]]:
    """Returns a dictionary for each encoding: its bytes, the workload, and the sizes by number of engines."""
    if values.config is None:
        raise InputError("sizing: got no --config; expected the directory of a model, or its config.json")
    layout = layout_of_config(_config(values.config))
    workload, tokens = _workload(values)
    retention = None if values.retention is None else _seconds(values.retention, "--retention")
    disk = None if values.disk is None else size_of(values.disk, "--disk")
    settings = TierSettings(size_of(values.host, "--host"), disk, remote=values.remote, retention=retention)

    sized: list[dict[str, Any]] = []
    for word in values.encoding:
        parts = _parts(layout, tokens, None if word == "unreduced" else word, values.patches, values.rank)
        fleets = [size_fleet(workload, parts, settings, _whole(number)) for number in values.engines]
        rates = {"chunks_per_day": workload.rate * DAY, "tokens": tokens, "patches": values.patches}
        sizes = {"file": sum(part.file for part in parts), "memory": sum(part.memory for part in parts)}
        sized.append({"encoding": word, **rates, **sizes, "fleets": [_plain(fleet) for fleet in fleets]})
    return sized


def _config(path: str) -> Mapping[str, Any]:
    """Reads a model's config.json, or one of a file of several by its name."""
    file, _, name = path.partition("#")
    file = os.path.join(file, "config.json") if os.path.isdir(file) else file
    try:
        if os.path.getsize(file) > _LARGEST_CONFIG:
            raise InputError(f"--config: {file}: got more than {_LARGEST_CONFIG} bytes; expected a config.json")
        found = strict_json.object_of(Path(file).read_bytes(), f"--config: {file}", InputError)
    except OSError as error:
        raise InputError(f"--config: {file}: got {error.strerror}; expected a file that can be read") from error
    if not name:
        return found
    if not isinstance(found.get(name), dict):
        raise InputError(f"--config: got no {name!r:.80} in {file}; expected one of {', '.join(found):.300}")
    chosen = found[name].get("config", found[name])
    if not isinstance(chosen, dict):
        raise InputError(f"--config: {name}: got a {type(chosen).__name__}; expected a configuration")
    return chosen


def _workload(values: Any) -> tuple[Workload, int]:
    """Returns the workload of the flags, and the tokens of a usual chunk."""
    rate = None if values["chunks-per-day"].value is None else values["chunks-per-day"].value / DAY
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InputError(f"--chunks-per-day: got {rate * DAY}; expected a number above 0")
    if values.trace is not None:
        log = RequestLog.of(Trace.read(os.path.expanduser(values.trace)), values.tokens)
        log = log if rate is None else log.at_rate(rate)
        return Workload.of_log(log, values.stay, values.deleted), max(round(float(log.tokens.mean())), 1)
    if rate is None or values.revisits is None:
        raise InputError("sizing: got no --trace; expected one, or --chunks-per-day and --revisits")
    return Workload(rate, curve_of(values.revisits), None, values.stay, values.deleted), values.tokens


def curve_of(text: str) -> RevisitCurve:
    """Parses a curve of revisits, "1m:0.2,1h:0.5,1d:60%".

    Raises:
      InputError: it is no such text, or times and shares do not ascend.
    """
    seconds, shares = list[float](), list[float]()
    for point in text.split(","):
        match = _POINT.fullmatch(point.strip())
        if match is None:
            raise InputError(f"--revisits: got {point!r:.80}; expected a time and a share, such as 1h:0.5")
        seconds.append(float(match[1]) * _UNITS[match[2]])
        shares.append(float(match[3].rstrip("%")) / (100 if match[3].endswith("%") else 1))
    return RevisitCurve(np.array(seconds), np.array(shares))


def _seconds(text: str, what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise InputError(f"{what}: got {text!r:.80}; expected a time such as 90s, 15m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise InputError(f"--engines: got {text!r:.80}; expected whole numbers, such as 1,10,1000")
    return int(text)


def _parts(layout: KVLayout, tokens: int, encoding: str | None, patches: int, rank: int) -> tuple[ObjectBytes, ...]:
    parts = (canonical_bytes(layout, tokens, encoding),)
    if patches:
        one = patch_bytes(layout, tokens, rank)
        parts += (ObjectBytes(one.file * patches, one.memory * patches, patches, one.long_header),)
    return parts


def _plain(fleet: FleetSize) -> dict[str, Any]:
    return {**dataclasses.asdict(fleet), "hits": fleet.hits._asdict()}


def _without_infinity(value: Any) -> Any:
    """Returns a value in which infinite numbers are None, which JSON has."""
    if isinstance(value, dict):
        return {name: _without_infinity(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_infinity(inner) for inner in value]
    return None if isinstance(value, float) and math.isinf(value) else value


# ------------------------------------------------------------------------------------------------------------ printing


def table(sized: Mapping[str, Any]) -> str:
    """Formats the sizes for one encoding as aligned lines, a column for each number of engines."""
    with_patches = f" with {sized['patches']} patches" if sized["patches"] else ""
    title = (
        f"{sized['encoding']}: {_bytes(sized['file'])} a chunk of {sized['tokens']:,} tokens{with_patches} "
        f"({_bytes(sized['memory'])} in memory), {sized['chunks_per_day']:,.0f} chunks a day and engine"
    )
    rows = [["engines", *(f"{fleet['engines']:,}" for fleet in sized["fleets"])]]
    for name, format_of in _ROWS.items():
        rows.append([name, *(format_of(fleet) for fleet in sized["fleets"])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = [title]
    for first, *cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        shown.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(shown)


def _bytes(number: float | int) -> str:
    """Formats bytes in three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:,.0f} EB"


def _time(seconds: float | int) -> str:
    if math.isinf(seconds):
        return "for good"
    for unit, one in (("d", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= one:
            return f"{seconds / one:.3g} {unit}"
    return f"{seconds:.3g} s"


def _disk(fleet: Mapping[str, Any]) -> str:
    grown = f", + {_bytes(fleet['disk_growth'])} a day" if fleet["disk_growth"] else ""
    return _bytes(fleet["disk_bytes"]) + grown


def _remote(fleet: Mapping[str, Any]) -> str:
    kept, grown = fleet["remote_bytes"], fleet["remote_growth"]
    parts = ([] if kept is None else [_bytes(kept)]) + ([f"+ {_bytes(grown)} a day"] if grown else [])
    return ", ".join(parts)


_ROWS = {
    "hits: host": lambda fleet: f"{fleet['hits']['host']:.1%}",
    "hits: disk": lambda fleet: f"{fleet['hits']['disk']:.1%}",
    "hits: remote": lambda fleet: f"{fleet['hits']['remote']:.1%}",
    "computed": lambda fleet: f"{fleet['hits']['missed']:.1%}",
    "host memory": lambda fleet: _bytes(fleet["host_bytes"]),
    "disk": _disk,
    "disk keeps a chunk": lambda fleet: _time(fleet["residence"]),
    "disk writes": lambda fleet: f"{_bytes(fleet['disk_writes'])}/s",
    "remote store": _remote,
    "network out": lambda fleet: f"{_bytes(fleet['sent'])}/s",
    "network in": lambda fleet: f"{_bytes(fleet['received'])}/s",
    "remote writes": lambda fleet: f"{fleet['remote_puts']:.3g}/s",
    "remote reads": lambda fleet: f"{fleet['remote_gets']:.3g}/s",
    "remote deletions": lambda fleet: f"{fleet['remote_deletes']:.3g}/s",
    "remote listings": lambda fleet: f"{fleet['remote_lists']:.3g}/s",
}
