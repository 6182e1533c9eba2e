"""Versions of the engine that the connector was tried with, and the check of those that are installed."""

import importlib.metadata
import logging
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

TRIED: Mapping[str, str] = {"vllm-tpu": "0.32.0", "tpu-inference": "0.32.0", "jax": "0.11.2"}
"""Packages and the version of each that the connector was run with. The extra `vllm` installs the first two."""
ALTERNATIVES: Mapping[str, str] = {"vllm-tpu": "vllm"}
"""Names under which other builds of a package are installed."""


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(version_of: Callable[[str], str | None] = installed_version) -> dict[str, str]:
    """Warns in the log of packages whose version was not tried, naming those found and those tried.

    No version is known to break, so none is refused: what the connector relies on is checked where it is used.

    Args:
      version_of: returns the installed version of a package, or None.

    Returns:
      The packages that differ, with the version found; "none" if there is none.
    """
    differing = {}
    for package, tried in TRIED.items():
        name, found = package, version_of(package)
        if found is None and package in ALTERNATIVES:
            name = ALTERNATIVES[package]
            found = version_of(name)
        # What follows a "+" names a build of the same version.
        if found is None or found.partition("+")[0] != tried:
            differing[name] = found or "none"

    if differing:
        logger.warning(
            "kvpatch: found %s; tried with %s: answers of other versions were compared with nothing",
            ", ".join(f"{name} {found}" for name, found in differing.items()),
            ", ".join(f"{name} {tried}" for name, tried in TRIED.items()),
        )
    return differing
