"""A record of every change that code makes to files below a folder, at the level of `os` calls, with its syncs.

The code under test is not known here: one that writes by other means than `os` fails `FileLog.expect_complete`.
"""

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_contract import Words

from kvpatch_jax.store.io import files, folders

INDEX = "index.sqlite"
"""Beginning of the names of a cache that is written by other means, in the root: it may be lost, old or damaged."""


@dataclasses.dataclass(frozen=True)
class Event:
    """A change, a sync or a word of the test.

    Attributes:
      kind: "data" (of a file: its whole content and its time since then), "name" (of a folder), "sync", "sync all",
        "begin", "end".
      inode: number of the file or folder; of "begin" and "end" that of the operation.
      name, target: of "name", the entry and its inode; None if it is removed.
      content, mtime: of "data", and mtime of a folder after "name".
      pair: number that both halves of a rename have.
      what: of "begin", what the operation does.
    """

    kind: str
    inode: int = -1
    name: str = ""
    target: int | None = None
    content: bytes = b""
    mtime: int = 0
    pair: int = 0
    what: Any = None


@dataclasses.dataclass
class Node:
    """What is there now: content of a file, or the names of a folder."""

    content: bytes = b""
    mtime: int = 0
    names: dict[str, int] | None = None


Planted = Callable[[str, str], bool]
"""Whether a sync ("file" or "folder", path below the root) is left out, as a bug would."""


class FileLog(Words):
    """Record of the changes below a folder, which must be a real path. What is there at first counts as durable.

    Args:
      base: the folder.
      beside: a folder that is not cut, whose files are kept as they are at each event: a remote store.
      dropped: syncs that are left out of the record, to plant bugs.
      late: file syncs are recorded only after the next rename, to plant another.
    """

    def __init__(
        self,
        base: Path,
        beside: Path | None = None,
        dropped: Planted = lambda kind, path: False,
        late: bool = False,
    ):
        self.base, self.beside, self.dropped, self.late = os.path.realpath(base), beside, dropped, late
        self.events: list[Event] = []
        self.besides: list[dict[str, bytes]] = []
        self.nodes: dict[int, Node] = {}
        self.paths: dict[int, str] = {}
        self._fds: dict[int, tuple[int, tuple[int, int]]] = {}
        self._numbers, self._waiting = itertools.count(1), list[int]()
        self._lock = threading.RLock()
        self.root = self._scan(self.base)
        self.first = {number: dataclasses.replace(node) for number, node in self.nodes.items()}
        for node in self.first.values():
            node.names = None if node.names is None else dict(node.names)
        self.indexes = [self._index()]

    def _scan(self, path: str, known: dict[int, int] | None = None) -> int:
        """Takes over a folder or a file as it is. Hard links are one inode."""
        known = {} if known is None else known
        found = os.stat(path)
        if os.path.isfile(path) and found.st_ino in known:
            return known[found.st_ino]
        number = known[found.st_ino] = next(self._numbers)
        self.paths[number] = os.path.relpath(path, self.base)
        if os.path.isdir(path):
            names = {name: self._scan(f"{path}/{name}", known) for name in sorted(os.listdir(path)) if not _free(name)}
            self.nodes[number] = Node(mtime=found.st_mtime_ns, names=names)
        else:
            self.nodes[number] = Node(Path(path).read_bytes(), found.st_mtime_ns)
        return number

    def _index(self) -> dict[str, bytes]:
        found = [path for path in Path(self.base).rglob(f"{INDEX}*") if path.is_file()]
        return {os.path.relpath(path, self.base): path.read_bytes() for path in found}

    # ------------------------------------------------------------------------------------------- words of the test

    def begin(self, what: Any) -> int:
        """Notes that an operation begins. Returns its number."""
        number = next(self._numbers)
        self._note(Event("begin", number, what=what))
        return number

    def end(self, number: int) -> None:
        """Notes that an operation was acknowledged."""
        with self._lock:
            self.indexes.append(self._index())
            self._note(Event("end", number))

    def expect_complete(self) -> None:
        """Fails unless the model is what is there: something was changed by other means than recorded ones."""
        assert contents(self.root, self.nodes) == files_below(self.base)

    # --------------------------------------------------------------------------------------------------- recording

    def _note(self, event: Event) -> None:
        self.events.append(event)
        if self.beside is not None:
            self.besides.append(files_below(str(self.beside), lambda name: name.endswith("__lock")))

    def _known(self, fd: int) -> int | None:
        """The inode of an open file below the base."""
        found = self._fds.get(fd)
        if found is None:
            return None
        stat = _REAL["fstat"](fd)
        return found[0] if found[1] == (stat.st_dev, stat.st_ino) else None

    def _place(self, path: Any, dir_fd: int | None) -> tuple[int, str] | None:
        """The folder and the name that a path means; None if it is not below the base."""
        path = os.fspath(path)
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if os.path.isabs(path) or dir_fd is None:
            above, name = os.path.split(os.path.abspath(path))
            path = f"{os.path.realpath(above)}/{name}"
            if not path.startswith(f"{self.base}/"):
                return None
            at, path = self.root, path[len(self.base) + 1 :]
        else:
            known = self._known(dir_fd)
            if known is None:
                return None
            at = known
        *above, name = [part for part in path.split("/") if part not in ("", ".")] or [""]
        for part in above:
            names = self.nodes[at].names
            if names is None or part not in names:
                return None
            at = names[part]
        return at, name

    def _find(self, path: Any, dir_fd: int | None) -> int | None:
        if isinstance(path, int):
            return self._known(path)
        place = self._place(path, dir_fd)
        if place is None:
            return self.root if not isinstance(path, int) and dir_fd is None and _is(path, self.base) else None
        names = self.nodes[place[0]].names
        return place[0] if place[1] == "" else None if names is None else names.get(place[1])

    def _set(self, place: tuple[int, str], target: int | None, pair: int = 0) -> None:
        at, name = place
        node = self.nodes[at]
        assert node.names is not None
        if target is None:
            node.names.pop(name, None)
        else:
            node.names[name] = target
            self.paths[target] = f"{self.paths[at]}/{name}".removeprefix("./")
        with contextlib.suppress(OSError):
            node.mtime = _REAL["stat"](f"{self.base}/{self.paths[at]}").st_mtime_ns
        self._note(Event("name", at, name, target, mtime=node.mtime, pair=pair))

    def _changed(self, number: int, fd: int) -> None:
        """Notes the content of a file after a call that changed it."""
        node, stat = self.nodes[number], _REAL["fstat"](fd)
        data = bytearray()
        with contextlib.suppress(OSError):  # it may be open for writing alone
            while part := _REAL["pread"](fd, 1 << 22, len(data)):
                data += part
        if len(data) != stat.st_size:
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                data = bytearray(file.read())
        if (bytes(data), stat.st_mtime_ns) == (node.content, node.mtime):
            return  # its access time alone
        node.content, node.mtime = bytes(data), stat.st_mtime_ns
        self._note(Event("data", number, content=node.content, mtime=node.mtime))

    def _synced(self, number: int) -> None:
        folder = self.nodes[number].names is not None
        if self.dropped("folder" if folder else "file", self.paths[number]):
            return
        if self.late and not folder:
            self._waiting.append(number)
            return
        self._note(Event("sync", number))

    def _after(self, name: str, result: Any, args: tuple, more: dict[str, Any], before: Any) -> None:
        """Notes what a call that succeeded has changed."""
        match name:
            case "open":
                self._opened(result, args[0], args[1] if len(args) > 1 else more["flags"], more.get("dir_fd"))
            case "close":
                self._fds.pop(args[0], None)
            case "dup":
                self._fds.pop(result, None)
                if args[0] in self._fds:
                    self._fds[result] = self._fds[args[0]]
            case "write" | "pwrite" | "writev" | "pwritev" | "ftruncate" | "posix_fallocate":
                number = self._known(args[0])
                if number is not None:
                    self._changed(number, args[0])
            case "utime" | "truncate":
                number = self._find(args[0], more.get("dir_fd"))
                if number is not None and self.nodes[number].names is None:
                    with open(
                        args[0] if isinstance(args[0], int) else f"{self.base}/{self.paths[number]}",
                        "rb",
                        closefd=not isinstance(args[0], int),
                    ) as file:
                        self._changed(number, file.fileno())
            case "mkdir":
                place = self._place(args[0], more.get("dir_fd"))
                if place is not None:
                    number = next(self._numbers)
                    self.nodes[number] = Node(names={})
                    self.first[number] = Node(names={})
                    self._set(place, number)
            case "unlink" | "remove" | "rmdir":
                place = self._place(args[0], more.get("dir_fd"))
                if place is not None:
                    self._set(place, None)
            case "rename" | "replace":
                self._renamed(before, self._place(args[1], more.get("dst_dir_fd")))
            case "link":
                place = self._place(args[1], more.get("dst_dir_fd"))
                if place is not None:
                    source = self._find(args[0], more.get("src_dir_fd"))
                    self._set(place, self._foreign(place) if source is None else source)
            case "fsync" | "fdatasync":
                number = self._known(args[0])
                if number is not None:
                    self._synced(number)
            case "sync":
                self._note(Event("sync all"))

    def _opened(self, fd: int, path: Any, flags: int, dir_fd: int | None) -> None:
        self._fds.pop(fd, None)
        number = self._find(path, dir_fd)
        if number is None:
            place = self._place(path, dir_fd)
            if place is None or not flags & os.O_CREAT:
                return
            if _free(place[1]):
                return
            number = next(self._numbers)
            self.nodes[number] = Node()
            self.first[number] = Node()
            self._set(place, number)
        elif flags & os.O_TRUNC:
            self._changed(number, fd)
        stat = _REAL["fstat"](fd)
        self._fds[fd] = number, (stat.st_dev, stat.st_ino)

    def _renamed(self, source: tuple[tuple[int, str], int] | None, target: tuple[int, str] | None) -> None:
        pair = next(self._numbers)
        if target is not None:
            self._set(target, self._foreign(target) if source is None else source[1], pair)
        if source is not None:
            self._set(source[0], None, pair if target is not None else 0)
        for number in self._waiting:
            self._note(Event("sync", number))
        self._waiting = []

    def _foreign(self, place: tuple[int, str]) -> int:
        """Takes over a file from elsewhere, which counts as synced there."""
        number = self._scan(f"{self.base}/{self.paths[place[0]]}/{place[1]}")
        self.first[number] = dataclasses.replace(self.nodes[number])
        return number

    def _before(self, name: str, args: tuple, more: dict[str, Any]) -> Any:
        if name not in ("rename", "replace"):
            return None
        place, number = self._place(args[0], more.get("src_dir_fd")), self._find(args[0], more.get("src_dir_fd"))
        return None if place is None or number is None else (place, number)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = _REAL[name]

        @functools.wraps(real)
        def recorded(*args: Any, **more: Any) -> Any:
            with self._lock:  # one call at a time, so that the record has their order
                before = self._before(name, args, more)
                # Nothing is cut here, so nothing is really synced, which would take long.
                result = None if name in ("fsync", "fdatasync", "sync") else real(*args, **more)
                self._after(name, result, args, more, before)
                return result

        return recorded

    @contextlib.contextmanager
    def recording(self) -> Iterator["FileLog"]:
        """Records within the context."""
        library = ctypes.CDLL(None, use_errno=True)

        def syncfs(fd: int) -> int:
            with self._lock:
                if not self.late and not self.dropped("file", "all"):
                    self._note(Event("sync all"))
                return 0

        calls = {"syncfs": syncfs, "sync_file_range": getattr(library, "sync_file_range", None)}
        with pytest.MonkeyPatch.context() as patched:
            for name in _CHANGES:
                patched.setattr(os, name, self._wrapped(name))
            patched.setattr(files, "_call", calls.get)
            patched.setattr(folders, "_call", lambda: None)  # folders are opened name by name, so that each is known
            yield self
        self.expect_complete()


_CHANGES = (
    *("open", "close", "dup", "write", "pwrite", "writev", "pwritev", "ftruncate", "truncate", "posix_fallocate"),
    *("utime", "mkdir", "unlink", "remove", "rmdir", "rename", "replace", "link", "fsync", "fdatasync", "sync"),
)
_REAL = {name: getattr(os, name) for name in (*_CHANGES, "fstat", "stat", "pread")}


def _free(name: str) -> bool:
    """Whether a name is the index's."""
    return name.startswith(INDEX)


def _is(path: Any, base: str) -> bool:
    return os.path.realpath(os.fspath(path)) == base


def files_below(base: str, ignored: Callable[[str], bool] = _free) -> dict[str, bytes]:
    """Contents by path; of folders b"" and a path that ends in a slash."""
    found: dict[str, bytes] = {}
    for above, inner, names in os.walk(base):
        for name in inner:
            found[f"{os.path.relpath(f'{above}/{name}', base)}/"] = b""
        for name in names:
            if not ignored(name):
                with contextlib.suppress(FileNotFoundError):
                    found[os.path.relpath(f"{above}/{name}", base)] = Path(above, name).read_bytes()
    return found


def contents(number: int, nodes: dict[int, Node], path: str = "") -> dict[str, bytes]:
    """As `_on_disk`, of a model."""
    found: dict[str, bytes] = {}
    for name, inner in (nodes[number].names or {}).items():
        if nodes[inner].names is None:
            found[f"{path}{name}"] = nodes[inner].content
        else:
            found[f"{path}{name}/"] = b""
            found |= contents(inner, nodes, f"{path}{name}/")
    return found
