"""What the tenants of a root have on the disk."""

import os
from typing import NamedTuple

from .index import Index


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
    index = Index(os.path.abspath(root))
    try:
        index.refresh()
        found = index.usage_by_tenant()
        return {tenant: Usage(*own, index.oldest(f"obj/{tenant}") or 0.0) for tenant, own in found.items()}
    finally:
        index.close()
