"""Costs of what an executor does: tokens, bytes and FLOPs of every action, from static numbers of one backbone."""

import dataclasses
from collections.abc import Iterable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..backbone import Backbone, ForwardCosts
from ..patching.patch_flops import ROTATION, composing_flops
from .entry import PatchNote

ActionKind = Literal["prefill", "question", "rotate", "copy", "patch", "fetch", "compose"]


class Action(NamedTuple):
    """One thing that an executor did.

    Attributes:
      kind: a forward of a piece or of a question; rotation of a piece that moved; placement of a canonical or stored
        prefill, or of a base and a patch; reading from a store; composition of a hybrid's transitions.
      id: of the piece; "" of a question.
      tokens: that were computed, moved or read.
      bytes: of KV, factors and stored objects read and written; weights are not among them.
      flops: of matrix products and rotations.
    """

    kind: ActionKind
    id: str
    tokens: int
    bytes: int
    flops: int


Step = tuple[Action, ...]
"""What one call did, in its order."""


def total(step: Iterable[Action], *kinds: ActionKind) -> tuple[int, int, int]:
    """Sums tokens, bytes and FLOPs of actions, of all kinds if none are named."""
    counted = [action for action in step if not kinds or action.kind in kinds]
    return tuple(sum(action[place] for action in counted) for place in (2, 3, 4))  # pyright: ignore


@dataclasses.dataclass(frozen=True)
class Costs:
    """Static numbers of one backbone, from which costs of actions are computed.

    Attributes:
      kv_bytes: of one token's KV, all layers and channels.
      turning_bytes: of the channels that rotate.
      rotary: numbers of one token's KV, all layers, that a rotation changes.
      forward: FLOPs of forwards.
      state_bytes: of the transition of a piece, whatever its tokens, in a hybrid model; 0 in others.
      composing: FLOPs of composing two of them.
    """

    kv_bytes: int
    turning_bytes: int
    rotary: int
    forward: ForwardCosts
    state_bytes: int = 0
    composing: int = 0

    @classmethod
    def of(cls, backbone: Backbone, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> "Costs":
        """Computes the numbers of a backbone's layout and `forward_costs`.

        Args:
          dtype: of the KV in the pool.
        """
        layout, size = backbone.layout, jnp.dtype(dtype).itemsize
        rotating = [channel for channel in layout.channels if channel.rotates]
        return cls(
            kv_bytes=layout.bytes_per_token(dtype),
            turning_bytes=size * sum(layout.depth(channel.name) * channel.features for channel in rotating),
            rotary=sum(layout.depth(channel.name) * channel.heads * channel.rotary for channel in rotating),
            forward=backbone.forward_costs,
            state_bytes=4 * layout.transition_numbers,
            composing=composing_flops(layout),
        )

    def forward_bytes(self, tokens: int, behind: int) -> int:
        """Returns bytes of KV that a forward reads and writes: of each token, and one transition each."""
        return self.kv_bytes * (tokens + behind) + self.state_bytes * (1 + bool(behind))

    def prefill(self, id: str, tokens: int, behind: int) -> Action:
        """Returns a forward of a piece behind so many tokens, and the logits of its last one; its KV is kept."""
        flops = self.forward.flops(tokens, behind) + self.forward.logit
        return Action("prefill", id, tokens, self.forward_bytes(tokens, behind), flops)

    def question(self, tokens: int, behind: int, logits: int = 1) -> Action:
        """Returns a forward of tokens whose KV is not kept as a piece's."""
        read = self.kv_bytes * behind + (self.state_bytes if behind else 0)
        flops = self.forward.flops(tokens, behind) + logits * self.forward.logit
        return Action("question", "", tokens, read, flops)

    def rotate(self, id: str, tokens: int) -> Action:
        """Returns a rotation of keys in place: rotating channels are read and written, the others stay."""
        return Action("rotate", id, tokens, 2 * self.turning_bytes * tokens, ROTATION * self.rotary * tokens)

    def copy(self, id: str, tokens: int) -> Action:
        """Returns a placement of phase-free KV: all of it read, rotated and written."""
        nbytes = 2 * self.kv_bytes * tokens + 2 * self.state_bytes
        return Action("copy", id, tokens, nbytes, ROTATION * self.rotary * tokens)

    def patch(self, id: str, tokens: int, note: PatchNote) -> Action:
        """Returns a placement with a patch: one pass over the KV, and factors read, multiplied and added."""
        placed = self.copy(id, tokens)
        flops = placed.flops + note.flops * tokens + note.state_flops
        return placed._replace(kind="patch", bytes=placed.bytes + note.nbytes, flops=flops)

    def fetch(self, id: str, tokens: int) -> Action:
        """Returns a reading of a canonical or stored prefill from a store."""
        return Action("fetch", id, tokens, self.kv_bytes * tokens + self.state_bytes, 0)

    def compose(self, id: str, pieces: int) -> Action:
        """Returns a composition of the transitions of so many pieces: all are read, and one is written."""
        nbytes = self.state_bytes * (pieces + 1)
        return Action("compose", id, 0, nbytes, self.composing * max(pieces - 1, 0))
