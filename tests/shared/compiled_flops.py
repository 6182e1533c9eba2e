"""FLOPs of a compiled program, read from its text."""

import re

import numpy as np


def hlo_flops(text: str) -> int:
    """Counts the products of a compiled program from its text: dots, called computations, loops by their trip count."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{?.*->.*\{$", line)
        if header and not line.startswith(" "):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name and line.startswith("  "):
            bodies[name].append(line)

    def count(computation: str) -> int:
        shapes: dict[str, list[int]] = {}
        total = 0
        for line in bodies[computation]:
            found = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\]", line)
            if found:
                shapes[found[1]] = [int(size) for size in found[2].split(",") if size]
            dot = re.search(r" dot\((.*?)\), (.*)", line)
            if dot and found:
                left = re.findall(r"%([\w.\-]+)", dot[1])[0]
                inner = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", dot[2])
                assert inner is not None
                sizes = [shapes[left][int(axis)] for axis in inner[1].split(",")]
                total += 2 * int(np.prod(shapes[found[1]])) * int(np.prod(sizes))
            times = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            for called in re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line):
                total += count(called) * (int(times[1]) if times and "body=" in line else 1)
        return total

    return count(entry)
