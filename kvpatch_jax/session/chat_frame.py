"""What a chat template puts around a session's window and questions, so that images stay chunks."""

from typing import Any

from ..cache import check_text
from ..errors import SessionError


def framed(backbone: Any, lead: Any, around: tuple[str, str]) -> tuple[list[int] | None, tuple[str, str]]:
    """The lead's token ids (None: nothing is in front), and what stands around every question.

    Args:
      lead: the system prompt, or None for the template's own.

    Raises:
      SessionError: another lead, something around, or a backbone without chat templates. What the backbone raises of
      its template.
    """
    if lead is not None and not isinstance(lead, str):
        raise SessionError(f"session: lead {lead!r:.80} with chat; expected a text, the system prompt, or None")
    if lead is not None:
        check_text(lead, "session: lead")
    if around != ("", ""):
        raise SessionError(f"session: around {around!r:.80} with chat; expected none, for the template says it")
    if not all(hasattr(backbone, word) for word in ("chat_frame", "ids")):
        raise SessionError(f"session: chat with a {type(backbone).__name__}; expected what models.load gives")
    frame = backbone.chat_frame(None if lead is None else str(lead))
    return list(frame.front) or None, (frame.before, frame.behind)
