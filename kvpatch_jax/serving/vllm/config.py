"""The operator's settings, and what a request may ask for within them."""

import dataclasses
import re
import typing
import urllib.parse
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, InputError
from ...plan import DEFAULT_KL, Reuse
from ...utils.kinds import is_whole
from ...utils.sizes import size_of
from ...window import Promise
from .segments import MAX_SEGMENTS, ChunkingOptions

PATIENCE = 30.0
"""Seconds within which a request's chunks have to be read, and within which stores have to close."""
MAX_NAME = 200
"""Characters of a tenant's or an agent's name."""
PUBLIC = "default"
"""The tenant of requests without a `cache_salt`."""
_VARIABLE = re.compile(r"env:[A-Z_][A-Z0-9_]{0,63}")
_FILE = re.compile(r"file:/[^\0]{1,4000}")


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """Where chunks are stored: options of a `ChunkStore`, as JSON can hold them.

    Attributes:
      root: a directory, which engines may share.
      root_budget: bytes of the directory, of all its tenants and engines together; None: no limit.
      memory: bytes of host memory for copies of stored chunks, of all tenants together.
      ttl: seconds after which what this engine stores expires; None: never.
      key: where the key is with which objects are encrypted: "file:/an/absolute/path", a file that only its owner may
        read, or "env:NAME", an environment variable. Never the key itself, because engines log their settings.
      secret: where the secret is by which objects are named, as `key`. Engines with directories of their own find each
        other's objects in a remote store if they have the same secret. None: the directory's own.
      remote: URL of a remote store (`open_remote`), or "env:NAME"; a URL with a password has to be in a variable.

    Raises:
      ConfigError: an option is out of range. No message holds a key, a secret or a URL with a password.
    """

    root: str
    root_budget: int | None = None
    memory: int = 1 << 30
    ttl: float | int | None = None
    key: str | None = None
    secret: str | None = None
    remote: str | None = None

    def __post_init__(self) -> None:
        _expect("connector.store.root", self.root, isinstance(self.root, str) and self.root != "", "a directory")
        is_budget = self.root_budget is None or is_whole(self.root_budget, 1)
        _expect("connector.store.root_budget", self.root_budget, is_budget, "a number of bytes >= 1, or None")
        _expect("connector.store.memory", self.memory, is_whole(self.memory, 0), "a number of bytes >= 0")
        is_age = self.ttl is None or (_is_bound(self.ttl) and self.ttl > 0)
        _expect("connector.store.ttl", self.ttl, is_age, "seconds > 0, or None")
        for name in ("key", "secret"):
            place = getattr(self, name)
            if place is not None and not _matches(_VARIABLE, place) and not _matches(_FILE, place):
                raise ConfigError(
                    f"connector.store.{name}: got {_sketch(place)}; expected where the {name} is, "
                    f"'file:/an/absolute/path' or 'env:NAME' in capitals, never the {name} itself"
                )
        if self.remote is not None and not _matches(_VARIABLE, self.remote):
            _expect_public_url(self.remote)

    @classmethod
    def read(cls, value: Any) -> "StoreOptions":
        """Reads the setting `store`: a directory, or a mapping whose sizes may be written as "8 GiB".

        Raises:
          ConfigError: as the class; or an option is unknown.
        """
        if isinstance(value, StoreOptions):
            return value
        if isinstance(value, str):
            return cls(value)
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or not {"root"} <= value.keys() <= fields:
            keys = sorted(map(str, value)) if isinstance(value, Mapping) else _sketch(value)
            raise ConfigError(
                f"connector.store: got {keys}; expected a directory, or a mapping with 'root' and any of "
                f"{sorted(fields - {'root'})}"
            )
        options = dict(value)
        for name, least in (("root_budget", 1), ("memory", 0)):
            if isinstance(options.get(name), str):
                options[name] = size_of(options[name], f"connector.store.{name}", least, ConfigError)
        return cls(**options)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Options of one request: `"kvpatch"` in its `kv_transfer_params`.

    Attributes:
      reuse: "exact" serves what a prefill computes; "certified" also what the certificate bounds within `kl`; "patched"
        also patches and similar prefills without a bound; "blind" canonicals alone.
      kl: nats that an answer may lose, with "certified" alone; None: the operator's limit.
      promise: what an approximate answer is compared with: "forget", a prefill of this prompt; or "remember", a window
        whose chunks stay as they were prefilled, conditioned on what has left since.
      agent: whose window this is: what its requests leave behind serves its next one, and no other agent's. Requests of
        a tenant that name none count as one agent's.
      segments: ends of the prompt's chunks in tokens, increasing; the tokens after the last one are the question.
        None: the ends of images and of texts, divided as `ConnectorConfig.chunking` says.
      save: whether chunks and patches may be formed from this request.

    Raises:
      InputError: an option is out of range.
    """

    reuse: Reuse = "exact"
    kl: float | None = None
    promise: Promise = "forget"
    agent: str = ""
    segments: tuple[int, ...] | None = None
    save: bool = True

    def __post_init__(self) -> None:
        reuses, promises = typing.get_args(Reuse), typing.get_args(Promise)
        is_kl = self.kl is None or (_is_bound(self.kl) and self.reuse == "certified")
        is_agent = isinstance(self.agent, str) and len(self.agent) <= MAX_NAME
        checks = {
            "reuse": (self.reuse in reuses, f"one of {reuses}"),
            "kl": (is_kl, "a finite number of nats >= 0, with reuse 'certified' alone"),
            "promise": (self.promise in promises, f"one of {promises}"),
            "agent": (is_agent, f"at most {MAX_NAME} characters"),
            "segments": (_are_ends(self.segments), f"at most {MAX_SEGMENTS} increasing integers >= 1"),
            "save": (isinstance(self.save, bool), "True or False"),
        }
        for name, (valid, expected) in checks.items():
            _expect(f"kv_transfer_params.kvpatch.{name}", getattr(self, name), valid, expected, InputError)

    @classmethod
    def read(cls, params: Any, default: "RequestOptions | None" = None) -> "RequestOptions | None":
        """Reads the part `"kvpatch"` of `kv_transfer_params`, whatever a client sent.

        Args:
          default: options that the part leaves out; its `kl` counts with reuse "certified" alone.

        Returns:
          `default` if there is no such part; None if it is False: the request asks for no stored chunks.

        Raises:
          InputError: as the class; or the parameters are of other types, or an option is unknown.
        """
        if params is None:
            return default
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params: got {params!r:.80}; expected a mapping")
        part = params.get("kvpatch")
        if part is None or part is False:
            return default if part is None else None

        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(part, Mapping) or set(part) - fields:
            raise InputError(
                f"kv_transfer_params.kvpatch: got {part!r:.80}; expected any of {sorted(fields)}, or False"
            )
        options = {} if default is None else {name: getattr(default, name) for name in fields}
        if part.get("reuse", "certified") != "certified":
            options["kl"] = None
        options |= part
        # JSON has no tuples.
        if isinstance(options.get("segments"), list):
            options["segments"] = tuple(options["segments"])
        return cls(**options)


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """The operator's settings: `kv_connector_extra_config` of the engine.

    Attributes:
      store: where chunks are stored; `read` accepts a directory alone.
      backbone: the name under which chunks are stored and which the certificate is for. The first engine that opens a
        tenant's store records there which weights the name is for; an engine with other weights is served nothing from
        that store and adds nothing. Weights that do not come from safetensors files cannot be checked: engines that use
        one name must then have the same weights.
      certificate: path of the certificate; without one nothing is certified.
      kl: nats; the most that any certified request may lose.
      allow: what requests may ask for as `reuse`; a request that asks for more is served without stored chunks.
      default: options of requests that bring none, and of those that leave some out; it has no `segments` and no
        `agent`. None: a request without options is served as without the connector.
      chunking: how a prompt is divided for requests that declare no `segments`; None: at images alone.
      rank: rank of the patches formed from traffic.
      store_after: how often a chunk has to be asked for behind the same history, or behind the same nearest chunk,
        until it is stored behind it. 0: this engine stores nothing.
      survivors: bytes of host memory for what requests leave behind for the next ones of their agents; 0: none.

    Raises:
      ConfigError: a setting is out of range, or the default goes beyond the other settings.
    """

    store: StoreOptions
    backbone: str
    certificate: str | None = None
    kl: float = DEFAULT_KL
    allow: tuple[Reuse, ...] = ("exact", "certified")
    default: RequestOptions | None = None
    chunking: ChunkingOptions | None = None
    rank: int = 16
    store_after: int = 2
    survivors: int = 1 << 30

    def __post_init__(self) -> None:
        reuses = typing.get_args(Reuse)
        is_path = self.certificate is None or isinstance(self.certificate, str)
        is_allowed = (
            isinstance(self.allow, tuple) and "exact" in self.allow and all(word in reuses for word in self.allow)
        )
        is_chunking = self.chunking is None or isinstance(self.chunking, ChunkingOptions)
        checks = {
            "store": (isinstance(self.store, StoreOptions), "a StoreOptions"),
            "backbone": (isinstance(self.backbone, str) and self.backbone != "", "a name"),
            "certificate": (is_path, "a path, or None"),
            "kl": (_is_bound(self.kl), "a finite number of nats >= 0"),
            "allow": (is_allowed, f"'exact' and any others of {reuses}"),
            "chunking": (is_chunking, "a mapping, or None"),
            "rank": (is_whole(self.rank, 1), "an integer >= 1"),
            "store_after": (is_whole(self.store_after, 0), "an integer >= 0"),
            "survivors": (is_whole(self.survivors, 0), "a number of bytes >= 0"),
        }
        for name, (valid, expected) in checks.items():
            _expect(f"connector.{name}", getattr(self, name), valid, expected)
        self._check_default()

    def _check_default(self) -> None:
        """Raises for a default that the limits of every request would replace or refuse."""
        default = self.default
        if default is None:
            return
        is_default = isinstance(default, RequestOptions) and default.segments is None and not default.agent
        _expect("connector.default", default, is_default, "options of a request without segments and agent")
        _expect("connector.default.reuse", default.reuse, default.reuse in self.allow, f"one of allow, {self.allow}")
        is_within = default.kl is None or default.kl <= self.kl
        _expect("connector.default.kl", default.kl, is_within, f"at most the setting kl, {self.kl!r}")

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> "ConnectorConfig":
        """Reads `kv_connector_extra_config`. Raises as the class."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not {"store", "backbone"} <= extra_config.keys() <= fields:
            raise ConfigError(
                f"connector: got settings {sorted(extra_config)}; expected 'store' and 'backbone', and any of "
                f"{sorted(fields - {'store', 'backbone'})}"
            )
        settings = {**extra_config, "store": StoreOptions.read(extra_config["store"])}
        # JSON has neither tuples nor sizes.
        if isinstance(settings.get("allow"), list):
            settings["allow"] = tuple(settings["allow"])
        if isinstance(settings.get("survivors"), str):
            settings["survivors"] = size_of(settings["survivors"], "connector.survivors", 0, ConfigError)
        if settings.get("chunking") is not None:
            settings["chunking"] = ChunkingOptions.read(settings["chunking"])
        if settings.get("default") is not None:
            settings["default"] = _read_default(settings["default"])
        return cls(**settings)

    def options_of(self, params: Any) -> RequestOptions | None:
        """Reads the options of a request from its `kv_transfer_params`: its own, and the default's for the others.

        Returns:
          None if it is to be served as without the connector.

        Raises:
          InputError: as `RequestOptions`; or these settings do not allow what it asks for.
        """
        options = RequestOptions.read(params, self.default)
        if options is not None and options.reuse not in self.allow:
            raise InputError(
                f"kv_transfer_params.kvpatch.reuse: got {options.reuse!r}, which the operator does not allow; expected "
                f"one of {self.allow}"
            )
        return options


def tenant_of(cache_salt: str | None) -> str:
    """Returns the tenant of a request: the `cache_salt` that it came with, by which vLLM isolates its own cache too.

    Raises:
      InputError: the salt is the name of the public tenant, or too long.
    """
    if not cache_salt:
        return PUBLIC
    if cache_salt == PUBLIC or len(cache_salt) > MAX_NAME:
        raise InputError(
            f"cache_salt: got {len(cache_salt)} characters; expected at most {MAX_NAME}, and not {PUBLIC!r}, the "
            "tenant of requests without one"
        )
    return cache_salt


def _read_default(value: Any) -> RequestOptions:
    """Reads the setting `default`, a mapping with options of a request."""
    if isinstance(value, RequestOptions):
        return value
    fields = {field.name for field in dataclasses.fields(RequestOptions)} - {"segments", "agent"}
    if not isinstance(value, Mapping) or set(value) - fields:
        raise ConfigError(f"connector.default: got {value!r:.80}; expected a mapping with any of {sorted(fields)}")
    try:
        return RequestOptions(**value)
    except InputError as error:
        raise ConfigError(str(error).replace("kv_transfer_params.kvpatch", "connector.default", 1)) from error


def _expect(name: str, value: Any, valid: bool, expected: str, refused: type[Exception] = ConfigError) -> None:
    if not valid:
        raise refused(f"{name}: got {value!r:.80}; expected {expected}")


def _are_ends(ends: Any) -> bool:
    if ends is None:
        return True
    is_list = isinstance(ends, tuple) and len(ends) <= MAX_SEGMENTS
    return is_list and all(is_whole(end, 1) and end < 2**31 for end in ends) and list(ends) == sorted(set(ends))


def _is_bound(value: Any) -> bool:
    """Returns whether a value is a finite number >= 0. The limit excludes integers larger than any float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _expect_public_url(url: Any) -> None:
    """Raises for a value that is no URL, or that has a user or password."""
    try:
        parts = urllib.parse.urlsplit(url) if isinstance(url, str) and "://" in url else None
    except ValueError:
        parts = None
    if parts is None or not parts.scheme:
        raise ConfigError(
            f"connector.store.remote: got {_sketch(url)}; expected a URL such as valkey://host:6379/0, or 'env:NAME' "
            "in capitals"
        )
    names = {name.lower() for name, _ in urllib.parse.parse_qsl(parts.query)}
    if "@" in urllib.parse.unquote(parts.netloc) or names & {"password", "username"}:
        raise ConfigError(
            "connector.store.remote: got a URL with a user or password, which engines log; expected 'env:NAME', the "
            "environment variable that holds it"
        )


def _sketch(value: Any) -> str:
    """Returns the kind and size of a value that must not be logged."""
    return f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
