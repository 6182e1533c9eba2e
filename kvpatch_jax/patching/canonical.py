"""Chunks and conditioned KV, made with a backbone: units prefilled alone, after a lead, or after other units."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from ..backbone import Backbone, Tokens, check_is_backbone, check_tokens, joined, joined_tokens
from ..cache import Chunk, chunk_id, digest_of, encoded, items_of, one_form
from ..core import AnyArray, EngineKV, PhaseFreeKV, end_position, to_engine
from ..errors import InputError, ShapeError
from ..utils.kinds import expect_kind


def make_chunk(
    backbone: Backbone,
    items: Sequence[Any],
    id: str | None = None,
    *,
    encoder: Num[AnyArray, "n E D"] | None = None,
    keep_encoder: bool = False,
    lead: Sequence[Any] | Tokens | None = None,
) -> Chunk:
    """Prefills one unit alone and returns its position-free KV: the canonical.

    Args:
      items: texts and images as `backbone.prepare` takes them; an image includes its start and end tokens.
      id: the chunk's name, which its patches carry; None: `chunk_id` of the items, as libraries and the linker name the
        same content.
      encoder: the tower's output for these items, as `backbone.encode`, `Chunk.encoder` or a store's `Miss.encoder()`
        gives it; the tower does not run again.
      keep_encoder: leaves the tower's output in the chunk, so that a store keeps it when the KV is evicted.
      lead: what precedes every chunk and never leaves, such as the system prompt, as items or `Tokens`. The unit is
        then prefilled after it, and the lead's digest is part of its content and of its default id.

    Returns:
      A Chunk of one unpadded row, whose content is the items' digest; its positions count from its own start, and its
      span is one more than where they end (`core.end_position`).

    Raises:
      InputError: as `prepare`, and `encoder` of another prompt. NotFiniteError: the forward gave NaN or
      infinity.
    """
    check_is_backbone(backbone, "make_chunk")
    items = [one_form(item) for item in items_of(items, "make_chunk")]
    content = chunk_id(backbone.fingerprint, *items)
    before = None if lead is None else lead_tokens(backbone, lead)
    digest = None if before is None else lead_digest(backbone.fingerprint, before)
    # Another lead gives another canonical, which must not be taken for this one.
    if digest is not None:
        content = digest_of([b"chunk behind a lead", encoded(content), encoded(digest)])

    # The tower runs once at most: its output is passed on where it is given, or is to be kept.
    prompt = backbone.prepare(items)
    if encoder is None and keep_encoder:
        encoder = backbone.encode(**prompt)
    tokens = backbone.embed(**prompt) if encoder is None else backbone.embed(**prompt, features=encoder)
    local = np.asarray(tokens.positions)[0]
    kv = backbone.prefill(tokens).kv if before is None else conditioned(backbone, [tokens], lead=before)[0]
    return Chunk(
        kv={name: value[:, 0] for name, value in kv.items()},
        local=local,
        span=int(end_position(local[None])[0]) + 1,
        length=len(local),
        id=content if id is None else id,
        layout=backbone.layout,
        backbone=backbone.fingerprint,
        encoder=encoder if keep_encoder else None,
        content=content,
        lead=digest,
    )


def lead_digest(backbone: str, tokens: Tokens) -> str:
    """Digests a lead, equally whether it was given as items or as tokens: 32 hexadecimal digits.

    Args:
      backbone: the fingerprint.
      tokens: of the lead, one row.
    """
    # Positions as float32, the form in which chunks keep them.
    deepstack = [] if tokens.deepstack is None else [np.asarray(tokens.deepstack)]
    fields = [b"lead", encoded(backbone), np.asarray(tokens.positions, np.float32).tobytes()]
    for value in (np.asarray(tokens.embeddings), *deepstack):
        fields += [f"{value.dtype} {value.shape}".encode(), value.tobytes()]
    return digest_of(fields, size=16)


def lead_tokens(backbone: Backbone, lead: Sequence[Any] | Tokens) -> Tokens:
    """Embeds a lead, one row; `Tokens` are returned as they are.

    Raises:
      InputError: as `prepare`. ShapeError: no tokens, or not one row.
    """
    tokens = unit_tokens(backbone, lead, "lead")
    if len(tokens.embeddings) != 1:
        raise ShapeError(f"lead: got {len(tokens.embeddings)} rows; expected one, which precedes every chunk")
    return tokens


def conditioned(
    backbone: Backbone, units: Sequence[Sequence[Any] | Tokens], *, lead: Sequence[Any] | Tokens | None = None
) -> list[PhaseFreeKV]:
    """Prefills units one after the other and returns each one's KV, conditioned on the units that precede it.

    `conditioned(backbone, [[a], [b]])[1]` is KV(B|A), of the shape of `make_chunk(backbone, [b])`: what `form_patch`
    takes. Each unit starts where the span of the preceding one ends.

    Args:
      units: each the items of one chunk, as `make_chunk` takes them; or `Tokens` as `embed` gives them, of one
        row or several, with positions from the unit's own start.
      lead: what precedes all of them, as in `make_chunk`, one row; its KV is not returned. `form_patch` of a chunk that
        was made after a lead needs KV that was conditioned on the same lead.

    Returns:
      For each unit {channel: [L, T, K, H]}, phase-free; of `Tokens` {channel: [L, B, T, K, H]}. Of a hybrid model each
      has the transition of its own tokens, so each takes a forward of its own.

    Raises:
      InputError: as `prepare`. ShapeError: unequal numbers of rows. InputError: positions of a unit
      behind others do not begin at 0, as of tokens cut out of a longer prompt.
    """
    check_is_backbone(backbone, "conditioned")
    expect_kind(units, Iterable, "conditioned: units", "a sequence of units, each the items of one chunk")
    embedded = [unit_tokens(backbone, unit) for unit in units]
    if not embedded:
        raise InputError("conditioned: got no units; expected at least one")

    # They are joined along the tokens, so every unit has the same rows.
    rows = len(embedded[0].embeddings)
    for tokens in embedded:
        if len(tokens.embeddings) != rows:
            raise ShapeError(f"conditioned: got {len(tokens.embeddings)} rows; expected {rows} of each")
    for number, tokens in enumerate(embedded[1:], 1):
        first = np.asarray(tokens.positions).min()
        if first >= 1:
            raise InputError(
                f"conditioned: got unit {number} with positions from {first:g}; expected them from its own start, 0"
            )

    # The lead is one row, and precedes each row.
    before = []
    if lead is not None:
        first = lead_tokens(backbone, lead)
        embeddings, deepstack = jnp.repeat(first.embeddings, rows, axis=0), first.deepstack
        if deepstack is not None:
            deepstack = jnp.repeat(deepstack, rows, axis=0)
        ahead = None if first.ahead is None else np.repeat(np.asarray(first.ahead), rows, axis=0)
        before = [Tokens(embeddings, np.repeat(np.asarray(first.positions), rows, axis=0), deepstack, ahead)]

    # Each unit starts where the span of the preceding one ends.
    parts: list[Tokens] = []
    start: np.ndarray | None = None
    for tokens in [*before, *embedded]:
        parts.append(tokens if start is None else tokens.shift(start))
        places = np.asarray(parts[-1].positions)
        last = end_position(places).astype(np.int32) + 1
        # One start for every row, and for every axis where the rope has axes.
        start = last if places.ndim == 2 else np.repeat(last[:, None], places.shape[2], axis=1)

    # The lead's KV is not returned.
    separate = _forward_by_part if backbone.layout.parts else _forward_over_all
    result: list[PhaseFreeKV] = []
    for unit, values in zip(units, separate(backbone, parts)[len(before) :], strict=True):
        single = values if isinstance(unit, Tokens) else {name: value[:, 0] for name, value in values.items()}
        result.append(PhaseFreeKV(single))
    return result


def _forward_over_all(backbone: Backbone, parts: Sequence[Tokens]) -> list[dict[str, Array]]:
    """Runs one forward over tokens that follow each other, and cuts its phase-free KV into theirs."""
    kv, begin, values = backbone.prefill(joined_tokens(parts)).kv, 0, []
    for tokens in parts:
        end = begin + tokens.embeddings.shape[1]
        values.append(backbone.layout.between(kv, begin, end))
        begin = end
    return values


def _forward_by_part(backbone: Backbone, parts: Sequence[Tokens]) -> list[Mapping[str, Array]]:
    """Runs a forward over each tokens behind all that precede them: their phase-free KV, with their own transition."""
    values: list[Mapping[str, Array]] = []
    context: EngineKV | None = None
    for number, tokens in enumerate(parts, 1):
        values.append(backbone.prefill(tokens, context=context).kv)
        # Nothing reads what stands behind the last one.
        if number == len(parts):
            break
        placed = to_engine(backbone.layout, values[-1], jnp.asarray(tokens.positions), 0)
        context = joined(placed) if context is None else joined(context, placed)
    return values


def unit_tokens(backbone: Backbone, unit: Sequence[Any] | Tokens, what: str = "conditioned") -> Tokens:
    """Embeds the items of one unit; `Tokens` are returned as they are. Messages begin with `what`.

    Raises:
      InputError: as `prepare`. ShapeError: tokens without a batch axis, or none.
    """
    tokens = unit if isinstance(unit, Tokens) else backbone.embed(**backbone.prepare(items_of(unit, what)))
    check_tokens(tokens, what)
    return tokens
