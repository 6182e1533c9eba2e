"""Checkpoints by their name on the Hugging Face hub: the snapshot in the hub's cache, downloaded where it is not there.

`huggingface_hub`, imported when the first name is looked up, has the cache (`HF_HOME`, `HF_HUB_CACHE`), the login, the
hub's address (`HF_ENDPOINT`), work without a network (`HF_HUB_OFFLINE`), and downloads that go on where they broke off.
"""

import errno
import os
import re
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError
from kvpatch_jax.utils.atomic_files import path_of
from kvpatch_jax.utils.optional_packages import require

WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt"]
"""What is read of a repository: weights, configurations, chat templates and tokenizers."""
UNWANTED = ["*/*", "consolidated*"]
"""Folders (other formats, intermediate checkpoints), and the same weights again for Mistral's own code."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


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

    Where the hub cannot be reached, the commit that a branch or a tag was last is used.

    Raises:
      ConfigError: no such repository or revision, one that is gated or private, or neither the hub nor its cache.
      MissingExtraError: `huggingface_hub` is not installed.
    """
    hub = require("huggingface_hub", "huggingface_hub")
    errors = require("huggingface_hub.errors", "huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{name}: got a gated repository; expected access to it: accept its terms on its page, and log in with `hf "
            "auth login` or the environment variable HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"{name}: got revision {revision!r:.80}, which it does not have; expected one of its own"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(
            f"{name!r}: got neither a directory on this machine nor a repository of the hub; expected one of them (its "
            f"absolute path here is {os.path.abspath(name)}). If it is private, log in with `hf auth login` or HF_TOKEN"
        ) from error
    except Exception as error:  # of whichever HTTP library the hub's client uses
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"{name!r}: got no directory of that name on this machine, nothing in the hub's cache, and no answer from "
            f"the hub ({text:.200}); expected one of them"
        ) from error
