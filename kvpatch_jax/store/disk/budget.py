"""The budgets of a store, tier by tier."""

import dataclasses

from ...errors import InputError
from ...utils.sizes import Size, size_of
from .quarantine import BYTES as QUARANTINE_BYTES


@dataclasses.dataclass(frozen=True, init=False)
class Budget:
    """Bytes per tier, as numbers or written: `Budget(disk="100 GB", host="2 GiB")`.

    Attributes:
      device, host: of the memory tiers.
      disk: of the whole root, if all its tenants put under the same. Where others put under more, or set no bound, it
        is of this tenant's objects, and nobody else's are evicted for it; the root has the largest (`shared_budget`).
        None sets no bound, here and below.
      tenant: of this tenant's objects on the disk.
      library: of this tenant's static library, which a restore keeps to as well.
      quarantine: of what of this tenant did not verify, beside `disk`: the oldest goes first, and all after a week.

    Raises:
      InputError: a size that is none (see `sizes.size_of`).
    """

    device: int
    host: int
    disk: int | None
    tenant: int | None
    library: int | None
    quarantine: int | None

    def __init__(
        self,
        device: Size = 0,
        host: Size = 1 << 30,
        disk: Size | None = None,
        tenant: Size | None = None,
        library: Size | None = None,
        quarantine: Size | None = QUARANTINE_BYTES,
    ):
        given = {"device": device, "host": host, "disk": disk, "tenant": tenant, "library": library}
        for name, size in (given | {"quarantine": quarantine}).items():
            unbound = size is None and name not in ("device", "host")
            object.__setattr__(self, name, None if unbound else size_of(size, f"Budget.{name}"))


def budget_of(given: Budget | Size | None, what: str) -> Budget:
    """Returns the budgets that are given: all of them, none, or the disk's alone, as a size.

    Raises:
      InputError: anything else. `what` begins the message.
    """
    if given is None or isinstance(given, Budget):
        return given or Budget()
    if not isinstance(given, int | float | str):
        raise InputError(f"{what}: got {given!r:.80}; expected a Budget(disk=...), or the disk's size, such as '10 GB'")
    return Budget(disk=size_of(given, what))
