"""A context in pages of a pool gives the numbers of the same KV side by side, and is written in place.

Pages hold NaN wherever no token of the context lies.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Paged
from kvpatch_jax.errors import PoolError
from kvpatch_jax.models import Buckets
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest

DEFAULT = "qwen3_window"
"""Grouped heads, layers that slide among layers that do not."""
KEYS, MORE, TOTAL = 21, 5, 128
"""Tokens of a context, and behind it; slots of the pool."""

pytestmark = pytest.mark.usefixtures("highest_precision")
close = functools.partial(assert_close_to_largest, bar=2e-5)


@pytest.fixture(
    scope="module",
    params=[DEFAULT, *(pytest.param(name, marks=pytest.mark.nightly) for name in ("deepseek_v3", "llama2"))],
)
def backbone(request, tiny):
    return tiny(request.param)


@pytest.fixture(scope="module")
def case(backbone):
    return PagingCase(backbone)


class PagingCase:
    """Two sequences whose KV lies side by side, and in pages among NaN; their prefill as one prompt is the oracle."""

    def __init__(self, backbone, page_size=8, *, padded=False, seed=0, shared=0):
        rng = np.random.default_rng(seed)
        ids = rng.integers(3, 290, (2, KEYS + MORE))
        ids[:, :shared] = ids[0, :shared]
        self.tokens = backbone.embed(ids)
        out = backbone.prefill(self.tokens, logits="all")
        self.logits, self.kv = np.asarray(out.logits)[:, KEYS:], {name: np.asarray(x) for name, x in out.kv.items()}
        self.engine = kvp.to_engine(backbone.layout, out.kv, self.tokens.positions, 0)
        self.engine = {name: np.asarray(value) for name, value in self.engine.items()}
        self.layout, self.page_size, self.padded = backbone.layout, page_size, padded
        self.rest = self.tokens.take(KEYS, KEYS + MORE)
        self.context = {name: jnp.asarray(value[:, :, :KEYS]) for name, value in self.engine.items()}
        places = rng.permutation(TOTAL).astype(np.int32)
        self.slots = np.stack([places[:KEYS], places[KEYS : 2 * KEYS]])
        self.slots[:, :shared] = self.slots[0, :shared]
        self.free = places[2 * KEYS : 2 * KEYS + 2 * MORE].reshape(2, MORE)

    def pool(self):
        pool = kvp.pool.make_pool(self.layout, TOTAL // self.page_size, self.page_size, jnp.float32, padded=self.padded)
        for channel in self.layout.channels:
            flat = np.full((self.layout.layers, TOTAL, *pool[channel.name].shape[3:]), np.nan, np.float32)
            for row, slots in enumerate(self.slots):
                flat[:, slots] = 0
                flat[:, slots, :, : channel.width] = self.engine[channel.name][:, row, :KEYS]
            pool[channel.name] = jax.device_put(flat.reshape(pool[channel.name].shape))
        return pool

    def paged(self, **options):
        return Paged.of(self.pool(), self.slots, **options)

    def at(self, pool, slots):
        """What lies at slots [B,T]: {channel: [L,B,T,K,H]}."""
        rows = {}
        for channel in self.layout.channels:
            flat = np.asarray(pool[channel.name]).reshape(self.layout.layers, TOTAL, *pool[channel.name].shape[3:])
            rows[channel.name] = flat[:, slots][..., : channel.width]
        return rows

    def check_step(self, step, expected):
        """A step in pages has the logits and the cache of one in a contiguous cache. Returns the rows of the window."""
        assert step.logits.shape == expected.logits.shape
        if step.logits.size:
            close(step.logits, expected.logits)
        here = self.at(step.cache.pool, self.slots)
        for name, value in expected.cache.items():
            close(here[name], value)
        return here


def bits(value):
    return np.asarray(value).view(f"uint{8 * value.dtype.itemsize}")


def test_a_prefill_behind_pages_is_one_prefill(backbone, case):
    out = backbone.prefill(case.rest, case.paged(), logits="all")
    close(out.logits, case.logits)
    for name, value in case.kv.items():
        close(out.kv[name], value[:, :, KEYS:])


def test_steps_write_into_the_pool_in_place(backbone, case):
    """Two calls: all tokens but one, and that one; the second reads what the first wrote, in pages it did not have."""
    paged = case.paged(buckets=None)
    before = {name: bits(value).copy() for name, value in paged.pool.items()}
    first = backbone.decode(case.rest.take(0, MORE - 1), paged, case.free[:, :-1], logits="all")
    assert all(value.is_deleted() for value in paged.pool.values())
    second = backbone.decode(case.rest.take(MORE - 1, MORE), first.cache, case.free[:, -1:])
    close(np.concatenate([first.logits, second.logits], axis=1), case.logits)
    written = case.at(second.cache.pool, case.free)
    others = np.setdiff1d(np.arange(TOTAL), case.free)
    for name, value in second.cache.pool.items():
        close(written[name], case.engine[name][:, :, KEYS:])
        flat = bits(value).reshape(value.shape[0], TOTAL, -1)
        assert (flat[:, others] == before[name].reshape(flat.shape)[:, others]).all()
    with pytest.raises(PoolError, match="donated"):
        backbone.prefill(case.rest, paged)


def test_generating_behind_pages_equals_generating_behind_the_prompt(backbone, case):
    expected = backbone.generate(case.tokens, 6, stop=())
    paged = case.paged()
    assert np.array_equal(backbone.generate(case.rest, 6, paged, stop=()), expected)
    assert [piece.ids.tolist() for piece in backbone.stream(case.rest, 6, paged, stop=())] == expected.T.tolist()
    assert not any(value.is_deleted() for value in paged.pool.values())


def test_recomputing_in_pages_equals_a_contiguous_cache(backbone, case):
    """Some tokens of the context again, nested sets of them per layer; the others stay bit-equal."""
    chosen = np.array([[2, 9, 20], [0, 11, 12]])
    tokens = backbone.embed(np.random.default_rng(5).integers(3, 290, (2, 3)))
    tokens = tokens._replace(positions=chosen.astype(np.int32))
    keep = np.ones((backbone.layout.layers, 2, 3), bool)
    keep[1:, :, 1] = False
    expected = backbone.recompute(tokens, case.context, chosen, keep=keep, logits="all")
    slots = np.take_along_axis(case.slots, chosen, axis=1)
    step = backbone.recompute(tokens, case.paged(), slots, keep=keep, logits="all")
    for name, value in case.check_step(step, expected).items():
        same = (value == case.engine[name][:, :, :KEYS]).all((-2, -1))
        written = np.zeros(same.shape, bool)
        written[:, np.arange(2)[:, None], chosen] = keep
        assert np.array_equal(~same, written)
    assert np.array_equal(step.cache.seen, case.paged().seen)


def test_other_tables_slots_and_contents_compile_nothing(tiny):
    backbone = tiny(DEFAULT)
    case = PagingCase(backbone)
    backbone.prefill(case.rest, case.paged())
    backbone.decode(case.rest, case.paged(), case.free)
    other = PagingCase(backbone, seed=2)
    # Fewer keys, and as many pages of the bucket.
    shorter = Paged.of(other.pool(), [other.slots[0], other.slots[1, 7:]])
    assert shorter.table.shape == case.paged().table.shape
    rest = other.rest.shift(9)
    with compilations() as compiled:
        backbone.prefill(rest, shorter)
        backbone.decode(other.rest, shorter, other.free)
    assert not compiled


def test_a_growing_window_falls_into_few_sizes():
    pool = {"k": np.zeros((1, 4096, 16, 1, 1), np.float32)}
    sizes = {Paged.of(pool, np.arange(tokens)).key_count for tokens in range(1, 16384, 97)}
    assert len(sizes) <= 32
    for tokens in (1, 700, 5000, 16000):
        assert tokens <= Paged.of(pool, np.arange(tokens)).key_count <= max(1.25 * tokens + 16, 16)
    assert Paged.of(pool, np.arange(700), None).table.shape == (1, 44)


@pytest.mark.parametrize(("page_size", "padded"), [pytest.param(1, False, marks=pytest.mark.nightly), (64, True)])
def test_pages_of_every_size(backbone, page_size, padded):
    """Slots at random, a stretch that both rows share, lanes padded as TPUs have them."""
    case = PagingCase(backbone, page_size, padded=padded, seed=page_size, shared=7)
    close(backbone.prefill(case.rest, case.paged(), logits="all").logits, case.logits)
    step = backbone.decode(case.rest, case.paged(), case.free)
    close(step.logits, case.logits[:, -1:])
    if padded:
        for channel in case.layout.channels:
            rows = kvp.pool.read_slots(step.cache.pool, case.free.ravel())[channel.name]
            assert rows.shape[-1] == 128
            assert not np.asarray(rows[..., channel.width :]).any()


@pytest.mark.nightly
def test_in_buckets_and_in_chunks_and_under_masks(backbone, case):
    served = backbone.with_buckets(Buckets(smallest=16))
    close(served.prefill(case.rest, case.paged(), logits="all", chunk=2).logits, case.logits)
    step = served.decode(case.rest, case.paged(), case.free, logits="all")
    close(step.logits, case.logits)
    # A mask over the pages' keys: the last keys of each row are hidden.
    paged, hidden = case.paged(), 4
    side = np.ones((2, 1, MORE, KEYS + MORE), bool)
    side[..., KEYS:] = np.tri(MORE, dtype=bool)
    side[..., KEYS - hidden : KEYS] = False
    over = np.ones((2, 1, MORE, paged.key_count + MORE), bool)
    over[..., paged.key_count :] = np.tri(MORE, dtype=bool)
    over[..., : paged.key_count] = (paged.places < KEYS - hidden)[:, None, None]
    masked = served.prefill(case.rest, paged, over, logits="all")
    close(masked.logits, backbone.prefill(case.rest, case.context, side, logits="all").logits)


@pytest.mark.nightly
def test_a_part_of_the_layers_in_pages_equals_that_in_a_contiguous_cache(backbone, case):
    """The lower layers, and from their residual the last one; what a call does not run keeps its KV."""
    top = backbone.layout.layers - 1
    chosen = np.array([[2, 9, 20], [0, 11, 12]], np.int32)
    tokens = backbone.embed(np.random.default_rng(5).integers(3, 290, (2, 3)))._replace(positions=chosen)
    slots = np.take_along_axis(case.slots, chosen, axis=1)

    options = {"stop_layer": top, "hidden_at": (top,)}
    expected = backbone.recompute(tokens, case.context, chosen, **options)
    step = backbone.recompute(tokens, case.paged(), slots, **options)
    close(step.hidden[top], expected.hidden[top])
    for name, value in case.check_step(step, expected).items():
        assert np.array_equal(value[top], case.context[name][top])

    entering = tokens._replace(embeddings=expected.hidden[top])
    expected = backbone.recompute(entering, expected.cache, chosen, start_layer=top)
    case.check_step(backbone.recompute(entering, step.cache, slots, start_layer=top), expected)


@pytest.mark.nightly
def test_rows_without_a_context_begin_at_position_0(backbone, case):
    rest = case.rest._replace(positions=np.stack([np.arange(MORE), np.asarray(case.rest.positions)[1]]))
    out = backbone.prefill(rest, Paged.of(case.pool(), [[], case.slots[1]]), logits="all")
    alone = backbone.prefill(Tokens(rest.embeddings[:1], rest.positions[:1]), logits="all")
    close(out.logits[0], alone.logits[0])
    close(out.logits[1], case.logits[1])
