"""Certificates: measured losses of every operating point on one backbone, with bounds that held on other windows.

`python -m evals.certify` measures and writes a certificate. Plans read it, and use no approximate option that it does
not bound. It is a file of JSON, one row a line, read as if a stranger wrote it. Its digest detects damage; it does not
authenticate the author.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..backbone import Backbone
from ..errors import CertificateError
from ..utils import strict_json
from ..utils.atomic_files import path_of, replace
from ..window import Promise
from .certified_rows import (
    CertifiedLoss,
    CertifiedPlan,
    RankChoice,
    check_float,
    check_integer,
    check_text,
    shortened,
)
from .operating_points import EXACT_POINTS, MEASURED_POINTS

FORMAT = "kvpatch certificate"
VERSION = 1
MAX_BYTES = 4 << 20
"""Size of the largest file that is read."""
MAX_ROWS = 4096
MAX_MODALITIES = 16
_TABLES = ("rows", "plans")


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
      calibration, held_out: windows that the bounds were computed from, and other windows that they were tested on; of
        one size, the fewest, where windows of several sizes were measured.
      chunks, tokens: of the largest window: chunks besides pinned ones; tokens, pinned ones included.
      content: what the windows showed. asked: what was asked behind them.
      disjoint: whether no two windows of one size shared a chunk. If some did, the level is nominal.
      spans: the least and the largest span of a chunk besides pinned ones.
      modalities: of those chunks ("image", "text").
      rows: one for each point, rank, number of other chunks and promise.
      recommended: a rank, and the reason for it.
      plans: results of plans on held-out windows.

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
    spans: tuple[int, int]
    modalities: tuple[str, ...]
    rows: tuple[CertifiedLoss, ...]
    recommended: RankChoice
    plans: tuple[CertifiedPlan, ...] = ()

    def __post_init__(self) -> None:
        for name in ("backbone", "model", "made", "content", "asked"):
            check_text(getattr(self, name), f"certificate.{name}")
        for name in ("calibration", "held_out", "chunks", "tokens"):
            check_integer(getattr(self, name), f"certificate.{name}", 1)
        check_float(self.level, "certificate.level", 0.0, 1.0)
        if not isinstance(self.disjoint, bool):
            raise CertificateError(f"certificate.disjoint: got {self.disjoint!r:.40}; expected True or False")

        for name, kind, least in (("rows", CertifiedLoss, 1), ("plans", CertifiedPlan, 0)):
            rows: Any = getattr(self, name)
            is_sized = isinstance(rows, tuple) and least <= len(rows) <= MAX_ROWS
            if not is_sized or not all(type(row) is kind for row in rows):
                expected = f"a tuple of {least} to {MAX_ROWS} {kind.__name__}"
                raise CertificateError(f"certificate.{name}: got {shortened(rows)}; expected {expected}")

        keys = [row.key for row in self.rows]
        duplicate = next((key for key in keys if keys.count(key) > 1), None)
        if duplicate is not None:
            raise CertificateError(f"certificate.rows: got two rows of {duplicate}; expected one")
        if not isinstance(self.recommended, RankChoice):
            raise CertificateError(f"certificate.recommended: got {self.recommended!r:.40}; expected a RankChoice")

        check_integer(self.recommended.rank, "certificate.recommended.rank", 1)
        check_text(self.recommended.reason, "certificate.recommended.reason")

        for name in ("spans", "modalities"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not 1 <= len(value) <= MAX_MODALITIES:
                raise CertificateError(f"certificate.{name}: got {shortened(value)}; expected a tuple")

        for span in self.spans:
            check_integer(span, "certificate.spans", 1)
        if len(self.spans) != 2 or self.spans[0] > self.spans[1]:
            raise CertificateError(f"certificate.spans: got {self.spans!r:.80}; expected the least and the largest")
        for modality in self.modalities:
            check_text(modality, "certificate.modalities")

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
        bound, bounds = self.bound if what == "bound" else self.flips, list[float]()
        for others in range(most + 1):
            number = bound(point, rank, behind=others, promise=promise)
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

    def _worst(self, field: str, point: str, rank: int, behind: int, promise: str) -> float | None:
        """Returns the largest value of a field over the neighbouring rows; None if one of them is missing."""
        if point not in (*EXACT_POINTS, *MEASURED_POINTS):
            raise CertificateError(f"certificate.point: got {point!r:.40}; expected an operating point with a bound")
        if promise not in ("remember", "forget"):
            raise CertificateError(f"certificate.promise: got {promise!r:.40}; expected 'remember' or 'forget'")

        check_integer(rank, "certificate.rank", 0)
        check_integer(behind, "certificate.behind", 0)

        if is_promised(point, promise):
            return 0.0

        # Nothing is extrapolated, but for ranks of patches above all measured ones, which lose no more.
        ranks, behinds = self._grids.get((point, promise), ([], []))
        nearest = self._nearest_slides(ranks, rank) if point == "survivor" else _neighbours(ranks, rank)
        if not nearest or (point != "survivor" and rank < ranks[0]) or behind > behinds[-1]:
            return None

        keys = itertools.product(nearest, _neighbours(behinds, behind))
        rows = [self._table.get((point, own_rank, others, promise)) for own_rank, others in keys]
        return None if None in rows else max(getattr(row, field) for row in rows)

    def _nearest_slides(self, ranks: Sequence[int], slides: int) -> list[int]:
        """Returns the ranks of the rows that bound survivors after so many slides; 0: nobody counted them."""
        if not slides:
            return [*ranks]
        if slides > max(ranks, default=0):
            return []
        # A window that has not slid loses nothing, so that below all measured numbers the least of them is the worse.
        return _neighbours(ranks, slides)

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
            if name in _TABLES:
                # The first row names the columns.
                columns = list(value[0]) if value else []
                rows = [columns, *([row[column] for column in columns] for row in value)] if value else []
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
          CertificateError: malformed JSON, damage, another version, or a certificate of other weights.
        """
        body = _parsed(text)
        _check_names(body, [field.name for field in dataclasses.fields(cls)], "certificate")

        for name in ("spans", "modalities"):
            body[name] = tuple(body[name]) if isinstance(body[name], list) else body[name]
        body["rows"] = tuple(_built(CertifiedLoss, values) for values in body["rows"])
        body["plans"] = tuple(_built(CertifiedPlan, values) for values in body["plans"])
        body["recommended"] = _built(RankChoice, body["recommended"])
        certificate = cls(**body)

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
        path = path_of(path, "certificate", CertificateError)
        try:
            replace(path, self.to_json().encode())
        except OSError as error:
            raise CertificateError(f"{path}: got {error.strerror}; expected a file that can be written") from error
        return path

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, backbone: str | Backbone | None) -> "Certificate":
        """Reads a file that `write` wrote. Arguments and errors as `from_json`; also if the file is missing."""
        path = path_of(path, "certificate", CertificateError)
        try:
            # O_NONBLOCK, because opening a pipe would wait for a writer.
            with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                    found = f"no regular file of at most {MAX_BYTES} bytes"
                    raise CertificateError(f"{path}: got {found}; expected a certificate")
                text = file.read(MAX_BYTES)
        except CertificateError:
            raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            expected = "a certificate, as `python -m evals.certify` makes it"
            raise CertificateError(f"{path}: got {reason}; expected {expected}") from error
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


# ---------------------------------------------------------------------------------------------------- parsing JSON


def _digest(body: dict[str, Any]) -> str:
    """Digests a body. Raises CertificateError for a string that UTF-8 cannot encode."""
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    except ValueError as error:
        raise CertificateError(f"certificate: got {error!s:.120}; expected finite numbers and UTF-8 strings") from None


def _parsed(text: Any) -> dict[str, Any]:
    """Returns the body of a certificate's JSON, rows as dictionaries. The digest is checked, the values are not.

    Raises:
      CertificateError: malformed JSON, another version, or damage.
    """
    if not isinstance(text, str | bytes):
        raise CertificateError(f"certificate: got a {type(text).__name__}; expected JSON")
    try:
        saved = strict_json.loads(text)
    except ValueError as error:
        raise CertificateError(f"certificate: got {error!s:.120}; expected JSON of Certificate.to_json") from None

    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise CertificateError(f"certificate: got JSON of {_kind_of(saved)}; expected that of Certificate.to_json")
    version = saved.get("version")
    if version != VERSION or type(version) is not int:
        raise CertificateError(f"certificate.version: got {version!r:.80}; expected {VERSION}")
    _check_names(saved, ("format", "version", "digest", "certificate"), "certificate")
    body = saved["certificate"]
    if not isinstance(body, dict):
        raise CertificateError(f"certificate: got contents as {_kind_of(body)}; expected an object")

    # The digest was taken over rows as dictionaries; the first row of a table names its columns.
    for name in _TABLES:
        what, table = f"certificate.{name}", body.get(name)
        if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
            raise CertificateError(f"{what}: got {_kind_of(table)}; expected a list of lists")
        columns, *rows = table or [[]]
        if not all(isinstance(column, str) for column in columns) or len(set(columns)) != len(columns):
            raise CertificateError(f"{what}: got columns {columns!r:.80}; expected distinct names")
        if any(len(row) != len(columns) for row in rows):
            raise CertificateError(f"{what}: got rows of unequal lengths; expected {len(columns)} values in each")
        body[name] = [dict(zip(columns, row, strict=True)) for row in rows]

    if (digest := _digest(body)) != saved["digest"]:
        raise CertificateError(f"certificate.digest: got {saved['digest']!r:.80}; expected {digest}: it is damaged")
    return body


def _built[Row](make: Callable[..., Row], values: Any) -> Row:
    """Makes a dataclass or named tuple from a dictionary with exactly its fields.

    Raises:
      CertificateError: other names, or what the row's own checks refuse.
    """
    kind: Any = make
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    if not isinstance(values, dict):
        raise CertificateError(f"certificate: got a {kind.__name__} as {_kind_of(values)}; expected an object")
    _check_names(values, names, kind.__name__)
    return make(**values)


def _check_names(values: dict[str, Any], names: Collection[str], what: str) -> None:
    """Refuses a dictionary with other keys. Raises CertificateError."""
    if difference := sorted(set(values) ^ set(names)):
        raise CertificateError(f"{what}: got {difference!s:.80} missing or unknown; expected {', '.join(names)}")


def _kind_of(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
