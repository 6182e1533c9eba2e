"""A window that slides over text, served in every way that there is, against both meanings of a slide.

A window of W chunks of T tokens; at each step the oldest chunk leaves and a new one is prefilled behind those that
stay, which keep their conditioned KV and are only rotated. Then the text's next tokens are read behind the window.

*forget*: what a prefill of the window as it stands would say. *remember*: what the model says over the whole history
where every chunk sees itself, the W − 1 chunks in front of it and the lead: one forward under a chunk-banded mask.

Axis letters: B streams, T tokens of a chunk, S keys, L layers, K KV heads, H head width, V vocabulary.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.patching import one_behind_the_other

from .window_oracle import Segment, banded_mask, history

KV = Mapping[str, Array]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Trial:
    """Sizes of a trial, in tokens, chunks and steps; ranks of patches on canonicals and of removal patches."""

    chunk: int = 96
    window: int = 6
    steps: int = 6
    scored: int = 24
    ranks: tuple[int, ...] = (8, 16, 32)
    removal_ranks: tuple[int, ...] = (8, 16)

    @property
    def chunks(self) -> int:
        """Chunks of a stream."""
        return self.window + self.steps

    @property
    def tokens(self) -> int:
        """Tokens of a stream."""
        return self.chunks * self.chunk + self.scored


class Slides:
    """Streams in step through one trial.

    Args:
      backbone: whose forward and layout are used.
      streams: token ids; what the window slides over.
      lead: token ids that stand in front of every window and never leave; none for an empty one.
      trial: sizes.
    """

    def __init__(self, backbone: Any, streams: Int[np.ndarray, "B N"], lead: Int[np.ndarray, " n"], trial: Trial):
        self.backbone, self.trial, self.rows = backbone, trial, len(streams)
        self.ids, self.lead = np.asarray(streams), len(lead)
        self.text = backbone.embed(self.ids)
        self.front: Tokens | None = None
        self.lead_kv: KV | None = None
        if self.lead:
            self.front = backbone.embed(np.repeat(np.asarray(lead)[None], self.rows, axis=0))
            self.lead_kv = backbone.prefill(self.front).kv

    def run(self) -> Iterator[Record]:
        """Slides once through the streams; a record per stream, step, arm and reference."""
        trial = self.trial
        remembered = self.remember()
        alone = self.canonicals(None)
        behind = self.canonicals(self.lead_kv) if self.lead else alone
        filled = self.forget(0)[1]
        conditioned = [cut(filled, self.lead + place * trial.chunk, trial.chunk) for place in range(trial.window)]

        for step in range(1, trial.steps + 1):
            began = time.process_time()
            conditioned = [*conditioned[1:], self.append(conditioned[1:], step)]
            spent = time.process_time() - began

            began = time.process_time()
            logits, whole = self.forget(step)
            jax.block_until_ready(whole)
            yield {"step": step, "append_seconds": spent, "forget_seconds": time.process_time() - began}

            here = slice(step, step + trial.window)
            target = [cut(whole, self.lead + place * trial.chunk, trial.chunk) for place in range(trial.window)]
            yield from self.compared("re-prefill", "forget", step, logits, logits)
            yield from self.compared("re-prefill", "remember", step, remembered[step - 1], logits)
            kept = self.read(self.context(conditioned), step)
            yield from self.compared("kept", "remember", step, remembered[step - 1], kept)
            yield from self.compared("kept", "forget", step, logits, kept)
            for arm, context in self.other_arms(alone[here], behind[here], conditioned, target):
                yield from self.compared(arm, "forget", step, logits, self.read(context, step))

    def other_arms(
        self, alone: Sequence[KV], behind: Sequence[KV], kept: Sequence[KV], target: Sequence[KV]
    ) -> Iterator[tuple[str, KV]]:
        """The contexts that are approximations of a re-prefill whatever the window promises, by name.

        Args:
          alone, behind: canonicals formed alone, and behind the lead. kept: the survivors. target: re-prefill's KV.
        """
        yield "kept, first chunk canonical", self.context([alone[0], *kept[1:]])
        yield "blind", self.context(alone)
        if self.lead:
            yield "canonicals behind the lead", self.context(behind)

        ids, more = ["in", "front"], [f"was {place}" for place in range(self.trial.window)]
        chunk, base = self.as_chunk(alone), together(kept)
        patch = kvp.form_patch(chunk, together(target), max(self.trial.ranks), ids, dense=False)
        for rank in self.trial.ranks:
            served = kvp.apply_patch(kvp.Placed(chunk, kvp.truncate(patch, rank), self.starts(), ids))
            yield f"canonical, patch of rank {rank}", self.laid_out(served)

        patch = kvp.removal_patch(chunk, together(target), base, max(self.trial.removal_ranks), ids, more)
        for rank in self.trial.removal_ranks:
            smaller = kvp.truncate(patch, {name: rank for name, have in patch.ranks.items() if have is not None})
            served = kvp.apply_patch(kvp.Placed(chunk, smaller, self.starts(), ids, base=base, base_antecedent=more))
            yield f"kept, removal patch of rank {rank}", self.laid_out(served)

    # ---------------------------------------------------------------------------------------------- forwards

    def forget(self, step: int) -> tuple[Float[Array, "B n V"], KV]:
        """Prefills lead, window and scored tokens of a step in one: the scored tokens' logits, and everybody's KV."""
        trial, length = self.trial, self.lead + self.trial.window * self.trial.chunk
        first = step * trial.chunk
        parts = [self.take(first, first + trial.window * trial.chunk + trial.scored, self.lead)]
        if self.front is not None:
            parts.insert(0, self.front)
        rows = np.repeat(np.arange(length, length + trial.scored)[None], self.rows, axis=0)
        out = self.backbone.prefill(one_behind_the_other(parts), logits=rows)
        return out.logits, out.kv

    def append(self, survivors: Sequence[KV], step: int) -> KV:
        """Prefills a step's new chunk behind the survivors: its conditioned KV."""
        trial = self.trial
        place = (trial.window - 1) * trial.chunk
        first = step * trial.chunk + place
        tokens = self.take(first, first + trial.chunk, self.lead + place)
        return jax.block_until_ready(self.backbone.prefill(tokens, context=self.context(survivors)).kv)

    def read(self, context: KV, step: int) -> Float[Array, "B n V"]:
        """Reads the text's next tokens behind a context: their logits."""
        trial = self.trial
        first, place = (step + trial.window) * trial.chunk, self.lead + trial.window * trial.chunk
        tokens = self.take(first, first + trial.scored, place)
        return self.backbone.prefill(tokens, context=context, logits="all").logits

    def remember(self) -> list[Float[Array, "B n V"]]:
        """Runs the whole history under the chunk-banded mask, once for all steps: each one's scored tokens' logits."""
        trial = self.trial
        asked = [trial.window + step for step in range(trial.steps)]
        segments = history([trial.chunk] * trial.chunks, trial.window, self.lead, asked)
        counts = {"lead": self.lead, "chunk": trial.chunk, "question": trial.scored}
        mask = banded_mask(segments, [counts[segment.kind] for segment in segments])
        parts = [self.segment(segment) for segment in segments]
        total, scored = len(mask), trial.steps * trial.scored
        rows = np.repeat(np.arange(total - scored, total)[None], self.rows, axis=0)
        whole = jnp.broadcast_to(jnp.asarray(mask)[None, None], (self.rows, 1, total, total))
        logits = self.backbone.prefill(one_behind_the_other(parts), mask=whole, logits=rows).logits
        return [logits[:, step * trial.scored :][:, : trial.scored] for step in range(trial.steps)]

    def segment(self, segment: Segment) -> Tokens:
        """The tokens of a segment of the history, placed."""
        size = self.trial.chunk
        if segment.kind == "chunk":
            return self.take(segment.index * size, (segment.index + 1) * size, segment.start)
        if segment.kind == "question":
            first = (segment.index + 1) * size
            return self.take(first, first + self.trial.scored, segment.start)
        assert self.front is not None
        return self.front._replace(positions=np.asarray(self.front.positions) + segment.start)

    def canonicals(self, lead: KV | None) -> list[KV]:
        """Prefills every chunk alone, or behind the lead alone: its KV, phase-free."""
        trial, found = self.trial, []
        for place in range(trial.chunks):
            tokens = self.take(place * trial.chunk, (place + 1) * trial.chunk, 0 if lead is None else self.lead)
            context = None if lead is None else self.engine(lead)
            found.append(self.backbone.prefill(tokens, context=context).kv)
        return found

    # ---------------------------------------------------------------------------------------------- contexts

    def take(self, first: int, stop: int, start: int) -> Tokens:
        """The streams' tokens first … stop-1, placed at `start`."""
        positions = np.repeat(np.arange(start, start + stop - first, dtype=np.int32)[None], self.rows, axis=0)
        return self.text.take(first, stop)._replace(positions=positions)

    def engine(self, kv: KV) -> KV:
        """KV that stands from position 0 on, turned to its place."""
        length = next(iter(kv.values())).shape[2]
        return kvp.to_engine(self.backbone.layout, kv, np.arange(length, dtype=np.int32), 0)

    def context(self, pieces: Sequence[KV]) -> KV:
        """The lead and pieces of phase-free KV, one behind the other."""
        parts = [*([] if self.lead_kv is None else [self.lead_kv]), *pieces]
        return self.engine({name: jnp.concatenate([part[name] for part in parts], axis=2) for name in parts[0]})

    def laid_out(self, served: KV) -> KV:
        """A batch of the window's chunks in the engine frame, as `together` has them, behind the lead."""
        size = self.trial.window
        pieces = [{name: value[:, place::size] for name, value in served.items()} for place in range(size)]
        return kvp.joined(*([] if self.lead_kv is None else [self.engine(self.lead_kv)]), *pieces)

    def as_chunk(self, canonicals: Sequence[KV]) -> kvp.Chunk:
        """The window's canonicals as one batch of chunks."""
        size = self.trial.chunk
        kv = together(canonicals)
        more = {"layout": self.backbone.layout, "backbone": self.backbone.fingerprint}
        return kvp.Chunk(kv=kv, local=np.arange(size, dtype=np.float32), span=size, length=size, id="window", **more)

    def starts(self) -> Int[np.ndarray, " n"]:
        """Where each chunk of `together` is placed."""
        places = self.lead + self.trial.chunk * np.arange(self.trial.window, dtype=np.int32)
        return np.tile(places, self.rows)

    def compared(self, arm: str, against: str, step: int, reference: Array, logits: Array) -> Iterator[Record]:
        """Records of one arm: KL(reference‖arm) in nats, share of flipped best tokens, loss on the text; per stream."""
        first = (step + self.trial.window) * self.trial.chunk
        following = jnp.asarray(self.ids[:, first + 1 : first + self.trial.scored])
        kl, flips, loss = (np.asarray(value) for value in compare(reference, logits, following))
        for row in range(self.rows):
            numbers = {"kl": float(kl[row]), "flips": float(flips[row]), "loss": float(loss[row])}
            yield {"row": row, "step": step, "arm": arm, "against": against, **numbers}


@jax.jit
def compare(
    reference: Float[Array, "B n V"], logits: Float[Array, "B n V"], following: Int[Array, "B m"]
) -> tuple[Float[Array, " B"], Float[Array, " B"], Float[Array, " B"]]:
    """Means over the n tokens of a stream: KL(reference‖logits), flips, and the loss on the m tokens behind them."""
    own, true = jax.nn.log_softmax(logits), jax.nn.log_softmax(reference)
    kl = (jnp.exp(true) * (true - own)).sum(-1).mean(-1)
    flips = (reference.argmax(-1) != logits.argmax(-1)).mean(-1)
    said = jnp.take_along_axis(own[:, : following.shape[1]], following[..., None], axis=-1)[..., 0]
    return kl, flips, -said.mean(-1)


def cut(kv: KV, start: int, count: int) -> KV:
    """The tokens start … start+count-1 of KV [L,B,T,K,H]."""
    return {name: value[:, :, start : start + count] for name, value in kv.items()}


def together(pieces: Sequence[KV]) -> KV:
    """Stacks pieces [L,B,T,K,H] to a batch of chunks [L,B·n,T,K,H], a stream's pieces one behind the other."""
    return {
        name: jnp.stack([piece[name] for piece in pieces], axis=2).reshape(
            pieces[0][name].shape[0], -1, *pieces[0][name].shape[2:]
        )
        for name in pieces[0]
    }
