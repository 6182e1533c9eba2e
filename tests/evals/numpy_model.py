"""A decoder, patches and few bits a second time: in NumPy, from their definitions, without any code of the library.

Axis letters: L layers, T tokens, S tokens of a cache, N query heads, K KV heads, G = N / K, H width of a head, R ranks.
KV is {"k": [L, T, K, H], "v": …}, keys without phase until `Decoder.place` rotates them.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

KV = dict[str, np.ndarray]
GROUP = 32


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder of Qwen2's kind; weights by Hugging Face's names, those of layers as "<layer>.<name>"."""

    weights: dict[str, np.ndarray]
    layers: int
    heads: int
    width: int
    theta: float
    epsilon: float
    sections: tuple[int, ...] = ()

    @classmethod
    def of_directory(cls, path: Path) -> "Decoder":
        """Reads safetensors in float64."""
        config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
        names = {name: name.removeprefix("model.").removeprefix("layers.") for name in tensors}
        weights = {short: tensors[name].astype(np.float64) for name, short in names.items()}
        layers, heads, width = (config[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim"))
        sections = tuple(config["rope_scaling"]["mrope_section"])
        return cls(weights, layers, heads, width, config["rope_theta"], config["rms_norm_eps"], sections)

    def embed(self, ids: np.ndarray) -> np.ndarray:
        return self.weights["embed_tokens.weight"][ids]

    def run(
        self, x: np.ndarray, positions: np.ndarray, cache: KV | None = None, seen: np.ndarray | None = None
    ) -> tuple[np.ndarray, KV]:
        """Runs embeddings [T, D] behind a cache of rotated keys; returns what the last layer leaves, and their KV.

        Args:
          positions: [T], or of three axes [T, 3]. seen: [T, S + T]; None: the cache, and tokens up to each.
        """
        tokens, past = len(x), 0 if cache is None else cache["k"].shape[1]
        seen = np.tri(tokens, past + tokens, past, dtype=bool) if seen is None else seen
        layers = []
        for layer in range(self.layers):
            normed = self._norm(x, f"{layer}.input_layernorm")
            q, k, v = (
                self._linear(normed, f"{layer}.self_attn.{word}_proj").reshape(tokens, -1, self.width) for word in "qkv"
            )
            layers.append((k, v))
            keys, values = self.rotate(k, positions), v
            if cache is not None:
                keys, values = (np.concatenate([cache[n][layer], new]) for n, new in (("k", keys), ("v", values)))
            queries = self.rotate(q, positions).reshape(tokens, keys.shape[1], -1, self.width)
            # [K, G·T, S]: the query heads of a KV head follow one another.
            scores = queries.transpose(1, 2, 0, 3).reshape(keys.shape[1], -1, self.width) @ keys.transpose(1, 2, 0)
            scores = scores.reshape(self.heads, tokens, -1) / np.sqrt(np.array(self.width, x.dtype))
            shares = np.where(seen, scores, -np.inf)
            shares = np.exp(shares - shares.max(-1, keepdims=True))
            shares /= shares.sum(-1, keepdims=True)
            read = shares.reshape(keys.shape[1], -1, shares.shape[-1]) @ values.swapaxes(0, 1)
            read = read.reshape(self.heads, tokens, self.width).swapaxes(0, 1).reshape(tokens, -1)
            x = x + self._linear(read, f"{layer}.self_attn.o_proj")

            normed = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = self._linear(normed, f"{layer}.mlp.gate_proj")
            gated = gate / (1 + np.exp(-gate)) * self._linear(normed, f"{layer}.mlp.up_proj")
            x = x + self._linear(gated, f"{layer}.mlp.down_proj")
        return x, {name: np.stack(values) for name, values in zip("kv", zip(*layers, strict=True), strict=True)}

    def log_probabilities(self, x: np.ndarray) -> np.ndarray:
        """Computes the distributions [T, V] of next tokens from what the last layer leaves, in float64."""
        logits = (self._norm(x, "norm") @ self.weights["lm_head.weight"].T).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotates features i and i + H/2 of [..., T, heads, H] by position · theta^(−2i/H), of the axis of i."""
        half = self.width // 2
        axis = np.repeat(np.arange(len(self.sections)), self.sections) if self.sections else np.zeros(half, int)
        places = positions.reshape(len(positions), -1).astype(np.float64)[:, axis]
        angles = (places * self.theta ** (-np.arange(half) / half))[:, None]
        (cos, sin), (first, second) = (f(angles).astype(x.dtype) for f in (np.cos, np.sin)), np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def place(self, kv: KV, positions: np.ndarray) -> KV:
        return {"k": self.rotate(kv["k"], positions), "v": kv["v"]}

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + x.dtype.type(self.epsilon)) * self.weights[f"{name}.weight"]
        )

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", x.dtype.type(0))


def joined(pieces: list[KV]) -> KV:
    """Puts KV behind one another."""
    return {name: np.concatenate([piece[name] for piece in pieces], 1) for name in pieces[0]}


def cut(kv: KV, first: int, last: int | None = None) -> KV:
    return {name: value[:, first:last] for name, value in kv.items()}


def few_bits(x: np.ndarray, bits: int, group: int | None, axis: int, symmetric: bool = False) -> np.ndarray:
    """Rounds numbers to codes of some bits: groups along an axis share a scale and, unless symmetric, a least value.

    Both are bfloat16, rounded so that the group's range holds all of its numbers.
    """
    rows = np.moveaxis(x.astype(np.float32), axis, -1)
    decoded, most = np.empty_like(rows), 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    for first in range(0, rows.shape[-1], group or rows.shape[-1]):
        part = rows[..., first : first + (group or rows.shape[-1])]
        least = np.float32(0) if symmetric else -_bfloat16_above(-part.min(-1, keepdims=True))
        top = np.abs(part).max(-1, keepdims=True) if symmetric else part.max(-1, keepdims=True) - least
        scale = _bfloat16_above(top / np.float32(most))
        codes = np.rint((part - least) / np.where(scale > 0, scale, 1)).clip(-most if symmetric else 0, most)
        decoded[..., first : first + part.shape[-1]] = least + scale * codes
    return np.moveaxis(decoded, -1, axis)


def _bfloat16_above(x: np.ndarray) -> np.ndarray:
    """Rounds to the next bfloat16 that is not below."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.where(x > 0, 0xFFFF, 0).astype(np.uint32)) & np.uint32(0xFFFF0000)).view(np.float32)


def rank_patch(base: KV, conditioned: KV, rank: int, bits: int = 0) -> KV:
    """Adds the first directions of what a base lacks, in each layer and channel; factors in few bits, or exact."""
    patched = {}
    for name, value in base.items():
        deficit = (conditioned[name] - value).astype(np.float64).reshape(*value.shape[:2], -1)
        u, singular, v = np.linalg.svd(deficit, full_matrices=False)
        u = (u * singular[:, None])[..., :rank].swapaxes(1, 2)
        v = v[:, :rank]
        if bits:
            u, v = (few_bits(factor, bits, GROUP, -1, symmetric=True) for factor in (u, v))
        patched[name] = (value + (u.swapaxes(1, 2) @ v).reshape(value.shape)).astype(value.dtype)
    return patched
