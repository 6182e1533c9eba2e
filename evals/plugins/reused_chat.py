"""Answers to messages in the form that chat templates take; their images, videos and texts are reused as chunks."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import kvpatch_jax as kvp
from kvpatch_jax.cache import content_items
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.window import PatchStore

SYSTEM_PROMPTS = 4
"""System prompts whose sessions are open at once."""


class ReusedAnswer(NamedTuple):
    """An answer.

    Attributes:
      text: up to the first stop text.
      prompt_tokens: of system prompt, pieces and question. prefilled: of these, tokens of pieces that needed a forward.
    """

    text: str
    prompt_tokens: int
    prefilled: int


class ReusedChat:
    """Answers messages over KV that requests share.

    One session per system prompt is open, and every request is a fork of it: the pieces of its message are added in
    order, served by what the store has of them, and the last text is asked. Without `approximate` only what is exact is
    reused: the same pieces in the same order. With it a piece is also served by a patch formed behind the same pieces,
    or by what was prefilled behind others that ended alike (`SessionConfig.reuse`), and answers differ from those
    of a prefill as `python -m evals.measure` says for your data.
    """

    def __init__(
        self, backbone: ModelBackbone, store: PatchStore | None = None, *, approximate: bool = True, **options: Any
    ):
        """Prepares to answer; nothing is allocated yet.

        Args:
          backbone: with a tokenizer and a chat template.
          store: a `ChunkStore`, to share KV between processes and runs. None: this process's memory.
          options: of `SessionConfig` besides.
        """
        self.backbone, self.store = backbone, store
        self._options = {"chat": True, **({"reuse": "patched", "rank": 16} if approximate else {}), **options}
        self._sessions = collections.OrderedDict[str | None, kvp.Session]()

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        steps: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> ReusedAnswer:
        """Answers the last user message.

        Args:
          messages: {"role", "content"} each: a system message or none, and one user message. A content is a text, or a
            list of parts, as `kvpatch_jax.cache.part_item` reads them.
          steps, temperature, top_p: as of `Session.ask`.
          stop: texts that end an answer and are left out, besides the checkpoint's own stop tokens.

        Raises:
          InputError: several turns, a content of another form, no question. What a session raises.
        """
        system, pieces, question = _parts(messages)
        with self._session(system).fork() as branch:
            before = branch.stats().tokens
            for piece in pieces:
                branch.add(piece)
            text = ""
            for part in branch.ask(kvp.Text(question), steps=steps, temperature=temperature, top_p=top_p):
                text += part
                # A stop text may end inside a part, or have begun in the one before.
                if any(word in text for word in stop):
                    break
            ends = [place for word in stop if (place := text.find(word)) >= 0]
            prompt, prefilled = branch.window.tokens + len(self.backbone.ids(question)), branch.stats().tokens - before
        return ReusedAnswer(text[: min(ends)] if ends else text, prompt, prefilled)

    def close(self) -> None:
        """Closes all sessions: what they formed is stored. Idempotent."""
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _session(self, system: str | None) -> kvp.Session:
        if system not in self._sessions:
            if len(self._sessions) == SYSTEM_PROMPTS:
                self._sessions.popitem(last=False)[1].close()
            lead = None if system is None else kvp.Text(system)
            self._sessions[system] = kvp.Session(self.backbone, self.store, lead=lead, **self._options)
        self._sessions.move_to_end(system)
        return self._sessions[system]


def _parts(messages: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[Any], str]:
    """Returns the system prompt, the pieces of the user message, and its last text."""
    roles = [message.get("role") for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise InputError(
            f"messages: got roles {roles!r:.120}; expected a user message, behind a system message or none"
        )
    system = None
    if len(messages) == 2:
        texts = content_items(messages[0], "messages: system")
        if not all(isinstance(text, kvp.Text) for text in texts):
            raise InputError("messages: got an image, video or sound in the system message; expected texts")
        system = "".join(texts)

    pieces = content_items(messages[-1], "messages: user")
    texts = [piece for piece in pieces if isinstance(piece, kvp.Text) and piece.strip()]
    if not texts or pieces[-1] is not texts[-1]:
        raise InputError(
            f"messages: got {len(pieces)} entries, the last of which is no text; expected the question last"
        )
    return system, [piece for piece in pieces[:-1] if not isinstance(piece, kvp.Text) or piece], str(pieces[-1])
