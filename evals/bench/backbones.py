"""Every family's backbone beside transformers on the CPU, where another interpreter has it: one checkpoint, one prompt.

Both sides read the same file, with as many threads as there are cores (`taskset -c 0` for one); all is in CPU seconds.
`prefill`: the prompt's forward with its KV and the logits of every token. `generate`: the prompt and the tokens that
follow greedily (ours one compiled program). `load`: the file into memory of the process. `tower`: an image's features.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.random_weights import random_backbone

from .benchmark import Benchmark, BenchOptions, Sides
from .shapes import SHAPES, random_ids, tiny_models

AGREEMENT = {"float32": 2e-4, "bfloat16": 5e-2}
"""Largest difference of logits, over the largest magnitude, at which both sides are one function."""
PROMPT, NEW_TOKENS, LEAST = 128, 16, 0.1
"""Tokens of the prompt and behind it; CPU seconds of a measurement at least."""
QUICK = ("Qwen2ForCausalLM", "InternVLForConditionalGeneration")
LARGER = ("Qwen2-0.15B", "Qwen2-0.5B")
TOWER, GRID = "Qwen2.5-VL, a tower of 12 blocks of 768", (1, 32, 32)
"""Of `SHAPES`, and the patches of its image."""


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields every operation of every architecture's tiny model, of two of Qwen2's shapes, and of a tower."""
    theirs = None if options.torch_python is None else TransformersWorker(options.torch_python)
    cases = [(name, raw, "float32") for name, raw in tiny_models().items() if name in QUICK or not options.quick]
    larger = [] if options.quick else [(name, SHAPES[name], dtype) for name in LARGER for dtype in AGREEMENT]
    for name, raw, dtype in cases + larger:
        pair = functools.cache(functools.partial(ModelPair, raw, theirs, options.seed, dtype))
        # Drawn models have no image settings, without which those with images are not loaded.
        text = not {"vision_config", "img_processor"} & raw.keys()
        case = f"{name}, {dtype}" if name in LARGER else name
        for operation in ("prefill", "generate", "load") if text else ("prefill", "generate"):
            prepare = functools.partial(_compared, pair, operation)
            yield Benchmark(f"backbones.{operation}", case, prepare, large=name in LARGER)
    if not options.quick:
        tower = functools.cache(functools.partial(ModelPair, SHAPES[TOWER], theirs, options.seed))
        yield Benchmark("backbones.tower", TOWER, functools.partial(_compared, tower, "tower"), large=True)


def _compared(make: Callable[[], "ModelPair"], operation: str) -> Sides:
    """Prepares one operation on both sides; a model that one side cannot run is a note."""
    try:
        pair = make()
    except KVPatchError as refusal:
        return Sides({}, notes={"not run": str(refusal)})
    notes = {} if pair.theirs is not None else {"transformers": "no --torch-python: our numbers alone"}
    return Sides(pair.calls(operation), lambda: pair.errors, pause=0.02, notes=notes)


class WorkerError(KVPatchError):
    """The interpreter with torch answered with an error, or ended."""


class TransformersWorker:
    """transformers in a process of its own, which runs only while it is asked to.

    Raises:
      InputError: `python` cannot be run, or has no torch or transformers.
      WorkerError: of `ask`, when the other side fails.
    """

    def __init__(self, python: str):
        program, expected = shutil.which(python), "expected a Python with torch and transformers"
        if program is None:
            raise InputError(f"--torch-python: got {python!r}, which cannot be run; {expected}")
        worker = str(Path(__file__).with_name("transformers_worker.py"))
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([program, worker], text=True, env=environment, **pipes)
        self.close = weakref.finalize(self, _end, self.process)
        try:
            self.versions = self.ask("hello", threads=len(os.sched_getaffinity(0)))
        except WorkerError as error:
            self.close()
            raise InputError(f"--torch-python: got {python!r}: {error}; {expected}") from error

    def ask(self, call: str, **request: Any) -> dict[str, Any]:
        """Sends one request and reads its answer."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None
        assert answers is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"call": call, **request}), file=requests, flush=True)
            line = answers.readline()
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise WorkerError(f"{call}: got {line!r:.200}; expected an answer as JSON") from error
        if "error" in answer:
            raise WorkerError(f"{call}: {answer['error']}")
        return answer


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


class ModelPair:
    """A model with drawn weights on both sides; `errors` says how far our logits are from theirs."""

    def __init__(self, raw: Mapping[str, Any], theirs: TransformersWorker | None, seed: int, dtype: str = "float32"):
        self.backbone, self.theirs, self.errors = random_backbone(raw, seed), theirs, {}
        ids = random_ids(PROMPT, seed)
        self.ids = np.asarray([ids], np.int32)
        folder = tempfile.mkdtemp()
        self._finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.checkpoint = save(self.backbone, Path(folder) / "checkpoint", dtype=dtype)
        if dtype != "float32":
            self.backbone = load(self.checkpoint)
        if theirs is not None:
            path = self.checkpoint / "logits.npy"
            theirs.ask(
                "open", directory=str(self.checkpoint), dtype=dtype, ids=ids, new_tokens=NEW_TOKENS, path=str(path)
            )
            logits = np.load(path)
            self.errors = {"kvpatch_jax": difference(np.asarray(self.prefill().logits), logits) / AGREEMENT[dtype]}

    def calls(self, operation: str) -> dict[str, Callable[[], float]]:
        """Lists the sides of an operation: CPU seconds of a call."""
        calls: dict[str, Callable[[], float]] = {"kvpatch_jax": lambda: cpu_seconds(getattr(self, operation))}
        if self.theirs is not None:
            ask = functools.partial(self.theirs.ask, "seconds", name=operation, least=LEAST)
            calls["transformers"] = lambda: ask()["seconds"]
        return calls

    def load(self) -> Any:
        """Reads the checkpoint."""
        return load(self.checkpoint).parameters

    def tower(self) -> Any:
        """Encodes an image of `GRID` patches."""
        vision = self.backbone.config.vision
        patches = int(np.prod(GRID))
        pads = np.full((1, patches // vision.merge**2), self.backbone.config.image_token, np.int32)
        pixels = np.ones((patches, vision.features), np.float32)
        return self.backbone.encode(pads, pixel_values=pixels, image_grid_thw=np.array([GRID], np.int32))

    def prefill(self) -> Any:
        """Runs the prompt's forward, from ids."""
        return self.backbone.prefill(self.backbone.embed(self.ids), logits="all")

    def generate(self) -> Any:
        """Runs the prompt and the tokens that follow, greedily."""
        return self.backbone.generate(self.backbone.embed(self.ids), NEW_TOKENS)


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Times a call: CPU seconds, over as many calls as fill `LEAST`, behind one that may compile."""
    jax.block_until_ready(call())
    begin, calls = time.process_time(), 0
    while time.process_time() < begin + LEAST or not calls:
        jax.block_until_ready(call())
        calls += 1
    return (time.process_time() - begin) / calls


def difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Measures the largest difference over the largest magnitude; infinite where shapes differ."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())
