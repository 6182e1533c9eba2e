"""A measurement as parts, made alike in every process: data read, model loaded, contexts planned."""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.batch import once_in_this_process
from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.utils import strict_json
from models import Buckets, load

from ..harness.methods import BLIND, REFERENCE, parse
from ..harness.parts import Part, Shard, run_parts, run_shards_on_ray
from ..harness.runner import model_path
from . import fields
from .contexts import frame_of, missing
from .items import DataSet, Refusal
from .measured import ARMS, Setup, contexts_of, measure_context


class Request(NamedTuple):
    """What a command asks for, by its flags; sent to other processes as it is."""

    model: str
    data: str
    fields: str | None = None
    media: str | None = None
    keep: int | None = None
    arms: Sequence[str] = ()
    limit: int = 0
    seed: int = 0
    frame: str = "chat"
    answer_tokens: int | None = None
    max_tokens: int | None = None
    dtype: str = "float32"


class Plan(NamedTuple):
    """A measurement's parts.

    Attributes:
      config: what they depend on. data: that is read, whose images are on disk as long as it lives.
      items, pieces: how many. left_out: what is not asked, each with its reason.
    """

    parts: Sequence[Part]
    config: dict[str, Any]
    data: DataSet
    items: int
    pieces: int
    left_out: Sequence[Refusal]


def plan(request: Request) -> Plan:
    """Reads the data, loads the model and plans the parts.

    Raises:
      InputError: data that cannot be read, or that this model cannot be asked. What `models.load` raises.
    """
    arms = [parse(name) for name in dict.fromkeys((REFERENCE, BLIND, *(request.arms or ARMS)))]
    path = located(request.model)
    media = None if request.media is None else Path(request.media)
    sample = {"keep": request.keep, "limit": request.limit, "seed": request.seed}
    data = fields.read(Path(request.data), request.fields, media=media, **sample)
    backbone = load(str(path), dtype=request.dtype, buckets=Buckets())
    frame = frame_of(backbone, request.frame)

    reasons = {item.id: missing(backbone, frame, item) for item in data.items}
    refused = [Refusal(item.where, reasons[item.id]) for item in data.items if reasons[item.id]]
    asked = [item for item in data.items if not reasons[item.id]]
    left_out = [*data.refusals, *refused]
    if not asked:
        first = f"; the first: {left_out[0].where}: {left_out[0].reason}" if left_out else ""
        raise InputError(f"--data: got {data.source}, of which this model can be asked nothing{first}")
    contexts = contexts_of(asked)
    most = request.max_tokens or longest_prompt(path)
    setup = Setup(backbone, frame, arms, most, request.answer_tokens)
    parts = []
    for context in contexts:
        work = float(len(context.pieces) + len(context.items) * len(arms))
        parts.append(Part(context.key, functools.partial(measure_context, setup, context), work))
    config = {
        **{"model": path.name, "fingerprint": backbone.fingerprint, "data": data.source.name, "digest": data.digest},
        **{"fields": data.name, "pieces": data.about, "arms": [arm.name for arm in arms], "frame": request.frame},
        **{"dtype": request.dtype, "max_tokens": most, "answer_tokens": request.answer_tokens, **sample},
    }
    pieces = sum(len(context.pieces) for context in contexts)
    return Plan(parts, config, data, len(asked), pieces, left_out)


def located(name: str) -> Path:
    """Finds a model: real weights or a shipped instance by name, a checkpoint, a GGUF file, a repository of the hub.

    Raises:
      InputError: it is none of these.
    """
    try:
        return model_path(name)
    except InputError:
        if Path(name).is_file() or re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            return Path(name)
        raise


def longest_prompt(path: Path) -> int | None:
    """Reads how many tokens a checkpoint was made for, from its config.json; None where that does not say."""
    file = path / "config.json"
    if not file.is_file():
        return None
    raw = strict_json.object_of(file.read_bytes(), f"{file}", KVPatchError)
    text = raw.get("text_config") or raw.get("language_config") or raw.get("llm_config") or {}
    sizes = [values.get("max_position_embeddings") for values in (text, raw)]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def run_on_ray(request: Request, out: Path, address: str, shards: int, resources: str) -> None:
    """Measures all parts as tasks of a Ray cluster, a shard each.

    Model, data and `out` are seen by every worker under the same paths. What a lost worker measured is not lost.

    Args, Raises: as `run_shards_on_ray`.
    """
    run_shards_on_ray(functools.partial(_run_shard, request, out.resolve()), address, shards, resources)


def _run_shard(request: Request, out: Path, index: int, count: int) -> None:
    planned = once_in_this_process(functools.partial(plan, request))
    # The worker of a run that was killed may still be ending.
    run_parts(out, planned.config, planned.parts, Shard(index, count), patience=60.0)
