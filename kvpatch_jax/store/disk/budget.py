"""The budgets of a store, tier by tier."""

import dataclasses

from .quarantine import BYTES as QUARANTINE_BYTES


@dataclasses.dataclass(frozen=True)
class Budget:
    """Bytes per tier. `disk` is for the whole root, all tenants, and `tenant` for this one's share of it; None sets no
    bound. `library` is the quota of this tenant's static library, which a restore keeps to as well; `quarantine` is for
    what of this tenant did not verify, beside `disk`: the oldest goes first, and all of it after a week."""

    device: int = 0
    host: int = 1 << 30
    disk: int | None = None
    tenant: int | None = None
    library: int | None = None
    quarantine: int | None = QUARANTINE_BYTES
