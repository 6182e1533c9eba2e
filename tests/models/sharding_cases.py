"""Tiny backbones loaded over eight devices, beside the same ones on one device. Prints what was found as JSON.

Run by `test_sharding.py` as a program of its own (`python -m tests.models.sharding_cases DIRECTORY NAME …`), because
the number of devices that XLA_FLAGS asks for is settled once per process, and the other tests want one.
"""

import contextlib
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

from kvpatch_jax import apply_patch, form_patch, joined, make_chunk
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import PARTS, to_engine
from kvpatch_jax.models import FAMILIES, ModelBackbone, load, save
from kvpatch_jax.models.checkpoints import SafetensorsSource, flatten_params, tensor_shapes
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.moe import Experts
from kvpatch_jax.models.decoder.sharding import cache_shardings, parameter_shardings
from kvpatch_jax.models.families.family import abstract, parameters, tower_heads
from tests.goldens.load import golden_config, golden_prompt, write_checkpoint
from tests.goldens.redraw import redraw_all

EIGHT = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 8, "vocab_size": 320}
"""Changes that make the tiny Qwen3 divide by eight."""


def write_changed(directory: Path, **changes: Any) -> Path:
    """The tiny Qwen3 in other sizes, its weights redrawn under the names and shapes that follow from these."""
    raw = {**golden_config("qwen3"), **changes}
    if raw["num_hidden_layers"] != len(raw.get("layer_types", ())):
        raw.pop("layer_types", None)  # one kind of layer, however many
    config = FAMILIES["Qwen3ForCausalLM"].config(raw, "exact", None)
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), parameters(abstract(config)))
    save(ModelBackbone(config, zeros), directory)
    save_file(
        redraw_all(tensor_shapes(SafetensorsSource(directory))),
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def line_of(count: int) -> Mesh:
    """The first `count` devices on the tensor axis."""
    return Mesh(np.array(jax.devices()[:count]), ("tensor",))


CASES: dict[str, tuple[Callable[[Path], Path], Callable[[], Mesh]]] = {
    # jax.make_mesh makes Explicit axes.
    "gqa": (lambda root: write_changed(root, **EIGHT), lambda: jax.make_mesh((8,), ("tensor",))),
    "mha": (lambda root: write_checkpoint("llama2", root), lambda: line_of(4)),
    "mla": (lambda root: write_checkpoint("deepseek_v3", root), lambda: line_of(4)),
    # Another axis of the mesh replicates.
    "image": (
        lambda root: write_checkpoint("internvl", root),
        lambda: Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor")),
    ),
}


def error_of(found: Any, expected: Any) -> float:
    """Largest difference over the largest magnitude."""
    found, expected = np.asarray(found, np.float32), np.asarray(expected, np.float32)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def run(backbone: ModelBackbone, embedded: dict[str, Any], whole: bool) -> dict[str, Any]:
    """Embedding, a prefill and a decode step behind it; with `whole` every kind of call, each fed by the one before."""
    tokens = backbone.embed(**embedded)
    T = tokens.embeddings.shape[1]
    out = backbone.prefill(tokens, logits="all")
    engine = to_engine(backbone.layout, out.kv, tokens.positions, 0)
    cache = {name: jnp.pad(value, ((0, 0), (0, 0), (0, 1), (0, 0), (0, 0))) for name, value in engine.items()}
    found = {"embed": tokens.embeddings, "prefill": out.logits, **_named("prefill", out.kv), **_named("engine", engine)}
    if whole:
        keep = np.ones((backbone.layout.layers, 1, 2), bool)
        keep[-1, :, 0] = False
        other = tokens.take(2, 4)._replace(embeddings=tokens.take(5, 7).embeddings)
        logits, cache, _ = backbone.recompute(other, cache, np.array([[2, 3]]), keep, logits="all")
        found |= {"recompute": logits, **_named("recompute", cache)}
        found |= {"generate": backbone.generate(_behind(tokens), 3, engine)}
    logits, cache, _ = backbone.decode(_behind(tokens), cache, np.full((len(tokens.embeddings), 1), T))
    return found | {"decode": logits, **_named("decode", cache)}


def _named(call: str, kv: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {f"{call} {name}": value for name, value in kv.items()}


def _behind(tokens: Tokens) -> Tokens:
    """The third token again, one place behind the last."""
    return tokens.take(2, 3)._replace(positions=tokens.take(-1, tokens.embeddings.shape[1]).positions + 1)


def forwards(
    write: Callable[[Path], Path], mesh: Mesh, directory: Path, whole: bool, prompt: tuple[str, str] | None = None
) -> dict[str, Any]:
    """What calls give over a mesh and on one device (`whole`: every kind), and how results and parameters lie.

    `prompt` is a golden's family and case; without one a few tokens are read.
    """
    write(directory)
    alone, over = load(directory), load(directory, mesh=mesh)
    ids = {"input_ids": np.arange(3, 15, dtype=np.int32)[None]}
    embedded = ids if prompt is None else golden_prompt(alone, *prompt)
    expected, found = run(alone, embedded, whole), run(over, embedded, whole)
    return {
        "errors": {call: error_of(found[call], expected[call]) for call in expected},
        "cache": {call: lies(value) for call, value in found.items() if call.split()[-1] in over.layout.names},
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


def lies(value: jax.Array) -> dict[str, Any]:
    """Shape of the whole, shape of what one device holds, and how many devices hold some of it."""
    shards = {shard.data.shape for shard in value.addressable_shards}
    assert len(shards) == 1
    return {"shape": value.shape, "shard": shards.pop(), "devices": len(value.addressable_shards)}


LOADED = ("phi3_short", "glm4", "qwen3_moe", "deepseek_v3", "qwen2_5_vl", "qwen3_vl_moe", "kimi_vl", "llava_next")
"""Between them every kind of entry: fused projections and experts, flattened axes, biases, tied and own heads."""


def loads(directory: Path) -> dict[str, Any]:
    """Every kind of checkpoint, in bfloat16, over two devices."""
    facts = {}
    for name in LOADED:
        root = write_checkpoint(name, directory / name)
        facts[name] = loaded(load(root, "bfloat16"), load(root, "bfloat16", mesh=line_of(2)))
    return facts


def collectives(directory: Path) -> list[list[Any]]:
    """What devices exchange in one decode step: kind and numbers in the result, of the compiled program."""
    backbone = load(write_changed(directory, **EIGHT), mesh=line_of(8))
    tokens = backbone.embed(np.array([[3]]))
    assert backbone.mesh is not None
    empty = lambda heads, width: jnp.zeros((backbone.layout.layers, 1, 16, heads, width))
    shardings = cache_shardings(backbone.layout, backbone.mesh)
    channels = backbone.layout.channels
    cache = {each.name: jax.device_put(empty(each.heads, each.width), shardings[each.name]) for each in channels}
    calls = backbone.programs
    program = calls.recompute.lower(calls.state, tokens, cache, None, jnp.array([[12]]), *[None] * 4).compile()
    return exchanged(program.as_text() or "")


def exchanged(text: str) -> list[list[Any]]:
    """Kind and numbers in the result of what devices exchange in a compiled program."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf" = (.*?) ({kinds})(?:-start)?\(", text)
    sizes = lambda shapes: [
        math.prod(map(int, filter(None, shape.split(",")))) for shape in re.findall(r"\[([\d,]*)\]", shapes)
    ]
    return [[kind, sum(sizes(shapes))] for shapes, kind in found]


def experts(directory: Path) -> dict[str, Any]:
    """A mixture over eight devices: tokens that choose by chance, and tokens that all choose experts of one device."""
    config = ExpertConfig(experts=16, chosen=3, intermediate=4, router="sigmoid", renormalise=True)
    mesh = line_of(8)
    rng = np.random.default_rng(0)
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(config, 8, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), state)
    x = jnp.asarray(rng.normal(size=(1, 12, 8)), jnp.float32)
    alone = jax.jit(lambda state, x: nnx.merge(graph, state)(x))

    @jax.jit
    def over(state: Any, x: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return nnx.merge(graph, state)(x)

    whole = lambda leaf: PartitionSpec("tensor" if leaf.ndim == 3 else None)
    lay = lambda leaf: jax.device_put(leaf, NamedSharding(mesh, whole(leaf)))
    facts: dict[str, Any] = {"errors": {}}
    for name, favoured in {"by chance": (), "one device": (6, 7)}.items():
        state["correction"][...] = jnp.zeros(16).at[jnp.array(favoured, int)].set(9.0)
        spread = jax.tree.map(lay, state)
        facts["errors"][name] = error_of(over(spread, x), alone(state, x))
    facts["collectives"] = exchanged(over.lower(spread, x).compile().as_text() or "")
    return facts


def memory(directory: Path) -> dict[str, Any]:
    """Host memory while a model is loaded onto devices that keep copies of their own, as accelerators do."""
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 32}
    write_changed(directory, **{**EIGHT, **sizes})
    read, put, asked = SafetensorsSource.read, jax.device_put, []

    def counted(*given: Any) -> np.ndarray:
        value = read(*given)
        asked.append(value.nbytes)
        return value

    def copied(value: Any, device: Any) -> jax.Array:
        """Copies, as an accelerator does; a CPU takes an aligned host array as it stands, whatever `may_alias` says."""
        lent = put(value, device)
        own = jax.block_until_ready(jnp.copy(lent))
        lent.delete()
        return own

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


def own_mesh(directory: Path, set_too: bool = False) -> dict[str, Any]:
    """A mesh as `jax.make_mesh` makes it (Explicit axes, one for data), set or not, beside one device."""
    write_checkpoint("llama2", directory)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    alone, over = load(directory), load(directory, mesh=mesh)
    ids = np.stack([np.arange(3, 15), np.arange(4, 16)])
    expected = run(alone, {"input_ids": ids}, whole=False)
    with jax.set_mesh(mesh) if set_too else contextlib.nullcontext():
        found = run(over, {"input_ids": ids}, whole=False)
        tokens = over.embed(ids)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        spread = tokens._replace(embeddings=jax.device_put(tokens.embeddings, rows))
        found["rows"], expected["rows"] = over.prefill(spread, logits="all").logits, expected["prefill"]
        found["patched"], expected["patched"] = (patched(each) for each in (over, alone))
    errors = {call: error_of(value, expected[call]) for call, value in found.items()}
    values = [value for value in found.values() if value.ndim == 5]
    return {
        "errors": errors,
        "taken_as_it_is": over.mesh == mesh and all(value.sharding.mesh == mesh for value in values),
        "heads": [value.sharding.spec[3] for value in values],
    }


def hybrid(directory: Path) -> dict[str, Any]:
    """Linear attention over two devices, each with one of two key heads and its value heads."""
    write_checkpoint("qwen3_5", directory)
    alone, over = load(directory), load(directory, mesh=line_of(2))
    ids = {"input_ids": (np.arange(80)[None] * 37 + 11) % 290 + 3}
    results = []
    for backbone in (alone, over):
        tokens = backbone.embed(**ids)
        first, last = tokens.take(0, 77), tokens.take(77, 80)
        out = backbone.prefill(first, logits="all")
        engine = to_engine(backbone.layout, out.kv, first.positions, 0)
        room = ((0, 0), (0, 0), (0, 3), (0, 0), (0, 0))
        cache = {name: value if name in PARTS else jnp.pad(value, room) for name, value in engine.items()}
        logits, cache, _ = backbone.decode(last, cache, np.array([[77, 78, 79]]), logits="all")
        found = {"prefill": out.logits, **_named("prefill", out.kv), "decode": logits, **_named("decode", cache)}
        results.append(found | {"generate": backbone.generate(last, 3, engine)})
    expected, found = results
    return {
        "errors": {call: error_of(found[call], expected[call]) for call in expected},
        "cache": {call: lies(value) for call, value in found.items() if call.split()[-1] in over.layout.names},
        **loaded(alone, over),
    }


def patched(backbone: ModelBackbone) -> jax.Array:
    """Keys of a chunk patched for what stands in front of it."""
    lead, chunk = (make_chunk(backbone, [ids]) for ids in ([3, 4, 5, 6], [7, 8, 9]))
    context = joined(apply_patch(lead))
    behind = backbone.embed(np.array([[7, 8, 9]])).shift(lead.span)
    conditioned = {name: value[:, 0] for name, value in backbone.prefill(behind, context).kv.items()}
    patch = form_patch(chunk, conditioned, rank=2, antecedent=(lead.id,))
    return apply_patch(chunk, patch, lead.span, antecedent=(lead.id,))["k"]


def find(name: str, directory: Path) -> Any:
    """The facts of one name: a case, with "-whole" behind it for every kind of call, or one of the other functions."""
    others = {"loads": loads, "collectives": collectives, "memory": memory}
    others |= {"experts": experts, "hybrid": hybrid}
    others["own_mesh"] = own_mesh
    others["own_mesh_set"] = lambda directory: own_mesh(directory, set_too=True)
    if name in others:
        return others[name](directory)
    case = name.removesuffix("-whole")
    write, make_mesh = CASES[case]
    prompt = ("internvl", "one_image") if case == "image" else None
    return forwards(write, make_mesh(), directory, name.endswith("-whole"), prompt)


def main() -> None:
    """Prints {name: facts}."""
    root, *names = sys.argv[1:]
    # As in the root's conftest.py.
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    warnings.simplefilter("error")
    with jax.default_matmul_precision("highest"):
        print(json.dumps({name: find(name, Path(root) / name) for name in names}))


if __name__ == "__main__":
    main()
