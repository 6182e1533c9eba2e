"""Certificates: measured losses of every way of reuse on one backbone, with bounds that held on other windows.

`python -m evals.certify` measures and writes a certificate. Whatever chooses how chunks are served reads it, and uses
nothing approximate that it does not bound. It is a file of JSON, one row a line, read as if a stranger wrote it. Its
digest detects damage; it does not authenticate the author.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from ..backbone import Backbone
from ..errors import InputError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..window import Promise

Point = Literal[
    "leading",  # its KV equals a prefill of the window; at most its keys are rotated
    "restored",  # a stored prefill behind the very pieces in front
    "survivor",  # it stays as it is, conditioned on pieces that have left
    "kept",  # it stays as it is, conditioned on approximate KV, or without having seen all that precedes it
    "stored",  # the canonical plus a patch formed behind the pieces in front
    "orbit",  # the canonical plus a patch that is valid for every order of the pieces in front
    "update",  # the canonical plus a stored patch with a stored correction folded in
    "fresh",  # the canonical plus a patch formed in the same step
    "mean",  # the mean of stored prefills behind the same lead and the same nearest piece
    "near",  # a stored prefill behind the same lead and the same nearest piece, others having been farther away
    "bare",  # the canonical alone
    "repair",  # the canonical, with some of its tokens recomputed
    "prefill",  # a forward behind the pieces in front
]
"""Operating points: the ways in which a piece of a window is served. Kamera App. B."""
POINTS: tuple[Point, ...] = get_args(Point)
EXACT_POINTS = ("leading", "restored", "prefill")
"""Points that compute what a re-prefill computes: they lose nothing but rounding, and need no certificate."""
MEASURED_POINTS = tuple(point for point in POINTS if point not in (*EXACT_POINTS, "kept"))
"""Points that a certificate has rows of."""

FORMAT, VERSION = "kvpatch certificate", 1
MAX_BYTES = 4 << 20
"""Size of the largest file that is read."""
MAX_ROWS, MAX_MODALITIES, MAX_LETTERS = 4096, 16, 2000
_TABLES = ("rows", "plans")
_RANGES = {"eta": (-math.inf, math.inf), "kl_bound": (0.0, math.inf)}
_RANGES |= dict.fromkeys(("kl", "kl_low", "kl_high"), (-1.0, math.inf))
_PROMISES = get_args(Promise)


@dataclasses.dataclass(frozen=True)
class CertifiedLoss:
    """Measured loss of one operating point. An answer is one question, or one continuation, behind one window.

    Attributes:
      point: the operating point.
      rank: of the patches; of a token repair the percentage of tokens recomputed; of survivors the slides of their
        window: chunks that left it, each when another came in, since it was a prefill of itself. 0 if none applies.
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

    @property
    def key(self) -> tuple[str, int, int, str]:
        """Point, rank, behind and promise, which identify a row."""
        return self.point, self.rank, self.behind, self.promise


@dataclasses.dataclass(frozen=True)
class CertifiedPlan:
    """Measured result of windows whose chunks were served in different ways at once, held out from the bounds.

    Attributes:
      name: what was served.
      kl: the bound that its ways are within, in nats.
      windows, answers: how many were served and scored.
      approximate: share of the chunks that were served approximately.
      coverage, coverage_low, coverage_high: share of answers whose KL is within the bound, with its 95 % interval.
    """

    name: str
    kl: float
    windows: int
    answers: int
    approximate: float
    coverage: float
    coverage_low: float
    coverage_high: float


class RankChoice(NamedTuple):
    """A recommended rank, and the reason for it."""

    rank: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Measured losses on one backbone, and bounds to choose by.

        certificate = Certificate.read("certificate.json", backbone=backbone)
        certificate.bound("stored", rank=16)            # nats, of an answer behind a window with one such chunk
        certificate.bound("stored", rank=16, behind=3)  # three other chunks of the window are approximate too

    Attributes:
      backbone: fingerprint of the weights, in their dtype. model: its name when it was measured.
      made: the date, year-month-day.
      level: of the bounds: the share of answers behind new windows of this kind whose KL stays within them.
      calibration, held_out: windows that the bounds were computed from, and other windows that they were tested on; of
        one size, the fewest, where windows of several sizes were measured.
      chunks, tokens: of the largest window: chunks besides pinned ones; tokens, pinned ones included.
      content: what the windows showed. asked: what was asked behind them.
      disjoint: whether no two windows of one size shared a chunk. If some did, the level is nominal.
      spans: the least and the largest span of a chunk besides pinned ones.
      modalities: of those chunks ("image", "text").
      rows: one for each point, rank, number of other chunks and promise.
      recommended: a rank, and the reason for it.
      plans: results of mixed windows.
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
    spans: tuple[int, int]
    modalities: tuple[str, ...]
    rows: tuple[CertifiedLoss, ...]
    recommended: RankChoice
    plans: tuple[CertifiedPlan, ...] = ()

    # ------------------------------------------------------------------------------------------------ bounds

    def beyond(self, tokens: int, chunks: Sequence[tuple[int | None, str | None]]) -> str | None:
        """Describes how a window exceeds everything that was measured. Then no bound holds for it.

        Args:
          tokens: of the whole window, without the question.
          chunks: span and modality of each chunk besides pinned ones. None: an unknown span (only tokens are known), or
            a modality that nobody stated, which counts as not measured.

        Returns:
          A clause for people; None if the window is like those that were measured.
        """
        # Larger windows first, because that clause says most.
        if tokens > self.tokens:
            return f"window of {tokens} tokens; certified up to {self.tokens}"
        if len(chunks) > self.chunks:
            return f"window of {len(chunks)} chunks; certified up to {self.chunks}"
        least, largest = self.spans
        for span, modality in chunks:
            if span is not None and not least <= span <= largest:
                return f"chunk that spans {span} positions; certified from {least} to {largest}"
            if modality not in self.modalities:
                measured = " and ".join(self.modalities)
                return f"chunk of {modality or 'a modality that nobody said'}; certified of {measured}"
        return None

    def bound(self, point: str, rank: int = 0, *, behind: int = 0, promise: Promise = "forget") -> float | None:
        """Bounds the KL, in nats, of an answer behind a window with a chunk that is served at this point.

            certificate.bound("survivor", 6, behind=7)      # eight survivors of a window that has slid six times
            certificate.bound("near", behind=3)             # a stored prefill behind the same nearest chunk

        Between measured ranks, slides or numbers of other chunks, the larger bound of both neighbours applies. A rank
        above all measured ones takes the largest one's.

        Args:
          point: the operating point. Exact ones have the bound 0.
          rank: of the patch, as in a certified row; of survivors the slides of their window, or 0 where nobody counted
            them: then the worst measured bound applies.
          behind: how many other chunks of the window are approximate too, at any place. Chunks that were prefilled
            behind an approximate one count.
          promise: what the window promises. For a window without survivors, ask for "forget": both are the same.

        Returns:
          None if nothing is certified: a point that was not measured, a rank below all, more chunks or slides than
          measured.

        Raises:
          InputError: an unknown point or promise, or a negative number.
        """
        what = "certificate.bound"
        _check(point in (*EXACT_POINTS, *MEASURED_POINTS), f"{what}: point", point, "an operating point with a bound")
        _check(promise in _PROMISES, f"{what}: promise", promise, "'remember' or 'forget'")
        for name, number in (("rank", rank), ("behind", behind)):
            _check(_is_integer(number, 0), f"{what}: {name}", number, "an integer >= 0")
        if is_promised(point, promise):
            return 0.0

        # Nothing is extrapolated, but for ranks of patches above all measured ones, which lose no more.
        ranks, numbers = self._grids.get((point, promise), ([], []))
        if point == "survivor":
            # A window that has not slid loses nothing, so that below all measured slides the least are the worse.
            near = ranks if not rank else _neighbours(ranks, rank) if rank <= max(ranks, default=0) else []
        else:
            near = [] if not ranks or rank < ranks[0] else _neighbours(ranks, rank)
        if not near or behind > numbers[-1]:
            return None
        keys = itertools.product([point], near, _neighbours(numbers, behind), [promise])
        rows = [self._table.get(key) for key in keys]
        return None if None in rows else max(row.kl_bound for row in rows if row is not None)

    def growing(self, point: str, rank: int, promise: Promise, most: int) -> list[float]:
        """Returns the bounds of a chunk among 0, 1, … up to `most` others, as far as they are certified.

        More others never count as better: each number is the largest bound up to there.
        """
        bounds = list[float]()
        for others in range(most + 1):
            number = self.bound(point, rank, behind=others, promise=promise)
            if number is None:
                break
            bounds.append(max([number, *bounds[-1:]]))
        return bounds

    def together(self, served: Iterable[tuple[str, int]], promise: Promise = "forget") -> float | None:
        """Bounds the KL, in nats, of an answer behind a window whose chunks are served in different ways.

        It is the bound of a window all of whose approximate chunks were served in the worst of these ways.

        Args:
          served: point and rank of every chunk, from the front. All chunks from the first approximate one on count.

        Returns:
          As `bound`; 0 if all are exact.
        """
        # Chunks behind the first approximate one read approximate KV, whatever they are served by.
        ways = list(served)
        approximate = [place for place, way in enumerate(ways) if self.bound(*way, promise=promise) != 0.0]
        if not approximate:
            return 0.0
        others = len(ways) - approximate[0] - 1
        bounds = [self.bound(*ways[place], behind=others, promise=promise) for place in approximate]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

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
        grids = dict[tuple[str, str], tuple[set[int], set[int]]]()
        for row in self.rows:
            ranks, numbers = grids.setdefault((row.point, row.promise), (set(), set()))
            ranks.add(row.rank)
            numbers.add(row.behind)
        return {kind: (sorted(ranks), sorted(numbers)) for kind, (ranks, numbers) in grids.items()}

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of approximate chunks, this one included, up to which bounds were measured, ascending."""
        return tuple(sorted({row.behind + 1 for row in self.rows}))

    # ------------------------------------------------------------------------------------------------ files

    @functools.cached_property
    def _body(self) -> dict[str, Any]:
        """Everything that it states, as JSON values. Rows are dictionaries."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _TABLES:
            body[name] = [dict(vars(row)) for row in body[name]]
        return body | {"recommended": dict(self.recommended._asdict())}

    @functools.cached_property
    def digest(self) -> str:
        """Digest of the whole content: 32 hexadecimal digits."""
        return _digest(self._body)

    def to_json(self) -> str:
        """Returns the certificate as JSON with its digest, one row a line."""
        lines = []
        for name, value in self._body.items():
            text = json.dumps(value, ensure_ascii=False)
            if name in _TABLES and value:
                # The first row names the columns.
                rows = [list(value[0]), *(list(row.values()) for row in value)]
                text = "[" + ",".join(f"\n   {json.dumps(row)}" for row in rows) + "]"
            lines.append(f"  {json.dumps(name)}: {text}")
        head = {"format": FORMAT, "version": VERSION, "digest": self.digest}
        first = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
        return "{\n" + first + ' "certificate": {\n' + ",\n".join(lines) + "\n }\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, backbone: str | Backbone | None) -> "Certificate":
        """Reads what `to_json` returned.

        Args:
          backbone: the backbone that it must be of, or its fingerprint; None accepts any.

        Raises:
          InputError: malformed JSON, damage, another version, values out of range, or a certificate of other
          weights.
        """
        certificate = cls(**_fields_of(_parsed(text)))
        wanted = backbone if backbone is None or isinstance(backbone, str) else backbone.fingerprint
        if wanted is not None and certificate.backbone != wanted:
            raise InputError(
                f"certificate.backbone: got {certificate.backbone[:16]!r}, {certificate.model!r:.80}; expected "
                f"{wanted[:16]!r}: other weights, or the same in another dtype"
            )
        return certificate

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Writes a file, atomically.

        Raises:
          InputError: a folder that is missing, or cannot be written.
        """
        path = path_of(path, "certificate", InputError)
        try:
            replace(path, self.to_json().encode())
        except OSError as error:
            raise InputError(f"{path}: got {error.strerror}; expected a file that can be written") from error
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, backbone: str | Backbone | None) -> "Certificate":
        """Reads a file that `write` wrote. Arguments and errors as `from_json`; also if the file is missing."""
        path = path_of(path, "certificate", InputError)
        try:
            # O_NONBLOCK, because opening a pipe would wait for a writer.
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                    raise ValueError(f"no regular file of at most {MAX_BYTES} bytes")
                text = file.read(MAX_BYTES)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            expected = "a certificate, as `python -m evals.certify` makes it"
            raise InputError(f"{path}: got {reason}; expected {expected}") from error
        return cls.from_json(text, backbone=backbone)

    def __repr__(self) -> str:
        return (
            f"Certificate({self.model!r}, {len(self.rows)} rows, {self.calibration} + {self.held_out} windows, level "
            f"{self.level:g}, rank {self.recommended_rank})"
        )


def is_promised(point: str, promise: str) -> bool:
    """Returns whether a piece at this point is what a window of this promise promises, so that it loses nothing."""
    # A window that remembers promises its survivors as they are.
    return point in EXACT_POINTS or (point == "survivor" and promise == "remember")


def _neighbours(measured: Sequence[int], wanted: int) -> list[int]:
    """Returns the measured values around `wanted`: itself, or the nearest below and above."""
    if wanted in measured:
        return [wanted]
    below = [value for value in measured if value < wanted]
    above = [value for value in measured if value > wanted]
    return [*below[-1:], *above[:1]]


# ---------------------------------------------------------------------------------------------------- a stranger's file


def _digest(body: dict[str, Any]) -> str:
    """Digests a body. Raises InputError for a string that UTF-8 cannot encode."""
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    except ValueError as error:
        raise InputError(f"certificate: got {error!s:.120}; expected finite numbers and UTF-8 strings") from None


def _parsed(text: Any) -> dict[str, Any]:
    """Returns the body of a certificate's JSON, rows as dictionaries. The digest is checked, the values are not."""
    _check(isinstance(text, str | bytes), "certificate", text, "JSON")
    saved = strict_json.object_of(text, "certificate")
    version = saved.get("version")
    is_known = saved.get("format") == FORMAT and type(version) is int and version == VERSION
    _check(is_known, "certificate", (saved.get("format"), version), f"{FORMAT!r}, version {VERSION}")
    _check_names(saved, ("format", "version", "digest", "certificate"), "certificate")
    body = saved["certificate"]
    _check_names(body, [field.name for field in dataclasses.fields(Certificate)], "certificate")

    # The digest was taken over rows as dictionaries; the first row of a table names its columns.
    for name in _TABLES:
        what, table = f"certificate.{name}", body.get(name)
        is_table = isinstance(table, list) and len(table) <= MAX_ROWS + 1
        _check(is_table and all(isinstance(row, list) for row in table), what, table, f"up to {MAX_ROWS} lists")
        columns, *rows = table or [[]]
        are_names = all(isinstance(column, str) for column in columns) and len(set(columns)) == len(columns)
        _check(are_names, f"{what}: columns", columns, "distinct names")
        _check(all(len(row) == len(columns) for row in rows), what, rows, f"{len(columns)} values in each row")
        body[name] = [dict(zip(columns, row, strict=True)) for row in rows]
    digest = _digest(body)
    _check(digest == saved["digest"], "certificate.digest", saved["digest"], f"{digest}: it is damaged")
    return body


def _fields_of(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a certificate from a body whose values anybody may have chosen."""
    rows = tuple(_built(CertifiedLoss, values, "rows") for values in body["rows"])
    plans = tuple(_built(CertifiedPlan, values, "plans") for values in body["plans"])
    _check(bool(rows) and len({row.key for row in rows}) == len(rows), "certificate.rows", rows, "distinct rows")
    for row in rows:
        _check(row.point in (*EXACT_POINTS, *MEASURED_POINTS), "certificate.rows.point", row.point, "a known point")
        _check(row.promise in _PROMISES, "certificate.rows.promise", row.promise, "'remember' or 'forget'")
        _check(row.rank > 0 or row.point != "survivor", "certificate.rows.rank", row.rank, "slides of survivors")

    recommended = body["recommended"]
    _check_names(recommended, RankChoice._fields, "certificate.recommended")
    for name, kind in (("rank", int), ("reason", str)):
        _check_value(kind, name, recommended[name], "certificate.recommended")
    spans, modalities = body["spans"], body["modalities"]
    are_spans = isinstance(spans, list) and len(spans) == 2 and all(_is_integer(span, 1) for span in spans)
    _check(are_spans and spans[0] <= spans[1], "certificate.spans", spans, "the least and the largest")
    are_words = isinstance(modalities, list) and 1 <= len(modalities) <= MAX_MODALITIES
    _check(are_words and all(map(_is_text, modalities)), "certificate.modalities", modalities, "words")
    for field in dataclasses.fields(Certificate):
        if field.type in (int, float, str, bool):
            _check_value(field.type, field.name, body[field.name], "certificate")
    lists = {"spans": tuple(spans), "modalities": tuple(modalities), "rows": rows, "plans": plans}
    return {**body, **lists, "recommended": RankChoice(**recommended)}


def _built[Row](kind: type[Row], values: Any, table: str) -> Row:
    """Makes a row of a table, whose values have the types and ranges of its fields."""
    fields: Any = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    what = f"certificate.{table}"
    _check_names(values, [field.name for field in fields], what)
    for field in fields:
        _check_value(field.type, field.name, values[field.name], what)
    for names in (("kl_low", "kl", "kl_high"), ("coverage_low", "coverage", "coverage_high"), ("flips", "flips_high")):
        for low, high in itertools.pairwise(values[name] for name in names if name in values):
            # Ends of an interval are rounded when they are written: equal ones may cross by that much.
            _check(low <= high + 1e-4 * abs(high), f"{what}.{names[0]}", low, f"at most {high!r:.40}, an interval")
    return kind(**values)


def _check_value(kind: Any, name: str, value: Any, what: str) -> None:
    """Raises InputError for a value that a field of this type and name cannot have."""
    if kind is int:
        least = 0 if name in ("rank", "behind") and what == "certificate.rows" else 1
        _check(_is_integer(value, least), f"{what}.{name}", value, f"an integer >= {least}")
    elif kind in (float, float | None):
        # The KL of equal logits may round below 0.
        low, high = _RANGES.get(name, (0.0, 1.0))
        is_number = isinstance(value, float) and math.isfinite(value) and low <= value <= high
        is_valid = is_number or (value is None and kind is not float)
        _check(is_valid, f"{what}.{name}", value, f"a finite float from {low:g} to {high:g}")
    elif kind is bool:
        _check(isinstance(value, bool), f"{what}.{name}", value, "True or False")
    else:
        _check(_is_text(value), f"{what}.{name}", value, f"1 to {MAX_LETTERS} letters")


def _check(is_valid: bool, what: str, value: Any, expected: str) -> None:
    """Raises InputError for an invalid value, which may be huge."""
    if not is_valid:
        is_large = isinstance(value, int) and abs(value) >= 2**62
        shown = f"an integer of {value.bit_length()} bits" if is_large else f"{str(value)[:80]!r}"
        raise InputError(f"{what}: got {shown}; expected {expected}")


def _check_names(values: Any, names: Sequence[str], what: str) -> None:
    difference = sorted(set(values) ^ set(names)) if isinstance(values, dict) else type(values).__name__
    _check(difference == [], what, difference, f"an object of exactly {', '.join(names)}")


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**40


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_LETTERS
