"""Files that are mapped in place of being copied: the page cache is then a host tier that processes share.

Every byte is verified in the mapping before it is returned. Afterwards the file must not change: other numbers would be
read, and a process whose mapped file was cut short, or whose disk fails when a page is read again, is killed (SIGBUS).
The store never writes into an object's file. So only a file is mapped that nobody but this user may write.
"""

import mmap
import os

import numpy as np

from ..format.header import Header
from ..format.naming import Name
from ..format.objects import Leaves, padded, verify

MAPPED_BYTES = 4 << 20
"""Size from which files are mapped: below it, a copy into a warm buffer is faster."""
_POPULATE = 22  # MADV_POPULATE_READ of Linux 5.14, which Python's `mmap` does not name


def map_leaves(root: str, name: Name, fd: int, stat: os.stat_result, header: Header) -> Leaves | None:
    """Maps an object's open file and verifies all of its leaves. Returns read-only views, in the order of the file.

    Returns:
      The leaves; None if the file is small, if others than this user may write it or its folder, or if the system
      cannot map it: it is to be read then.

    Raises:
      StoreCorruptError: a checksum does not match.
    """
    if stat.st_size < MAPPED_BYTES:
        return None
    for owned in (stat, os.lstat(f"{root}/{name.folder}")):
        if owned.st_uid != os.geteuid() or owned.st_mode & 0o022:
            return None

    try:
        memory = mmap.mmap(fd, header.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        memory.madvise(_POPULATE)  # a part that cannot be read is an error here, and a signal anywhere else
    except (OSError, ValueError):
        return None
    view, leaves = memoryview(memory), header.leaves.values()
    for leaf in leaves:
        verify(leaf, view[leaf.offset : leaf.offset + padded(leaf.nbytes)])
    return Leaves(np.frombuffer(memory, np.uint8), {leaf.name: leaf.offset for leaf in leaves}, leaves)
