"""A decoder in NumPy loops, float64, one row at a time: what repairs choose is checked against it.

It knows GQA text models with bias and rotary halves, and shares no code with the library.
"""

import numpy as np


class SlowDecoder:
    """Weights of a tiny model, and its layers one token after another."""

    def __init__(self, parameters, config):
        self.layers, text = parameters["decoder"]["layers"], config.text
        self.heads, self.kv_heads, self.width, self.theta = text.heads, text.kv_heads, text.head_dim, text.rope.theta
        self.epsilon = text.norm_epsilon

    def weight(self, layer, *path):
        result = self.layers
        for name in path:
            result = result[name]
        return np.asarray(result, np.float64)[layer]

    def norm(self, layer, name, x):
        scaled = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return scaled * self.weight(layer, name, "weight")

    def linear(self, layer, path, x):
        result = x @ self.weight(layer, *path, "kernel")
        node = self.layers
        for name in path:
            node = node[name]
        return result + self.weight(layer, *path, "bias") if node.get("bias") is not None else result

    def rotated(self, x, position):
        """Rotates [n, H] by one position."""
        half = self.width // 2
        angle = position * self.theta ** (-np.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], axis=1
        )

    def project(self, layer, x, position):
        """One token's rotated query [N,H], rotated key [K,H] and value [K,H]."""
        inner = self.norm(layer, "input_norm", x)
        query, key, value = (
            self.linear(layer, ("attention", name), inner).reshape(-1, self.width) for name in ("query", "key", "value")
        )
        return self.rotated(query, position), self.rotated(key, position), value

    def run(self, residual, positions, slots, keys, values, written, first=0, last=None, seen=None):
        """Runs layers first … last-1 over tokens; at layer l those with written[l] run, and write their KV.

        Args:
          residual: {token: [D]} entering `first`. keys, values: [L,S,K,H], changed in place.
          seen: keys that count, [S].

        Returns:
          residual after the last layer, and attention {layer: {token: [N,S]}} with its queries {layer: {token: [N,H]}}.
        """
        last = len(keys) if last is None else last
        maps, queries = {}, {}
        for layer in range(first, last):
            alive = [token for token in residual if written[layer][token]]
            projected = {token: self.project(layer, residual[token], positions[token]) for token in alive}
            for token in alive:
                keys[layer, slots[token]], values[layer, slots[token]] = projected[token][1:]
            maps[layer] = {token: self.attend(projected[token][0], keys[layer], slots[token], seen) for token in alive}
            queries[layer] = {token: projected[token][0] for token in alive}
            after = {}
            for token in alive:
                weights = maps[layer][token]
                group = self.heads // self.kv_heads
                mixed = np.concatenate([weights[n] @ values[layer][:, n // group] for n in range(self.heads)])
                x = residual[token] + self.linear(layer, ("attention", "output"), mixed)
                inner = self.norm(layer, "mlp_norm", x)
                gate, up = self.linear(layer, ("mlp", "gate"), inner), self.linear(layer, ("mlp", "up"), inner)
                after[token] = x + self.linear(layer, ("mlp", "down"), gate / (1 + np.exp(-gate)) * up)
            residual = after
        return residual, maps, queries

    def attend(self, query, keys, place, seen=None):
        """Attention [N,S] of one query over the keys up to its place, of which `seen` count."""
        group, weights = self.heads // self.kv_heads, np.zeros((self.heads, len(keys)))
        allowed = np.arange(len(keys)) <= place
        allowed = allowed if seen is None else allowed & seen
        for n in range(self.heads):
            scores = keys[:, n // group] @ query[n] / np.sqrt(self.width)
            scores = np.where(allowed, scores, -np.inf)
            raised = np.exp(scores - scores.max())
            weights[n] = raised / raised.sum()
        return weights
