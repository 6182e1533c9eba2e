"""A certificate that starts from nothing: losses audited while a session serves, and bounds that hold at a level.

`Certificate` is measured beforehand, on windows that somebody chose. `OnlineCertificate` is measured on the traffic
itself: a sampled share of the answers is compared with what the window promises, each comparison is one *audit*, and a
way of serving is admitted once the audits prove its bound.

Both decisions are sequential, so a fixed-size test would not do: one looks after every audit. Admission is a bet
against "more than the nominal share of answers lose more than the bound" (a test martingale; Ville's inequality bounds
the probability that it is ever won wrongly). Withdrawal is a Shiryaev-Roberts detector of "by now more than the nominal
share do" (Shin, Ramdas and Rinaldo 2022, e-detectors). Both assume that audited answers are drawn from the same traffic
as served ones. Content that shifts breaks that, which is what the detector is for: until it fires, answers are served
beyond their bound.
"""

import dataclasses
import hashlib
import json
import math
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ..errors import CertificateError
from ..utils import strict_json
from ..window import Promise, Way
from .certificate import Certificate
from .certified_rows import check_float, check_integer, check_text, shortened
from .goal import DEFAULT_KL
from .operating_points import EXACT_POINTS, MEASURED_POINTS

FORMAT = "kvpatch online certificate"
VERSION = 2
LADDER = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Bounds, in nats, that are tried for every way. The smallest one that is admitted is the way's bound."""
STAKE = 0.75
"""Share of the wealth that one miss costs. By the default policy a bound is admitted after 38 audits without one."""
LARGEST_ALARM = 50.0
"""Where the logarithm of the detector stays, far above every threshold."""
MOST_TRIALS = 200
"""Audits after which a way that has no bound is audited no more often than served answers are."""
HOPELESS = 3.0
"""Logarithm of what a bet has lost when it is hurried no more; 38 audits without a miss win it back."""
SHIFTED = 3.0
"""What the detector waits for: so many times the nominal share of answers beyond the bound. A larger number notices a
violent shift a few audits earlier, and overlooks a mild one."""
SUSPICION = math.log(8.0)
"""Alarm from which on more than a share is audited. Without a miss it stays below log(4.5) at the default level."""
MOST_TRIED = 4096
"""Chunks that are known to have been tried: 150 KiB of JSON."""
MOST_SHARDS = 64
"""Writers whose audits are kept apart. Beyond that the one with the fewest audits is dropped."""
MAX_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class AuditPolicy:
    """How strictly an online certificate admits, and how often it audits.

    Attributes:
      level: the share of answers that must stay within a bound.
      confidence: the probability that no bound of a way is admitted wrongly.
      detection: expected number of audits until a bound that still holds is withdrawn by chance.
      share: of the answers, how many are audited once a way is admitted; before that, every answer that can be is.
      cost: upper bound of what audits may compute, as a share of the FLOPs of everything else.

    Raises:
      CertificateError: a number outside (0, 1), or a detection below 1.
    """

    level: float = 0.9
    confidence: float = 0.95
    detection: float = 400.0
    share: float = 0.1
    cost: float = 0.05

    def __post_init__(self) -> None:
        for name in ("level", "confidence", "share", "cost"):
            value = getattr(self, name)
            if not isinstance(value, float) or not 0.0 < value < 1.0:
                raise CertificateError(f"audit policy.{name}: got {value!r:.80}; expected a float between 0 and 1")
        if not isinstance(self.detection, float) or not 1.0 <= self.detection < math.inf:
            raise CertificateError(f"audit policy.detection: got {self.detection!r:.80}; expected a finite float >= 1")


@dataclasses.dataclass
class BoundRecord:
    """Evidence about one bound of one way, from one writer's audits.

    Attributes:
      audits, misses: how many answers were compared, and how many of them lost more than the bound.
      wealth: logarithm of the bet's wealth; it starts from 0.
      alarm: logarithm of one plus the detector, since the way was admitted last; it starts from 0.
    """

    audits: int = 0
    misses: int = 0
    wealth: float = 0.0
    alarm: float = 0.0


@dataclasses.dataclass
class Support:
    """What was audited: a bound holds for nothing larger, and for no other modality.

    Attributes:
      tokens, chunks, others: the largest window, in tokens and in chunks besides pinned ones, and the largest number of
        other approximate pieces in one.
      spans: the least and the largest span of a chunk; None before the first.
      modalities: of the chunks.
    """

    tokens: int = 0
    chunks: int = 0
    others: int = 0
    spans: tuple[int, int] | None = None
    modalities: tuple[str, ...] = ()


class OnlineCertificate:
    """Bounds of a backbone's ways of serving, from audits of what was served. Thread-safe.

        certificate = OnlineCertificate(backbone.fingerprint)
        certificate.audit([("near", 0)], kl=0.012, others=0, tokens=412, chunks=[(96, "image")])
        certificate.growing("bound", "near", 0, promise="remember", most=8)   # [] until enough audits prove a bound

    Plans take it in place of a `Certificate`.

    Attributes:
      backbone: fingerprint of the weights, in their dtype.
      policy: how strictly ways are admitted.
      writer: name of this process's audits among those of others (`merge`).
    """

    def __init__(self, backbone: str, policy: AuditPolicy | None = None, writer: str = "local"):
        """Starts from no audits.

        Raises:
          CertificateError: an empty fingerprint or writer.
        """
        check_text(backbone, "online certificate.backbone")
        check_text(writer, "online certificate.writer")
        self.backbone, self.writer = backbone, writer
        self.policy = AuditPolicy() if policy is None else policy
        self._lock = threading.Lock()
        # By writer, then by way and bound. Only this writer's entry changes here.
        self._shards: dict[str, dict[tuple[Way, float], BoundRecord]] = {writer: {}}
        # By writer, FLOPs of its audits and of everything else.
        self._flops: dict[str, tuple[int, int]] = {}
        self._support = Support()
        # Digests of the ways and chunks that audits tried, those of the latest audits last.
        self._tried: dict[str, None] = {}
        self._admitted: set[tuple[Way, float]] = set()

    # -------------------------------------------------------------------------------------------------- audits

    def audit(
        self,
        ways: Sequence[Way],
        kl: float,
        *,
        others: int = 0,
        tokens: int = 1,
        chunks: Sequence[tuple[int | None, str | None]] = (),
        tried: Iterable[str] = (),
    ) -> None:
        """Records one comparison of an answer with what its window promises.

        Args:
          ways: in which the window's approximate pieces are served; each gets the answer's loss.
          kl: KL(promised ‖ served) of the answer, in nats.
          others: approximate pieces of the window beside the first.
          tokens, chunks: of the window, as `beyond` takes them.
          tried: ids of the chunks that were served so; `covers` is true of them from now on.

        Raises:
          CertificateError: no way, an unknown point, or a number out of range.
        """
        own = list(dict.fromkeys(ways))
        if not own:
            raise CertificateError("audit.ways: got none; expected the ways of the approximate pieces")
        for point, rank in own:
            if point not in MEASURED_POINTS:
                raise CertificateError(f"audit.ways: got point {point!r:.40}; expected one of {MEASURED_POINTS}")
            check_integer(rank, "audit.ways.rank", 0)
        check_float(float(kl), "audit.kl", -1.0, math.inf)

        allowed = 1.0 - self.policy.level
        # A miss takes STAKE of the wealth. All of it would end the evidence; little would need many more audits.
        stake = STAKE / self.policy.level
        beyond = min(SHIFTED * allowed, (1.0 + allowed) / 2)
        with self._lock:
            self._extend_support(others, tokens, chunks)
            for id in tried:
                for point, _ in own:
                    self._tried[_tried_key(point, id)] = None
            while len(self._tried) > MOST_TRIED:
                del self._tried[next(iter(self._tried))]
            for way in own:
                for bound in LADDER:
                    record = self._shards[self.writer].setdefault((way, bound), BoundRecord())
                    miss = kl > bound
                    record.audits += 1
                    record.misses += miss
                    record.wealth += math.log1p(stake * (allowed - miss))

                    ratio = beyond / allowed if miss else (1.0 - beyond) / (1.0 - allowed)
                    record.alarm = min(math.log1p(math.exp(record.alarm) * ratio), LARGEST_ALARM)
                self._decide(way)

    def _extend_support(self, others: int, tokens: int, chunks: Sequence[tuple[int | None, str | None]]) -> None:
        support = self._support
        support.tokens, support.chunks = max(support.tokens, tokens), max(support.chunks, len(chunks))
        support.others = max(support.others, others)
        spans = [span for span, _ in chunks if span is not None]
        if spans:
            known = support.spans or (spans[0], spans[0])
            support.spans = min(known[0], *spans), max(known[1], *spans)
        new = {modality for _, modality in chunks if modality is not None}
        support.modalities = tuple(sorted(new.union(support.modalities)))

    def _decide(self, way: Way) -> None:
        """Admits and withdraws bounds of a way after its evidence changed. The caller holds the lock."""
        # Larger bounds are easier to meet. Tested from the largest down until one fails, no correction for their number
        # is needed (a fixed sequence of hypotheses).
        needed = -math.log(1.0 - self.policy.confidence)
        for bound in reversed(LADDER):
            key = way, bound
            records = [shard[key] for shard in self._shards.values() if key in shard]

            if key in self._admitted:
                if max(record.alarm for record in records) >= math.log(self.policy.detection):
                    self._withdraw(way)
                    return
                continue

            # Evidence of independent writers multiplies.
            if sum(record.wealth for record in records) < needed:
                return
            self._admitted.add(key)
            for record in records:
                record.alarm = 0.0

    def _withdraw(self, way: Way) -> None:
        """Forgets a way: all evidence is of another time, whatever bound it is about."""
        for bound in LADDER:
            self._admitted.discard((way, bound))
            for shard in self._shards.values():
                shard.pop((way, bound), None)
        self._tried.clear()

    def count_flops(self, audits: int = 0, work: int = 0) -> None:
        """Adds to what this writer's audits took, and to what it computed besides."""
        with self._lock:
            before = self._flops.get(self.writer, (0, 0))
            self._flops[self.writer] = before[0] + audits, before[1] + work

    def affords(self, flops: int) -> bool:
        """Returns whether all writers' audits stay within the policy's cost with one of so many FLOPs."""
        with self._lock:
            audits = sum(taken for taken, _ in self._flops.values())
            work = sum(done for _, done in self._flops.values())
        return audits + flops <= self.policy.cost * work

    # -------------------------------------------------------------------------------------------------- bounds

    def admitted(self, point: str, rank: int = 0) -> float | None:
        """Returns the bound of a way in nats, at the policy's level; None if no bound is proved, or none holds now."""
        with self._lock:
            bounds = [bound for way, bound in self._admitted if way == (point, rank)]
        return min(bounds, default=None)

    def audits(self, point: str, rank: int = 0) -> int:
        """Returns how many answers were audited of a way since its largest bound was withdrawn last."""
        key = (point, rank), LADDER[-1]
        with self._lock:
            return sum(shard[key].audits for shard in self._shards.values() if key in shard)

    def covers(self, point: str, id: str) -> bool:
        """Returns whether an audit served a chunk so, which was not as promised.

        A session serves no other: what is new is tried first, so that shifted content meets the detector unserved.
        """
        return _tried_key(point, id) in self._tried

    def needs_audits(self, point: str, rank: int = 0, kl: float = DEFAULT_KL) -> bool:
        """Returns whether a way is audited more often than the policy's share says: while audits may soon prove a bound
        within `kl` nats, and while those of late speak against one. Bet and detector allow for that choice.
        """
        way, within = (point, rank), [bound for bound in LADDER if bound <= kl]
        with self._lock:
            proved = [bound for bound in within if (way, bound) in self._admitted]
            for bound in (proved or within)[-1:]:
                records = [shard[way, bound] for shard in self._shards.values() if (way, bound) in shard]
                if proved:
                    return max((record.alarm for record in records), default=0.0) > SUSPICION
                few = sum(record.audits for record in records) < MOST_TRIALS
                return few and sum(record.wealth for record in records) > -HOPELESS
        return False

    @property
    def model(self) -> str:
        """What the bounds were measured on, for messages."""
        return "audited answers"

    @property
    def digest(self) -> str:
        """Digest of what is admitted now: 32 hexadecimal digits."""
        with self._lock:
            admitted = sorted([*way, bound] for way, bound in self._admitted)
        body = json.dumps([self.backbone, admitted])
        return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()

    def beyond(self, tokens: int, chunks: Sequence[tuple[int | None, str | None]]) -> str | None:
        """Returns how a window exceeds everything that was audited; None if it does not. See `Certificate.beyond`."""
        support = self._support
        if tokens > support.tokens:
            return f"window of {tokens} tokens; audited up to {support.tokens}"
        if len(chunks) > support.chunks:
            return f"window of {len(chunks)} chunks; audited up to {support.chunks}"

        least, largest = support.spans or (1, 0)
        for span, modality in chunks:
            if span is not None and not least <= span <= largest:
                return f"chunk that spans {span} positions; audited from {least} to {largest}"
            if modality not in support.modalities:
                audited = " and ".join(support.modalities) or "nothing"
                return f"chunk of {modality or 'a modality that nobody said'}; audited of {audited}"
        return None

    def bound(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the KL, in nats, of an answer behind a window with a chunk that is served so. See `Certificate`."""
        bounds = self.growing("bound", point, rank, promise=promise, most=behind)
        return bounds[behind] if behind < len(bounds) else None

    def growing(
        self, what: Literal["bound", "flips"], point: str, rank: int, *, promise: Promise, most: int
    ) -> list[float]:
        """Returns the bounds of a chunk among 0, 1, … other approximate ones, as far as audited. Flips have none."""
        if point in EXACT_POINTS or (point == "survivor" and promise == "remember"):
            return [0.0] * (most + 1)
        bound = self.admitted(point, rank)
        if bound is None or what == "flips":
            return []
        return [bound] * (min(most, self._support.others) + 1)

    # -------------------------------------------------------------------------------------------------- several writers

    def merge(self, text: str | bytes) -> None:
        """Adds what other writers audited, from the JSON of their certificates. This writer's own audits stay.

        Raises:
          CertificateError: another backbone, policy or format, damage, or numbers out of range. Nothing is added.
        """
        shards, flops, tried, support = _read(text, self.backbone, self.policy)
        with self._lock:
            for writer, shard in shards.items():
                # A writer's later state replaces its earlier one: audits are counted once.
                if writer != self.writer and _audits(shard) >= _audits(self._shards.get(writer, {})):
                    self._shards[writer] = shard
                    self._flops[writer] = flops.get(writer, (0, 0))
            self._drop_smallest_shards()

            chunks: list[tuple[int | None, str | None]] = [(None, modality) for modality in support.modalities]
            chunks += [(span, None) for span in support.spans or ()]
            most = max(support.chunks, self._support.chunks)
            self._extend_support(support.others, support.tokens, chunks)
            self._support.chunks = most
            self._tried = dict.fromkeys([*tried, *self._tried][-MOST_TRIED:])
            for way in {way for shard in self._shards.values() for way, _ in shard}:
                self._decide(way)

    def to_json(self) -> str:
        """Returns all audits, of this writer and of those that were merged, as JSON."""
        with self._lock:
            shards = {
                writer: [[*way, bound, *dataclasses.astuple(record)] for (way, bound), record in shard.items()]
                for writer, shard in self._shards.items()
            }
            body = {
                "format": FORMAT,
                "version": VERSION,
                "backbone": self.backbone,
                "policy": dataclasses.asdict(self.policy),
                "support": dataclasses.asdict(self._support),
                "shards": shards,
                "flops": {writer: list(flops) for writer, flops in self._flops.items()},
                "tried": list(self._tried),
            }
        return json.dumps(body, separators=(",", ":"), allow_nan=False)

    def _drop_smallest_shards(self) -> None:
        others = sorted(
            (writer for writer in self._shards if writer != self.writer), key=lambda own: _audits(self._shards[own])
        )
        for writer in others[: max(len(self._shards) - MOST_SHARDS, 0)]:
            del self._shards[writer]
            self._flops.pop(writer, None)

    def __repr__(self) -> str:
        with self._lock:
            audits = sum(_audits(shard) for shard in self._shards.values())
            ways = sorted({f"{point} {rank}".removesuffix(" 0") for (point, rank), _ in self._admitted})
        return f"OnlineCertificate({audits} audits, admitted: {', '.join(ways) or 'none'})"


AnyCertificate = Certificate | OnlineCertificate
"""What plans take bounds from."""
Shard = dict[tuple[Way, float], BoundRecord]


def _tried_key(point: str, id: str) -> str:
    return hashlib.blake2b(f"{point} {id}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _audits(shard: Shard) -> int:
    """Counts a writer's audits: every bound of a way sees all of the way's."""
    return sum(record.audits for (_, bound), record in shard.items() if bound == LADDER[-1])


def _read(
    text: Any, backbone: str, policy: AuditPolicy
) -> tuple[dict[str, Shard], dict[str, tuple[int, int]], list[str], Support]:
    """Reads JSON as if a stranger wrote it."""
    what = "online certificate"
    if not isinstance(text, str | bytes) or len(text) > MAX_BYTES:
        raise CertificateError(f"{what}: got {shortened(text)}; expected JSON of at most {MAX_BYTES} bytes")
    try:
        body = strict_json.loads(text)
    except ValueError as error:
        raise CertificateError(f"{what}: got {error!s:.120}; expected JSON of OnlineCertificate.to_json") from None

    names = ("format", "version", "backbone", "policy", "support", "shards", "flops", "tried")
    if not isinstance(body, dict) or tuple(body) != names or body["format"] != FORMAT:
        raise CertificateError(f"{what}: got {shortened(body)}; expected an object of {', '.join(names)}")
    for name, expected in (("version", VERSION), ("backbone", backbone), ("policy", dataclasses.asdict(policy))):
        if body[name] != expected:
            raise CertificateError(f"{what}.{name}: got {body[name]!r:.80}; expected {expected!r:.80}")

    support = body["support"]
    fields = [field.name for field in dataclasses.fields(Support)]
    if not isinstance(support, dict) or list(support) != fields:
        raise CertificateError(f"{what}.support: got {shortened(support)}; expected an object of {', '.join(fields)}")
    for name in ("tokens", "chunks", "others"):
        check_integer(support[name], f"{what}.support.{name}", 0)
    spans, modalities = support["spans"], support["modalities"]
    if spans is not None and (not isinstance(spans, list) or len(spans) != 2):
        raise CertificateError(f"{what}.support.spans: got {shortened(spans)}; expected two numbers, or null")
    for span in spans or ():
        check_integer(span, f"{what}.support.spans", 1)
    if not isinstance(modalities, list) or len(modalities) > 16:
        raise CertificateError(f"{what}.support.modalities: got {shortened(modalities)}; expected a list of words")
    for modality in modalities:
        check_text(modality, f"{what}.support.modalities")

    shards = body["shards"]
    if not isinstance(shards, dict) or len(shards) > 2 * MOST_SHARDS:
        raise CertificateError(f"{what}.shards: got {shortened(shards)}; expected an object of writers")
    read = {writer: _shard_of(rows, f"{what}.shards") for writer, rows in shards.items()}

    flops = body["flops"]
    if not isinstance(flops, dict) or len(flops) > 2 * MOST_SHARDS:
        raise CertificateError(f"{what}.flops: got {shortened(flops)}; expected an object of writers")
    counts = {}
    for writer, pair in flops.items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise CertificateError(f"{what}.flops: got {shortened(pair)}; expected two numbers")
        for count in pair:
            check_integer(count, f"{what}.flops", 0)
        counts[writer] = pair[0], pair[1]

    tried = body["tried"]
    if not isinstance(tried, list) or len(tried) > MOST_TRIED:
        raise CertificateError(f"{what}.tried: got {shortened(tried)}; expected at most {MOST_TRIED} digests")
    for digest in tried:
        check_text(digest, f"{what}.tried")
    return read, counts, tried, Support(**{**support, "spans": spans and tuple(spans), "modalities": tuple(modalities)})


def _shard_of(rows: Any, what: str) -> Shard:
    """Reads one writer's rows: point, rank, bound, audits, misses, wealth, alarm."""
    shard: Shard = {}
    if not isinstance(rows, list) or len(rows) > 4096:
        raise CertificateError(f"{what}: got {shortened(rows)}; expected a list of rows")
    for row in rows:
        if not isinstance(row, list) or len(row) != 7:
            raise CertificateError(f"{what}: got {shortened(row)}; expected 7 values")
        point, rank, bound, audits, misses, wealth, alarm = row
        if point not in MEASURED_POINTS or bound not in LADDER:
            raise CertificateError(f"{what}: got point {point!r:.40}, bound {bound!r:.40}; expected measured ones")

        check_integer(rank, f"{what}.rank", 0)
        check_integer(audits, f"{what}.audits", 0)
        check_integer(misses, f"{what}.misses", 0)
        # No more can be won than by as many audits without a miss.
        check_float(wealth, f"{what}.wealth", -1e9, float(audits))
        check_float(alarm, f"{what}.alarm", 0.0, LARGEST_ALARM)
        shard[(point, rank), bound] = BoundRecord(audits, misses, wealth, alarm)
    return shard
