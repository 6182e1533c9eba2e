"""Unfinished snapshots and exports: made in a temporary directory, and swept where their process died.

    <directory>.unfinished-<token>/          what is being made; the file `UNFINISHED` in it holds the token
    root/unfinished/<tenant>.<token>         where that is, locked by who makes it; `store.<token>` of a whole store

So whoever cleans up a root finds what was left of its snapshots, wherever they were to be, and removes nothing that
does not say itself that it is one.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator

from ...errors import InputError
from ..io.files import (
    NotRegularError,
    folder,
    make_directories,
    make_private,
    open_regular,
    open_regular_in,
    sync_directory,
    try_lock,
    typed_errors,
    write_all,
)

WHOLE = "store"
"""In place of a tenant's keyed name, for a snapshot of the whole store."""

_MARK, _LONGEST = "UNFINISHED", 1 << 13


@contextlib.contextmanager
def new_directory(directory: str, root: str, tenant: str = WHOLE) -> Iterator[str]:
    """Makes a temporary directory to fill; it is renamed to `directory`, durably, if nothing is raised, else removed.

    Args:
      root: of the store that it is made of, where a process that died meanwhile leaves word of it, if it may write.
      tenant: the keyed name of whose objects come into it.

    Raises:
      InputError: `directory` is there already. StoreReadOnlyError, StoreIOError, StoreFullError.
    """
    directory = os.path.abspath(directory)
    if os.path.lexists(directory):
        raise InputError(f"snapshot {directory}: it is there; expected a name that is free")
    token = secrets.token_hex(8)
    temporary = f"{directory}.unfinished-{token}"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a root that may only be read goes without
            _note(root, f"{tenant}.{token}", temporary, stack)
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        with typed_errors(f"snapshot {directory}: write"):
            os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
            os.mkdir(temporary, 0o700)
            with open_regular(temporary, _MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, [token.encode()], 0)
            yield temporary
            make_private(temporary)
            os.rename(temporary, directory)
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{_MARK}")
            sync_directory(directory)
            sync_directory(os.path.dirname(directory))


def _note(root: str, name: str, temporary: str, stack: contextlib.ExitStack) -> None:
    """Writes a note in the root of where a snapshot is made, locked until the stack is left: its maker is alive."""
    make_directories(root, "unfinished")
    above = stack.enter_context(folder(root, "unfinished"))
    fd = stack.enter_context(open_regular_in(above, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    stack.callback(_forget, above, name)
    fcntl.flock(fd, fcntl.LOCK_EX)
    write_all(fd, [temporary.encode()], 0)


def _forget(above: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=above)


def notes(root: str, tenant: str = "") -> list[str]:
    """Lists the notes of unfinished snapshots: of one tenant, by its keyed name, or all. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, "unfinished") as fd:
        return [name for name in sorted(os.listdir(fd)) if name.startswith(f"{tenant}." if tenant else "")]
    return []


def sweep_unfinished(root: str, tenant: str = "") -> int:
    """Removes unfinished snapshots and exports whose process died: of one tenant, or of all. How many.

    Raises:
      StoreReadOnlyError, StoreIOError.
    """
    swept = 0
    with typed_errors(f"store {root}: unfinished snapshots"):
        for name in notes(root, tenant):
            with (
                contextlib.suppress(FileNotFoundError, NotRegularError),  # nothing else is a note of ours
                folder(root, "unfinished") as above,
                open_regular_in(above, name, os.O_RDWR) as fd,
            ):
                if try_lock(fd):
                    swept += _removed(os.pread(fd, _LONGEST, 0).decode(errors="replace"), name.rpartition(".")[2])
                    os.unlink(name, dir_fd=above)
    return swept


def _removed(directory: str, token: str) -> bool:
    """Removes an unfinished directory, if it has the name and holds the token of its note. Whether it existed."""
    named = os.path.isabs(directory) and bool(token) and directory.endswith(f".unfinished-{token}")
    if not named or "\0" in directory or os.path.islink(directory):
        return False
    try:
        with open_regular(directory, _MARK) as fd:
            ours = os.pread(fd, len(token) + 1, 0) == token.encode()
        if ours:
            shutil.rmtree(directory)
        return ours
    except (FileNotFoundError, NotADirectoryError, NotRegularError):
        pass  # no token of ours in it: removed below only where it is empty
    with contextlib.suppress(OSError):  # it died before it wrote anything
        os.rmdir(directory)
        return True
    return False
