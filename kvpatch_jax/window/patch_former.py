"""`PatchFormer`: forms patches of the prefills of a loop, on a thread of its own."""

import collections
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from ..backbone import Backbone, Tokens
from ..cache import Antecedent, Chunk, Patch, brief, patch_digest
from ..core import PARTS, AnyArray
from ..errors import InputError, PatchMismatchError
from ..patching import Rank, conditioned, form_patch, lead_digest, lead_tokens, rank_by_channel
from ..utils.background import JobQueue
from .canonical_encoding import AUTO, CanonicalEncoding
from .entry import Entry, contents_differ
from .executor import PagedExecutor
from .padding import padded_chunk, zero_padded
from .precompilation import samples
from .sources import Lead, PatchStore, asked_behind, stored, stored_patches
from .stored_prefill import Likeness, StoredPrefills, likeness_keys
from .window import Window

PENDING, PENDING_BYTES = 64, 512 << 20
"""Prefills that may wait to be stored or formed of, and bytes of their KV, which lies on the device until then; those
beyond are dropped and counted."""
KEPT_ERRORS = 16
"""How many errors a former remembers, the last ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillRecord:
    """What a patch is formed of after a prefill, in arrays that are donated to nothing.

    Attributes:
      front: chain digest of what precedes the piece.
      likeness: keys under which its prefill is found behind other pieces; empty if it is not to be.
    """

    entry: Entry
    antecedent: Antecedent
    tokens: Tokens
    length: int
    kv: Mapping[str, Array]
    front: str
    likeness: dict[Likeness, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the KV, padding included."""
        return sum(value.nbytes for value in self.kv.values())


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderOutput:
    """Output of a vision tower for a chunk, to be stored under the chunk's content."""

    content: str
    output: AnyArray

    @property
    def nbytes(self) -> int:
        """Bytes of the output."""
        return int(self.output.nbytes)


@dataclasses.dataclass(frozen=True)
class FormerStats:
    """Counters of a former.

    Attributes:
      patches: formed and stored.
      prefills, canonicals, encoders: stored.
      encoded: of the canonicals, those in few bits. canonical_bytes: of all of them, as they are kept.
      forwards: prefills of chunks alone.
      skipped: prefills that need no patch (texts, patches that were formed before or that the store has, all of them
        while no patches are formed, chunks that came for the first time) or whose front changed since.
      dropped: prefills that found the queue full.
      failed: prefills that ended in an error.
    """

    patches: int = 0
    prefills: int = 0
    canonicals: int = 0
    encoders: int = 0
    forwards: int = 0
    skipped: int = 0
    dropped: int = 0
    failed: int = 0
    encoded: int = 0
    canonical_bytes: int = 0


class PatchFormer:
    """Former of patches: stores those of an executor's prefills, with their canonicals.

        former = PatchFormer(backbone, store, rank=16)
        former.watch(executor)
        …                                # run edits, answer questions
        former.flush()                   # everything so far is stored, or its error is in former.errors

    A prefill of B behind a window leaves KV(B | front). With the canonical, from the store or (once) by a prefill of
    the chunk alone or behind the lead, that gives the patch; it is stamped with the front as it was served. Everything
    runs on one thread of the former: the caller only passes arrays, which stay valid when the piece leaves the pool.
    Errors are kept, never raised into a caller's answer.

    A former that is not closed ends with the process: pending jobs run for a few seconds and are dropped after that
    (`JobQueue`).
    """

    def __init__(
        self,
        backbone: Backbone,
        store: PatchStore,
        rank: Rank | None,
        *,
        lead: Lead = None,
        encoding: CanonicalEncoding | None = None,
        prefill_bytes: int = 0,
    ):
        """Starts no thread before there is something to form.

        Args:
          rank: of the patches, as `form_patch` takes it. A rank of 0 forms none, and None none until
            `form_patches` sets one; until then only prefills behind nothing are stored, which are canonicals.
          lead: what canonicals are prefilled behind, as `make_chunk` takes it; they are stored with its digest. The
            window's lead is another matter: patches are stamped with everything in front, pinned pieces included.
          encoding: chooses what canonicals are kept in; patches are formed on them as they are decoded. A prefill at
            the front of a window is stored as it is, so that it serves there bit for bit. None: nothing is encoded.
          prefill_bytes: how many bytes of prefills behind other pieces are stored as they are (`StoredPrefills`), the
            first ones; 0 stores none. Means over them are, too, once `form_means` was called.

        Raises:
          InputError: an invalid lead.
        """
        # The lead runs in front of every canonical, so its tokens are made once.
        self.backbone, self.store, self.rank = backbone, store, rank
        self.encoding = CanonicalEncoding() if encoding is None else encoding
        self._lead_tokens = None if lead is None else lead_tokens(backbone, lead)
        self.lead = None if self._lead_tokens is None else lead_digest(backbone.fingerprint, self._lead_tokens)
        self.errors: collections.deque[Exception] = collections.deque(maxlen=KEPT_ERRORS)

        # Prefills are named by the dtype of the pool that they read, which `watch` brings.
        self._prefill_bytes = prefill_bytes if StoredPrefills.supports(store) else 0
        self._prefills: StoredPrefills | None = None
        self._means, self._first_sight = False, True
        self._sighted: set[str] = set()

        # Counters are written on both threads, what was formed only on the former's.
        self._queue = JobQueue(self._run, PENDING, "former")
        self._waiting_bytes = 0
        self._formed: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def done(self) -> FormerStats:
        """What was done so far."""
        with self._lock:
            return FormerStats(**self._counts)

    # ------------------------------------------------------------------------------------------ the caller's thread

    def form_patches(self, rank: Rank) -> None:
        """Forms patches of this rank from now on, unless one was set before: of chunks that come a second time."""
        if self.rank is None:
            self.rank, self._first_sight = rank, False

    def form_means(self) -> None:
        """Stores means over prefills that share the nearest piece from now on, beside the prefills themselves."""
        self._means = True

    def keep_encoder(self, content: str, output: AnyArray) -> None:
        """Queues a tower's output to be stored. Returns at once and raises nothing."""
        # A session may still embed images while what it shares is closed.
        if not self._queue.closed:
            self._enqueue(EncoderOutput(content, output))

    def watch(self, executor: PagedExecutor) -> None:
        """Forms patches of an executor's prefills from now on.

        Raises:
          InputError: an executor of another backbone, or whose canonicals are made behind another lead.
        """
        if executor.backbone.fingerprint != self.backbone.fingerprint:
            raise InputError(
                f"former.executor: got one of backbone {executor.backbone.fingerprint[:16]!r}; expected "
                f"{self.backbone.fingerprint[:16]!r}, the former's"
            )
        if executor.lead != self.lead:
            raise InputError(f"former.executor: got one of lead {executor.lead}; expected {self.lead}, the former's")

        dtype = getattr(executor, "dtype", None)
        if self._prefill_bytes and dtype is not None:
            self._prefills = StoredPrefills(self.store, self.backbone.fingerprint, dtype)
        executor.formers.append(self)

    def __call__(self, window: Window, id: str, tokens: Tokens, length: int, kv: Mapping[str, Array]) -> None:
        """Queues a prefill. Returns at once and raises nothing."""
        index = window.places.get(id)
        if self._queue.closed or index is None:
            return
        try:
            piece = window.pieces[index]
            # The front must be the one that the forward saw, or the stamp would be wrong.
            seen = piece.state.kind == "conditioned" and piece.state.behind == piece.front
            needed = self.rank or not index or self._prefills is not None
            if piece.entry.kind != "chunk" or not seen or not needed or len(tokens.embeddings) != 1:
                self._count("skipped")
            else:
                likeness = likeness_keys(window.pieces, index, window.lead)
                antecedent = window.antecedent(id)
                self._enqueue(PrefillRecord(piece.entry, antecedent, tokens, length, dict(kv), piece.front, likeness))
        except Exception as error:
            self._report(error)

    def warm_up(self, tokens: Sequence[int | Tokens]) -> None:
        """Compiles what forming patches of such prefills will need; nothing is stored.

        Args:
          tokens: of chunks, lengths or sample tokens; one of each bucket is enough.

        Raises:
          What the backbone raises.
        """
        for sample in samples(self.backbone, getattr(self.backbone, "buckets", None), tokens):
            # Digesting the patch compiles, too: the store names it by its digest.
            length = sample.embeddings.shape[1]
            kv = self._prefill_alone(sample, length)
            span = int(np.asarray(sample.positions).max()) + 1
            chunk = self._chunk_of(kv, sample, length, Entry("warm-up", None, length, span), self.lead)
            rows = {name: value[:, 0] for name, value in kv.items()}
            if self.rank:
                patch_digest(form_patch(chunk, rows, self.rank, ("before",)))

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

    def _enqueue(self, job: PrefillRecord | EncoderOutput) -> None:
        with self._lock:
            fits = self._waiting_bytes + job.nbytes <= PENDING_BYTES
            self._waiting_bytes += job.nbytes if fits else 0
        if not fits or not self._queue.add(job):
            with self._lock:
                self._waiting_bytes -= job.nbytes if fits else 0
            self._count("dropped")

    def _count(self, word: str) -> None:
        # Both threads count.
        with self._lock:
            self._counts[word] += 1

    def _report(self, error: Exception) -> None:
        self._count("failed")
        self.errors.append(error)

    # ------------------------------------------------------------------------------------------ the former's thread

    def _run(self, job: PrefillRecord | EncoderOutput) -> None:
        """Runs a job; whatever goes wrong is reported, because no caller waits for it."""
        with self._lock:
            self._waiting_bytes -= job.nbytes
        try:
            if isinstance(job, EncoderOutput):
                # `PatchStore` does not ask for this method; sessions queue outputs only for stores that have it.
                store: Any = self.store
                store.put_encoder(job.content, self.backbone.fingerprint, np.asarray(job.output))
                self._count("encoders")
            else:
                self._form(job)
        except Exception as error:
            self._report(error)

    def _form(self, job: PrefillRecord) -> None:
        """Stores the patch of a prefill and its canonical, unless they are stored."""
        # Without stored prefills, which tell a later process of the first time, patches are all that it will have.
        seen_before = self._first_sight or self._prefills is None or self._was_sighted(job)
        if job.antecedent.members and self._prefills is not None:
            self._keep_prefill(job, self._prefills)
            if not self.rank:
                return
        # Most of what an agent sees it never sees again; a patch takes a forward of the chunk alone.
        if job.antecedent.members and not seen_before:
            self._count("skipped")
            return

        # A loop may prefill the same chunk behind the same front many times.
        key = job.entry.key, job.antecedent.digest
        if key in self._formed or self._is_stored(job):
            self._formed.add(key)
            self._count("skipped")
            return

        # Behind nothing the prefill is the canonical, and there is no deficit to form a patch of.
        chunk = self._canonical(job)
        if job.antecedent.members:
            kv = {}
            for name, value in job.kv.items():
                kv[name] = value[:, 0] if name in PARTS else zero_padded(value[:, 0], 1, chunk.tokens)
            assert self.rank is not None
            self.store.put_patches([form_patch(chunk, kv, self.rank, job.antecedent)])
            self._count("patches")

        self._formed.add(key)

    def _keep_prefill(self, job: PrefillRecord, prefills: StoredPrefills) -> None:
        """Stores a prefill as it is, while there are bytes left for it."""
        if job.nbytes > self._prefill_bytes or prefills.contains(job.entry.id, job.front):
            return
        chunk = self._chunk_of(job.kv, job.tokens, job.length, job.entry, prefills.lead(job.front))
        stored = prefills.put(chunk, job.front, job.likeness, mean=self._means)
        self._prefill_bytes -= job.nbytes * stored
        self._count("prefills")

    def _was_sighted(self, job: PrefillRecord) -> bool:
        """Returns whether a chunk came before, in this process or in one that stored it."""
        key, before = job.entry.key, job.entry.key in self._sighted
        self._sighted.add(key)
        return before or (self._prefills is not None and self._prefills.is_listed(job.entry.id))

    def _is_stored(self, job: PrefillRecord) -> bool:
        """Returns whether the store has a patch behind this very antecedent, of no smaller rank in any channel."""
        if not job.antecedent.members:
            return False

        # Of each channel, at most as many directions as it has can be asked for.
        wanted, ranks = {}, rank_by_channel(self.backbone.layout, self.rank or 0, "former")
        for channel in self.backbone.layout.channels:
            rank = ranks[channel.name]
            wanted[channel.name] = min(rank, job.length if channel.rows is None else channel.rows, channel.features)

        entry, backbone = job.entry, self.backbone
        query = asked_behind(job.antecedent, entry.id, entry.content, backbone.layout, backbone.fingerprint, self.lead)
        found = list[Patch]()
        for word in self.encoding.words:
            found += stored_patches(self.store, dataclasses.replace(query, encoding=word))
        for patch in found:
            metadata = patch.metadata
            same = metadata.behind == job.antecedent and metadata.base == "canonical" and not metadata.orbit
            # A rank of None is that of a dense patch, which has every direction.
            if same and all(rank is None or rank >= wanted[name] for name, rank in patch.ranks.items()):
                return True

        return False

    def _canonical(self, job: PrefillRecord) -> Chunk:
        """Returns the chunk's canonical, of at least as many tokens as the padded prefill; stores it if it is new.

        It is encoded as it is kept, but for that of a prefill at the front of a window.

        Raises:
          PatchMismatchError: the store has another content under this id. What a forward or the store raises.
        """
        entry, size = job.entry, job.kv[self.backbone.layout.names[0]].shape[2]
        encoding = self.encoding if job.antecedent.members else CanonicalEncoding()
        for word in encoding.words:
            found = stored(self.store, entry.id, self.backbone.fingerprint, self.lead, word)
            if found is None:
                continue
            if contents_differ(entry.content, found.content) or found.length != job.length:
                raise PatchMismatchError(
                    f"former: got {brief(entry.id)!r} from the store with content {found.content!r} and {found.length} "
                    f"tokens; expected {entry.content!r} and {job.length}"
                )
            # It may have been stored as it was prefilled, by a session without an encoding or at a window's front.
            fixed = encoding.choice not in (None, AUTO) and found.encoding is None
            return padded_chunk(self._kept(found, encoding) if fixed else found, size)

        # A prefill at the front of a window is a canonical already, unless canonicals have a lead.
        kv = job.kv
        if job.antecedent.members or self._lead_tokens is not None:
            kv = self._prefill_alone(job.tokens, job.length)
            self._count("forwards")

        return self._kept(self._chunk_of(kv, job.tokens, job.length, entry, self.lead), encoding)

    def _kept(self, chunk: Chunk, encoding: CanonicalEncoding) -> Chunk:
        """Stores a canonical in its encoding, and returns it so."""
        chunk = encoding.encoded(chunk)
        self.store.put(chunk)
        self._count("canonicals")
        if chunk.encoding is not None:
            self._count("encoded")
        with self._lock:
            self._counts["canonical_bytes"] += chunk.nbytes
        return chunk

    def _prefill_alone(self, tokens: Tokens, length: int) -> Mapping[str, Array]:
        """Returns KV of a chunk alone, or behind the lead, {channel: [L,1,T',K,H]}."""
        # Tokens keep their padding, so that chunks of one bucket share a program. A transition would go through it.
        if self._lead_tokens is not None:
            transitions = bool(self.backbone.layout.parts)
            unit = tokens.take(0, length) if transitions else tokens
            return conditioned(self.backbone, [unit], lead=self._lead_tokens)[0]
        options: Any = {"lengths": np.array([length], np.int32)} if self.backbone.layout.parts else {}
        return self.backbone.prefill(tokens, logits=np.array([[length - 1]], np.int32), **options).kv

    def _chunk_of(self, kv: Mapping[str, Array], tokens: Tokens, length: int, entry: Entry, lead: str | None) -> Chunk:
        size = kv[self.backbone.layout.names[0]].shape[2]
        positions = np.asarray(tokens.positions)[0, :size]
        return Chunk(
            kv={name: value[:, 0] for name, value in kv.items()},
            local=np.asarray(zero_padded(positions, 0, size), np.float32),
            span=entry.span,
            length=length,
            id=entry.id,
            layout=self.backbone.layout,
            backbone=self.backbone.fingerprint,
            content=entry.content,
            lead=lead,
        )
