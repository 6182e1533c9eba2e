"""Limits of a root: bytes that its operator gives to all tenants together, and to each. They hold for every process.

    root/LIMITS.json     {"version": 1, "disk": bytes, "tenant": bytes of each, "tenants": {keyed name: bytes}}

Without the file, tenants agree among themselves (`shared_budget`). A process's `Budget` can only be smaller.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from ...errors import InputError, StoreCorruptError, StoreVersionError
from ...utils import strict_json
from ...utils.sizes import Size, size_of
from ..io.files import Identity, identity, read_small, typed_errors
from .root_config import replace_setting

FILE = "LIMITS.json"
_LARGEST = 1 << 20
_FIELDS = ("version", "disk", "tenant", "tenants")


@dataclasses.dataclass(frozen=True)
class RootLimits:
    """Limits of a root, in bytes; None: no limit.

    Attributes:
      disk: of all objects.
      tenant: of each tenant's objects.
      tenants: of the objects of some tenants, by their keyed names, in place of `tenant`.
    """

    disk: int | None = None
    tenant: int | None = None
    tenants: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def of(self, tenant: str) -> int | None:
        """Returns the limit of one tenant, by its keyed name."""
        return self.tenants.get(tenant, self.tenant)


class LimitsFile:
    """The limits of a root, read again when they have changed."""

    def __init__(self, root: str):
        self._root = root
        self._known: tuple[Identity, RootLimits] | None = None

    def read(self) -> RootLimits | None:
        """Returns the limits; None if the root has none.

        Raises:
          StoreCorruptError: the file is damaged: nothing is evicted or put by limits that are not known.
          StoreVersionError: a later version wrote it.
        """
        try:
            place = identity(os.stat(f"{self._root}/{FILE}", follow_symlinks=False))
        except OSError:
            return None
        if self._known is None or self._known[0] != place:
            with typed_errors(f"store {self._root}: {FILE}"):
                self._known = place, _parsed(read_small(self._root, FILE, _LARGEST))
        return self._known[1]


def set_limits(
    root: str | os.PathLike[str], *, disk: Size | None, tenant: Size | None = None, tenants: Mapping[str, Size] = {}
) -> RootLimits:
    """Sets a root's limits durably, for every process from its next put on.

    Args:
      disk, tenant, tenants: as in `RootLimits`, as numbers or such as "10 GB".

    Raises:
      InputError: a size is invalid, or a tenant's share is larger than the root's limit.
      StoreError: the file cannot be written.
    """
    sizes = {
        name: None if size is None else size_of(size, f"limits.{name}")
        for name, size in (("disk", disk), ("tenant", tenant))
    }
    shares = {name: size_of(size, "limits.tenants") for name, size in tenants.items()}
    limits = RootLimits(sizes["disk"], sizes["tenant"], shares)
    for share in [*shares.values(), *([] if limits.tenant is None else [limits.tenant])]:
        if limits.disk is not None and share > limits.disk:
            raise InputError(
                f"limits: got {share} bytes for a tenant; expected at most {limits.disk}, those of the root"
            )
    text = json.dumps({"version": 1, **dataclasses.asdict(limits)}).encode()
    replace_setting(os.fspath(root), FILE, text)
    return limits


def _parsed(text: bytes) -> RootLimits:
    def is_size(value: Any) -> bool:
        return value is None or (type(value) is int and value >= 0)

    try:
        tree = strict_json.loads(text)
    except ValueError as error:
        raise StoreCorruptError(f"store: {FILE}: got no JSON ({error}); expected limits") from error
    if isinstance(tree, dict) and type(tree.get("version")) is int and tree["version"] > 1:
        raise StoreVersionError(f"store: {FILE}: got version {tree['version']}; expected 1")
    fits = isinstance(tree, dict) and tuple(tree) == _FIELDS and isinstance(tree["tenants"], dict)
    if (
        not fits
        or type(tree["version"]) is not int
        or tree["version"] != 1
        or not all(map(is_size, [tree["disk"], tree["tenant"], *tree["tenants"].values()]))
        or None in tree["tenants"].values()
    ):
        raise StoreCorruptError(f"store: {FILE}: got {str(tree)[:80]}; expected {_FIELDS} in bytes")
    return RootLimits(tree["disk"], tree["tenant"], tree["tenants"])
