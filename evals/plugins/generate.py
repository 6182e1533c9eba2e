"""transformers' two objects over reused KV: a processor that renders messages, and a model with `generate`.

    processor, model = ReusedProcessor(backbone), ReusedModel(backbone, store)
    inputs = processor.apply_chat_template(messages)
    new_ids = model.generate(**inputs, max_new_tokens=64)[:, inputs["input_ids"].shape[1] :]
    (answer,) = processor.batch_decode(new_ids, skip_special_tokens=True)

Rows are answered one by one: a batch saves nothing where the KV of its prompts is there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvpatch_jax.errors import InputError
from kvpatch_jax.window import PatchStore
from models import ModelBackbone

from .reused_chat import ReusedChat

Messages = Sequence[Mapping[str, Any]]


class ReusedProcessor:
    """Renders messages to the token ids that the model would read, and keeps them beside these."""

    def __init__(self, backbone: ModelBackbone):
        self.backbone = backbone

    def apply_chat_template(self, messages: Messages, **variables: Any) -> dict[str, Any]:
        """Renders one conversation.

        Args:
          messages: as `ReusedChat.answer` takes them.
          variables: those of a call that generates (`tokenize`, `return_dict`, …), which change nothing.

        Returns:
          input_ids [1,T] and `messages`: what `ReusedModel.generate` takes. Raises InputError for another variable.
        """
        others = set(variables) - {"tokenize", "return_dict", "return_tensors", "add_generation_prompt", "padding"}
        if others:
            raise InputError(f"apply_chat_template: got {sorted(others)}; expected no variables of a template")
        ids = self.backbone.chat(messages)["input_ids"]
        return {"input_ids": np.asarray(ids, np.int64), "messages": messages}

    def batch_decode(self, ids: Int[np.ndarray, "B n"], skip_special_tokens: bool = True) -> list[str]:
        """Returns the text of each row."""
        tokenizer: Any = self.backbone.tokenizer
        return [tokenizer.decode(row.tolist(), skip_special_tokens=skip_special_tokens) for row in np.asarray(ids)]


class ReusedModel:
    """A model whose `generate` answers over KV that calls share."""

    def __init__(self, backbone: ModelBackbone, store: PatchStore | None = None, **options: Any):
        """Prepares to answer; `options` are those of `ReusedChat`."""
        self.chat = ReusedChat(backbone, store, **options)

    def generate(
        self,
        input_ids: Int[np.ndarray, "1 T"],
        messages: Messages,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop_strings: Sequence[str] | str = (),
    ) -> Int[np.ndarray, "1 n"]:
        """Generates behind a prompt; arguments are named as in transformers' `GenerationConfig`.

        Args:
          input_ids, messages: of `ReusedProcessor.apply_chat_template`.

        Returns:
          The prompt's ids and those behind them. Raises as `ReusedChat.answer`.
        """
        sampling: dict[str, Any] = {}
        if do_sample:
            sampling = {"temperature": 1.0 if temperature is None else temperature, "top_p": top_p or 1.0}
            sampling |= {"top_k": top_k or None, "seed": seed}
        stop = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        answer = self.chat.answer(messages, steps=max_new_tokens, stop=stop, **sampling)
        return np.concatenate([input_ids, np.array([answer.ids], np.int64)], axis=1)
