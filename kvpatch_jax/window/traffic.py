"""`PatchFormer`: stores what the forwards of a loop leave behind, and patches formed of it, on a thread of its own."""

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from ..backbone import Backbone, Tokens
from ..cache import Antecedent, Chunk, Likeness, brief, contents_differ, encode_chunk
from ..core import PARTS, AnyArray, zero_padded
from ..errors import InputError, PatchMismatchError, WorseThanBlindError
from ..patching import Rank, form_patch, rank_by_channel
from ..utils.background import JobQueue
from .entry import Entry
from .executor import Executor
from .sources import PatchStore, encodings_of, stored, stored_patches
from .stored_prefill import StoredPrefills
from .window import Piece, Window

PENDING, PENDING_BYTES = 64, 512 << 20
"""Prefills that may wait to be stored or formed of, and bytes of their KV, which lies on the device until then; those
beyond are dropped and counted."""
KEPT_ERRORS = 16
"""How many errors a former remembers, the last ones."""


class PrefillRecord(NamedTuple):
    """What is stored and formed of after a prefill, in arrays that are donated to nothing.

    Attributes:
      made: identity of the KV.
      keys: under which the prefill is found behind other histories; empty if it is not to be.
    """

    entry: Entry
    made: str
    antecedent: Antecedent
    tokens: Tokens
    kv: Mapping[str, Array]
    keys: dict[Likeness, str]


@dataclasses.dataclass(frozen=True)
class FormerStats:
    """Counters of a former.

    Attributes:
      patches: formed and stored.
      prefills, canonicals, encoders: stored.
      encoded: of the canonicals, those in few bits. canonical_bytes: of all of them, as they are kept.
      forwards: prefills of chunks alone.
      skipped: prefills that need no patch (patches that were formed before or that the store has, all of them while no
        patches are formed, chunks that came for the first time).
      dropped: prefills that found the queue full.
      refused: patches that would have been worse than none.
      failed: prefills that ended in an error.
    """

    patches: int = 0
    prefills: int = 0
    canonicals: int = 0
    encoders: int = 0
    forwards: int = 0
    skipped: int = 0
    dropped: int = 0
    refused: int = 0
    failed: int = 0
    encoded: int = 0
    canonical_bytes: int = 0


class PatchFormer:
    """Former of patches: stores those of an executor's prefills, with their canonicals, and the prefills themselves.

        former = PatchFormer(backbone, store, rank=16)
        former.watch(executor)
        …                                # run windows, answer questions
        former.flush()                   # everything so far is stored, or its error is in former.errors

    A prefill of B behind a window leaves KV(B | front). With the canonical, from the store or (once) by a prefill of
    the chunk alone, that gives the patch; it is stamped with the front as it was served. Everything
    runs on one thread of the former: the caller only passes arrays, which stay valid when the piece leaves the pool.
    Errors are kept, never raised into a caller's answer. A former that is not closed ends with the process.
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore,
        rank: Rank | str | None,
        *,
        encoding: str | None = None,
        prefill_bytes: int = 0,
    ):
        """Starts no thread before there is something to form.

        Args:
          rank: of the patches, or their size as text, as `form_patch` takes it. 0 forms none, and None none until
            `form_patches` sets one; until then only prefills behind nothing are stored, which are canonicals.
          encoding: word of what canonicals are kept in; patches are formed on them as they are decoded. A prefill at
            the front of a window is stored as it is, so that it serves there bit for bit. None: nothing is encoded.
          prefill_bytes: how many bytes of prefills behind other pieces are stored as they are (`StoredPrefills`), the
            first ones; 0 stores none. Means over them are, too, once `form_means` was called.
        """
        self.backbone, self.store, self.rank = backbone, store, rank
        self.encodings = encodings_of(encoding)
        self.errors: collections.deque[Exception] = collections.deque(maxlen=KEPT_ERRORS)

        # Prefills are named by the dtype of the pool that they read, which `watch` brings.
        self._prefill_bytes = prefill_bytes if StoredPrefills.supports(store) else 0
        self._prefills: StoredPrefills | None = None
        self._means, self._first_sight = False, True
        self._sighted: set[str] = set()

        # Counters are written on both threads, what was formed only on the former's.
        self._queue = JobQueue(self._run, PENDING, "former")
        self._waiting_bytes = 0
        self._formed: set[str] = set()
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def done(self) -> FormerStats:
        """What was done so far."""
        with self._lock:
            return FormerStats(**self._counts)

    # ------------------------------------------------------------------------------------------- the caller's thread

    def form_patches(self, rank: Rank | str) -> None:
        """Forms patches of this rank or size from now on, of chunks that come again, unless one was set before."""
        if self.rank is None:
            self.rank, self._first_sight = rank, False

    def form_means(self) -> None:
        """Stores means over prefills that share the nearest chunk from now on, beside the prefills themselves."""
        self._means = True

    def keep_encoder(self, content: str, output: AnyArray) -> None:
        """Queues a tower's output to be stored. Returns at once and raises nothing."""
        # A session may still embed images while what it shares is closed.
        if not self._queue.closed:
            self._enqueue(int(output.nbytes), functools.partial(self._keep_encoder, content, output))

    def watch(self, executor: Executor) -> None:
        """Forms patches of an executor's prefills from now on.

        Raises:
          InputError: an executor of another backbone.
        """
        if executor.backbone.fingerprint != self.backbone.fingerprint:
            found, expected = executor.backbone.fingerprint[:16], self.backbone.fingerprint[:16]
            raise InputError(f"former.executor: got one of backbone {found!r}; expected {expected!r}, the former's")
        if self._prefill_bytes:
            self._prefills = StoredPrefills(self.store, self.backbone.fingerprint, executor.dtype)
        executor.observers.append(self)

    def __call__(self, window: Window, piece: Piece, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Queues a prefill. Returns at once and raises nothing."""
        if self._queue.closed:
            return
        try:
            index = window.index(piece.id)
            if piece.entry.kind != "chunk" or not (self.rank or not index or self._prefills is not None):
                self._count(skipped=1)
                return
            antecedent, keys = window.antecedent(piece.id), window.likeness(piece.id)
            record = PrefillRecord(piece.entry, piece.made, antecedent, tokens, dict(kv), keys)
            self._enqueue(_nbytes(kv), functools.partial(self._form, record))
        except Exception as error:
            self._report(error)

    def flush(self) -> None:
        """Waits until everything queued so far was stored, or failed with an error in `errors`."""
        self._queue.flush()

    def close(self) -> None:
        """Finishes the pending jobs, then ends the thread. Idempotent."""
        self._queue.close()

    def __enter__(self) -> "PatchFormer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _enqueue(self, nbytes: int, work: Callable[[], None]) -> None:
        """Queues work that holds so many bytes (padding included) until it runs, or counts that there is no room."""
        with self._lock:
            fits = self._waiting_bytes + nbytes <= PENDING_BYTES
            self._waiting_bytes += nbytes if fits else 0
        if not fits or not self._queue.add((nbytes, work)):
            with self._lock:
                self._waiting_bytes -= nbytes if fits else 0
            self._count(dropped=1)

    def _count(self, **numbers: int) -> None:
        # Both threads count.
        with self._lock:
            self._counts.update(numbers)

    def _report(self, error: Exception) -> None:
        self._count(failed=1)
        self.errors.append(error)

    # ------------------------------------------------------------------------------------------- the former's thread

    def _run(self, job: tuple[int, Callable[[], None]]) -> None:
        """Runs a job; whatever goes wrong is reported, because no caller waits for it."""
        nbytes, work = job
        with self._lock:
            self._waiting_bytes -= nbytes
        try:
            work()
        except Exception as error:
            self._report(error)

    def _keep_encoder(self, content: str, output: AnyArray) -> None:
        # `PatchStore` does not ask for this method; sessions queue outputs only for stores that have it.
        store: Any = self.store
        store.put_encoder(content, self.backbone.fingerprint, np.asarray(output))
        self._count(encoders=1)

    def _form(self, job: PrefillRecord) -> None:
        """Stores a prefill, and its patch and canonical, unless they are stored."""
        behind = bool(job.antecedent.members)
        # Without stored prefills, which tell a later process of the first time, patches are all that it will have.
        seen_before = self._first_sight or self._prefills is None or self._was_sighted(job)
        if behind and self._prefills is not None:
            self._keep_prefill(job, self._prefills)
            if not self.rank:
                return
        # Most of what an agent sees it never sees again; a patch takes a forward of the chunk alone. And a loop may
        # prefill the same chunk behind the same front many times.
        if (behind and not seen_before) or job.made in self._formed or self._is_stored(job):
            self._formed |= {job.made} if seen_before or not behind else set()
            self._count(skipped=1)
            return

        # Behind nothing the prefill is the canonical, and there is no deficit to form a patch of.
        chunk = self._canonical(job)
        if behind:
            chunk, kv = chunk.pad(max(job.tokens.embeddings.shape[1], chunk.tokens)), {}
            for name, value in job.kv.items():
                kv[name] = value[:, 0] if name in PARTS else zero_padded(value[:, 0], 1, chunk.tokens)
            try:
                self.store.put_patches([form_patch(chunk, kv, self.rank, job.antecedent)])
                self._count(patches=1)
            except WorseThanBlindError:
                self._count(refused=1)
        self._formed.add(job.made)

    def _keep_prefill(self, job: PrefillRecord, prefills: StoredPrefills) -> None:
        """Stores a prefill as it is, while there are bytes left for it."""
        nbytes = _nbytes(job.kv)
        if nbytes > self._prefill_bytes or prefills.contains(job.entry.id, job.made):
            return
        chunk = canonical_of(self.backbone, job.tokens, job.entry, job.kv, prefills.lead(job.made))
        self._prefill_bytes -= nbytes * prefills.put(chunk, job.made, job.keys, mean=self._means)
        self._count(prefills=1)

    def _was_sighted(self, job: PrefillRecord) -> bool:
        """Returns whether a chunk came before, in this process or in one that stored it."""
        key, before = job.entry.key, job.entry.key in self._sighted
        self._sighted.add(key)
        return before or (self._prefills is not None and self._prefills.is_listed(job.entry.id))

    def _is_stored(self, job: PrefillRecord) -> bool:
        """Returns whether the store has a patch behind this very antecedent, of no smaller rank in any channel.

        Where a size in bytes is asked for, any patch will do.
        """
        if not job.antecedent.members:
            return False
        # Of each channel, at most as many directions as it has can be asked for.
        backbone, layout, least = self.backbone, self.backbone.layout, {}
        ranks = 0 if self.rank is None or isinstance(self.rank, str) else self.rank
        for name, rank in rank_by_channel(layout, ranks, "former").items():
            channel = layout.channel(name)
            least[name] = min(rank, channel.rows_for(job.entry.tokens), channel.features)
        for patch in stored_patches(
            self.store, job.entry, job.antecedent, layout, backbone.fingerprint, self.encodings
        ):
            metadata = patch.metadata
            same = metadata.antecedent == job.antecedent and metadata.base == "canonical" and not metadata.orbit
            # A rank of None is that of a dense patch, which has every direction.
            if same and all(rank is None or rank >= least[name] for name, rank in patch.ranks.items()):
                return True
        return False

    def _canonical(self, job: PrefillRecord) -> Chunk:
        """Returns the chunk's canonical; stores it if it is new.

        It is encoded as it is kept, but for that of a prefill at the front of a window.
        """
        entry, backbone, behind = job.entry, self.backbone, bool(job.antecedent.members)
        # At the front of a window a canonical stands for the prefill itself, bit for bit.
        encodings = self.encodings if behind else (None,)
        chunk = stored(self.store, entry.id, backbone.fingerprint, encodings)
        if chunk is None:
            chunk = canonical_of(backbone, job.tokens, entry, None if behind else job.kv)
            self._count(forwards=behind)
        elif contents_differ(entry.content, chunk.content) or chunk.length != entry.tokens:
            raise PatchMismatchError(
                f"former: got {brief(entry.id)!r} from the store with content {chunk.content!r} and {chunk.length} "
                f"tokens; expected {entry.content!r} and {entry.tokens}"
            )
        elif chunk.encoding == encodings[0]:
            return chunk
        # What is stored as it was prefilled, by a session without an encoding or at a window's front, is encoded too.
        chunk = chunk if encodings[0] is None else encode_chunk(chunk, encodings[0])
        self.store.put(chunk)
        self._count(canonicals=1, encoded=chunk.encoding is not None, canonical_bytes=chunk.nbytes)
        return chunk


def _nbytes(kv: Mapping[str, Array]) -> int:
    return sum(value.nbytes for value in kv.values())


def canonical_of(
    backbone: Backbone,
    tokens: Tokens,
    entry: Entry,
    kv: Mapping[str, Array] | None = None,
    lead: str | None = None,
) -> Chunk:
    """Makes a canonical of padded tokens, prefilled alone; or of the KV that a forward left, a stored prefill too.

    Args:
      kv: phase-free, {channel: [L,1,T',K,H]}; None: a forward runs.
    """
    if kv is None:
        options: Any = {"lengths": np.array([entry.tokens], np.int32)} if backbone.layout.parts else {}
        kv = backbone.prefill(tokens, logits=np.array([[entry.tokens - 1]], np.int32), **options).kv
    size = kv[backbone.layout.names[0]].shape[2]
    local = np.asarray(tokens.positions)[0, :size]
    return Chunk(
        # On the host, where it is stored from: on a device every size would compile a program.
        kv={name: np.asarray(value)[:, 0] for name, value in kv.items()},
        local=np.asarray(zero_padded(local, 0, size), np.float32),
        span=entry.span,
        length=entry.tokens,
        id=entry.id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=entry.content,
        lead=lead,
    )
