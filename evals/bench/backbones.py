"""Every family's backbone beside transformers on the CPU, where another interpreter has it: one checkpoint, one prompt.

Both sides read the same float32 file and run with as many threads as there are cores. `prefill`: the prompt's forward
with its KV and the logits of every token. `generate`: the prompt and the tokens that follow greedily (ours one compiled
program). `step`: the same tokens one call each, without the prompt. `embed`: a tower and its projector over one image;
ours also embeds the prompt. `load`: reading a text model's checkpoint; beside it the bare safetensors file.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import numpy as safetensors

from kvpatch_jax.core import to_engine
from kvpatch_jax.errors import InputError, KVPatchError
from models import FAMILIES, ModelBackbone, load, save

from .benchmark import Benchmark, BenchOptions, Sides, timed
from .shapes import LARGE, random_backbone, random_ids, tiny_config, tiny_models

AGREEMENT = 2e-4
"""Largest difference of logits and features, over the largest magnitude, at which both sides are one function."""
PROMPT, NEW_TOKENS, LEAST = 128, 16, 0.1
PICTURES = ("pixel_values", "image_grid_thw", "image_sizes", "num_patches", "pixel_attention_mask")
PICTURES += ("high_res_pixel_values", "image_position_ids")
WORKER = Path(__file__).with_name("transformers_worker.py")


def suite(options: BenchOptions) -> Iterator[Benchmark]:
    """Yields every operation of every architecture's tiny model, and of one of Qwen2-0.5B's shape."""
    theirs = None if options.torch_python is None else TransformersWorker(options.torch_python)
    quick = ("Qwen2ForCausalLM", "InternVLForConditionalGeneration")
    models = {name: tiny_config(name) for name in (quick if options.quick else tiny_models())}
    for name, raw in (models | {"Qwen2-0.5B": LARGE}).items():
        side = functools.cache(functools.partial(ModelPair, raw, theirs, options.seed))
        # Reading a file with a tower needs image settings, which drawn models have not.
        last = "load" if FAMILIES[raw["architectures"][0]].vision is None else "embed"
        for operation in ("prefill", "generate", "step", last):
            prepare = functools.partial(_compared, side, operation)
            yield Benchmark(f"backbones.{operation}", name, prepare, large=name == "Qwen2-0.5B")


def _compared(make: Callable[[], "ModelPair"], operation: str) -> Sides:
    """Prepares one operation on both sides; a model that one side cannot run is a note."""
    try:
        pair = make()
    except KVPatchError as refusal:
        return Sides({}, notes={"backbone": str(refusal)})
    calls = pair.calls(operation)
    notes = {} if pair.theirs is not None else {"transformers": "no --torch-python: our numbers alone"}
    return Sides(calls, lambda: pair.errors, pause=0.02, notes=notes)


class TransformersWorker:
    """transformers in a process of its own, which runs only while it is asked to.

    Raises:
      InputError: `python` cannot be run, or has no torch or transformers.
      WorkerError: of every method, when the other side fails.
    """

    def __init__(self, python: str):
        program, expected = shutil.which(python), "expected a Python with torch and transformers"
        if program is None:
            raise InputError(f"--torch-python: got {python!r}, which cannot be run; {expected}")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self.process = subprocess.Popen(
            [program, str(WORKER)], text=True, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        weakref.finalize(self, self.process.kill)
        try:
            self.versions = self.ask("hello", threads=len(os.sched_getaffinity(0)))
        except WorkerError as error:
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


class WorkerError(KVPatchError):
    """The interpreter with torch answered with an error, or ended."""


class ModelPair:
    """A model with drawn weights on both sides; `errors` says how far their results are from each other."""

    def __init__(self, raw: Mapping[str, Any], theirs: TransformersWorker | None, seed: int):
        self.backbone: ModelBackbone = random_backbone(raw, seed)
        self.theirs, self.ids = theirs, np.asarray([random_ids(PROMPT, seed)], np.int32)
        self.pictures = tiny_pictures(raw["architectures"][0]) if "vision_config" in raw else {}
        folder = tempfile.TemporaryDirectory()
        weakref.finalize(self, folder.cleanup)
        self.folder = Path(save(self.backbone, Path(folder.name) / "checkpoint"))
        self.errors: dict[str, float] = {}
        if theirs is not None:
            vision = {name: value for name, value in self.pictures.items() if name != "input_ids"}
            np.savez(self.folder / "arrays.npz", **(vision | {"input_ids": self.ids}))  # type: ignore[arg-type]
            arrays = str(self.folder / "arrays.npz")
            theirs.ask("open", directory=str(self.folder), arrays=arrays, new_tokens=NEW_TOKENS)
            theirs.ask("outputs", path=str(self.folder / "theirs.npz"))
            with np.load(self.folder / "theirs.npz") as file:
                self.errors = {"kvpatch_jax": difference(self.outputs(), dict(file)) / AGREEMENT}

    def calls(self, operation: str) -> dict[str, Callable[[], float]]:
        """Lists the sides of an operation."""
        call, before = getattr(self, operation), self.decode_cache if operation == "step" else None
        calls = {"kvpatch_jax": timed(call, before=before, least=LEAST)}
        if self.theirs is not None:
            ask = functools.partial(self.theirs.ask, "seconds", name=operation, least=LEAST)
            calls["transformers"] = lambda: ask()["seconds"]
        if operation == "load":
            file = next(self.folder.glob("*.safetensors"))
            calls["safetensors file"] = timed(lambda: safetensors.load_file(file), least=LEAST)
        return calls

    def prefill(self) -> Any:
        """Runs the prompt's forward, from ids."""
        return self.backbone.prefill(self.backbone.embed(self.ids), logits="all")

    def generate(self) -> Any:
        """Runs the prompt and the tokens that follow, greedily."""
        return self.backbone.generate(self.backbone.embed(self.ids), NEW_TOKENS)

    def decode_cache(self) -> None:
        """Prefills the prompt into a cache with room for the tokens that follow."""
        tokens = self.backbone.embed(self.ids)
        out = self.backbone.prefill(tokens)
        cache = to_engine(self.backbone.layout, out.kv, tokens.positions, 0)
        room = ((0, 0), (0, 0), (0, NEW_TOKENS), (0, 0), (0, 0))
        parts = {channel.name for channel in self.backbone.layout.parts}
        self.cache = {name: value if name in parts else jnp.pad(value, room) for name, value in cache.items()}
        self.logits = out.logits[:, -1:]
        jax.block_until_ready((self.logits, self.cache))

    def step(self) -> Any:
        """Decodes the tokens after the prompt, one call each, with the host in between."""
        logits, cache, axes = self.logits, self.cache, self.backbone.layout.rope.axes
        shape = (1, 1) if axes is None else (1, 1, axes)
        for position in range(PROMPT, PROMPT + NEW_TOKENS):
            token = np.asarray(jnp.argmax(logits, axis=-1))
            embedded = self.backbone.embed(token, np.full(shape, position, np.int32))
            logits, cache = self.backbone.decode(embedded, cache, np.array([[position]], np.int32))
        return logits

    def embed(self) -> Any:
        """Runs the tower, its projector, and puts the features among the embeddings."""
        return self.backbone.embed(**self.pictures)

    def load(self) -> Any:
        """Reads the checkpoint."""
        return load(self.folder, dtype="float32").parameters

    def outputs(self) -> dict[str, np.ndarray]:
        """Computes the prompt's logits [1, T, V], the tokens that follow [1, n], and an image's features [E, D]."""
        outputs = {"logits": np.asarray(self.prefill().logits), "tokens": np.asarray(self.generate())}
        if self.pictures:
            # The image's placeholders are the id that is repeated; their embeddings are the features.
            ids = self.pictures["input_ids"][0]
            (image,) = {int(after) for before, after in zip(ids, ids[1:], strict=False) if before == after}
            outputs["features"] = np.asarray(self.embed().embeddings[0][ids == image])
        return outputs


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """Measures the largest difference over the largest magnitude; infinite where shapes differ. Tokens follow logits."""
    worst = 0.0
    for name in theirs.keys() - {"tokens"}:
        if ours[name].shape != theirs[name].shape:
            return float("inf")
        worst = max(worst, float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()))
    return worst


def tiny_pictures(architecture: str) -> dict[str, np.ndarray]:
    """Reads what the tiny model's processor made of one image, with `input_ids` [1, T]."""
    with np.load(tiny_models()[architecture].with_name("one_image.npz")) as file:
        pictures = {name: file[name] for name in PICTURES if name in file.files}
        return pictures | {"input_ids": file["input_ids"][None]}
