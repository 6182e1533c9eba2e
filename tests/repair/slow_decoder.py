"""A decoder in NumPy, float64, one row at a time: what repairs choose is checked against it.

It knows GQA text models with bias and rotary halves, and shares no code with the library.
"""

import numpy as np


class SlowDecoder:
    """Weights of a tiny model, and its layers over tokens [T]."""

    def __init__(self, parameters, config):
        self.layers, text = parameters["decoder"]["layers"], config.text
        self.group, self.width, self.theta = text.heads // text.kv_heads, text.head_dim, text.rope.theta
        self.epsilon = text.norm_epsilon

    def norm(self, layer, name, x):
        weight = np.asarray(self.layers[name]["weight"], np.float64)[layer]
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * weight

    def linear(self, layer, block, name, x):
        node = self.layers[block][name]
        bias = 0.0 if node.get("bias") is None else np.asarray(node["bias"], np.float64)[layer]
        return x @ np.asarray(node["kernel"], np.float64)[layer] + bias

    def rotated(self, x, positions):
        """Rotates [T,N,H] by positions [T]."""
        half = self.width // 2
        angle = positions[:, None, None] * self.theta ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def run(self, residual, positions, slots, keys, values, written, first=0, last=None, seen=None):
        """Runs layers first … last-1 over tokens; at layer l those with written[l] run, and write their KV.

        Args:
          residual: [T,D] entering `first`. positions, slots: [T]. keys, values: [L,S,K,H], changed in place.
          seen: keys that count, [S].

        Returns:
          residual after the last layer; of the tokens that ran, attention {layer: [T,N,S]}, queries {layer: [T,N,H]}.
        """
        maps, queries, residual = {}, {}, residual.copy()
        for layer in range(first, len(keys) if last is None else last):
            alive = np.flatnonzero(written[layer])
            x, places = residual[alive], slots[alive]
            inner = self.norm(layer, "input_norm", x)
            query, key, value = (
                self.linear(layer, "attention", name, inner).reshape(len(alive), -1, self.width)
                for name in ("query", "key", "value")
            )
            keys[layer, places], values[layer, places] = self.rotated(key, positions[alive]), value
            queries[layer] = self.rotated(query, positions[alive])
            maps[layer] = self.attend(queries[layer], keys[layer], places, seen)
            mixed = np.einsum("tns,snh->tnh", maps[layer], np.repeat(values[layer], self.group, axis=1))
            x = x + self.linear(layer, "attention", "output", mixed.reshape(len(alive), -1))
            inner = self.norm(layer, "mlp_norm", x)
            gate, up = self.linear(layer, "mlp", "gate", inner), self.linear(layer, "mlp", "up", inner)
            residual[alive] = x + self.linear(layer, "mlp", "down", gate / (1 + np.exp(-gate)) * up)
        return residual, maps, queries

    def attend(self, queries, keys, places, seen=None):
        """Attention [T,N,S] of queries [T,N,H] over the keys [S,K,H] up to their places [T], of which `seen` count."""
        allowed = np.arange(len(keys)) <= places[:, None]
        allowed = allowed if seen is None else allowed & seen
        scores = np.einsum("tnh,snh->tns", queries, np.repeat(keys, self.group, axis=1)) / np.sqrt(self.width)
        scores = np.where(allowed[:, None], scores, -np.inf)
        raised = np.exp(scores - scores.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)
