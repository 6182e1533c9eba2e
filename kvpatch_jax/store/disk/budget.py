"""Budgets of a store's tiers."""

import dataclasses

from ...errors import InputError
from ...utils.sizes import Size, size_of
from .quarantine import BYTES as QUARANTINE_BYTES


@dataclasses.dataclass(frozen=True, init=False)
class Budget:
    """Bytes per tier, as numbers or strings: `Budget(disk="100 GB", host="2 GiB")`.

    Attributes:
      host: budget of the memory tier.
      disk: budget of the whole root, if all its tenants have the same. If others have a larger one or none, it limits
        this tenant's objects only, and no others are evicted for it; the root has the largest (`shared_budget`). None,
        here and below: no limit.
      tenant: budget of this tenant's objects on the disk.
      library: budget of this tenant's static library, for restores too.
      quarantine: budget of this tenant's quarantined objects, in addition to `disk`: the oldest are deleted first, and
        all after a week.

    Raises:
      InputError: a size is invalid (see `sizes.size_of`).
    """

    host: int
    disk: int | None
    tenant: int | None
    library: int | None
    quarantine: int | None

    def __init__(
        self,
        host: Size = 1 << 30,
        disk: Size | None = None,
        tenant: Size | None = None,
        library: Size | None = None,
        quarantine: Size | None = QUARANTINE_BYTES,
    ):
        given = {"host": host, "disk": disk, "tenant": tenant, "library": library}
        for name, size in (given | {"quarantine": quarantine}).items():
            unbound = size is None and name != "host"
            object.__setattr__(self, name, None if unbound else size_of(size, f"Budget.{name}"))


def budget_of(given: Budget | Size | None, what: str) -> Budget:
    """Returns a `Budget`, from one, from the disk's size alone, or the default for None.

    Raises:
      InputError: `given` has another type. `what` begins the message.
    """
    if given is None or isinstance(given, Budget):
        return given or Budget()
    if not isinstance(given, int | float | str):
        raise InputError(f"{what}: got {given!r:.80}; expected a Budget(disk=...), or the disk's size, such as '10 GB'")
    return Budget(disk=size_of(given, what))
