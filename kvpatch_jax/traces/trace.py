"""Traces: events in the windows of agents, as JSONL that placement reads and evaluations replay.

The first line is a header, every other one an event. Anybody may have written a trace, so that every line is checked,
and an invalid one is refused by its number.
"""

import dataclasses
import io
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..cache import content_digest, decoded, sort_of
from ..errors import TraceError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..utils.optional_packages import require
from .events import Event, check_history, check_path

FORMAT, VERSION = "kvpatch_jax.trace", 1
LINE = 1 << 20
"""The largest number of bytes of a line."""
EVENTS = 1_000_000
"""The largest number of events of a trace."""
PARAMETERS = 64
"""The largest number of parameters of a header."""

Scalar = str | int | float | bool | None
Watcher = Callable[[Event, Sequence[Any]], None]
"""Called with each event of a session, and the images or texts that it brought. The watcher sets the event's time."""


@runtime_checkable
class EventSource(Protocol):
    """A session that notifies watchers of its events."""

    watchers: list[Watcher]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Events in the order in which they happened, an immutable value.

    Attributes:
      events: of all sessions.
      kind: what the agent did, such as "screenshots"; "recorded" if unknown.
      parameters: of the program that made the trace: a flat table.
      folder: of the payloads; None if there are none, or it is unknown.

    Raises:
      TraceError: events that cannot have happened (`check_history`), an invalid kind, or parameters that are not flat.
    """

    events: tuple[Event, ...]
    kind: str = "recorded"
    parameters: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not all(isinstance(event, Event) for event in self.events):
            raise TraceError(f"trace.events: got a {type(self.events).__name__}; expected a tuple of Event")
        if len(self.events) > EVENTS:
            raise TraceError(f"trace.events: got {len(self.events)} events; expected at most {EVENTS}")
        _check_header(self.kind, self.parameters)
        check_history(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of all sessions, including branches, in the order of their first events."""
        # A dictionary, because sets keep no order.
        names: dict[str, None] = {}
        for event in self.events:
            names.setdefault(event.session)
            if event.branch is not None:
                names.setdefault(event.branch)
        return tuple(names)

    def of(self, session: str) -> tuple[Event, ...]:
        """Returns the events of one session, without those of the session that it was forked from."""
        return tuple(event for event in self.events if event.session == session)

    def payloads(self, event: Event) -> tuple[Path, ...]:
        """Returns the files of an event's content.

        Raises:
          TraceError: no folder, a file that is missing or not regular, or one that links lead out of the folder.
        """
        if not isinstance(event, Event):
            raise TraceError(f"payloads: got {event!r:.80}; expected an Event")
        if not event.payload:
            return ()
        if self.folder is None:
            raise TraceError(f"trace.folder: got None; expected the folder with {event.payload[0]!r:.80}")

        paths = []
        for name in event.payload:
            check_path(name)

            # A link inside the folder may lead out of it.
            root, path = os.path.realpath(self.folder), os.path.realpath(self.folder / name)
            if os.path.commonpath([root, path]) != root or not os.path.isfile(path):
                found = f"{name!r:.80} in {str(self.folder)!r:.80}"
                raise TraceError(f"payload: got {found}; expected a regular file below it")
            paths.append(Path(path))

        return tuple(paths)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace, as a whole or not at all. Payloads stay where they are.

        Raises:
          TraceError: a file that cannot be written.
        """
        # Lines are made before the file is touched, because an event may be refused.
        path = path_of(path, "trace", TraceError)
        lines = [_header_line(self.kind, self.parameters), *(_event_line(event) for event in self.events)]
        try:
            replace(path, b"".join(lines))
        except OSError as error:
            raise TraceError(f"trace: got {str(path)!r:.200}, which cannot be written: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, torn: bool = False) -> "Trace":
        """Reads a trace. Its folder is that of the file.

        Args:
          torn: leave out a last line that was cut off, as by a recorder that was killed.

        Raises:
          TraceError: a file that cannot be read, or is no trace of this version, naming the line.
        """
        path, events = path_of(path, "trace", TraceError), list[Event]()
        name = f"{str(path)!r:.200}"
        try:
            # `readline` is bounded, because a line of a hostile file may be larger than memory.
            with path.open("rb") as file:
                head = _fields(file.readline(LINE + 1), f"{name}, line 1")
                _check_frame(head, f"{name}, line 1")

                while line := file.readline(LINE + 1):
                    where = f"{name}, line {len(events) + 2}"
                    if torn and len(line) <= LINE and not line.endswith(b"\n"):
                        break
                    if len(events) == EVENTS:
                        raise TraceError(f"{where}: got more than {EVENTS} events; expected at most so many")

                    # An event does not know its line, which its error names.
                    fields = _fields(line, where)
                    try:
                        events.append(Event.of(fields))
                    except TraceError as error:
                        raise TraceError(f"{where}: {error}") from None
        except OSError as error:
            raise TraceError(f"trace: got {name}, which cannot be read: {error}") from error

        return cls(tuple(events), head["kind"], head.get("parameters", {}), path.parent)


def _header_line(kind: str, parameters: Mapping[str, Scalar]) -> bytes:
    header = {"format": FORMAT, "version": VERSION, "kind": kind, "parameters": dict(parameters)}
    return json.dumps(header, allow_nan=False).encode() + b"\n"


def _event_line(event: Event) -> bytes:
    """Returns the line of an event.

    Raises:
      TraceError: a line that is longer than readers accept.
    """
    # JSON escapes line breaks in texts, so that an event is one line.
    line = json.dumps(event.to_dict(), allow_nan=False).encode() + b"\n"
    if len(line) > LINE:
        raise TraceError(f"event: got {event.op!r} of {len(line)} bytes; expected at most {LINE}")
    return line


def _fields(line: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object of a line.

    Raises:
      TraceError: a line that is too long or was cut off, or no JSON object, or one with the same name twice.
    """
    if len(line) > LINE:
        raise TraceError(f"{where}: got more than {LINE} bytes; expected at most so many")
    if not line.endswith(b"\n"):
        raise TraceError(
            f"{where}: got one cut off after {len(line)} bytes; expected a whole one (`torn=True` leaves it out)"
        )

    return strict_json.object_of(line, where, TraceError)


def _check_frame(head: dict[str, Any], where: str) -> None:
    """Raises TraceError for a header of another format or version, or one that is invalid."""
    version = head.get("version")
    if head.get("format") != FORMAT or version != VERSION or isinstance(version, bool):
        found = f"format {head.get('format')!r:.80}, version {version!r:.80}"
        raise TraceError(f"{where}: got {found}; expected {FORMAT!r} of version {VERSION}")
    if unknown := sorted(set(head) - {"format", "version", "kind", "parameters"}):
        raise TraceError(f"{where}: got field {unknown[0]!r:.80}; expected a header")
    _check_header(head.get("kind"), head.get("parameters", {}))


def _check_header(kind: Any, parameters: Any) -> None:
    """Raises TraceError for an invalid kind, or parameters that are no flat table."""
    if not isinstance(kind, str) or not 0 < len(kind) <= 80 or not kind.isprintable():
        raise TraceError(f"trace.kind: got {kind!r:.80}; expected a name")
    if not isinstance(parameters, Mapping) or len(parameters) > PARAMETERS:
        raise TraceError(f"trace.parameters: got {parameters!r:.80}; expected a table of at most {PARAMETERS}")

    # JSON has no other scalars, and no NaN.
    for name, value in parameters.items():
        scalar = value is None or isinstance(value, str | int | float)
        if not isinstance(name, str) or not scalar or (isinstance(value, float) and not math.isfinite(value)):
            expected = "a string, a number or a bool"
            raise TraceError(f"trace.parameters[{name!r:.80}]: got {value!r:.80}; expected {expected}")


class Recorder:
    """Writer of a trace, which appends a line for each event of the sessions that it watches.

        with Recorder("runs/monday.jsonl") as recorder:
            recorder.watch(session)
            …

    Images are kept as PNG files beside the trace, each once. An error while recording (a full disk) is not raised in
    the session: recording ends there, and `close` raises it.

    Attributes:
      path: of the trace.
      error: what ended the recording, or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str = "recorded",
        parameters: Mapping[str, Scalar] | None = None,
        payloads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Creates the file of the trace.

        Args:
          path: of a new file.
          kind, parameters: of the header.
          payloads: whether to keep images.
          clock: returns seconds. Times count from the first call.

        Raises:
          TraceError: a file that exists or cannot be created, or an invalid header.
        """
        _check_header(kind, parameters or {})
        if not callable(clock):
            raise TraceError(f"recorder.clock: got {clock!r:.80}; expected a function that returns seconds")

        self.path = path_of(path, "recorder", TraceError)
        self.error: Exception | None = None
        self._payloads, self._clock, self._began = payloads, clock, clock()
        self._lock, self._last = threading.Lock(), 0.0

        try:
            self._file = self.path.open("xb")
            self._append(_header_line(kind, parameters or {}))
        except OSError as error:
            raise TraceError(f"trace: got {str(path)!r:.200}: {error}; expected a new file") from error

    def watch(self, session: EventSource) -> None:
        """Records the events of a session from now on, and of its forks.

        Raises:
          TraceError: no session.
        """
        if not isinstance(getattr(session, "watchers", None), list):
            raise TraceError(f"recorder: got a {type(session).__name__}; expected a Session, which has watchers")
        # Twice is once: each event would be written twice otherwise.
        if self not in session.watchers:
            session.watchers.append(self)

    def __call__(self, event: Event, items: Sequence[Any] = ()) -> None:
        """Records an event at the recorder's own time. Raises nothing.

        Args:
          items: the images and texts that it brought.
        """
        with self._lock:
            if self.error is not None or self._file.closed:
                return
            try:
                # A clock that runs backwards stands still.
                self._last = max(self._last, self._clock() - self._began)
                payload = self._keep_images(items) if self._payloads else ()
                self._append(_event_line(dataclasses.replace(event, at=self._last, payload=event.payload or payload)))
            except Exception as error:
                # The session must not fail because its recorder does.
                self.error = error

    def close(self) -> None:
        """Ends the trace. Idempotent.

        Raises:
          TraceError: recording had ended before. The file has a whole trace up to there.
        """
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        if self.error is not None:
            raise TraceError(f"recorder: {str(self.path)!r:.200} ended early: {self.error}") from self.error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        # Flushed line by line, so that a process that is killed leaves all but the last.
        self._file.write(line)
        self._file.flush()

    def _keep_images(self, items: Sequence[Any]) -> tuple[str, ...]:
        """Writes images to files, and returns their paths relative to the trace."""
        Image, names = require("PIL.Image", "Pillow"), []
        for item in items:
            if sort_of(item, "recorder") != "image":
                continue

            pixels = decoded(item)
            name = f"{self.path.stem}_images/{content_digest(pixels)[:32]}.png"
            target = self.path.parent / name

            # Named by their pixels, equal images are one file.
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG", compress_level=1)
                replace(target, file.getvalue())

            names.append(name)

        return tuple(names)
