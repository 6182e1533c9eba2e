"""Budget of a root that tenants share: the largest budget of any of them.

    root/obj/<tenant>/BUDGET     bytes of the tenant's latest `Budget.disk`; no file if it has no limit

Tenants with the same budget may evict the oldest objects of any of them. A tenant with a smaller budget limits its own
objects, and evicts no others for it. If a tenant has no note it has no limit, and nobody evicts objects of others; this
includes tenants that only older versions have written.
"""

import contextlib
import os

from ...errors import StoreCorruptError, StoreError
from ..io.files import folder, make_directories, read_small, typed_errors
from .root_config import replace_setting

_NAME, _LARGEST = "BUDGET", 64


def note_budget(root: str, space: str, disk: int | None) -> None:
    """Records a tenant's budget. Does nothing if the root cannot be written."""
    path = f"{space}/{_NAME}"
    if disk == _noted(root, path):
        return
    with contextlib.suppress(StoreError, FileNotFoundError), typed_errors("store: budget"):
        if disk is None:
            with folder(root, space) as fd:
                os.unlink(_NAME, dir_fd=fd)
        else:
            make_directories(root, space)
            replace_setting(root, path, b"%d\n" % disk)


def shared_budget(root: str, space: str, disk: int) -> int | None:
    """Returns the budget of the whole root: the largest of any tenant's; None if a tenant has no limit.

    Args:
      space: folder of the calling tenant.
      disk: its budget.
    """
    try:
        with folder(root, "obj") as fd, os.scandir(fd) as entries:
            others = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    budgets = [_noted(root, f"obj/{name}/{_NAME}") for name in others if f"obj/{name}" != space]
    return None if None in budgets else max([disk, *(budget for budget in budgets if budget is not None)])


def _noted(root: str, path: str) -> int | None:
    """Reads a note; None if there is none, or it cannot be read."""
    try:
        text = read_small(root, path, _LARGEST)
    except (OSError, StoreCorruptError):
        return None
    return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None
