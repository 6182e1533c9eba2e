"""Settings of the operator, and the options of a request within them."""

import dataclasses
import re
import typing
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

from ...core import KVEncoding
from ...errors import ConfigError, InputError
from ...plan import DEFAULT_KL
from ...utils.sizes import size_of
from ...window import Promise
from .chunking import ChunkingOptions

Policy = Literal["exact", "approximate", "blind"]
MAX_PATIENCE = 86_400.0
"""Seconds, one day: the upper limit of `ConnectorConfig.patience`."""
MAX_SEGMENTS = 4096
"""Number of chunks of a prompt."""
MAX_TENANT = 200
"""Characters of a tenant's name, or an agent's."""
_VARIABLE = re.compile(r"env:[A-Z_][A-Z0-9_]{0,63}")
_KEY_FILE = re.compile(r"file:/[^\0]{1,4000}")


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """The operator's settings: `kv_connector_extra_config` of the engine.

    Attributes:
      store: the root of a `ChunkStore`, which engines may share.
      backbone: the name under which chunks are stored and which the certificate is for: the fingerprint of the weights
        in their dtype. The first engine that opens a tenant's store records there which weights the name is for; an
        engine with other weights is served nothing from that store and adds nothing. Weights that do not come from
        safetensors files cannot be checked: engines that use one name must then have the same weights.
      certificate: path of the certificate; without one nothing approximate is served.
      encoding: word of the encoding in which canonicals are kept, served and patches formed on them, such as "k8v8";
        None: as they were prefilled. Encoded ones are no prefills, so nothing is then served to requests with policy
        "exact". Not with a certificate, whose bounds were measured on canonicals as they were prefilled.
      rank: rank of the patches formed from traffic.
      save: whether chunks and patches are formed from prefills.
      patch_after: how often a chunk has to be asked for behind the same chunks until its patch is formed.
      most_kl: nats; upper limit of the bound of a request with policy "approximate". It is always finite.
      uncertified: allows the policy "blind", for measurements; otherwise a request with that policy is served without
        stored chunks.
      image_frame: token ids that open and close an image, which then belong to its chunk; None: no such tokens.
      survivor_bytes: bytes of host memory for what requests leave behind for the next ones of their agents; 0: none.
        JSON may say "1 GiB".
      pending: prefills that may wait to be formed into patches; more are dropped.
      pending_bytes: bytes of KV on the device that may wait to be formed or be in work; a chunk beyond it is not
        formed. JSON may say "512 MiB".
      readers: threads that read chunks for new requests while the engine serves others.
      ahead: requests whose chunks are held in memory before they are placed; more wait.
      patience: seconds, from a request's arrival, within which its chunks have to be read; otherwise it is served
        without them. Closing waits as long; what is not formed and written by then is dropped.
      host: bytes of host memory in which copies of stored chunks are kept, of all tenants and both sides of the
        connector together. JSON may say "8 GiB".
      disk: bytes of the store's directory, shared with every engine and tenant that has the same limit; None: no limit.
        JSON may say "500 GB".
      ttl: seconds after which what this engine stores expires; None: never.
      key: where the key is with which objects are encrypted: "file:/run/secrets/kvpatch", a file that only its owner
        may read, or "env:NAME", an environment variable. Never the key itself, because engines log their settings.
      secret: where the secret is by which objects are named, as `key`; at least 32 bytes. Engines with directories of
        their own find each other's objects in a remote store if they have the same. None: the directory's own.
      remote: URL of a remote store (`open_remote`), or "env:NAME", an environment variable with it; a URL with a
        password has to be in one. None: none.
      chunking: how text is divided for requests that declare no `segments`; None: only at images.
      default: options of requests that bring none, and of those that leave some out; it has no `segments` and no
        `agent`. None: a request without options is served as without the connector.
      require_tenant: serves a request as without the connector unless it names its tenant itself.

    Raises:
      ConfigError: a setting is out of range.
    """

    store: str
    backbone: str
    certificate: str | None = None
    encoding: str | None = None
    rank: int = 16
    save: bool = True
    patch_after: int = 2
    most_kl: float = DEFAULT_KL
    uncertified: bool = False
    image_frame: tuple[int, int] | None = None
    survivor_bytes: int = 1 << 30
    pending: int = 8
    pending_bytes: int = 512 << 20
    readers: int = 2
    ahead: int = 8
    patience: float = 30.0
    host: int = 1 << 30
    disk: int | None = None
    ttl: float | int | None = None
    key: str | None = None
    secret: str | None = None
    remote: str | None = None
    chunking: ChunkingOptions | None = None
    default: "RequestOptions | None" = None
    require_tenant: bool = False

    def __post_init__(self) -> None:
        frame = self.image_frame
        is_frame = frame is None or (len(frame) == 2 and all(_is_whole(token, 0) for token in frame))
        is_path = self.certificate is None or isinstance(self.certificate, str)
        is_patience = _is_bound(self.patience) and self.patience <= MAX_PATIENCE
        checks = {
            "store": (isinstance(self.store, str) and self.store != "", "a directory"),
            "backbone": (isinstance(self.backbone, str) and self.backbone != "", "a fingerprint"),
            "certificate": (is_path, "a path, or None"),
            "rank": (_is_whole(self.rank, 1), "an integer >= 1"),
            "save": (isinstance(self.save, bool), "True or False"),
            "patch_after": (_is_whole(self.patch_after, 1), "an integer >= 1"),
            "most_kl": (_is_bound(self.most_kl), "a finite number of nats >= 0"),
            "uncertified": (isinstance(self.uncertified, bool), "True or False"),
            "image_frame": (is_frame, "two token ids, or None"),
            "survivor_bytes": (_is_whole(self.survivor_bytes, 0, 2**63), "a number of bytes >= 0"),
            "pending": (_is_whole(self.pending, 1), "an integer >= 1"),
            "pending_bytes": (_is_whole(self.pending_bytes, 1, 2**63), "a number of bytes >= 1"),
            "readers": (_is_whole(self.readers, 1), "an integer >= 1"),
            "ahead": (_is_whole(self.ahead, 1), "an integer >= 1"),
            "patience": (is_patience, f"seconds from 0 to {MAX_PATIENCE:g}"),
            "host": (_is_whole(self.host, 0, 2**62), "a number of bytes >= 0"),
            "disk": (self.disk is None or _is_whole(self.disk, 1, 2**62), "a number of bytes >= 1, or None"),
            "ttl": (self.ttl is None or (_is_bound(self.ttl) and self.ttl > 0), "seconds > 0, or None"),
            "chunking": (self.chunking is None or isinstance(self.chunking, ChunkingOptions), "a mapping, or None"),
            "require_tenant": (isinstance(self.require_tenant, bool), "True or False"),
        }
        for name, (valid, expected) in checks.items():
            if not valid:
                raise ConfigError(f"connector.{name}: got {getattr(self, name)!r:.80}; expected {expected}")
        self._check_secrets()
        if self.default is not None:
            _check_default(self.default, self.most_kl, self.uncertified)

        if self.encoding is None:
            return
        if self.certificate is not None:
            raise ConfigError(f"connector.encoding: got {self.encoding!r:.80} with a certificate; expected None")
        try:
            object.__setattr__(self, "encoding", str(KVEncoding.of(self.encoding)))
        except InputError as error:
            raise ConfigError(
                f"connector.encoding: got {self.encoding!r:.80}; expected a word such as 'k8v8', or None"
            ) from error

    def _check_secrets(self) -> None:
        """Raises for a key or a URL that is written out. Names no value, because it may be the secret itself."""
        remote = self.remote
        for name, key in (("key", self.key), ("secret", self.secret)):
            if key is None or (isinstance(key, str) and (_VARIABLE.fullmatch(key) or _KEY_FILE.fullmatch(key))):
                continue
            raise ConfigError(
                f"connector.{name}: got {_sketch(key)}; expected where the {name} is, 'file:/an/absolute/path' or "
                f"'env:NAME' in capitals, never the {name} itself"
            )
        if remote is None or (isinstance(remote, str) and _VARIABLE.fullmatch(remote)):
            return
        if not isinstance(remote, str) or not _is_url(remote):
            raise ConfigError(
                f"connector.remote: got {_sketch(remote)}; expected a URL such as valkey://host:6379/0, or 'env:NAME' "
                "in capitals"
            )
        parts = urllib.parse.urlsplit(remote)
        options = {name.lower() for name, _ in urllib.parse.parse_qsl(parts.query)}
        if "@" in urllib.parse.unquote(parts.netloc) or options & {"password", "username"}:
            raise ConfigError(
                "connector.remote: got a URL with a user or password, which engines log; expected 'env:NAME', the "
                "environment variable that holds it"
            )

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> "ConnectorConfig":
        """Reads `kv_connector_extra_config`. Raises as the class."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not {"store", "backbone"} <= extra_config.keys() <= fields:
            raise ConfigError(
                f"connector: got settings {sorted(extra_config)}; expected 'store' and 'backbone', and any of "
                f"{sorted(fields - {'store', 'backbone'})}"
            )

        # JSON has neither tuples nor sizes.
        values = dict(extra_config)
        if isinstance(values.get("image_frame"), list):
            values["image_frame"] = tuple(values["image_frame"])
        for name, least in (("pending_bytes", 1), ("survivor_bytes", 0), ("host", 0), ("disk", 1)):
            if isinstance(values.get(name), str):
                values[name] = size_of(values[name], f"connector.{name}", least, ConfigError)
        if values.get("chunking") is not None:
            values["chunking"] = ChunkingOptions.read(values["chunking"])
        if values.get("default") is not None:
            values["default"] = _read_default(values["default"])
        return cls(**values)

    def options_of(self, params: Any) -> "RequestOptions | None":
        """Reads the options of a request: its own, and the default's where it leaves some out.

        Args:
          params: its `kv_transfer_params`, whatever a client sent.

        Returns:
          None if it is to be served as without the connector.

        Raises:
          InputError: as `RequestOptions`; or it asks for blind reuse, which these settings do not allow.
        """
        options = RequestOptions.read(params, self.default)
        if options is None:
            return None
        if options.policy == "blind" and not self.uncertified:
            raise InputError(
                "kv_transfer_params.kvpatch.policy: got 'blind'; expected 'exact' or 'approximate', because the "
                "operator's settings do not allow 'uncertified'"
            )

        own = None if params is None else params.get("kvpatch")
        return None if self.require_tenant and "tenant" not in (own or {}) else options


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """Options of one request: `"kvpatch"` in its `kv_transfer_params`.

    Attributes:
      policy: "exact" serves what a prefill computes; "approximate" also what the certificate bounds within `kl`;
        "blind" every stored chunk, whatever the loss, if the operator allows it (`ConnectorConfig.uncertified`).
      tenant: owner of the chunks. A gateway has to set it: any client that names a tenant is served its chunks.
      kl, flips: bounds of the answer's loss, as in `Goal`. Without `kl`, "approximate" has the operator's; "blind"
        has no bound and accepts none.
      promise: what an approximate answer is compared with: "forget", a prefill of this prompt; or "remember", a window
        whose chunks stay as they were prefilled, conditioned on what has left since.
      agent: whose window this is: what its requests leave behind serves its next one, and no other agent's. Requests of
        a tenant that name none count as one agent's.
      segments: ends of the prompt's chunks in tokens, increasing; the tokens after the last one are the question.
        None: the ends of images and of texts, divided as `ConnectorConfig.chunking` says.
      save: whether chunks and patches may be formed from this request.

    Raises:
      InputError: an option is unknown, or out of range.
    """

    policy: Policy = "exact"
    tenant: str = "default"
    kl: float | None = None
    flips: float | None = None
    segments: tuple[int, ...] | None = None
    save: bool = True
    promise: Promise = "forget"
    agent: str = ""

    def __post_init__(self) -> None:
        ends = self.segments
        are_ends = ends is None or (
            len(ends) <= MAX_SEGMENTS and all(_is_whole(end, 1) for end in ends) and list(ends) == sorted(set(ends))
        )
        bound = "a finite number >= 0, and none with policy 'blind'"
        is_blind = self.policy == "blind"
        is_name = isinstance(self.tenant, str) and 1 <= len(self.tenant) <= MAX_TENANT
        checks = {
            "policy": (self.policy in typing.get_args(Policy), f"one of {typing.get_args(Policy)}"),
            "tenant": (is_name, f"1 to {MAX_TENANT} characters"),
            "kl": (self.kl is None or (_is_bound(self.kl) and not is_blind), bound),
            "flips": (self.flips is None or (_is_bound(self.flips) and not is_blind), bound),
            "segments": (are_ends, f"at most {MAX_SEGMENTS} increasing integers >= 1"),
            "save": (isinstance(self.save, bool), "True or False"),
            "promise": (self.promise in typing.get_args(Promise), f"one of {typing.get_args(Promise)}"),
            "agent": (
                isinstance(self.agent, str) and len(self.agent) <= MAX_TENANT,
                f"at most {MAX_TENANT} characters",
            ),
        }

        for name, (valid, expected) in checks.items():
            if not valid:
                value = getattr(self, name)
                raise InputError(f"kv_transfer_params.kvpatch.{name}: got {value!r:.80}; expected {expected}")

    @classmethod
    def read(cls, params: Any, default: "RequestOptions | None" = None) -> "RequestOptions | None":
        """Reads the part `"kvpatch"` of `kv_transfer_params`.

        Args:
          params: whatever a client sent.
          default: options that the part leaves out; their bounds do not apply to a request with policy "blind".

        Returns:
          `default` if there is no such part; None if it is False: the request asks for no stored chunks.

        Raises:
          InputError: as the class; or the parameters are not of the expected types.
        """
        if params is None:
            return default
        if not isinstance(params, Mapping):
            raise InputError(f"kv_transfer_params: got {params!r:.80}; expected a mapping")

        options = params.get("kvpatch")
        if options is None or options is False:
            return default if options is None else None

        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(options, Mapping) or set(options) - fields:
            raise InputError(
                f"kv_transfer_params.kvpatch: got {options!r:.80}; expected any of {sorted(fields)}, or False"
            )

        ends = options.get("segments")
        if ends is not None and not isinstance(ends, list | tuple):
            raise InputError(f"kv_transfer_params.kvpatch.segments: got {ends!r:.80}; expected a list of ends")

        values = {} if default is None else {name: getattr(default, name) for name in fields}
        if options.get("policy") == "blind":
            values |= {"kl": None, "flips": None}
        return cls(**{**values, **options, "segments": None if ends is None else tuple(ends)})


def _read_default(value: Any) -> RequestOptions:
    """Reads the setting `default`.

    Raises:
      ConfigError: it is no mapping with options of a request.
    """
    fields = {field.name for field in dataclasses.fields(RequestOptions)} - {"segments", "agent"}
    if not isinstance(value, Mapping) or set(value) - fields:
        raise ConfigError(f"connector.default: got {value!r:.80}; expected a mapping with any of {sorted(fields)}")
    try:
        return RequestOptions(**value)
    except InputError as error:
        raise ConfigError(str(error).replace("kv_transfer_params.kvpatch", "connector.default", 1)) from error


def _check_default(default: Any, most_kl: float, uncertified: bool) -> None:
    """Checks options that requests have by default against the operator's limits for every request.

    Raises:
      ConfigError: they are beyond a limit, which would silently replace them or refuse each request.
    """
    if not isinstance(default, RequestOptions) or default.segments is not None or default.agent:
        expected = "options of a request without segments and agent"
        raise ConfigError(f"connector.default: got {default!r:.80}; expected {expected}")
    if default.policy == "blind" and not uncertified:
        raise ConfigError("connector.default.policy: got 'blind'; expected another policy, or the setting uncertified")
    if default.kl is not None and default.kl > most_kl:
        raise ConfigError(f"connector.default.kl: got {default.kl!r}; expected at most most_kl, {most_kl!r}")


def _is_whole(value: Any, least: int, beyond: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < beyond


def _is_bound(value: Any) -> bool:
    """Returns whether a value is a finite number >= 0. The limit is for integers, which may be larger than any
    float.
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_url(text: str) -> bool:
    try:
        return bool(urllib.parse.urlsplit(text).scheme) and "://" in text
    except ValueError:
        return False


def _sketch(value: Any) -> str:
    """Returns the kind and size of a value that must not be logged."""
    return f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
