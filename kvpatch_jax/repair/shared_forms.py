"""Forms that one copy serves many antecedents with, or that keep a chunk together with its antecedent.

Bytes that are kept once for all antecedents are in `RepairBytes.shared`, and a budget bounds them.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..backbone import KV, Backbone
from ..core import to_engine, to_phase_free
from ..core.few_bits import BITS
from ..errors import InputError
from .repair_budget import RepairBudget
from .spliced_cache import (
    AnyArray,
    RepairBytes,
    Repaired,
    SplicedCache,
    pooled_embedding,
    recorded_of,
    required,
    rotation_flops,
    with_flops,
    write_slots,
)
from .stored_kv import (
    WHOLE,
    KVPrecision,
    Precision,
    allowed_bytes,
    decode_kv_rows,
    encode_kv_rows,
    most_bits,
    others_of,
    phase_free_written,
    stored_base,
)


def anchored(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    precision: Precision = WHOLE,
    encoding: Precision | None = WHOLE,
    temperature: float | int = 1.0,
    embedding: Float[AnyArray, "B D"] | None = None,
) -> Repaired:
    """Adds a weighted mean of the deviations that the chunk's KV has behind other antecedents, the anchors.

    Source: KVCOMM (arXiv 2510.12872): anchors keep observed deviations from the base KV, positions aligned;
    an unseen context's is their sum, weighted by a softmax of negative distances of embeddings. There anchors are of
    other contents too, and a request far from all of them is computed; here they are of the same chunk, and all are
    used, whatever the distance. Distances are Euclidean, of mean token embeddings of antecedents. It reads no KV of the
    splice's own antecedent, which therefore may be new.

    Args:
      budget: bytes of all anchors with their embeddings (16 bits a number), kept once; of `splice.others` the first
        that fit.
      precision: of a deviation; 16: bfloat16, as the source keeps KV.
      encoding: of the canonical that they deviate from; None: the cache's dtype.
      temperature: what distances are divided by.
      embedding: of the splice's antecedent; None: the mean of `splice.front`'s.

    Raises:
      InputError: no KV of others or no embedding of one of them, nothing to know the own antecedent by; a budget in
        tokens or by layer, or too small for one anchor; unknown bits, or a temperature that is not positive.
        ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "anchored")
    others = others_of(splice, "anchored")
    if not temperature > 0:
        raise InputError(f"anchored.temperature: got {temperature}; expected a positive number")
    if embedding is None:
        embedding = pooled_embedding(required(splice, "front", "anchored", "tokens that precede, or an embedding"))
    anchors = []
    for place, other in enumerate(others):
        if other.embedding is None:
            raise InputError(f"anchored.others[{place}].embedding: got None; expected a pooled embedding")
        anchors.append(jnp.asarray(other.embedding).astype(jnp.bfloat16))

    kept, width = KVPrecision.of(precision), splice.tokens.embeddings.shape[-1]
    one = kept.nbytes(layout, tokens) + 2 * width
    count = min(len(others), allowed // one)
    if not count:
        raise InputError(f"anchored.budget: got {allowed} bytes; expected at least {one}, of one anchor")

    base = stored_base(layout, splice, "canonical", encoding, "anchored")
    deviations = []
    for other in others[:count]:
        delta = {name: jnp.asarray(other.kv[name]).astype(jnp.float32) - base.kv[name] for name in layout.names}
        deviations.append(encode_kv_rows(layout, delta, kept, splice.length))
    weights = anchor_weights(embedding, jnp.stack(anchors[:count]), temperature)
    adding = (2 + kept.decoding) * count * layout.numbers * tokens
    # Every anchor is read, because every one has a weight.
    bytes = base.bytes._replace(shared=count * one, moved=base.bytes.moved + count * one)

    def serve(own: SplicedCache) -> Repaired:
        decoded = [decode_kv_rows(delta) for delta in deviations]
        return phase_free_written(layout, own, _interpolated(base.read(own), decoded, weights), bytes)

    return with_flops(serve(splice), serve, splice, backbone, ("anchored", kept, count, str(encoding)), adding)


def anchor_weights(
    embedding: Float[AnyArray, "B D"], anchors: Float[AnyArray, "N B D"], temperature: float | int = 1.0
) -> Float[Array, "N B"]:
    """Computes the weights of anchors: softmax over them of −‖e − e_i‖ / temperature, in float32."""
    apart = jnp.asarray(embedding).astype(jnp.float32) - jnp.asarray(anchors).astype(jnp.float32)
    return jax.nn.softmax(-jnp.linalg.norm(apart, axis=-1) / temperature, axis=0)


@jax.jit
def _interpolated(base: KV, deviations: list[dict[str, Array]], weights: Array) -> dict[str, Array]:
    total = dict(base)
    for weight, delta in zip(weights, deviations, strict=True):
        total = {name: value + weight[:, None, None, None] * delta[name] for name, value in total.items()}
    return total


def joint_pair(
    backbone: Backbone,
    splice: SplicedCache,
    budget: RepairBudget | float,
    *,
    precision: Precision | None = None,
) -> Repaired:
    """Serves the antecedent and the chunk as one relocatable chunk [A B]: exact for that pair, up to its precision.

    Prompt Cache calls it a scaffold (Gim et al. 2024): modules that attend to one another are encoded
    together. `stored` is of the whole pair: A's KV is kept again for every chunk that it is paired with, where other
    forms leave A to its own chunk, which no repair of B counts. At N antecedents of B there are N pairs.

    Args:
      budget: bytes of the pair; bfloat16 if it fits, else the most bits that do.
      precision: in place of the budget's; such as 16 or "k4v4".

    Raises:
      InputError: no recorded KV, no `front`, or one as long as the cache; a budget in tokens or by layer, or too small;
        unknown bits. ShapeError, LayoutError, DtypeError: the splice does not match the backbone.
    """
    layout, tokens = backbone.layout, splice.slots.shape[1]
    allowed = allowed_bytes(layout, splice, budget, "joint_pair")
    recorded = recorded_of(splice, "joint_pair")
    front = required(splice, "front", "joint_pair", "the antecedent's tokens, in the first slots")
    before = front.embeddings.shape[1]
    if before >= splice.cache[layout.names[0]].shape[2]:
        raise InputError(f"joint_pair.front: got {before} tokens; expected fewer than the cache has slots")
    if precision is None:
        kept = most_bits(layout, allowed, before + tokens, "joint_pair", KVPrecision(), (*BITS, WHOLE))
    else:
        kept = KVPrecision.of(precision)

    first = {name: jnp.asarray(value)[:, :, :before] for name, value in splice.cache.items()}
    first = to_phase_free(layout, {name: value.astype(jnp.float32) for name, value in first.items()}, front.positions)
    joined = {}
    for name in layout.names:
        joined[name] = jnp.concatenate([first[name], jnp.asarray(recorded[name]).astype(jnp.float32)], axis=2)
    length = None if splice.length is None else before + jnp.asarray(splice.length)
    stored = encode_kv_rows(layout, joined, kept, length)
    size = kept.nbytes(layout, before + tokens)
    bytes = RepairBytes(stored=size, moved=size)
    # The antecedent is placed too.
    elementwise = rotation_flops(layout, before) + kept.decoding * layout.numbers * (before + tokens)

    def serve(own: SplicedCache) -> Repaired:
        kv = decode_kv_rows(stored)
        positions = required(own, "front", "joint_pair", "the antecedent's tokens").positions
        ahead = to_engine(layout, {name: value[:, :, :before] for name, value in kv.items()}, positions, 0)
        rows = own.slots.shape[0]
        slots = jnp.broadcast_to(jnp.arange(before), (rows, before))
        cache = write_slots(dict(own.cache), slots, dict(ahead), jnp.ones((rows, before), bool))
        rest = {name: value[:, :, before:] for name, value in kv.items()}
        return phase_free_written(layout, own.replace(cache=cache), rest, bytes)

    return with_flops(serve(splice), serve, splice, backbone, ("joint_pair", kept), elementwise)
