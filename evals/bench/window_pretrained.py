"""The sliding window on real weights: SmolLM2-135M-Instruct over the standard library's documentation.

A window of W chunks of T tokens; at each step the oldest chunk leaves and a new one is prefilled after those that stay,
which keep their conditioned KV and are only rotated. Then the text's next tokens are read after the window, served by
every arm, against both meanings of a slide:

*forget*: what a prefill of the window as it is now would answer. *remember*: the model's answer over the whole history
where every chunk sees itself, the W − 1 chunks in front of it and the lead: one forward under a chunk-banded mask.

34 streams of 6 steps each, with a pinned lead and without: 204 scored windows either way, intervals over streams. Parts
of a few streams are kept as JSON lines: the same command resumes after them.

Axis letters: B streams, T tokens of a chunk, S keys, L layers, K KV heads, H head width, V vocabulary.
"""

import dataclasses
import hashlib
import itertools
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.patching import one_behind_the_other
from models import load

from ..arms.reused_page import cut
from ..harness import intervals
from ..harness.environment import environment
from ..harness.frame import measured_row as interval_row
from ..harness.frame import without_nan
from ..harness.parts import add_part, finished_parts
from ..pretrained.passages import scores
from ..real_weights import checkpoint as find_checkpoint
from ..texts.corpus import LIBRARY, documentation, library_modules
from .banded_mask import banded_mask, history
from .benchmark import Benchmark, Row, measured_row

LEAD = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
"""What precedes every window: SmolLM2's own system turn."""
LICENCE = "documentation strings of Python's standard library, Python Software Foundation License Version 2"
STREAMS, ROWS = 34, 2
PARTS = "window_pretrained.jsonl"
METRICS = ("kl", "flips", "loss")
REMEMBER_BAR, FORGET_BAR = 1e-4, 0.03
"""Nats: kept survivors against the banded mask, in every window; after a lead against re-prefill, on average."""
KV = Mapping[str, Array]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SlideSizes:
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


class TextSlides:
    """Streams that slide in step.

    Args:
      backbone: whose forward and layout are used.
      streams: token ids; what the window slides over.
      lead: token ids that precede every window and never leave; none for an empty one.
      sizes: of the trial.
    """

    def __init__(self, backbone: Any, streams: Int[np.ndarray, "B N"], lead: Int[np.ndarray, " n"], sizes: SlideSizes):
        self.backbone, self.sizes, self.rows = backbone, sizes, len(streams)
        self.ids, self.lead = np.asarray(streams), len(lead)
        self.text = backbone.embed(self.ids)
        self.lead_tokens: Tokens | None = None
        self.lead_kv: list[KV] = []
        if self.lead:
            self.lead_tokens = backbone.embed(np.repeat(np.asarray(lead)[None], self.rows, axis=0))
            self.lead_kv = [backbone.prefill(self.lead_tokens).kv]

    def run(self) -> Iterator[Record]:
        """Slides once through the streams; yields a record per stream, step, arm and reference."""
        sizes = self.sizes
        remembered = self._remember()
        alone = self._canonicals([])
        after_lead = self._canonicals(self.lead_kv) if self.lead else alone
        conditioned = self._window_chunks(self._forget(0)[1])

        for step in range(1, sizes.steps + 1):
            # The oldest chunk leaves, and the new one is prefilled behind those that stay.
            conditioned = [*conditioned[1:], self._append(conditioned[1:], step)]
            forgotten, whole = self._forget(step)
            kept, promised = self._read(self._context(conditioned), step), remembered[step - 1]
            yield from self._records("re-prefill", "forget", step, forgotten, forgotten)
            yield from self._records("re-prefill", "remember", step, promised, forgotten)
            yield from self._records("kept", "remember", step, promised, kept)
            yield from self._records("kept", "forget", step, forgotten, kept)

            window = slice(step, step + sizes.window)
            target = self._window_chunks(whole)
            for arm, context in self._approximations(alone[window], after_lead[window], conditioned, target):
                yield from self._records(arm, "forget", step, forgotten, self._read(context, step))

    def _approximations(
        self, alone: Sequence[KV], after_lead: Sequence[KV], kept: Sequence[KV], target: Sequence[KV]
    ) -> Iterator[tuple[str, KV]]:
        """Yields the contexts that approximate a re-prefill whatever the window promises, by arm.

        Args:
          alone, after_lead: canonicals formed alone, and after the lead.
          kept: the survivors.
          target: re-prefill's KV.
        """
        yield "kept, first chunk canonical", self._context([alone[0], *kept[1:]])
        yield "blind", self._context(alone)
        if self.lead:
            yield "canonicals behind the lead", self._context(after_lead)

        # The window's chunks are one batch of canonicals, patched together.
        sizes, antecedent, gone = self.sizes, ["in", "front"], [f"was {place}" for place in range(self.sizes.window)]
        chunk = kvp.Chunk(
            kv=_stacked(alone),
            local=np.arange(sizes.chunk, dtype=np.float32),
            span=sizes.chunk,
            length=sizes.chunk,
            id="window",
            layout=self.backbone.layout,
            backbone=self.backbone.fingerprint,
        )
        places = self.lead + sizes.chunk * np.arange(sizes.window, dtype=np.int32)
        starts = np.tile(places, self.rows)
        patch = kvp.form_patch(chunk, _stacked(target), max(sizes.ranks), antecedent, dense=False)
        for rank in sizes.ranks:
            served = kvp.apply_patch(kvp.Placed(chunk, kvp.truncate(patch, rank), starts, antecedent))
            yield f"canonical, patch of rank {rank}", self._unstacked(served)

        base = _stacked(kept)
        patch = kvp.removal_patch(chunk, _stacked(target), base, max(sizes.removal_ranks), antecedent, gone)
        for rank in sizes.removal_ranks:
            smaller = kvp.truncate(patch, {name: rank for name, whole in patch.ranks.items() if whole is not None})
            served = kvp.apply_patch(kvp.Placed(chunk, smaller, starts, antecedent, base=base, base_antecedent=gone))
            yield f"kept, removal patch of rank {rank}", self._unstacked(served)

    # ---------------------------------------------------------------------------------------------- forwards

    def _forget(self, step: int) -> tuple[Float[Array, "B n V"], KV]:
        """Prefills lead, window and scored tokens of a step in one: the scored tokens' logits, and all KV."""
        sizes, length = self.sizes, self.lead + self.sizes.window * self.sizes.chunk
        first = step * sizes.chunk
        parts = [self._take(first, first + sizes.window * sizes.chunk + sizes.scored, self.lead)]
        if self.lead_tokens is not None:
            parts.insert(0, self.lead_tokens)
        scored = np.repeat(np.arange(length, length + sizes.scored)[None], self.rows, axis=0)
        out = self.backbone.prefill(one_behind_the_other(parts), logits=scored)
        return out.logits, out.kv

    def _append(self, survivors: Sequence[KV], step: int) -> KV:
        """Prefills a step's new chunk after the survivors: its conditioned KV."""
        sizes = self.sizes
        place = (sizes.window - 1) * sizes.chunk
        first = step * sizes.chunk + place
        tokens = self._take(first, first + sizes.chunk, self.lead + place)
        return self.backbone.prefill(tokens, context=self._context(survivors)).kv

    def _read(self, context: KV, step: int) -> Float[Array, "B n V"]:
        """Reads the text's next tokens after a context: their logits."""
        sizes = self.sizes
        first, place = (step + sizes.window) * sizes.chunk, self.lead + sizes.window * sizes.chunk
        tokens = self._take(first, first + sizes.scored, place)
        return self.backbone.prefill(tokens, context=context, logits="all").logits

    def _remember(self) -> list[Float[Array, "B n V"]]:
        """Runs the whole history under the chunk-banded mask, once for all steps: each one's scored tokens' logits."""
        sizes = self.sizes
        asked = [sizes.window + step for step in range(sizes.steps)]
        segments = history([sizes.chunk] * sizes.chunks, sizes.window, self.lead, asked)
        counts = {"lead": self.lead, "chunk": sizes.chunk, "question": sizes.scored}
        mask = banded_mask(segments, [counts[segment.kind] for segment in segments])

        parts = []
        for segment in segments:
            if segment.kind == "lead":
                assert self.lead_tokens is not None
                positions = np.asarray(self.lead_tokens.positions) + segment.start
                parts.append(self.lead_tokens._replace(positions=positions))
            else:
                first = (segment.index + (segment.kind == "question")) * sizes.chunk
                parts.append(self._take(first, first + counts[segment.kind], segment.start))

        total, scored = len(mask), sizes.steps * sizes.scored
        rows = np.repeat(np.arange(total - scored, total)[None], self.rows, axis=0)
        masks = jnp.broadcast_to(jnp.asarray(mask)[None, None], (self.rows, 1, total, total))
        logits = self.backbone.prefill(one_behind_the_other(parts), mask=masks, logits=rows).logits
        return [logits[:, step * sizes.scored :][:, : sizes.scored] for step in range(sizes.steps)]

    def _canonicals(self, lead: Sequence[KV]) -> list[KV]:
        """Prefills every chunk alone, or after the lead alone: its KV, phase-free."""
        sizes, canonicals = self.sizes, []
        context = self._engine(lead[0]) if lead else None
        for place in range(sizes.chunks):
            tokens = self._take(place * sizes.chunk, (place + 1) * sizes.chunk, self.lead if lead else 0)
            canonicals.append(self.backbone.prefill(tokens, context=context).kv)
        return canonicals

    # ---------------------------------------------------------------------------------------------- contexts

    def _take(self, first: int, stop: int, start: int) -> Tokens:
        """Returns the streams' tokens first … stop-1, placed at `start`."""
        positions = np.repeat(np.arange(start, start + stop - first, dtype=np.int32)[None], self.rows, axis=0)
        return self.text.take(first, stop)._replace(positions=positions)

    def _window_chunks(self, kv: KV) -> list[KV]:
        """Cuts the window's chunks from KV of lead and window."""
        size = self.sizes.chunk
        edges = self.lead + size * np.arange(self.sizes.window + 1)
        return [cut(kv, slice(int(first), int(last))) for first, last in itertools.pairwise(edges)]

    def _engine(self, kv: KV) -> KV:
        """Rotates phase-free KV to the positions from 0 on."""
        length = next(iter(kv.values())).shape[2]
        return kvp.to_engine(self.backbone.layout, kv, np.arange(length, dtype=np.int32), 0)

    def _context(self, pieces: Sequence[KV]) -> KV:
        """Joins the lead and pieces of phase-free KV."""
        parts = [*self.lead_kv, *pieces]
        return self._engine({name: jnp.concatenate([part[name] for part in parts], axis=2) for name in parts[0]})

    def _unstacked(self, served: KV) -> KV:
        """Lays a batch of the window's chunks in the engine frame (see `_stacked`) out after the lead."""
        size = self.sizes.window
        pieces = [{name: value[:, place::size] for name, value in served.items()} for place in range(size)]
        return kvp.joined(*map(self._engine, self.lead_kv), *pieces)

    def _records(self, arm: str, against: str, step: int, reference: Array, logits: Array) -> Iterator[Record]:
        """Yields records of one arm, per stream: KL(reference‖arm) in nats, share of flipped best tokens, loss."""
        first = (step + self.sizes.window) * self.sizes.chunk
        ids = self.ids[:, first : first + self.sizes.scored]
        for row, numbers in enumerate(scores(reference, logits, ids)):
            yield {"row": row, "step": step, "arm": arm, "against": against, **numbers}


def _stacked(pieces: Sequence[KV]) -> KV:
    """Stacks pieces [L,B,T,K,H] to a batch of chunks [L,B·n,T,K,H], a stream's pieces next to each other."""
    stacked = {}
    for name, first in pieces[0].items():
        value = jnp.stack([piece[name] for piece in pieces], axis=2)
        stacked[name] = value.reshape(first.shape[0], -1, *first.shape[2:])
    return stacked


# ------------------------------------------------------------------------------------------------------------- run


def run(
    *, out: str | None = None, checkpoint: str | None = None, parts: int = 0, quick: bool = False
) -> dict[str, Any]:
    """Measures what is missing and makes rows of all that was measured.

    Args:
      out: folder of the finished parts, which the run resumes; None keeps nothing.
      checkpoint: a file in place of SmolLM2's weights.
      parts: at most so many parts now (of 34, one or two minutes each); 0 for all.
      quick: two streams of two steps: a preview, not a measurement.

    Raises:
      ConfigError: no weights. InputError: the file in `out` is of another trial, text or model, or `out` is a file.
    """
    file = find_checkpoint(checkpoint)
    backbone = load(file, dtype="float32", angles="float32")
    sizes, count = (SlideSizes(steps=2), 2) if quick else (SlideSizes(), STREAMS)
    lead = np.asarray(backbone.prepare([LEAD])["input_ids"])[0]
    streams = library_streams(backbone, count, sizes.tokens)
    config = {
        "trial": dataclasses.asdict(sizes),
        "streams": count,
        "rows": min(ROWS, count),
        "lead": len(lead),
        "text": LICENCE,
        "text_digest": digest(streams),
        "python": platform.python_version(),
        "model": file.stem,
        "fingerprint": backbone.fingerprint,
    }
    config = json.loads(json.dumps(config))
    records = measure(backbone, streams, lead, sizes, config, None if out is None else Path(out), parts)
    return {"config": config, "environment": environment(), **summary(records, config)}


def measure(
    backbone: Any,
    streams: Mapping[str, np.ndarray],
    lead: np.ndarray,
    sizes: SlideSizes,
    config: dict[str, Any],
    folder: Path | None,
    limit: int,
) -> list[Record]:
    """Returns all records: those of parts that the folder has, and of at most `limit` further ones."""
    finished = [] if folder is None else finished_parts(folder / PARTS, config)
    records = list(itertools.chain.from_iterable(part["records"] for part in finished))
    done = {tuple(part["part"]) for part in finished}
    names, rows = list(streams), config["rows"]
    parts = itertools.product(range(0, len(names), rows), ("pinned lead", "no lead"))
    todo = [(front, first) for first, front in parts if (front, first) not in done]

    for front, first in todo[: limit or None]:
        chosen = names[first : first + rows]
        ids = np.stack([streams[name] for name in chosen])
        measured = []
        for record in TextSlides(backbone, ids, lead if front != "no lead" else lead[:0], sizes).run():
            measured.append({"front": front, "first": first, "stream": chosen[record.pop("row")], **record})

        records += measured
        if folder is not None:
            add_part(folder / PARTS, {"part": [front, first], "records": measured})
        print(f"{front}, streams {first} to {first + len(chosen) - 1}", flush=True)

    return records


def summary(records: Sequence[Record], config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes rows with intervals over streams, and rows of the bars."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["front"], record["arm"], record["against"]), []).append(record)

    rows: list[Row] = []
    judged: list[Row] = []
    for (front, arm, against), group in groups.items():
        probe, cluster = f"window, {front}, {against}", np.array([record["stream"] for record in group])
        for metric in METRICS:
            values = np.array([record[metric] for record in group])
            row = interval_row(probe, config["model"], arm, metric, intervals.mean(values, cluster))
            rows.append(row | {"largest": float(values.max())})

        labels: dict[str, Any] = {"probe": probe, "arm": arm}
        kl = [record["kl"] for record in group]
        if (arm, against) == ("kept", "remember"):
            judged.append(measured_row("largest KL", kl, at_most=REMEMBER_BAR, statistic=max, **labels))
        if (front, arm, against) == ("pinned lead", "kept", "forget"):
            mean = float(np.mean(kl))
            judged.append(measured_row("mean KL", kl, at_most=FORGET_BAR, value=mean, **labels))

    return {"rows": [*without_nan(rows), *judged]}


def library_streams(backbone: Any, count: int, tokens: int) -> dict[str, np.ndarray]:
    """Cuts a stream of token ids from each of the first modules of the standard library with enough documentation.

    Args:
      backbone: whose tokenizer reads the text.
      count: streams.
      tokens: of each.

    Returns:
      {module's path below the library's folder: int32 [tokens]}.

    Raises:
      ValueError: fewer modules than `count` have so many tokens.
    """
    streams: dict[str, np.ndarray] = {}
    for path in library_modules():
        text = documentation(path)
        if len(text) < 2 * tokens:  # no tokenizer makes a token of fewer than two characters of prose
            continue

        ids = np.asarray(backbone.prepare([text])["input_ids"])[0]
        if len(ids) >= tokens:
            streams[str(path.relative_to(LIBRARY))] = ids[:tokens].astype(np.int32)
        if len(streams) == count:
            return streams

    raise ValueError(f"text: got {len(streams)} modules below {LIBRARY} with {tokens} tokens; expected {count}")


def digest(streams: Mapping[str, np.ndarray]) -> str:
    """Digests names and tokens, which identify the text: 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for name, ids in streams.items():
        total.update(name.encode() + b"\0" + np.ascontiguousarray(ids, np.int32).tobytes())
    return total.hexdigest()


BENCHMARK = Benchmark("window_pretrained", run, ("probe", "arm"))
