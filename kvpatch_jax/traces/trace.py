"""Traces: what happened in the windows of agents, as JSONL that placement reads and evaluations replay.

The first line is a header, each further one an event. Whoever reads a trace may not have written it: every line is
checked, and refused by its number where it is not what this version writes.
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
"""Bytes that a line may have."""
EVENTS = 1_000_000
"""Events that a trace may have."""
PARAMETERS = 64
"""Parameters that a header may have."""

Scalar = str | int | float | bool | None
Watcher = Callable[[Event, Sequence[Any]], None]
"""Told of each event of a session, with the images or texts that it brought; its time is the watcher's to say."""


@runtime_checkable
class EventSource(Protocol):
    """A session that tells of its events."""

    watchers: list[Watcher]


@dataclasses.dataclass(frozen=True)
class Trace:
    """Events in the order in which they happened: an immutable value.

    Attributes:
      events: of all sessions.
      kind: what the agent did, such as "screenshots"; "recorded" where nobody said.
      parameters: of what made it: a flat table.
      folder: where payloads lie; None where there are none, or nobody said.

    Raises:
      TraceError: events that no run can have had (`check_history`), a kind that is no name, or parameters that are
        not flat.
    """

    events: tuple[Event, ...]
    kind: str = "recorded"
    parameters: Mapping[str, Scalar] = dataclasses.field(default_factory=dict)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not all(isinstance(event, Event) for event in self.events):
            raise TraceError(f"trace: events of type {type(self.events).__name__}; expected a tuple of Event")
        if len(self.events) > EVENTS:
            raise TraceError(f"trace: {len(self.events)} events; expected at most {EVENTS}")
        _check_header(self.kind, self.parameters)
        check_history(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    @property
    def sessions(self) -> tuple[str, ...]:
        """Names of all sessions, branches among them, in the order in which they came to be."""
        found: dict[str, None] = {}
        for event in self.events:
            found.setdefault(event.session)
            if event.branch is not None:
                found.setdefault(event.branch)
        return tuple(found)

    def of(self, session: str) -> tuple[Event, ...]:
        """The events of one session, without those of the one that it was forked from."""
        return tuple(event for event in self.events if event.session == session)

    def payloads(self, event: Event) -> tuple[Path, ...]:
        """Finds the files of what an event shows.

        Raises:
          TraceError: no folder, a file that is not there or no regular one, or one that links lead out of the folder.
        """
        if not isinstance(event, Event):
            raise TraceError(f"payloads of {event!r:.80}; expected an Event")
        if event.payload and self.folder is None:
            raise TraceError(f"trace without a folder; expected one, where {event.payload[0]!r:.80} lies")
        found = []
        for name in event.payload:
            assert self.folder is not None
            check_path(name)
            root, path = os.path.realpath(self.folder), os.path.realpath(self.folder / name)
            if os.path.commonpath([root, path]) != root or not os.path.isfile(path):
                raise TraceError(f"payload {name!r:.80} in {str(self.folder)!r:.80}; expected a regular file below it")
            found.append(Path(path))
        return tuple(found)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace: whole, or not at all. Payloads stay where they lie.

        Raises:
          TraceError: a file that cannot be written.
        """
        path = path_of(path, "trace", TraceError)
        lines = [header_line(self.kind, self.parameters), *(event_line(event) for event in self.events)]
        try:
            replace(path, b"".join(lines))
        except OSError as error:
            raise TraceError(f"trace {str(path)!r:.200} cannot be written: {error}") from error

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, torn: bool = False) -> "Trace":
        """Reads a trace; payloads are looked for in its folder.

        Args:
          torn: leave out a last line that was cut off, as a recorder that was killed leaves it.

        Raises:
          TraceError: a file that cannot be read or is no trace of this version, naming the line.
        """
        path = path_of(path, "trace", TraceError)
        try:
            with path.open("rb") as file:
                kind, parameters, events = _read(file, str(path), torn)
        except OSError as error:
            raise TraceError(f"trace {str(path)!r:.200} cannot be read: {error}") from error
        return cls(events, kind, parameters, path.parent)


def header_line(kind: str, parameters: Mapping[str, Scalar]) -> bytes:
    """The first line of a trace."""
    header = {"format": FORMAT, "version": VERSION, "kind": kind, "parameters": dict(parameters)}
    return json.dumps(header, allow_nan=False).encode() + b"\n"


def event_line(event: Event) -> bytes:
    """The line of an event.

    Raises:
      TraceError: one that is longer than a reader takes.
    """
    line = json.dumps(event.to_dict(), allow_nan=False).encode() + b"\n"
    if len(line) > LINE:
        raise TraceError(f"event: {event.op} of {len(line)} bytes; expected at most {LINE}")
    return line


def _read(file: Any, name: str, torn: bool) -> tuple[str, dict[str, Scalar], tuple[Event, ...]]:
    head = _fields(file.readline(LINE + 1), f"{name!r:.200}, line 1")
    if head.get("format") != FORMAT or head.get("version") != VERSION or isinstance(head.get("version"), bool):
        found = f"format {head.get('format')!r:.80}, version {head.get('version')!r:.80}"
        raise TraceError(f"{name!r:.200}, line 1: {found}; expected {FORMAT!r} of version {VERSION}")
    if strangers := sorted(set(head) - {"format", "version", "kind", "parameters"}):
        raise TraceError(f"{name!r:.200}, line 1: field {strangers[0]!r:.80}; expected a header")
    kind, parameters = head.get("kind"), head.get("parameters", {})
    _check_header(kind, parameters)

    events: list[Event] = []
    while line := file.readline(LINE + 1):
        where = f"{name!r:.200}, line {len(events) + 2}"
        if torn and len(line) <= LINE and not line.endswith(b"\n"):
            break
        if len(events) == EVENTS:
            raise TraceError(f"{where}: more than {EVENTS} events; expected at most so many")
        fields = _fields(line, where)
        try:
            events.append(Event.of(fields))
        except TraceError as error:
            raise TraceError(f"{where}: {error}") from None
    return str(kind), parameters, tuple(events)


def _fields(line: bytes, where: str) -> dict[str, Any]:
    """One line's JSON object.

    Raises:
      TraceError: a line that is too long or was cut off, or anything but an object whose names are told once.
    """
    if len(line) > LINE:
        raise TraceError(f"{where}: more than {LINE} bytes; expected at most so many")
    if not line.endswith(b"\n"):
        raise TraceError(f"{where}: cut off after {len(line)} bytes; expected a whole line (`torn=True` leaves it out)")
    try:
        found = strict_json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: no JSON of this kind ({error!s:.80}); expected one object") from None
    if not isinstance(found, dict):
        raise TraceError(f"{where}: a {type(found).__name__}; expected an object")
    return found


def _check_header(kind: Any, parameters: Any) -> None:
    if not isinstance(kind, str) or not 0 < len(kind) <= 80 or not kind.isprintable():
        raise TraceError(f"trace: kind {kind!r:.80}; expected a name")
    flat = isinstance(parameters, Mapping) and len(parameters) <= PARAMETERS
    if not flat:
        raise TraceError(f"trace: parameters {parameters!r:.80}; expected a table of at most {PARAMETERS}")
    for name, value in parameters.items():
        fine = value is None or isinstance(value, str | int | float)
        if not isinstance(name, str) or not fine or (isinstance(value, float) and not math.isfinite(value)):
            raise TraceError(f"trace: parameter {name!r:.80} is {value!r:.80}; expected a text, a number or a truth")


class Recorder:
    """Writes down what happens in sessions, line by line as it happens.

        with Recorder("runs/monday.jsonl") as recorder:
            recorder.watch(session)
            …

    Images are kept as PNG files beside the trace, each once. What goes wrong while recording (a full disk) is no
    session's error: recording ends there, and `close` says so.

    Attributes:
      path: of the trace. error: what ended recording, or None.
    """

    path: Path
    error: Exception | None

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        kind: str = "recorded",
        parameters: Mapping[str, Scalar] | None = None,
        payloads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts a trace in a new file.

        Args:
          kind, parameters: of the header.
          payloads: whether images are kept.
          clock: seconds, from which times are counted.

        Raises:
          TraceError: a file that is there already or cannot be made; a header as `Trace` refuses it.
        """
        _check_header(kind, parameters or {})
        if not callable(clock):
            raise TraceError(f"recorder: clock {clock!r:.80}; expected a function that gives seconds")
        self.path, self.error = path_of(path, "recorder:", TraceError), None
        self._payloads, self._clock, self._began = payloads, clock, clock()
        self._lock, self._last = threading.Lock(), 0.0
        try:
            self._file = self.path.open("xb")
            self._put(header_line(kind, parameters or {}))
        except OSError as error:
            raise TraceError(f"trace {str(path)!r:.200} cannot be made: {error}; expected a new file") from error

    def watch(self, session: EventSource) -> None:
        """Writes down what happens in a session from now on, and in its forks.

        Raises:
          TraceError: what tells of no events.
        """
        if not isinstance(getattr(session, "watchers", None), list):
            raise TraceError(f"recorder: a {type(session).__name__}; expected a Session, which has watchers")
        if self not in session.watchers:
            session.watchers.append(self)

    def __call__(self, event: Event, things: Sequence[Any] = ()) -> None:
        """Writes an event down, at the recorder's own time; raises nothing.

        Args:
          things: the images and texts that it brought.
        """
        with self._lock:
            if self.error is not None or self._file.closed:
                return
            try:
                self._last = max(self._last, self._clock() - self._began)
                kept = self._kept(things) if self._payloads else ()
                self._put(event_line(dataclasses.replace(event, at=self._last, payload=event.payload or kept)))
            except Exception as error:
                self.error = error

    def close(self) -> None:
        """Ends the trace. Closing twice is allowed.

        Raises:
          TraceError: recording had ended before; what is there until then is a whole trace.
        """
        with self._lock:
            if self._file.closed:
                return
            self._file.close()
        if self.error is not None:
            raise TraceError(f"recording to {str(self.path)!r:.200} ended early: {self.error}") from self.error

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def _kept(self, things: Sequence[Any]) -> tuple[str, ...]:
        """Keeps the images among what was brought, each under a name made of its pixels."""
        Image, names = require("PIL.Image", "Pillow"), []
        folder = f"{self.path.stem}_images"
        for thing in things:
            if sort_of(thing, "recorder") != "image":
                continue
            pixels = decoded(thing)
            name = f"{folder}/{content_digest(pixels)[:32]}.png"
            target = self.path.parent / name
            if not target.exists():
                target.parent.mkdir(exist_ok=True)
                file = io.BytesIO()
                Image.fromarray(pixels).save(file, "PNG", compress_level=1)
                replace(target, file.getvalue())
            names.append(name)
        return tuple(names)
