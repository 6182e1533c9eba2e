"""What a family reads its configuration from, and what every family's configuration has."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from kvpatch_jax.errors import ConfigError

from ..decoder.config import DecoderConfig
from ..decoder.hf_config import Regime, need
from .parsed import DTYPES, Table, check_table, known_classes, parse, typed_errors
from .text_towers import read_text


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """A whole backbone's configuration; families add their tower and tokens.

    Attributes:
      family: that reads it. text: the decoder. raw: `config.json` as it was read.
    """

    family: Any
    text: DecoderConfig
    raw: str

    def to_dict(self) -> dict[str, Any]:
        """Returns `config.json` as it was read, with the dtype that the parameters have now."""
        raw: dict[str, Any] = json.loads(self.raw)
        for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
            for name in DTYPES:
                part.pop(name, None)
        model_type = raw.get("model_type", self.family.model_type)
        return raw | {
            "architectures": [self.family.architecture],
            "model_type": model_type,
            "torch_dtype": self.text.dtype,
        }


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """A `config.json` for a family's reader.

    Attributes:
      family: that reads it.
      raw: as it was read. model: as transformers' class of the family's `model_type` completes it; as it was read,
        where there is no such class.
      angles, regime: as `models.load` takes them.
    """

    family: Any
    raw: Mapping[str, Any]
    model: Table
    angles: str
    regime: Regime

    @classmethod
    def of(cls, family: Any, raw: Mapping[str, Any], angles: str, regime: Regime) -> "ConfigFile":
        """Parses `config.json` for a family."""
        if family.model_type in known_classes():
            return cls(family, raw, parse(_nested(raw, family.model_type), family.model_type), angles, regime)
        check_table(raw, "config.json")
        return cls(family, raw, Table(raw), angles, regime)

    def part(self, name: str, model_type: str = "") -> Table:
        """Returns a table inside, of a model without a class as that of `model_type` completes it.

        Raises:
          ConfigError: none.
        """
        raw = _nested(self.raw, self.family.model_type).get(name)
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json: got {name} {raw!r:.60}; expected a table for {self.family.architecture}")
        if self.family.model_type in known_classes():
            return self.model[name]
        return parse(raw, model_type, f"config.json: {name}") if model_type else Table(raw)

    def text(self, *kinds: str, name: str = "text_config") -> DecoderConfig:
        """Reads the text tower, by its `model_type`: of these `kinds`, where there are some, the first by default.

        The dtype at the top is the whole model's, as in transformers: writers leave others in the parts. Head and
        embedding are tied where either level says so, or where none says anything and the class has it so.
        """
        table, own = self.part(name, kinds[0] if kinds else ""), self.raw.get(name) or {}
        ties = [
            level["tie_word_embeddings"] for level in (self.raw, own) if level.get("tie_word_embeddings") is not None
        ]
        tied = any(ties) if ties else self.model.get("tie_word_embeddings", False)
        return self.decoder(Table({**table, "tie_word_embeddings": tied}), *kinds, own=own)

    def decoder(self, table: Mapping[str, Any], *kinds: str, own: Mapping[str, Any] | None = None) -> DecoderConfig:
        """Reads a decoder from a parsed table, in the dtype of the file or else that of the table as it was read."""
        dtype = dtype_of(self.raw) or dtype_of(own or {}) or "float32"
        return read_text(Table({**table, "dtype": dtype}), self.angles, self.regime, kinds)

    def tokens(self, *names: str) -> dict[str, int]:
        """Returns token ids ("image_token" of `image_token_id` or `image_token_index`) by their names.

        Raises:
          ConfigError: one that is missing or no token id.
        """
        found = {name: need(self.model, f"{name}_id", f"{name}_index") for name in names}
        for name, token in found.items():
            if type(token) is not int or token < 0:
                raise ConfigError(f"config.json: got {name}_id {token!r:.60}; expected a token id")
        return found

    def config(self, kind: type[Any], text: DecoderConfig, **fields: Any) -> Any:
        """Returns a family's configuration."""
        return kind(family=self.family, text=text, raw=json.dumps(dict(self.raw), sort_keys=True), **fields)


def read_config(family: Any, raw: Mapping[str, Any], angles: str, regime: Regime) -> Any:
    """Reads `config.json` with a family's reader: whatever is wrong with a value of the file is a ConfigError."""
    with typed_errors("config.json"):
        return family.read(ConfigFile.of(family, raw, angles, regime))


def dtype_of(raw: Mapping[str, Any]) -> str | None:
    """Returns the dtype that a table names, if any."""
    found = raw.get("dtype") or raw.get("torch_dtype")
    return None if found is None else str(found).removeprefix("torch.")


def expect(table: Mapping[str, Any], **built: Any) -> None:
    """Raises ConfigError for a key whose value is not the one that is built, nor one of these (a tuple)."""
    for key, values in built.items():
        choices = values if isinstance(values, tuple) else (values,)
        if table.get(key) not in choices:
            expected = " or ".join(map(repr, choices))
            raise ConfigError(f"config.json: got {key} {table.get(key)!r:.60}, which is not built; expected {expected}")


def one_size(raw: Mapping[str, Any], name: str) -> int:
    """Returns a number, or the one number that a pair of equal sides repeats.

    Raises:
      ConfigError: sides that differ.
    """
    value = need(raw, name)
    sides = value if isinstance(value, list | tuple) else [value]
    if len(set(sides)) != 1 or type(sides[0]) is not int or sides[0] < 1:
        raise ConfigError(f"{name}: got {value!r}; expected a positive whole number, or equal sides")
    return sides[0]


def one_layer(model: Mapping[str, Any]) -> int:
    """Returns the layer of a tower whose features are taken.

    Raises:
      ConfigError: several.
    """
    layer = model["vision_feature_layer"]
    if type(layer) is not int:
        raise ConfigError(f"vision_feature_layer: got {layer!r:.60}; expected one layer")
    return layer


def _nested(raw: Mapping[str, Any], model_type: str) -> Mapping[str, Any]:
    """Returns `config.json` with a text part of its own, where early releases have that at the top."""
    parts = {name: part for name, part in raw.items() if name.endswith("_config") and isinstance(part, Mapping)}
    if "vision_config" not in parts or "hidden_size" not in raw or {"text_config", "language_config"} & parts.keys():
        return raw
    text = {name: value for name, value in raw.items() if name not in parts and name != "model_type"}
    return {**raw, "text_config": text}
