"""Position-free KV chunks and low-rank conditioning patches for vision-language models, in JAX.

Chunks, from a model (`models.load`):
  make_chunk          prefill one unit alone and keep its KV without its position
  conditioned         the KV of every unit of a sequence, conditioned on the units that precede it
  joined              chunks in the engine frame, one after the other: a context
  encode_chunk        a chunk in 1 to 8 bits
  mean_base           a base of patches in place of the canonical: the mean over antecedents
  Chunk               the container of a canonical
  Text, Video, Audio  items of a prompt: a str that is text although it looks like a file's name; frames; samples

Patches:
  form_patch          low-rank factors of what a chunk absorbed from its antecedent, of a rank or of some bytes
  apply_patch         the KV of a chunk at a position, with its patch or (blind) without, in the engine frame
  Placed              the same, not computed yet: what pools and engines' caches take
  accumulate, orbit_patch            one patch for every order of an antecedent set
  removal_patch                      for a chunk that stays when one that precedes it leaves
  correction_patch, update_patch     what a stored patch lacks, and folding it in
  truncate, keep_layers, quantise    a smaller patch: fewer directions, layers, bits
  Patch               the container of factors

Windows and agents:
  Session             an agent's window with what it takes to run it: add, ask, slide, recall, fork
  Sessions            many sessions in one process, on one pool and one store
  answer_batch        many questions over shared images and texts, as lines of JSON
  ChunkStore          chunks and patches on disk
  Certificate         measured loss of each way of reuse on a backbone, with bounds

Frames of keys, described by a layout:
  KVLayout, Channel, Rope            which tensors a model caches, and how they carry positions
  to_engine, to_phase_free, relocate

Modules:
  ops                 the same on bare arrays: to be jitted, vmapped and differentiated
  pool                the paged pool and other engines' page formats: splice, rotate, read, convert
  repair              every method of reuse, this library's and published ones: `METHODS`
  errors              every error that is raised on purpose
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from . import errors as errors
from .backbone import joined
from .cache import Audio, Chunk, Patch, Text, Video, encode_chunk
from .core import Channel, KVLayout, Rope, relocate, to_engine, to_phase_free
from .core import ops as ops
from .patching import (
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
    from . import batch as batch
    from . import plan as plan
    from . import pool, repair
    from . import session as session
    from . import store as store
    from . import traces as traces
    from . import window as window
    from .batch import answer_batch
    from .plan import Certificate
    from .session import Session, Sessions
    from .store import ChunkStore

__all__ = [
    "Audio",
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
    "Video",
    "accumulate",
    "answer_batch",
    "apply_patch",
    "conditioned",
    "correction_patch",
    "encode_chunk",
    "errors",
    "form_patch",
    "joined",
    "keep_layers",
    "make_chunk",
    "mean_base",
    "ops",
    "orbit_patch",
    "pool",
    "quantise",
    "relocate",
    "removal_patch",
    "repair",
    "to_engine",
    "to_phase_free",
    "truncate",
    "update_patch",
]

# Loaded on first use: the store needs POSIX file locks and cryptography, and most programs need few of the modules.
_MODULES = ("batch", "plan", "pool", "repair", "session", "store", "traces", "window")
_LAZY = {
    "Certificate": "plan",
    "ChunkStore": "store",
    "Session": "session",
    "Sessions": "session",
    "answer_batch": "batch",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name == "__version__":
        try:
            return importlib.metadata.version("kvpatch_jax")
        except importlib.metadata.PackageNotFoundError:
            return "0+unknown"  # a checkout that is not installed
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; expected one of {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
