"""Tiny backbones over eight devices beside the same ones on one device, as a program that prints its facts as JSON.

`test_sharding.py` runs it (`python -m tests.models.mesh_cases DIRECTORY NAME …`), because the number of devices that
XLA_FLAGS asks for is settled once per process, and the other tests want one.
"""

import gc
import json
import math
import re
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import kvpatch_jax as kvp
from kvpatch_jax.core import PARTS, to_engine
from kvpatch_jax.models import FAMILIES, ModelBackbone, load, save
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, tensor_shapes
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.mesh_axes import TENSOR
from kvpatch_jax.models.decoder.moe import Experts
from kvpatch_jax.models.decoder.sharding import parameter_shardings
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from tests.goldens.load import golden_config, golden_prompt, write_checkpoint
from tests.goldens.redraw import redraw_all

EIGHT = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "vocab_size": 320}
"""Changes that make the tiny Qwen3 divide by eight."""
FEW = EIGHT | {"num_key_value_heads": 2}
"""Of 2 KV heads."""
TOWERS = ("deepseek_vl", "glm4v", "glm4v_moe", "internvl", "kimi_vl", "llava", "llava_next", "mistral3", "pixtral")
TOWERS += ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Tiny models of every tower, which four devices divide (Gemma 3 has layers of unlike kinds: refused)."""
LOADED = ("phi3_short", "glm4", "qwen3_moe", "deepseek_v3", "qwen2_5_vl", "qwen3_vl_moe", "kimi_vl", "llava_next")
"""Between them every kind of entry: fused projections and experts, flattened axes, biases, tied and own heads."""


def write_changed(directory: Path, **changes: Any) -> Path:
    """The tiny Qwen3 in other sizes, its weights redrawn under the names and shapes that follow from these."""
    raw = {**golden_config("qwen3"), **changes}
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


def written(family: str) -> Callable[[Path], Path]:
    return lambda directory: write_checkpoint(family, directory)


# How a case's directory is written, its mesh (`jax.make_mesh` makes Explicit axes), and its golden prompt.
CASES: Mapping[str, tuple[Callable[[Path], Path], Callable[[], Mesh], tuple[str, str] | None]] = {
    "gqa": (lambda root: write_changed(root, **EIGHT), lambda: jax.make_mesh((8,), (TENSOR,)), None),
    "few": (lambda root: write_changed(root, **FEW), lambda: jax.make_mesh((8,), (TENSOR,)), None),
    "mha": (written("llama2"), lambda: line_of(4), None),
    "mla": (written("deepseek_v3"), lambda: line_of(4), None),
    # Another axis of the mesh replicates.
    "image": (
        written("internvl"),
        lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("data", TENSOR)),
        ("internvl", "one_image"),
    ),
} | {family: (written(family), lambda: line_of(4), (family, "two_images")) for family in TOWERS}


def error_of(value: Any, expected: Any) -> float:
    """Largest difference over the largest magnitude."""
    value, expected = np.asarray(value, np.float32), np.asarray(expected, np.float32)
    return float(np.abs(value - expected).max() / np.abs(expected).max())


def lies(value: jax.Array) -> dict[str, Any]:
    """Shape of the array, shape of what one device holds, and how many devices hold some of it."""
    shards = {shard.data.shape for shard in value.addressable_shards}
    assert len(shards) == 1
    return {"shape": value.shape, "shard": shards.pop(), "devices": len(value.addressable_shards)}


def run(backbone: ModelBackbone, embedded: dict[str, Any], every_call: bool) -> dict[str, Any]:
    """Embedding, a prefill and a decode step behind it, or every kind of call, each fed by the one before."""
    tokens = backbone.embed(**embedded)
    T = tokens.embeddings.shape[1]
    out = backbone.prefill(tokens, logits="all")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    room = ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))
    cache = {name: value if name in PARTS else jnp.pad(value, room) for name, value in engine.items()}
    results = {"embed": tokens.embeddings, "prefill": out.logits, **_named("prefill", out.kv)}
    results |= _named("engine", engine)
    # The third token again, one place behind the last.
    third = tokens.take(2, 3)._replace(positions=tokens.take(-1, T).positions + 1)
    if every_call:
        results |= {"generate": backbone.generate(third, 3, engine)}
    if every_call and not backbone.layout.parts:
        keep = np.ones((backbone.layout.layers, 1, 2), bool)
        keep[-1, :, 0] = False
        other = tokens.take(2, 4)._replace(embeddings=tokens.take(5, 7).embeddings)
        logits, cache, _ = backbone.recompute(other, cache, np.array([[2, 3]]), keep, logits="all")
        results |= {"recompute": logits, **_named("recompute", cache)}
    logits, cache, _ = backbone.decode(third, cache, np.full((len(tokens.embeddings), 1), T))
    return results | {"decode": logits, **_named("decode", cache)}


def _named(call: str, kv: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {f"{call} {name}": value for name, value in kv.items()}


def forwards(case: str, directory: Path, every_call: bool) -> dict[str, Any]:
    """What calls give over a mesh and on one device, and how results and parameters lie."""
    write, make_mesh, prompt = CASES[case]
    write(directory)
    alone, over = load(directory), load(directory, mesh=make_mesh())
    embedded = {"input_ids": np.arange(3, 15, dtype=np.int32)[None]}
    return compared(alone, over, embedded if prompt is None else golden_prompt(alone, *prompt), every_call)


def compared(alone: ModelBackbone, over: ModelBackbone, embedded: dict[str, Any], every_call: bool) -> dict[str, Any]:
    expected, results = run(alone, embedded, every_call), run(over, embedded, every_call)
    return {
        "errors": {call: error_of(results[call], expected[call]) for call in expected},
        "cache": {call: lies(value) for call, value in results.items() if call.split()[-1] in over.layout.names},
        "mesh": dict(over.mesh.shape) if over.mesh is not None else {},
        "same_fingerprint": over.fingerprint == alone.fingerprint,
        **loaded(alone, over),
    }


def loaded(alone: ModelBackbone, over: ModelBackbone) -> dict[str, Any]:
    """Whether the parameters over a mesh have the values of those on one device, and how they lie."""
    assert over.mesh is not None
    expected = flatten_params(parameters(abstract(over.config)))
    shardings = parameter_shardings(over.config.text, expected, over.mesh, tower_heads(over.config))
    leaves, values = flatten_params(over.parameters), flatten_params(alone.parameters)
    as_asked = [leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim) for path, leaf in leaves.items()]
    return {
        "parameters": {".".join(path): lies(leaf) for path, leaf in leaves.items()},
        "as_asked": leaves.keys() == shardings.keys() and all(as_asked),
        "same_values": all(np.array_equal(leaf, values[path]) for path, leaf in leaves.items()),
        "dtypes": sorted({str(leaf.dtype) for leaf in leaves.values()}),
    }


def loads(directory: Path) -> dict[str, Any]:
    """Every kind of checkpoint, in bfloat16, over two devices."""
    facts = {}
    for name in LOADED:
        root = write_checkpoint(name, directory / name)
        facts[name] = loaded(load(root, "bfloat16"), load(root, "bfloat16", mesh=line_of(2)))
    return facts


def collectives(directory: Path) -> list[list[Any]]:
    """What devices exchange in one step behind a context in pages, where each KV head has four devices."""
    backbone = load(write_changed(directory, **FEW), mesh=line_of(8))
    pool = kvp.pool.make_pool(backbone.layout, 4, 16, "float32", shardings=backbone.kv_shardings)
    paged = kvp.core.Paged.of(pool, np.arange(32, dtype=np.int32), None)
    unit, tokens = jnp.zeros((1, 1), jnp.int32), backbone.embed(np.array([[3]]))
    calls = backbone.programs
    arguments = (calls.state, tokens, pool, paged._replace(pool={}), unit, (unit, unit), None, None, None)
    return exchanged(calls.recompute_in_pages.lower(*arguments).compile().as_text() or "")


def exchanged(text: str) -> list[list[Any]]:
    """Kind and numbers in the result of what devices exchange in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    sizes = lambda shapes: [
        math.prod(map(int, filter(None, shape.split(",")))) for shape in re.findall(r"\[([\d,]*)\]", shapes)
    ]
    return [[kind, sum(sizes(shapes))] for shapes, kind in re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)]


def experts(_: Path) -> dict[str, Any]:
    """A mixture over eight devices: tokens that choose by chance, and tokens that all choose experts of one device."""
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
    facts: dict[str, Any] = {"errors": {}}
    for name, favoured in {"by chance": (), "one device": (6, 7)}.items():
        correction = np.zeros(16, np.float32)
        correction[list(favoured)] = 9
        state["correction"][...] = jnp.asarray(correction)
        spread = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec(leaf))), state)
        facts["errors"][name] = error_of(over(spread, x), alone(state, x))
    facts["collectives"] = exchanged(over.lower(spread, x).compile().as_text() or "")
    return facts


def memory(directory: Path) -> dict[str, Any]:
    """Host memory while a model is loaded onto devices that keep copies of their own, as accelerators do."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 32}
    write_changed(directory, **{**EIGHT, **sizes})
    read, put, asked = SafetensorsSource.read, jax.device_put, []

    def counted(*args: Any) -> np.ndarray:
        value = read(*args)
        asked.append(value.nbytes)
        return value

    def copied(value: Any, device: Any) -> jax.Array:
        """Copies, as an accelerator does; a CPU takes an aligned host array as it stands, whatever `may_alias` says."""
        lent = put(value, device)
        copy = jax.block_until_ready(jnp.copy(lent))
        lent.delete()
        return copy

    jax.device_put = copied
    load(directory, mesh=line_of(8))  # what Python and JAX keep from a first time is not counted
    setattr(SafetensorsSource, "read", counted)  # noqa: B010
    tracemalloc.start()
    leaves = flatten_params(load(directory, mesh=line_of(8)).parameters).values()
    peak = tracemalloc.get_traced_memory()[1]
    setattr(SafetensorsSource, "read", read)  # noqa: B010
    jax.device_put = put
    return {
        "peak": peak,
        "read": sum(asked),
        "largest_slice": max(asked),
        "model": sum(leaf.nbytes for leaf in leaves),
        "largest": max(leaf.nbytes for leaf in leaves),
        "largest_shard": max(leaf.addressable_shards[0].data.nbytes for leaf in leaves),
    }


def hybrid(directory: Path) -> dict[str, Any]:
    """Linear attention over two devices, each with one of two key heads and its value heads."""
    write_checkpoint("qwen3_5", directory)
    ids = {"input_ids": (np.arange(77)[None] * 37 + 11) % 290 + 3}
    return compared(load(directory), load(directory, mesh=line_of(2)), ids, every_call=True)


def main() -> None:
    """Prints {name: facts}; a case with "-every" behind its name runs every kind of call."""
    root, *names = sys.argv[1:]
    # As in the root's conftest.py.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    warnings.simplefilter("error")
    others: dict[str, Any] = {"loads": loads, "collectives": collectives, "memory": memory, "experts": experts}
    others |= {"hybrid": hybrid}
    facts = {}
    with jax.default_matmul_precision("highest"):
        for name in names:
            case, _, every_call = name.partition("-")
            directory = Path(root) / name
            facts[name] = others[name](directory) if name in others else forwards(case, directory, bool(every_call))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
