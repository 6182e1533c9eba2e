"""The evaluation: `python -m evals.run [--config=main] [--set n=64] [--quick]`.

A configuration (`evals/configs/*.toml`, or a path) names data sets, models, methods and sizes. Every method of
`kvpatch_jax.repair` is measured against a re-prefill on the same contexts, part by part; a killed run goes on where it
was. Leaves parts.jsonl, results.json, rows.csv, pictures and report.html in --out.
"""

from absl import flags

from .harness import program

_CONFIG = flags.DEFINE_string("config", "main", "name of a file of evals/configs without .toml, or a path of one")
_SET = flags.DEFINE_multi_string("set", [], "key=value in place of the configuration's: n=64, models=a,b, seed=7")
_QUICK = flags.DEFINE_boolean("quick", False, "few contexts: a preview, not a measurement")
_ALL = flags.DEFINE_boolean("all", False, "every method and setting of the configuration, not the first table's alone")
_OUT = flags.DEFINE_string("out", None, "folder of the run; by default out/run, of other configurations out/NAME")
_PUBLISH = flags.DEFINE_boolean("publish", False, "also write docs/NAME.json, from which pages are filled")
program.define_sharing(shards=2)


def main() -> None:
    """Runs the configuration that was asked for, and writes its report."""
    import time
    from pathlib import Path

    from .harness import config as configurations
    from .harness import report, runner
    from .harness.parts import sharing

    began = time.perf_counter()
    variants = [name for name, asked in (("all", _ALL.value), ("quick", _QUICK.value)) if asked]
    config = configurations.read_config(_CONFIG.value, _SET.value, variants)
    out = Path(_OUT.value or f"out/{'run' if config.name == 'main' else config.name}")
    print(f"{config.name}: {config.title}", flush=True)

    results = runner.run(config, out, sharing(flags.FLAGS))
    if results is None:
        print(f"parts are missing in {out}: the same command, or the other shards, measure them", flush=True)
        return
    print(report.write(config, results, out, publish=_PUBLISH.value))
    print(f"{time.perf_counter() - began:.0f} s; report: {out / 'report.html'}", flush=True)


if __name__ == "__main__":
    program.start(main, "kvpatch_jax: cached chunks reused, compared with a re-prefill; loading libraries …")
