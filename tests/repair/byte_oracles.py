"""Slow NumPy transcriptions of forms of stored KV, on one row's matrix [T,F] or [T,K,H] at a time."""

import collections
import math

import numpy as np


def rounded_down(value: np.ndarray) -> np.ndarray:
    """The largest bfloat16 number that is not above."""
    value = np.asarray(value, np.float32)
    low = (value.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    below = -((np.abs(low).view(np.uint32) + np.uint32(0x10000)).view(np.float32))
    return np.where(low > value, below, low).astype(np.float32)


def rounded_up(value: np.ndarray) -> np.ndarray:
    return -rounded_down(-np.asarray(value, np.float32))


def nearest(value: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 number."""
    down, up = rounded_down(value), rounded_up(value)
    return np.where(np.abs(np.float64(value) - down) <= np.abs(up - np.float64(value)), down, up).astype(np.float32)


def quantised(matrix: np.ndarray, bits: int, group: int | None, axis: int) -> tuple[np.ndarray, int]:
    """Rounds a matrix in groups along an axis, one group at a time; returns it and its bytes."""
    if bits == 16:
        return nearest(matrix), 2 * matrix.size
    rows = matrix.astype(np.float32).T if axis == -2 else matrix.astype(np.float32)
    decoded, nbytes = np.zeros(rows.shape, np.float64), 0
    size, most = group or rows.shape[1], np.float32(2**bits - 1)
    for row, numbers in enumerate(rows):
        for first in range(0, len(numbers), size):
            part = numbers[first : first + size]
            least = rounded_down(part.min())
            step = rounded_up(part.max() / most - least / most)
            codes = np.clip(np.round(part / (step or 1) - least / (step or 1)), 0, most)
            decoded[row, first : first + size] = codes * np.float64(step) + least
            nbytes += 4
    # Whole bytes for every token, and for each power of two in the bits.
    powers = [power for power in (1, 2, 4, 8) if bits & power]
    nbytes += sum(matrix.shape[0] * math.ceil(matrix.shape[1] * power / 8) for power in powers)
    return decoded.T if axis == -2 else decoded, nbytes


def low_rank(matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    u, s, v = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    return (u * s)[:, :rank], v[:rank]


def gear(
    matrix: np.ndarray, bits: int, group: int, axis: int, count: int, rank: int, heads: int
) -> tuple[np.ndarray, int]:
    """GEAR of one row's matrix [T,F]: `count` outliers at either end of each vector along the axis of the groups."""
    tokens, features = matrix.shape
    rest, whole = matrix.astype(np.float64).copy(), {}
    for across in range(features if axis == -2 else tokens):
        vector = rest[:, across] if axis == -2 else rest[across]
        order = np.argsort(vector, kind="stable")
        outliers = [*order[:count], *order[len(order) - count :]] if count else []
        for place in outliers:
            whole[(place, across) if axis == -2 else (across, place)] = nearest(np.asarray(vector[place], np.float32))
        left = np.delete(vector, outliers)
        vector[outliers] = (left.min() + left.max()) / 2
    dense, nbytes = quantised(rest.astype(np.float32), bits, group, axis)
    total, width, error = dense.copy(), features // heads, rest - dense
    for place in whole:
        error[place] = 0.0
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        u, v = low_rank(error[:, part], rank)
        total[:, part] += nearest(u.astype(np.float32)).astype(np.float64) @ nearest(v.astype(np.float32))
    for place, number in whole.items():
        total[place] = number
    return total, nbytes + 4 * len(whole) + 2 * rank * heads * (tokens + width)


def cachegen(matrix: np.ndarray, step: float, group: int, live: int) -> tuple[np.ndarray, float, int]:
    """CacheGen of one row's matrix [T,F] at one layer; returns it, the bytes beside tables by feature, and those."""
    tokens, features = matrix.shape
    anchors, nbytes = quantised(matrix[::group], 8, 32, -1)
    decoded, by_feature, everything = np.zeros(matrix.shape), 0.0, collections.Counter()
    coded = [token for token in range(tokens) if token % group and token < live]
    entry = 3
    for feature in range(features):
        base = np.array([anchors[token // group, feature] for token in range(tokens)], np.float32)
        delta = matrix[:, feature].astype(np.float32) - base
        deviation = nearest(np.asarray(np.sqrt(np.mean(np.square(delta[coded], dtype=np.float64))), np.float32))
        size = np.float32(step) * deviation
        symbols = {token: int(np.clip(np.round(delta[token] / size), -1023, 1023)) for token in coded}
        entry = 4 if any(abs(symbol) > 127 for symbol in symbols.values()) else entry
        for token in range(tokens):
            decoded[token, feature] = base[token] + symbols.get(token, 0) * np.float64(size)
        counts = collections.Counter(symbols.values())
        everything += counts
        by_feature += _entropy_bytes(counts) + 3 * len(counts)
    assert entry == 3, "the oracle's table counts small symbols"
    by_layer = _entropy_bytes(everything) + 3 * len(everything)
    return decoded, nbytes + 2 * features + by_feature, round(1e6 * (by_layer - by_feature))


def _entropy_bytes(counts: collections.Counter) -> float:
    number = sum(counts.values())
    return sum(-count * math.log2(count / number) for count in counts.values()) / 8


def chosen_blocks(
    deltas: dict[str, np.ndarray], block: int, allowed: int, costs: dict[tuple[str, int], int]
) -> set[tuple[str, int, int]]:
    """Blocks (channel, layer, block) of one row's {channel: [L,T,F]}, by energy per byte, until one does not fit."""
    gains = {}
    for name, delta in deltas.items():
        for layer in range(delta.shape[0]):
            for first in range(0, delta.shape[1], block):
                energy = np.square(delta[layer, first : first + block], dtype=np.float64).sum()
                place = first // block
                gains[name, layer, place] = energy / costs[name, min(block, delta.shape[1] - first)]
    chosen, spent = set(), 0
    for name, layer, place in sorted(gains, key=gains.__getitem__, reverse=True):
        spent += costs[name, min(block, deltas[name].shape[1] - place * block)]
        if spent > allowed:
            break
        chosen.add((name, layer, place))
    return chosen
