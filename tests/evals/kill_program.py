"""Measures parts that take a moment each, until it is killed: `python kill_program.py OUT INDEX COUNT`."""

import sys
import time
from pathlib import Path

from evals.harness.parts import Part, Shard, run_parts

CONFIG = {"model": "toy", "seed": 3}


def parts(seconds: float = 0.0) -> list[Part]:
    """Lists thirty parts, whose records depend on their number alone."""

    def measure(number: int):
        time.sleep(seconds)
        for line in range(2):
            yield {"arm": f"arm{line}", "value": number * 0.1 + line}

    return [Part(f"part {number}", lambda number=number: measure(number)) for number in range(30)]


if __name__ == "__main__":
    run_parts(Path(sys.argv[1]), CONFIG, parts(0.02), Shard(int(sys.argv[2]), int(sys.argv[3])))
