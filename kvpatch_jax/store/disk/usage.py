"""What the tenants of a root have on the disk."""

from typing import NamedTuple

from .directory import scan


class Usage(NamedTuple):
    """Objects of one tenant on the disk.

    Attributes:
      objects: their number. nbytes: of their files.
      oldest: time of the last use of the one that was used least recently, in seconds since the epoch.
    """

    objects: int
    nbytes: int
    oldest: float


def usage(root: str) -> dict[str, Usage]:
    """Returns what every tenant of a root has on the disk, by keyed name. Raises StoreError."""
    found: dict[str, Usage] = {}
    for entry in scan(root, "obj"):
        tenant = entry.path.split("/")[1]
        own = found.get(tenant, Usage(0, 0, entry.used))
        found[tenant] = Usage(own.objects + 1, own.nbytes + entry.size, min(own.oldest, entry.used))
    return found
