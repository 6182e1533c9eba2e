"""Other programs get KV, encoder outputs and rollouts as the library computes them, and each prefill is shared."""

import contextlib
import dataclasses
import enum
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from serving_hooks import imported

import kvpatch_jax as kvp
from kvpatch_jax.serving import CacheAxes, RolloutSampler, chunk_from_cache, place_in_cache
from tests.shared.arrays import placed
from tests.shared.session_cases import IMAGE_TOKENS, image_of, reader, state, words

# --------------------------------------------------------------------------------------------------------------- caches

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
    return placed(np.random.default_rng(len(shape)).standard_normal(shape), jnp.bfloat16)


def cache_of(axes: CacheAxes) -> Any:
    arrays = []
    for channel in axes.layout.channels:
        sizes = {"L": LAYERS, "B": ROWS, "T": SLOTS, "K": channel.heads, "H": channel.width}
        shape = [sizes[letter] for letter in axes.letters]
        arrays.append(draw(*shape) if "L" in axes.letters else [draw(*shape) for _ in range(LAYERS)])
    if axes.fields is not None:
        return Latent(*arrays, length=placed(7))
    if "L" not in axes.letters:
        return Listed(*arrays, starts=placed(np.zeros(ROWS, np.int32)))
    return {"k": arrays[0], "v": arrays[1]}


def rows_of(cache: Any, axes: CacheAxes, row: int) -> dict[str, np.ndarray]:
    """Returns a sequence's rows of a cache, [L, T, K, H], by numpy's transpositions."""
    rows = {}
    for name, leaves in axes.arrays(cache, 1, 0, row).items():
        array = np.asarray(leaves[0]) if "L" in axes.letters else np.stack(leaves)
        letters = axes.letters if "L" in axes.letters else "L" + axes.letters
        for letter in "BK":
            if letter not in letters:
                array, letters = array[None], letter + letters
        rows[name] = array.transpose([letters.index(letter) for letter in "BLTKH"])[row]
    return rows


def chunk_of(layout: kvp.KVLayout, id: str = "page") -> kvp.Chunk:
    shapes = {channel.name: (LAYERS, TOKENS, channel.heads, channel.width) for channel in layout.channels}
    kv = {name: placed(3 * np.asarray(draw(*shape))) for name, shape in shapes.items()}
    return kvp.Chunk(kv, np.arange(TOKENS, dtype=np.float32), TOKENS, TOKENS, id, layout, "toy")


def assert_equal(cache: Any, expected: Any) -> None:
    for ours, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(("name", "rank"), [("stacked", 4), ("listed", 0), ("latent", 0), ("apart", 0), ("single", 0)])
def test_a_placed_chunk_is_what_the_operator_computes_and_nothing_else_changes(name: str, rank: int):
    axes = CACHES[name]
    cache, row, chunk = cache_of(axes), 1 if "B" in axes.letters else 0, chunk_of(axes.layout)
    slot = SLOTS - 2 if axes.ring else 7
    slots = np.arange(slot, slot + TOKENS) % SLOTS
    conditioned = {name: placed(2 * np.asarray(value)) for name, value in chunk.kv.items()}
    patch = kvp.form_patch(chunk, conditioned, rank, ["legend"]) if rank else None
    piece = kvp.Placed(chunk.pad(TOKENS + 3), patch and patch.pad(TOKENS + 3), 40, ["legend"])
    written = place_in_cache(cache, axes, piece, slot, row=row)

    expected = rows_of(cache, axes, row)
    for name, value in piece.apply().items():
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
    axes, cache, piece = CACHES["listed"], cache_of(CACHES["listed"]), kvp.Placed(chunk_of(GQA), None, 9)
    expected = place_in_cache(cache, axes, piece, 4, row=1)
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    sharding = jax.NamedSharding(mesh, jax.P(None, "heads"))
    sharded = dataclasses.replace(cache, k=jax.device_put(cache.k, sharding), v=jax.device_put(cache.v, sharding))
    written = place_in_cache(sharded, axes, piece, 4, row=1)
    assert written.k[0].sharding.is_equivalent_to(sharding, 4)
    assert written.k[0].sharding.mesh == mesh
    assert_equal(written, expected)
    chunk = chunk_from_cache(written, axes, TOKENS, id="page", backbone="toy", slot=4, row=1, start=9)
    assert (np.asarray(chunk.kv["v"]) == np.asarray(piece.kv["v"])).all()


def test_what_does_not_fit_is_refused_before_anything_is_written():
    axes, cache, errors = CACHES["stacked"], cache_of(CACHES["stacked"]), kvp.errors
    piece, small = kvp.Placed(chunk_of(GQA), None, 3), {name: placed(value, np.int8) for name, value in cache.items()}
    quantised = {name: (value, np.asarray(cache[name])[..., 0]) for name, value in small.items()}
    for error, message, arguments, slot, row in (
        (errors.InputError, "got slot .* expected 0 to", (cache, axes, piece), SLOTS - 4, 0),
        (errors.InputError, "got row .* expected 0 to", (cache, axes, piece), 0, ROWS),
        (errors.LayoutError, "not quantised", (quantised, axes, piece), 0, 0),
        (errors.ShapeError, "int8", (small, axes, piece), 0, 0),
        (errors.ShapeError, r"cache\.k: got shape", (cache, CacheAxes(GQA, "L B K T H"), piece), 0, 0),
    ):
        with pytest.raises(error, match=message):
            place_in_cache(*arguments, slot, row=row)
    with pytest.raises(errors.InputError, match=r"got length .* expected 1 to"):
        chunk_from_cache(cache, axes, SLOTS + 1, id="chunk", backbone="tiny")


# ------------------------------------------------------------------------------------------------------ encoder outputs

Role = enum.Enum("Role", ["SCHEDULER", "WORKER"])


class Base:
    """What of `ECConnectorBase` the connector uses."""

    def __init__(self, vllm_config, role):
        self.is_producer = vllm_config.ec_transfer_config.ec_role != "ec_consumer"
        self.is_consumer = vllm_config.ec_transfer_config.ec_role != "ec_producer"

    def bind_connector_metadata(self, metadata):
        self._get_connector_metadata = lambda: metadata


class Tensor:
    """What of a torch tensor the connector uses: its bits reach numpy, its bfloat16 does not."""

    def __init__(self, array):
        self.array, self.dtype = array, f"torch.{array.dtype.name}"
        self.detach = self.cpu = self.contiguous = lambda: self
        self.to = lambda device: self
        self.view = lambda dtype: Tensor(array.view(np.dtype(dtype)))

    def numpy(self):
        assert self.dtype != "torch.bfloat16"
        return self.array


@pytest.fixture
def encoder(monkeypatch):
    base = {"ECConnectorBase": Base, "ECConnectorMetadata": type("ECConnectorMetadata", (), {})}
    torch = {"uint8": "uint8", "bfloat16": "bfloat16", "from_numpy": Tensor}
    name = "kvpatch_jax.serving.vllm.encoder"
    with imported(name, vllm__distributed__ec_transfer__ec_connector__base=base, torch=torch) as module:
        monkeypatch.setattr(module, "weights_digest", lambda config: config.weights)
        yield module


@contextlib.contextmanager
def engine(encoder, root, role="ec_both", backbone="tiny", dtype="bfloat16", weights="ab" * 32, patience=5.0):
    extra = {"store": str(root), "backbone": backbone}
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_role=role, ec_connector_extra_config=extra),
        model_config=SimpleNamespace(dtype=f"torch.{dtype}"),
        device_config=SimpleNamespace(device_type="cpu"),
        weights=weights,
    )
    sides = [encoder.KVPatchEncoderConnector(config, side, patience) for side in Role]
    yield SimpleNamespace(scheduler=sides[0], worker=sides[1], cache={}, encoded=0)
    for side in sides:
        side.shutdown()


def ask(engine, *outputs):
    """Serves a request as vLLM calls the hooks; returns its images' outputs in the engine's encoder cache."""
    names = [f"image {number}" for number in range(len(outputs))]
    place = SimpleNamespace(offset=3, length=4)
    features = [SimpleNamespace(identifier=name, mm_position=place) for name in names]
    request = SimpleNamespace(request_id="request", mm_features=features)
    while not engine.scheduler.ensure_cache_available(request, 0):
        time.sleep(0.001)
    missing = [index for index, name in enumerate(names) if not engine.scheduler.has_cache_item(name)]
    for index in range(len(names)):
        engine.scheduler.update_state_after_alloc(request, index)
    engine.worker.bind_connector_metadata(engine.scheduler.build_connector_meta(None))
    engine.cache.clear()
    engine.worker.start_load_caches(engine.cache)
    for index in missing:
        engine.cache[names[index]] = Tensor(outputs[index])
        engine.worker.save_caches(encoder_cache=engine.cache, mm_hash=names[index])
    engine.encoded += len(missing)
    assert engine.scheduler.ensure_cache_available(request, 7)
    assert engine.scheduler.request_finished(request) == (False, None)
    return [engine.cache[name].array for name in names]


OUTPUTS = [np.linspace(-9, 9, 20).reshape(4, 5).astype(jnp.bfloat16), np.zeros((4, 5), jnp.bfloat16)]


def test_a_consumer_gets_the_producers_bits_and_runs_no_tower(encoder, tmp_path):
    for first in ("ec_consumer", "ec_producer"):  # a consumer stores nothing
        with engine(encoder, tmp_path, first) as other:
            ask(other, *OUTPUTS)
            assert other.encoded == 2
    for role in ("ec_consumer", "ec_both"):
        with engine(encoder, tmp_path, role) as consumer:
            served = ask(consumer, *OUTPUTS)
            assert (consumer.encoded, consumer.scheduler.counts["hits"]) == (0, 2)
        assert [array.tobytes() for array in served] == [array.tobytes() for array in OUTPUTS]
        assert served[0].dtype == jnp.bfloat16


def test_another_model_is_served_nothing(encoder, tmp_path):
    with engine(encoder, tmp_path) as first:
        ask(first, *OUTPUTS)
    for other in ({"backbone": "other"}, {"dtype": "float32"}, {"weights": "cd" * 32}):
        with engine(encoder, tmp_path, **other) as second:  # pyright: ignore[reportArgumentType]
            ask(second, *OUTPUTS)
            assert second.encoded == 2


def test_a_failure_is_a_miss_that_is_counted_and_logged_once(encoder, tmp_path, monkeypatch, caplog):
    def fail(*arguments, **options):
        raise OSError("the disk is gone")

    monkeypatch.setattr(kvp.ChunkStore, "get_encoder", fail)
    with engine(encoder, tmp_path) as broken:
        ask(broken, *OUTPUTS)
        assert broken.encoded == 2
        assert broken.scheduler.counts["_stored: OSError"] == 2
    assert sum("_stored: OSError" in record.message for record in caplog.records) == 2, "once by each side"


# ------------------------------------------------------------------------------------------------------------- rollouts

PROMPTS = [words(7, 3), words(20, 5)]
LEAD = words(5, 4)
SAMPLING: dict[str, Any] = {"temperature": 0.9, "top_k": 8, "stop": ()}


@pytest.fixture(scope="module")
def backbone() -> Any:
    return reader()


def alone(backbone: Any, prompt: str, seed: int, steps: int) -> tuple[tuple[int, ...], Any]:
    """Returns the tokens of a rollout in a session of its own, and their log-probabilities token by token."""
    with kvp.Session(backbone, lead=LEAD) as session:
        session.add(image_of(1))
        ids = session.ask(prompt, steps=steps, seed=seed, **SAMPLING).ids
        return ids, session.log_probs(prompt, np.asarray(ids))


def test_a_group_is_that_of_separate_sessions_and_prefills_each_image_once(backbone: Any, monkeypatch: Any):
    prefilled, steps, count = list[int](), 2, 2
    with kvp.Session(backbone, lead=LEAD) as session:
        before, costs = state(session), session.runtime.executor.costs
        prefill = type(costs).prefill

        def counted(self: Any, id: str, tokens: int, behind: int) -> Any:
            prefilled.append(tokens)
            return prefill(self, id, tokens, behind)

        with monkeypatch.context() as patch:
            patch.setattr(type(costs), "prefill", counted)
            images = [image_of(1)]
            group = RolloutSampler(session)(PROMPTS, steps, images=images, multi_sampling=count, seed=40, **SAMPLING)
        assert prefilled == [IMAGE_TOKENS], "a forward of the image for all rollouts"
        # Window, names, slots and provided inputs; the counts are those of the session alone.
        assert state(session) == before
    assert len({tuple(tokens) for tokens in group.tokens}) > 2
    assert (group.padded_prompt_tokens[:count, :2] == 0).all()
    assert [list(row) for row in group.padded_prompt_tokens[count:]] == count * [[20, 21, 22, 23, 24]]
    for number, (tokens, scores) in enumerate(zip(group.tokens, group.logprobs, strict=True)):
        ids, expected = alone(backbone, PROMPTS[number // count], 40 + number, steps)
        assert tuple(tokens) == ids
        np.testing.assert_allclose(scores, expected, atol=2e-5)


def test_log_probabilities_are_those_of_a_forward_over_prompt_and_answer(backbone: Any):
    items = [kvp.Text(LEAD), image_of(1), kvp.Text(PROMPTS[0])]
    with kvp.Session(backbone, lead=LEAD) as session:
        sampler = RolloutSampler(session)
        group = sampler(PROMPTS[0], 2, images=[image_of(1)], temperature=0.0, stop=())
        with pytest.raises(kvp.errors.InputError, match="got 0 prompts"):
            sampler([], 2)
    logits = np.asarray(backbone.prefill(backbone.embed(**backbone.prepare(items))).logits, np.float64).reshape(-1)
    assert group.tokens[0][0] == logits.argmax()
    expected = logits.max() - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(group.logprobs[0][0], expected, atol=2e-5)
