"""Sixty small faults for `mutations.py`: a sign, an index, a dropped patch, a skipped checksum, one too many kept."""

from typing import NamedTuple


class Fault(NamedTuple):
    """A change of one place in the library.

    Attributes:
      path: the module. before, after: what stands there once, and what stands there with the fault.
      shows: what goes wrong.
    """

    path: str
    before: str
    after: str
    shows: str

    @property
    def room(self) -> str:
        """The folder that has the module: of the library, or `models`."""
        first, second, *_ = self.path.split("/")
        return second if first == "kvpatch_jax" else first


def _faults(path: str, *changes: tuple[str, str, str]) -> list[Fault]:
    return [Fault(path, *change) for change in changes]


CORE, PATCHING, REPAIR = "kvpatch_jax/core/", "kvpatch_jax/patching/", "kvpatch_jax/repair/"
WINDOW, STORE, MODELS = "kvpatch_jax/window/", "kvpatch_jax/store/", "models/"

FAULTS = [
    *_faults(
        CORE + "rope.py",
        ("jnp.where(whole < 0, jnp.uint32(0) - phase, phase)", "phase", "negative positions turn the wrong way"),
        ("carried = size_high * low_high + ", "carried = ", "far positions lose bits of their angle"),
        ("(quadrant & 1) == 1, quadrant >= 2", "(quadrant & 1) == 1, quadrant > 2", "half a turn has the wrong sign"),
        (
            "axis[index : step * self.sections[index] : step] = index",
            "axis[index : self.sections[index] : step] = index",
            "interleaved sections end too early",
        ),
        (
            "sin_new * cos_old - cos_new * sin_old",
            "sin_new * cos_old + cos_new * sin_old",
            "float32 angles are added, not subtracted",
        ),
        ("last[:, 0], positions.max((1, 2)))", "last[:, 0], last[:, 0])", "what follows a video may overlap it"),
    ),
    *_faults(
        CORE + "ops.py",
        (
            "value if own is None else jnp.where(token_mask(value, own, -3), value, 0.0)",
            "value",
            "padding enters the deficit",
        ),
        (
            "value.dtype).at[np.asarray(layers)].set(value)",
            "value.dtype).at[: len(layers)].set(value)",
            "a patch of some layers corrects the first ones",
        ),
    ),
    *_faults(
        CORE + "few_bits.py",
        (
            "jnp.take(wide, jnp.maximum(length, 1) - 1,",
            "jnp.take(wide, jnp.maximum(length, 1),",
            "padding widens a group",
        ),
        ("more = ((bits >> 31) == 1) & (", "more = ((bits >> 31) == 0) & (", "the least value is rounded up"),
    ),
    *_faults(
        CORE + "transitions.py",
        (
            'through_map(map_, jnp.asarray(first["map"]))',
            'through_map(jnp.asarray(first["map"]), map_)',
            "maps are composed in the wrong order",
        ),
    ),
    *_faults(
        CORE + "readout.py",
        ("jnp.log(safe) + top[..., 0]", "jnp.log(safe)", "the mass of a readout is relative to its own largest score"),
    ),
    *_faults(
        CORE + "rotation.py",
        ("sin, scale = -sin, 1.0 / scale", "sin, scale = -sin, scale", "the attention scaling is applied twice"),
    ),
    *_faults(
        PATCHING + "form.py",
        ("and not force and", "and force and", "a patch that is worse than none is formed"),
    ),
    *_faults(
        PATCHING + "change.py",
        (" or new.corrects != digest", "", "a correction updates a patch that it is not of"),
        ("np.asarray(own.rows)[:, :size]", "np.asarray(own.rows)[:, -size:]", "the weakest directions are kept"),
        (
            "present.index(layer) for layer in remaining",
            "remaining.index(layer) for layer in remaining",
            "other layers stay",
        ),
        (
            "deficit_of(target, conditioned, chunk)",
            "deficit_of(conditioned, target, chunk)",
            "a removal adds what left",
        ),
        ("value - present.get(name, 0.0)", "value", "a correction holds what the patch corrects already"),
    ),
    *_faults(
        PATCHING + "orbit.py",
        ("antecedent_of(antecedent).sorted()", "antecedent_of(antecedent)", "another order is another orbit"),
    ),
    *_faults(
        PATCHING + "byte_budget.py",
        ("ranks[name][layer] and cost <= left", "ranks[name][layer] and cost <= budget", "a patch exceeds its bytes"),
        (
            "own if weights is None else own / weights[layer]",
            "own",
            "directions of weighted features are not scaled back",
        ),
    ),
    *_faults(
        PATCHING + "canonical.py",
        (
            "end_position(places).astype(np.int32) + 1",
            "end_position(places).astype(np.int32)",
            "units overlap by a position",
        ),
    ),
    *_faults(
        REPAIR + "recomputation.py",
        (" + input_bytes(splice) * max(counts)", "", "inputs that a repair reads cost nothing"),
        ("largest(score, count + int(new.sum()))", "largest(score, count)", "new text displaces cached tokens"),
    ),
    *_faults(
        REPAIR + "spliced_cache.py",
        ("places = jnp.where(live, slots, size)", "places = slots", "padding is written to the cache"),
        ("typical, 1.0), 0.0).sum(0)", "typical, 1.0), 0.0)[0]", "only the first layer chooses tokens"),
    ),
    *_faults(
        REPAIR + "deviation.py",
        ("keys[:, :, head // group]", "keys[:, :, head % fresh.shape[2]]", "query heads meet other heads' keys"),
        (
            "chosen_at[start:] = [count] * (layout.layers - start)",
            "chosen_at[layer:] = [count] * (layout.layers - layer)",
            "a check costs as little as what it chooses",
        ),
    ),
    *_faults(
        REPAIR + "repair_budget.py",
        ("int(self.share * tokens + 0.5)", "int(self.share * tokens)", "a share is rounded down"),
    ),
    *_faults(
        REPAIR + "leading_tokens.py",
        (
            "counts[:, None] > np.arange(last - first)",
            "counts[:, None] >= np.arange(last - first)",
            "one token too many",
        ),
    ),
    *_faults(
        REPAIR + "positions.py",
        ('tail - end if geometry == "tl_tp"', 'tail - start if geometry == "tl_tp"', "chunks are scored too far ahead"),
    ),
    *_faults(
        WINDOW + "window.py",
        (
            "= (*self.prefilled, prefilled)",
            "= (*self.prefilled, piece.made)",
            "an approximate window calls pieces exact",
        ),
        ("chunks[-keep] if keep", "chunks[-keep - 1] if keep", "a slide keeps one chunk too many"),
        ("evicted[-MOST_GONE:]", "evicted[:MOST_GONE]", "the newest evicted chunk cannot be recalled"),
        ("present.get(entry.id, entry) != entry", "False", "an evicted id comes back as something else"),
        ("ways = UNKNOWN_WAYS if difference is not None else ways", "ways = ways", "a stale patch keeps its bound"),
    ),
    *_faults(
        WINDOW + "executor.py",
        (" or residents[id].slots is not resident.slots", "", "slots of replaced pieces are never free again"),
        (
            "            for slots in taken:\n                self.slots.release(slots)\n",
            "",
            "a failed run loses slots",
        ),
        (
            "if resident is not None and resident.start != piece.start:\n                check",
            "if resident is not None and resident.start > piece.start:\n                check",
            "pieces that move up are not rotated",
        ),
        (
            "owners(resident.slots) > 1).any() else moves",
            "owners(resident.slots) > 2).any() else moves",
            "forks share a move",
        ),
        (
            "last = tokens.embeddings.shape[1], count - 1",
            "last = tokens.embeddings.shape[1], count",
            "logits of a later token",
        ),
    ),
    *_faults(
        STORE + "files.py",
        (
            "if xxhash.xxh3_64_hexdigest(payload[begin : stop + -stop % ALIGN]) != sums[name]:",
            "if False:",
            "no sum of leaves",
        ),
        ("if xxhash.xxh3_64_hexdigest(blank).encode() != text[_SUM]:", "if False:", "no sum of the header"),
    ),
    *_faults(
        STORE + "memory.py",
        ("entry is None or entry[0] != file", "entry is None", "memory serves what was replaced"),
        ("            self._values.move_to_end((tenant, name))\n", "", "memory drops what was just read"),
    ),
    *_faults(
        STORE + "index.py",
        ("expires <= ? AND rank < 2", "expires > ? AND rank < 2", "what has not expired leaves first"),
        ("is_late = deletion > begun or (old", "is_late = bool(old", "a write that began before a deletion undoes it"),
        ("taken + need <= bound", "taken <= bound", "a store outgrows its budget"),
        ('            db.execute(f"DELETE FROM outbox WHERE {where}", values)\n', "", "what was deleted is sent"),
    ),
    *_faults(
        STORE + "queue.py",
        ("                self.nbytes -= replaced.nbytes\n", "", "replaced puts fill the queue"),
    ),
    *_faults(
        STORE + "patches.py",
        ("return basis if basis.digest == digest else None", "return basis", "another basis serves a patch"),
    ),
    *_faults(
        MODELS + "decoder/moe.py",
        (
            "jnp.take_along_axis(scores, index",
            "jnp.take_along_axis(choice, index",
            "the correction enters experts' weights",
        ),
    ),
    *_faults(
        MODELS + "attention/blockwise.py",
        ("(last > low - mask.window)", "(last > low - mask.window // 2)", "a block that a window sees is passed over"),
    ),
    *_faults(
        MODELS + "inputs/masks.py",
        (
            "places = jnp.where(seen, context.places_of_keys(), NOWHERE)",
            "places = context.places_of_keys()",
            "hidden keys",
        ),
    ),
    *_faults(
        MODELS + "decoder/delta_rule.py",
        (
            "later = jnp.tri(rate.shape[-2], k=-1",
            "later = jnp.tri(rate.shape[-2], k=0",
            "a token's own decay counts twice",
        ),
    ),
    *_faults(
        MODELS + "decoding/sampling.py",
        ("fold_in(jax.random.fold_in(draw.key, row), index)", "fold_in(draw.key, row)", "every token is drawn alike"),
    ),
    *_faults(
        MODELS + "inputs/texts.py",
        ('self._spelling.sub(rf"\\1{_BREAK}", text)', "text", "a user's text writes control tokens"),
    ),
    *_faults(
        MODELS + "checkpoints/adapters.py",
        ("(rank**0.5 if", "(rank**1.0 if", "rank-stabilised adapters are scaled as others"),
    ),
    *_faults(
        MODELS + "checkpoints/reading.py",
        (
            "    _warn_of_others(source, {tensor.name for tensor in tensors}, ignore)\n",
            "",
            "an extra tensor goes unsaid",
        ),
    ),
]
