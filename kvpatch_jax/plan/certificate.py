"""Certificates: measured losses of every operating point on one backbone, with bounds that held on other windows.

`python -m evals.certify` measures and writes a certificate. Plans read it, and use no approximate option that it does
not bound. Its digest detects damage; it does not authenticate the author.
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
from .operating_points import EXACT_POINTS, MEASURED_POINTS

Promise = Literal["remember", "forget"]
MAX_ROWS = 4096
MAX_LETTERS = 2000
MAX_MODALITIES = 16


@dataclasses.dataclass(frozen=True)
class CertifiedLoss:
    """Measured loss of one operating point. An answer is one question, or one continuation, behind one window.

    Attributes:
      point: the operating point.
      rank: of the patches; of a token repair the percentage of tokens recomputed; 0 if neither applies.
      behind: how many other chunks of the window were served in the same way: 0 is one chunk among exact ones.
      promise: the reference: "forget", a re-prefill of the window; "remember", the window with survivors as they are
        kept and everything else prefilled behind them.
      kl, kl_low, kl_high: mean KL(promised ‖ served) of an answer, in nats, with its 95 % interval, over all windows.
      kl_bound: upper quantile of an answer's KL over the calibration windows, in nats, at the certificate's level.
      coverage, coverage_low, coverage_high: share of held-out answers whose KL is within the bound, with its 95 %
        interval.
      eta: 1 − Σ KL(served) / Σ KL(bare), over all windows; None if undefined.
      flips, flips_high: share of next tokens whose most likely token changed, with the upper end of its 95 % interval.
      answers: how many were scored, held-out ones included.

    Raises:
      CertificateError: an unknown point or promise, a number out of range or not finite, an int instead of a float.
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
                f"{what}: got promise {self.promise!r:.40}; expected one of {', '.join(MEASURED_POINTS)}, and "
                "'remember' or 'forget'"
            )

        for name in ("rank", "behind", "answers"):
            _check_integer(getattr(self, name), f"{what}.{name}", 1 if name == "answers" else 0)

        # The KL of equal logits may round below 0.
        for name in ("kl", "kl_low", "kl_high"):
            _check_float(getattr(self, name), f"{what}.{name}", -1.0, math.inf)
        _check_float(self.kl_bound, f"{what}.kl_bound", 0.0, math.inf)
        for name in ("coverage", "coverage_low", "coverage_high", "flips", "flips_high"):
            _check_float(getattr(self, name), f"{what}.{name}", 0.0, 1.0)
        if self.eta is not None:
            _check_float(self.eta, f"{what}.eta", -math.inf, math.inf)

        _check_ascending(what, self.kl_low, self.kl, self.kl_high)
        _check_ascending(what, self.coverage_low, self.coverage, self.coverage_high)
        _check_ascending(what, self.flips, self.flips_high)

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Point, rank, behind and promise, which identify a row."""
        return self.point, self.rank, self.behind, self.promise


@dataclasses.dataclass(frozen=True)
class CertifiedPlan:
    """Measured result of plans under a bound, on held-out windows whose chunks were served in different ways at once.

    Attributes:
      name: what was planned.
      kl: the bound that the plans were given, in nats.
      windows, answers: how many were served and scored.
      approximate: share of the chunks that were served approximately.
      coverage, coverage_low, coverage_high: share of answers whose KL is within the bound, with its 95 % interval.

    Raises:
      CertificateError: a number out of range or not finite, an int instead of a float.
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
        _check_text(self.name, "certified plan.name")
        what = f"certified plan {self.name:.40}"
        for name in ("windows", "answers"):
            _check_integer(getattr(self, name), f"{what}.{name}", 1)
        _check_float(self.kl, f"{what}.kl", 0.0, math.inf)
        for name in ("approximate", "coverage", "coverage_low", "coverage_high"):
            _check_float(getattr(self, name), f"{what}.{name}", 0.0, 1.0)
        _check_ascending(what, self.coverage_low, self.coverage, self.coverage_high)


class RankChoice(NamedTuple):
    """A recommended rank, and the reason for it."""

    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Measured losses on one backbone, and bounds to plan with.

        certificate = Certificate.read("certificate.json", backbone=backbone)
        certificate.bound("stored", rank=16)            # nats, of an answer behind a window with one such chunk
        certificate.bound("stored", rank=16, behind=3)  # three other chunks of the window are approximate too

    Attributes:
      backbone: fingerprint of the weights, in their dtype. model: its name when it was measured.
      made: the date, year-month-day.
      level: of the bounds: the share of answers behind new windows of this kind whose KL stays within them.
      calibration, held_out: windows that the bounds were computed from, and other windows that they were tested on.
      chunks, tokens: chunks of a window besides pinned ones; tokens of the largest window, pinned ones included.
      content: what the windows showed. asked: what was asked behind them.
      disjoint: whether no two windows shared a chunk. If some did, the level is nominal.
      rows: one for each point, rank, number of other chunks and promise.
      recommended: a rank, and the reason for it.
      plans: results of plans on held-out windows.
      spans: the least and the largest span of a chunk besides pinned ones; None in older files, which bound spans by
        `tokens` alone.
      modalities: of those chunks ("image", "text"); None in older files, which name them in `content`.

    Raises:
      CertificateError: no rows, two rows with one key, numbers out of range.
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
        for name in ("backbone", "model", "made", "content", "asked"):
            _check_text(getattr(self, name), f"certificate.{name}")
        for name in ("calibration", "held_out", "chunks", "tokens"):
            _check_integer(getattr(self, name), f"certificate.{name}", 1)
        _check_float(self.level, "certificate.level", 0.0, 1.0)
        if not isinstance(self.disjoint, bool):
            raise CertificateError(f"certificate.disjoint: got {self.disjoint!r:.40}; expected True or False")

        _check_rows(self.rows, "rows", CertifiedLoss, 1)
        _check_rows(self.plans, "plans", CertifiedPlan, 0)
        keys = [row.key for row in self.rows]
        duplicate = next((key for key in keys if keys.count(key) > 1), None)
        if duplicate is not None:
            raise CertificateError(f"certificate.rows: got two rows of {duplicate}; expected one")
        if not isinstance(self.recommended, RankChoice):
            raise CertificateError(f"certificate.recommended: got {self.recommended!r:.40}; expected a RankChoice")

        _check_integer(self.recommended.rank, "certificate.recommended.rank", 1)
        _check_text(self.recommended.reason, "certificate.recommended.reason")

        for name in certificate_file.NEWER_FIELDS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, tuple) or not 1 <= len(value) <= MAX_MODALITIES):
                raise CertificateError(f"certificate.{name}: got {_shortened(value)}; expected a tuple, or None")

        for span in self.spans or ():
            _check_integer(span, "certificate.spans", 1)
        if self.spans is not None and (len(self.spans) != 2 or self.spans[0] > self.spans[1]):
            raise CertificateError(f"certificate.spans: got {self.spans!r:.80}; expected the least and the largest")
        for modality in self.modalities or ():
            _check_text(modality, "certificate.modalities")

    # ------------------------------------------------------------------------------------------------ bounds

    def beyond(self, tokens: int, chunks: Sequence[tuple[int | None, str | None]]) -> str | None:
        """Returns how a window exceeds everything that was measured. Then no bound holds for it.

        Everyone who serves by a certificate asks this first: plans (and so sessions), and the engine's connector.

        Args:
          tokens: of the whole window, without the question.
          chunks: span and modality of each chunk besides pinned ones. None: an unknown span (only tokens are known), or
            a modality that nobody stated, which counts as not measured.

        Returns:
          A clause for people; None if the window is like those that were measured.
        """
        if tokens > self.tokens:
            return f"window of {tokens} tokens; certified up to {self.tokens}"
        if len(chunks) > self.chunks:
            return f"window of {len(chunks)} chunks; certified up to {self.chunks}"

        least, largest = self.spans or (1, self.tokens)
        modalities = self.modalities
        if modalities is None:
            modalities = tuple(name for name in ("image", "text") if name in self.content)

        for span, modality in chunks:
            if span is not None and not least <= span <= largest:
                return f"chunk that spans {span} positions; certified from {least} to {largest}"
            if modality not in modalities:
                measured = " and ".join(modalities) or "what it does not say"
                return f"chunk of {modality or 'a modality that nobody said'}; certified of {measured}"

        return None

    def bound(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the KL, in nats, of an answer behind a window with a chunk that is served at this point.

        Between measured ranks, or measured numbers of other chunks, the larger bound of both neighbours applies. A rank
        above all measured ones takes the largest one's.

        Args:
          point: the operating point. Exact ones have the bound 0.
          rank: of the patch, as in a certified row.
          behind: how many other chunks of the window are approximate too, at any place. Chunks that were prefilled
            behind an approximate one count.
          promise: what the window promises. For a window without survivors, ask for "forget": both are the same.

        Returns:
          None if nothing is certified: a point that was not measured, a rank below all, more chunks than measured.

        Raises:
          CertificateError: an unknown point or promise, or a negative number.
        """
        return self._worst("kl_bound", point, rank, behind, promise)

    def flips(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the share of next tokens that change: the upper end of its 95 % interval. Arguments as `bound`."""
        return self._worst("flips_high", point, rank, behind, promise)

    def growing(
        self, what: Literal["bound", "flips"], point: str, rank: int, *, promise: Promise, most: int
    ) -> list[float]:
        """Returns the bounds of a chunk among 0, 1, … up to `most` others, as far as they are certified.

        More others never count as better: each number is the largest of `bound` (or `flips`) up to there.

        Raises:
          CertificateError: as `bound`.
        """
        bound = self.bound if what == "bound" else self.flips
        first = bound(point, rank, promise=promise)
        if first is None:
            return []
        if self._is_exact(point, promise):
            return [0.0] * (most + 1)

        # Between two measured numbers of others the bound is constant, so one lookup fills that stretch.
        bounds = [first]
        for measured in self._grids[point, promise][1]:
            for others in (measured - 1, measured):
                missing = min(others, most) + 1 - len(bounds)
                if missing <= 0:
                    continue
                number = bound(point, rank, behind=others, promise=promise)
                if number is None:
                    return bounds
                bounds += [max(number, bounds[-1])] * missing

        return bounds

    def together(self, served: Iterable[tuple[str, int]], promise: Promise = "forget") -> float | None:
        """Bounds the KL, in nats, of an answer behind a window whose chunks are served in different ways.

        It is the bound of a window all of whose approximate chunks were served in the worst of these ways.

        Args:
          served: point and rank of every chunk, from the front. All chunks from the first approximate one on count.

        Returns:
          As `bound`; 0 if all are exact.
        """
        ways = list(served)
        alone = [self.bound(point, rank, promise=promise) for point, rank in ways]
        approximate = [place for place, bound in enumerate(alone) if bound != 0.0]
        if not approximate:
            return 0.0

        others = len(ways) - approximate[0] - 1
        bounds = []
        for point, rank in dict.fromkeys(ways[place] for place in approximate):
            bound = self.bound(point, rank, behind=others, promise=promise)
            if bound is None:
                return None
            bounds.append(bound)

        return max(bounds)

    def row(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> CertifiedLoss | None:
        """Returns the row with exactly this key, or None."""
        return self._table.get((point, rank, behind, promise))

    @property
    def recommended_rank(self) -> int:
        """The recommended rank."""
        return self.recommended.rank

    @functools.cached_property
    def _table(self) -> dict[tuple[str, int, int, str], CertifiedLoss]:
        return {row.key: row for row in self.rows}

    @functools.cached_property
    def _grids(self) -> dict[tuple[str, str], tuple[list[int], list[int]]]:
        """Measured ranks and numbers of other chunks, ascending, by point and promise."""
        grids: dict[tuple[str, str], tuple[set[int], set[int]]] = {}
        for row in self.rows:
            ranks, behinds = grids.setdefault((row.point, row.promise), (set(), set()))
            ranks.add(row.rank)
            behinds.add(row.behind)
        return {kind: (sorted(ranks), sorted(behinds)) for kind, (ranks, behinds) in grids.items()}

    @staticmethod
    def _is_exact(point: str, promise: str) -> bool:
        # A window that remembers promises its survivors as they are.
        return point in EXACT_POINTS or (point == "survivor" and promise == "remember")

    def _worst(self, field: str, point: str, rank: int, behind: int, promise: str) -> float | None:
        """Returns the largest value of a field over the neighbouring rows; None if one of them is missing."""
        if point not in (*EXACT_POINTS, *MEASURED_POINTS):
            raise CertificateError(f"certificate.point: got {point!r:.40}; expected an operating point with a bound")
        if promise not in ("remember", "forget"):
            raise CertificateError(f"certificate.promise: got {promise!r:.40}; expected 'remember' or 'forget'")

        _check_integer(rank, "certificate.rank", 0)
        _check_integer(behind, "certificate.behind", 0)

        if self._is_exact(point, promise):
            return 0.0

        ranks, behinds = self._grids.get((point, promise), ([], []))
        if not ranks or rank < ranks[0] or behind > behinds[-1]:
            return None

        keys = itertools.product(_neighbours(ranks, rank), _neighbours(behinds, behind))
        rows = [self._table.get((point, own_rank, others, promise)) for own_rank, others in keys]
        return None if None in rows else max(getattr(row, field) for row in rows)

    # ------------------------------------------------------------------------------------------------ files

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the whole content: 32 hexadecimal digits."""
        return certificate_file.digest_of(certificate_file.body_of(self))

    def to_json(self) -> str:
        """Returns the certificate as JSON with its digest, one row a line."""
        return certificate_file.text_of(self)

    @classmethod
    def from_json(cls, text: str | bytes, *, backbone: str | Backbone | None) -> "Certificate":
        """Reads what `to_json` returned.

        Args:
          backbone: the backbone that it must be of, or its fingerprint; None accepts any.

        Raises:
          CertificateError: malformed JSON, damage, another version, or a certificate of other weights.
        """
        body = certificate_file.parsed(text)
        for name in certificate_file.NEWER_FIELDS:  # older files lack them
            value = body.setdefault(name, None)
            body[name] = tuple(value) if isinstance(value, list) else value

        certificate_file.check_names(body, [field.name for field in dataclasses.fields(cls)], "certificate")

        rows = tuple(certificate_file.built(CertifiedLoss, values) for values in body.pop("rows"))
        plans = tuple(certificate_file.built(CertifiedPlan, values) for values in body.pop("plans"))
        recommended = certificate_file.built(RankChoice, body.pop("recommended"))
        certificate = cls(rows=rows, plans=plans, recommended=recommended, **body)

        wanted = backbone if backbone is None or isinstance(backbone, str) else backbone.fingerprint
        if wanted is not None and certificate.backbone != wanted:
            raise CertificateError(
                f"certificate.backbone: got {certificate.backbone[:16]!r}, {certificate.model!r:.80}; expected "
                f"{wanted[:16]!r}: other weights, or the same in another dtype"
            )
        return certificate

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes a file, atomically.

        Raises:
          CertificateError: a folder that is missing, or cannot be written.
        """
        return certificate_file.write(path_of(path, "certificate", CertificateError), self.to_json())

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, backbone: str | Backbone | None) -> "Certificate":
        """Reads a file that `write` wrote. Arguments and errors as `from_json`; also if the file is missing."""
        return cls.from_json(certificate_file.read(path_of(path, "certificate", CertificateError)), backbone=backbone)

    def __repr__(self) -> str:
        return (
            f"Certificate({self.model!r}, {len(self.rows)} rows, {self.calibration} + {self.held_out} windows, level "
            f"{self.level:g}, rank {self.recommended_rank})"
        )


def _neighbours(measured: Sequence[int], wanted: int) -> list[int]:
    """Returns the measured values around `wanted`: itself, or the nearest below and above."""
    if wanted in measured:
        return [wanted]
    below = [value for value in measured if value < wanted]
    above = [value for value in measured if value > wanted]
    return [*below[-1:], *above[:1]]


# Checks of values that may come from a stranger's file: exact types (True is no number, 1 no float), finite, bounded.


def _check_integer(value: Any, what: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**40:
        raise CertificateError(f"{what}: got {_shortened(value)}; expected an integer >= {least}")


def _check_float(value: Any, what: str, least: float, most: float) -> None:
    if not isinstance(value, float) or not math.isfinite(value) or not least <= value <= most:
        raise CertificateError(f"{what}: got {_shortened(value)}; expected a finite float from {least:g} to {most:g}")


def _check_ascending(what: str, *numbers: float) -> None:
    # Ends of an interval are rounded when they are written: equal ones may cross by that much.
    for low, high in itertools.pairwise(numbers):
        if low > high + 1e-4 * abs(high):
            raise CertificateError(f"{what}: got {low} above {high}; expected an interval around its value")


def _check_text(value: Any, what: str) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_LETTERS:
        raise CertificateError(f"{what}: got {_shortened(value)}; expected a string of 1 to {MAX_LETTERS} letters")


def _check_rows(rows: Any, name: str, kind: type, least: int) -> None:
    is_sized = isinstance(rows, tuple) and least <= len(rows) <= MAX_ROWS
    if not is_sized or not all(type(row) is kind for row in rows):
        raise CertificateError(
            f"certificate.{name}: got {_shortened(rows)}; expected a tuple of {least} to {MAX_ROWS} {kind.__name__}"
        )


def _shortened(value: Any) -> str:
    """Describes a value that may be huge."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**62:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r:.80}"
