"""The connector loads and saves exactly the blocks that an engine names, in every cache format that it supports.

What cannot be placed, or does not fit the engine, is reported and computed.
"""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE, TOKENS, report_of, rows_of_kv, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import identity
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, PromptSegment, segments_of
from kvpatch_jax.serving.vllm.engine import (
    UNSUPPORTED_SIZES,
    check_groups,
    check_model,
    check_parallel,
    layout_of,
)
from kvpatch_jax.serving.vllm.messages import ChunkPayload, LoadCommand, StepCommands
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from kvpatch_jax.store import PatchKey
from tests.shared.arrays import placed

BOTH = {"segments": [8, 18]}
PATCHED = {**BOTH, "reuse": "patched"}
SCATTERED = (19, 0, 18, 1, 17, 2, 16, 15)
FIRST, SECOND = segments_of("tiny", TOKENS, ends=[8, 18])


def form_both(sides):
    """Stores the canonicals of two chunks, and a patch of the second behind the first."""
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    served(sides, "first", BOTH)
    assert sides.worker.former.counts == {"canonicals": 2, "patches": 1}


# ------------------------------------------------------------------------------------------------------ placed, formed


def test_chunks_formed_from_traffic_are_spliced_for_later_requests(sides):
    """A patch of full rank gives the KV of a prefill behind the chunk in front, in blocks of any order."""
    form_both(sides)
    answer = served(sides, "again", PATCHED, blocks=SCATTERED, computed=4)
    assert (answer.count, answer.failed) == (14, set())
    assert answer.request.block_hashes == [f"with {answer.request.cache_salt}"]
    expected = rows_of_kv(true_kv(TOKENS))
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
        answer = served(sides, "again", {"segments": [8]}, blocks=SCATTERED)
        assert (answer.count, answer.request.cache_salt) == (8, None)
        assert (answer.loaded[:, :8] == computed[:, :8]).all()
        patched = served(sides, "both", PATCHED, blocks=tuple(range(11, 19)))
        assert patched.count == 18
        np.testing.assert_allclose(np.float32(patched.loaded[:, 8:18]), np.float32(computed[:, 8:]), atol=0.03)


def test_under_mrope_a_chunk_starts_at_the_engines_positions(tmp_path):
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
    expected = rows_of_kv(kvp.to_engine(layout, kv, local, np.array([5, 5, 5])))
    np.testing.assert_allclose(rows.reshape(2, -1, 128)[:, 5:13], expected, rtol=2e-5, atol=2e-5)
    assert load(4) == {4, 5}, "the engine counts other positions there"
    runner.requests["name"].mrope_positions = None
    assert load(5) == {4, 5, 6}
    worker.close()


# --------------------------------------------------------------------------------------------------- not placed, unfit


def test_a_chunk_that_could_not_be_placed_is_reported_and_not_planned_again(sides):
    """The chunks in front of it were served, and the engine computes the rest."""
    last = [*TOKENS[18:28], 7]
    for name, tokens, end in (("third", last, 10), ("second", TOKENS[8:], 10), ("first", TOKENS, 8)):
        formed = served(sides, name, {"segments": [end]}, tokens)
    counts = dict(sides.worker.former.counts)
    sides.worker.fail(StepCommands(lost=frozenset({5})))
    sides.worker.save(formed.orders)
    sides.worker.former.flush()
    assert (sides.worker.take_failed(), sides.worker.former.counts) == ({5}, counts), "unfilled blocks form nothing"

    blind = {"segments": [8, 18, 28], "reuse": "blind"}
    answer = served(sides, "request", blind, lacking=2)
    assert (answer.count, answer.failed) == (28, {7, 8, 9}), "from the block on in which the third chunk begins"
    assert sides.scheduler.match(answer.request, 0) == 0, "nothing is loaded for it any more"
    report = report_of(sides, answer)
    assert (report["matched"], report["failed"], report["exact"], report["kl"]) == (16, True, False, None)
    assert report["served"] == [["leading", 0], ["bare", 0]]
    again = served(sides, "again", blind)
    assert (again.count, report_of(sides, again)["why"]) == (18, "chunk 3 of 3 is not stored")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda kv: {"layout": dataclasses.replace(LAYOUT, rope=kvp.Rope(5e5, 64))}, "LayoutError"),
        (lambda kv: {"local": np.arange(8, dtype=np.float32) * 2, "span": 16}, "InputError"),
        (lambda kv: {"kv": {name: np.asarray(value, jnp.bfloat16) for name, value in kv.items()}}, "ShapeError"),
    ],
    ids=["another rope", "gaps", "another dtype"],
)
def test_chunks_that_do_not_fit_count_as_not_stored(sides, change, error):
    """Whatever another engine has put under this one's name and a chunk's id."""
    served(sides, "forms", {"segments": [8]})
    store = sides.worker.stores.of("default")
    chunk = store.get(FIRST.id, "tiny")
    store.delete(FIRST.id, "tiny")
    store.put(dataclasses.replace(chunk, **change(chunk.kv)))
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
    formed = patch.metadata.chunk
    metadata = dataclasses.replace(patch.metadata, chunk=dataclasses.replace(formed, places=formed.places[::-1]))
    store.put_patches([dataclasses.replace(patch, metadata=metadata)])
    served(sides, "request", {**PATCHED, "save": False})
    assert sides.scheduler.counts["unfit: PatchMismatchError"] == 1


def test_kv_rotated_by_another_rope_becomes_no_patch(sides, caplog):
    """The lowest layer of a chunk behind another is its canonical's, however the rest is conditioned."""
    served(sides, "alone", {"segments": [10]}, TOKENS[8:])
    sides.worker.former.layout = dataclasses.replace(LAYOUT, rope=kvp.Rope(1e3, 64, angles="float32"))
    served(sides, "together", BOTH)
    assert sides.worker.former.counts == {"canonicals": 2, "failed": 1}
    assert "in the lowest layer" in caplog.text
    sides.worker.former.layout = LAYOUT
    served(sides, "again", BOTH)
    assert sides.worker.former.counts["patches"] == 1


# ------------------------------------------------------------------------------------------------------------- engines

TEXT = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256}
MROPE = {"rope_type": "mrope", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = ["LlamaForCausalLM"]


def test_layouts_are_read_from_supported_configurations_only():
    plain = layout_of({**TEXT, "rope_theta": 1e4}, LLAMA)
    assert plain == kvp.KVLayout.gqa(2, 2, 64, kvp.Rope(1e4, 64, angles="float32"))
    pictures = layout_of({**TEXT, "rope_parameters": MROPE}, ["Qwen2_5_VLForConditionalGeneration"])
    assert pictures.rope.sections == (8, 12, 12)
    scaling = LLAMA3 | {"original_max_position_embeddings": 8192}
    scaled = layout_of({**TEXT, "rope_theta": 5e5, "rope_scaling": scaling}, LLAMA)
    # Llama 3.1's: the fastest stay, the slowest are an eighth.
    stretched = kvp.Rope(5e5, 64).inverse_frequencies / scaled.rope.inverse_frequencies
    np.testing.assert_allclose(stretched[[0, -1]], [1, 8])
    for more, families in (
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3}, LLAMA),
        ({"rope_theta": 1e4}, ["KimiVL"]),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}}, LLAMA),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.5}, LLAMA),
    ):
        with pytest.raises(ConfigError, match="connector"):
            layout_of({**TEXT, **more}, families)


def groups_of(*kinds):
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds])


def spread(executor="uni", strategy=None, **sizes):
    """Asks whether an engine of these sizes is served: `strategy` as tpu-inference keeps it, or None."""
    sizes = {"tensor_parallel_size": 8, **dict.fromkeys(UNSUPPORTED_SIZES, 1), **sizes}
    mesh = None if strategy is None else SimpleNamespace(sharding_strategy=SimpleNamespace(**strategy))
    check_parallel(SimpleNamespace(distributed_executor_backend=executor, **sizes), mesh)


def test_engines_of_other_models_groups_or_parallelism_are_refused():
    """tpu-inference runs vLLM's torch models too, whose angles are rounded otherwise, if it lacks its own."""
    native, wrapped = (
        type("Model", (), {"__module__": f"tpu_inference.models.{name}"})() for name in ("jax.llama3", "vllm.wrapper")
    )
    check_model(native)
    check_groups("a model", None)
    check_groups("a model", groups_of("FullAttentionSpec"))
    spread()
    spread(strategy={"tensor_parallelism": 8, "data_parallelism": 1})
    for words, check, arguments, sizes in (
        (r"models\.vllm", check_model, (wrapped,), {}),
        ("'a model' with 2 .*, MambaSpec;", check_groups, ("a model", groups_of("FullAttentionSpec", "MambaSpec")), {}),
        *((f"{name}': 2", spread, (), {name: 2}) for name in UNSUPPORTED_SIZES),
        ("{'data': 2}", spread, ("uni", {"tensor_parallelism": 2, "data": 2}), {}),
        ("'ray'; expected 'uni'", spread, ("ray",), {}),
    ):
        with pytest.raises(ConfigError, match=words):
            check(*arguments, **sizes)
