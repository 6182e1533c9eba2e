"""Chunks formed from an engine's prefills and spliced for later requests, with stand-ins for the engine's objects."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOptionalMemberAccess=false

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE, TOKENS, matched_of, output_of, request_of, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import identity
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, PromptSegment, segments_of
from kvpatch_jax.serving.vllm.messages import (
    ChunkPayload,
    LoadCommand,
    SaveCommand,
    StepCommands,
)
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from kvpatch_jax.store import PatchKey
from tests.arrays import placed


@pytest.fixture
def sides(tmp_path):
    with sides_of(tmp_path) as made:
        yield made


def test_disallowed_blind_reuse_is_served_without_stored_chunks(tmp_path, caplog):
    with sides_of(tmp_path, uncertified=False) as sides:
        served(sides, "first", {"segments": [8]})
        assert served(sides, "exact", {"segments": [8]}).count == 8
        blind = served(sides, "blind", {"segments": [8], "policy": "blind"})
        assert (blind.count, sides.scheduler.finish(blind.request)) == (0, None)
        assert sides.scheduler.counts["refused"] == 1
        assert "policy: got 'blind'; expected 'exact' or 'approximate'" in caplog.text


def test_chunks_formed_from_traffic_are_spliced_for_later_requests(sides):
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
    told = sides.scheduler.finish(found.request)["kvpatch"]
    # Rank 10 of 10 tokens: kept dense, and so of every direction.
    assert (told["matched"], told["exact"], told["served"]) == (18, False, [["leading", 0], ["stored", 64]])


def test_a_leading_chunk_of_a_bfloat16_pool_is_bit_equal_to_the_prefill(tmp_path):
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


def test_kv_rotated_by_another_rope_becomes_no_patch(sides, caplog):
    """The lowest layer of a chunk behind another is its canonical's, however the rest is conditioned."""
    ask = {"segments": [8, 18]}
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "first", {"segments": [8]})
    fast = dataclasses.replace(LAYOUT, rope=kvp.Rope(1e3, 64, angles="float32"))
    sides.worker.former.layout = fast
    served(sides, "whole", ask)
    assert sides.worker.former.counts == {"canonicals": 2, "failed": 1}
    assert "got 'k' in the lowest layer" in caplog.text
    sides.worker.former.layout = LAYOUT
    served(sides, "again", ask)
    assert sides.worker.former.counts["patches"] == 1


def test_a_chunk_that_cannot_be_formed_does_not_prevent_others(sides):
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


def test_a_damaged_chunk_is_not_planned_and_is_formed_again(sides, tmp_path):
    served(sides, "forms", {"segments": [8]})
    store = sides.worker.stores.of("default")
    (segment,) = segments_of("tiny", TOKENS, ends=[8])
    name = store.names.canonical("tiny", segment.id)
    path = tmp_path / "store" / "data" / store.objects.index.row("SELECT file FROM objects WHERE name = ?", name)[0]
    sides.worker.stores.shared.memory.clear()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))

    found = served(sides, "next", {"segments": [8, 18]})
    assert (found.count, found.failed) == (0, set())
    assert sides.scheduler.finish(found.request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"
    assert sides.worker.former.counts["canonicals"] == 2, "it was formed again"
    assert served(sides, "after", {"segments": [8]}).count == 8


def test_requests_without_usable_options_are_left_unchanged(sides):
    for params, more in (
        (None, {}),
        ({"kvpatch": {"segments": [30]}}, {}),
        ({"kvpatch": {"segments": [3, 2]}}, {}),
        ({"kvpatch": {}}, {"lora_request": object()}),
        ({"kvpatch": {}}, {"prompt_token_ids": None}),
    ):
        request = request_of("any", params, **more)
        sides.scheduler.add_request(request)
        assert matched_of(sides.scheduler, request) == 0
        assert request.block_hashes == ["early"]
        assert sides.scheduler.finish(request) is None
    assert sides.scheduler.counts["refused"] == 2
    assert sides.scheduler.build_commands(output_of({"any": 30}, {"any": 0}, {})) == StepCommands()


def test_a_chunk_with_other_positions_than_the_engines_is_not_written(sides):
    """Positions are the engine's own: a chunk whose tokens stand otherwise is told by its blocks."""
    served(sides, "forms", {"segments": [8]})
    (segment,) = segments_of("tiny", TOKENS, ends=[8])
    chunk = sides.worker.stores.of("default").get(segment.id, "tiny")
    piece = ChunkPayload(ChunkStep(segment._replace(begin=1, end=10), "leading", identity(segment.id)), chunk)
    load = LoadCommand("there", (piece,), 0, (3, 4, 5))
    planned = request_of("there", {"kvpatch": {"segments": [8, 18]}})
    sides.scheduler.add_request(planned)
    sides.scheduler.order_load(planned, (3, 4), matched_of(sides.scheduler, planned))
    sides.pool.requests["there"] = SimpleNamespace(mrope_positions=None)
    before = [np.asarray(own) for own in sides.pool.kv_caches]
    sides.worker.load(StepCommands((load,)))
    saves = StepCommands(saves=(SaveCommand("there", "default", (segment,), (0,), (5, 6)),))
    sides.worker.save(saves)
    failed = sides.worker.take_failed()
    assert failed == {3, 4, 5}
    sides.scheduler.mark_failed(failed)
    assert sides.scheduler.match(planned, 0) == 0, "what could not be loaded is not tried again"
    assert sides.scheduler.finish(planned)["kvpatch"]["failed"]
    assert sides.worker.former.counts["canonicals"] == 1, "it shares a block that was not filled"
    assert all((own == np.asarray(now)).all() for own, now in zip(before, sides.pool.kv_caches, strict=True))


def test_under_mrope_a_chunk_starts_at_the_engines_positions(tmp_path, caplog):
    """A text token, an image of 2 by 3 patches and a text token, behind five texts and behind another image."""
    rope = kvp.Rope(1e4, 64, sections=(8, 12, 12), angles="float32")
    layout = kvp.KVLayout.gqa(2, 1, 64, rope)
    settings = ConnectorConfig(store=str(tmp_path), backbone="tiny")
    worker = WorkerSide(settings, layout, PAGE)
    grid = [(1, 1 + row, 1 + column) for row in range(2) for column in range(3)]
    local = np.array([(0, 0, 0), *grid, (4, 4, 4)], np.float32)
    counted = np.concatenate([np.arange(5)[:, None] * [1, 1, 1], local.astype(int) + 5, [[10] * 3]]).T
    pages = [placed(np.zeros((20, PAGE, 1, 1, 128)), np.float32) for _ in range(2)]
    runner = SimpleNamespace(kv_caches=pages, requests={"own": SimpleNamespace(mrope_positions=counted)})
    worker.register(runner)
    rng, blocks = np.random.default_rng(0), tuple(range(3, 11))
    kv = {name: rng.standard_normal((2, 8, 1, 64)).astype(np.float32) for name in "kv"}
    chunk = kvp.Chunk(kv=kv, local=local, span=5, length=8, id="B", layout=layout, backbone="tiny")

    def load(begin):
        step = ChunkStep(PromptSegment("B", begin, begin + 8), "leading", identity("B"))
        worker.load(StepCommands((LoadCommand("own", (ChunkPayload(step, chunk),), begin, blocks),)))
        return worker.take_failed()

    assert load(5) == set()
    rows = np.concatenate([np.asarray(runner.kv_caches[layer])[None, 3:11, :, 0, 0] for layer in range(2)])
    expected = kvp.to_engine(layout, kv, local, np.array([5, 5, 5]))
    expected = np.concatenate([np.asarray(expected[name])[:, :, 0] for name in "kv"], axis=-1)
    np.testing.assert_allclose(rows.reshape(2, -1, 128)[:, 5:13], expected, rtol=2e-5, atol=2e-5)
    assert load(4) == {4, 5}
    assert "positions other than the engine's" in caplog.text
    runner.requests["own"].mrope_positions = None
    assert load(5) == {4, 5, 6}
    assert "got no M-RoPE positions" in caplog.text


def rewritten(sides, segment, **changes):
    """Puts another canonical under a chunk's name."""
    store = sides.worker.stores.of("default")
    chunk = store.get(segment.id, "tiny")
    store.delete(segment.id, "tiny")
    kv = changes.pop("kv", lambda value: value)
    store.put(dataclasses.replace(chunk, kv={name: kv(np.asarray(own)) for name, own in chunk.kv.items()}, **changes))


def test_chunks_of_another_dtype_count_as_not_stored(tmp_path, caplog):
    """Two engines of one name and different dtypes on one store: neither is promised what cannot be placed."""
    ask = {"segments": [8, 18], "policy": "blind"}
    with sides_of(tmp_path, jnp.bfloat16) as sides:
        served(sides, "first", {"segments": [8]})
    with sides_of(tmp_path) as sides:
        for turn in range(2):
            found = served(sides, f"own {turn}", ask)
            assert (found.count, found.failed) == (0, set())
            assert sides.scheduler.finish(found.request)["kvpatch"]["why"] == "chunk 1 of 2 is not stored"
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
        ({"local": np.arange(8, dtype=np.float32) * 2}, "InputError"),
    ],
)
def test_chunks_of_another_model_count_as_not_stored(sides, changes, error):
    """Whatever was put under this engine's name and a chunk's id."""
    served(sides, "forms", {"segments": [8]})
    assert served(sides, "whole", {"segments": [8]}).count == 8
    rewritten(sides, segments_of("tiny", TOKENS, ends=[8])[0], **changes)
    found = served(sides, "other", {"segments": [8]})
    assert (found.count, found.failed) == (0, set())
    assert sides.scheduler.counts[f"unfit: {error}"] == 1


def test_a_patch_of_another_canonical_counts_as_not_stored(sides):
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
    told = sides.scheduler.finish(found.request)["kvpatch"]
    assert told["served"] == [["leading", 0], ["bare", 0]]
    assert sides.scheduler.counts["unfit: PatchMismatchError"] == 1


def test_a_chunk_that_could_not_be_placed_is_not_planned_again(sides):
    """Whatever the reason: one request meets it, and not every one behind it."""
    served(sides, "first", {"segments": [8]})
    served(sides, "second", {"segments": [10]}, TOKENS[8:])
    ask = {"segments": [8, 18], "policy": "blind"}
    found = served(sides, "own", ask, lacking=1)
    assert (found.count, found.failed) == (18, {5, 6, 7})
    again = served(sides, "again", ask)
    assert (again.count, again.failed) == (8, set())
    assert sides.scheduler.finish(again.request)["kvpatch"]["why"] == "chunk 2 of 2 is not stored"


def test_the_report_of_a_failed_load_states_what_was_served(sides):
    """Chunks in front of the one that could not be placed were, and what the engine computes stands behind them."""
    third = [*TOKENS[18:28], 7]
    for name, tokens, ends in (
        ("first", TOKENS, [8]),
        ("second", TOKENS[8:], [10]),
        ("third", third, [10]),
    ):
        served(sides, name, {"segments": ends}, tokens)
    found = served(sides, "own", {"segments": [8, 18, 28], "policy": "blind"}, lacking=2)
    assert (found.count, found.failed) == (28, {7, 8, 9}), "from the block on in which the third begins"
    told = sides.scheduler.finish(found.request)["kvpatch"]
    assert (told["matched"], told["failed"]) == (16, True)
    assert (told["served"], told["exact"], told["kl"]) == ([["leading", 0], ["bare", 0]], False, None)
