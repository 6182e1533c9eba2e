"""What an operator sets once, and what a request may ask for within that."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ...errors import ConfigError, InputError
from ...plan import DEFAULT_KL

Policy = Literal["exact", "approximate", "blind"]
LONGEST = 86_400.0
"""Seconds that anything may be waited for: a day."""


@dataclasses.dataclass(frozen=True)
class ConnectorConfig:
    """An operator's settings: `kv_connector_extra_config` of the engine.

    Attributes:
      store: the root of a `ChunkStore`, which engines may share.
      backbone: the name under which chunks are kept and a certificate speaks: the fingerprint of the weights in their
        dtype. The first engine that opens a tenant's store says there which weights the name is for; an engine of
        others has nothing of that store and adds nothing. Where weights do not come from safetensors files this cannot
        be told, and two engines that give one name must have the same.
      certificate: path of the certificate; without one nothing approximate is served.
      rank: of the patches that are formed from traffic.
      save: whether chunks and patches are formed from what is prefilled.
      most_kl: nats; no request of policy "approximate" gets a larger bound. There is no infinite one.
      uncertified: allows the policy "blind", for measurements; else a request that asks for it is served plainly.
      image_frame: token ids that open and close an image, which then belong to its chunk; None: none do.
      pending: prefills that may wait to be formed into patches; more are dropped.
      pending_bytes: of KV on the device that may wait to be formed or be in work; a chunk beyond it is not formed.
      readers: threads that read chunks for requests that have come, while the engine goes on with others.
      ahead: requests whose chunks are read and held in memory before they are placed; more wait.
      patience: seconds within which a request's chunks have to be read, from when it comes; then it is served plainly.
        Also of closing: what is not formed and written by then is left.

    Raises:
      ConfigError: a setting that is not known, missing, or out of range.
    """

    store: str
    backbone: str
    certificate: str | None = None
    rank: int = 16
    save: bool = True
    most_kl: float = DEFAULT_KL
    uncertified: bool = False
    image_frame: tuple[int, int] | None = None
    pending: int = 8
    pending_bytes: int = 512 << 20
    readers: int = 2
    ahead: int = 8
    patience: float = 30.0

    def __post_init__(self) -> None:
        frame = self.image_frame
        wanted = {
            "store": isinstance(self.store, str) and self.store != "",
            "backbone": isinstance(self.backbone, str) and self.backbone != "",
            "certificate": self.certificate is None or isinstance(self.certificate, str),
            "rank": _whole(self.rank, 1),
            "save": isinstance(self.save, bool),
            "most_kl": _bound(self.most_kl),
            "uncertified": isinstance(self.uncertified, bool),
            "image_frame": frame is None or (len(frame) == 2 and all(_whole(token, 0) for token in frame)),
            "pending": _whole(self.pending, 1),
            "pending_bytes": _whole(self.pending_bytes, 1, 2**63),
            "readers": _whole(self.readers, 1),
            "ahead": _whole(self.ahead, 1),
            "patience": _bound(self.patience) and self.patience <= LONGEST,
        }
        for name, fits in wanted.items():
            if not fits:
                raise ConfigError(f"connector: {name} {getattr(self, name)!r:.80}; expected as `ConnectorConfig` says")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "ConnectorConfig":
        """Reads `kv_connector_extra_config`. Raises as the class."""
        known = {field.name for field in dataclasses.fields(cls)}
        missing = {"store", "backbone"} - given.keys()
        if missing or given.keys() - known:
            raise ConfigError(
                f"connector: settings {sorted(given)}; expected 'store' and 'backbone', and of others "
                f"{sorted(known - {'store', 'backbone'})}"
            )
        frame = given.get("image_frame")
        return cls(**{**given, "image_frame": tuple(frame) if isinstance(frame, list) else frame})


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """What one request asks for: its `kv_transfer_params`.

    Attributes:
      policy: "exact" serves what a prefill computes; "approximate" also what the certificate bounds within `kl`;
        "blind" all that is stored, whatever that loses, where the operator allows it (`Settings.uncertified`).
      tenant: whose chunks; a gateway sets it, for whoever says a tenant's name is served its chunks.
      kl, flips: bounds of the answer's loss, as in `Goal`. Without `kl`, "approximate" has the operator's; "blind" has
        none, and takes none.
      segments: ends of the chunks that the prompt is made of, in tokens, growing; what is behind the last one is the
        question. None: around the images, and nothing of a text.
      save: whether chunks and patches may be formed from this request.

    Raises:
      InputError: a parameter that is not known, or out of range.
    """

    policy: Policy = "exact"
    tenant: str = "default"
    kl: float | None = None
    flips: float | None = None
    segments: tuple[int, ...] | None = None
    save: bool = True

    def __post_init__(self) -> None:
        ends = self.segments
        wanted = {
            "policy": self.policy in typing.get_args(Policy),
            "tenant": isinstance(self.tenant, str) and 1 <= len(self.tenant) <= 200,
            "kl": self.kl is None or (_bound(self.kl) and self.policy != "blind"),
            "flips": self.flips is None or (_bound(self.flips) and self.policy != "blind"),
            "segments": ends is None
            or (all(_whole(end, 1) for end in ends) and list(ends) == sorted(set(ends)) and len(ends) <= 4096),
            "save": isinstance(self.save, bool),
        }
        for name, fits in wanted.items():
            if not fits:
                raise InputError(
                    f"kv_transfer_params: {name} {getattr(self, name)!r:.80}; expected as `RequestOptions` says"
                )

    @classmethod
    def read(cls, given: Any) -> "RequestOptions | None":
        """Reads the part `"kvpatch"` of `kv_transfer_params`; None where there is none. Raises as the class.

        Args:
          given: whatever a client sent.
        """
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise InputError(f"kv_transfer_params: {given!r:.80}; expected a mapping")
        own = given.get("kvpatch")
        if own is None:
            return None
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(own, Mapping) or set(own) - known:
            raise InputError(f"kv_transfer_params: kvpatch {own!r:.80}; expected some of {sorted(known)}")
        ends = own.get("segments")
        if ends is not None and not isinstance(ends, list | tuple):
            raise InputError(f"kv_transfer_params: segments {ends!r:.80}; expected a list of ends")
        return cls(**{**own, "segments": None if ends is None else tuple(ends)})


def _whole(given: Any, least: int, beyond: int = 2**31) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and least <= given < beyond


def _bound(given: Any) -> bool:
    """Whether it is a finite number from 0 on. Integers may be larger than any float."""
    return isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given < 2**63
