"""Plants the faults of `faults.toml` one at a time, and says which of them the default tests catch.

    python -m tests.tools.mutations [--only=WORD] [--jobs=2]

The tests must pass in a worktree of the last commit, where each fault is planted then. The tests of its own room run
first, then all others, up to the first failure. Prints a row of a table for each fault, and the number that was caught.
"""

import argparse
import concurrent.futures
import contextlib
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIMIT = 1800
"""Seconds that the tests may take; a fault that makes them hang is caught."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Fault(NamedTuple):
    """A change of one place in the library.

    Attributes:
      path: the module. before, after: what stands there once, and what stands there with the fault.
      shows: what goes wrong.
    """

    path: str
    before: str
    after: str
    shows: str

    @property
    def room(self) -> str:
        """The folder that has the module: of the library, or `models`."""
        first, second, *_ = self.path.split("/")
        return second if first == "kvpatch_jax" else first


@contextlib.contextmanager
def worktrees(count: int) -> Iterator[list[Path]]:
    """Makes worktrees of the last commit, and removes them."""
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(number) for number in range(count)]
        try:
            for tree in trees:
                subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, "HEAD"], cwd=ROOT, check=True)
            yield trees
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=False)


def first_failure(tree: Path, arguments: list[str]) -> str | None:
    """Runs the default tests up to the first failure, which is returned; None where all pass."""
    environment = os.environ | {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(ROOT / "out" / "jax")}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *arguments]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return "no end"
    if done.returncode == 0:
        return None
    failed = FAILED.search(done.stdout)
    return failed[1] if failed else f"exit {done.returncode}: {(done.stdout + done.stderr)[-200:]}"


def try_fault(fault: Fault, tree: Path) -> str | None:
    """Plants a fault in a worktree, and returns the test that catches it."""
    path, room = tree / fault.path, f"tests/{fault.room}"
    text = path.read_text()
    assert text.count(fault.before) == 1, (
        f"{fault.path}: got {text.count(fault.before)} of {fault.before!r}; expected 1"
    )
    path.write_text(text.replace(fault.before, fault.after))
    try:
        return first_failure(tree, [room]) or first_failure(tree, [f"--ignore={room}", "tests"])
    finally:
        path.write_text(text)


def main() -> None:
    """Tries the faults whose path or words hold `--only`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a word of the paths or of what goes wrong")
    parser.add_argument("--jobs", type=int, default=2, help="faults that are tried at a time")
    options = parser.parse_args()

    listed = tomllib.loads(Path(__file__).with_name("faults.toml").read_text("utf-8"))["fault"]
    faults = [fault for fault in (Fault(**row) for row in listed) if options.only in fault.path + " " + fault.shows]
    # A test that fails anyway would seem to catch every fault.
    with worktrees(1) as (tree,):
        failed = first_failure(tree, ["-n", str(options.jobs)])
    if failed is not None:
        raise SystemExit(f"mutations: got {failed}, which fails without a fault; expected all tests to pass")
    print("| module | fault | caught by | seconds |\n|---|---|---|---|", flush=True)
    with worktrees(options.jobs) as trees:
        free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def run(fault: Fault) -> bool:
            tree, start = free.get(), time.monotonic()
            try:
                test = try_fault(fault, tree)
            finally:
                free.put(tree)
            row = (fault.path, fault.shows, test or "**nothing**", f"{time.monotonic() - start:.0f}")
            print(f"| {' | '.join(row)} |", flush=True)
            return test is not None

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            caught = list(pool.map(run, faults))
    print(f"{sum(caught)} of {len(caught)} caught")


if __name__ == "__main__":
    main()
