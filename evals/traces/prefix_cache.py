"""What the replays need of tokens, canonicals and an engine's prefix cache."""

import hashlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from models import ModelBackbone

BLOCK = 16
"""Tokens of a block of the prefix cache."""
Logits = Float[np.ndarray, " V"]


class PrefixCache:
    """Blocks of prompts that were computed before: by a digest of all tokens up to their end, as engines have it."""

    def __init__(self, block: int = BLOCK):
        """Holds nothing yet, and evicts nothing: no cache hits more often."""
        self.block = block
        self._known: set[bytes] = set()

    def hit(self, prompt: Sequence[tuple[str, int]]) -> int:
        """Counts the leading tokens that need not be run, and stores the prompt. The last token always runs.

        Args:
          prompt: identifies its tokens: here each piece's name and the token's number in it.
        """
        chain, hit, unbroken = hashlib.blake2b(digest_size=16), 0, True
        for end in range(self.block, len(prompt) + 1, self.block):
            chain.update(repr(prompt[end - self.block : end]).encode())
            known = chain.digest() in self._known
            unbroken = unbroken and known
            hit = end if unbroken else hit
            self._known.add(chain.digest())
        return min(hit, (len(prompt) - 1) // self.block * self.block)


def canonical_of(backbone: ModelBackbone, tokens: Tokens, id: str) -> kvp.Chunk:
    """Prefills tokens alone: their canonical, whose content is its id."""
    return kvp.Chunk(
        kv={name: value[:, 0] for name, value in backbone.prefill(tokens).kv.items()},
        local=np.asarray(tokens.positions)[0],
        span=span(tokens),
        length=length_of(tokens),
        id=id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        content=id,
    )


def divergence(reference: Logits, logits: Logits) -> tuple[float, bool]:
    """Returns KL(reference‖logits) in nats, computed in float64, and whether the most likely token differs."""
    true, own = _log_softmax(reference), _log_softmax(logits)
    return float((np.exp(true) * (true - own)).sum()), bool(reference.argmax() != logits.argmax())


def _log_softmax(logits: Logits) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def text_tokens(backbone: ModelBackbone, ids: np.ndarray) -> Tokens:
    """Embeds ids at positions from 0, on every axis where the rope has axes."""
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    if backbone.layout.rope.axes is not None:
        positions = np.repeat(positions[..., None], backbone.layout.rope.axes, axis=2)
    return backbone.embed(ids, positions)


def length_of(tokens: Tokens) -> int:
    """Counts tokens."""
    return tokens.embeddings.shape[1]


def span(tokens: Tokens) -> int:
    """Returns how far tokens at positions from 0 move what follows."""
    return int(np.asarray(tokens.positions).max()) + 1
