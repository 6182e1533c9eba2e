"""Prompts: texts, images and chat messages to the arrays that a backbone embeds. Everything here runs on the host."""

import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from kvpatch_jax.cache import items_of, sort_of
from kvpatch_jax.errors import InputError

from .families.family import Config, Family
from .inputs.chat import ChatTemplate, Message, expand_images, images_of
from .inputs.texts import TOKENIZER_FILE, ids_of_text, unknown_token

NO_TOKENIZER = f"this backbone has no {TOKENIZER_FILE}"
_ASKED = "‹what is asked›"
"""Stands for a question in a template that is looked at."""


class ChatFrame(NamedTuple):
    """What a chat template puts around the images and the question of one message.

    Attributes:
      front: token ids in front of the first image, the system prompt among them.
      before, behind: texts in front of the question and behind it, up to where the answer begins.
    """

    front: tuple[int, ...]
    before: str
    behind: str


class Prompts:
    """Makes prompts for one model.

    Attributes:
      config, family: of the model.
      image_config: what its processor does with images; None for a text family.
      tokenizer: of `tokenizers`, or None.
      chat_template: the directory's, or None.
      without_tokenizer: why there is no tokenizer, for messages.
    """

    def __init__(
        self,
        config: Config,
        image_config: Any,
        tokenizer: Any,
        chat_template: ChatTemplate | None,
        without_tokenizer: str = NO_TOKENIZER,
    ):
        self.config: Any = config
        self.family: Family = config.family
        self.image_config, self.tokenizer, self.chat_template = image_config, tokenizer, chat_template
        self.without_tokenizer = without_tokenizer

    def prepare(self, items: Sequence[Any], second_per_grid_ts: Sequence[float] | None = None) -> dict[str, Any]:
        """See `ModelBackbone.prepare`."""
        items = items_of(items, "prompt")
        sorts = [sort_of(item) for item in items]
        images = [item for item, sort in zip(items, sorts, strict=True) if sort == "image"]
        arrays = self._process(images) if images else {}

        if second_per_grid_ts is not None:
            if not hasattr(self.config, "tokens_per_second"):
                name = self.family.architecture
                raise InputError(
                    f"second_per_grid_ts: got some for {name}, whose positions count no seconds; expected None"
                )

            # What is no list of numbers becomes a scalar, which has one axis too few.
            try:
                seconds = np.asarray(second_per_grid_ts, np.float32)
            except (TypeError, ValueError, OverflowError):
                seconds = np.float32(0)

            if seconds.ndim != 1:
                raise InputError(
                    f"second_per_grid_ts: got {second_per_grid_ts!r:.80}; expected a number for each video"
                )
            arrays |= {"second_per_grid_ts": seconds}

        numbers = itertools.count()
        ids: list[int] = []
        for item, sort in zip(items, sorts, strict=True):
            ids += self._image_ids(arrays, next(numbers)) if sort == "image" else self._text_ids(item)
        if "text" in sorts:
            before, after = self._own_special_tokens()
            ids = [*before, *ids, *after]
        return self._prompt(ids, arrays)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> dict[str, Any]:
        """See `ModelBackbone.chat`."""
        template, images = self._template(), images_of(messages)
        text = template.render(messages, add_generation_prompt, **variables)
        # A text family's tokenizer adds nothing, because its template writes what belongs around a text.
        own = self.family.vision is not None and not template.starts(text)
        marks = None if self.family.vision is None else self.family.vision.marks
        texts = [text] if marks is None else re.split(marks, text)
        pieces = [ids_of_text(self.tokenizer, part, self._unknown, own) for part in texts]
        ids = list(pieces[0])
        for piece in pieces[1:]:
            ids += [self.config.image_token, *piece]

        arrays = self._process(images) if images else {}
        if self.family.vision is not None:
            expansions = [self._image_ids(arrays, number) for number in range(len(images))]
            ids = expand_images(ids, self.config.image_token, expansions)
        return self._prompt(ids, arrays)

    def chat_frame(self, system: str | None = None) -> ChatFrame:
        """See `ModelBackbone.chat_frame`."""
        template, sees = self._template(), self.family.vision is not None

        def said(text):
            return [{"type": "text", "text": text}] if sees else text

        # Two images and a question, of which the text around each is then read off the rendered messages.
        shown = [{"type": "image"}] * 2 if sees else []
        messages: list[Message] = [{"role": "user", "content": [*shown, *said(_ASKED)] if sees else _ASKED}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": said(system)})
        text = template.render(messages)
        front, between, rest = "", "", text
        if sees:
            parts = text.split(self._placeholder(text))
            front, between, rest = parts if len(parts) == 3 else ("", f"{len(parts) - 1} places", "")

        before, mark, behind = rest.partition(_ASKED)
        if not mark or between:
            raise InputError(
                f"chat template {template.name}: got {between!r:.40} between two images; expected the images and the "
                "text of a message one right behind the other (else lay the prompt out yourself, by `lead` and "
                "`around`)"
            )

        if not sees:
            front, before = before, ""
        own = self._own_special_tokens()[0] if sees and not template.starts(text) else []
        return ChatFrame((*own, *self.ids(front)), before, behind)

    def ids(self, text: str) -> list[int]:
        """See `ModelBackbone.ids`."""
        if not isinstance(text, str):
            raise InputError(f"ids: got {text!r:.80}; expected a text")
        return self._text_ids(text) if text else []

    def _template(self) -> ChatTemplate:
        """Returns the chat template, which is of no use without a tokenizer."""
        if self.tokenizer is None and self.without_tokenizer != NO_TOKENIZER:
            raise InputError(
                f"chat: got no tokenizer ({self.without_tokenizer}); expected one, or token ids passed to `prepare`"
            )
        if self.chat_template is None or self.tokenizer is None:
            raise InputError(
                "chat: got a backbone without a chat template or without a tokenizer; expected both in its directory"
            )
        return self.chat_template

    def _placeholder(self, text: str) -> str:
        """Returns what stands for an image in a rendered text, with the image's own marks where they are there too."""
        whole = self._image_ids(self._process([np.zeros((224, 224, 3), np.uint8)]), 0)
        pad = self.config.image_token
        first, last = whole.index(pad), len(whole) - whole[::-1].index(pad)
        tokens = [self.tokenizer.id_to_token(each) for each in (*whole[:first], pad, *whole[last:])]
        if None in tokens:
            raise InputError(
                f"chat template: got image tokens {tokens} without a text in the tokenizer; expected one for each"
            )
        # Some templates write an image's start and end themselves, others leave them to the processor.
        marked = "".join(tokens)
        return marked if marked in text else tokens[first]

    def text(self, token_ids: Sequence[int] | Int[Array | np.ndarray, " T"]) -> str:
        """Returns token ids as text."""
        if self.tokenizer is None:
            raise InputError(f"text: got no tokenizer ({self.without_tokenizer}); expected one in its directory")
        array = np.asarray(token_ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.min() < 0):
            raise InputError(f"text: got {token_ids!r:.80}; expected token ids [T]")
        return self.tokenizer.decode(array.tolist(), skip_special_tokens=False)

    def _prompt(self, ids: list[int], arrays: Mapping[str, Any]) -> dict[str, Any]:
        input_ids = np.array(ids, np.int32)
        positions = self.family.positions(self.config, input_ids, arrays)
        return {"input_ids": input_ids[None], "position_ids": positions[None], **arrays}

    @functools.cached_property
    def _unknown(self) -> str | None:
        return unknown_token(self.tokenizer)

    def _own_special_tokens(self) -> tuple[list[int], list[int]]:
        """Returns ids that the tokenizer itself puts before and behind a text (a start token, mostly)."""
        # What stands around a text does not depend on the text, so any will do.
        bare, whole = (list(self.tokenizer.encode("a", add_special_tokens=flag).ids) for flag in (False, True))
        places = range(len(whole) - len(bare) + 1)
        first = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
        return whole[:first], whole[first + len(bare) :]

    def _process(self, images: list[Any]) -> dict[str, np.ndarray]:
        if self.family.vision is None:
            raise InputError(
                f"images: got {len(images)} for {self.family.architecture}, which takes none; expected text"
            )
        return self.family.vision.process(images, self.image_config)

    def _image_ids(self, arrays: Mapping[str, Any], index: int) -> list[int]:
        assert self.family.vision is not None
        return self.family.vision.tokens(self.config, arrays, index, self.tokenizer)

    def _text_ids(self, item: Any) -> list[int]:
        if not isinstance(item, str):
            return [int(token) for token in item]
        if self.tokenizer is None:
            raise InputError(
                f"text {item[:40]!r}: got no tokenizer ({self.without_tokenizer}); expected token ids instead"
            )
        return ids_of_text(self.tokenizer, item, self._unknown)
