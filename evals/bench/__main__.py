"""Benchmarks, each side beside its peers: `python -m evals.bench --suite=kernels,operators --out=out/bench`.

Every side is checked before it is timed, and timed in turns with the others; a wrong one is refused, and the status is
1. Prints tables and, with --out, writes results.json: "config", "environment", "rows" and "notes".

  kernels    rotate_patch, splice, block_product and factorise beside XLA, a copy and a full SVD
  operators  apply_patch, pool.splice, relocate and form_patch beside x · 2, memcpy and prefills
  store      a ChunkStore beside raw files, safetensors, Orbax, SQLite, diskcache and LMDB, on the disk of --out
  window     an agent's loop: a session beside re-prefill and prefix caches, on a decoder and a hybrid
  batch      questions about pairs of documents: patched, blind and exact; SmolLM2 with --only=SmolLM2
  first_steps  what a session over images of ten sizes compiles, and what the next process finds compiled
  backbones  prefill and decode of every architecture, beside transformers with --torch-python
  costs      seconds per launch, FLOP and byte of a window's edits, for plans: writes device_costs.json
"""

from ..harness import program

SUITES = ["kernels", "operators", "store", "window", "batch", "first_steps", "backbones", "costs"]


def main() -> None:
    """Runs the benchmarks that --suite and --only name."""
    import importlib
    from pathlib import Path

    from absl import flags

    from kvpatch_jax.errors import InputError

    from ..harness.environment import environment
    from ..harness.frame import write_rows
    from .benchmark import BenchOptions, measure, table, wrong_rows

    values = flags.FLAGS
    if unknown := sorted(set(values.suite) - set(SUITES)):
        raise InputError(f"--suite: got {unknown[0]!r}; expected some of {', '.join(SUITES)}")
    options = BenchOptions(values.quick, out=values.out, torch_python=values["torch-python"].value)
    chosen = []
    for name in values.suite:
        for benchmark in importlib.import_module(f"{__package__}.{name}").suite(options):
            if any(word in benchmark.key for word in values.only) if values.only else not benchmark.large:
                chosen.append(benchmark)
    if not chosen:
        raise InputError(f"--only: got {','.join(values.only)}, which no benchmark of {','.join(values.suite)} has")

    config = {"suite": values.suite, "quick": values.quick, "repeats": values.repeats}
    results = {"config": config, "environment": environment(), "rows": [], "notes": []}
    for benchmark in chosen:
        print(f"\n{benchmark.key} ...", flush=True)
        rows, notes = measure(benchmark, 2 if values.quick else values.repeats)
        print(table(rows), *notes, sep="\n", flush=True)
        results["rows"] += rows
        results["notes"] += notes
        # Written after every benchmark, whatever becomes of the rest.
        if values.out:
            Path(values.out).mkdir(parents=True, exist_ok=True)
            write_rows(results, Path(values.out))

    if len(chosen) > 1:
        print(f"\n{table(results['rows'])}")
    if wrong := wrong_rows(results["rows"]):
        raise InputError(f"benchmarks: got {len(wrong)} wrong sides, first {wrong[0]}; expected what their peers give")


if __name__ == "__main__":
    from absl import flags

    flags.DEFINE_list("suite", SUITES, "What is measured.")
    flags.DEFINE_list("only", [], "Words: benchmarks whose name or case has one of them, large ones too.")
    flags.DEFINE_bool("quick", False, "Tiny sizes: a preview, not a measurement.")
    flags.DEFINE_integer("repeats", 9, "Turns of each comparison.", lower_bound=1)
    flags.DEFINE_string("out", None, "Folder of results.json; its disk is the store's.")
    flags.DEFINE_string("torch-python", None, "backbones: an interpreter with torch and transformers to compare with.")
    program.start(main, "evals.bench: loading libraries", needs=("absl",))
