"""KV moves into and out of the caches of other JAX programs bit for bit, in any order of their axes."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.serving import CacheAxes, chunk_from_cache, place_in_cache

LAYERS, ROWS, SLOTS, TOKENS = 3, 2, 24, 5
GQA = kvp.KVLayout.gqa(LAYERS, 2, 8, kvp.Rope(1e4, 8))
MLA = kvp.KVLayout.mla(LAYERS, 6, 4, rope=kvp.Rope(1e4, 4, "pairs"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Listed:
    """The cache of jax-llm-examples: a list of layers, heads in front of slots, and where sequences start."""

    k: list[jax.Array]
    v: list[jax.Array]
    starts: jax.Array
    size: int = dataclasses.field(metadata={"static": True}, default=SLOTS)


class Latent(NamedTuple):
    latent: jax.Array
    rope_key: jax.Array
    length: jax.Array


CACHES = {
    "stacked": CacheAxes(GQA),
    "listed": CacheAxes(GQA, "B K T H"),
    "apart": CacheAxes(GQA, "T L B K H"),
    "single": CacheAxes(GQA, "L K T H", ring=True),
    "latent": CacheAxes(MLA, "L B T H", ("latent", "rope_key")),
}


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.bfloat16)


def cache_of(axes: CacheAxes) -> Any:
    arrays = []
    for channel in axes.layout.channels:
        sizes = {"L": LAYERS, "B": ROWS, "T": SLOTS, "K": channel.heads, "H": channel.width}
        shape = [sizes[letter] for letter in axes.letters]
        arrays.append(draw(*shape) if "L" in axes.letters else [draw(*shape) for _ in range(LAYERS)])
    if axes.fields is not None:
        return Latent(*arrays, length=jnp.int32(7))
    if "L" not in axes.letters:
        return Listed(*arrays, starts=jnp.zeros(ROWS, jnp.int32))
    return {"k": arrays[0], "v": arrays[1]}


def rows_of(cache: Any, axes: CacheAxes, row: int) -> dict[str, np.ndarray]:
    """Returns a sequence's rows of a cache, [L, T, K, H], by numpy's transpositions."""
    rows = {}
    for name, leaves in axes.arrays(cache, 1, 0, row).items():
        array = np.asarray(leaves[0] if "L" in axes.letters else jnp.stack(leaves))
        letters = axes.letters if "L" in axes.letters else "L" + axes.letters
        for letter in "BK":
            if letter not in letters:
                array, letters = array[None], letter + letters
        rows[name] = array.transpose([letters.index(letter) for letter in "BLTKH"])[row]
    return rows


def chunk_of(layout: kvp.KVLayout, id: str = "page") -> kvp.Chunk:
    kv = {channel.name: 3 * draw(LAYERS, TOKENS, channel.heads, channel.width) for channel in layout.channels}
    return kvp.Chunk(kv, np.arange(TOKENS, dtype=np.float32), TOKENS, TOKENS, id, layout, "toy")


def assert_equal(cache: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(("name", "rank"), [("stacked", 4), ("listed", 0), ("latent", 4), ("apart", 0), ("single", 0)])
def test_a_placed_chunk_is_what_the_operator_computes_and_nothing_else_changes(name: str, rank: int):
    axes = CACHES[name]
    cache, row, chunk = cache_of(axes), 1 if "B" in axes.letters else 0, chunk_of(axes.layout)
    slot = SLOTS - 2 if axes.ring else 7
    slots = np.arange(slot, slot + TOKENS) % SLOTS
    conditioned = {name: value * 2 for name, value in chunk.kv.items()}
    patch = kvp.form_patch(chunk, conditioned, rank, ["legend"]) if rank else None
    placed = kvp.Placed(chunk.pad(TOKENS + 3), patch and patch.pad(TOKENS + 3), 40, ["legend"])
    written = place_in_cache(cache, axes, placed, slot, row=row)

    expected = rows_of(cache, axes, row)
    for name, value in placed.apply().items():
        expected[name] = expected[name].copy()
        expected[name][:, slots] = np.asarray(value)[:, :TOKENS]
    for name, value in rows_of(written, axes, row).items():
        assert (value == expected[name]).all()
    if "B" in axes.letters:
        before, after = rows_of(cache, axes, 0), rows_of(written, axes, 0)
        assert all((before[name] == after[name]).all() for name in before)
    assert jax.tree.structure(written) == jax.tree.structure(cache)

    again = chunk_from_cache(written, axes, TOKENS, id="page", backbone="toy", slot=slot, row=row, start=40)
    for channel in axes.layout.channels:
        read, value = np.asarray(again.kv[channel.name], np.float32), np.asarray(chunk.kv[channel.name], np.float32)
        np.testing.assert_allclose(read, 2 * value if rank else value, atol=0.3)
        assert rank or channel.rotates or (read == value).all()
    assert (again.length, again.span) == (TOKENS, TOKENS)


@pytest.mark.parametrize("donate", [False, True])
def test_a_program_places_at_any_start_slot_and_row_without_compiling_again(donate: bool):
    axes, chunk = CACHES["listed"], chunk_of(GQA)

    @jax.jit
    def step(cache: Listed, start: jax.Array, slot: jax.Array, row: jax.Array) -> Listed:
        return place_in_cache(cache, axes, kvp.Placed(chunk, None, start), slot, row=row)

    traced = jax.jit(step, donate_argnums=0) if donate else step
    for start, slot, row in ((3, 0, 0), (400, 19, 1)):
        cache = cache_of(axes)
        expected = place_in_cache(cache_of(axes), axes, kvp.Placed(chunk, None, start), slot, row=row, donate=donate)
        written = traced(cache, jnp.int32(start), jnp.int32(slot), jnp.int32(row))
        assert cache.k[0].is_deleted() == donate
        assert_equal(written, expected)
    assert traced._cache_size() == 1  # pyright: ignore


def test_a_cache_on_explicit_axes_of_a_mesh_keeps_its_sharding():
    axes, cache, placed = CACHES["listed"], cache_of(CACHES["listed"]), kvp.Placed(chunk_of(GQA), None, 9)
    expected = place_in_cache(cache, axes, placed, 4, row=1)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "heads"))
    sharded = dataclasses.replace(cache, k=jax.device_put(cache.k, sharding), v=jax.device_put(cache.v, sharding))
    written = place_in_cache(sharded, axes, placed, 4, row=1)
    assert written.k[0].sharding.is_equivalent_to(sharding, 4)
    assert written.k[0].sharding.mesh == mesh
    assert_equal(written, expected)
    chunk = chunk_from_cache(written, axes, TOKENS, id="page", backbone="toy", slot=4, row=1, start=9)
    assert (np.asarray(chunk.kv["v"]) == np.asarray(placed.kv["v"])).all()


def test_what_does_not_fit_is_refused_before_anything_is_written():
    axes, cache, errors = CACHES["stacked"], cache_of(CACHES["stacked"]), kvp.errors
    placed, small = kvp.Placed(chunk_of(GQA), None, 3), {name: value.astype(jnp.int8) for name, value in cache.items()}
    quantised = {name: (value, cache[name][..., 0]) for name, value in small.items()}
    for error, message, arguments, slot, row in (
        (errors.InputError, "got slot .* expected 0 to", (cache, axes, placed), SLOTS - 4, 0),
        (errors.InputError, "got row .* expected 0 to", (cache, axes, placed), 0, ROWS),
        (errors.LayoutError, "not quantised", (quantised, axes, placed), 0, 0),
        (errors.ShapeError, "int8", (small, axes, placed), 0, 0),
        (errors.ShapeError, r"cache\.k: got shape", (cache, CacheAxes(GQA, "L B K T H"), placed), 0, 0),
    ):
        with pytest.raises(error, match=message):
            place_in_cache(*arguments, slot, row=row)
    with pytest.raises(errors.InputError, match=r"got length .* expected 1 to"):
        chunk_from_cache(cache, axes, SLOTS + 1, id="chunk", backbone="tiny")
