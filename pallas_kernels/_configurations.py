"""Block sizes per kind of device: what was shipped or chosen for a shape, else nothing and the kernel's heuristic.

A configuration is a JSON file: {"device": kind, "source": how it came to be, "operations": {name: {shape: block}}}.
Shapes are words such as "heads=4 width=128 rank=32 bytes=2"; any number of tokens takes the same block.
"""

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jax

from ._target import target
from .errors import KernelShapeError

_CHOSEN: list[Mapping[str, Any]] = []
TIMED = "timed"
"""The `source` of a configuration that a whole run of `tune` on the device made."""
RANKS = (0, 16, 32, 64, 128, 256)


def shape_word(heads: int, width: int, rank: int, itemsize: int) -> str:
    """The word a configuration knows a shape by; the rank rounded up to one of `RANKS`."""
    rounded = next((each for each in RANKS if rank <= each), rank)
    return f"heads={heads} width={width} rank={rounded} bytes={itemsize}"


def file_name(kind: str) -> str:
    """The file of a kind of device: its name in small letters, spaces as underscores."""
    return f"{kind.lower().replace(' ', '_')}.json"


@functools.cache
def shipped(kind: str) -> Mapping[str, Any] | None:
    """The configuration that came with the package for this kind of device; None where there is none."""
    path = resources.files(__package__) / "configurations" / file_name(kind)
    return json.loads(path.read_text()) if path.is_file() else None


@contextlib.contextmanager
def configured_by(path: str | Path) -> Iterator[None]:
    """Inside, kernels take block sizes from this file, as `python -m pallas_kernels.tune` writes it.

    It acts while a function is traced: functions that are already compiled stay as they are.

    Raises:
      KernelShapeError: a file that is no configuration.
    """
    body = json.loads(Path(path).read_text())
    if not isinstance(body, dict) or not isinstance(body.get("operations"), dict):
        raise KernelShapeError(f"configuration {str(path)!r}: expected an object with 'device' and 'operations'")
    _CHOSEN.append(body)
    try:
        yield
    finally:
        _CHOSEN.pop()


def block_of(operation: str, heads: int, width: int, rank: int, itemsize: int) -> Mapping[str, int] | None:
    """The block for this shape on the device that is traced for; None where no configuration has it."""
    aimed = target()
    body = _configuration(jax.devices()[0].device_kind if aimed is None else aimed.kind)
    word = shape_word(heads, width, rank, itemsize)
    return None if body is None else body["operations"].get(operation, {}).get(word)


def timed(kind: str) -> bool:
    """Whether the configuration for this kind of device came from a run there, in which the kernels' results were held
    against the XLA path's. Without such a run nothing is known of a kernel but that it compiles."""
    body = _configuration(kind)
    return body is not None and body.get("source") == TIMED


def _configuration(kind: str) -> Mapping[str, Any] | None:
    """The one that `configured_by` chose, if it is for this kind, else the shipped one."""
    chosen = _CHOSEN[-1] if _CHOSEN else None
    return chosen if chosen is not None and chosen.get("device") == kind else shipped(kind)
