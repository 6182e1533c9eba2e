"""The other side of `--suite=backbones`: transformers on the CPU, run as a script by an interpreter that has torch.

It imports nothing of this project. Each line on stdin is a request {"call": name, ...}, each line on stdout its answer;
an answer {"error": ...} says what went wrong. `timing` imports `mean_seconds` from here, so that both sides are timed
by the same rule; torch is imported only where a model is run.
"""
# pyright: reportMissingImports=false

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

LEAST_SECONDS = 0.1


def mean_seconds(timed: Callable[[], float], least: float = LEAST_SECONDS) -> float:
    """Measures seconds per call of `timed`, which returns those it counts, over as many calls as fill `least`."""
    total, calls = 0.0, 0
    while total < least:
        total += timed()
        calls += 1
    return total / calls


def stopwatch(call: Callable[[], Any]) -> float:
    """Measures the seconds that `call` takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Worker:
    """One model at a time; every public method without arguments times something, and returns its seconds."""

    model: Any
    ids: Any
    pictures: dict[str, Any]
    new_tokens: int

    def hello(self, threads: int) -> dict[str, Any]:
        """Imports torch and transformers; returns versions."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "threads": torch.get_num_threads(),
        }

    def load(self, directory: str, arrays: str, new_tokens: int) -> dict[str, Any]:
        """Reads a checkpoint and, from an .npz, the prompt's `input_ids` and the inputs of the tower."""
        import numpy
        import torch
        import transformers

        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            name = json.load(file)["architectures"][0]
        kind = getattr(transformers, name)
        self.model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        unread = [*report["missing_keys"], *report["unexpected_keys"]]
        if unread:
            raise ValueError(f"{name}: got missing or unexpected keys {unread[:4]}; expected the model's own")

        self.model.eval()
        with numpy.load(arrays) as file:
            tensors = {key: torch.from_numpy(file[key]) for key in file.files}
        self.ids, self.pictures, self.new_tokens = tensors.pop("input_ids").long(), tensors, new_tokens
        return {"attention": self.model.config._attn_implementation}

    def outputs(self, path: str) -> dict[str, Any]:
        """Writes what both sides must agree on: the prompt's logits, the tokens that follow, the tower's features."""
        import numpy

        outputs = {"logits": self._forward(self.ids).logits, "tokens": self._generated()[:, self.ids.shape[1] :]}
        if self.pictures:
            outputs["features"] = _flat(self._features())
        numpy.savez(path, **{name: value.numpy() for name, value in outputs.items()})
        return {}

    def prefill(self) -> float:
        """Times the prompt's forward, with its cache and the logits of every token."""
        return stopwatch(lambda: self._forward(self.ids))

    def generate(self) -> float:
        """Times the prompt and the tokens that follow, greedily."""
        return stopwatch(self._generated)

    def step(self) -> float:
        """Times the tokens after the prompt, one forward each, without the prompt's."""
        out = self._forward(self.ids)

        def steps(out: Any = out) -> None:
            for _ in range(self.new_tokens):
                token = out.logits[:, -1:].argmax(-1)
                out = self._forward(token, past_key_values=out.past_key_values)

        return stopwatch(steps)

    def embed(self) -> float:
        """Times the tower and its projector."""
        return stopwatch(self._features)

    def _forward(self, ids: Any, **more: Any) -> Any:
        return self.model(input_ids=ids, use_cache=True, **more)

    def _generated(self) -> Any:
        from transformers import GenerationConfig

        no_end = {"eos_token_id": None, "pad_token_id": 0}
        greedy = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, use_cache=True, **no_end)
        self.model.generation_config.eos_token_id = None
        return self.model.generate(self.ids, generation_config=greedy)

    def _features(self) -> Any:
        whole = self.model if hasattr(self.model, "get_image_features") else self.model.model
        features = whole.get_image_features(**self.pictures)
        return getattr(features, "pooler_output", features)


def _flat(features: Any) -> Any:
    """Joins the features [E, D] of all images, from one tensor or from one for each image."""
    import torch

    parts = [features] if torch.is_tensor(features) else list(features)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Answers one request; errors become part of the answer, so that the other side can name them."""
    name, timed = request.pop("call"), request.pop("timed", False)
    call = getattr(worker, name)
    try:
        if name in ("hello", "load"):
            return call(**request)
        import torch

        with torch.inference_mode():
            return {"seconds": mean_seconds(call)} if timed else call(**request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answers requests until stdin ends. Whatever a library prints goes to stderr."""
    # transformers tries to import a package `kernels`, and would find the module beside this script.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if place != here]
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
