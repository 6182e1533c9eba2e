"""Configurations of runs: small TOML files that name data sets, models, methods, budgets and sizes."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError

FOLDER = Path(__file__).resolve().parents[1] / "configs"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """One data set of a run; what it leaves out is the run's.

    Attributes:
      dataset: its name in `harness.datasets.DATASETS`, or "module:attribute". probes: its settings; empty: its first.
      models, methods, n, batch, dtype: in place of the run's, where given. settings: the data set's own.
    """

    dataset: str
    models: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    n: int = 0
    batch: int = 0
    dtype: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A run.

    Attributes:
      name: of its file. title: of its report, a plain sentence.
      models: shipped instances, checkpoint directories or names of real weights. seeds: those of them that are training
        seeds of one recipe, whose mean is shown first.
      methods: names of arms. metrics: of each kind of question, some of `metrics.PER_KIND`.
      n, batch, seed: contexts, how many at once, and their seed. dtype: of the weights.
      threads: parts measured at once.
      data: its data sets. report: what the report shows: kinds, headline arms, their labels, notes.
      tables: tables of pages and reports, for `harness.pages`.
    """

    name: str
    title: str = ""
    models: tuple[str, ...] = ()
    seeds: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("accuracy", "kl")
    n: int = 64
    batch: int = 64
    seed: int = 0
    dtype: str = "float32"
    threads: int = 1
    data: tuple[DataConfig, ...] = ()
    report: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tables: tuple[Mapping[str, Any], ...] = ()

    @property
    def complete_data(self) -> list[DataConfig]:
        """The data sets, with the run's values in place of what they leave out."""
        names = ("models", "methods", "n", "batch", "dtype")
        complete = []
        for data in self.data:
            left_out = {name: getattr(self, name) for name in names if not getattr(data, name)}
            complete.append(dataclasses.replace(data, **left_out))
        return complete


def names() -> list[str]:
    """Lists the configurations that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read_config(name: str, settings: Sequence[str] = (), variants: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
      name: of one that ships, or a path of a TOML file.
      settings: "key=value" in place of top-level keys, values as in TOML or bare words; lists with commas.
      variants: tables of the file that replace top-level keys: "quick", "all".

    Raises:
      InputError: no such file, no TOML, or an unknown key.
    """
    path = FOLDER / f"{name}.toml"
    path = path if path.exists() else Path(name)
    try:
        raw = tomllib.loads(path.read_text())
    except OSError:
        raise InputError(f"--config: got {name!r}; expected a TOML file, or one of {', '.join(names())}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config: got {path}, which is no TOML ({error})") from error

    tables = {variant: raw.pop(variant, {}) for variant in ("quick", "all")}
    for variant in variants:
        raw |= tables[variant]
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set: got {setting!r}; expected key=value")
        raw[key] = _typed(key, value)
        # A number of contexts that is asked for is that of every data set.
        if key in ("n", "batch"):
            raw["data"] = [{**data, key: 0} for data in raw.get("data", [])]
        if key == "models":
            raw["data"] = _read_by(raw.get("data", []), raw["models"])

    data = tuple(_build(DataConfig, table, path) for table in raw.pop("data", []))
    raw["tables"] = raw.pop("table", [])
    return _build(RunConfig, {"name": path.stem, **raw, "data": data}, path)


def _read_by(tables: Sequence[Mapping[str, Any]], models: Sequence[str]) -> list[dict[str, Any]]:
    """Leaves out data sets that name models of their own, none of which is asked for."""
    remaining = []
    for data in tables:
        names = [name for name in data.get("models", []) if name in models]
        if names or not data.get("models"):
            remaining.append({**data, "models": names})
    return remaining


def _typed(key: str, value: str) -> Any:
    """Reads the value of a setting by the type of the field."""
    types = {field.name: str(field.type) for field in dataclasses.fields(RunConfig)}
    if key not in types:
        raise InputError(f"--set: got {key!r}; expected one of {', '.join(types)}")
    return value.split(",") if types[key].startswith("tuple") else toml_value(value)


def toml_value(value: str) -> Any:
    """Reads a value as TOML has it, or a bare word."""
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value


def _build(kind: type, table: Mapping[str, Any], path: Path) -> Any:
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(table) - known):
        raise InputError(f"{path}: got the key {unknown[0]!r}; expected some of {', '.join(sorted(known))}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
    for name, number in values.items():
        if name in ("n", "batch", "threads") and (not isinstance(number, int) or number < (kind is RunConfig)):
            raise InputError(f"{path}: got {name} = {number!r}; expected a whole number, at least 1")
    return kind(**values)
