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
    """One model at a time, and a prompt."""

    model: Any
    ids: Any
    new_tokens: int
    directory: str

    def hello(self, threads: int) -> dict[str, Any]:
        """Imports torch and transformers; returns versions."""
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def open(self, directory: str, dtype: str, ids: list[int], new_tokens: int, path: str) -> dict[str, Any]:
        """Reads a checkpoint, and writes what both sides must agree on: the logits of every token of the prompt."""
        import numpy
        import torch
        import transformers

        self.ids, self.new_tokens = torch.tensor([ids]), new_tokens
        with open(os.path.join(directory, "config.json"), encoding="utf-8") as file:
            kind = getattr(transformers, json.load(file)["architectures"][0])
        self.model, report = kind.from_pretrained(directory, dtype=getattr(torch, dtype), output_loading_info=True)
        self.model.eval()
        self.directory = directory
        if unread := [*report["missing_keys"], *report["unexpected_keys"]]:
            raise ValueError(f"got missing or unexpected keys {unread[:4]}; expected the model's own")
        numpy.save(path, self.prefill().logits.float().numpy())
        return {}

    def load(self) -> None:
        """Reads the checkpoint into memory of its own. transformers maps the file, so tensors are copied."""
        model = type(self.model).from_pretrained(self.directory, dtype=self.model.dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def tower(self) -> Any:
        """Encodes an image of 32 · 32 patches by a tower of a Qwen family."""
        import torch

        vision = self.model.config.vision_config
        features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return self.model.model.visual(torch.ones(1024, features), grid_thw=torch.tensor([[1, 32, 32]]))

    def seconds(self, name: str, least: float) -> dict[str, float]:
        """Times a method: CPU seconds per call, over as many calls as fill `least`, behind one."""
        getattr(self, name)()
        begin, calls = time.process_time(), 0
        while time.process_time() < begin + least or not calls:
            getattr(self, name)()
            calls += 1
        return {"seconds": (time.process_time() - begin) / calls}

    def prefill(self) -> Any:
        """Runs the prompt's forward, with its cache and the logits of every token."""
        return self.model(input_ids=self.ids, use_cache=True)

    def generate(self) -> Any:
        """Runs the prompt and the tokens that follow, greedily."""
        from transformers import GenerationConfig

        no_end = {"eos_token_id": None, "pad_token_id": 0}
        greedy = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, use_cache=True, **no_end)
        self.model.generation_config.eos_token_id = None
        return self.model.generate(self.ids, generation_config=greedy)


def main() -> None:
    """Answers requests until stdin ends. Whatever a library prints goes to stderr."""
    # transformers tries to import a package `kernels`, and would find the module beside this script.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]
    answers, sys.stdout = sys.stdout, sys.stderr
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("call"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
