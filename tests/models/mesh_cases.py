"""Tiny backbones over eight devices, and chunks apart over four, beside the same ones on one device.

`test_sharding.py` runs this file in a process of its own, which has eight devices.
"""

import functools
import math
import re
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import kvpatch_jax as kvp
from evals.bench.shapes import qwen2_config, tiny_config
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, EngineKV, to_engine
from kvpatch_jax.models import FAMILIES, ModelBackbone, load, save
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, tensor_shapes
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.mesh_axes import TENSOR
from kvpatch_jax.models.decoder.moe import Experts
from kvpatch_jax.models.decoder.sharding import parameter_shardings
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from kvpatch_jax.models.parallel import ParallelPrefill, prefill_chunks_apart, read_question, spread_backbone
from kvpatch_jax.models.random_weights import random_backbone
from kvpatch_jax.repair import attention_scores
from tests.goldens.load import golden_config, golden_prompt, write_checkpoint
from tests.goldens.redraw import redraw_all
from tests.shared.tolerances import assert_close_to_largest

BAR = 1e-5
"""Of the largest magnitude, float32; 4.2e-6 was reached (GLM-4.5V), else 3e-6."""
BARS: dict[str, float] = dict.fromkeys(("mha", "mla", "image", "hybrid"), 2e-4)
FEW = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320}
"""Changes that make the tiny Qwen3 divide by eight, groups of four devices sharing a KV head."""
TOWERS = ("deepseek_vl", "glm4v", "glm4v_moe", "internvl", "kimi_vl", "llava", "llava_next", "mistral3", "pixtral")
TOWERS += ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Tiny models of every tower, which four devices divide (Gemma 3 has layers of unlike kinds: refused)."""

pytestmark = pytest.mark.usefixtures("highest_precision")


def write_few(directory: Path, **changes: Any) -> Path:
    """The tiny Qwen3 in other sizes, its weights redrawn under the names and shapes that follow from these."""
    raw = {**golden_config("qwen3"), **FEW, **changes}
    if raw["num_hidden_layers"] != len(raw.get("layer_types", ())):
        raw.pop("layer_types", None)  # one kind of layer, however many
    config = FAMILIES["Qwen3ForCausalLM"].config(raw, "exact", None)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameters(abstract(config)))
    save(ModelBackbone(config, zeros), directory)
    tensors = redraw_all(tensor_shapes(SafetensorsSource(directory)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def line_of(count: int) -> Mesh:
    """The first `count` devices on the tensor axis."""
    return Mesh(np.array(jax.devices()[:count]), (TENSOR,))


# A case's family, its mesh (`jax.make_mesh` makes Explicit axes), and its golden prompt.
CASES: Mapping[str, tuple[str, Callable[[], Mesh], str | None]] = {
    "few": ("", lambda: jax.make_mesh((8,), (TENSOR,)), None),
    "mha": ("llama2", lambda: line_of(4), None),
    "mla": ("deepseek_v3", lambda: line_of(4), None),
    "hybrid": ("qwen3_5", lambda: line_of(2), None),  # each device has one of two key heads and its value heads
    # Another axis of the mesh replicates.
    "image": ("internvl", lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("data", TENSOR)), "one_image"),
} | {family: (family, lambda: line_of(4), "two_images") for family in TOWERS}


def run(backbone: ModelBackbone, embedded: dict[str, Any], every_call: bool) -> dict[str, Any]:
    """Embedding, a prefill and a decode step behind it, or every kind of call, each fed by the one before."""
    named = lambda call, kv: {f"{call} {name}": value for name, value in kv.items()}
    tokens = backbone.embed(**embedded)
    T = tokens.embeddings.shape[1]
    out = backbone.prefill(tokens, logits="all")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    room = ((0, 0), (0, 0), (0, 3), (0, 0), (0, 0))
    cache = {name: value if name in PARTS else jnp.pad(value, room) for name, value in engine.items()}
    results = {"embed": tokens.embeddings, "prefill": out.logits, **named("prefill", out.kv), **named("engine", engine)}
    # The third token again, one place behind the last.
    third = tokens.take(2, 3)._replace(positions=tokens.take(-1, T).positions + 1)
    if every_call:
        results["generate"] = backbone.generate(third, 3, engine) if backbone.mesh else steps(backbone, third, cache, T)
    if every_call and not backbone.layout.parts:
        keep = np.ones((backbone.layout.layers, 1, 2), bool)
        keep[-1, :, 0] = False
        other = tokens.take(2, 4)._replace(embeddings=tokens.take(5, 7).embeddings)
        logits, cache, _ = backbone.recompute(other, cache, np.array([[2, 3]]), keep, logits="all")
        results |= {"recompute": logits, **named("recompute", cache)}
    logits, cache, _ = backbone.decode(third, cache, np.full((len(tokens.embeddings), 1), T))
    return results | {"decode": logits, **named("decode", cache)}


def steps(backbone: ModelBackbone, token: Tokens, cache: Any, place: int) -> np.ndarray:
    """Three greedy tokens [1,3] by decode, which runs anyway."""
    ids: list[int] = []
    for slot in range(place, place + 3):
        logits, cache, _ = backbone.decode(token, cache, np.array([[slot]]))
        ids.append(int(np.asarray(logits)[0, -1].argmax()))
        token = backbone.embed(np.array([ids[-1:]]), token.positions + 1)
    return np.array([ids])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "few" else pytest.mark.nightly) for name in CASES]
)
def test_every_call_and_tower_equals_one_devices(name, tmp_path):
    """Every result within the bar, every cache over its KV heads (latents and tails on each device)."""
    family, make_mesh, prompt = CASES[name]
    directory = write_checkpoint(family, tmp_path) if family else write_few(tmp_path)
    alone, over = load(directory), load(directory, mesh=make_mesh())
    assert over.mesh is not None
    length = 77 if name == "hybrid" else 12
    embedded = {"input_ids": (np.arange(length, dtype=np.int32)[None] * 37 + 11) % 290 + 3}
    embedded = golden_prompt(alone, family, prompt) if prompt else embedded
    every_call = name not in TOWERS
    expected, results = run(alone, embedded, every_call), run(over, embedded, every_call)
    for call, value in results.items():
        assert_close_to_largest(np.asarray(value), np.asarray(expected[call]), call, bar=BARS.get(name, BAR))
        channel = call.split()[-1]
        if channel in over.layout.names:
            spread = 1 if channel in ("ckv", "kpe", "tail") else over.mesh.shape[TENSOR]
            shape = value.shape
            assert shard_of(value) == (*shape[:3], shape[3] // spread, shape[4]), call
            assert len(value.addressable_shards) == over.mesh.size, call
    assert over.replaced(over.parameters).mesh == over.mesh
    assert over.fingerprint == alone.fingerprint
    check_parameters(alone, over)

    shards = {".".join(path): shard_of(leaf) for path, leaf in flatten_params(over.parameters).items()}
    if name == "few":
        assert dict(over.mesh.shape) == {"tensor": 2, "tensor_copies": 4}
        assert shards["decoder.layers.attention.key.kernel"] == (3, 64, 8)
        assert shards["decoder.layers.attention.query.kernel"] == (3, 64, 16)
        assert shards["decoder.layers.mlp.down.kernel"] == (3, 12, 64)
        assert shards["decoder.embedding"] == (40, 64)


def shard_of(value: jax.Array) -> tuple[int, ...]:
    """Shape of what each device has."""
    (shape,) = {shard.data.shape for shard in value.addressable_shards}
    return shape


def check_parameters(alone: ModelBackbone, over: ModelBackbone) -> None:
    """Parameters over a mesh have the values of those on one device, and lie as the table says."""
    assert over.mesh is not None
    expected = flatten_params(parameters(abstract(over.config)))
    shardings = parameter_shardings(over.config.text, expected, over.mesh, tower_heads(over.config))
    leaves, values = flatten_params(over.parameters), flatten_params(alone.parameters)
    assert leaves.keys() == shardings.keys()
    for path, leaf in leaves.items():
        assert leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), path
        assert leaf.dtype == values[path].dtype, path
        assert np.array_equal(leaf, values[path]), path


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["phi3_short", "glm4", "qwen3_moe", "qwen3_vl_moe"])
def test_fused_projections_and_experts_are_read_in_shards(family, tmp_path):
    directory = write_checkpoint(family, tmp_path)
    check_parameters(load(directory, "bfloat16"), load(directory, "bfloat16", mesh=line_of(2)))


def exchanged(text: str | None) -> list[tuple[str, int]]:
    """Kind and numbers in the result of what devices exchange in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    sizes = lambda shapes: [
        math.prod(map(int, filter(None, shape.split(",")))) for shape in re.findall(r"\[([\d,]*)\]", shapes)
    ]
    return [(kind, sum(sizes(shapes))) for shapes, kind in re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text or "")]


def test_a_step_exchanges_two_sums_per_layer_and_nothing_of_a_pool(tmp_path):
    """The scan's body is in the program once: a sum behind attention and one behind the MLP, of one token's width."""
    backbone = load(write_few(tmp_path), mesh=line_of(8))
    pool = kvp.pool.make_pool(backbone.layout, 4, 16, "float32", shardings=backbone.kv_shardings)
    paged = kvp.core.Paged.of(pool, np.arange(32, dtype=np.int32), None)
    unit, tokens = jnp.zeros((1, 1), jnp.int32), backbone.embed(np.array([[3]]))
    calls = backbone.programs
    arguments = (calls.state, tokens, pool, paged._replace(pool={}), unit, (unit, unit), None, None, None)
    text = calls.recompute_in_pages.lower(*arguments).compile().as_text()
    assert exchanged(text) == [("all-reduce", 64), ("all-reduce", 64)]


def test_each_device_computes_its_experts_and_their_sum_is_all_that_is_exchanged():
    """Tokens choose by chance, and then all choose experts of one device."""
    config = ExpertConfig(experts=16, chosen=3, intermediate=4, router="sigmoid", renormalise=True)
    mesh, rng = line_of(8), np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, 8, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), state)
    x = jnp.asarray(rng.normal(size=(1, 12, 8)), jnp.float32)
    alone = jax.jit(lambda state, x: nnx.merge(graph, state)(x))

    @jax.jit
    def over(state: Any, x: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return nnx.merge(graph, state)(x)

    spec = lambda leaf: PartitionSpec(TENSOR if leaf.ndim == 3 else None)
    for favoured in ((), (6, 7)):
        correction = np.zeros(16, np.float32)
        correction[list(favoured)] = 9
        state["correction"][...] = jnp.asarray(correction)
        spread = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec(leaf))), state)
        assert_close_to_largest(over(spread, x), np.asarray(alone(state, x)), favoured, bar=1e-5)
        assert exchanged(over.lower(spread, x).compile().as_text()) == [("all-reduce", 12 * 8)]


@pytest.mark.nightly
def test_the_host_holds_one_shard_at_a_time(tmp_path, monkeypatch):
    """Host memory while a model is loaded onto devices that keep copies of their own, as accelerators do."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 32}
    write_few(tmp_path, num_key_value_heads=8, **sizes)
    read, put, pieces = SafetensorsSource.read, jax.device_put, []

    def counted(*args: Any) -> np.ndarray:
        value = read(*args)
        pieces.append(value.nbytes)
        return value

    def copied(value: Any, device: Any) -> jax.Array:
        """Copies, as an accelerator does; a CPU takes an aligned host array as it stands, whatever `may_alias` says."""
        lent = put(value, device)
        copy = jax.block_until_ready(jnp.copy(lent))
        lent.delete()
        return copy

    monkeypatch.setattr(jax, "device_put", copied)
    load(tmp_path, mesh=line_of(8))  # what Python and JAX keep from a first time is not counted
    monkeypatch.setattr(SafetensorsSource, "read", counted)
    tracemalloc.start()
    leaves = flatten_params(load(tmp_path, mesh=line_of(8)).parameters).values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    largest, model = max(leaf.nbytes for leaf in leaves), sum(leaf.nbytes for leaf in leaves)
    shard, python = max(leaf.addressable_shards[0].data.nbytes for leaf in leaves), 4 * 2**20
    assert peak <= shard + max(pieces) + python
    assert peak < largest < model
    assert sum(pieces) == model  # float32 in the file as on the devices: every byte is read once


CHUNKS, ASKED = (9, 11, 12, 8), 5
"""Tokens of the four chunks, and of the question."""
SMALL = qwen2_config(32, 64, heads=4, layers=3, kv_heads=2, vocabulary=320)
close = functools.partial(assert_close_to_largest, bar=1e-5)


def sequence(backbone: ModelBackbone, rows: int, chunks: Sequence[int]) -> tuple[Tokens, Tokens]:
    """A context and a question with drawn embeddings; under M-RoPE an image's positions, and deepstack features."""
    rng, config = np.random.default_rng(0), backbone.config.text
    length = sum(chunks) + ASKED
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    deepstack: Any = None
    if backbone.layout.rope.axes is not None:
        grid = np.stack([positions, positions // 3, positions % 3 + positions // 3], axis=-1)
        positions = grid.astype(np.int32)
        deepstack = np.float32(0.3) * rng.standard_normal((rows, length, 2, config.width), np.float32)
    embeddings: Any = rng.standard_normal((rows, length, config.width), np.float32)
    tokens = Tokens(embeddings, positions, deepstack)
    return tokens.take(0, sum(chunks)), tokens.take(sum(chunks), length)


def blind_cache(backbone: ModelBackbone, context: Tokens, chunks: Sequence[int]) -> EngineKV:
    """Chunks prefilled alone on one device, rotated to their positions and joined."""
    caches, start = [], 0
    for length in chunks:
        part = context.take(start, start + length)
        local = np.asarray(part.positions)
        alone = part._replace(positions=local - local.min(axis=1, keepdims=True))
        caches.append(to_engine(backbone.layout, backbone.prefill(alone).kv, part.positions, 0))
        start += length
    return EngineKV({name: np.concatenate([kv[name] for kv in caches], axis=2) for name in caches[0]})


def alone(
    backbone: ModelBackbone, context: Tokens, question: Tokens, chunks: Sequence[int], count: int
) -> dict[str, Any]:
    """Selects, recomputes and answers on one device, over the last two layers' scores."""
    cache = blind_cache(backbone, context, chunks)
    last = backbone.layout.layers
    reduce = functools.partial(attention_scores, reading="mass", context=sum(chunks))
    scores = np.asarray(backbone.attention(question, cache, layers=(last - 2, last - 1), reduce=reduce)).mean(0)
    chosen = np.sort(np.argsort(-scores, axis=-1)[:, :count], axis=-1)
    if count:
        tokens = jax.tree.map(lambda leaf: leaf[np.arange(len(chosen))[:, None], chosen], context)
        cache = EngineKV(backbone.recompute(tokens, cache, chosen).cache)
    out = backbone.prefill(question, cache, logits="all")
    return {"chosen": chosen, "logits": out.logits, "question": dict(out.kv), **cache}


def check_read(read: ParallelPrefill, expected: dict[str, Any]) -> None:
    """Asserts that a result over the mesh is that of one device, and the selection too."""
    assert np.array_equal(read.chosen, expected["chosen"])
    close(read.logits, expected["logits"], "logits")
    for name, value in read.cache.gather().items():
        close(value, expected[name], name)
    for name, value in read.question.items():
        close(value, expected["question"][name], f"question {name}")


def check(
    backbone: ModelBackbone, rows: int, chunks: Sequence[int] = CHUNKS, devices: Sequence[Any] | None = None
) -> None:
    """Asserts that a backbone over four devices, or these, answers as on one device."""
    devices = jax.devices()[:4] if devices is None else devices
    over, (context, question) = spread_backbone(backbone, devices), sequence(backbone, rows, chunks)
    read = read_question(over, prefill_chunks_apart(over, context, chunks), question, ratio=0.35)
    check_read(read, alone(backbone, context, question, chunks, 14))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("config", "rows"),
    [
        (SMALL, 2),
        (tiny_config("DeepseekV3ForCausalLM"), 1),  # a latent and experts
        (tiny_config("Qwen3VLForConditionalGeneration"), 2),  # M-RoPE and deepstack features
    ],
    ids=["gqa", "mla", "mrope"],
)
def test_each_kind_of_kv_answers_as_on_one_device(config, rows):
    check(random_backbone(config), rows)


@pytest.mark.nightly
def test_only_chosen_tokens_change_and_all_of_them_are_a_prefill():
    """Nothing selected, everything selected, and a prepared cache; all over one context."""
    backbone = random_backbone(SMALL)
    over, (context, question) = spread_backbone(backbone, jax.devices()[:4]), sequence(backbone, 2, CHUNKS)
    apart = prefill_chunks_apart(over, context, CHUNKS)
    before, everywhere = apart.gather(), np.ones((2, sum(CHUNKS)), bool)

    def same_bits(cache: EngineKV, tokens: Any) -> bool:
        return all(np.array_equal(leaf[:, tokens], cache[name][:, tokens]) for name, leaf in before.items())

    nothing = read_question(over, apart, question, ratio=0)
    check_read(nothing, alone(backbone, context, question, CHUNKS, 0))
    assert same_bits(nothing.cache.gather(), everywhere)

    # Everything recomputed is one prefill of everything.
    prompt = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), context, question)
    exact = backbone.prefill(prompt, logits="all")
    close(read_question(over, apart, question, ratio=1).logits, exact.logits[:, -ASKED:], "everything")

    # The tokens that were not chosen keep their bits, and so does the first chunk.
    some = read_question(over, apart, question, ratio=0.3)
    rest, first, after = everywhere.copy(), np.arange(sum(CHUNKS)) < CHUNKS[0], some.cache.gather()
    rest[np.arange(2)[:, None], some.chosen] = False
    assert same_bits(after, rest)
    assert same_bits(after, everywhere & first)
    assert not same_bits(after, everywhere)

    prepared = prefill_chunks_apart(over, context, CHUNKS, blind_cache(backbone, context, CHUNKS))
    close(read_question(over, prepared, question, ratio=0.3).logits, some.logits, "prepared")
