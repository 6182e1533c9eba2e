"""Checkpoint directories in Hugging Face's layout: `load` reads one to a backbone, `save` writes one."""

import dataclasses
import fnmatch
import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

import jax
from jax.sharding import Mesh

from kvpatch_jax.core import Buckets
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.utils.atomic_files import path_of
from kvpatch_jax.utils.compiling import keep_compiled

from .backbone import ModelBackbone
from .checkpoints import TensorSource, flatten_params, load_weights, save_weights, tensor_shapes
from .decoder.sharding import check_parameters, parameter_shardings, split_mesh
from .families.architectures import find_architecture
from .families.family import abstract, parameters, tower_heads, with_dtype
from .families.parsed import without_keys
from .families.registry import FAMILIES
from .files import open_files
from .hub import resolve
from .inputs.chat import template_with_images
from .inputs.positions import VideoRule
from .inputs.stops import save_generation
from .inputs.texts import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE


def load(
    directory: str | os.PathLike[str],
    dtype: str | None = None,
    angles: str = "exact",
    regime: str | int | None = None,
    buckets: Buckets | None = None,
    mesh: Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    ignore: Collection[str] = (),
    video_rule: VideoRule | None = None,
) -> ModelBackbone:
    """Loads a backbone. Programs that it compiles are kept for other processes (`utils.compiling.keep_compiled`).

    Args:
      directory: a Hugging Face checkpoint directory (config.json, safetensors, and for images
        preprocessor_config.json), a GGUF file, or a directory that holds exactly one. `~` is the user's folder. A str
        "owner/name" that is no directory here is a repository of the Hugging Face hub: the snapshot in the hub's cache,
        downloaded where it is not there, its size said before.
      dtype: "float32" or "bfloat16"; when None the one at the top of the configuration, else that of the weights.
      angles: "exact" for cosines right at every position, "float32" for parity with the original engines.
      regime: for ropes whose frequencies depend on the sequence length, the one set to use: "short" (the default) or
        "long" for longrope, a length for dynamic scaling (the model's own by default).
      buckets: sizes that prompts and images are padded to, so that another size in the same bucket compiles nothing
        anew; None for no padding, except in sessions.
      mesh: lays parameters and KV over the axis "tensor" of this mesh, as `models/decoder/sharding.py` says; each shard
        goes from the file straight to its devices. None puts everything on the default device.
      adapter: a directory with a LoRA adapter as peft saves it, merged into the weights in float32 and rounded once.
        Tokenizer and chat template stay those of `directory`. It too may be "owner/name" (its main branch).
      revision: of a repository of the hub: a commit (which costs no request once it is cached), tag or branch; None
        for the main branch.
      ignore: keys of config.json that are read as if they were not there, and names or patterns (`fnmatch`) of tensors
        that the model does not read.
      video_rule: Qwen2.5-VL: where text behind a video goes on, "max" (the authors' rule, the default) or "hf5"
        (transformers 5.3 and later); `models/inputs/positions.py` says what each is.

    Raises:
      ConfigError: no such directory, no readable config.json, quantised weights, a key that
        may change what the model computes and is not known, or one not of its kind, a layer that keeps no KV, a regime
        for a rope that has none, an architecture that is not built (the known ones are listed), a name in `ignore` that
        is known or not there, or a mesh without the axis "tensor" or with a number of devices on it that does not
        divide the model's heads, MLP widths or experts, or that neither divides its KV heads nor is a multiple of them.
      ConfigError: no such repository or revision, one that is gated or private, or neither the hub nor its cache.
      WeightsError: missing, mis-shaped or mis-typed tensors, a damaged file, or a parameter that did not come out in
        its type and sharding.
      MissingExtraError: a tokenizer.json where `tokenizers` is not installed, or a repository's name without
        `huggingface_hub`. (Pillow and jinja2 are asked for when an image or a chat template is first used.)

    Warns:
      UnknownKeyWarning: a key of config.json that no class of transformers reads.
      UnknownTensorWarning: tensors that the model does not read, all in one.
    """
    if dtype is not None and dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"load: got dtype {dtype!r:.80}; expected 'float32', 'bfloat16' or None")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ConfigError(f"load: got mesh {mesh!r:.80}; expected a jax.sharding.Mesh, or None")
    if isinstance(ignore, str) or not isinstance(ignore, Collection) or not all(isinstance(key, str) for key in ignore):
        raise ConfigError(f"load: got ignore {ignore!r:.80}; expected a list of keys and tensor names")
    if buckets is not None and not isinstance(buckets, Buckets):
        raise ConfigError(f"load: got buckets {buckets!r:.80}; expected a Buckets, or None")

    keep_compiled()

    # Last of the arguments, since they may be downloaded.
    root = resolve(directory, revision, "load", "a checkpoint's directory or GGUF file, or owner/name")
    if adapter is not None:
        adapter = resolve(adapter, None, "load: adapter", "an adapter's directory, or owner/name")
    files = open_files(root)

    name = find_architecture(files.config, files.name)
    family = FAMILIES[name]
    raw, passed_over = without_keys(files.config, ignore)
    config = family.config(raw if family.amend is None else family.amend(raw, root), angles, regime)
    # An architecture may stand for several families (LLaVA with Pixtral's tower).
    settings = config.family.settings(root)
    if video_rule is not None:
        if video_rule not in get_args(VideoRule) or not hasattr(config, "video_rule"):
            raise ConfigError(
                f"load: got video_rule {video_rule!r:.80} for {name}; expected None, or of Qwen2.5-VL 'max' or 'hf5'"
            )
        config = dataclasses.replace(config, video_rule=video_rule)
    dtype = dtype or files.dtype()
    config = config if dtype is None else with_dtype(config, dtype)
    if config.text.dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"{files.name}: got dtype {config.text.dtype!r:.80}; expected 'float32', 'bfloat16' or 'float16', or "
            "load(…, dtype=)"
        )

    source = files.source()
    absent = [item for item in sorted(set(ignore) - passed_over) if not fnmatch.filter(source.tensors, item)]
    if absent:
        raise ConfigError(
            f"load: got ignore {absent[0]!r}; expected a key of {files.name}, or a name or pattern of its tensors"
        )
    # Whether the output head is the embedding is settled by the file, before its parameters are counted.
    config, source = config.family.opened(config, source, adapter)
    mesh = None if mesh is None else split_mesh(mesh, config.text.layout)
    values = _load_parameters(source, config, mesh, ignore)

    return ModelBackbone(
        config,
        values,
        tokenizer=files.tokenizer,
        buckets=buckets,
        chat_template=template_with_images(files.chat_template, config.family.template, root, name),
        mesh=mesh,
        without_tokenizer=files.without,
        stop_tokens=files.stop_tokens,
        answer_tokens=files.answer_tokens,
        **settings,
    )


def _load_parameters(source: TensorSource, config: Any, mesh: Mesh | None, ignore: Collection[str]) -> dict[str, Any]:
    """Reads a model's parameters, each where the mesh has it, and checks their types and where they came to lie."""
    expected, shardings = flatten_params(parameters(abstract(config))), None
    if mesh is not None:
        shardings = parameter_shardings(config.text, expected, mesh, tower_heads(config))
    entries = config.family.entries(config, tensor_shapes(source))
    # A head that repeats the embedding.
    head = {config.family.head_names(config)[0]} if config.text.tied_embeddings else set()
    values = load_weights(source, entries, expected, ignore={*ignore, *head}, shardings=shardings)
    check_parameters(flatten_params(values), expected, shardings)
    return values


def save(backbone: ModelBackbone, directory: str | os.PathLike[str], dtype: str | None = None) -> Path:
    """Writes a backbone as a Hugging Face checkpoint directory that `load` (and transformers) reads. Returns it.

    The directory gets config.json, model.safetensors and, where the backbone has them, preprocessor_config.json,
    tokenizer.json, the chat template and generation_config.json (where answers end). `dtype` casts the parameters; None
    leaves them.

    Raises:
      InputError: no backbone. ConfigError: no name of a directory.
    """
    if not isinstance(backbone, ModelBackbone):
        raise InputError(f"save: got a {type(backbone).__name__}; expected a backbone, as load returns")

    root = path_of(directory, "save:", ConfigError, "a directory's name")
    root.mkdir(parents=True, exist_ok=True)
    config, values = backbone.config, backbone.parameters
    # Parameters that are float32 in every model (a router's correction) stay so.
    if dtype is not None:
        config = with_dtype(config, dtype)
        values = jax.tree.map(lambda leaf, typed: leaf.astype(typed.dtype), values, parameters(abstract(config)))

    (root / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    for settings in (backbone.image_config, backbone.video_config, backbone.audio_config):
        if settings is not None:
            settings.save(root)
    template = backbone.chat_template
    if template is not None:
        template.save(root)
    if backbone.tokenizer is not None:
        backbone.tokenizer.save(str(root / TOKENIZER_FILE))
        # The template names special tokens by their parts (`bos_token`), of which `tokenizer.json` says nothing.
        # transformers takes that file as it is where no other class is named.
        table = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict(template.special_tokens if template else ())
        text = json.dumps(table, indent=2, ensure_ascii=False)
        (root / TOKENIZER_CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    save_generation(root, backbone.stop_tokens, backbone.answer_tokens)
    save_weights(root, values, backbone.family.entries(backbone.config, {}))
    return root
