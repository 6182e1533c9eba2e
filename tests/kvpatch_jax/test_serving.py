"""The connector's decisions and its work on a pool, with stand-ins for the engine's objects: vllm is not imported."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
import math
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE, TOKENS, matched_of, output_of, request_of, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, InputError, PoolError, PositionError
from kvpatch_jax.plan import DEFAULT_KL, Certificate, CertifiedLoss, RankChoice
from kvpatch_jax.serving.vllm import ConnectorConfig, PromptFeature, RequestOptions, parallel, plan_request, segments_of
from kvpatch_jax.serving.vllm.layouts import check_model, layout_of
from kvpatch_jax.serving.vllm.messages import (
    ChunkPayload,
    LoadCommand,
    SaveCommand,
    StepCommands,
    blocks_from,
    slots_of,
)
from kvpatch_jax.serving.vllm.request_plan import ChunkStep, StockedPatch
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from kvpatch_jax.store.format.naming import PatchKey
from tests.arrays import placed

ENDS = (8, 18, 24)
SETTINGS = ConnectorConfig(store="/nowhere", backbone="tiny")


class Shelf:
    """A store of names: canonicals, and patches by chunk and front."""

    def __init__(self, canonicals, patches=()):
        self.canonicals, self.kept = set(canonicals), dict(patches)

    def has_canonical(self, id):
        return id in self.canonicals

    def patches(self, id, front):
        return self.kept.get((id, front), [])


def certificate_of(*rows):
    made = [
        CertifiedLoss(*row[:3], "forget", 0.0, 0.0, 0.0, row[3], 1.0, 1.0, 1.0, None, 0.0, row[4], 10) for row in rows
    ]
    given = {"backbone": "tiny", "model": "m", "made": "2026-01-01", "level": 0.95, "calibration": 30, "held_out": 30}
    given |= {"chunks": 3, "tokens": 99, "content": "c", "asked": "a", "disjoint": True}
    given |= {"modalities": ("text",)}
    return Certificate(**given, rows=tuple(made), recommended=RankChoice(4, "r"))


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
    named = lambda name, ends=(6,): segments_of("tiny", [9] * 8, [PromptFeature(name, 2, 3)], ends)[0].id
    assert named("cat") != named("dog")
    assert named("cat") != segments_of("tiny", [9] * 8, ends=(6,))[0].id


def test_images_are_chunks_with_the_tokens_around_them():
    tokens = [7, 7, 1, 3, 3, 2, 1, 3, 3, 2, 8]
    features = [PromptFeature("b", 7, 2), PromptFeature("a", 3, 2)]
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
    planned = plan_request(segments, shelf, SETTINGS, RequestOptions(), certificate_of(*ROWS))
    assert planned.steps == (ChunkStep(segments[0], "leading"),)
    assert (planned.matched, planned.exact, planned.kl) == (8, True, 0.0)
    assert planned.why == "what stands behind another chunk is approximate"
    assert planned.salt(SETTINGS, RequestOptions(), None) is None
    assert planned.salt(SETTINGS, RequestOptions(), "own") == "own"
    assert plan_request(segments, Shelf([segments[1].id]), SETTINGS, RequestOptions()).matched == 0


def test_a_prompt_beyond_what_was_measured_is_served_exactly(segments, shelf):
    asked, certificate = RequestOptions(policy="approximate", kl=0.1), certificate_of(*ROWS)
    within = plan_request(segments, shelf, SETTINGS, asked, certificate)
    assert (within.matched, within.kl) == (18, 0.02)
    assert [segment.span for segment in segments] == [8, 10, 6]
    for smaller, said in (
        ({"tokens": 23}, "window of 24 tokens; certified up to 23"),
        ({"chunks": 1}, "window of 2 chunks; certified up to 1"),
        ({"spans": (1, 9)}, "chunk that spans 10 positions; certified from 1 to 9"),
        ({"modalities": ("image",)}, "chunk of text; certified of image"),
    ):
        beyond = plan_request(segments, shelf, SETTINGS, asked, dataclasses.replace(certificate, **smaller))
        assert (beyond.matched, beyond.kl, beyond.exact) == (8, 0.0, True)
        assert said in beyond.why
    far = [*segments[:2], segments[2]._replace(end=400_020)]
    assert plan_request(far, shelf, SETTINGS, asked, certificate).exact
    images = segments_of(
        "tiny", TOKENS, [PromptFeature("a", 9, 4), PromptFeature("b", 18, 2), PromptFeature("c", 21, 2)], ENDS
    )
    assert [(own.modality, own.span) for own in images] == [("text", 8), ("image", None), ("images", None)]


def test_the_certificate_decides_how_far_an_approximate_prompt_is_matched(segments, shelf):
    asked = lambda policy="approximate", **more: RequestOptions(policy=policy, **more)
    generous = ConnectorConfig(store="s", backbone="tiny", most_kl=10.0)
    plan = lambda own, rows=ROWS, settings=generous: plan_request(
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
    assert plan(asked(), settings=ConnectorConfig(store="s", backbone="tiny", most_kl=0.1)).matched == 18
    assert plan(asked(), rows=None).matched == 8


def test_blind_reuse_happens_by_its_name_alone(segments, shelf):
    """An operator that says no bound has one, and a request that says "approximate" is never served beyond it."""

    def plan(policy, rows=ROWS, **more):
        settings, certificate = (
            ConnectorConfig(store="s", backbone="tiny", **more),
            certificate_of(*rows) if rows else None,
        )
        return plan_request(segments, shelf, settings, RequestOptions(policy=policy), certificate)

    assert ConnectorConfig(store="s", backbone="tiny").most_kl == DEFAULT_KL == 0.05
    certified = plan("approximate")
    assert (certified.matched, certified.kl) == (18, 0.02), "the bare chunk would lose 5 nats"
    assert "chunk 3 of 3 is not certified within 0.05 nats" in certified.why
    assert plan("approximate", uncertified=True) == certified, "what the operator allows, the request has to ask for"
    assert plan("approximate", rows=[], uncertified=True).matched == 8
    assert plan("blind") == certified
    assert (plan("blind", uncertified=True).matched, plan("blind", uncertified=True).kl) == (24, 5.0)
    loose = plan("blind", rows=[], uncertified=True)
    assert (loose.matched, loose.kl) == (24, None)


def test_a_request_for_blind_reuse_that_is_not_allowed_is_served_plainly(tmp_path, caplog):
    with sides_of(tmp_path, uncertified=False) as sides:
        served(sides, "first", {"segments": [8]})
        assert served(sides, "exact", {"segments": [8]}).count == 8
        blind = served(sides, "blind", {"segments": [8], "policy": "blind"})
        assert (blind.count, sides.scheduler.finished(blind.request)) == (0, None)
        assert sides.scheduler.counts["refused"] == 1
        assert "policy 'blind'; expected 'exact' or 'approximate'" in caplog.text


@pytest.mark.parametrize(
    "bound", [math.nan, math.inf, -0.1, -1, "0.05", "inf", True, [0.05], 10**400, {}], ids=lambda own: f"{own!r:.9}"
)
def test_a_bound_is_a_finite_number_from_0_on(unchecked, bound):
    for name in ("kl", "flips"):
        with pytest.raises(InputError, match=f"kv_transfer_params: {name}"):
            RequestOptions.read({"kvpatch": {name: bound}})
    for name in ("most_kl", "patience"):
        with pytest.raises(ConfigError, match=f"connector: {name}"):
            ConnectorConfig.read({"store": "s", "backbone": "b", name: bound})


def test_every_approximate_plan_has_a_salt_of_its_own(segments, shelf):
    loose = ConnectorConfig(store="s", backbone="tiny", uncertified=True)
    first, second = (own.id for own in segments[:2])
    asked = RequestOptions(policy="blind")
    plans = [
        plan_request(segments, shelf, loose, asked),
        plan_request(segments, Shelf([first, second], shelf.kept), loose, asked),
        plan_request(segments, Shelf([first, second]), loose, asked),
        plan_request(segments, Shelf([first, second], {(second, (first,)): [StockedPatch("cc", 4)]}), loose, asked),
    ]
    assert not any(own.exact for own in plans)
    other = RequestOptions(policy="blind", tenant="other")
    salts = [own.salt(loose, asked, None) for own in plans]
    salts += [plans[0].salt(loose, asked, "own"), plans[0].salt(loose, other, None)]
    assert len(set(salts)) == len(salts)
    assert all(salt.startswith("kvpatch-") for salt in salts)
    assert plan_request(segments, shelf, loose, asked).salt(loose, asked, None) == salts[0]


def test_settings_and_parameters_are_read_strictly(unchecked):
    assert RequestOptions.read(None) is None
    assert RequestOptions.read({"do_remote_prefill": True}) is None
    assert RequestOptions.read({"kvpatch": {"segments": [3, 9], "kl": 0.1}}) == RequestOptions(segments=(3, 9), kl=0.1)
    blind = {"policy": "blind"}
    assert RequestOptions.read({"kvpatch": blind}) == RequestOptions(policy="blind")
    refused = [{"policy": "any"}, {"segments": [9, 3]}, {"segments": 3}, {"kl": -1}, {"tenant": ""}, {"rank": 3}]
    for given in (*refused, {**blind, "kl": 0.1}, {**blind, "flips": 0.1}):
        with pytest.raises(InputError, match="kv_transfer_params"):
            RequestOptions.read({"kvpatch": given})
    assert ConnectorConfig.read({"store": "s", "backbone": "b", "image_frame": [1, 2]}).image_frame == (1, 2)
    for given in ({}, {"store": "s"}, {"store": "s", "backbone": "b", "rnak": 3}, {"store": "s", "backbone": ""}):
        with pytest.raises(ConfigError, match="connector"):
            ConnectorConfig.read(given)


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


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


def test_chunks_formed_of_traffic_are_spliced_where_they_are_asked_for_next(sides):
    """A leading chunk comes back as the prefill left it, a patch of full rank gives KV behind the chunk in front."""
    ask = {"segments": [8, 18]}
    assert served(sides, "alone", {"segments": [10]}, TOKENS[8:]).count == 0
    whole = served(sides, "whole", ask)
    assert (whole.count, whole.request.cache_salt) == (0, None)
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}, "B's canonical, A's, and B behind A"

    found = served(sides, "again", ask | {"policy": "blind"}, blocks=(19, 0, 18, 1, 17, 2, 16, 15), computed=4)
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
        (patch,) = store.get_patches(PatchKey(chunk=second.id, backbone="tiny", antecedent=(first.id,)))
        assert {leaf.dtype for leaf in jax.tree.leaves(patch.factors)} == {np.dtype(jnp.bfloat16)}

        found = served(sides, "again", {"segments": [8]}, blocks=(19, 0, 18, 1, 17, 2, 16, 15))
        assert (found.count, found.request.cache_salt) == (8, None)
        assert (found.loaded[:, :8] == computed[:, :8]).all()
        patched = served(sides, "both", {"segments": [8, 18], "policy": "blind"}, blocks=tuple(range(11, 19)))
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


def test_a_chunk_that_cannot_be_formed_keeps_no_other_from_it(sides):
    """The second of three is not what its canonical was; the third gets its patch all the same."""
    ask = {"segments": [8, 18, 24]}
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "third", {"segments": [6]}, TOKENS[18:])
    _, second, third = segments_of("tiny", TOKENS, ends=ask["segments"])
    store = sides.worker.stores.of("default")
    chunk = store.get(second.id, "tiny")
    store.delete(second.id, "tiny")
    store.put(dataclasses.replace(chunk, kv={name: -np.asarray(value) for name, value in chunk.kv.items()}))
    served(sides, "whole", ask)
    assert sides.worker.former.counts == {"canonicals": 3, "failed": 1, "patches": 1}
    assert store.patch_count(third.id, "tiny") == 1


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
    assert sides.scheduler.orders(output_of({"any": 30}, {"any": 0}, {})) == StepCommands()


def test_a_chunk_elsewhere_than_the_engine_counted_is_not_written(sides):
    """Positions are the engine's own: a chunk whose tokens stand otherwise is told by its blocks."""
    served(sides, "forms", {"segments": [8]})
    (segment,) = segments_of("tiny", TOKENS, ends=[8])
    chunk = sides.worker.stores.of("default").get(segment.id, "tiny")
    piece = ChunkPayload(ChunkStep(segment._replace(begin=1, end=10), "leading"), chunk)
    load = LoadCommand("there", (piece,), 0, (3, 4, 5))
    planned = request_of("there", {"kvpatch": {"segments": [8, 18]}})
    sides.scheduler.arrived(planned)
    sides.scheduler.allocated(planned, (3, 4), matched_of(sides.scheduler, planned))
    sides.pool.requests["there"] = SimpleNamespace(mrope_positions=None)
    before = [np.asarray(own) for own in sides.pool.kv_caches]
    sides.worker.load(StepCommands((load,)))
    saves = StepCommands(saves=(SaveCommand("there", "default", (segment,), (0,), (5, 6)),))
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
    settings = ConnectorConfig(store=str(tmp_path), backbone="tiny")
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
    worker = WorkerSide(ConnectorConfig(store=str(tmp_path), backbone="tiny"), LAYOUT, PAGE)
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


# -------------------------------------------------------------------------- what is stored under the engine's own name


def rewritten(sides, segment, **changes):
    """Puts another canonical under a chunk's name."""
    store = sides.worker.stores.of("default")
    chunk = store.get(segment.id, "tiny")
    store.delete(segment.id, "tiny")
    kv = changes.pop("kv", lambda value: value)
    store.put(dataclasses.replace(chunk, kv={name: kv(np.asarray(own)) for name, own in chunk.kv.items()}, **changes))


def test_chunks_of_another_dtype_are_not_stored(tmp_path, caplog):
    """Two engines of one name and different dtypes on one store: neither is promised what cannot be placed."""
    ask = {"segments": [8, 18], "policy": "blind"}
    with sides_of(tmp_path, jnp.bfloat16) as sides:
        served(sides, "first", {"segments": [8]})
    with sides_of(tmp_path) as sides:
        for turn in range(2):
            found = served(sides, f"own {turn}", ask)
            assert (found.count, found.failed) == (0, set())
            assert sides.scheduler.finished(found.request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"
        assert sides.scheduler.counts["unfit: DtypeError"] == 2
        assert caplog.text.count("'v' of dtype bfloat16; expected the pages' float32") == 1, "logged once"
        served(sides, "second", {"segments": [10]}, TOKENS[8:])
    with sides_of(tmp_path, jnp.bfloat16) as sides:
        found = served(sides, "behind", ask)
        assert (found.count, found.failed) == (8, set()), "float32 behind bfloat16"
        assert sides.worker.former.counts["patches"] == 0, "none of a canonical that cannot be served"


HALF = kvp.KVLayout.gqa(2, 2, 32, kvp.Rope(1e4, 32, angles="float32"))
"""Other heads than LAYOUT's, of as many numbers."""


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"layout": HALF, "kv": lambda own: own.reshape(2, -1, 2, 32)}, "LayoutError"),
        ({"layout": dataclasses.replace(LAYOUT, rope=kvp.Rope(5e5, 64, angles="float32"))}, "LayoutError"),
        ({"kv": lambda own: own[:, :7], "local": np.arange(7, dtype=np.float32), "length": 7}, "InputError"),
        ({"local": np.arange(8, dtype=np.float32) * 2}, "PositionError"),
    ],
)
def test_chunks_of_another_model_are_not_stored(sides, changes, error):
    """Whatever was put under this engine's name and a chunk's id."""
    served(sides, "forms", {"segments": [8]})
    assert served(sides, "whole", {"segments": [8]}).count == 8
    rewritten(sides, segments_of("tiny", TOKENS, ends=[8])[0], **changes)
    found = served(sides, "other", {"segments": [8]})
    assert (found.count, found.failed) == (0, set())
    assert sides.scheduler.counts[f"unfit: {error}"] == 1


def test_a_patch_of_another_canonical_is_not_stored(sides):
    """Its chunk is served without it, or, by a request that wants bounds, not at all."""
    ask = {"segments": [8, 18], "policy": "blind"}
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    served(sides, "first", {"segments": [8]})
    served(sides, "patch", {"segments": [8, 18]})
    first, second = segments_of("tiny", TOKENS, ends=[8, 18])
    store = sides.worker.stores.of("default")
    served_front = PatchKey(chunk=second.id, backbone="tiny", antecedent=(first.id,))
    (patch,) = store.get_patches(served_front)
    store.delete(second.id, "tiny")
    served(sides, "second again", {"segments": [10]}, TOKENS[8:])
    other = patch.metadata.local[::-1]
    store.put_patches([dataclasses.replace(patch, metadata=dataclasses.replace(patch.metadata, local=other))])
    assert len(store.get_patches(served_front)) == 1
    found = served(sides, "own", ask)
    assert (found.count, found.failed) == (18, set())
    told = sides.scheduler.finished(found.request)["kvpatch"]
    assert told["served"] == [["leading", 0], ["bare", 0]]
    assert sides.scheduler.counts["unfit: PatchMismatchError"] == 1


def test_what_could_not_be_placed_is_not_promised_again(sides, monkeypatch):
    """Whatever the reason: one request meets it, and not every one behind it."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    ask, write = {"segments": [8, 18], "policy": "blind"}, sides.worker._write
    monkeypatch.setattr(sides.worker, "_write", lambda load, place: 1 / 0 if place else write(load, place))
    found = served(sides, "own", ask)
    assert (found.count, found.failed) == (18, {5, 6, 7})
    again = served(sides, "again", ask)
    assert (again.count, again.failed) == (8, set())
    assert sides.scheduler.finished(again.request)["kvpatch"]["why"] == "chunk 2 of 2 is not stored"


def test_what_is_told_of_a_load_that_failed_is_what_was_served(sides, monkeypatch):
    """Chunks in front of the one that could not be placed were, and what the engine computes stands behind them."""
    third = [*TOKENS[18:28], 7]
    for name, tokens, ends in (
        ("first", TOKENS, [8]),
        ("second", TOKENS[8:], [10]),
        ("third", third, [10]),
    ):
        served(sides, name, {"segments": ends}, tokens)
    write = sides.worker._write
    monkeypatch.setattr(sides.worker, "_write", lambda load, place: 1 / 0 if place == 2 else write(load, place))
    found = served(sides, "own", {"segments": [8, 18, 28], "policy": "blind"})
    assert (found.count, found.failed) == (28, {7, 8, 9}), "from the block on in which the third begins"
    told = sides.scheduler.finished(found.request)["kvpatch"]
    assert (told["matched"], told["failed"]) == (16, True)
    assert (told["served"], told["exact"], told["kl"]) == ([["leading", 0], ["bare", 0]], False, None)
