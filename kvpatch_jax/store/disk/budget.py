"""The budgets of a store, tier by tier."""

import dataclasses

from .quarantine import BYTES as QUARANTINE_BYTES


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes per tier; None sets no bound.

    Attributes:
      device, host: of the memory tiers.
      disk: of the whole root, if all its tenants put under the same. Where others put under more, or set no bound, it
        is of this tenant's objects, and nobody else's are evicted for it; the root has the largest (`shared_budget`).
      tenant: of this tenant's objects on the disk.
      library: of this tenant's static library, which a restore keeps to as well.
      quarantine: of what of this tenant did not verify, beside `disk`: the oldest goes first, and all after a week.
    """

    device: int = 0
    host: int = 1 << 30
    disk: int | None = None
    tenant: int | None = None
    library: int | None = None
    quarantine: int | None = QUARANTINE_BYTES
