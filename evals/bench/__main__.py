"""Runs a benchmark suite, prints its JSON and, with --out, writes it. See `python -m evals.bench --help`."""

import json
import pathlib

from absl import app, flags

from . import patch

SUITES = {"patch": patch.run}

_SUITE = flags.DEFINE_enum("suite", "patch", sorted(SUITES), "Which benchmark to run.")
_OUT = flags.DEFINE_string("out", None, "Directory to write bench_<suite>.json to.")
_DEFICITS = flags.DEFINE_string(
    "deficits", None, "An .npz of real deficits, each [L, T, F] or [L, T, K, H]; their energy ratio is reported."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Interleaved repeats of each timing.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the synthetic data.")


def main(argv: list[str]) -> None:
    """Runs the suite that the flags name."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    result = SUITES[_SUITE.value](repeats=_REPEATS.value, seed=_SEED.value, deficits=_DEFICITS.value)
    text = json.dumps(result, indent=2)
    print(text)
    if _OUT.value:
        directory = pathlib.Path(_OUT.value)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"bench_{_SUITE.value}.json").write_text(text + "\n")


if __name__ == "__main__":
    app.run(main)
