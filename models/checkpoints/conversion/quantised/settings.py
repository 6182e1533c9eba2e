"""What a configuration says of quantised weights: read strictly, or refused by name."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import ConfigError

from ...json_table import read_table

Raw = Mapping[str, Any]

CONFIG_KEYS = ("quantization_config", "compression_config")
"""Where `config.json` has it, at the top or in the text part."""

_TEXT_PARTS = ("text_config", "language_config", "llm_config")
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of older releases, and what they say where they do not say it."""

_READ = (
    "fp8, fbgemm_fp8, gptq (2, 4 or 8 bits), awq (4 bits, version gemm), compressed-tensors (fp8, int8, packed int4 "
    "or int8)"
)
_KNOWN_REFUSED = {
    "bitsandbytes": "load_in_4bit and load_in_8bit store nf4, fp4 or int8 with statistics of its own kernels",
    "mxfp4": "4-bit floats with shared exponents",
    "hqq": "half-quadratic groups",
    "aqlm": "additive codebooks",
    "vptq": "vector codebooks",
    "quip": "lattice codebooks",
    "higgs": "lattice codebooks after a Hadamard rotation",
    "spqr": "sparse outliers",
    "quanto": "quanto's own tensors",
    "torchao": "torchao's own tensors",
    "eetq": "int8 interleaved for its kernels",
    "bitnet": "ternary weights",
    "marlin": "words permuted for one kernel",
    "modelopt": "FP8 and NVFP4 of NVIDIA's ModelOpt",
    "quark": "AMD Quark's own tensors",
    "fp_quant": "4-bit floats after a Hadamard rotation",
    "auto-round": "several layouts under one name",
}


_INERT = frozenset(
    """
    quant_method quantization_method activation_scheme dequantize kv_cache_scheme fmt run_compressed version
    batch_size block_name_to_quantize cache_block_outputs damp_percent damp_auto_increment dataset exllama_config
    max_input_length model_seqlen module_name_preceding_first_block modules_in_block_to_quantize pad_token_id sym
    tokenizer true_sequential use_cuda_fp16 use_exllama disable_exllama static_groups backend meta mse lm_head
    model_name_or_path model_file_base_name act_group_aware hyb_act zero_point do_fuse fuse_max_seq_len
    modules_to_fuse activation_scale_ub global_compression_ratio quantization_status is_checkpoint_fp8_serialized
    ignored_layers modules_to_not_convert ignore modules_to_convert format checkpoint_format bits w_bit group_size
    q_group_size desc_act weight_block_size config_groups dynamic scale_fmt offload_to_disk offload_to_disk_path
    vram_strategy moe failsafe fallback
    """.split()  # noqa: SIM905  (a list of this length is harder to read)
)
"""Keys that are read, or that say how weights were made or are multiplied and not what they are."""

_ONLY: dict[str, Any] = {
    "fmt": ("e4m3", "e5m2"),
    "is_marlin_format": (False,),
    "pack_dtype": ("int32",),
    "expert_dtype": ("fp8",),
    "scale_fmt": ("float", "ue8m0"),
}
"""Keys of which these values are read."""


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """How a checkpoint's weights are quantised.

    Attributes:
      method: "fp8", "gptq", "awq" or "compressed-tensors".
      place: where it was read, for messages.
      bits: of packed fields; None where the tensors say it.
      group_size: inputs that share a scale; None for all of them.
      block: rows and columns that share a scale (FP8), or None.
      ordered: GPTQ without act-order. zero_offset: see `GptqTensor`.
      plain: modules that are not quantised: names, ends of names or, behind "re:", regular expressions.
      changes: GPTQ: regular expression of modules to what differs for them; None, they are not quantised.
    """

    method: str
    place: str
    bits: int | None = None
    group_size: int | None = None
    block: tuple[int, int] | None = None
    ordered: bool = True
    zero_offset: str = "none"
    plain: tuple[str, ...] = ()
    changes: tuple[tuple[str, "Quantisation | None"], ...] = ()

    def of_module(self, name: str) -> "Quantisation | None":
        """Returns what holds for a module; None where it is not quantised."""
        for pattern, change in self.changes:
            if re.match(pattern, name):
                return change
        return None if any(_names(entry, name) for entry in self.plain) else self


def _names(entry: str, module: str) -> bool:
    """Returns whether an entry of a list of modules names this one: by its whole name, or some components of it in a
    row.
    """
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return f".{entry.strip('.')}." in f".{module}."


def split_config(raw: Raw, root: Path) -> tuple[dict[str, Any], Quantisation | None]:
    """Separates what a directory says of quantised weights from the model's configuration.

    Args:
      raw: `config.json`. root: its directory, where older releases have a file of their own.

    Returns:
      `config.json` without it (the model that is loaded has plain weights), and what it says, or None.

    Raises:
      ConfigError: a method, a layout or a key that is not read; it says which was found and which are read.
    """
    rest = {name: value for name, value in raw.items() if name not in CONFIG_KEYS}
    found = [(name, raw[name]) for name in CONFIG_KEYS if raw.get(name)]
    for part in _TEXT_PARTS:
        inner = raw.get(part)
        if isinstance(inner, Mapping):
            found += [(f"{part}.{name}", inner[name]) for name in CONFIG_KEYS if inner.get(name)]
            rest[part] = {name: value for name, value in inner.items() if name not in CONFIG_KEYS}

    if not found:
        found = [
            (name, {"quant_method": method, **read_table(root / name)})
            for name, method in _FILES.items()
            if (root / name).is_file()
        ]
        if not found and (root / "hf_quant_config.json").is_file():
            found = [("hf_quant_config.json", {"quant_method": "modelopt"})]

    return rest, read_quantisation(found[0][1], found[0][0]) if found else None


def read_quantisation(table: Any, place: str = "quantization_config") -> Quantisation:
    """Reads a `quantization_config`.

    Raises:
      ConfigError: see `split_config`.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{place}: got {table!r}; expected a table")

    # Releases name the method in either of two keys, or not at all.
    given = table.get("quant_method", table.get("quantization_method"))
    if given is None and (table.get("load_in_4bit") or table.get("load_in_8bit")):
        given = "bitsandbytes"
    elif given is None and "config_groups" in table:
        given = "compressed-tensors"
    if given is None:
        raise ConfigError(f"config.json: got {place!r} without a quant_method; expected one of {_READ}")
    method = str(given).lower().replace("compressed_tensors", "compressed-tensors").replace("auto_round", "auto-round")

    readers = {
        "fp8": _read_fp8,
        "fbgemm_fp8": _read_fp8,
        "gptq": _read_gptq,
        "awq": _read_awq,
        "compressed-tensors": _read_compressed,
    }
    if method not in readers:
        about = f" ({_KNOWN_REFUSED[method]})" if method in _KNOWN_REFUSED else ""
        raise ConfigError(
            f"{place}: got weights quantised by {method!r}{about}, which are not read; expected one of {_READ}, or a "
            "checkpoint with plain weights"
        )

    # Keys that may change what the weights are.
    for key, value in table.items():
        if value is None or value is False or value == {} or value == []:
            continue
        if key in _ONLY:
            if value not in _ONLY[key]:
                one_of = ", ".join(map(str, _ONLY[key]))
                raise ConfigError(f"{place}: got {key} {value!r}, which is not read; expected one of {one_of}")
        elif key == "sparsity_config":
            if not isinstance(value, Mapping) or value.get("format", "dense") != "dense":
                raise ConfigError(f"{place}: got sparse weights ({value!r}), which are not read; expected dense ones")
        elif key not in _INERT:
            raise ConfigError(
                f"{place}: got {key!r}: {value!r}; expected settings that are known for {method}, because others may "
                "change what the weights are (if it changes nothing, take it out of the file)"
            )

    # A list where a table belongs, and the like.
    try:
        return readers[method](table, place)
    except (TypeError, AttributeError) as error:
        raise ConfigError(
            f"{place}: got settings of {method} that cannot be read ({error}); expected whole ones"
        ) from error


def _read_fp8(table: Raw, place: str) -> Quantisation:
    block = table.get("weight_block_size")
    if block is not None and not _sizes(block, 2):
        raise ConfigError(f"{place}: got weight_block_size {block!r}; expected two positive whole numbers")
    return Quantisation("fp8", place, block=None if block is None else (block[0], block[1]), plain=_plain(table, place))


def _read_gptq(table: Raw, place: str) -> Quantisation:
    form = str(table.get("checkpoint_format", table.get("format")) or "gptq").lower()
    if form not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"{place}: got GPTQ weights in format {form!r}, which are not read; expected 'gptq' or 'gptq_v2'"
        )

    # Both take 1 from the zeros of the first format, AutoGPTQ field by field, GPTQModel from whole words.
    makers = (table.get("meta") or {}).get("quantizer") or []
    makers = [makers] if isinstance(makers, str) else makers
    offset = "words" if any(str(maker).startswith("gptqmodel") for maker in makers) else "fields"
    found = Quantisation(
        "gptq",
        place,
        bits=_bits(table, place, (2, 4, 8)),
        group_size=_group_size(table, place),
        ordered=not table.get("desc_act", False),
        zero_offset="none" if form == "gptq_v2" else offset,
        plain=_plain(table, place),
    )
    return dataclasses.replace(found, changes=_changes(table.get("dynamic") or {}, found, place))


def _changes(rules: Raw, found: Quantisation, place: str) -> tuple[tuple[str, Quantisation | None], ...]:
    """Reads GPTQModel's rules for modules that differ: "-:" not quantised, "+:" or nothing quantised in another way."""
    changes: list[tuple[str, Quantisation | None]] = []
    for pattern, given in rules.items():
        _compile(pattern.removeprefix("-:").removeprefix("+:"), f"{place}: dynamic")
        if pattern.startswith("-:"):
            changes.append((pattern.removeprefix("-:"), None))
            continue

        table = {"bits": found.bits, "group_size": found.group_size, "desc_act": not found.ordered, **given}
        changed = dataclasses.replace(
            found,
            bits=_bits(table, place, (2, 4, 8)),
            group_size=_group_size(table, place),
            ordered=not table["desc_act"],
        )
        changes.append((pattern.removeprefix("+:"), changed))

    return tuple(changes)


def _read_awq(table: Raw, place: str) -> Quantisation:
    version = str(table.get("version", table.get("format")) or "gemm").lower()
    if version != "gemm":
        raise ConfigError(f"{place}: got AWQ weights of version {version!r}, which are not read; expected 'gemm'")
    bits, group_size = _bits(table, place, (4,)), _group_size(table, place)
    return Quantisation("awq", place, bits=bits, group_size=group_size, plain=_plain(table, place))


_COMPRESSED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision")


def _read_compressed(table: Raw, place: str) -> Quantisation:
    groups = table.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{place}: got config_groups {groups!r}; expected a table of groups")

    sizes, blocks, bits = set[Any](), set[Any](), set[int]()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{place}: got group {name!r} with weights {weights!r}; expected a table")

        form = str(group.get("format") or table.get("format") or "dense")
        if form not in _COMPRESSED_FORMATS:
            raise ConfigError(
                f"{place}: got weights in compressed-tensors' format {form!r}, which are not read; expected one of "
                f"{', '.join(_COMPRESSED_FORMATS)}"
            )

        kind = (weights.get("type", "int"), weights.get("num_bits", 8))
        if kind not in (("float", 8), ("int", 8), ("int", 4)):
            raise ConfigError(
                f"{place}: got weights of type {kind[0]!r} and {kind[1]} bits, which are not read; expected float 8, "
                "int 8 or int 4"
            )

        bits.add(kind[1])
        sizes.add(weights.get("group_size") if weights.get("strategy") == "group" else None)
        block = weights.get("block_structure")
        if block is not None:
            # Written as a list or as "128x128".
            sides = [int(size) for size in re.findall(r"\d+", block)] if isinstance(block, str) else block
            if not _sizes(sides, 2):
                raise ConfigError(f"{place}: got block_structure {block!r}; expected two positive whole numbers")
            blocks.add((sides[0], sides[1]))

    sizes.discard(None)
    if len(sizes) > 1 or len(blocks) > 1:
        raise ConfigError(
            f"{place}: got groups of sizes {sorted(sizes)} and blocks {sorted(blocks)}; expected one of each"
        )

    return Quantisation(
        "compressed-tensors",
        place,
        bits=bits.pop() if len(bits) == 1 else None,
        group_size=_group_size({"group_size": sizes.pop()}, place) if sizes else None,
        block=blocks.pop() if blocks else None,
        plain=_plain(table, place),
    )


def _bits(table: Raw, place: str, known: tuple[int, ...]) -> int:
    bits = table.get("bits", table.get("w_bit", 4))
    if bits not in known or isinstance(bits, bool):
        raise ConfigError(f"{place}: got {bits!r} bits, which are not read; expected {' or '.join(map(str, known))}")
    return bits


def _group_size(table: Raw, place: str) -> int | None:
    size = table.get("group_size", table.get("q_group_size", 128))
    if size is None or size == -1:
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{place}: got group_size {size!r}; expected a positive whole number, or -1")
    return size


def _plain(table: Raw, place: str) -> tuple[str, ...]:
    for key in ("modules_to_not_convert", "ignored_layers", "ignore"):
        given = table.get(key)
        if given is None:
            continue
        if not isinstance(given, list | tuple) or not all(isinstance(name, str) for name in given):
            raise ConfigError(f"{place}: got {key} {given!r}; expected a list of names")

        for name in given:
            if name.startswith("re:"):
                _compile(name.removeprefix("re:"), f"{place}: {key}")
        return tuple(name for name in given if name)
    return ()


def _compile(pattern: str, place: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{place}: got {pattern!r} ({error}); expected a regular expression") from error


def _sizes(value: Any, count: int) -> bool:
    def whole(size):
        return isinstance(size, int) and not isinstance(size, bool) and size > 0

    return isinstance(value, list | tuple) and len(value) == count and all(map(whole, value))
