"""Checkpoints by their name on the Hugging Face hub: the snapshot in the hub's cache, downloaded where it is not there.

`huggingface_hub` is imported when the first name is looked up. It has the cache, its place (`HF_HOME`, `HF_HUB_CACHE`),
the login, the hub's address (`HF_ENDPOINT`), and downloads, which go on where the connection broke. Of a download whose
process ended, the files that were whole are kept.
"""

import errno
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.atomic_files import path_of
from kvpatch_jax.utils.optional_packages import require

from .checkpoints import ADAPTER_CONFIG, ADAPTER_FILE, INDEX_FILE, SINGLE_FILE

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt"]
"""What is read of a repository: weights, configurations, chat templates and tokenizers."""
UNWANTED = ["*/*", "consolidated*"]
"""Folders (other formats, intermediate checkpoints), and the same weights again for Mistral's own code."""

_PATTERNS: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve(given: Any, revision: str | None, what: str, kind: str) -> Path:
    """Converts a caller's argument to a path on this machine: itself, or a snapshot where it is a name of the hub.

    A str of the form "owner/name" that is no file here is such a name.

    Args:
      given: the argument. revision: of a name: a commit, tag or branch; None for the main branch.
      what: what messages call the argument. kind: what they expect.

    Raises:
      ConfigError: no str or path, one that may not be read, no revision, a revision of something that is no name of the
        hub, or as `snapshot`.
      MissingExtraError: a name of the hub where `huggingface_hub` is not installed.
    """
    path = path_of(given, what, ConfigError, kind)
    if revision is not None and (not isinstance(revision, str) or not revision):
        raise ConfigError(f"{what}: got revision {revision!r:.80}; expected a commit, tag or branch, or None")
    try:
        there = path.exists()
        if there and path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{what}: got {str(path)!r:.80}, which cannot be read ({error.strerror}); expected {kind}"
        ) from error
    named = isinstance(given, str) and _NAME.fullmatch(given) and not given.endswith(".gguf")
    if named and not there:
        return snapshot(given, revision)
    if revision is not None:
        raise ConfigError(
            f"{what}: got revision {revision!r:.80} with {given!r:.80}; expected it with owner/name alone"
        )
    return path


def snapshot(name: str, revision: str | None = None) -> Path:
    """Returns the folder of a repository's files in the hub's cache, and downloads what is missing there.

    A commit that is in the cache costs no request. For a branch or a tag the hub is asked which commit that is now;
    where it cannot be reached, the commit that it was last is used. What is to be downloaded is said on stderr, in
    bytes, before it is.

    Raises:
      ConfigError: no such repository or revision, one that is gated or private, no safetensors in it, or neither the
        hub nor the cache to be had.
      MissingExtraError: `huggingface_hub` is not installed.
    """
    hub = require("huggingface_hub", "huggingface_hub")
    for module in ("constants", "errors", "utils"):
        require(f"huggingface_hub.{module}", "huggingface_hub")  # the package does not import them by itself
    cached = _cached(hub, name, revision)
    if cached is not None and revision is not None and _COMMIT.fullmatch(revision):
        return cached

    try:
        seconds = hub.constants.HF_HUB_ETAG_TIMEOUT
        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True, timeout=seconds)
    except Exception as error:  # the hub's own errors, and those of whichever HTTP library it uses
        if cached is not None and not _is_answer(hub, error):
            _say(f"{name}: the hub cannot be reached ({_first_line(error)}); {cached.name} is used, which is cached")
            return cached
        raise _refusal(hub, name, revision, error) from error

    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    files = list(hub.utils.filter_repo_objects(sizes, **_PATTERNS))
    if not any(file.endswith(".safetensors") for file in files):
        others = sorted(file for file in sizes if file.endswith((".gguf", ".bin", ".pth", ".safetensors")))
        raise ConfigError(
            f"{name}: got a repository without safetensors (it has {', '.join(others[:3]) or 'no weights'}); expected "
            "some beside its config.json. A GGUF file is read from a path: `hf download` it first"
        )

    here = {file for file in files if isinstance(hub.try_to_load_from_cache(name, file, revision=info.sha), str)}
    missing = sum(sizes[file] for file in files if file not in here)
    if len(here) < len(files):
        _say(
            f"{name}: downloads {_size(missing)} of {_size(sum(sizes[file] for file in files))}, "
            f"{len(files) - len(here)} files, to {hub.constants.HF_HUB_CACHE}. revision={info.sha!r} pins what it is"
        )

    class Bar(hub.utils.tqdm):
        """A bar that shows nothing where nothing is downloaded."""

        def __init__(self, *arguments: Any, **options: Any):
            if len(here) == len(files):
                options["disable"] = True
            super().__init__(*arguments, **options)

    try:
        # By the branch's name, so that the cache knows later what it was.
        return Path(hub.snapshot_download(name, revision=revision, tqdm_class=Bar, **_PATTERNS))
    except Exception as error:
        raise _refusal(hub, name, revision, error) from error


def _cached(hub: ModuleType, name: str, revision: str | None) -> Path | None:
    """Returns the snapshot in the cache, where all of its weights are there."""
    try:
        found = Path(hub.snapshot_download(name, revision=revision, local_files_only=True, **_PATTERNS))
    except (OSError, ValueError):  # none, part of one, or no name that the hub's client takes
        return None

    # A folder may have been begun by others, which wanted its configuration alone.
    if (found / ADAPTER_CONFIG).is_file():
        return found if (found / ADAPTER_FILE).is_file() else None
    if not (found / "config.json").is_file():
        return None
    if (found / INDEX_FILE).is_file():
        shards = set(json.loads((found / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"].values())
        return found if all((found / shard).is_file() for shard in shards) else None
    return found if (found / SINGLE_FILE).is_file() else None


def _is_answer(hub: ModuleType, error: Exception) -> bool:
    """Returns whether the hub answered, if only to refuse; a server that fails says nothing of the repository."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, hub.errors.HfHubHTTPError) and status is not None and status < 500


def _refusal(hub: ModuleType, name: str, revision: str | None, error: Exception) -> ConfigError:
    """Returns what to tell of a request that failed."""
    errors, address = hub.errors, f"{hub.constants.ENDPOINT}/{name}"
    at = "" if revision is None else f" at revision {revision!r:.80}"
    if isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{name}: got a gated repository; expected access to it: accept its terms at {address}, and log in with "
            "`hf auth login` or the environment variable HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{name}: got revision {revision!r:.80}, which it does not have; expected one of {address}")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return ConfigError(
            f"{name!r}: got neither a directory on this machine nor a repository of {hub.constants.ENDPOINT}; expected "
            f"one of them (its absolute path here is {os.path.abspath(name)}). If it is private, log in with `hf auth "
            "login` or HF_TOKEN"
        )
    return ConfigError(
        f"{name!r}{at}: got no directory of that name on this machine, nothing whole in the hub's cache "
        f"({hub.constants.HF_HUB_CACHE}), and no answer from {hub.constants.ENDPOINT} ({_first_line(error)}); expected "
        "one of them. Of a download that was cut off, the files that were whole are kept"
    )


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
