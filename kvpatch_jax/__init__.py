"""Position-free KV chunks and low-rank conditioning patches for vision-language models, in JAX.

Chunks, from a model:
  make_chunk          prefill one unit alone and keep its KV without its position
  conditioned         the KV of every unit of a sequence, conditioned on the units that precede it
  joined              chunks in the engine frame, one after the other: a context
  encode_chunk, decode_chunk   a chunk in 1 to 8 bits, and back
  mean_base           a base of patches in place of the canonical: the mean over antecedents
  Chunk, Tokens       the containers of a canonical and of a prompt
  Text                a str that is text although it looks like a file's name
  Video, Audio        a video or a sound in a prompt: a file, frames with their times, samples with their rate
  Backbone            what a model must provide (`models.load` returns such models)

Patches:
  form_patch          low-rank factors of what a chunk absorbed from its antecedent
  ByteBudget          most bytes of a patch, in place of a rank: a rank for each layer and channel
  Placed              a chunk at a position after an antecedent, with its patch or (blind) without
  apply_patch         the KV of a placed chunk, in the engine frame
  accumulate, orbit_patch            one patch for every order of an antecedent set
  removal_patch                      for a chunk that stays when one that precedes it leaves
  correction_patch, update_patch     what a stored patch lacks, and folding it in
  truncate, keep_layers, quantise    a smaller patch: fewer directions, layers, bits
  Patch               the container of factors

Windows and agents:
  Session             an agent's window with what it takes to run it: add, ask, slide, recall, fork
  Sessions            many sessions in one process, on one pool and one store
  answer_batch        many questions over shared images and texts, as lines of JSON
  Certificate         measured loss of each way of reuse on a backbone, with bounds

Frames of keys, described by a layout:
  KVLayout, Channel, Rope            which tensors a model caches, and how they carry positions
  to_engine, to_local, to_phase_free, relocate

Readouts:
  attention_with_lse, merge_readouts, empty_readout

Modules:
  ops                 the same on bare arrays: to be jitted, vmapped and differentiated
  pool                the paged pool and other engines' page formats: splice, rotate, read, convert
  store               chunks and patches on disk (`ChunkStore`), libraries, snapshots
  session, traces     runtimes of sessions and answers; traces of windows
  window              windows as values, and the executor that brings their KV into a pool
  plan                which mode of reuse serves each chunk of a window, within a goal
  repair              other published repairs of a reused cache, for comparison
  batch               files of questions
  deficit, rope       statistics of a deficit; tables of angles, and `Scaling` of frequencies
  errors              every error that is raised on purpose
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .backbone import Backbone, Tokens, joined
from .cache import Audio, Chunk, Patch, Text, Video, decode_chunk, encode_chunk
from .core import (
    Channel,
    KVLayout,
    Rope,
    attention_with_lse,
    empty_readout,
    merge_readouts,
    relocate,
    to_engine,
    to_local,
    to_phase_free,
)
from .core import ops as ops
from .core import rope as rope
from .patching import (
    ByteBudget,
    Placed,
    accumulate,
    apply_patch,
    conditioned,
    correction_patch,
    form_patch,
    keep_layers,
    make_chunk,
    mean_base,
    orbit_patch,
    quantise,
    removal_patch,
    truncate,
    update_patch,
)

if TYPE_CHECKING:
    from . import batch, plan, pool, repair, session, store, traces, window
    from .batch import answer_batch
    from .core import deficit
    from .plan import Certificate
    from .session import Session, Sessions
    from .store import ChunkStore

__all__ = [
    "Audio",
    "Backbone",
    "ByteBudget",
    "Certificate",
    "Channel",
    "Chunk",
    "ChunkStore",
    "KVLayout",
    "Patch",
    "Placed",
    "Rope",
    "Session",
    "Sessions",
    "Text",
    "Tokens",
    "Video",
    "accumulate",
    "answer_batch",
    "apply_patch",
    "attention_with_lse",
    "batch",
    "conditioned",
    "correction_patch",
    "decode_chunk",
    "deficit",
    "empty_readout",
    "encode_chunk",
    "errors",
    "form_patch",
    "joined",
    "keep_layers",
    "make_chunk",
    "mean_base",
    "merge_readouts",
    "ops",
    "orbit_patch",
    "plan",
    "pool",
    "quantise",
    "relocate",
    "removal_patch",
    "repair",
    "rope",
    "session",
    "store",
    "to_engine",
    "to_local",
    "to_phase_free",
    "traces",
    "truncate",
    "update_patch",
    "window",
]

# Loaded on first use: the store needs POSIX file locks and cryptography, and most programs need few of the modules.
_LAZY_MODULES = {
    "batch": "batch",
    "deficit": "core.deficit",
    "plan": "plan",
    "pool": "pool",
    "repair": "repair",
    "session": "session",
    "store": "store",
    "traces": "traces",
    "window": "window",
}
_LAZY_CLASSES = {
    "Certificate": "plan",
    "ChunkStore": "store",
    "Session": "session",
    "Sessions": "session",
    "answer_batch": "batch",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f".{_LAZY_MODULES[name]}", __name__)
    if name in _LAZY_CLASSES:
        return getattr(importlib.import_module(f".{_LAZY_CLASSES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; expected one of {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
