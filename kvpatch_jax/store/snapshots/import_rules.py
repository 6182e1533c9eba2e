"""What comes into a store from elsewhere and may not: what is there already stays, libraries keep to their bounds.

Of a library, what is there stays by reference: a static entry whose kind and name the library has stays out, and so do
all versions of a dynamic reference that has any version here, a withdrawn one too. So the current version of a
reference never changes by a restore, and versions of two histories never mix.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator

from ..disk.disk import Disk
from ..disk.tenant_disk import TenantDisk
from ..disk.writing import Elsewhere
from ..format.naming import Name
from ..io.files import open_regular, typed_errors
from ..libraries.folder import LibraryFolder, changing, check_quota


def is_there(disk: Disk, name: Name, source: Elsewhere | None = None) -> bool:
    """Whether the store has a whole object of that name, or `source` under it.

    A damaged one goes to quarantine, and one that has expired is deleted. Raises StoreError.
    """
    same = source is not None and _is_same(Elsewhere(disk.root, name.path), source)
    with typed_errors("store: add"):
        header = disk.examine(name, leaves=not same)
    if header is None:
        return False
    if header.expires is None or disk.clock() < header.expires:
        return True
    disk.delete(name.path, disk.has_expired)
    return False


def _is_same(one: Elsewhere, other: Elsewhere) -> bool:
    """Whether what is there is what comes in, one file with two names."""
    with (
        contextlib.suppress(OSError),
        open_regular(*one, unnoticed=True) as first,
        open_regular(*other, unnoticed=True) as second,
    ):
        return os.path.sameopenfile(first, second)
    return False


def is_entry(name: Name) -> bool:
    """Whether it is a library's."""
    return name.kind == "entry"


def has_reference(disk: Disk, name: Name) -> bool:
    """Whether a library has an entry of that kind and name, in any version that is whole."""
    files = {os.path.basename(entry.path) for entry in disk.of_chunk(name)}
    return any([is_there(disk, dataclasses.replace(name, file=file)) for file in sorted(files)])


@contextlib.contextmanager
def changing_libraries(disk: Disk, names: Iterable[Name]) -> Iterator[Callable[[Name], bool]]:
    """Holds the libraries that some names are of, so that nobody else changes them.

    Yields:
      Whether a library has what a name is a version of; asked of the disk once for each reference.
    """
    folders = sorted({os.path.dirname(name.folder) for name in names if is_entry(name)})
    known: dict[str, bool] = {}

    def has(name: Name) -> bool:
        key = f"{name.folder}/{name.chunk}"
        if key not in known:
            known[key] = has_reference(disk, name)
        return known[key]

    with contextlib.ExitStack() as held:
        for folder in folders:
            held.enter_context(changing(disk.root, folder))
        yield has


def entries_last[T](coming: Iterable[T], name: Callable[[T], Name]) -> list[T]:
    """The order in which things come in: chunks before entries that name them, of a reference the newest version first.

    So nobody sees an entry whose chunk is still to come, nor an old version as the current one.
    """
    coming = list(coming)
    entries = [each for each in coming if is_entry(name(each))]
    others = [each for each in coming if not is_entry(name(each))]
    return others + sorted(entries, key=lambda each: name(each).path, reverse=True)


def check_library(tenant_disk: TenantDisk, coming: int) -> None:
    """Refuses static entries beyond the tenant's `Budget.library`, the chunks that were put with them included.

    Args:
      coming: bytes of the entries that come in; the library is held meanwhile.

    Raises:
      LibraryFullError.
    """
    quota = tenant_disk.budget.library
    if quota is not None and coming:
        check_quota("static library", coming, LibraryFolder(tenant_disk, "static").nbytes, quota)
