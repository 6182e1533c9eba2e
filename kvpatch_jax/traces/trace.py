"""Traces: events in the windows of agents as JSON Lines, a header and then one event a line."""

import dataclasses
import io
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache import content_digest, decoded, sort_of
from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..utils.optional_packages import require
from .events import Event

HEADER = {"format": "kvpatch_jax.trace", "version": 1}
Watcher = Callable[[Event, Sequence[Any]], None]
"""Called with each event of a session, and the images or texts that it brought. The watcher sets the event's time."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """Events in the order in which they happened.

    Attributes:
      events: of all sessions.
      parameters: of the program that made the trace: a flat table.
      folder: of the payloads; None if there are none, or it is unknown.
    """

    events: tuple[Event, ...]
    parameters: Mapping[str, str | int | float | bool | None] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of all sessions, including branches, in the order of their first events."""
        names = [name for event in self.events for name in (event.session, event.branch) if name is not None]
        return tuple(dict.fromkeys(names))

    def of(self, session: str) -> tuple[Event, ...]:
        """Returns the events of one session, without those of the session that it was forked from."""
        return tuple(event for event in self.events if event.session == session)

    def payloads(self, event: Event) -> tuple[Path, ...]:
        """Returns the files of an event's content.

        Raises:
          InputError: no folder, or a path that is no regular file below it, links followed.
        """
        if event.payload and self.folder is None:
            raise InputError(f"trace.folder: got None; expected the folder with {event.payload[0]!r:.80}")
        root = (self.folder or Path()).resolve()
        paths = tuple((root / name).resolve() for name in event.payload)
        for path in paths:
            if not path.is_relative_to(root) or not path.is_file():
                raise InputError(f"payload: got {str(path)!r:.200}; expected a regular file below {str(root)!r:.80}")
        return paths

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, completely or not at all. Payloads stay where they are.

        Raises:
          InputError: a file that cannot be written.
        """
        path = path_of(path, "trace", InputError)
        lines = [HEADER | {"parameters": dict(self.parameters)}, *(event.to_dict() for event in self.events)]
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
            lines = path.read_bytes().splitlines() or [b""]
        except OSError as error:
            raise InputError(f"trace: got {str(path)!r:.200}, which cannot be read: {error}") from error

        parameters, events = {}, []
        for number, line in enumerate(lines, 1):
            where = f"{str(path)!r:.200}, line {number}"
            fields = strict_json.object_of(line, where, InputError)
            if number == 1:
                parameters = fields.pop("parameters", {})
                if fields != HEADER or not isinstance(parameters, dict):
                    raise InputError(f"{where}: got header {fields!r:.200}; expected {HEADER} and parameters")
                continue
            try:
                events.append(Event.of(fields))
            except InputError as error:
                raise InputError(f"{where}: {error}") from None
        return cls(tuple(events), parameters, path.parent)


class Recorder:
    """Writer of a trace, which appends a line for each event of the sessions that it watches.

        with Recorder("runs/monday.jsonl") as recorder:
            recorder.watch(session)
            …

    Images are stored as PNG files beside the trace, each once. An error while recording (a full disk) is not raised in
    the session: recording ends there, and `close` raises it.

    Args:
      path: of a new file.

    Raises:
      InputError: a file that exists or cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = path_of(path, "recorder", InputError)
        self._error: Exception | None = None
        self._began, self._lock = time.monotonic(), threading.Lock()
        try:
            self._file = self._path.open("xb")
            self._append(HEADER)
        except OSError as error:
            raise InputError(f"trace: got {str(path)!r:.200}: {error}; expected a new file") from error

    def watch(self, session: Any) -> None:
        """Records the events of a session from now on, and of its forks.

        Raises:
          InputError: no session.
        """
        if not isinstance(getattr(session, "watchers", None), list):
            raise InputError(f"recorder: got a {type(session).__name__}; expected a Session, which has watchers")
        if self not in session.watchers:
            session.watchers.append(self)

    def __call__(self, event: Event, items: Sequence[Any] = ()) -> None:
        """Records an event at the present time, and the images among the items that it brought. Raises nothing."""
        with self._lock:
            if self._error is not None or self._file.closed:
                return
            try:
                payload = event.payload or tuple(
                    self._stored(item) for item in items if sort_of(item, "recorder") == "image"
                )
                at = time.monotonic() - self._began
                self._append(dataclasses.replace(event, at=at, payload=payload).to_dict())
            except Exception as error:
                # The session must not fail because its recorder does.
                self._error = error

    def close(self) -> None:
        """Ends the trace. Idempotent.

        Raises:
          InputError: recording had ended before. The file has all events up to there.
        """
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        if self._error is not None:
            raise InputError(f"recorder: {str(self._path)!r:.200} ended early: {self._error}") from self._error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, fields: Mapping[str, Any]) -> None:
        # Flushed line by line, so that a process that is killed leaves all but the last.
        self._file.write(_line(fields))
        self._file.flush()

    def _stored(self, image: Any) -> str:
        """Writes an image, named by its pixels, to a file unless it is there; returns its path from the trace."""
        pixels = decoded(image)
        target = self._path.parent / f"{self._path.stem}_images" / f"{content_digest(pixels)[:32]}.png"
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            file = io.BytesIO()
            require("PIL.Image", "Pillow").fromarray(pixels).save(file, "PNG", compress_level=1)
            replace(target, file.getvalue())
        return target.relative_to(self._path.parent).as_posix()


def _line(fields: Mapping[str, Any]) -> bytes:
    # JSON escapes line breaks in texts, so an event is one line.
    return json.dumps(fields, allow_nan=False).encode() + b"\n"
