"""Traces: events in the windows of agents as JSON Lines, a header and then one event a line."""

import contextlib
import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache import content_digest, decoded, sort_of
from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..utils.optional_packages import require
from ..window import is_count
from .events import Event

HEADER = {"format": "kvpatch_jax.trace", "version": 1}
Watcher = Callable[[Event, Sequence[Any]], None]
"""Called with each event of a session, and the images or texts that it brought. The watcher sets the event's time."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Events in the order in which they happened.

    Attributes:
      events: of all sessions.
      lead: the number of pieces that every window pins at its front; None: its first chunk.
      folder: of the payloads; None if there are none, or it is unknown.
    """

    events: tuple[Event, ...]
    lead: int | None = None
    folder: Path | None = None

    def payloads(self, event: Event) -> tuple[Path, ...]:
        """Returns the files of an event's content.

        Raises:
          InputError: no folder, or a path that is no regular file below it, links followed.
        """
        if event.payload and self.folder is None:
            raise InputError(f"trace.folder: got None; expected the folder with {event.payload[0]!r:.80}")
        root, paths = (self.folder or Path()).resolve(), []
        for name in event.payload:
            try:
                path = (root / name).resolve()
                is_below = path.is_relative_to(root) and path.is_file()
            except (OSError, RuntimeError, ValueError):  # a name that is too long, a loop of links, a NUL
                path, is_below = name, False
            if not is_below:
                raise InputError(f"payload: got {str(path)!r:.200}; expected a regular file below {str(root)!r:.80}")
            paths.append(path)
        return tuple(paths)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, completely or not at all. Payloads stay where they are.

        Raises:
          InputError: a file that cannot be written.
        """
        path = path_of(path, "trace", InputError)
        lines = [HEADER | {"lead": self.lead}, *(event.to_dict() for event in self.events)]
        try:
            replace(path, b"".join(map(_line, lines)))
        except OSError as error:
            raise InputError(f"trace: got {str(path)!r:.200}, which cannot be written: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Trace":
        """Reads a trace. Its folder is that of the file.

        Raises:
          InputError: a file that cannot be read; a line that is no event or header of this version, naming the line.
        """
        path = path_of(path, "trace", InputError)
        try:
            *lines, last = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"trace: got {str(path)!r:.200}, which cannot be read: {error}") from error

        where = f"{str(path)!r:.200}, line"
        # A writer that was killed leaves the beginning of a line.
        with contextlib.suppress(ValueError):
            strict_json.loads(last)
            lines.append(last)
        lines = lines or [last]
        header, *rest = [strict_json.object_of(line, f"{where} {n}") for n, line in enumerate(lines, 1)]
        lead = header.pop("lead", None)
        if header != HEADER or not (lead is None or is_count(lead, 0)):
            raise InputError(
                f"{where} 1: got header {header!r:.200} and lead {lead!r:.80}; expected {HEADER} and a count"
            )
        return cls(tuple(Event.of(fields, f"{where} {n}") for n, fields in enumerate(rest, 2)), lead, path.parent)


class Recorder:
    """Watcher that appends a line to a new file for each event of the sessions that it is attached to, and their forks.

        with Recorder("runs/monday.jsonl") as recorder:
            session.watchers.append(recorder)
            …

    Images are stored as PNG files beside the trace, each once. What a session had before, its lead too, is not written.
    An error while recording (a full disk) is not raised in the session: recording ends there, and `close` raises it.

    Args:
      lead: the number of pieces that the sessions pin at their front; None: the first chunk.

    Raises:
      InputError: a file that exists or cannot be created, or another `lead`.
    """

    def __init__(self, path: str | os.PathLike[str], lead: int | None = None):
        if not (lead is None or is_count(lead, 0)):
            raise InputError(f"recorder.lead: got {lead!r:.80}; expected a number of pieces, or None")
        self._path = path_of(path, "recorder", InputError)
        self._error: Exception | None = None
        self._began, self._lock = time.monotonic(), threading.Lock()
        try:
            # Not buffered, so that a process that is killed leaves all but the last line.
            self._file = self._path.open("xb", buffering=0)
            self._file.write(_line(HEADER | {"lead": lead}))
        except OSError as error:
            raise InputError(f"trace: got {str(path)!r:.200}: {error}; expected a new file") from error

    def __call__(self, event: Event, items: Sequence[Any] = ()) -> None:
        """Records an event at the present time, and the images among the items that it brought. Raises nothing."""
        with self._lock:
            if self._file.closed:
                return
            try:
                payload = tuple(self._stored(item) for item in items if sort_of(item, "recorder") == "image")
                event = dataclasses.replace(event, at=time.monotonic() - self._began, payload=payload)
                self._file.write(_line(event.to_dict()))
            except Exception as error:
                # The session must not fail because its recorder does.
                self._error = error
                self._file.close()

    def close(self) -> None:
        """Ends the trace. Idempotent.

        Raises:
          InputError: recording had ended before. The file has all events up to there.
        """
        with self._lock:
            self._file.close()
            error, self._error = self._error, None
        if error is not None:
            raise InputError(f"recorder: {str(self._path)!r:.200} ended early: {error}") from error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stored(self, image: Any) -> str:
        """Writes an image, named by its pixels, to a file unless it is there; returns its path from the trace."""
        pixels = decoded(image)
        folder = self._path.parent / f"{self._path.stem}_images"
        target = folder / f"{content_digest(pixels)[:32]}.png"
        if not target.exists():
            folder.mkdir(exist_ok=True)
            file = io.BytesIO()
            require("PIL.Image", "Pillow").fromarray(pixels).save(file, "PNG", compress_level=1)
            replace(target, file.getvalue())
        return f"{folder.name}/{target.name}"


def _line(fields: Mapping[str, Any]) -> bytes:
    # JSON escapes line breaks in texts, so an event is one line.
    return json.dumps(fields, allow_nan=False).encode() + b"\n"
