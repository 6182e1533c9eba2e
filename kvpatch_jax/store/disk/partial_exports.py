"""Unfinished snapshots and exports: written to a temporary directory, and removed if their process died.

    <directory>.unfinished-<token>/          the temporary directory; its file `UNFINISHED` holds the token
    root/unfinished/<tenant>.<token>         its path, locked by its process; `store.<token>` of a whole store

So a cleanup of the root finds unfinished snapshots wherever they are, and removes only directories with the token.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator

from ...errors import InputError
from ..io.files import (
    NotRegularError,
    folder,
    locked_new_file,
    make_directories,
    make_private,
    open_regular,
    open_regular_in,
    sync_directory,
    typed_errors,
    write_all,
)
from ..io.locks import try_lock

WHOLE = "store"
"""Stands for a tenant's keyed name in snapshots of the whole store."""

_MARK, _LONGEST = "UNFINISHED", 1 << 13


@contextlib.contextmanager
def new_directory(directory: str, root: str, tenant: str = WHOLE) -> Iterator[str]:
    """Creates a temporary directory to fill. At the end it is renamed to `directory` durably; on exceptions removed.

    Args:
      directory: the final name.
      root: the exported store, where the temporary directory is noted (unless it is read-only) in case of a crash.
      tenant: keyed name of the tenant whose objects it will contain.

    Raises:
      InputError: `directory` already exists.
      StoreReadOnlyError, StoreIOError, StoreFullError: it could not be written.
    """
    directory = os.path.abspath(directory)
    if os.path.lexists(directory):
        raise InputError(f"snapshot {directory}: got an existing path; expected a name that is free")
    token = secrets.token_hex(8)
    temporary = f"{directory}.unfinished-{token}"

    with contextlib.ExitStack() as stack:
        # Noted before it exists, so that a crash at any point leaves a note of it.
        with contextlib.suppress(OSError):  # a read-only root has no note
            _note(root, f"{tenant}.{token}", temporary, stack)
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        with typed_errors(f"snapshot {directory}: write"):
            os.makedirs(os.path.dirname(directory), 0o700, exist_ok=True)
            os.mkdir(temporary, 0o700)
            with open_regular(temporary, _MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                write_all(fd, [token.encode()], 0)
            yield temporary

            make_private(temporary)  # before others know its name
            os.rename(temporary, directory)
            # The token goes after the rename: until then a cleanup recognises the directory by it.
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{_MARK}")
            sync_directory(directory)
            sync_directory(os.path.dirname(directory))


def _note(root: str, name: str, temporary: str, stack: contextlib.ExitStack) -> None:
    """Notes a temporary directory in the root. The note's lock, held until the stack closes, shows a live process."""
    make_directories(root, "unfinished")
    above = stack.enter_context(folder(root, "unfinished"))
    fd = stack.enter_context(locked_new_file(above, name))
    stack.callback(_forget, above, name)
    write_all(fd, [temporary.encode()], 0)


def _forget(above: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=above)


def notes(root: str, tenant: str = "") -> list[str]:
    """Lists the notes of unfinished snapshots, of all tenants or of one by its keyed name. Raises OSError."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), folder(root, "unfinished") as fd:
        return [name for name in sorted(os.listdir(fd)) if name.startswith(f"{tenant}." if tenant else "")]
    return []


def sweep_unfinished(root: str, tenant: str = "") -> int:
    """Removes unfinished snapshots and exports whose process died, of all tenants or of one. Returns their number.

    Raises:
      StoreReadOnlyError, StoreIOError: one could not be removed.
    """
    swept = 0
    with typed_errors(f"store {root}: unfinished snapshots"):
        for name in notes(root, tenant):
            with (
                contextlib.suppress(FileNotFoundError, NotRegularError),  # such a file is no note
                folder(root, "unfinished") as above,
                open_regular_in(above, name, os.O_RDWR) as fd,
            ):
                if try_lock(fd):
                    # The note goes last: without it nobody would find the directory.
                    swept += _removed(os.pread(fd, _LONGEST, 0).decode(errors="replace"), name.rpartition(".")[2])
                    os.unlink(name, dir_fd=above)
    return swept


def _removed(directory: str, token: str) -> bool:
    """Removes an unfinished directory if its name and its content have the token. Returns whether it existed."""
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
        pass  # there is no token in it: removed below only if it is empty

    with contextlib.suppress(OSError):  # it died before it wrote anything
        os.rmdir(directory)
        return True
    return False
