"""The budget of a root that tenants share: the largest that any of them puts under.

    root/obj/<tenant>/BUDGET     bytes of `Budget.disk` that the tenant last put under; none where it sets no bound

Of several tenants with one budget each may evict what is oldest, whosever it is. A tenant with a smaller one keeps its
own objects within that, and evicts nobody else's for it. A tenant without a note set no bound, and so nobody evicts
anything of others beside it; so it is of what older versions put.
"""

import contextlib
import os

from ...errors import StoreCorruptError, StoreError
from ..io.files import folder, read_small, typed_errors
from .root_config import replace_setting

_NAME, _LARGEST = "BUDGET", 64


def note_budget(root: str, space: str, disk: int | None) -> None:
    """Notes the bytes that a tenant puts under. A root that cannot be written goes without."""
    path = f"{space}/{_NAME}"
    if disk == _noted(root, path):
        return
    with contextlib.suppress(StoreError, FileNotFoundError), typed_errors("store: budget"):
        if disk is None:
            with folder(root, space) as fd:
                os.unlink(_NAME, dir_fd=fd)
        else:
            with folder(root, space, make=True):
                pass
            replace_setting(root, path, b"%d\n" % disk)


def shared_budget(root: str, space: str, disk: int) -> int | None:
    """Returns the bytes of the whole root: the largest that any tenant puts under; None where one sets no bound.

    Args:
      space, disk: the tenant that asks, and what it puts under.
    """
    try:
        with folder(root, "obj") as fd, os.scandir(fd) as entries:
            others = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return None
    budgets = [_noted(root, f"obj/{name}/{_NAME}") for name in others if f"obj/{name}" != space]
    return None if None in budgets else max([disk, *(budget for budget in budgets if budget is not None)])


def _noted(root: str, path: str) -> int | None:
    """Reads a note; None where there is none, or it cannot be read."""
    try:
        text = read_small(root, path, _LARGEST)
    except (OSError, StoreCorruptError):
        return None
    return int(text) if text.endswith(b"\n") and text[:-1].isdigit() else None
