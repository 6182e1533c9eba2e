"""The connector's decisions and its work on a pool, with stand-ins for the engine's objects: vllm is not imported."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import contextlib
import dataclasses
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, InputError, PoolError, PositionError
from kvpatch_jax.plan import Certificate, Certified, Rank
from kvpatch_jax.serving.vllm import Asked, Feature, Settings, parallel, plan_request, segments_of
from kvpatch_jax.serving.vllm.ahead import Ahead
from kvpatch_jax.serving.vllm.layouts import check_model, layout_of
from kvpatch_jax.serving.vllm.loading import WorkerSide
from kvpatch_jax.serving.vllm.messages import Load, Orders, Piece, Save, blocks_from, slots_of
from kvpatch_jax.serving.vllm.planning import Step, StockedPatch
from kvpatch_jax.serving.vllm.scheduling import SchedulerSide
from kvpatch_jax.serving.vllm.stores import Looked, Stores
from kvpatch_jax.store.format.naming import Served
from tests.arrays import placed

TOKENS = list(range(100, 130))
ENDS = (8, 18, 24)
SETTINGS = Settings(store="/nowhere", backbone="tiny")
LAYOUT = kvp.KVLayout.gqa(2, 1, 64, kvp.Rope(1e4, 64, angles="float32"))
PAGE = 4


class Shelf:
    """A store of names: canonicals, and patches by chunk and front."""

    def __init__(self, canonicals, patches=()):
        self.canonicals, self.kept = set(canonicals), dict(patches)

    def has_canonical(self, id):
        return id in self.canonicals

    def patches(self, id, front):
        return self.kept.get((id, front), [])


def certificate_of(*rows):
    made = [Certified(*row[:3], "forget", 0.0, 0.0, 0.0, row[3], 1.0, 1.0, 1.0, None, 0.0, row[4], 10) for row in rows]
    given = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    given |= {"chunks": 3, "tokens": 99, "content": "c", "asked": "a", "disjoint": True}
    return Certificate(**given, rows=tuple(made), recommended=Rank(4, "r"))


ROWS = [("stored", 4, behind, 0.01 * (behind + 1), 0.1) for behind in (0, 1, 2)]
ROWS += [("bare", 0, behind, 5.0, 0.9) for behind in (0, 1, 2)]


@pytest.fixture(scope="module")
def segments():
    return segments_of("tiny", TOKENS, ends=ENDS)


@pytest.fixture(scope="module")
def shelf(segments):
    first, second, third = (own.id for own in segments)
    patches = {(second, (first,)): [StockedPatch("aa", 2), StockedPatch("bb", 4)]}
    return Shelf([first, second, third], patches)


def test_chunks_are_named_by_what_they_hold_and_not_by_where():
    moved = segments_of("tiny", [1, 2, *TOKENS[8:18], 5], ends=[2, 12])
    first, second, _ = segments_of("tiny", TOKENS, ends=ENDS)
    assert moved[1].id == second.id
    assert (second.begin, second.end) == (8, 18)
    assert len({first.id, second.id, segments_of("other", TOKENS, ends=ENDS)[0].id}) == 3
    named = lambda name, ends=(6,): segments_of("tiny", [9] * 8, [Feature(name, 2, 3)], ends)[0].id
    assert named("cat") != named("dog")
    assert named("cat") != segments_of("tiny", [9] * 8, ends=(6,))[0].id


def test_images_are_chunks_with_the_tokens_around_them():
    tokens = [7, 7, 1, 3, 3, 2, 1, 3, 3, 2, 8]
    features = [Feature("b", 7, 2), Feature("a", 3, 2)]
    ends = lambda **more: [own.end for own in segments_of("tiny", tokens, features, **more)]
    assert ends(frame=(1, 2)) == [2, 6, 10]
    assert ends() == [3, 5, 7, 9]
    assert segments_of("tiny", tokens[:9], features)[-1].end == 7  # the last image is the question
    assert segments_of("tiny", tokens) == ()
    with pytest.raises(InputError, match="inside an image at 3 to 5"):
        segments_of("tiny", tokens, features, ends=[4])
    with pytest.raises(InputError, match="question"):
        segments_of("tiny", tokens, features, ends=[11])


def test_exact_requests_get_the_leading_chunk_and_no_salt(segments, shelf):
    planned = plan_request(segments, shelf, SETTINGS, Asked(), certificate_of(*ROWS))
    assert planned.steps == (Step(segments[0], "leading"),)
    assert (planned.matched, planned.exact, planned.kl) == (8, True, 0.0)
    assert planned.why == "what stands behind another chunk is approximate"
    assert planned.salt(SETTINGS, Asked(), None) is None
    assert planned.salt(SETTINGS, Asked(), "own") == "own"
    assert plan_request(segments, Shelf([segments[1].id]), SETTINGS, Asked()).matched == 0


def test_the_certificate_decides_how_far_an_approximate_prompt_is_matched(segments, shelf):
    asked = lambda **more: Asked(policy="approximate", **more)
    plan = lambda own, rows=ROWS, settings=SETTINGS: plan_request(
        segments, shelf, settings, own, certificate_of(*rows) if rows else None
    )
    whole = plan(asked())
    assert [(step.point, step.patch, step.rank) for step in whole.steps] == [
        ("leading", None, 0),
        ("stored", "bb", 4),
        ("bare", None, 0),
    ]
    assert (whole.matched, whole.kl) == (24, 5.0)
    within = plan(asked(kl=0.1))
    # The third chunk is prefilled behind an approximate one, and so counts among the others.
    assert (within.matched, within.kl) == (18, 0.02)
    assert "chunk 3 of 3 is not certified" in within.why
    assert plan(asked(kl=0.015)).matched == 8
    assert plan(asked(kl=0.1, flips=0.05)).matched == 8
    assert plan(asked(), settings=Settings(store="s", backbone="tiny", most_kl=0.1)).matched == 18
    assert plan(asked(), rows=None).matched == 8
    loose = plan(asked(), rows=None, settings=Settings(store="s", backbone="tiny", uncertified=True))
    assert (loose.matched, loose.kl) == (24, None)


def test_every_approximate_plan_has_a_salt_of_its_own(segments, shelf):
    loose = Settings(store="s", backbone="tiny", uncertified=True)
    first, second = (own.id for own in segments[:2])
    asked = Asked(policy="approximate")
    plans = [
        plan_request(segments, shelf, loose, asked),
        plan_request(segments, Shelf([first, second], shelf.kept), loose, asked),
        plan_request(segments, Shelf([first, second]), loose, asked),
        plan_request(segments, Shelf([first, second], {(second, (first,)): [StockedPatch("cc", 4)]}), loose, asked),
    ]
    assert not any(own.exact for own in plans)
    other = Asked(policy="approximate", tenant="other")
    salts = [own.salt(loose, asked, None) for own in plans]
    salts += [plans[0].salt(loose, asked, "own"), plans[0].salt(loose, other, None)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("kvpatch-") for salt in salts)
    assert plan_request(segments, shelf, loose, asked).salt(loose, asked, None) == salts[0]


def test_settings_and_parameters_are_read_strictly(unchecked):
    assert Asked.read(None) is None
    assert Asked.read({"do_remote_prefill": True}) is None
    assert Asked.read({"kvpatch": {"segments": [3, 9], "kl": 0.1}}) == Asked(segments=(3, 9), kl=0.1)
    for given in ({"policy": "any"}, {"segments": [9, 3]}, {"segments": 3}, {"kl": -1}, {"tenant": ""}, {"rank": 3}):
        with pytest.raises(InputError, match="kv_transfer_params"):
            Asked.read({"kvpatch": given})
    assert Settings.read({"store": "s", "backbone": "b", "image_frame": [1, 2]}).image_frame == (1, 2)
    for given in ({}, {"store": "s"}, {"store": "s", "backbone": "b", "rnak": 3}, {"store": "s", "backbone": ""}):
        with pytest.raises(ConfigError, match="connector"):
            Settings.read(given)


def test_slots_of_blocks():
    assert slots_of((5, 2, 9), 4, 3, 9).tolist() == [23, 8, 9, 10, 11, 36]
    assert blocks_from((5, 2, 9), 4, 4, 8) == {2}
    assert blocks_from((5, 2, 9), 4, 3, 9) == {5, 2, 9}
    with pytest.raises(PoolError, match="3 blocks of 4"):
        slots_of((5, 2, 9), 4, 3, 13)


def test_layouts_of_configurations():
    text = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
    plain = layout_of({**text, "rope_theta": 1e4}, ["LlamaForCausalLM"])
    assert plain == kvp.KVLayout.gqa(2, 2, 64, kvp.Rope(1e4, 64, angles="float32"))
    table = {"rope_type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    found = layout_of({**text, "rope_parameters": table}, ["Qwen2_5_VLForConditionalGeneration"])
    assert found.rope.sections == (8, 12, 12)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    whole = scaled | {"original_max_position_embeddings": 8192}
    found = layout_of({**text, "rope_theta": 5e5, "rope_scaling": whole}, ["LlamaForCausalLM"])
    # Llama 3.1's: the fastest stay, the slowest are an eighth; wavelengths of 8192 / 4 to 8192 are between.
    stretched = kvp.Rope(5e5, 64).inverse_frequencies / found.rope.inverse_frequencies
    waves = 2 * np.pi / kvp.Rope(5e5, 64).inverse_frequencies
    np.testing.assert_allclose(stretched[waves < 2048], 1)
    np.testing.assert_allclose(stretched[waves > 8192], 8)
    between = stretched[(waves > 2048) & (waves < 8192)]
    assert between.size
    assert ((between > 1) & (between < 8)).all()
    for more, families in (
        ({"rope_theta": 1e4, "rope_scaling": scaled}, ["LlamaForCausalLM"]),
        ({"rope_theta": 1e4}, ["KimiVL"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, ["LlamaForCausalLM"]),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, ["LlamaForCausalLM"]),
        ({}, ["LlamaForCausalLM"]),
    ):
        with pytest.raises(ConfigError, match="connector"):
            layout_of({**text, **more}, families)


def test_a_model_whose_cache_was_not_looked_at_is_refused():
    """tpu-inference runs vLLM's torch models too, whose angles are rounded otherwise: asked to, or lacking its own."""
    own = type("LlamaForCausalLM", (), {"__module__": "tpu_inference.models.jax.llama3"})
    other = type("Wrapped", (), {"__module__": "tpu_inference.models.vllm.vllm_model_wrapper"})
    check_model(own())
    with pytest.raises(ConfigError, match=r"models\.vllm"):
        check_model(other())


# ------------------------------------------------------------------------------------------- scheduler and worker


def request_of(name, params, tokens=TOKENS, **more):
    given = {"prompt_token_ids": tokens, "prompt_embeds": None, "lora_request": None, "mm_features": []}
    given |= {"cache_salt": None, "block_hashes": ["early"], "kv_transfer_params": params}
    given |= {"skip_reading_prefix_cache": False, **more}
    made = SimpleNamespace(request_id=name, **given)
    made.update_block_hashes = lambda: made.block_hashes.append(f"with {made.cache_salt}")
    return made


def output_of(scheduled, computed, blocks):
    new = [SimpleNamespace(req_id=name, num_computed_tokens=count) for name, count in computed.items()]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        num_scheduled_tokens=scheduled,
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (blocks[name],)),
    )


class Pool:
    """A runner's pool of 20 blocks, and what its prefills would leave: keys that say which token of which prompt."""

    def __init__(self, dtype=np.float32):
        packing = 4 // np.dtype(dtype).itemsize  # one head, filled up
        self.kv_caches = [placed(np.zeros((20, PAGE, 1, packing, 128)), dtype) for _ in range(2)]
        self.requests = {}

    def prefill(self, name, tokens, blocks, begin=0):
        """As an engine's forward that has seen all in front: values depend on the whole prefix, keys are turned."""
        self.requests[name] = SimpleNamespace(mrope_positions=None)
        kv = true_kv(tokens)
        for layer in range(2):
            page = np.array(self.kv_caches[layer])
            for place in range(begin, len(tokens)):
                row = np.concatenate([kv[own][layer, place, 0] for own in "kv"])
                page[blocks[place // PAGE], place % PAGE, 0, 0] = row
            self.kv_caches[layer] = placed(page)

    def rows(self, blocks, begin, end):
        """What stands in the pool of tokens, [L, T, 128]."""
        pages = np.stack([np.asarray(own) for own in self.kv_caches])
        return np.stack([pages[:, blocks[place // PAGE], place % PAGE, 0, 0] for place in range(begin, end)], axis=1)


def true_kv(tokens):
    """Engine-frame KV of a prompt {channel: [L, T, 1, 64]}; but in the lowest layer it depends on those in front."""
    rng = lambda token: np.random.default_rng(token)
    own = np.stack([rng(token).standard_normal((2, 2, 1, 64)) for token in tokens], axis=2).astype(np.float32)
    front = np.cumsum(own, axis=2) - own
    front[:, 0] = 0
    free = dict(zip("kv", own + 0.05 * front, strict=True))
    positions = np.arange(len(tokens), dtype=np.float32)
    return {name: np.asarray(value) for name, value in kvp.to_engine(LAYOUT, free, positions, 0).items()}


@contextlib.contextmanager
def sides_of(folder, dtype=np.float32):
    settings = Settings(store=str(folder / "store"), backbone="tiny", rank=10, uncertified=True)
    pool, worker = Pool(dtype), WorkerSide(settings, LAYOUT, PAGE)
    worker.register(pool)
    scheduler = SchedulerSide(settings, PAGE)
    yield SimpleNamespace(scheduler=scheduler, worker=worker, pool=pool)
    scheduler.close()
    worker.close()


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


def matched_of(scheduler, request, computed=0):
    """Asks as an engine does, step after step, until the request's chunks were read."""
    for _ in range(1000):
        count = scheduler.matched(request, computed)
        if count is not None:
            return count
        assert scheduler.orders(output_of({}, {}, {})) == Orders()
    raise AssertionError("its chunks are never read")


def served(sides, name, params, tokens=TOKENS, blocks=tuple(range(3, 11)), computed=0):
    """One request through both sides, as an engine calls them; returns it and the tokens that it was matched."""
    request = request_of(name, {"kvpatch": params}, tokens)
    sides.scheduler.arrived(request)
    count = matched_of(sides.scheduler, request, computed)
    sides.scheduler.allocated(request, blocks, count)
    scheduled = len(tokens) - computed - count
    orders = sides.scheduler.orders(output_of({name: scheduled}, {name: computed + count}, {name: blocks}))
    sides.pool.requests[name] = SimpleNamespace(mrope_positions=None)
    sides.worker.load(orders)
    loaded = sides.pool.rows(blocks, 0, len(tokens))
    sides.pool.prefill(name, tokens, blocks, computed + count)
    sides.worker.save(orders)
    sides.worker.former.flush()
    failed = sides.worker.take_failed()
    sides.scheduler.failed(failed)
    return SimpleNamespace(request=request, count=count, loaded=loaded, failed=failed, orders=orders)


def test_chunks_formed_of_traffic_are_spliced_where_they_are_asked_for_next(sides):
    """A leading chunk comes back as the prefill left it, a patch of full rank gives KV behind the chunk in front."""
    ask = {"segments": [8, 18]}
    assert served(sides, "alone", {"segments": [10]}, TOKENS[8:]).count == 0
    whole = served(sides, "whole", ask)
    assert (whole.count, whole.request.cache_salt) == (0, None)
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}, "B's canonical, A's, and B behind A"

    found = served(sides, "again", ask | {"policy": "approximate"}, blocks=(19, 0, 18, 1, 17, 2, 16, 15), computed=4)
    assert found.count == 14
    assert not found.failed
    assert found.request.cache_salt.startswith("kvpatch-")
    assert found.request.block_hashes == [f"with {found.request.cache_salt}"]
    expected = np.concatenate([true_kv(TOKENS)[name][:, :, 0] for name in "kv"], axis=-1)
    np.testing.assert_allclose(found.loaded[:, 4:18], expected[:, 4:18], rtol=2e-4, atol=2e-4)
    assert not found.loaded[:, :4].any(), "the engine had these"
    assert not found.loaded[:, 18:].any()
    assert not found.orders.saves, "behind a patch nothing is formed"
    told = sides.scheduler.finished(found.request)["kvpatch"]
    # Rank 10 of 10 tokens: kept dense, and so of every direction.
    assert (told["matched"], told["exact"], told["served"]) == (18, False, [["leading", 0], ["stored", 64]])


def test_a_leading_chunk_of_a_bfloat16_pool_has_the_engines_bits(tmp_path):
    """Requests of an exact plan share blocks with all others, without a salt: so they hold what a prefill left."""
    with sides_of(tmp_path, jnp.bfloat16) as sides:
        served(sides, "alone", {"segments": [10]}, TOKENS[8:])
        served(sides, "whole", {"segments": [8, 18]})
        computed = sides.pool.rows(tuple(range(3, 11)), 0, 18)
        store = sides.worker.stores.of("default")
        first, second = segments_of("tiny", TOKENS, ends=[8, 18])
        kept = store.get(first.id, "tiny").kv
        assert [kept[name].dtype for name in "kv"] == [jnp.float32, jnp.bfloat16]
        (patch,) = store.get_patches(Served(chunk=second.id, backbone="tiny", antecedent=(first.id,)))
        assert {leaf.dtype for leaf in jax.tree.leaves(patch.factors)} == {np.dtype(jnp.bfloat16)}

        found = served(sides, "again", {"segments": [8]}, blocks=(19, 0, 18, 1, 17, 2, 16, 15))
        assert (found.count, found.request.cache_salt) == (8, None)
        assert (found.loaded[:, :8] == computed[:, :8]).all()
        patched = served(sides, "both", {"segments": [8, 18], "policy": "approximate"}, blocks=tuple(range(11, 19)))
        assert patched.count == 18
        np.testing.assert_allclose(np.float32(patched.loaded[:, 8:18]), np.float32(computed[:, 8:]), atol=0.03)


def test_kv_that_is_turned_otherwise_becomes_no_patch(sides, caplog):
    """The lowest layer of a chunk behind another is its canonical's, however the rest is conditioned."""
    ask = {"segments": [8, 18]}
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "first", {"segments": [8]})
    fast = dataclasses.replace(LAYOUT, rope=kvp.Rope(1e3, 64, angles="float32"))
    sides.worker.former.layout = fast
    served(sides, "whole", ask)
    assert sides.worker.former.counts == {"canonicals": 2, "failed": 1}
    assert "'k' in the lowest layer is" in caplog.text
    sides.worker.former.layout = LAYOUT
    served(sides, "again", ask)
    assert sides.worker.former.counts["patches"] == 1


def test_what_is_damaged_is_not_counted_on_and_formed_again(sides, tmp_path):
    served(sides, "forms", {"segments": [8]})
    store = sides.worker.stores.of("default")
    (segment,) = segments_of("tiny", TOKENS, ends=[8])
    (entry,) = store.disk.of_chunk(store.names.canonical("tiny", segment.id))
    path = tmp_path / "store" / entry.path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))

    found = served(sides, "next", {"segments": [8, 18]})
    assert (found.count, found.failed) == (0, set())
    assert sides.scheduler.finished(found.request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"
    assert sides.worker.former.counts["canonicals"] == 2, "it is in quarantine, and was formed again"
    assert served(sides, "after", {"segments": [8]}).count == 8


def test_what_is_not_asked_for_or_cannot_be_planned_is_left_alone(sides):
    for params, more in (
        (None, {}),
        ({"kvpatch": {"segments": [30]}}, {}),
        ({"kvpatch": {"segments": [3, 2]}}, {}),
        ({"kvpatch": {}}, {"lora_request": object()}),
        ({"kvpatch": {}}, {"prompt_token_ids": None}),
    ):
        request = request_of("any", params, **more)
        sides.scheduler.arrived(request)
        assert matched_of(sides.scheduler, request) == 0
        assert request.block_hashes == ["early"]
        assert sides.scheduler.finished(request) is None
    assert sides.scheduler.counts["refused"] == 2
    assert sides.scheduler.orders(output_of({"any": 30}, {"any": 0}, {})) == Orders()


@pytest.fixture
def held(sides, monkeypatch):
    """A store whose reads wait for `held.set()`; a leading chunk and a patch behind it are in it."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "patch", {"segments": [8, 18]})
    gate, read = threading.Event(), Looked.has_canonical
    monkeypatch.setattr(Looked, "has_canonical", lambda self, id: gate.wait(60) and read(self, id))
    yield gate
    gate.set()


def test_while_a_requests_chunks_are_read_others_are_served(sides, held):
    """The engine asks, is told to ask again, goes on; nothing waits for the store. Then the request is salted first."""
    scheduler, plan = sides.scheduler, {"kvpatch": {"segments": [8, 18], "policy": "approximate"}}
    slow, plain = request_of("slow", plan), request_of("plain", None)
    began = time.monotonic()
    scheduler.arrived(slow)
    scheduler.arrived(plain)
    assert scheduler.matched(slow, 0) is None
    assert scheduler.matched(plain, 0) == 0
    assert scheduler.orders(output_of({"plain": 30}, {"plain": 0}, {})) == Orders()
    assert time.monotonic() - began < 30, "the gate would have held it for 60 s"
    assert slow.cache_salt is None
    held.set()
    while scheduler.matched(slow, 0) is None and slow.cache_salt is None:
        time.sleep(0.001)
    assert slow.block_hashes == [f"with {slow.cache_salt}"]
    assert scheduler.matched(slow, 4) == 14


def test_what_was_looked_up_without_a_salt_is_not_counted(sides, held):
    """A plan that becomes ready between the engine's look into its cache and its question: asked again, once."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "approximate"}})
    scheduler.arrived(request)
    while not scheduler._ahead.is_ready("own"):
        time.sleep(0.001)
    assert scheduler.matched(request, 16) is None, "16 tokens of a plain request are no longer its own"
    assert scheduler.matched(request, 0) == 18
    leading = request_of("leading", {"kvpatch": {"segments": [8, 18]}})
    scheduler.arrived(leading)
    while not scheduler._ahead.is_ready("leading"):
        time.sleep(0.001)
    assert scheduler.matched(leading, 4) == 4, "no salt: nothing is to be looked up again"


def test_a_store_that_does_not_answer_costs_a_plain_prefill(sides, held):
    scheduler = sides.scheduler
    scheduler._ahead.patience = 0.05
    request = request_of("late", {"kvpatch": {"segments": [8]}})
    scheduler.arrived(request)
    assert scheduler.matched(request, 0) is None
    assert matched_of(scheduler, request) == 0
    assert scheduler.counts["unread"] == 1
    assert request.block_hashes == ["early"]
    output = output_of({"late": 30}, {"late": 0}, {"late": tuple(range(8))})
    assert scheduler.orders(output) == Orders(), "that store is not asked for anything else either"
    assert scheduler.finished(request)["kvpatch"]["why"] == "its chunks could not be read"


def test_where_every_reader_hangs_nobody_waits_for_them(sides, held):
    """The first ones wait for as long as a store may take, those that come then not at all; until it answers again."""
    scheduler = sides.scheduler
    ask = lambda name: request_of(name, {"kvpatch": {"segments": [8]}})
    patience, scheduler._ahead.patience = scheduler._ahead.patience, 0.2
    hanging = [ask(str(number)) for number in range(scheduler.settings.readers)]
    for request in hanging:
        scheduler.arrived(request)
    assert [matched_of(scheduler, request) for request in hanging] == [0] * len(hanging)
    scheduler._ahead.patience = patience
    later = [ask(f"later {number}") for number in range(3 * scheduler.settings.ahead)]
    for request in later:
        scheduler.arrived(request)
    assert [scheduler.matched(request, 0) for request in later] == [0] * len(later), "asked once, and not again"
    assert scheduler.counts["unread"] == len(hanging) + len(later)
    assert scheduler.finished(later[0])["kvpatch"]["why"] == "its chunks could not be read"
    held.set()
    while scheduler._ahead.stuck:
        time.sleep(0.001)
    after = ask("after")
    scheduler.arrived(after)
    assert matched_of(scheduler, after) == 8


def test_requests_that_are_abandoned_while_they_are_read_hang_nobody_else(sides, held):
    """Readers at work for nobody are no readers that hang: others wait for them."""
    scheduler = sides.scheduler
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(4)]
    for request in requests:
        scheduler.arrived(request)
    for request in requests[:3]:
        scheduler.finished(request)
    assert scheduler.matched(requests[3], 0) is None
    held.set()
    assert matched_of(scheduler, requests[3]) == 8


def test_a_process_ends_though_a_read_hangs():
    program = """
import threading
from kvpatch_jax.serving.vllm.ahead import Ahead
ahead, begun = Ahead(2, 8, 60.0), threading.Event()
ahead.add("own", lambda: (begun.set(), threading.Event().wait()))
begun.wait()
print("at the end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "at the end\n")


def test_what_was_read_is_held_by_its_request_alone():
    class Read:
        pass

    ahead = Ahead(1, 2, 60.0)
    ahead.add("own", Read)
    while not ahead.ready(1.0):
        pass
    read = weakref.ref(ahead.take("own"))
    ahead.let_go("own")
    gc.collect()
    assert read() is None, "or it fills memory until something else is read"
    ahead.close()


def test_the_engines_loop_touches_no_store(sides, monkeypatch):
    """Whatever the scheduler is asked: stores are looked into on threads of their own."""
    asked = []
    engine = threading.current_thread()
    for name in ("of", "has", "served", "formed"):
        own = getattr(Stores, name)

        def noting(self, *given, own=own, name=name):
            asked.append((name, threading.current_thread() is engine))
            return own(self, *given)

        monkeypatch.setattr(Stores, name, noting)
    ask = {"segments": [8, 18]}
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "whole", ask)
    served(sides, "exact", ask)
    approximate = served(sides, "approximate", ask | {"policy": "approximate"})
    assert approximate.count == 18
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}
    sides.scheduler.finished(approximate.request)
    assert {name for name, _ in asked} == {"of", "has", "served", "formed"}
    assert not [name for name, in_loop in asked if in_loop]


def test_what_two_requests_leave_at_once_is_formed_once(sides):
    """Both were planned before either was prefilled."""
    requests = [request_of(str(number), {"kvpatch": {"segments": [8]}}) for number in range(2)]
    for request in requests:
        sides.scheduler.arrived(request)
    blocks = {"0": tuple(range(8)), "1": tuple(range(8, 16))}
    for request in requests:
        assert matched_of(sides.scheduler, request) == 0
        sides.scheduler.allocated(request, blocks[request.request_id], 0)
        sides.pool.prefill(request.request_id, TOKENS, blocks[request.request_id])
    orders = sides.scheduler.orders(output_of({"0": 30, "1": 30}, {"0": 0, "1": 0}, blocks))
    assert [save.wanted for save in orders.saves] == [(0,), (0,)]
    sides.worker.save(orders)
    sides.worker.former.flush()
    assert sides.worker.former.counts == {"canonicals": 1, "known": 1}


def test_a_request_that_reads_no_cache_is_formed_of(sides):
    """Its prompt's log-probabilities are asked for, so that all of it is computed, and exactly."""
    blocks, request = tuple(range(8)), request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.arrived(request)
    assert sides.scheduler.matched(request, 0) == 0, "it is not asked again"
    sides.scheduler.allocated(request, blocks, 0)
    while not sides.scheduler._ahead.ready(1.0):
        pass
    assert sides.scheduler.orders(output_of({}, {}, {})) == Orders()
    sides.pool.prefill("own", TOKENS, blocks)
    (save,) = sides.scheduler.orders(output_of({"own": 30}, {"own": 0}, {"own": blocks})).saves
    assert save.wanted == (0,)
    assert sides.scheduler.finished(request)["kvpatch"]["why"] == "the request reads no cache"


def test_a_request_that_is_gone_is_not_salted_when_its_chunks_come(sides, held):
    scheduler = sides.scheduler
    request = request_of("gone", {"kvpatch": {"segments": [8, 18], "policy": "approximate"}})
    scheduler.arrived(request)
    assert scheduler.finished(request)["kvpatch"]["matched"] == 0
    held.set()
    assert scheduler.orders(output_of({}, {}, {})) == Orders()
    assert request.cache_salt is None
    assert "gone" not in scheduler._tracked


def test_whatever_reading_raises_the_request_is_served_plainly(sides, monkeypatch):
    monkeypatch.setattr(Looked, "has_canonical", lambda self, id: 1 / 0)
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    sides.scheduler.arrived(request)
    assert matched_of(sides.scheduler, request) == 0
    assert sides.scheduler.counts["unread"] == 1


def test_chunks_of_few_requests_are_held_at_once(sides, held):
    """They fill memory: the ninth is read when one of eight was placed, or is gone; plans of nothing hold nothing."""
    scheduler, most = sides.scheduler, sides.scheduler.settings.ahead
    held.set()
    requests = [request_of(str(number), {"kvpatch": {"segments": [8, 18]}}) for number in range(most + 2)]
    for request in requests:
        scheduler.arrived(request)
    for request in requests[:most]:
        assert matched_of(scheduler, request) == 8
    assert [scheduler.matched(request, 0) for request in requests[most:]] == [None, None]
    scheduler.allocated(requests[0], tuple(range(8)), 8)
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    assert matched_of(scheduler, requests[most]) == 8
    assert scheduler.matched(requests[most + 1], 0) is None
    scheduler.allocated(requests[1], tuple(range(8)), 0)
    assert matched_of(scheduler, requests[most + 1]) == 8
    plain = [request_of(f"{number} unknown", {"kvpatch": {"segments": [9]}}) for number in range(most + 2)]
    scheduler.arrived(plain[0])
    assert scheduler.matched(plain[0], 0) is None
    scheduler.finished(requests[2])
    for request in plain:
        scheduler.arrived(request)
        assert matched_of(scheduler, request) == 0
    assert sum(len(tracked.planned.pieces) for tracked in scheduler._tracked.values()) == most - 1


def test_what_is_preempted_is_read_and_salted_anew(sides, held):
    """Its chunks were let go of when they were placed. What the store has lost since is computed, without the salt."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8, 18], "policy": "approximate"}}, cache_salt="mine")
    scheduler.arrived(request)
    assert matched_of(scheduler, request) == 18
    salt = request.cache_salt
    scheduler.allocated(request, tuple(range(8)), 18)
    assert not scheduler._tracked["own"].planned.pieces
    assert len(scheduler.orders(output_of({}, {}, {})).loads) == 1
    assert scheduler.matched(request, 18) == 0, "all of it is in the engine's cache"
    assert scheduler.matched(request, 0) is None
    assert matched_of(scheduler, request) == 18
    assert request.cache_salt == salt
    scheduler.allocated(request, tuple(range(8)), 10)
    assert scheduler.orders(output_of({}, {}, {})).loads[0].first == 8

    store = sides.worker.stores.of("default")
    for segment in segments_of("tiny", TOKENS, ends=[8, 18]):
        store.delete(segment.id, "tiny")
    assert matched_of(scheduler, request) == 0
    assert request.cache_salt == "mine"
    assert scheduler.finished(request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"


def test_blocks_that_a_preempted_request_left_are_no_longer_its_own(sides, held):
    """Found whole in the engine's cache, it loads nothing: another's failure in its old blocks is none of its own."""
    held.set()
    scheduler = sides.scheduler
    request = request_of("own", {"kvpatch": {"segments": [8]}})
    scheduler.arrived(request)
    scheduler.allocated(request, (3, 4), matched_of(scheduler, request))
    assert scheduler.matched(request, 8) == 0
    scheduler.allocated(request, (7, 8), 0)
    scheduler.failed({3, 4})
    assert not scheduler.finished(request)["kvpatch"]["failed"]


def test_a_request_that_reads_no_cache_is_told_that_nothing_was_served(sides):
    """The engine ignores what is matched where a prompt's log-probabilities are asked for."""
    served(sides, "forms", {"segments": [8]})
    request = request_of("own", {"kvpatch": {"segments": [8]}}, skip_reading_prefix_cache=True)
    sides.scheduler.arrived(request)
    assert matched_of(sides.scheduler, request) == 0
    told = sides.scheduler.finished(request)["kvpatch"]
    assert (told["matched"], told["served"], told["exact"]) == (0, [], True)


def test_a_chunk_elsewhere_than_the_engine_counted_is_not_written(sides):
    """Positions are the engine's own: a chunk whose tokens stand otherwise is told by its blocks."""
    served(sides, "forms", {"segments": [8]})
    (segment,) = segments_of("tiny", TOKENS, ends=[8])
    chunk = sides.worker.stores.of("default").get(segment.id, "tiny")
    piece = Piece(Step(segment._replace(begin=1, end=10), "leading"), chunk)
    load = Load("there", (piece,), 0, (3, 4, 5))
    planned = request_of("there", {"kvpatch": {"segments": [8, 18]}})
    sides.scheduler.arrived(planned)
    sides.scheduler.allocated(planned, (3, 4), matched_of(sides.scheduler, planned))
    sides.pool.requests["there"] = SimpleNamespace(mrope_positions=None)
    before = [np.asarray(own) for own in sides.pool.kv_caches]
    sides.worker.load(Orders((load,)))
    saves = Orders(saves=(Save("there", "default", (segment,), (0,), (5, 6)),))
    sides.worker.save(saves)
    failed = sides.worker.take_failed()
    assert failed == {3, 4, 5}
    sides.scheduler.failed(failed)
    assert sides.scheduler.matched(planned, 0) == 0, "what could not be loaded is not tried again"
    assert sides.scheduler.finished(planned)["kvpatch"]["failed"]
    assert sides.worker.former.counts["canonicals"] == 1, "it shares a block that was not filled"
    assert all((own == np.asarray(now)).all() for own, now in zip(before, sides.pool.kv_caches, strict=True))


def test_under_mrope_a_chunk_starts_where_the_engine_counted_it(tmp_path):
    """A text token, an image of 2 by 3 patches and a text token, behind five texts and behind another image."""
    rope = kvp.Rope(1e4, 64, sections=(8, 12, 12), angles="float32")
    layout = kvp.KVLayout.gqa(2, 1, 64, rope)
    settings = Settings(store=str(tmp_path), backbone="tiny")
    worker = WorkerSide(settings, layout, PAGE)
    grid = [(1, 1 + row, 1 + column) for row in range(2) for column in range(3)]
    local = np.array([(0, 0, 0), *grid, (4, 4, 4)], np.float32)
    counted = np.concatenate([np.arange(5)[:, None] * [1, 1, 1], local.astype(int) + 5, [[10] * 3]]).T
    pages = [placed(np.zeros((20, PAGE, 1, 1, 128)), np.float32) for _ in range(2)]
    worker.register(SimpleNamespace(kv_caches=pages, requests={"own": SimpleNamespace(mrope_positions=counted)}))
    assert worker._start("own", 5, local).tolist() == [5, 5, 5]
    with pytest.raises(PositionError, match="not the engine's"):
        worker._start("own", 4, local)
    worker._runner.requests["own"].mrope_positions = None
    with pytest.raises(PositionError, match="M-RoPE"):
        worker._start("own", 5, local)


def test_a_pool_of_another_form_is_refused(unchecked, tmp_path):
    worker = WorkerSide(Settings(store=str(tmp_path), backbone="tiny"), LAYOUT, PAGE)
    for pages, words in (
        ([jnp.zeros((20, PAGE, 1, 1, 128))], "2 layers|1 layers"),
        ([jnp.zeros((20, 8, 1, 1, 128))] * 2, "8 tokens"),
        ([jnp.zeros((20, PAGE, 1, 4, 128), jnp.float8_e4m3fn)] * 2, "float8_e4m3fn; expected 16 or 32 bits"),
        ([jnp.zeros((20, PAGE, 2, 1, 128))] * 2, "64 . 64"),
    ):
        with pytest.raises(ValueError, match=words):
            worker.register(SimpleNamespace(kv_caches=pages))


def spread(executor="uni", groups=1, strategy=None, **sizes):
    """Asks whether an engine of these sizes is served: `strategy` as tpu-inference keeps it, or None."""
    one = dict.fromkeys(parallel.ALONE, 1)
    own = SimpleNamespace(tensor_parallel_size=8, distributed_executor_backend=executor, **{**one, **sizes})
    mesh = None if strategy is None else SimpleNamespace(sharding_strategy=SimpleNamespace(**strategy))
    parallel.check_parallel(own, mesh, groups)


def test_tensor_parallelism_alone_is_served():
    spread()
    spread(strategy={"tensor_parallelism": 8, "data_parallelism": 1})
    for given, words in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size': 2"),
        ({"data_parallel_size": 4}, "data_parallel_size': 4"),
        ({"decode_context_parallel_size": 2}, "decode_context"),
        ({"prefill_context_parallel_size": 2}, "prefill_context"),
        ({"groups": 2}, "groups of caches': 2"),
        ({"strategy": {"tensor_parallelism": 2, "data_parallelism": 4}}, "{'data_parallelism': 4}"),
        ({"strategy": {"tensor_parallelism": 2, "attention_data_parallelism": 2}}, "attention_data_parallelism': 2"),
        ({"executor": "ray"}, "'ray'; expected 'uni'"),
        ({"executor": SimpleNamespace}, "SimpleNamespace"),
    ):
        with pytest.raises(ConfigError, match=words):
            spread(**given)


def test_neither_vllm_nor_torch_is_imported():
    assert not {"vllm", "torch"} & sys.modules.keys()
