"""`Certificate`: what each way of reuse loses on one backbone, as measured, and bounds that held on other items.

`python -m evals.certify` measures and writes it; a plan reads it, and takes no approximate way that it does not vouch
for. It is signed by a digest, which shows damage and says nothing of who wrote it.
"""

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..backbone import Backbone
from ..errors import CertificateError
from ..utils.atomic_files import path_of
from . import certificate_file

Promise = Literal["remember", "forget"]

EXACT_POINTS = ("leading", "prefill", "encoded")
"""Ways that compute what a re-prefill computes: rounding apart they lose nothing, and need no certificate."""
MEASURED_POINTS = ("survivor", "orbit", "stored", "update", "fresh", "bare", "repair")
MOST_ROWS = 4096
MOST_LETTERS = 2000
MOST_MODALITIES = 16


@dataclasses.dataclass(frozen=True)
class CertifiedLoss:
    """What was measured of one way of reuse. An answer is one question, or one continuation, behind one window.

    Attributes:
      point: the operating point.
      rank: of the patches; of a token repair the tokens that are computed again, in percent; 0 where there is neither.
      behind: how many other chunks of the window were served so too: 0 is one chunk among exact ones.
      promise: what it is held against: "forget", a re-prefill of the window; "remember", the window with survivors as
        they are kept and everything else as a prefill behind them has it.
      kl, kl_low, kl_high: mean KL(promised ‖ served) of an answer, in nats, with its 95 % interval, over all items.
      kl_bound: upper quantile of the KL of an answer over the calibration items, in nats, at the certificate's level.
      coverage, coverage_low, coverage_high: share of the held-out answers whose KL lies within the bound, with its
        95 % interval.
      eta: 1 − Σ KL(served) / Σ KL(bare), over all items; None where it is undefined.
      flips, flips_high: share of next tokens that another token was likeliest for, with the upper end of its 95 %
        interval.
      answers: how many were scored, held-out ones included.

    Raises:
      CertificateError: another point or promise, a number out of range or not finite, an int for a float.
    """

    point: str
    rank: int
    behind: int
    promise: Promise
    kl: float
    kl_low: float
    kl_high: float
    kl_bound: float
    coverage: float
    coverage_low: float
    coverage_high: float
    eta: float | None
    flips: float
    flips_high: float
    answers: int

    def __post_init__(self) -> None:
        what = f"certified {self.point!r:.40}"
        if self.point not in (*EXACT_POINTS, *MEASURED_POINTS) or self.promise not in ("remember", "forget"):
            raise CertificateError(
                f"{what}: promise {self.promise!r:.40}; expected one of {', '.join(MEASURED_POINTS)}, and 'remember' "
                "or 'forget'"
            )
        for word in ("rank", "behind", "answers"):
            _whole(getattr(self, word), f"{what}: {word}", 1 if word == "answers" else 0)
        for word in ("kl", "kl_low", "kl_high"):
            _number(getattr(self, word), f"{what}: {word}", -1.0, math.inf)  # KL of equal logits may round below 0
        _number(self.kl_bound, f"{what}: kl_bound", 0.0, math.inf)
        for word in ("coverage", "coverage_low", "coverage_high", "flips", "flips_high"):
            _number(getattr(self, word), f"{what}: {word}", 0.0, 1.0)
        if self.eta is not None:
            _number(self.eta, f"{what}: eta", -math.inf, math.inf)
        _in_order(what, self.kl_low, self.kl, self.kl_high)
        _in_order(what, self.coverage_low, self.coverage, self.coverage_high)
        _in_order(what, self.flips, self.flips_high)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Point, rank, behind, promise: of which a certificate has one row."""
        return self.point, self.rank, self.behind, self.promise


@dataclasses.dataclass(frozen=True)
class CertifiedPlan:
    """How plans under a bound did on held-out windows, whose chunks were served in different ways at once.

    Attributes:
      name: what was planned.
      kl: the bound that the plans were given, in nats.
      windows, answers: how many were served and scored.
      approximate: share of the chunks that were served approximately.
      coverage, coverage_low, coverage_high: share of the answers whose KL lies within it, with its 95 % interval.

    Raises:
      CertificateError: a number out of range or not finite, an int for a float.
    """

    name: str
    kl: float
    windows: int
    answers: int
    approximate: float
    coverage: float
    coverage_low: float
    coverage_high: float

    def __post_init__(self) -> None:
        _text(self.name, "certified plan: name")
        what = f"certified plan {self.name:.40}"
        for word in ("windows", "answers"):
            _whole(getattr(self, word), f"{what}: {word}", 1)
        _number(self.kl, f"{what}: kl", 0.0, math.inf)
        for word in ("approximate", "coverage", "coverage_low", "coverage_high"):
            _number(getattr(self, word), f"{what}: {word}", 0.0, 1.0)
        _in_order(what, self.coverage_low, self.coverage, self.coverage_high)


class RankChoice(NamedTuple):
    """A rank, and why it."""

    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was measured on one backbone, and bounds to plan with.

        certificate = Certificate.read("certificate.json", backbone=backbone)
        certificate.bound("stored", rank=16)           # nats, of an answer behind a window with one such chunk
        certificate.bound("stored", rank=16, behind=3)    # three other chunks of the window are approximate too

    Attributes:
      backbone: fingerprint of the weights, in their dtype. model: the name that it was measured under.
      made: the day, year-month-day.
      level: of the bounds: the share of answers behind new windows of this kind whose KL stays within them.
      calibration, held_out: windows that the bounds were taken from, and other windows that they were tried on.
      chunks, tokens: chunks of a window beside what is pinned; tokens of the largest window, all told.
      content: what the windows showed. asked: what was asked behind them.
      disjoint: whether no two windows shared a chunk. Where some did, the level is nominal.
      rows: one for each way of reuse.
      plans: how plans did on held-out windows.
      recommended: a rank, and why it.
      spans: the least and the largest span of a chunk beside what is pinned; None in older files, which bound it by
        `tokens` alone.
      modalities: of those chunks ("image", "text"); None in older files, whose `content` says it.

    Raises:
      CertificateError: two rows of one kind, no rows, numbers out of range.
    """

    backbone: str
    model: str
    made: str
    level: float
    calibration: int
    held_out: int
    chunks: int
    tokens: int
    content: str
    asked: str
    disjoint: bool
    rows: tuple[CertifiedLoss, ...]
    recommended: RankChoice
    plans: tuple[CertifiedPlan, ...] = ()
    spans: tuple[int, int] | None = None
    modalities: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for word in ("backbone", "model", "made", "content", "asked"):
            _text(getattr(self, word), f"certificate: {word}")
        for word in ("calibration", "held_out", "chunks", "tokens"):
            _whole(getattr(self, word), f"certificate: {word}", 1)
        _number(self.level, "certificate: level", 0.0, 1.0)
        if not isinstance(self.disjoint, bool):
            raise CertificateError(f"certificate: disjoint {self.disjoint!r:.40}; expected True or False")
        _rows(self.rows, CertifiedLoss, 1)
        _rows(self.plans, CertifiedPlan, 0)
        keys = [row.key for row in self.rows]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise CertificateError(f"certificate: two rows of {twice}; expected one")
        if not isinstance(self.recommended, RankChoice):
            raise CertificateError(f"certificate: recommended {self.recommended!r:.40}; expected a Rank")
        for word in certificate_file.NEWER:
            value = getattr(self, word)
            if value is not None and (not isinstance(value, tuple) or not 1 <= len(value) <= MOST_MODALITIES):
                raise CertificateError(f"certificate: {word} {_short(value)}; expected a tuple, or None")
        for span in self.spans or ():
            _whole(span, "certificate: span", 1)
        if self.spans is not None and (len(self.spans) != 2 or self.spans[0] > self.spans[1]):
            raise CertificateError(f"certificate: spans {self.spans!r:.80}; expected the least and the largest")
        for modality in self.modalities or ():
            _text(modality, "certificate: modality")
        _whole(self.recommended.rank, "certificate: recommended rank", 1)
        _text(self.recommended.reason, "certificate: reason")

    # ------------------------------------------------------------------------------------------------ bounds

    def beyond(self, tokens: int, chunks: Sequence[tuple[int | None, str | None]]) -> str | None:
        """Says in what a window is beyond those that were measured: then no bound holds for it, and nobody may ask one.

        Whoever serves by a certificate asks this first: plans (and so sessions), and the engine's connector.

        Args:
          tokens: of the window, all told, without what is asked behind it.
          chunks: of each chunk beside what is pinned its span (None where only its tokens are known) and its modality
            (None where nobody said, which was not measured).

        Returns:
          A clause for people; None where the window is like those that were measured.
        """
        if tokens > self.tokens:
            return f"window of {tokens} tokens; certified up to {self.tokens}"
        if len(chunks) > self.chunks:
            return f"window of {len(chunks)} chunks; certified up to {self.chunks}"
        least, largest = self.spans or (1, self.tokens)
        modalities = self.modalities
        if modalities is None:
            modalities = tuple(word for word in ("image", "text") if word in self.content)
        for span, modality in chunks:
            if span is not None and not least <= span <= largest:
                return f"chunk that spans {span} positions; certified from {least} to {largest}"
            if modality not in modalities:
                measured = " and ".join(modalities) or "what it does not say"
                return f"chunk of {modality or 'a modality that nobody said'}; certified of {measured}"
        return None

    def bound(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the KL of an answer behind a window with a chunk that is served so, in nats.

        Between ranks, or numbers of other chunks, that were measured the larger of both neighbours' bounds counts. A
        rank above all takes the largest one's.

        Args:
          point: the operating point; those that are exact are 0.
          rank: of the patch, as a certified row has it.
          behind: how many other chunks of the window are approximate too, wherever they stand. Those that were
            prefilled behind an approximate one count.
          promise: what the window promises. Without survivors in it, both are the same: then ask for "forget".

        Returns:
          None where nothing is certified: a point that was not measured, a rank below all, more chunks than measured.

        Raises:
          CertificateError: no such point or promise, or a negative number.
        """
        return self._worst("kl_bound", point, rank, behind, promise)

    def flips(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the share of next tokens that become another: the upper end of its 95 % interval. As `bound`."""
        return self._worst("flips_high", point, rank, behind, promise)

    def growing(
        self, what: Literal["bound", "flips"], point: str, rank: int, *, promise: Promise, most: int
    ) -> list[float]:
        """Lists what bounds a chunk among 0, 1, … up to `most` others, as far as that is certified.

        More others never count as better: each number is the largest of `bound` (or `flips`) up to there.

        Raises:
          CertificateError: as `bound`.
        """
        ask = self.bound if what == "bound" else self.flips
        first = ask(point, rank, promise=promise)
        if first is None:
            return []
        if point in EXACT_POINTS or (point == "survivor" and promise == "remember"):
            return [0.0] * (most + 1)
        found = [first]
        for others in self._grids[point, promise][1]:
            # All numbers of others between two that were measured are bounded alike.
            for upto, asked in ((others - 1, others - 1), (others, others)):
                if (more := min(upto, most) + 1 - len(found)) > 0:
                    number = ask(point, rank, behind=asked, promise=promise)
                    if number is None:
                        return found
                    found += [max(number, found[-1])] * more
        return found

    def together(self, served: Iterable[tuple[str, int]], promise: Promise = "forget") -> float | None:
        """Bounds the KL of an answer behind a window whose chunks are served in different ways, in nats.

        It is the bound of a window all of whose approximate chunks were served in the worst of these ways.

        Args:
          served: point and rank of every chunk, from the front. From the first approximate one on all count.

        Returns:
          As `bound`; 0 where all are exact.
        """
        ways = list(served)
        known = [self.bound(point, rank, promise=promise) for point, rank in ways]
        approximate = [way for way, alone in zip(ways, known, strict=True) if alone != 0.0]
        if not approximate:
            return 0.0
        first = next(place for place, alone in enumerate(known) if alone != 0.0)
        others = len(ways) - first - 1
        bounds = [self.bound(point, rank, behind=others, promise=promise) for point, rank in dict.fromkeys(approximate)]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    def row(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> CertifiedLoss | None:
        """The row of exactly this, or None."""
        return self._table.get((point, rank, behind, promise))

    @property
    def recommended_rank(self) -> int:
        """The rank that `recommended` gives a reason for."""
        return self.recommended.rank

    @functools.cached_property
    def _table(self) -> dict[tuple[str, int, int, str], CertifiedLoss]:
        return {row.key: row for row in self.rows}

    @functools.cached_property
    def _grids(self) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
        """Of every point and promise the ranks, and the numbers of other chunks, that were measured."""
        grids: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
        for row in self.rows:
            ranks, behinds = grids.setdefault((row.point, row.promise), (set(), set()))
            ranks.add(row.rank)
            behinds.add(row.behind)
        return {kind: (sorted(ranks), sorted(behinds)) for kind, (ranks, behinds) in grids.items()}

    def _worst(self, word: str, point: str, rank: int, behind: int, promise: str) -> float | None:
        """The largest of a number over the neighbouring rows, None where one of them is missing."""
        if point not in (*EXACT_POINTS, *MEASURED_POINTS) or promise not in ("remember", "forget"):
            raise CertificateError(f"certificate: point {point!r:.40}, promise {promise!r:.40}; expected known ones")
        _whole(rank, "certificate: rank", 0)
        _whole(behind, "certificate: behind", 0)
        if point in EXACT_POINTS or (point == "survivor" and promise == "remember"):
            return 0.0
        ranks, behinds = self._grids.get((point, promise), ([], []))
        if not ranks or rank < ranks[0] or behind > behinds[-1]:
            return None
        rows = [
            self._table.get((point, own, others, promise))
            for own in _neighbours(ranks, rank)
            for others in _neighbours(behinds, behind)
        ]
        numbers = [getattr(row, word) for row in rows if row is not None]
        return max(numbers) if len(numbers) == len(rows) else None

    # -------------------------------------------------------------------------------------------------- files

    @functools.cached_property
    def digest(self) -> str:
        """Digests all that it says: 32 hexadecimal digits."""
        return certificate_file.digest_of(certificate_file.body_of(self))

    def to_json(self) -> str:
        """Writes the certificate as JSON, a row a line, with its digest."""
        return certificate_file.text_of(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, backbone: str | Backbone | None) -> "Certificate":
        """Reads what `to_json` wrote.

        Args:
          backbone: the one that it is to vouch for, or its fingerprint; None reads it to be looked at.

        Raises:
          CertificateError: no such JSON, damage, another version, or a certificate of other weights.
        """
        body = certificate_file.parsed(text)
        for word in certificate_file.NEWER:  # which older files do not say
            value = body.setdefault(word, None)
            body[word] = tuple(value) if isinstance(value, list) else value
        certificate_file.check_names(body, [field.name for field in dataclasses.fields(cls)], "certificate")
        rows = tuple(certificate_file.built(CertifiedLoss, values) for values in body.pop("rows"))
        plans = tuple(certificate_file.built(CertifiedPlan, values) for values in body.pop("plans"))
        recommended = certificate_file.built(RankChoice, body.pop("recommended"))
        found = cls(rows=rows, plans=plans, recommended=recommended, **body)
        wanted = backbone if backbone is None or isinstance(backbone, str) else backbone.fingerprint
        if wanted is not None and found.backbone != wanted:
            raise CertificateError(
                f"certificate of {found.model!r:.80}, backbone {found.backbone[:16]!r}; expected backbone "
                f"{wanted[:16]!r}: other weights, or the same in another dtype"
            )
        return found

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes a file, whole or not at all.

        Raises:
          CertificateError: a folder that is not there, or cannot be written.
        """
        return certificate_file.write(path_of(path, "certificate", CertificateError), self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, backbone: str | Backbone | None) -> "Certificate":
        """Reads a file that `write` wrote. Arguments and errors as `from_json`; also a file that is not there."""
        return cls.from_json(certificate_file.read(path_of(path, "certificate", CertificateError)), backbone=backbone)

    def __repr__(self) -> str:
        return (
            f"Certificate({self.model!r}, {len(self.rows)} rows, {self.calibration} + {self.held_out} windows, level "
            f"{self.level:g}, rank {self.recommended_rank})"
        )


def _neighbours(measured: Sequence[int], wanted: int) -> list[int]:
    """What was measured at `wanted`, or on both sides of it."""
    if wanted in measured:
        return [wanted]
    below = [value for value in measured if value < wanted]
    above = [value for value in measured if value > wanted]
    return [*below[-1:], *above[:1]]


def _whole(given: Any, what: str, least: int) -> None:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given < 2**40:
        raise CertificateError(f"{what} {_short(given)}; expected a whole number, {least} or more")


def _number(given: Any, what: str, least: float, most: float) -> None:
    if not isinstance(given, float) or not math.isfinite(given) or not least <= given <= most:
        raise CertificateError(f"{what} {_short(given)}; expected a finite float from {least:g} to {most:g}")


def _in_order(what: str, *numbers: float) -> None:
    # Ends of an interval are rounded when they are written: equal ones may cross by that much.
    for low, high in itertools.pairwise(numbers):
        if low > high + 1e-4 * abs(high):
            raise CertificateError(f"{what}: {low} above {high}; expected an interval around its value")


def _text(given: Any, what: str) -> None:
    if not isinstance(given, str) or not 1 <= len(given) <= MOST_LETTERS:
        raise CertificateError(f"{what} {_short(given)}; expected a text of 1 to {MOST_LETTERS} letters")


def _rows(given: Any, kind: type, least: int) -> None:
    if (
        not isinstance(given, tuple)
        or not least <= len(given) <= MOST_ROWS
        or not all(type(row) is kind for row in given)
    ):
        raise CertificateError(f"certificate: {_short(given)}; expected {least} to {MOST_ROWS} rows of {kind.__name__}")


def _short(given: Any) -> str:
    if isinstance(given, int) and not isinstance(given, bool) and abs(given) >= 2**62:
        return f"of {given.bit_length()} bits"
    if isinstance(given, tuple | list | dict):
        return f"a {type(given).__name__} of {len(given)}"
    return f"{given!r:.80}"
