"""Prompts: texts, images, videos, sounds and chat messages to the arrays that a backbone embeds.

Everything here runs on the host.
"""

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Int

from kvpatch_jax.cache import Audio, Template, Video, items_of, medium_of, sort_of
from kvpatch_jax.errors import InputError

from .decoding import LoadedModel
from .families.family import VIDEO_SOUNDS, Family, Run, control_tokens, placeholders
from .inputs.chat import ChatTemplate, Message, Placeholder, expand_media, read_messages, replaced
from .inputs.texts import TOKENIZER_FILE, TextEncoder, texts_of

NO_TOKENIZER = f"this backbone has no {TOKENIZER_FILE}"
MEDIA = ("image", "video", "audio")
_ASKED = "‹what is asked›"
"""Stands for a question in a template that is looked at."""


class ChatFrame(NamedTuple):
    """What a chat template puts around the images and the question of one message.

    Attributes:
      front: token ids in front of the first image, the system prompt among them.
      before, behind: the template's texts in front of the question and behind it, up to where the answer begins.
      between: token ids that stand between two images (LLaVA's and Phi-3-vision's newline).
    """

    front: tuple[int, ...]
    before: Template
    behind: Template
    between: tuple[int, ...] = ()


class ImageMark(NamedTuple):
    """By what a chat template places an image: a token, its text, and what the processor writes around it."""

    token: int
    text: str
    around: str


class Prompting(LoadedModel):
    """What a backbone gets from its tokenizer, its chat template and its family's processors: prompts.

    Attributes:
      family, image_config, video_config, audio_config, chat_template, without_tokenizer: as in `ModelBackbone`.
    """

    family: Family
    image_config: Any
    video_config: Any
    audio_config: Any
    chat_template: ChatTemplate | None
    without_tokenizer: str
    _encoder: TextEncoder | None = None

    def prepare(self, items: Sequence[Any]) -> dict[str, Any]:
        """Turns texts, images, videos, sounds and token ids, in order, into one prompt's arrays (batch of one).

        Args:
          items: each a text (needs the directory's tokenizer, whose own start and end tokens then stand around the
            whole prompt), a sequence of token ids, or an image: a path
            (`pathlib.Path`), a PIL image, a uint8 array [H,W] or [H,W,C], or an encoded file's bytes; a
            `kvpatch_jax.Video` or `Audio`, or a path with the suffix of one. Each stands
            between its start and end tokens. A str that looks like a file is refused: `kvpatch_jax.Text` makes it text.

        Returns:
          input_ids [1,T], position_ids [1,T] or [1,T,A], and where there are images, videos or sounds what the
          family's processor makes of them (pixel_values, pixel_values_videos, input_features, and sizes, grids or
          times).

        Raises:
          InputError: an image that cannot be read; no items, an item of another kind or of one that the
          family does not take, a video or sound that cannot be read, text without a tokenizer, or text that the
          tokenizer does not know. MissingExtraError: a video file without PyAV.
        """
        items = items_of(items, "prompt")
        sorts = [sort_of(item) for item in items]
        media = [(sort, item) for sort, item in zip(sorts, items, strict=True) if sort in MEDIA]
        arrays, runs = self._process(media)

        following = iter(runs)
        ids: list[int] = []
        for sort, group in itertools.groupby(zip(sorts, items, strict=True), key=lambda pair: pair[0]):
            parts = [item for _, item in group]
            if sort == "text":
                # A template's texts are tokenized together with those beside them.
                joined = any(isinstance(item, Template) for item in parts)
                for texts in [parts] if joined else [[item] for item in parts]:
                    ids += self.ids(texts)
            else:
                for item in parts:
                    ids += self._ids_of(next(following)) if sort in MEDIA else map(int, item)
        if "text" in sorts:
            before, after = self._own_special_tokens()
            ids = [*before, *ids, *after]
        return self._prompt(ids, arrays)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> dict[str, Any]:
        """Turns messages into one prompt's arrays (as `prepare` gives them), by the checkpoint's chat template.

        What the tokenizer itself puts around a text (a start token, mostly) is put around the prompt too, as the
        family's processor does, unless the template wrote the start token. A text family's tokenizer adds nothing.

        Args:
          messages: {"role", "content"} each; a content is a text, or a list of {"type": "text", "text"},
            {"type": "image", "image": a path, PIL image or uint8 array}, {"type": "video", "video": a path or Video}
            and {"type": "audio", "audio": a path or Audio}; or OpenAI's parts with data URLs (`cache.part_item`).
          add_generation_prompt: end with what opens the assistant's answer.
          variables: further names that the template knows.

        Raises:
          InputError: no template or tokenizer, messages that the template refuses, entries of another type,
          text that the tokenizer does not know, or images that the template did not place.
          ConfigError: a template that cannot be used. InputError: an image that cannot be read.
        """
        template = self._template()
        messages, media = read_messages(messages)
        messages, variables = self._texts.literals(messages), self._texts.literals(variables)
        for sort in {sort for sort, _ in media} - {"image"}:
            source = self._medium(sort).template
            template = dataclasses.replace(template, source=source) if source else template
        text = template.render(messages, add_generation_prompt, **variables)
        mark = self._mark()
        if mark is not None:
            # As the processor does before the text is cut into tokens: one may join the lines with the text's own.
            text = text.replace(mark.text, f"{mark.around}{mark.text}{mark.around}")
        # A text family's tokenizer adds nothing, because its template writes what belongs around a text.
        own = self.family.vision is not None and not template.starts(text)
        arrays, runs = self._process(media)
        text, expansions = self._spelled(text, media, runs, mark)
        spelling = None if self.family.vision is None else self.family.vision.spelling
        texts = [text] if spelling is None else re.split(spelling, text)
        pieces = [self._texts.encode(part, own) for part in texts]
        ids = list(pieces[0])
        for piece in pieces[1:]:
            ids += [self.config.image_token, *piece]
        if self.family.vision is not None or media:
            ids = expand_media(ids, expansions, placeholders(self.config) if mark is None else (mark.token,))
        return self._prompt(ids, arrays)

    def _spelled(
        self, text: str, media: Sequence[tuple[str, Any]], runs: Sequence[Run], mark: ImageMark | None
    ) -> tuple[str, list[tuple[Placeholder, list[int]]]]:
        """Returns a rendered text with what stands for videos and sounds written out, but for their placeholders, of
        which each series is written once; and what every placeholder in the text becomes, in order.

        So the text around frames is tokenized together with what the template writes, as transformers does it.
        """
        expansions: list[tuple[Placeholder, list[int]]] = []
        # Sounds first: what a video becomes may hold placeholders of its own sound.
        spelled: dict[str, list[str]] = {"audio": [], "video": []}
        pads = placeholders(self.config)
        for (sort, _), run in zip(media, runs, strict=True):
            if sort == "image":
                # What a processor writes around a mark is in the text already.
                ids = self._ids_of(run) if mark is None else [piece for piece in run if not isinstance(piece, str)]
                placeholder = self._image_placeholder(ids) if mark is None else Placeholder(mark.token, [], [])
                expansions.append((placeholder, ids))
                continue

            written = ""
            for piece, series in itertools.groupby(run):
                count = len(list(series))
                if piece in pads:
                    expansions.append((Placeholder(piece, [], []), [piece] * count))
                    count = 1
                written += count * (piece if isinstance(piece, str) else texts_of(self.tokenizer, [piece])[0])
            spelled[sort].append(written)

        for sort, found in spelled.items():
            if found:
                text = replaced(text, self._medium(sort).written(self.config, self.tokenizer), found, sort)
        return text, expansions

    def chat_frame(self, system: str | None = None, **variables: Any) -> ChatFrame:
        """Says what the chat template puts around the images and the question of one message of a user.

        So that images can stay chunks: `front`, images with `between` from one to the next, and then the question
        between `before` and `behind` are the very tokens that `chat` makes of a message with these images and this
        question. Of Gemma 3 they are its very text: images as `prepare` makes them have their blank lines as tokens of
        their own, which in `chat` may join those of the text.

        Args:
          system: a system prompt; None: what the template has of its own.
          variables: further names that the template knows (`enable_thinking`, …).

        Raises:
          InputError: no template or tokenizer, a template that does not place images and text in their order, or a
          tokenizer with tokens of its own around every text between images (Phi-3-vision). ConfigError: a template that
          cannot be used.
        """
        template, sees = self._template(), self.family.vision is not None

        def said(text):
            return [{"type": "text", "text": self._texts.literals(text)}] if sees else self._texts.literals(text)

        # Two images and a question, of which the text around each is then read off the rendered messages.
        shown = [{"type": "image"}] * 2 if sees else []
        messages: list[Message] = [{"role": "user", "content": [*shown, *said(_ASKED)] if sees else _ASKED}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": said(system)})
        text = template.render(messages, **variables)
        front, between, rest = "", "", text
        if sees:
            parts = self._around_images(text)
            front, between, rest = parts if len(parts) == 3 else ("", "", "")

        before, asked, behind = rest.partition(_ASKED)
        if not asked:
            raise InputError(
                f"chat template {template.name}: got a message of two images and a text rendered as {text!r:.80}; "
                "expected each image and then the text (else lay the prompt out yourself, by `lead` and `around`)"
            )

        if not sees:
            front, before = before, ""
        own = self._own_special_tokens()[0] if sees and not template.starts(text) else []
        encode = self._texts.encode
        return ChatFrame((*own, *encode(front)), Template(before), Template(behind), tuple(encode(between)))

    def _around_images(self, text: str) -> list[str]:
        """Returns what a rendered text has in front of its images, between and behind them."""
        spelling, mark = self.family.vision.spelling if self.family.vision else None, self._mark()
        if spelling is None:
            return text.split(self._image_mark(text) if mark is None else mark.text)
        if any(self._own_special_tokens()):
            raise InputError(
                f"chat_frame: got {self.family.architecture} with a tokenizer that puts tokens of its own around every "
                "text between images; expected one that puts none (or a prompt by `chat`)"
            )
        return re.split(spelling, text)

    def ids(self, text: str | Sequence[str]) -> list[int]:
        """Turns a text into token ids, without what the tokenizer itself puts around one.

        A text that spells a control token (`<|im_end|>`, `<image>`) is tokenized as any other; in a
        `kvpatch_jax.cache.Template` it is the token.

        Args:
          text: a text, or texts that are tokenized as one.

        Raises:
          InputError: no tokenizer, or text that it does not know.
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(part, str) for part in texts):
            raise InputError(f"ids: got {text!r:.80}; expected a text, or a list of texts")
        if self.tokenizer is None:
            raise InputError(
                f"text {''.join(texts)[:40]!r}: got no tokenizer ({self.without_tokenizer}); expected token ids instead"
            )
        return self._texts.encode(
            "".join(str(part) if isinstance(part, Template) else self._texts.literal(part) for part in texts)
        )

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

    def _image_mark(self, text: str) -> str:
        """Returns what stands for an image in a rendered text, with the image's own marks where they are there too."""
        _, runs = self._process([("image", np.zeros((224, 224, 3), np.uint8))])
        pad, before, after = self._image_placeholder(self._ids_of(runs[0]))
        tokens = texts_of(self.tokenizer, [*before, pad, *after])
        # Some templates write an image's start and end themselves, others leave them to the processor.
        marked = "".join(tokens)
        return marked if marked in text else tokens[len(before)]

    def text(self, token_ids: Sequence[int] | Int[Array | np.ndarray, " T"]) -> str:
        """Decodes token ids to text."""
        if self.tokenizer is None:
            raise InputError(f"text: got no tokenizer ({self.without_tokenizer}); expected one in its directory")
        array = np.asarray(token_ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (array.size and array.min() < 0):
            raise InputError(f"text: got {token_ids!r:.80}; expected token ids [T]")
        return self.tokenizer.decode(array.tolist(), skip_special_tokens=False)

    def _prompt(self, ids: list[int], arrays: Mapping[str, Any]) -> dict[str, Any]:
        if ids and max(ids) > np.iinfo(np.int32).max:
            raise InputError(f"token ids: got {max(ids)}; expected ids of the vocabulary")
        input_ids = np.array(ids, np.int32)
        positions = self.family.positions(self.config, input_ids, arrays)
        return {"input_ids": input_ids[None], "position_ids": positions[None], **arrays}

    @property
    def _texts(self) -> TextEncoder:
        """Encodes texts, in which what places an image, a video or a sound is text as well."""
        if self._encoder is None or self._encoder.tokenizer is not self.tokenizer:
            family, marks = self.family, list[Any]()
            if family.vision is not None and family.vision.spelling is not None:
                marks.append(re.compile(family.vision.spelling))
            for medium in (family.video, family.audio):
                with contextlib.suppress(InputError):
                    marks += [] if medium is None else [medium.written(self.config, self.tokenizer)[0]]
            self._encoder = TextEncoder(self.tokenizer, {*control_tokens(self.config), *self.stop_tokens}, marks)
        return self._encoder

    def _own_special_tokens(self) -> tuple[list[int], list[int]]:
        """Returns ids that the tokenizer itself puts before and behind a text (a start token, mostly)."""
        # What stands around a text does not depend on the text, so any will do.
        bare, whole = (list(self.tokenizer.encode("a", add_special_tokens=flag).ids) for flag in (False, True))
        places = range(len(whole) - len(bare) + 1)
        first = next((place for place in places if whole[place : place + len(bare)] == bare), 0)
        return whole[:first], whole[first + len(bare) :]

    def _medium(self, sort: str) -> Any:
        """Returns what the family does with images (a `Vision`), videos or sounds (a `Medium`).

        Raises:
          InputError: the family takes none, or its directory says nothing of how.
        """
        medium = {"image": self.family.vision, "video": self.family.video, "audio": self.family.audio}[sort]
        if medium is None:
            other = "its frames as images" if sort == "video" and self.family.vision is not None else "text"
            raise InputError(f"{sort}s: got some for {self.family.architecture}, which takes none; expected {other}")
        if sort != "image" and self._settings_of(sort) is None:
            raise InputError(f"{sort}s: got some for a backbone without settings of them; expected {sort}_config")
        return medium

    def _settings_of(self, sort: str) -> Any:
        return {"image": self.image_config, "video": self.video_config, "audio": self.audio_config}[sort]

    def _process(self, media: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], list[Run]]:
        """Returns the arrays of a prompt's images, videos and sounds, and what stands for each in turn."""
        # Sounds are those that stand alone and those of videos, in the prompt's order.
        items: dict[str, list[Any]] = {sort: [] for sort in MEDIA}
        numbers, heard = list[int](), list[int | None]()
        for sort, item in media:
            item = medium_of(item) or item
            numbers.append(len(items[sort]))
            items[sort].append(item)
            if isinstance(item, Video):
                heard.append(len(items["audio"]) if item.sound else None)
                if item.sound and self.family.audio is None:
                    raise InputError(
                        f"video: got sound=True for {self.family.architecture}, which hears none; expected false"
                    )
                items["audio"] += [Audio(item.read().source)] if item.sound else []

        arrays: dict[str, Mapping[str, Any]] = {}
        for sort in MEDIA:
            if items[sort]:
                arrays[sort] = self._medium(sort).process(items[sort], self._settings_of(sort))
        runs, seen = [], dict(arrays)
        if "video" in arrays:
            seen["video"] = {**arrays.get("audio", {}), **arrays["video"], VIDEO_SOUNDS: heard}
        for (sort, _), number in zip(media, numbers, strict=True):
            runs.append(self._medium(sort).tokens(self.config, seen[sort], number, self.tokenizer))
        return self.family.join(self.config, arrays, [sort for sort, _ in media]), runs

    def _image_placeholder(self, ids: Sequence[int]) -> Placeholder:
        """Returns what a template writes for an image that these ids stand for."""
        pad = self.config.image_token
        first, last = ids.index(pad), len(ids) - ids[::-1].index(pad)
        return Placeholder(pad, list(ids[:first]), list(ids[last:]))

    def _ids_of(self, run: Run) -> list[int]:
        """Returns the token ids of an image, video or sound whose texts are tokenized each by itself."""
        ids: list[int] = []
        for piece in run:
            ids += self._texts.encode(piece) if isinstance(piece, str) else [piece]
        return ids

    def _mark(self) -> ImageMark | None:
        """Returns what a chat template writes for an image, where that is not the placeholder."""
        vision = self.family.vision
        if vision is None or vision.mark is None:
            return None
        token, around = vision.mark(self.config)
        text = self.tokenizer.id_to_token(token)
        if text is None:
            raise InputError(f"chat: got image token {token} without a text in the tokenizer; expected one")
        return ImageMark(token, text, around)
