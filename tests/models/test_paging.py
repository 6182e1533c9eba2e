"""Contexts in a paged pool: forwards over pages equal those over the same KV side by side, and compile few programs."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalOperand=false, reportOptionalSubscript=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Paged
from kvpatch_jax.errors import (
    PoolError,
)
from kvpatch_jax.models import Buckets, load
from tests.goldens.load import write_checkpoint
from tests.shared.compilations import compilations

FAMILIES = {
    "qwen3_window": "grouped heads, layers that slide among layers that do not",
    "deepseek_v3": "a latent, and experts above a dense layer",
    "qwen3": "grouped heads",
    "llama2": "a head each",
    "qwen3_moe": "grouped heads and experts",
}
DEFAULT = "qwen3_window"
KEYS, OWN, TOTAL = 21, 5, 128
"""Tokens of a context, and behind it; slots of the pool."""

pytestmark = pytest.mark.usefixtures("highest_precision")


@functools.cache
def backbone_of(name, folder, **options):
    return load(write_checkpoint(name, folder / name), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("paging")


@pytest.fixture(
    scope="module",
    params=[pytest.param(x, marks=() if x == DEFAULT else pytest.mark.nightly) for x in FAMILIES],
)
def backbone(request, folder):
    return backbone_of(request.param, folder)


class PagingCase:
    """Two sequences whose KV lies side by side, and in pages among NaN."""

    def __init__(self, backbone, page_size=8, *, dtype=jnp.float32, padded=False, seed=0, shared=0):
        rng = np.random.default_rng(seed)
        ids = rng.integers(3, 290, (2, KEYS + OWN))
        ids[:, :shared] = ids[0, :shared]
        tokens = backbone.embed(ids)
        kv = kvp.to_engine(backbone.layout, backbone.prefill(tokens).kv, tokens.positions, 0)
        self.layout, self.page_size = backbone.layout, page_size
        self.rest = tokens.take(KEYS, KEYS + OWN)
        self.context = {name: value[:, :, :KEYS].astype(dtype) for name, value in kv.items()}
        places = rng.permutation(TOTAL).astype(np.int32)
        self.slots = np.stack([places[:KEYS], places[KEYS : 2 * KEYS]])
        self.slots[:, :shared] = self.slots[0, :shared]
        self.own = places[2 * KEYS : 2 * KEYS + 2 * OWN].reshape(2, OWN)
        self.padded, self.dtype = padded, dtype

    def pool(self):
        made = kvp.pool.make_pool(self.layout, TOTAL // self.page_size, self.page_size, self.dtype, padded=self.padded)
        for channel in self.layout.channels:
            flat = np.full((self.layout.layers, TOTAL, *made[channel.name].shape[3:]), np.nan, self.dtype)
            for row, slots in enumerate(self.slots):
                flat[:, slots] = 0
                flat[:, slots, :, : channel.width] = np.asarray(self.context[channel.name][:, row])
            made[channel.name] = jnp.asarray(flat.reshape(made[channel.name].shape))
        return made

    def paged(self, **options):
        return Paged.of(self.pool(), self.slots, **options)

    def cache(self):
        """The contexts, with room for the tokens, and where these go."""
        room = {name: jnp.pad(x, ((0, 0), (0, 0), (0, OWN), (0, 0), (0, 0))) for name, x in self.context.items()}
        return room, np.broadcast_to(np.arange(KEYS, KEYS + OWN), (2, OWN))


def close(found, expected, bar=2e-5):
    scale = np.abs(np.asarray(expected, np.float32)).max()
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(expected, np.float32), atol=bar * scale, rtol=0
    )


def at_slots(pool, slots, layout):
    """What lies at slots [B,T]: {channel: [L,B,T,K,H]}."""
    rows = [kvp.pool.read_slots(pool, row, layout) for row in slots]
    return {name: np.stack([row[name] for row in rows], axis=1) for name in layout.names}


def bits(value):
    return np.asarray(value).view(f"uint{8 * value.dtype.itemsize}")


@pytest.mark.nightly
def test_a_prefill_behind_pages(backbone):
    case = PagingCase(backbone)
    expected = backbone.prefill(case.rest, case.context, logits="all")
    found = backbone.prefill(case.rest, case.paged(), logits="all")
    close(found.logits, expected.logits)
    for name in expected.kv:
        close(found.kv[name], expected.kv[name])


@pytest.mark.nightly
def test_steps_write_into_the_pool_in_place(backbone):
    """Two calls: all tokens but one, and that one; the second reads what the first wrote, in pages it did not have."""
    case = PagingCase(backbone)
    cache, slots = case.cache()
    expected = backbone.decode(case.rest, cache, slots, logits="all")
    paged = case.paged(buckets=None)
    before = {name: bits(value).copy() for name, value in paged.pool.items()}
    first = backbone.decode(case.rest.take(0, OWN - 1), paged, case.own[:, :-1], logits="all")
    assert all(value.is_deleted() for value in paged.pool.values())
    second = backbone.decode(case.rest.take(OWN - 1, OWN), first.cache, case.own[:, -1:])
    close(np.concatenate([first.logits, second.logits], axis=1), expected.logits)
    written = at_slots(second.cache.pool, case.own, case.layout)
    others = np.setdiff1d(np.arange(TOTAL), case.own)
    for name, value in second.cache.pool.items():
        close(written[name], expected.cache[name][:, :, KEYS:])
        flat = bits(value).reshape(value.shape[0], TOTAL, -1)
        assert (flat[:, others] == before[name].reshape(flat.shape)[:, others]).all()
    with pytest.raises(PoolError, match="donated"):
        backbone.prefill(case.rest, paged)


@pytest.mark.nightly
def test_generating_behind_pages_equals_a_contiguous_context(backbone):
    case = PagingCase(backbone)
    expected = backbone.generate(case.rest, 6, case.context, stop=())
    paged = case.paged()
    assert np.array_equal(backbone.generate(case.rest, 6, paged, stop=()), expected)
    assert [piece.ids.tolist() for piece in backbone.stream(case.rest, 6, paged, stop=())] == expected.T.tolist()
    assert np.array_equal(backbone.generate(case.rest, 1, paged, stop=()), expected[:, :1])
    assert not any(value.is_deleted() for value in paged.pool.values())


@pytest.mark.nightly
def test_other_tables_slots_and_contents_compile_nothing(folder):
    backbone = backbone_of(DEFAULT, folder)
    case = PagingCase(backbone)
    backbone.prefill(case.rest, case.paged())
    step = backbone.decode(case.rest, case.paged(), case.own)
    compiled = []
    for seed, first in ((1, 0), (2, 7)):
        other = PagingCase(backbone, seed=seed)
        # Fewer keys, and as many pages of the bucket.
        shorter = Paged.of(other.pool(), [other.slots[0], other.slots[1, first:]])
        assert shorter.table.shape == case.paged().table.shape
        rest = other.rest.shift(9)
        with compilations() as names:
            backbone.prefill(rest, shorter)
            step = backbone.decode(other.rest, shorter, other.own)
        compiled += names
    again = np.setdiff1d(np.arange(TOTAL), [*other.slots.ravel(), *other.own.ravel()])[: 2 * OWN].reshape(2, OWN)
    rest = other.rest.shift(OWN)
    with compilations() as names:
        backbone.decode(rest, step.cache, again)
    assert not compiled + names


def test_a_growing_window_falls_into_few_sizes():
    pool = {"k": np.zeros((1, 4096, 16, 1, 1), np.float32)}
    sizes = {Paged.of(pool, np.arange(tokens)).key_count for tokens in range(1, 16384, 97)}
    assert len(sizes) <= 32
    for tokens in (1, 700, 5000, 16000):
        assert tokens <= Paged.of(pool, np.arange(tokens)).key_count <= max(1.25 * tokens + 16, 16)
    assert Paged.of(pool, np.arange(700), None).table.shape == (1, 44)


@pytest.mark.nightly
@pytest.mark.parametrize(("page_size", "padded"), [(1, False), (64, True)])
def test_pages_of_every_size(backbone, page_size, padded):
    """Slots at random, a stretch that both rows share, lanes padded as TPUs have them."""
    case = PagingCase(backbone, page_size, padded=padded, seed=page_size, shared=7)
    expected = backbone.prefill(case.rest, case.context, logits="all")
    close(backbone.prefill(case.rest, case.paged(), logits="all").logits, expected.logits)
    cache, slots = case.cache()
    step = backbone.decode(case.rest, case.paged(), case.own)
    close(step.logits, backbone.decode(case.rest, cache, slots).logits)
    if padded:
        for channel in case.layout.channels:
            rows = kvp.pool.read_slots(step.cache.pool, case.own.ravel())[channel.name]
            assert rows.shape[-1] == 128
            assert not np.asarray(rows[..., channel.width :]).any()


@pytest.mark.nightly
def test_in_buckets_and_in_chunks_and_under_masks(backbone, folder):
    case = PagingCase(backbone)
    name = next(name for name in FAMILIES if backbone_of(name, folder) is backbone)
    bucketed = load(folder / name, buckets=Buckets(smallest=16))
    expected = backbone.prefill(case.rest, case.context, logits="all")
    cache, slots = case.cache()
    for served in (backbone, bucketed):
        close(served.prefill(case.rest, case.paged(), logits="all", chunk=2).logits, expected.logits)
        close(served.prefill(case.rest, case.paged(), logits="all").logits, expected.logits)
        step = served.decode(case.rest, case.paged(), case.own, logits="all")
        close(step.logits, backbone.decode(case.rest, cache, slots, logits="all").logits)
        # A mask over the pages' keys: the last keys of each row are hidden.
        paged, hidden = case.paged(), 4
        side = np.ones((2, 1, OWN, KEYS + OWN), bool)
        side[..., KEYS:] = np.tri(OWN, dtype=bool)
        side[..., KEYS - hidden : KEYS] = False
        over = np.ones((2, 1, OWN, paged.key_count + OWN), bool)
        over[..., paged.key_count :] = np.tri(OWN, dtype=bool)
        over[..., : paged.key_count] = (paged.places < KEYS - hidden)[:, None, None]
        found = served.prefill(case.rest, paged, over, logits="all")
        close(found.logits, backbone.prefill(case.rest, case.context, side, logits="all").logits)


@pytest.mark.nightly
def test_recomputing_in_pages_equals_a_contiguous_cache(backbone):
    """Some tokens of the context again, nested sets of them per layer: as side by side, and the others bit-equal."""
    case = PagingCase(backbone)
    ids = np.random.default_rng(5).integers(3, 290, (2, 3))
    chosen = np.array([[2, 9, 20], [0, 11, 12]])
    tokens = backbone.embed(ids)
    tokens = tokens._replace(positions=chosen.astype(np.int32))
    keep = np.ones((backbone.layout.layers, 2, 3), bool)
    keep[1:, :, 1] = False
    expected = backbone.recompute(tokens, case.context, chosen, keep=keep, logits="all")
    slots = np.take_along_axis(case.slots, chosen, axis=1)
    found = backbone.recompute(tokens, case.paged(), slots, keep=keep, logits="all")
    close(found.logits, expected.logits)
    here = at_slots(found.cache.pool, case.slots, case.layout)
    for name, value in expected.cache.items():
        close(here[name], value)
    assert np.array_equal(found.cache.seen, case.paged().seen)


@pytest.mark.nightly
def test_a_part_of_the_layers_in_pages_equals_that_in_a_contiguous_cache(backbone):
    """The lower layers, and from their residual the last one; what a call does not run keeps its KV."""
    case, top = PagingCase(backbone), backbone.layout.layers - 1
    chosen = np.array([[2, 9, 20], [0, 11, 12]], np.int32)
    tokens = backbone.embed(np.random.default_rng(5).integers(3, 290, (2, 3)))._replace(positions=chosen)
    slots = np.take_along_axis(case.slots, chosen, axis=1)

    expected = backbone.recompute(tokens, case.context, chosen, stop_layer=top, hidden_at=(1, top))
    found = backbone.recompute(tokens, case.paged(), slots, stop_layer=top, hidden_at=(1, top))
    assert found.logits.shape[1] == 0
    for layer, residual in expected.hidden.items():
        close(found.hidden[layer], residual)
    here = at_slots(found.cache.pool, case.slots, case.layout)
    for name, value in expected.cache.items():
        close(here[name], value)
        assert np.array_equal(here[name][top], case.context[name][top])

    entering = tokens._replace(embeddings=expected.hidden[top])
    expected = backbone.recompute(entering, expected.cache, chosen, start_layer=top)
    found = backbone.recompute(entering, found.cache, slots, start_layer=top)
    close(found.logits, expected.logits)
    here = at_slots(found.cache.pool, case.slots, case.layout)
    for name, value in expected.cache.items():
        close(here[name], value)


@pytest.mark.nightly
def test_rows_without_a_context_begin_at_position_0(folder):
    """Rows without a context beside rows with one: those begin at position 0."""
    backbone = backbone_of("qwen3", folder)
    case = PagingCase(backbone)
    rest = case.rest._replace(positions=np.stack([np.arange(OWN), np.asarray(case.rest.positions)[1]]))
    paged = Paged.of(case.pool(), [[], case.slots[1]])
    found = backbone.prefill(rest, paged, logits="all")
    alone = backbone.prefill(Tokens(rest.embeddings[:1], rest.positions[:1]), logits="all")
    behind = backbone.prefill(case.rest, case.context, logits="all")
    close(found.logits[0], alone.logits[0])
    close(found.logits[1], behind.logits[1])


@pytest.mark.nightly
def test_inside_a_program_of_the_callers(folder):
    backbone = backbone_of("qwen3", folder)
    case = PagingCase(backbone)
    paged = case.paged().extended(case.own)
    expected = backbone.decode(case.rest, case.paged(), case.own).logits
    found = jax.jit(lambda paged, slots: backbone.decode(case.rest, paged, slots))(paged, case.own)
    close(found.logits, expected)
    assert isinstance(found.cache, Paged)
    again = backbone.prefill(case.rest.shift(OWN), found.cache)
    assert np.isfinite(again.logits).all()
