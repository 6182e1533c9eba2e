"""Chunks and patches form from traffic, and load into exactly the blocks that an engine names, or are computed."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false

import dataclasses
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE, TOKENS, report_of, rows_of_kv, served, sides_of, true_kv

import kvpatch_jax as kvp
from kvpatch_jax.cache import identity
from kvpatch_jax.errors import ConfigError
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, PromptSegment, segments_of
from kvpatch_jax.serving.vllm.engine import UNSUPPORTED_SIZES, check_groups, check_model, check_parallel, layout_of
from kvpatch_jax.serving.vllm.messages import ChunkPayload, LoadCommand, StepCommands
from kvpatch_jax.serving.vllm.worker_side import WorkerSide
from kvpatch_jax.store import PatchKey
from kvpatch_jax.store.memory import memory_of
from tests.shared.arrays import placed
from tests.shared.certificates import certificate
from tests.shared.operator_cases import turned

BOTH = {"segments": [8, 18]}
BOTH_PATCHED = {**BOTH, "reuse": "patched"}
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
    answer = served(sides, "again", BOTH_PATCHED, blocks=SCATTERED, computed=4)
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
        patched = served(sides, "both", BOTH_PATCHED, blocks=tuple(range(11, 19)))
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
    served(sides, "request", {**BOTH_PATCHED, "save": False})
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


# -------------------------------------------------------------------------------------------------------------- traffic

LEAD, SIZE = (901, 902, 903, 904), 5
PAGES = [tuple(range(100 * page, 100 * page + SIZE)) for page in range(1, 9)]
QUESTION = (7, 8)
BLOCKS = tuple(range(3, 19))
REMEMBER = {"reuse": "certified", "promise": "remember"}
CERTIFIED = {"reuse": "certified"}
PATCHED = {"reuse": "patched"}


def tokens_of(pages):
    return [*LEAD, *(token for page in pages for token in PAGES[page])]


def asked(sides, name, pages, computed=0, salt=None, **options):
    """Sends a prompt as agents do, a lead, some pages and a question; returns the answer and its report."""
    ends = [len(LEAD) + SIZE * count for count in range(len(pages) + 1)]
    tokens = [*tokens_of(pages), *QUESTION]
    answer = served(sides, name, {"segments": ends, **options}, tokens, BLOCKS, computed, salt=salt)
    assert not answer.failed
    return answer, report_of(sides, answer)


def assert_page(answer, index, pages, place):
    """Asserts that a page of an answer has the rows that a prefill of these pages left at a place, rotated to here."""
    begin, source = (len(LEAD) + SIZE * number for number in (index, place))
    kv = {name: value[:, source : source + SIZE] for name, value in true_kv(tokens_of(pages)).items()}
    expected = rows_of_kv(kv | {"k": turned(LAYOUT.rope, kv["k"], np.full(SIZE, begin - source))})
    np.testing.assert_allclose(answer.loaded[:, begin : begin + SIZE], expected, rtol=3e-4, atol=3e-4)


def points(report):
    return [point for point, _ in report["served"]]


def certify(sides, **bounds):
    """Bounds points in nats, such as `near=0.04`, behind any number of chunks; survivors after up to 8 slides."""
    losses = {(point, 8 if point == "survivor" else 0): [kl] * 8 for point, kl in bounds.items()}
    sides.scheduler.certificate = certificate(losses, backbone="tiny")


class Scene(NamedTuple):
    """Prompts, as (pages, options), and how the last of them is served; bounds are those of its certificate."""

    prompts: list[tuple[list[int], dict[str, Any]]]
    points: str
    kl: float | None = 0.0
    bounds: Mapping[str, float] = {}
    settings: Mapping[str, Any] = {}
    why: str = ""


def all_of(options, *prompts):
    return [(pages, options) for pages in prompts]


def behind(first, second, points):
    """A window that remembers, and the next one."""
    return Scene(all_of(REMEMBER, first, second), points)


BASES = all_of({}, [0, 1, 2], [3, 1, 2], [1, 5])
LIMITED = {**CERTIFIED, "kl": 0.03, "save": False}
AGENT = {**REMEMBER, "agent": "one"}
LEARNING = {"bounds": {"near": 0.01}, "settings": {"store_after": 2, "survivors": 0}}
MET = all_of({}, [2, 0, 1], [3, 0, 1], [5])  # before the prompt in which page 5 is behind approximate chunks
LEARNT = [*MET, ([3, 0, 1, 5], CERTIFIED)]
KNOWN = "leading restored restored"
SCENES = {
    "exactly behind other chunks": Scene(
        all_of({}, [0, 1, 2], [1, 2]), "leading", why="chunk 2 of 3 is not stored behind those in front of it"
    ),
    "within a bound": Scene([*BASES, ([1, 2], LIMITED)], "leading restored mean", 0.01, {"near": 0.04, "mean": 0.01}),
    "beyond a bound": Scene(
        [*BASES, ([1, 2], LIMITED)], "leading restored", 0.0, {"mean": 0.04}, why="is not certified within 0.03 nats"
    ),
    # A chunk survives where all in front was there in its order.
    "one has left": behind([0, 1, 2, 3], [0, 2, 3, 4], "leading restored survivor survivor"),
    "another order": behind([0, 1, 2], [1, 0, 2], "leading survivor"),
    # Survivors serve no one else.
    "another agent": Scene([([0, 1, 2], AGENT), ([1, 2], REMEMBER)], "leading"),
    "another tenant": Scene([([0, 1, 2], AGENT), ([1, 2], AGENT | {"salt": "another"})], ""),
    "forgetting": Scene(all_of(CERTIFIED, [0, 1, 2], [1, 2, 3]), "leading survivor survivor", 0.02, {"survivor": 0.02}),
    # A window that remembers promises its survivors, but not what was computed behind other approximate chunks.
    "prefilled behind": Scene([*BASES, ([1, 2, 3], REMEMBER)], "leading restored near", 0.03, {"near": 0.03}),
    "inherited": Scene([*BASES[::2], *all_of(REMEMBER, [1, 2, 3], [3, 4])], "leading survivor", 0.03, {"near": 0.03}),
    # A chunk that was met before is prefilled behind exact ones once.
    "learnt": Scene(LEARNT, KNOWN, **LEARNING, why="chunk 5 of 5 is prefilled behind exact ones, to be stored"),
    "near from then on": Scene([*LEARNT, ([2, 0, 1, 5], CERTIFIED)], f"{KNOWN} restored near", 0.01, **LEARNING),
}


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_the_last_of_some_prompts_is_served_by_what_the_others_left(tmp_path, scene):
    with sides_of(tmp_path, **scene.settings) as sides:
        if scene.bounds:
            certify(sides, **scene.bounds)
        for number, (pages, options) in enumerate(scene.prompts):
            answer, report = asked(sides, f"{number}", pages, **options)
        assert (points(report), report["kl"]) == (scene.points.split(), scene.kl)
        assert scene.why in report["why"]
        assert report["exact"] == ({*scene.points.split()} <= {"leading", "restored"})
        salt = scene.prompts[-1][1].get("salt")
        assert (answer.request.cache_salt == salt) == report["exact"], "exact blocks are shared, others are not"


def test_pages_have_the_rows_of_the_prefills_that_they_come_from(sides):
    asked(sides, "first", [0, 1, 2, 3])
    asked(sides, "lone", [1, 5])
    answer, _ = asked(sides, "again", [0, 1, 2, 3])
    assert answer.count == len(LEAD) + 4 * SIZE
    assert not answer.orders.saves, "all of it is stored"
    for index in range(4):
        assert_page(answer, index, [0, 1, 2, 3], index)
    answer, _ = asked(sides, "approximate", [1, 2, 3], **PATCHED)
    for index, (pages, place) in enumerate([([1, 5], 0), ([0, 1, 2, 3], 2), ([0, 1, 2, 3], 3)]):
        assert_page(answer, index, pages, place)
    assert not answer.orders.saves or not answer.orders.saves[0].prefills, "nothing is formed behind approximate chunks"


def test_a_damaged_prefill_gives_way_to_the_next_best_and_is_stored_again(tmp_path):
    with sides_of(tmp_path) as sides:
        asked(sides, "first", [0, 1, 2])
        store = sides.scheduler.stores.of("default")
        prefills = sides.scheduler.stores.prefills("default", np.dtype("float32"))
        answer, _ = asked(sides, "again", [0, 1, 2])
        step = answer.orders.loads[0].payloads[2].step
        name = store.names.canonical("tiny", step.segment.id, lead=prefills.lead(step.identity))
        path = tmp_path / "store" / "data" / store.objects.index.row("SELECT file FROM objects WHERE name = ?", name)[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with sides_of(tmp_path) as sides:
        memory_of(os.path.realpath(tmp_path / "store"), 1 << 30).clear()
        assert points(asked(sides, "after", [0, 1, 2])[1]) == ["leading", "restored"]
        assert points(asked(sides, "then", [0, 1, 2])[1]) == ["leading", "restored", "restored", "restored"]


@pytest.mark.parametrize("options", [REMEMBER, {**REMEMBER, "reuse": "exact"}], ids=["certified", "exact"])
def test_a_sliding_window_prefills_new_chunks_alone(sides, options):
    """Each page keeps the KV that it had when it came, rotated to where it stands now."""
    asked(sides, "turn 0", [0, 1, 2], **options)
    histories = {page: ([0, 1, 2], page) for page in range(3)}
    for turn in range(1, 5):
        window = [turn, turn + 1, turn + 2]
        answer, report = asked(sides, f"turn {turn}", window, **options)
        assert points(report) == ["leading", "survivor", "survivor"], "all but the new page"
        assert (report["promise"], report["exact"], report["kl"]) == ("remember", False, 0.0)
        for index, page in enumerate(window[:2]):
            assert_page(answer, index, *histories[page])
        histories[turn + 2] = (window, 2)
    assert sides.worker.former.counts["survivors"] == len(sides.scheduler.stores.survivors) == 7


def test_a_request_that_the_engine_has_keeps_its_salt(sides):
    """The engine's blocks are exact, and another salt would hide them."""
    for name, pages in (("first", [0, 1, 2, 3]), ("lone", [1, 5])):
        asked(sides, name, pages, **PATCHED)
    answer, report = asked(sides, "second", [1, 2], computed=10, **PATCHED)
    assert (answer.request.cache_salt, points(report)) == (None, ["leading"])
    assert report["why"] == "the engine has as much of it in its own cache"
    answer, report = asked(sides, "third", [1, 2, 3], computed=4, **PATCHED)
    assert answer.request.cache_salt is not None
    assert len(points(report)) == 4


def test_patches_are_formed_when_their_antecedent_comes_again(tmp_path):
    with sides_of(tmp_path, store_after=2) as sides:
        served(sides, "alone", {"segments": [SIZE]}, [*PAGES[1], *QUESTION], BLOCKS)
        asked(sides, "base", [2, 1])
        assert sides.worker.former.counts["prefills"] == 2
        for times in (1, 2, 3):
            asked(sides, f"time {times}", [3, 2, 1])
            assert sides.worker.former.counts["patches"] == (times >= 2), times
