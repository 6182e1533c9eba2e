"""Arms: a method of `kvpatch_jax.repair` with its budget and settings, by a name that rows carry."""

import dataclasses
import inspect
import re
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.backbone import Backbone
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import METHODS, RepairBudget, Repaired, SplicedCache, kv_bytes

from .config import toml_value

REFERENCE, BLIND = "re-prefill", "blind"
"""What every arm is measured against: the reference, and reuse without any repair."""
QUESTION_METHODS = ("infoflow", "prophetkv", "quest", "prcr")
"""Methods that choose tokens by the question, so that every question has a cache of its own."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """A method with its settings.

    Attributes:
      name: as rows have it, "cacheblend.budget=0.15".
      method: its key in `METHODS`.
      tokens: share of the tokens that may be recomputed; None: the method's own default, and where it has none 0, or 1
        if settings say how much is stored.
      bytes: share of the chunk's KV bytes that may be stored, in place of tokens; None: no such limit.
      settings: other keyword arguments of the method.
    """

    name: str
    method: str
    tokens: float | None = None
    bytes: float | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def by_question(self) -> bool:
        """Whether the method chooses by the question."""
        return self.method in QUESTION_METHODS

    def repair(self, backbone: Backbone, splice: SplicedCache, **prepared: Any) -> Repaired:
        """Calls the method on a splice.

        Args:
          prepared: settings that a data set fitted ahead, such as a pooled basis; used where the method takes them.

        Raises:
          KVPatchError: as the method; a budget that nothing fits in, say.
        """
        layout, tokens = backbone.layout, splice.slots.shape[1]
        options, method = {**prepared, **self.settings}, METHODS[self.method]
        if self.bytes is not None:
            options["budget"] = RepairBudget(kv_bytes=int(self.bytes * kv_bytes(layout, tokens)))
        elif self.tokens is not None:
            options["budget"] = RepairBudget(share=self.tokens)
        elif inspect.signature(method).parameters["budget"].default is inspect.Parameter.empty:
            options["budget"] = RepairBudget(share=1.0 if self.settings else 0.0)
        return method(backbone, splice, **options)


def parse(name: str) -> Arm:
    """Reads an arm's name: a method, then settings as ".key=value".

    `budget` is a share of the chunk's tokens, `bytes` a share of its KV's bytes; all others are the method's own.

    Raises:
      InputError: an unknown method, or a setting without a value.
    """
    # Points begin a setting, but for those of numbers.
    method, *pairs = re.split(r"\.(?=[A-Za-z])", name)
    if method not in METHODS and method != REFERENCE:
        raise InputError(f"method: got {name!r}; expected {REFERENCE} or one of {', '.join(METHODS)}, with settings")
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise InputError(f"method {name!r}: got the setting {pair!r}; expected key=value")
        settings[key] = toml_value(value)
    share = settings.pop("bytes", None)
    tokens = settings.pop("budget", None)
    tokens, share = (None if value is None else float(value) for value in (tokens, share))
    return Arm(name, method, tokens, share, settings)
