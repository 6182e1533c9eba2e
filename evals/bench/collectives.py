"""Bytes that devices exchange in a compiled program, read from its text (`compiled.as_text()`, optimised HLO).

A collective counts as often as the loops around it run, and of a branch the side that exchanges most. What a device
sends depends on the algorithm; counted is what the usual one sends, the least for all but small messages:

| collective | bytes that a device sends, of g devices in a group |
|---|---|
| all-gather | (g − 1) / g of the result |
| reduce-scatter | g − 1 times the result |
| all-reduce | 2 (g − 1) / g of the result: a reduce-scatter, then an all-gather |
| all-to-all | (g − 1) / g of the result |
| collective-permute | the result, times the pairs of devices that it names, over all devices |

So the figure is the mean over devices, and times their number the traffic of the program.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

from kvpatch_jax.errors import InputError

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"pred": 1, "bf16": 2, "c64": 8, "c128": 16}
"""Bytes of a number whose type's name does not end in its bits."""

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][a-z\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: of `KINDS`.
      result: bytes of its result on one device.
      sent: bytes that a device sends in one run of it, mean over devices.
      runs: how often it runs.
    """

    kind: str
    result: int
    sent: float
    runs: int


def exchanged_bytes(text: str) -> float:
    """Sums the bytes that a device sends in one run of a compiled program, mean over devices.

    Raises:
      InputError: as `read_collectives`.
    """
    return sum((collective.sent * collective.runs for collective in read_collectives(text)), 0.0)


def read_collectives(text: str) -> list[Collective]:
    """Reads the collectives of a compiled program, those inside loops, calls and branches too.

    Raises:
      InputError: the text is no HLO module with an entry, or a collective is in a loop whose length is not known.
    """
    computations: dict[str, list[str]] = {}
    entry, current = None, None
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match:
            current = computations.setdefault(match[1], [])
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None and line.startswith(" "):
            current.append(line)
    if entry is None:
        raise InputError(f"compiled program: got {text[:80]!r}; expected the text of an HLO module with an ENTRY")

    header = text.partition("\n")[0]
    counts = [re.search(rf"{word}=(\d+)", header) for word in ("num_partitions", "replica_count")]
    devices = math.prod(int(match[1]) for match in counts if match)
    return list(_of_computation(computations, entry, devices, {}))


def _of_computation(
    computations: dict[str, list[str]], name: str, devices: int, seen: dict[str, list[Collective]]
) -> Iterator[Collective]:
    """Yields the collectives of one computation and of all that it calls; `seen` keeps what was read."""
    if name not in seen:
        found: list[Collective] = []
        for line in computations.get(name, ()):
            found += _of_instruction(computations, line, devices, seen)
        seen[name] = found
    yield from seen[name]


def _of_instruction(
    computations: dict[str, list[str]], line: str, devices: int, seen: dict[str, list[Collective]]
) -> list[Collective]:
    match = _INSTRUCTION.match(line)
    if match is None:
        return []
    shape, operation, rest = match.groups()
    kind = operation.removesuffix("-start")
    if kind in KINDS:
        return [_collective(kind, _result_bytes(shape, operation), rest, devices)]

    # Of a branch, the side that exchanges most.
    branches = _BRANCHES.search(rest)
    names = [name.strip().lstrip("%") for name in branches[1].split(",")] if branches else []
    called = [name for name in _CALLED.findall(rest) if operation != "conditional"]
    if operation == "conditional" and not names:
        names = _CALLED.findall(rest)
    sides = [list(_of_computation(computations, name, devices, seen)) for name in names]
    found = max(sides, key=lambda side: sum(each.sent * each.runs for each in side), default=[])
    inside = [each for name in called for each in _of_computation(computations, name, devices, seen)]

    if operation == "while" and inside:
        trips = _trip_count(computations, rest)
        if trips is None:
            raise InputError(
                f"compiled program: got {inside[0].kind} in a loop of unknown length; expected known_trip_count, or a "
                "counter compared with a constant"
            )
        return [dataclasses.replace(each, runs=each.runs * trips) for each in inside]
    return [*found, *inside]


def _trip_count(computations: dict[str, list[str]], rest: str) -> int | None:
    """Returns how often a loop runs: as the compiler says, or (TPUs) by its condition, a counter below a constant.

    Such a counter begins at 0 and grows by 1, as those of jax's scans do.
    """
    if known := _TRIPS.search(rest):
        return int(known[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    lines = "\n".join(computations.get(condition[1], ())) if condition else ""
    compared = re.search(r"ROOT .* compare\(%?([\w.\-]+), %?([\w.\-]+)\), direction=LT", lines)
    if compared is None or not re.search(rf"%?{re.escape(compared[1])} = .* get-tuple-element\(", lines):
        return None
    bound = re.search(rf"%?{re.escape(compared[2])} = \S+ constant\((\d+)\)", lines)
    return None if bound is None else int(bound[1])


def _collective(kind: str, result: int, rest: str, devices: int) -> Collective:
    """Returns a collective from its attributes."""
    if kind == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{((?:\{[^}]*\},?)*)\}", rest)
        count = 0 if pairs is None else sum(first != last for first, last in re.findall(r"(\d+),(\d+)", pairs[1]))
        return Collective(kind, result, result * count / devices, 1)

    size = _group_size(rest, devices)
    share = {"all-reduce": 2 * (size - 1) / size, "reduce-scatter": size - 1}.get(kind, (size - 1) / size)
    return Collective(kind, result, float(result * share), 1)


def _group_size(rest: str, devices: int) -> int:
    """Returns how many devices exchange with each other, from any of the three forms of `replica_groups`."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return len(listed[1].split(","))
    return devices


def _result_bytes(shape: str, operation: str) -> int:
    """Returns the bytes of a result. A started gather or permute lists its operand before it."""
    arrays = [_bytes(dtype, extent) for dtype, extent in _ARRAY.findall(shape)]
    if operation in ("all-gather-start", "collective-permute-start") and len(arrays) > 1:
        return arrays[1]
    return sum(arrays)


def _bytes(dtype: str, extent: str) -> int:
    bits = re.search(r"\d+", dtype)
    item = ITEM_BYTES.get(dtype) or math.ceil(int(bits[0]) / 8 if bits else 0)
    return item * math.prod(map(int, filter(None, extent.split(","))))
