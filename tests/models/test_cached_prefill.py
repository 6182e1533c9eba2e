"""A prefill after cached KV, side by side or in pages, a recomputation and steps equal one prefill."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import functools
from typing import Any

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Paged, relocate, to_engine
from kvpatch_jax.errors import InputError, PoolError
from kvpatch_jax.models import Buckets
from tests.goldens.table import FAMILIES
from tests.shared.compilations import compilations
from tests.shared.tolerances import assert_close_to_largest
from tests.shared.window_oracle import BUCKETS

pytestmark = pytest.mark.usefixtures("highest_precision")

LIMITS = {"phi3_short": 32, "llama_dynamic": 14}
"""Positions from here on belong to another regime."""
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
SOME = ("qwen3_vl", "deepseek_v3", "gemma3_text", "glm", "qwen3_window", "qwen2_5_vl", "llava_next", "kimi_vl")
SOME += ("gemma3", "gemma4", "qwen3_omni")

close = functools.partial(assert_close_to_largest, bar=1e-5)


def marked(names, *fast):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.nightly) for name in names]


@pytest.fixture(scope="session")
def prefilled(golden):
    """`prefilled(family)`: the backbone, tokens of a prompt (with an image or a sound where there are), its prefill,
    and its cache."""

    @functools.cache
    def run(family):
        cases = FAMILIES[family].cases
        prompt = golden(family, next((name for name in ("mixed", "one_image") if name in cases), "text"))
        out = jax.device_get(prompt.backbone.prefill(prompt.tokens, logits="all"))
        return prompt.backbone, prompt.tokens.on_host(), out, cached(prompt.backbone, out, prompt.tokens)

    return run


def cached(backbone, out, tokens):
    return jax.device_get(to_engine(backbone.layout, out.kv, tokens.positions, 0))


def close_kv(kv, expected, name=""):
    assert set(kv) == set(expected)
    for channel, value in expected.items():
        if value.size:  # else no layer that ran keeps it
            close(np.asarray(kv[channel], np.float32), value, f"{name} {channel}")


def bits(kv):
    return {name: np.asarray(value).tobytes() for name, value in kv.items()}


@pytest.mark.parametrize("family", marked([name for name in FAMILIES if name not in LINEAR], "deepseek_v3"))
def test_moved_kv_is_that_of_the_forward_at_its_new_place(golden, tiny, family):
    """Forwards at p and p + δ have the same phase-free KV; keys moved either way are those of the forward there."""
    case = next((name for name in ("mixed", "one_image") if name in FAMILIES[family].cases), "text")
    prompt = golden(family, case)
    backbone = tiny(family, "exact")
    places = prompt.arrays["position_ids"][None] if FAMILIES[family].first else None
    tokens = backbone.embed(prompt.ids, places, **prompt.inputs)
    out = backbone.prefill(tokens, logits="all")
    engine = cached(backbone, out, tokens)
    moves: list[Any] = [np.array(delta, np.int32) for delta in (1, 1000, 100_000)]
    if tokens.positions.ndim == 3:  # the axes may move apart
        moves.append(np.array([5, 1000, 70], np.int32))
    if tokens.positions.dtype == np.float32:
        moves.append(np.array(40.6875, np.float32))
    for delta in moves:
        places = tokens.positions + delta
        if family in LIMITS and int(places.max()) >= LIMITS[family]:
            with pytest.raises(InputError, match=f"expected below {LIMITS[family]}"):
                backbone.prefill(tokens._replace(positions=places))
            with pytest.raises(InputError):
                relocate(backbone.layout, engine, tokens.positions, places)
            continue
        there = backbone.prefill(tokens._replace(positions=places), logits="all")
        close(there.logits, out.logits, f"logits at {delta}")
        close_kv(there.kv, out.kv, f"phase-free at {delta}")
        forward = to_engine(backbone.layout, there.kv, places, 0)
        close_kv(relocate(backbone.layout, engine, tokens.positions, places), forward, f"relocated by {delta}")
        if delta.dtype == np.int32:
            close_kv(to_engine(backbone.layout, out.kv, tokens.positions, delta), forward, f"to_engine at {delta}")
        turning = backbone.layout.names[1 if backbone.layout.kind == "mla" else 0]
        there = np.asarray(forward[turning])
        assert np.abs(there - engine[turning]).max() > 1e-3 * np.abs(there).max()


@pytest.mark.parametrize("family", marked(SOME, "qwen3_window"))
def test_recompute_writes_each_layers_set_of_tokens_and_no_other_bit(prefilled, family):
    """Of all tokens it is the prefill; another set, or another order of slots, compiles nothing."""
    backbone, tokens, out, engine = prefilled(family)
    backbone = backbone.with_buckets(Buckets(smallest=64, steps=1, least=64))
    layers, length = backbone.layout.layers, tokens.embeddings.shape[1]
    slots, spoilt = np.arange(length)[None], {name: value + 1 for name, value in engine.items()}
    keep = np.ones((layers, 1, length), bool)
    step = backbone.recompute(tokens, spoilt, slots, keep, logits="all")
    close(step.logits, out.logits, "logits")
    close_kv(step.cache, engine, "recomputed")
    nested = np.arange(length) < np.linspace(length, 5, layers).astype(int)[:, None, None]  # each inside the one below
    with compilations() as compiled:
        none = backbone.recompute(tokens, spoilt, slots, ~keep, logits="all").cache
        some = backbone.recompute(tokens, spoilt, slots, nested, logits="all").cache
        order = np.arange(length)[::-1]
        turned = backbone.recompute(tokens, spoilt, order[None].copy(), keep, logits="all").cache
        odd = np.arange(1, length, 2)
        beside = backbone.recompute(tokens, spoilt, slots, keep & np.isin(slots, odd), logits="all")
    assert not [name for name in compiled if "recompute" in name]
    assert bits(none) == bits(spoilt)

    # What is written sees the cache at the others, as if these had not been run.
    chosen = jax.tree.map(lambda leaf: leaf[:, odd], tokens)
    alone = backbone.recompute(chosen, spoilt, odd[None], keep[:, :, odd], logits="all")
    close(np.asarray(beside.logits)[:, odd], np.asarray(alone.logits), "logits of some")
    close_kv(beside.cache, alone.cache, "some")
    for name, value in engine.items():
        rows = [layer for layer in range(layers) if backbone.layout.rows_of(name, [layer])]
        written = (np.asarray(some[name]) != np.asarray(spoilt[name])).any((-2, -1))
        assert np.array_equal(written, nested[rows]), name
        close(np.where(nested[rows][..., None, None], some[name], value), value, name)
        # The lowest layer's KV depends on no other token.
        if 0 in rows:
            close(np.asarray(turned[name])[0, 0][order], np.asarray(value)[0, 0], f"turned {name}")


@pytest.mark.parametrize("family", marked(SOME, "qwen3_window"))
def test_resuming_at_a_layer_is_the_prefill(prefilled, family):
    """From the residual that enters a layer, deepstack features and all, behind a context too."""
    backbone, tokens, out, engine = prefilled(family)
    sources = backbone.config.text.sources
    layers = len(sources)
    # Above a layer whose KV is read by another one, a cache has to hold it.
    last = min(source for layer, source in enumerate(sources) if source < layer or layer == layers - 1)
    tapped = backbone.prefill(tokens, hidden_at=tuple(range(1, layers + 1)), logits="all")
    close(tapped.logits, out.logits, "logits with taps")
    for layer in {1} if tokens.ahead is None else {1, last}:
        entering = tokens._replace(embeddings=tapped.hidden[layer])
        resumed = backbone.prefill(entering, start_layer=layer, logits="all")
        close(resumed.logits, out.logits, f"logits from {layer}")
        rows = {name: np.asarray(backbone.layout.rows_of(name, range(layer, layers)), int) for name in out.kv}
        close_kv(resumed.kv, {name: value[rows[name]] for name, value in out.kv.items()}, f"from {layer}")
    if tokens.ahead is None:
        entering = tokens._replace(embeddings=np.asarray(tapped.hidden[last]))
        context = {name: value[:, :, :3] for name, value in engine.items()}
        rest = entering.take(3, tokens.embeddings.shape[1])
        after = backbone.prefill(rest, context, start_layer=last, logits="all")
        close(after.logits, out.logits[:, 3:], "logits behind a context")


@pytest.mark.parametrize("family", marked(SOME, "gemma3", "deepseek_v3"))
def test_steps_over_a_cache_are_the_prefill(prefilled, family):
    backbone, tokens, out, engine = prefilled(family)
    length, cut = tokens.embeddings.shape[1], tokens.embeddings.shape[1] - 3
    before = np.arange(length)[:, None, None] < cut
    cache, logits = {name: np.where(before, value, 0) for name, value in engine.items()}, []
    for place in range(cut, length):
        with compilations() as compiled:
            step = backbone.decode(tokens.take(place, place + 1), cache, np.array([[place]]))
        assert place == cut or not [name for name in compiled if "recompute" in name]
        cache = step.cache
        logits.append(np.asarray(step.logits)[0, 0])
    close(np.stack(logits), out.logits[0, cut:], "logits")
    close_kv(cache, engine, "cache")


@pytest.mark.parametrize("family", marked(("qwen3_window", "deepseek_v3", "llama3_1", "qwen2_window"), "qwen3_window"))
def test_chunks_behind_a_context_are_one_prefill(prefilled, family):
    """For several rows, under a mask too; the last chunk begins inside the one before."""
    backbone, prompt, _, _ = prefilled(family)
    tokens = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), prompt.on_host())
    tokens.embeddings[1] = tokens.embeddings[1, ::-1]
    cut, some = 5, np.array([[8, 0, 3, 3], [1, 2, 0, 8]])
    causal = np.broadcast_to(np.tri(14, dtype=bool), (2, 1, 14, 14))
    seen = causal & (np.random.default_rng(0).random((2, 1, 14, 14)) < 0.6)
    seen[..., np.arange(14), np.arange(14)] = True
    for mask, rows in ((causal, some), (seen, "all")):
        full = backbone.prefill(tokens, mask=mask, logits="all")
        context = {name: np.asarray(value)[:, :, :cut] for name, value in cached(backbone, full, tokens).items()}
        part = None if mask is causal else mask[:, :, cut:]
        chunks = backbone.prefill(tokens.take(cut, 14), context, part, logits=rows, chunk=4)
        logits = np.asarray(full.logits)[:, cut:]
        close(chunks.logits, logits if mask is seen else np.take_along_axis(logits, some[..., None], 1), "logits")
        close_kv(chunks.kv, {name: np.asarray(value)[:, :, cut:] for name, value in full.kv.items()}, "chunks")


DEFAULT = "qwen3_window"
"""Grouped heads, layers that slide among layers that do not."""
KEYS, MORE, STEPS, TOTAL = 21, 4, 6, 128
"""Tokens of a context, behind it, and of an answer; slots of the pool."""

close_paged = functools.partial(assert_close_to_largest, bar=2e-5)


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
    """Two sequences whose KV is beside, and in padded pages among NaN, in part shared. A prefill is the oracle."""

    def __init__(self, backbone, page_size=8, *, padded=True, seed=0, shared=7):
        rng = np.random.default_rng(seed)
        self.ids = rng.integers(3, 290, (2, 48))  # the last ones are no prompt: a length that others run too
        self.ids[:, :shared] = self.ids[0, :shared]
        tokens = backbone.embed(self.ids).on_host()
        out = jax.device_get(backbone.prefill(tokens, logits="all"))
        self.logits, self.kv = out.logits[:, KEYS : KEYS + MORE], out.kv
        self.engine = jax.device_get(kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0))
        self.layout, self.page_size, self.padded = backbone.layout, page_size, padded
        self.rest = tokens.take(KEYS, KEYS + MORE)
        self.context = {name: value[:, :, :KEYS] for name, value in self.engine.items()}
        places = rng.permutation(TOTAL).astype(np.int32)
        self.slots = np.stack([places[:KEYS], places[KEYS : 2 * KEYS]])
        self.slots[:, :shared] = self.slots[0, :shared]
        self.free = places[2 * KEYS : 2 * KEYS + 2 * MORE].reshape(2, MORE)

    def pool(self):
        pool = kvp.pool.make_pool(self.layout, TOTAL // self.page_size, self.page_size, np.float32, padded=self.padded)
        for channel in self.layout.channels:
            flat = np.full((self.layout.layers, TOTAL, *pool[channel.name].shape[3:]), np.nan, np.float32)
            for row, slots in enumerate(self.slots):
                flat[:, slots] = 0
                flat[:, slots, :, : channel.width] = self.engine[channel.name][:, row, :KEYS]
            pool[channel.name] = jax.device_put(flat.reshape(pool[channel.name].shape))
        return pool

    def paged(self, *slots):
        return Paged.of(self.pool(), slots or self.slots, BUCKETS.of_keys)

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
            close_paged(step.logits, expected.logits)
        here = self.at(step.cache.pool, self.slots)
        for name, value in expected.cache.items():
            close_paged(here[name], value)
        return here


def words(value):
    return np.asarray(value).view(f"uint{8 * value.dtype.itemsize}")


def test_a_prefill_behind_pages_is_one_prefill(backbone, case):
    out = backbone.prefill(case.rest, case.paged(), logits="all")
    close_paged(out.logits, case.logits)
    for name, value in case.kv.items():
        close_paged(out.kv[name], value[:, :, KEYS : KEYS + MORE])


def test_steps_write_into_the_pool_in_place(backbone, case):
    """Two calls of half of the tokens: the second reads what the first wrote, in pages it did not have."""
    paged = case.paged()
    before = {name: words(value).copy() for name, value in paged.pool.items()}
    first = backbone.decode(case.rest.take(0, 2), paged, case.free[:, :2], logits="all")
    assert all(value.is_deleted() for value in paged.pool.values())
    second = backbone.decode(case.rest.take(2, MORE), first.cache, case.free[:, 2:], logits="all")
    close_paged(np.concatenate([first.logits, second.logits], axis=1), case.logits)
    written = case.at(second.cache.pool, case.free)
    others = np.setdiff1d(np.arange(TOTAL), case.free)
    for name, value in second.cache.pool.items():
        close_paged(written[name], case.engine[name][:, :, KEYS : KEYS + MORE])
        flat = words(value).reshape(value.shape[0], TOTAL, -1)
        assert (flat[:, others] == before[name].reshape(flat.shape)[:, others]).all()
    for channel in case.layout.channels:
        rows = kvp.pool.read_slots(second.cache.pool, case.free.ravel())[channel.name]
        assert rows.shape[-1] == 128
        assert not np.asarray(rows[..., channel.width :]).any()
    with pytest.raises(PoolError, match="donated"):
        backbone.prefill(case.rest, paged)


def test_answers_behind_pages_are_those_of_one_prefill(backbone, case):
    paged, end = case.paged(), KEYS + MORE
    served = backbone.with_buckets(BUCKETS.of_keys)
    answer = served.generate(case.rest, STEPS, paged, stop=())
    whole = np.concatenate([case.ids[:, :end], answer, case.ids[:, end + STEPS :]], axis=1)
    greedy = np.argmax(backbone.prefill(backbone.embed(whole).on_host(), logits="all").logits, axis=-1)
    assert np.array_equal(answer, greedy[:, end - 1 : end - 1 + STEPS])
    assert [piece.ids.tolist() for piece in served.stream(case.rest, STEPS, paged, stop=())] == answer.T.tolist()
    assert not any(value.is_deleted() for value in paged.pool.values())


def test_recomputing_in_pages_equals_a_contiguous_cache(backbone, case):
    """Some tokens of the context again, nested sets of them per layer; the others stay bit-equal."""
    chosen = np.array([[8, 9, 20], [7, 11, 12]])
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
    run = lambda case, paged, start: (
        backbone.prefill(case.rest.shift(start), paged, logits="all"),
        backbone.decode(case.rest.take(0, 2), paged, case.free[:, :2], logits="all"),
    )
    run(case, case.paged(), 0)
    other = PagingCase(backbone, seed=8)
    shorter = other.paged(other.slots[0], other.slots[1, 7:])
    assert shorter.table.shape == case.paged().table.shape
    with compilations() as compiled:
        run(other, shorter, 9)
    assert not compiled


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
    case = PagingCase(backbone, page_size, padded=padded, seed=page_size)
    close_paged(backbone.prefill(case.rest, case.paged(), logits="all").logits, case.logits)
    close_paged(backbone.decode(case.rest, case.paged(), case.free).logits, case.logits[:, -1:])


@pytest.mark.nightly
def test_in_buckets_and_in_chunks_and_under_masks(backbone, case):
    served = backbone.with_buckets(Buckets(smallest=16))
    close_paged(served.prefill(case.rest, case.paged(), logits="all", chunk=2).logits, case.logits)
    step = served.decode(case.rest, case.paged(), case.free, logits="all")
    close_paged(step.logits, case.logits)
    # A mask over the pages' keys: the last keys of each row are hidden.
    paged, hidden = case.paged(), 4
    side = np.ones((2, 1, MORE, KEYS + MORE), bool)
    side[..., KEYS:] = np.tri(MORE, dtype=bool)
    side[..., KEYS - hidden : KEYS] = False
    over = np.ones((2, 1, MORE, paged.key_count + MORE), bool)
    over[..., paged.key_count :] = np.tri(MORE, dtype=bool)
    over[..., : paged.key_count] = (paged.places < KEYS - hidden)[:, None, None]
    masked = served.prefill(case.rest, paged, over, logits="all")
    close_paged(masked.logits, backbone.prefill(case.rest, case.context, side, logits="all").logits)


@pytest.mark.nightly
def test_a_part_of_the_layers_in_pages_equals_that_in_a_contiguous_cache(backbone, case):
    """The lower layers, and from their residual the last one; what a call does not run keeps its KV."""
    top = backbone.layout.layers - 1
    chosen = np.array([[8, 9, 20], [7, 11, 12]], np.int32)
    tokens = backbone.embed(np.random.default_rng(5).integers(3, 290, (2, 3)))._replace(positions=chosen)
    slots = np.take_along_axis(case.slots, chosen, axis=1)

    options = {"stop_layer": top, "hidden_at": (top,)}
    expected = backbone.recompute(tokens, case.context, chosen, **options)
    step = backbone.recompute(tokens, case.paged(), slots, **options)
    close_paged(step.hidden[top], expected.hidden[top])
    for name, value in case.check_step(step, expected).items():
        assert np.array_equal(value[top], case.context[name][top])

    entering = tokens._replace(embeddings=expected.hidden[top])
    expected = backbone.recompute(entering, expected.cache, chosen, start_layer=top)
    case.check_step(backbone.recompute(entering, step.cache, slots, start_layer=top), expected)


@pytest.mark.nightly
def test_rows_without_a_context_begin_at_position_0(backbone, case):
    rest = case.rest._replace(positions=np.stack([np.arange(MORE), np.asarray(case.rest.positions)[1]]))
    out = backbone.prefill(rest, case.paged([], case.slots[1]), logits="all")
    alone = backbone.prefill(Tokens(rest.embeddings[:1], rest.positions[:1]), logits="all")
    close_paged(out.logits[0], alone.logits[0])
    close_paged(out.logits[1], case.logits[1])
