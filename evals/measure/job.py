"""A measurement as parts, made alike in every process: data read, model loaded, contexts planned."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, load
from kvpatch_jax.utils import strict_json

from ..harness.methods import BLIND, REFERENCE, parse
from ..harness.parts import Part, Plan
from ..harness.runner import model_path
from . import fields
from .contexts import frame_of
from .measured import ARMS, Setup, contexts_of, measure_context


class Request(NamedTuple):
    """What a command asks for, by its flags; sent to other processes as it is."""

    model: str
    data: str
    fields: str | None = None
    keep: int | None = None
    methods: Sequence[str] = ()
    limit: int = 0
    seed: int = 0
    frame: str = "chat"
    answer_tokens: int | None = None
    max_tokens: int | None = None
    dtype: str = "float32"


def plan(request: Request) -> Plan:
    """Reads the data, loads the model and plans the parts; its data, a DataSet, hold images on disk.

    Raises:
      InputError: data without an item, or a model that cannot be asked in words. What `models.load` raises.
    """
    arms = [parse(name) for name in dict.fromkeys((REFERENCE, BLIND, *(request.methods or ARMS)))]
    path = model_path(request.model)
    sample = {"keep": request.keep, "limit": request.limit, "seed": request.seed}
    data = fields.read(Path(request.data), request.fields, **sample)
    backbone = load(str(path), dtype=request.dtype, buckets=Buckets())
    frame = frame_of(backbone, request.frame)

    if not data.items:
        first = f"; the first: {data.refusals[0].where}: {data.refusals[0].reason}" if data.refusals else ""
        raise InputError(f"--data: got {data.source} without an item that can be asked{first}")
    most = request.max_tokens or longest_prompt(path)
    setup = Setup(backbone, frame, arms, most, request.answer_tokens)
    parts = []
    for context in contexts_of(data.items):
        work = float(len(context.pieces) + len(context.items) * len(arms))
        parts.append(Part(context.key, functools.partial(measure_context, setup, context), work))
    config = {
        "model": path.name,
        "fingerprint": backbone.fingerprint,
        "data": data.source.name,
        "digest": data.digest,
        "fields": data.name,
        "pieces": data.about,
        "methods": [arm.name for arm in arms],
        "frame": request.frame,
        "dtype": request.dtype,
        "max_tokens": most,
        "answer_tokens": request.answer_tokens,
        **sample,
    }
    return Plan(config, parts, data)


def longest_prompt(path: Path) -> int | None:
    """Reads how many tokens a checkpoint was made for, from its config.json; None where that does not say."""
    file = path / "config.json"
    if not file.is_file():
        return None
    raw = strict_json.object_of(file.read_bytes(), f"{file}")
    text = raw.get("text_config") or raw.get("language_config") or raw.get("llm_config") or {}
    sizes = [values.get("max_position_embeddings") for values in (text, raw)]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)
