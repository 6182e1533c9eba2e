"""Where something was measured, for every file of results. Imports jax alone, so that it runs on a bare machine."""

import contextlib
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax


def environment(packages: Sequence[str] = ()) -> dict[str, Any]:
    """Describes the machine and its software.

    Args:
      packages: distributions whose versions are listed; None for one that runs from its checkout, not installed.

    Returns:
      device (jax's name of its kind), jax, python, machine, cores, load (of the last minute; None where the system does
      not say), and versions where packages were asked for.
    """
    load = Path("/proc/loadavg")
    described: dict[str, Any] = {
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load": load.read_text().split()[0] if load.exists() else None,
    }
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for name in versions:
        # A package may run from its checkout, not installed.
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {**described, "versions": versions} if versions else described
