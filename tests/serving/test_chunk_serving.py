"""A chunk that is served in place equals a prefill, and what cannot be placed is reported and computed."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE, TOKENS, matched_of, output_of, report_of, request_of, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import identity
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, PromptSegment, segments_of
from kvpatch_jax.serving.vllm.messages import ChunkPayload, LoadCommand, StepCommands
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from kvpatch_jax.store import PatchKey
from tests.shared.arrays import placed

BOTH = {"segments": [8, 18]}
PATCHED = {**BOTH, "reuse": "patched"}
FIRST, SECOND = segments_of("tiny", TOKENS, ends=[8, 18])


def form_both(sides):
    """Stores the canonicals of two chunks, and a patch of the second behind the first."""
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "first", BOTH)
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}


def test_chunks_formed_from_traffic_are_spliced_for_later_requests(sides):
    """A patch of full rank gives the KV of a prefill behind the chunk in front, in blocks of any order."""
    form_both(sides)
    answer = served(sides, "again", PATCHED, blocks=(19, 0, 18, 1, 17, 2, 16, 15), computed=4)
    assert (answer.count, answer.failed) == (14, set())
    assert answer.request.block_hashes == [f"with {answer.request.cache_salt}"]
    expected = np.concatenate([true_kv(TOKENS)[name][:, :, 0] for name in "kv"], axis=-1)
    np.testing.assert_allclose(answer.loaded[:, 4:18], expected[:, 4:18], rtol=2e-4, atol=2e-4)
    assert not answer.loaded[:, :4].any(), "the engine had these"
    assert not answer.loaded[:, 18:].any()
    assert not answer.orders.saves, "nothing is formed behind an approximate chunk"
    report = report_of(sides, answer)
    # Rank 10 of 10 tokens is stored dense, and so covers every direction.
    assert (report["matched"], report["exact"], report["served"]) == (18, False, [["leading", 0], ["stored", 64]])


def test_a_leading_chunk_of_a_bfloat16_pool_is_bit_equal_to_the_prefill(tmp_path):
    """An exact plan has no salt: its blocks are shared with requests that the engine computes."""
    with sides_of(tmp_path, jnp.bfloat16) as sides:
        form_both(sides)
        computed = sides.pool.rows(tuple(range(3, 11)), 0, 18)
        answer = served(sides, "again", {"segments": [8]}, blocks=(19, 0, 18, 1, 17, 2, 16, 15))
        assert (answer.count, answer.request.cache_salt) == (8, None)
        assert (answer.loaded[:, :8] == computed[:, :8]).all()
        patched = served(sides, "both", PATCHED, blocks=tuple(range(11, 19)))
        assert patched.count == 18
        np.testing.assert_allclose(np.float32(patched.loaded[:, 8:18]), np.float32(computed[:, 8:]), atol=0.03)


def test_under_mrope_a_chunk_starts_at_the_engines_positions(tmp_path, caplog):
    """A text token, an image of 2 by 3 patches and a text token, behind five texts."""
    rope = kvp.Rope(1e4, 64, sections=(8, 12, 12), angles="float32")
    layout = kvp.KVLayout.gqa(2, 1, 64, rope)
    worker = WorkerSide(ConnectorConfig.read({"store": str(tmp_path), "backbone": "tiny"}), layout, PAGE)
    grid = [(1, 1 + row, 1 + column) for row in range(2) for column in range(3)]
    local = np.array([(0, 0, 0), *grid, (4, 4, 4)], np.float32)
    counted = np.concatenate([np.arange(5)[:, None] * [1, 1, 1], local.astype(int) + 5, [[10] * 3]]).T
    pages = [placed(np.zeros((20, PAGE, 1, 1, 128)), np.float32) for _ in range(2)]
    runner = SimpleNamespace(kv_caches=pages, requests={"name": SimpleNamespace(mrope_positions=counted)})
    worker.register(runner)
    rng, blocks = np.random.default_rng(0), tuple(range(3, 11))
    kv = {name: rng.standard_normal((2, 8, 1, 64)).astype(np.float32) for name in "kv"}
    chunk = kvp.Chunk(kv=kv, local=local, span=5, length=8, id="B", layout=layout, backbone="tiny")

    def load(begin):
        step = ChunkStep(PromptSegment("B", begin, begin + 8), "leading", identity("B"))
        worker.load(StepCommands((LoadCommand("name", (ChunkPayload(step, chunk),), begin, blocks),)))
        return worker.take_failed()

    assert load(5) == set()
    rows = np.concatenate([np.asarray(runner.kv_caches[layer])[None, 3:11, :, 0, 0] for layer in range(2)])
    expected = kvp.to_engine(layout, kv, local, np.array([5, 5, 5]))
    expected = np.concatenate([np.asarray(expected[name])[:, :, 0] for name in "kv"], axis=-1)
    np.testing.assert_allclose(rows.reshape(2, -1, 128)[:, 5:13], expected, rtol=2e-5, atol=2e-5)
    assert load(4) == {4, 5}
    assert "positions other than the engine's" in caplog.text
    runner.requests["name"].mrope_positions = None
    assert load(5) == {4, 5, 6}
    worker.close()


def test_a_chunk_that_could_not_be_placed_is_reported_and_not_planned_again(sides):
    """The chunks in front of it were served, and the engine computes the rest."""
    last = [*TOKENS[18:28], 7]
    for name, tokens, end in (("first", TOKENS, 8), ("second", TOKENS[8:], 10), ("third", last, 10)):
        served(sides, name, {"segments": [end]}, tokens)
    whole = {"segments": [8, 18, 28], "reuse": "blind"}
    answer = served(sides, "request", whole, lacking=2)
    assert (answer.count, answer.failed) == (28, {7, 8, 9}), "from the block on in which the third chunk begins"
    assert sides.scheduler.match(answer.request, 0) == 0, "nothing is loaded for it any more"
    report = report_of(sides, answer)
    assert (report["matched"], report["failed"], report["exact"], report["kl"]) == (16, True, False, None)
    assert report["served"] == [["leading", 0], ["bare", 0]]
    again = served(sides, "again", whole)
    assert (again.count, report_of(sides, again)["why"]) == (18, "chunk 3 of 3 is not stored")


def test_nothing_is_formed_from_blocks_that_were_not_filled(sides):
    answer = served(sides, "forms", {"segments": [8]}, TOKENS)
    save = answer.orders.saves[0]._replace(request="other", blocks=(5, 6))
    sides.worker.fail(StepCommands(lost=frozenset({5})))
    sides.worker.save(StepCommands(saves=(save,)))
    sides.worker.former.flush()
    assert sides.worker.take_failed() == {5}
    assert sides.worker.former.counts == {"canonicals": 1}


def test_requests_that_cannot_be_planned_are_left_unchanged(tmp_path):
    with sides_of(tmp_path, allow=["exact"]) as sides:
        for params, more in (
            *((None, {}), ({"kvpatch": False}, {}), ({"kvpatch": {"segments": [30]}}, {})),
            *(({"kvpatch": {}}, {"lora_request": object()}), ({"kvpatch": {}}, {"prompt_token_ids": None})),
            ({"kvpatch": {"segments": [8], "reuse": "blind"}}, {}),
        ):
            request = request_of("name", params, **more)
            sides.scheduler.add_request(request)
            assert matched_of(sides.scheduler, request) == 0
            assert (request.block_hashes, sides.scheduler.finish(request)) == (["early"], None)
        assert sides.scheduler.build_commands(output_of({"name": 30}, {"name": 0}, {})) == StepCommands()
        assert sides.scheduler.counts["refused"] == 2, "an end beyond the prompt, and a goal"


# ------------------------------------------------------------------------- stored chunks that do not fit the engine


@pytest.mark.parametrize(
    ("kv", "changes", "error"),
    [
        (lambda rows: rows, {"layout": dataclasses.replace(LAYOUT, rope=kvp.Rope(5e5, 64))}, "LayoutError"),
        (lambda rows: rows[:, :7], {"local": np.arange(7, dtype=np.float32), "length": 7}, "InputError"),
        (lambda rows: rows, {"local": np.arange(8, dtype=np.float32) * 2, "span": 16}, "InputError"),
        (lambda rows: rows.astype(jnp.bfloat16), {}, "ShapeError"),
    ],
)
def test_chunks_that_do_not_fit_count_as_not_stored(sides, kv, changes, error):
    """Whatever another engine has put under this one's name and a chunk's id."""
    served(sides, "forms", {"segments": [8]})
    store = sides.worker.stores.of("default")
    chunk = store.get(FIRST.id, "tiny")
    store.delete(FIRST.id, "tiny")
    rows = {name: kv(np.asarray(value)) for name, value in chunk.kv.items()}
    store.put(dataclasses.replace(chunk, kv=rows, **changes))
    answer = served(sides, "other", {"segments": [8], "save": False})
    assert (answer.count, answer.failed) == (0, set())
    assert sides.scheduler.counts[f"unfit: {error}"] == 1


def test_a_patch_of_another_canonical_counts_as_not_stored(sides):
    form_both(sides)
    store = sides.worker.stores.of("default")
    key = PatchKey(chunk=SECOND.id, backbone="tiny", antecedent=(FIRST.id,))
    (patch,) = store.get_patches(key)
    store.delete(SECOND.id, "tiny")
    served(sides, "alone again", {"segments": [10]}, TOKENS[8:])
    metadata = dataclasses.replace(
        patch.metadata, chunk=dataclasses.replace(patch.metadata.chunk, places=patch.metadata.chunk.places[::-1])
    )
    store.put_patches([dataclasses.replace(patch, metadata=metadata)])
    served(sides, "request", {**BOTH, "reuse": "patched", "save": False})
    assert sides.scheduler.counts["unfit: PatchMismatchError"] == 1


def test_kv_rotated_by_another_rope_becomes_no_patch(sides, caplog):
    """The lowest layer of a chunk behind another is its canonical's, however the rest is conditioned."""
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    sides.worker.former.layout = dataclasses.replace(LAYOUT, rope=kvp.Rope(1e3, 64, angles="float32"))
    served(sides, "whole", BOTH)
    assert sides.worker.former.counts == {"canonicals": 2, "failed": 1}
    assert "in the lowest layer" in caplog.text
    sides.worker.former.layout = LAYOUT
    served(sides, "again", BOTH)
    assert sides.worker.former.counts["patches"] == 1
