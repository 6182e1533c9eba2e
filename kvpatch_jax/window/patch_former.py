"""`PatchFormer`: patches formed, on a thread of its own, of what the prefills of a loop leave behind."""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from ..backbone import Backbone, Tokens
from ..cache import Antecedent, Chunk, Patch, brief, patch_digest
from ..core import AnyArray
from ..errors import InputError, PatchMismatchError
from ..patching import Method, Rank, conditioned, form_patch, lead_digest, lead_tokens
from ..utils.background import JobQueue
from .entry import Entry
from .executor import Executor, Lead
from .precompilation import samples
from .sources import PatchStore, asked_behind, grown, padded_chunk, stored
from .window import Window

KEPT_ERRORS = 16
"""Errors that a former remembers, the last ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillRecord:
    """What one prefill left: all that a patch is formed of, in arrays that nobody else gives away."""

    entry: Entry
    antecedent: Antecedent
    tokens: Tokens
    length: int
    kv: Mapping[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderOutput:
    """What a vision tower made of a chunk, to be stored under its content."""

    content: str
    output: AnyArray


@dataclasses.dataclass(frozen=True)
class FormerStats:
    """What a former has done.

    Attributes:
      patches: formed and stored. canonicals, encoders: stored. forwards: prefills of chunks alone.
      skipped: prefills that need no patch (texts, patches that were formed before or that the store has, all where none
        are formed) or whose front moved since.
      dropped: prefills that found the queue full. failed: that ended in an error.
    """

    patches: int = 0
    canonicals: int = 0
    encoders: int = 0
    forwards: int = 0
    skipped: int = 0
    dropped: int = 0
    failed: int = 0


class PatchFormer:
    """Forms patches of an executor's prefills and stores them with their canonicals.

        former = PatchFormer(backbone, store, rank=16)
        former.watch(executor)
        …                                # run edits, answer questions
        former.flush()                   # what was seen so far is stored, or among former.errors

    A prefill of B behind a window leaves KV(B | front). With the canonical, from the store or (once) by a prefill of
    the chunk alone or behind the lead, that gives the patch; it is stamped with the front as it was served. All of it
    runs on one thread of the former's own: the caller only hands over arrays, which stay what they are when the piece
    leaves the pool. Errors are kept, never raised into a caller's answer.

    A former that is not closed ends with the process: what waits is formed for a few seconds and dropped after that
    (`JobQueue`).
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore,
        rank: Rank | None,
        *,
        method: Method = "randomised",
        dtype: jax.typing.DTypeLike | None = None,
        lead: Lead = None,
        pending: int = 8,
        on_error: Callable[[Exception], None] | None = None,
    ):
        """Starts no thread before there is something to form.

        Args:
          rank, method, dtype: of the patches, as `form_patch` takes them. A rank of 0 forms none, and None none until
            `form_patches` says one: then what stands behind nothing is stored, whose prefill is its canonical, and
            nothing is computed.
          lead: what canonicals are prefilled behind, as `make_chunk` takes it, and are stored as made behind. It is
            kept apart from the window's: patches are stamped with all that stood in front, what is pinned included.
          pending: prefills that may wait, whose KV is kept until then; those beyond are dropped and counted.
          on_error: told of each error, on the former's thread.

        Raises:
          InputError: room for none, or as `make_chunk` a lead.
        """
        if pending < 1:
            raise InputError(f"former: pending {pending}; expected at least 1")
        self.backbone, self.store, self.rank = backbone, store, rank
        self._how: dict[str, Any] = {"method": method, "dtype": dtype}
        self._front = None if lead is None else lead_tokens(backbone, lead)
        self.lead = None if self._front is None else lead_digest(backbone.fingerprint, self._front)
        self._on_error = on_error
        self._waiting = JobQueue(self._work, pending, "former")
        self._known: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self.errors: collections.deque[Exception] = collections.deque(maxlen=KEPT_ERRORS)

    @property
    def done(self) -> FormerStats:
        """What was done so far."""
        with self._lock:
            return FormerStats(**self._counts)

    def form_patches(self, rank: Rank) -> None:
        """Forms patches of this rank from now on, where nobody said another one (or none) before."""
        if self.rank is None:
            self.rank = rank

    def keep_encoder(self, content: str, output: AnyArray) -> None:
        """Has a tower's output stored, and returns at once; raises nothing."""
        if not self._waiting.closed:
            self._put(EncoderOutput(content, output))

    def watch(self, executor: Executor) -> None:
        """Forms patches of an executor's prefills from now on.

        Raises:
          InputError: an executor of another backbone, or whose canonicals are made behind another lead.
        """
        if executor.backbone.fingerprint != self.backbone.fingerprint:
            raise InputError(
                f"former of backbone {self.backbone.fingerprint[:16]!r}: an executor of "
                f"{executor.backbone.fingerprint[:16]!r}; expected the same"
            )
        if executor.lead != self.lead:
            raise InputError(f"former of lead {self.lead}: an executor of {executor.lead}; expected the same")
        executor.formers.append(self)

    def __call__(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Takes a prefill down, and returns at once; raises nothing."""
        if self._waiting.closed or id not in window:
            return
        try:
            self._take(window, id, tokens, length, kv)
        except Exception as error:
            self._failed(error)

    def _take(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        piece = window.piece(id)
        # The front must be the one that the forward saw, or the stamp would lie.
        seen = piece.state.kind == "conditioned" and piece.state.behind == piece.front
        wanted = self.rank or not window.index(id)
        if piece.entry.kind != "chunk" or not seen or not wanted or len(tokens.embeddings) != 1:
            self._count("skipped")
            return
        self._put(PrefillRecord(piece.entry, window.antecedent(id), tokens, length, dict(kv)))

    def _put(self, job: PrefillRecord | EncoderOutput) -> None:
        if not self._waiting.add(job):
            self._count("dropped")

    def warm_up(self, tokens: Sequence[int | Tokens]) -> None:
        """Compiles what forming patches of such prefills will need; nothing is stored.

        Args:
          tokens: of chunks, lengths or sample tokens, one of each bucket is enough.

        Raises:
          What the backbone raises.
        """
        for sample in samples(self.backbone, getattr(self.backbone, "buckets", None), tokens):
            length = sample.embeddings.shape[1]
            kv = self._prefilled(sample, length)
            span = int(np.asarray(sample.positions).max()) + 1
            chunk = self._chunk(kv, sample, length, Entry("warm-up", None, length, span))
            rows = {name: value[:, 0] for name, value in kv.items()}
            if self.rank:
                patch_digest(form_patch(chunk, rows, self.rank, ("before",), **self._how))

    def flush(self) -> None:
        """Waits until everything seen so far was formed and stored, or failed. What failed is among `errors`."""
        self._waiting.flush()

    def close(self) -> None:
        """Forms what waits, then ends the thread. Closing twice is allowed."""
        self._waiting.close()

    def __enter__(self) -> "PatchFormer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self, word: str) -> None:
        with self._lock:
            self._counts[word] += 1

    def _work(self, job: PrefillRecord | EncoderOutput) -> None:
        try:
            self._form(job)
        except Exception as error:  # whatever goes wrong is reported, and is nobody's answer
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._count("failed")
        self.errors.append(error)
        if self._on_error is None:
            return
        try:
            self._on_error(error)
        except Exception as another:
            self.errors.append(another)

    def _form(self, job: PrefillRecord | EncoderOutput) -> None:
        if isinstance(job, EncoderOutput):
            store: Any = self.store
            store.put_encoder(job.content, self.backbone.fingerprint, np.asarray(job.output))
            self._count("encoders")
            return
        known = job.entry.key, job.antecedent.digest
        if known in self._known or self._is_stored(job):
            self._known.add(known)
            self._count("skipped")
            return
        chunk = self._canonical(job)
        if job.antecedent.members:
            size = chunk.tokens
            kv = {name: value[:, 0] for name, value in job.kv.items()}
            kv = {name: grown(value, 1, size) for name, value in kv.items()}
            assert self.rank is not None
            self.store.put_patches([form_patch(chunk, kv, self.rank, job.antecedent, **self._how)])
            self._count("patches")
        self._known.add(known)

    def _is_stored(self, job: PrefillRecord) -> bool:
        """Whether the store has a patch behind this very antecedent already, of no smaller rank anywhere."""
        if not job.antecedent.members:
            return False
        layout, backbone = self.backbone.layout, self.backbone.fingerprint
        entry = job.entry
        asked = asked_behind(job.antecedent, entry.id, entry.content, layout, backbone, self.lead)
        return any(
            patch.metadata.behind == job.antecedent and self._is_as_large(patch, job.length)
            for patch in self.store.get_patches(asked)
        )

    def _is_as_large(self, patch: Patch, length: int) -> bool:
        """Whether a patch has in every channel as many directions as one that is formed here."""
        if patch.metadata.base != "canonical" or patch.metadata.orbit:
            return False
        for name, own in patch.ranks.items():
            wanted = self.rank[name] if isinstance(self.rank, Mapping) else self.rank or 0
            most = min(length, self.backbone.layout.channel(name).features)
            if own is not None and own < min(wanted, most):  # None: it is dense, and has them all
                return False
        return True

    def _canonical(self, job: PrefillRecord) -> Chunk:
        """The chunk's canonical, of at least as many tokens as the prefill had with its padding.

        Raises:
          PatchMismatchError: the store has another content under this id. What a forward or the store raises.
        """
        entry, size = job.entry, next(iter(job.kv.values())).shape[2]
        found = stored(self.store, entry.id, self.backbone.fingerprint, self.lead)
        if found is not None:
            other = None not in (entry.content, found.content) and entry.content != found.content
            if other or found.length != job.length:
                raise PatchMismatchError(
                    f"former: the store's {brief(entry.id)!r} has content {found.content!r} and {found.length} "
                    f"tokens; expected {entry.content!r} and {job.length}"
                )
            return padded_chunk(found, size)
        kv = job.kv
        if job.antecedent.members or self._front is not None:
            kv = self._prefilled(job.tokens, job.length)
            self._count("forwards")
        chunk = self._chunk(kv, job.tokens, job.length, entry)
        self.store.put(chunk)
        self._count("canonicals")
        return chunk

    def _prefilled(self, tokens: Tokens, length: int) -> Mapping[str, Array]:
        """KV of a chunk alone, or behind the lead, {channel: [L,1,T',K,H]}."""
        if self._front is not None:
            return conditioned(self.backbone, [tokens], lead=self._front)[0]
        last = np.array([[length - 1]], np.int32)
        return self.backbone.prefill(tokens, logits=last).kv

    def _chunk(self, kv: Mapping[str, Array], tokens: Tokens, length: int, entry: Entry) -> Chunk:
        size = next(iter(kv.values())).shape[2]
        return Chunk(
            kv={name: value[:, 0] for name, value in kv.items()},
            local=np.asarray(grown(np.asarray(tokens.positions)[0], 0, size), np.float32),
            span=entry.span,
            length=length,
            id=entry.id,
            layout=self.backbone.layout,
            backbone=self.backbone.fingerprint,
            content=entry.content,
            lead=self.lead,
        )
