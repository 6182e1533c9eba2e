"""Chat templates: messages to the text a checkpoint was trained on, by the Jinja template in its directory."""

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.cache import check_text, content_items, sort_of
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.optional_packages import require

from ..checkpoints import read_table
from .tokenizer_files import TOKENIZER_CONFIG_FILE

TEMPLATE_FILE = "chat_template.jinja"
_JSON_FILES = ("chat_template.json", "processor_config.json", TOKENIZER_CONFIG_FILE)

Message = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A template and the texts of the special tokens it may name.

    Attributes:
      source: the template, in Jinja.
      special_tokens: name (`bos_token`, …) and text of each, in pairs.
      name: where it was read, for messages.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    name: str = TEMPLATE_FILE

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> "ChatTemplate | None":
        """Returns the directory's template, from `chat_template.jinja` or else the JSON files; None where there is
        none.

        Raises:
          ConfigError: a file that is not JSON or no text, no template in it, or several of which none is the default.
        """
        root = Path(directory)
        tokens = _special_tokens(read_table(root / TOKENIZER_CONFIG_FILE))
        if os.path.lexists(root / TEMPLATE_FILE):
            try:
                source = (root / TEMPLATE_FILE).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{root / TEMPLATE_FILE}: got a file that is no text ({error}); expected a template in UTF-8"
                ) from error
            return cls(source, tokens, str(root / TEMPLATE_FILE))

        for name in _JSON_FILES:
            found = read_table(root / name).get("chat_template")
            if found is not None:
                return cls(_default(found, root / name), tokens, str(root / name))

        return None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any) -> str:
        """Returns the messages as one text, by transformers' sandboxed environment.

        Args:
          messages: {"role", "content"} each; a content is a text, or a list of {"type", …}, the type being "text",
            "image", "video" or "audio".
          add_generation_prompt: end with what opens the assistant's answer.
          variables: further names the template knows (`tools`, `enable_thinking`, …).

        Raises:
          ConfigError: a template that is not Jinja, or does what the sandbox forbids. InputError: messages that the
            template refuses, or with which it fails (arguments of a tool call as a text where it expects a table, say).
        """
        jinja2 = require("jinja2", "jinja2")
        render = require("transformers.utils.chat_template_utils", "transformers").render_jinja_template
        given = {**dict(self.special_tokens), "tools": None, "documents": None, **variables}
        try:
            return render(
                [list(messages)], chat_template=self.source, add_generation_prompt=add_generation_prompt, **given
            )[0][0]
        except jinja2.TemplateError as error:
            # What a template itself raises is of this very class.
            if type(error) is jinja2.TemplateError:
                raise InputError(
                    f"chat template {self.name}: got messages that it refuses ({error}); expected others"
                ) from error
            raise ConfigError(
                f"chat template {self.name}: got one that cannot be used ({error}); expected another"
            ) from error
        # A template's own code runs on the messages: it fails as any code does with values of kinds it does not expect.
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InputError(
                f"chat template {self.name}: got messages with which it fails ({type(error).__name__}: {error}); "
                "expected others"
            ) from error

    def starts(self, text: str) -> bool:
        """Returns whether a rendered text begins with the tokenizer's start token."""
        start = dict(self.special_tokens).get("bos_token")
        return bool(start) and text.startswith(start)

    def save(self, directory: str | os.PathLike[str]) -> Path:
        """Writes the template. Returns its path."""
        path = Path(directory) / TEMPLATE_FILE
        path.write_text(self.source, encoding="utf-8")
        return path


def template_with_images(
    found: ChatTemplate | None, own: str | None, directory: str | os.PathLike[str], whose: str
) -> ChatTemplate | None:
    """Returns a directory's template, or a family's `own` where the directory has one in `tokenizer_config.json` at
    most: those that need it write texts there and no images.

    Args:
      found: as `from_directory` reads it. own: in Jinja, or None for a family whose directories bring theirs.
      whose: the architecture, for messages.
    """
    if own is None or (found is not None and Path(found.name).name != TOKENIZER_CONFIG_FILE):
        return found
    root = Path(directory)
    return ChatTemplate(own, _special_tokens(read_table(root / TOKENIZER_CONFIG_FILE)), f"{root} ({whose}'s own)")


def _special_tokens(table: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns `…_token` entries, written as text or as {"content": text}."""

    def text(value):
        return value.get("content") if isinstance(value, Mapping) else value

    found = {name: text(value) for name, value in sorted(table.items()) if name.endswith("_token")}
    return tuple((name, value) for name, value in found.items() if isinstance(value, str))


def _default(found: Any, path: Path) -> str:
    """Returns the template among those a file has: one text, or [{"name", "template"}]."""
    if isinstance(found, str):
        return found
    entries = found if isinstance(found, list) else [None]
    named = {}
    for entry in entries:
        name, template = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise ConfigError(
                f"{path}: got chat_template {found!r:.80}; expected a text, or a list of {{'name', 'template'}}"
            )
        named[name] = template
    if "default" not in named:
        raise ConfigError(f"{path}: got chat templates {sorted(named)}; expected one named 'default'")
    return named["default"]


def read_messages(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[str, Any]]]:
    """Returns messages with their parts in the form that templates read, {"type": "text", "text": …} and {"type":
    "image", "image": True} ("video", "audio" alike), and their media in order, each with its type.

    Raises:
      InputError: messages that are not a list of tables; a user's content that is a str and looks like a file (see
        `cache.check_text`); what `content_items` refuses.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise InputError(
            f"chat: got messages of type {type(messages).__name__}; expected a list of {{'role', 'content'}}"
        )

    result: list[Message] = []
    media: list[tuple[str, Any]] = []
    for message in messages:
        items = content_items(message, "chat")
        content = message.get("content")
        if isinstance(content, str) and message.get("role") == "user":  # an assistant may answer with a file's name
            check_text(content, "chat: content")
        if content is None or isinstance(content, str):
            result.append(message)
            continue
        parts = [(sort_of(item), item) for item in items]
        shown = [{"type": sort, sort: item if sort == "text" else True} for sort, item in parts]
        result.append({**message, "content": shown})
        media += [part for part in parts if part[0] != "text"]

    return result, media


class Placeholder(NamedTuple):
    """What a template writes for an image, a video or a sound: one token, and those that may stand around it.

    Attributes:
      token: its id.
      before, after: start and end tokens that the template may write, and that what it is replaced by has too.
    """

    token: int
    before: list[int]
    after: list[int]


def expand_media(
    ids: Sequence[int], expansions: Sequence[tuple[Placeholder, Sequence[int]]], tokens: Collection[int]
) -> list[int]:
    """Returns token ids with every placeholder replaced by all the tokens that stand for it.

    A template writes one placeholder per image, alone (LLaVA) or between start and end tokens (Qwen); in the latter
    case these are taken for those of what replaces it.

    Args:
      expansions: of each placeholder in order, and what replaces it. tokens: ids that are placeholders.

    Raises:
      InputError: more or fewer placeholders than expected, or others.
    """
    places = [place for place, token in enumerate(ids) if token in tokens]
    found, expected = [ids[place] for place in places], [placeholder.token for placeholder, _ in expansions]
    if len(found) != len(expected):
        raise InputError(f"rendered messages: got {len(found)} image placeholders; expected {len(expected)}")
    if found != expected:
        raise InputError(f"rendered messages: got placeholders {found}; expected {expected}")

    out: list[int] = []
    cursor = 0
    for place, ((token, before, after), run) in zip(places, expansions, strict=True):
        # Start and end tokens that the template wrote itself are in the run too, and must not be there twice.
        start, stop = place - len(before), place + 1 + len(after)
        whole = start >= cursor and list(ids[start:stop]) == [*before, token, *after]
        start, stop = (start, stop) if whole else (place, place + 1)
        out += [*ids[cursor:start], *run]
        cursor = stop

    return [*out, *ids[cursor:]]


def replaced(text: str, written: tuple[str, str, str], spelled: Sequence[str], sort: str) -> str:
    """Returns a rendered text with each placeholder of videos or sounds replaced by what stands for it.

    Args:
      written: the placeholder, and what the template may write before and after it, which goes with it.
      spelled: what stands for each in order. sort: what errors call them.

    Raises:
      InputError: more or fewer placeholders than videos or sounds.
    """
    placeholder, before, after = map(re.escape, written)
    parts = re.split(f"{before}{placeholder}{after}|{placeholder}", text)
    if len(parts) != len(spelled) + 1:
        raise InputError(f"rendered messages: got {len(parts) - 1} {sort} placeholders; expected {len(spelled)}")
    out = parts[0]
    for own, behind in zip(spelled, parts[1:], strict=True):
        out += own + behind
    return out
