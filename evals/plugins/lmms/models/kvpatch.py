"""lmms-eval's model class over `ReusedChat`; written for lmms-eval 0.7.3."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax import ChunkStore
from kvpatch_jax.cache import sort_of
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, load
from kvpatch_jax.utils.optional_packages import require

from ...reused_chat import ReusedChat

Base: Any = require("lmms_eval.api.model", "lmms_eval").lmms
MOST_NEW_TOKENS = 1024
"""Where a task says nothing."""


class KVPatch(Base):
    """A "simple" model of lmms-eval: a text and visuals per request, answered over KV that requests share."""

    is_simple = True

    def __init__(
        self,
        pretrained: str,
        store: str | None = None,
        dtype: str | None = None,
        approximate: bool | str = True,
        system_prompt: str | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        **options: Any,
    ):
        """Loads the model.

        Args:
          pretrained: a checkpoint directory, a GGUF file or a repository of the hub, as `models.load` takes it.
          store: a folder of chunks, kept between runs. None: this process's memory.
          dtype: as `models.load` takes it.
          approximate: False reuses what is exact alone.
          batch_size, device: lmms-eval passes them to every model; requests are answered one by one, where jax is.

        Raises InputError for another option, and as `models.load`.
        """
        super().__init__()
        if options:
            raise InputError(
                f"model_args: got {sorted(options)}; expected pretrained, store, dtype, approximate, system_prompt"
            )
        backbone = load(pretrained, dtype=dtype, buckets=Buckets())
        exact = str(approximate).lower() in ("false", "0")
        self.system_prompt = system_prompt
        self.chat = ReusedChat(backbone, None if store is None else ChunkStore(store), approximate=not exact)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers requests in their order; each has (context, options, doc_to_visual, doc_id, task, split)."""
        answers = []
        for request in requests:
            context, options, doc_to_visual, doc_id, task, split = request.args
            visuals = doc_to_visual(self.task_dict[task][split][doc_id]) or []
            content = [*map(_entry, visuals), {"type": "text", "text": context.replace("<image>", "")}]
            messages = [{"role": "user", "content": content}]
            if self.system_prompt:
                messages.insert(0, {"role": "system", "content": self.system_prompt})
            until = options.get("until", ())
            answer = self.chat.answer(
                messages,
                steps=options.get("max_new_tokens", MOST_NEW_TOKENS),
                temperature=options.get("temperature") or 0.0,
                top_p=options.get("top_p") or 1.0,
                stop=[until] if isinstance(until, str) else list(until),
            )
            answers.append(answer.text)
            self.cache_hook.add_partial("generate_until", request.args, answer.text)
        return answers

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Refuses with NotImplementedError: no task of images that is in use asks for likelihoods."""
        raise NotImplementedError("kvpatch: got a task of likelihoods; expected one that generates")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Refuses with NotImplementedError: rounds depend on the answers before them."""
        raise NotImplementedError("kvpatch: got a task of several rounds; expected one answer per request")

    def clean(self) -> None:
        """Stores what was formed, when a run ends."""
        logging.getLogger(__name__).info("closing the sessions of kvpatch")
        self.chat.close()
        super().clean()


def _entry(visual: Any) -> dict[str, Any]:
    """Names the sort of one visual: an image, or the path of a video's or an image's file."""
    if isinstance(visual, str) and sort_of(Path(visual)) == "video":
        return {"type": "video", "video": visual}
    return {"type": "image", "image": visual}
