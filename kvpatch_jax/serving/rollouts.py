"""`RolloutSampler`: groups of rollouts for reinforcement learning, which share the KV of their images."""

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ..cache import Text, unit_items
from ..errors import InputError
from ..session import Session
from ..utils.kinds import expect_kind, is_whole


@dataclasses.dataclass
class SamplerOutput:
    """Rollouts of some prompts: the n of the first one, then those of the next. The fields are those of tunix.

    Attributes:
      text: of each rollout, without its stop token; empty without a tokenizer.
      logits: None.
      tokens: of each rollout, int32 [n], with its stop token.
      padded_prompt_tokens: int32 [rollouts, T], padded at the left. Images are not in them.
      logprobs: of each rollout's tokens, before temperature, `top_p` and `top_k`.
    """

    text: list[str]
    logits: list[jax.Array] | None
    tokens: list[np.ndarray]
    padded_prompt_tokens: np.ndarray
    logprobs: list[list[float]]


class RolloutSampler:
    """Sampler of groups of rollouts behind a session's window, called as tunix calls its samplers (`BaseSampler`).

    Args:
      session: what all rollouts see first. It stays as it is. On one of `Sessions` a group is decoded together.
      pad: token at the left of shorter prompts.
    """

    def __init__(self, session: Session, pad: int = 0):
        expect_kind(session, Session, "sampler: session", "a Session", InputError)
        self.session, self.pad = session, pad

    def __call__(
        self,
        input_strings: str | Sequence[Any],
        max_generation_steps: int,
        *,
        images: Sequence[Any] = (),
        multi_sampling: int = 1,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: Sequence[int | str] | None = None,
    ) -> SamplerOutput:
        """Samples a group of rollouts for each prompt.

        Args:
          input_strings: prompts as `Session.ask` takes them: texts, token ids, or messages.
          max_generation_steps: the largest number of tokens of a rollout.
          images: behind the session's window and in front of every prompt, prefilled once for all rollouts.
          multi_sampling: rollouts of a prompt, n.
          seed: of the first rollout; the next have the numbers behind it. None: drawn.
          temperature, top_p, top_k, stop: as of `Session.ask`.

        Raises:
          InputError: no prompts, no rollouts, or arguments of other types. As `Session.add` and `Session.ask`.
        """
        expect_kind(input_strings, Sequence, "sampler: input_strings", "a list of prompts, or a text", InputError)
        # An array is one image, and not a sequence of them.
        expect_kind(images, Sequence, "sampler: images", "a list of images", InputError)
        if seed is not None and not is_whole(seed, -(2**63)):
            raise InputError(f"sampler: got seed {seed!r:.40}; expected an integer, or None")
        prompts = [input_strings] if isinstance(input_strings, str) else list(input_strings)
        if not prompts or not is_whole(multi_sampling, 1):
            raise InputError(
                f"sampler: got {len(prompts)} prompts, multi_sampling {multi_sampling!r:.40}; expected some"
            )
        options: dict[str, Any] = {"steps": max_generation_steps, "stop": stop, "temperature": temperature}
        options |= {"top_p": 1.0 if top_p is None else top_p, "top_k": top_k}
        first = secrets.randbits(32) if seed is None else seed

        output = SamplerOutput([], None, [], self._padded(prompts, multi_sampling), [])
        with self.session.fork() as branch:
            for image in images:
                branch.add(image)
            for number, prompt in enumerate(prompts):
                # All of a group begin before the first is read, so that they are decoded together.
                seeds = range(first + number * multi_sampling, first + (number + 1) * multi_sampling)
                group = [branch.ask(prompt, seed=seed, **options) for seed in seeds]
                for answer in group:
                    output.text.append(answer.text)
                    output.tokens.append(np.asarray(answer.ids, np.int32))
                    output.logprobs.append(branch.log_probs(prompt, answer.ids).tolist())
        return output

    def tokenize(self, prompt: Any) -> np.ndarray:
        """Returns a prompt's tokens, int32 [T]."""
        backbone: Any = self.session.backbone
        items = [Text(prompt)] if isinstance(prompt, str) else unit_items(prompt, "sampler")
        return np.asarray(backbone.prepare(items)["input_ids"], np.int32)[0]

    def _padded(self, prompts: Sequence[Any], count: int) -> np.ndarray:
        rows = [self.tokenize(prompt) for prompt in prompts]
        width = max(len(row) for row in rows)
        padded = [np.pad(row, (width - len(row), 0), constant_values=self.pad) for row in rows]
        return np.repeat(np.stack(padded), count, axis=0)
