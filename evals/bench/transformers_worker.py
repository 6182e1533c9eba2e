"""The other side of `--suite=backbones`: transformers on the CPU, run as a script by an interpreter that has torch.

It imports nothing of this project. Each line on stdin is a request {"call": name, ...}, each line on stdout its answer;
an answer {"error": ...} says what went wrong.
"""
# pyright: reportMissingImports=false

import json
import os
import sys
import time
from typing import Any


class Worker:
    """One model at a time."""

    model: Any
    ids: Any
    pictures: dict[str, Any]
    new_tokens: int
    directory: str

    def hello(self, threads: int) -> dict[str, Any]:
        """Imports torch and transformers; returns versions."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.set_verbosity_error()
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def open(self, directory: str, arrays: str, new_tokens: int) -> dict[str, Any]:
        """Reads a checkpoint and, from an .npz, the prompt's `input_ids` and the inputs of the tower."""
        import numpy
        import torch

        self.directory, self.new_tokens = directory, new_tokens
        report = self.load()
        if unread := [*report["missing_keys"], *report["unexpected_keys"]]:
            raise ValueError(f"got missing or unexpected keys {unread[:4]}; expected the model's own")
        with numpy.load(arrays) as file:
            tensors = {key: torch.from_numpy(file[key]) for key in file.files}
        self.ids, self.pictures = tensors.pop("input_ids").long(), tensors
        return {}

    def outputs(self, path: str) -> dict[str, Any]:
        """Writes what both sides must agree on: the prompt's logits, the tokens that follow, the tower's features."""
        import numpy
        import torch

        outputs = {"logits": self._forward(self.ids).logits, "tokens": self.generate()[:, self.ids.shape[1] :]}
        if self.pictures:
            features = self.embed()
            parts = [features] if torch.is_tensor(features) else list(features)
            outputs["features"] = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        numpy.savez(path, **{name: value.numpy() for name, value in outputs.items()})
        return {}

    def seconds(self, name: str, least: float) -> dict[str, float]:
        """Times a method: seconds per call, over as many calls as fill `least`."""
        total, calls = 0.0, 0
        while total < least or not calls:
            # Steps follow a prompt whose forward is not theirs.
            arguments = [self._forward(self.ids)] if name == "step" else []
            begin = time.perf_counter()
            getattr(self, name)(*arguments)
            total += time.perf_counter() - begin
            calls += 1
        return {"seconds": total / calls}

    def load(self) -> Any:
        """Reads the checkpoint; returns what was missing or unexpected."""
        import torch
        import transformers

        with open(os.path.join(self.directory, "config.json"), encoding="utf-8") as file:
            kind = getattr(transformers, json.load(file)["architectures"][0])
        self.model, report = kind.from_pretrained(self.directory, dtype=torch.float32, output_loading_info=True)
        self.model.eval()
        return report

    def prefill(self) -> Any:
        """Runs the prompt's forward, with its cache and the logits of every token."""
        return self._forward(self.ids)

    def generate(self) -> Any:
        """Runs the prompt and the tokens that follow, greedily."""
        from transformers import GenerationConfig

        no_end = {"eos_token_id": None, "pad_token_id": 0}
        greedy = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, use_cache=True, **no_end)
        self.model.generation_config.eos_token_id = None
        return self.model.generate(self.ids, generation_config=greedy)

    def step(self, out: Any) -> None:
        """Runs the tokens after the prompt, one forward each."""
        for _ in range(self.new_tokens):
            token = out.logits[:, -1:].argmax(-1)
            out = self._forward(token, past_key_values=out.past_key_values)

    def embed(self) -> Any:
        """Runs the tower and its projector."""
        whole = self.model if hasattr(self.model, "get_image_features") else self.model.model
        features = whole.get_image_features(**self.pictures)
        return getattr(features, "pooler_output", features)

    def _forward(self, ids: Any, **more: Any) -> Any:
        return self.model(input_ids=ids, use_cache=True, **more)


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Answers one request; errors become part of the answer, so that the other side can name them."""
    call = getattr(worker, request.pop("call"))
    try:
        if call == worker.hello:
            return call(**request)
        import torch

        with torch.inference_mode():
            return call(**request)
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
