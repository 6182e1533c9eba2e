"""Remote stores by their URL."""

import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from ...errors import InputError
from .local_adapter import LocalAdapter
from .remote_store import RemoteStore
from .retry_policy import RetryPolicy
from .tensorstore_adapter import TensorStoreAdapter
from .valkey_adapter import ValkeyAdapter

_SERVERS = ("valkey", "valkeys", "redis", "rediss")


def open_remote(
    url: str, *, clock: Callable[[], float] = time.time, patience: RetryPolicy | None = None
) -> RemoteStore:
    """Opens a remote store.

    Args:
      url: `file:///a/shared/directory` (`LocalAdapter`), `valkey://host:port/db?prefix=kvpatch:&ttl=1` or `redis://…`
        (`ValkeyAdapter`; with an `s` behind the scheme through TLS), or TensorStore's: `gs://bucket/path/`,
        `s3://bucket/path/`, `memory://`, ….
      clock, patience: those of `RemoteStore`.

    Raises:
      InputError: the URL is invalid.
      MissingExtraError: the client of the service is not installed.
      StoreIOError: the service cannot be opened.
    """
    parts = urllib.parse.urlsplit(url)
    if not parts.scheme or (parts.scheme == "file" and (parts.netloc not in ("", "localhost") or not parts.path)):
        raise InputError(
            f"remote store: got URL {url[:80]!r}; expected one such as file:///srv/kv, valkey://host:6379/0"
        )
    adapter: Any
    if parts.scheme == "file":
        adapter = LocalAdapter(urllib.parse.unquote(parts.path))
    elif parts.scheme in _SERVERS:
        options = dict(urllib.parse.parse_qsl(parts.query))
        prefix, ttl = options.pop("prefix", "kvpatch:"), options.pop("ttl", "0") == "1"
        scheme = "valkeys" if parts.scheme.endswith("s") and parts.scheme != "redis" else "valkey"
        server = parts._replace(scheme=scheme, query=urllib.parse.urlencode(options))
        adapter = ValkeyAdapter.from_url(server.geturl(), prefix=prefix, ttl=ttl)
    else:
        adapter = TensorStoreAdapter(url)
    return RemoteStore(adapter, clock=clock, patience=patience)
