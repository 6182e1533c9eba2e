"""Tensors that are pieces of a file's tensors, under other names: authors' own formats as the one that is read."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from kvpatch_jax.errors import WeightsError

from .source import Slices, StoredTensor, TensorInfo, TensorSource, stored_tensor

Rows = tuple[tuple[int, int], ...]
"""Runs of rows: where each starts and stops."""


@dataclasses.dataclass(frozen=True)
class TensorSelection:
    """What of a file's tensor is taken.

    Attributes:
      rows: runs on its first axis, one behind the other; None for all of it. size: how long that axis must be.
      lead: it has a leading axis of length 1, which is left out.
    """

    rows: Rows | None = None
    size: int = 0
    lead: bool = False


WHOLE = TensorSelection()
Rule = tuple[str, Mapping[str, TensorSelection]]
"""A regular expression of names in the file, and what each becomes: replacement → piece; nothing where it is unread."""


def split_rows(groups: int = 1, **rows: int) -> dict[str, TensorSelection]:
    """Returns pieces that lie one behind the other on the first axis: name → rows.

    They may repeat so in each of several `groups` (InternLM2: the query, key and value of each KV head); a piece takes
    its rows of all of them.
    """
    period, start, pieces = sum(rows.values()), 0, dict[str, TensorSelection]()
    for name, count in rows.items():
        runs = tuple((group * period + start, group * period + start + count) for group in range(groups))
        pieces[name] = TensorSelection(runs, groups * period)
        start += count
    return pieces


class ViewSource:
    """Tensors of another source, renamed and cut by rules; what no rule names stays as it is.

    Raises:
      WeightsError: a tensor that cannot be cut as its rule says, or two that become one.
    """

    def __init__(self, inner: TensorSource, rules: Sequence[Rule], note: str):
        self.origin, self._inner = f"{inner.origin} ({note})", inner
        self._views: dict[str, tuple[str, TensorSelection]] = {}
        for name in inner.tensors:
            for target, piece in _targets(rules, name).items():
                if target in self._views:
                    both = self._views[target][0], name
                    raise WeightsError(f"{inner.origin}: got tensors {both} for {target!r}; expected one of them")
                self._views[target] = name, piece

        self.tensors = {target: self._info(*view) for target, view in self._views.items()}

    def _info(self, name: str, piece: TensorSelection) -> TensorInfo:
        info = self._inner.tensors[name]
        if piece.lead and info.shape[:1] != (1,):
            raise WeightsError(f"{self.origin}: got tensor {name!r} of shape {info.shape}; expected a first axis of 1")
        if piece.lead:
            return TensorInfo(info.shape[1:], info.dtype)
        if piece.rows is None:
            return info
        if info.shape[:1] != (piece.size,):
            raise WeightsError(f"{self.origin}: got tensor {name!r} of shape {info.shape}; expected {piece.size} rows")
        return TensorInfo((sum(stop - start for start, stop in piece.rows), *info.shape[1:]), info.dtype)

    def read(self, name: str, region: Slices | None = None) -> np.ndarray:
        """Reads a tensor or a region of it, by its new name; no more rows than that."""
        stored, piece = self._views[name]
        if piece.lead:
            return self._inner.read(stored, (slice(0, 1), *(region or ())))[0]
        if piece.rows is None:
            return self._inner.read(stored, region)

        # Rows are counted over the piece's runs, which need not lie together in the file.
        rows, *others = region or (slice(None),)
        first, last, _ = rows.indices(self.tensors[name].shape[0])

        # A read of no rows comes first, so that an empty region has the type and the other axes all the same.
        found, passed = [self._inner.read(stored, (slice(0, 0), *others))], 0
        for start, stop in piece.rows:
            low, high = max(first - passed, 0), min(last - passed, stop - start)
            if low < high:
                found.append(self._inner.read(stored, (slice(start + low, start + high), *others)))
            passed += stop - start

        return np.concatenate(found)

    def stored(self, name: str) -> StoredTensor | None:
        """Returns where the bytes of a tensor lie that is only renamed; None of a piece."""
        inner, piece = self._views[name]
        return stored_tensor(self._inner, inner) if piece == WHOLE else None


def _targets(rules: Sequence[Rule], name: str) -> dict[str, TensorSelection]:
    for pattern, pieces in rules:
        match = re.fullmatch(pattern, name)
        if match is not None:
            return {match.expand(target): piece for target, piece in pieces.items()}
    return {name: WHOLE}
