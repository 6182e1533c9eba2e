"""References in text, such as `IMAGE#LOUVRE2025`: parsing and escaping.

    reference = KIND "#" name [ "@" version ]
    KIND      = "IMAGE" | "TEXT" | "TOKENS" | "FILE", not after a letter, a digit or "_"
    name      = words of A-Z a-z 0-9 _ with single "." or "-" between them
              | "{" any printable characters but braces, 200 at most "}"
    version   = a number from 1, not followed by a letter, a digit or "_"

Everything else is text: a full stop after a name, a KIND without a name, `ISSUE#12`. A backslash before "#" escapes a
reference: `IMAGE\\#LOUVRE2025` is the text `IMAGE#LOUVRE2025`. Of several backslashes between a KIND and "#" one is
removed, so that `escape` can express any text. The syntax is MPIC's (section 1, figure 1).
"""

import dataclasses
import re
import unicodedata
from typing import Literal

from ..errors import InputError

Kind = Literal["IMAGE", "TEXT", "TOKENS", "FILE"]
KINDS: tuple[Kind, ...] = ("IMAGE", "TEXT", "TOKENS", "FILE")
MAX_NAME = 200

_BARE = r"[A-Za-z0-9_]+(?:[.-][A-Za-z0-9_]+)*"
_BRACED = r"\{(?P<braced>[^{}]{1,200})\}"
_HEAD = rf"(?<![A-Za-z0-9_])(?P<kind>{'|'.join(KINDS)})"
_REFERENCE = re.compile(
    rf"{_HEAD}(?:(?P<escaped>\\+)#|#(?:(?P<bare>{_BARE})|{_BRACED})(?:@(?P<version>[1-9][0-9]{{0,8}})(?![A-Za-z0-9_]))?)"
)
_ESCAPE = re.compile(rf"({_HEAD}\\*)#")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A parsed reference: a kind, a name, and an optional version."""

    kind: Kind
    name: str
    version: int | None = None

    def __str__(self) -> str:
        """Returns the reference as it is written in a prompt."""
        name = self.name if re.fullmatch(_BARE, self.name) else f"{{{self.name}}}"
        return f"{self.kind}#{name}" + ("" if self.version is None else f"@{self.version}")


def check_name(kind: str, name: str) -> tuple[Kind, str]:
    """Returns a kind and a name in their normal form: names in Unicode's composed form (NFC).

    Raises:
      InputError: the kind is unknown, or no reference can express the name.
    """
    if kind not in KINDS:
        raise InputError(f"library: got kind {kind!r}; expected one of {KINDS}")
    if not isinstance(name, str):
        raise InputError(f"library: got name {name!r:.80}; expected a str")
    name = unicodedata.normalize("NFC", name)
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or "{" in name or "}" in name:
        raise InputError(f"library: got name {name[:80]!r}; expected 1 to {MAX_NAME} printable characters, no braces")
    return kind, name


def parse_prompt(prompt: str) -> list[str | Reference]:
    """Splits a prompt into texts and references, in order. Empty texts are left out, adjacent ones joined.

    Raises:
      InputError: the prompt is no str.
    """
    if not isinstance(prompt, str):
        raise InputError(f"prompt: got {prompt!r:.80}; expected a str")

    segments: list[str | Reference] = []
    text, end = "", 0
    for match in _REFERENCE.finditer(prompt):
        text += prompt[end : match.start()]
        end = match.end()
        reference = _reference_of(match)
        if reference is None:
            text += match[0].replace("\\", "", 1) if match["escaped"] else match[0]
            continue
        segments += [text, reference] if text else [reference]
        text = ""

    text += prompt[end:]
    return segments + ([text] if text else [])


def _reference_of(match: re.Match[str]) -> Reference | None:
    if match["escaped"] is not None:
        return None
    try:
        kind, name = check_name(match["kind"], match["bare"] or match["braced"])
    except InputError:
        return None  # no name that a library can have
    return Reference(kind, name, None if match["version"] is None else int(match["version"]))


def escape(text: str) -> str:
    """Returns text escaped, so that `parse_prompt` finds no reference in it. Raises InputError as that does."""
    if not isinstance(text, str):
        raise InputError(f"escape: got {text!r:.80}; expected a str")
    return _ESCAPE.sub(r"\1\\#", text)
