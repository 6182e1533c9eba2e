"""KV heads repeated over groups of devices, and towers over devices, each beside one device: a program.

`test_mesh.py` runs it with eight devices on the host, and asserts what it prints as JSON.
"""

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import kvpatch_jax as kvp
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.models.decoder.mesh_axes import COPIES, TENSOR
from kvpatch_jax.models.towers.vit import ViT, ViTConfig
from tests.goldens.load import write_checkpoint
from tests.models.sharding_cases import error_of, exchanged, forwards, lies, line_of, write_changed

ROOT = Path(__file__).parents[2]
FEW = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 320}
"""Changes that make the tiny Qwen3 one of 2 KV heads over eight devices."""
FAMILIES = ("deepseek_vl", "glm4v", "glm4v_moe", "internvl", "kimi_vl", "llava", "llava_next", "mistral3")
FAMILIES += ("pixtral", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Tiny models of every tower, which four devices divide (Gemma 3 has layers of unlike kinds: refused)."""


def of_case(name: str, directory: Path, whole: bool) -> dict[str, Any]:
    """Forwards of a tiny tower over four devices, or of 2 KV heads over eight, whose axes are Explicit."""
    if name == "few":
        return forwards(lambda root: write_changed(root, **FEW), jax.make_mesh((8,), ("tensor",)), directory, whole)
    write = lambda root: write_checkpoint(name, root)
    return forwards(write, line_of(4), directory, whole, (name, "two_images"))


def collectives(directory: Path) -> list[list[Any]]:
    """What devices exchange in one step behind a context in pages, where each KV head has four devices."""
    backbone = load(write_changed(directory, **FEW), mesh=line_of(8))
    pool = kvp.pool.make_pool(backbone.layout, 4, 16, "float32", shardings=backbone.kv_shardings)
    paged = kvp.core.Paged.of(pool, np.arange(32, dtype=np.int32), None)
    one, tokens = jnp.zeros((1, 1), jnp.int32), backbone.embed(np.array([[3]]))
    calls = backbone.programs
    arguments = (calls.state, tokens, pool, paged._replace(pool={}), one, (one, one), None, None, None)
    return exchanged(calls.recompute_in_pages.lower(*arguments).compile().as_text() or "")


def image_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (56, 56, 3)).astype(np.uint8)


def in_session(backbone: ModelBackbone) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Answers of a session that adds, slides and recalls images; its pool, into which a patched chunk is spliced."""
    answers = []
    with kvp.Session(backbone, keep=2) as session:
        first = session.add(image_of(1))
        for number in (2, 3, 4):
            session.add(image_of(number))
            answers.append(list(session.ask([5, 6, 7], steps=4, stop=()).ids))
        session.recall(first)
        answers.append(list(session.ask([5, 6, 8], steps=4, stop=()).ids))

        pools = session.runtime.executor.pools
        placed = patched(backbone)
        engine = kvp.pool.splice(dict(pools.engine), np.arange(64, 64 + placed.chunk.tokens), placed)
        lie = {name: lies(value) for name, value in (engine | {"source": pools.source["k"]}).items()}
        pool = {name: np.asarray(value) for name, value in engine.items()}
    return {"answers": answers, "lies": lie}, pool


def patched(backbone: ModelBackbone) -> kvp.Placed:
    """A chunk of text with a patch for what stands in front of it."""
    lead, chunk = (kvp.make_chunk(backbone, [ids]) for ids in ([33, 34, 55, 36], [47, 48, 49]))
    context = kvp.backbone.joined(kvp.apply_patch(lead))
    behind = backbone.embed(np.array([[47, 48, 49]])).shift(lead.span)
    conditioned = {name: value[:, 0] for name, value in backbone.prefill(behind, context).kv.items()}
    patch = kvp.form_patch(chunk, conditioned, rank=2, antecedent=(lead.id,))
    return kvp.Placed(chunk, patch, lead.span, antecedent=(lead.id,))


def session(directory: Path) -> dict[str, Any]:
    """A session over four devices beside one on one: 2 KV heads, a group of two devices for each."""
    facts, pools = {}, {}
    for name, mesh in {"alone": None, "over": line_of(4)}.items():
        backbone = load(directory, "float32", mesh=mesh)
        facts[name], pools[name] = in_session(backbone)
    return facts | {"errors": {name: error_of(pools["over"][name], pools["alone"][name]) for name in pools["over"]}}


def towers(_: Path) -> dict[str, Any]:
    """A plain tower of three heads and an odd MLP over four devices: its images lie over them, its weights are whole.

    And one of two heads over a mesh of two by two: heads over one axis, images over the other.
    """
    facts = {}
    for name, heads, mesh in (
        ("images", 3, line_of(4)),
        ("both", 2, Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (TENSOR, COPIES))),
    ):
        config = ViTConfig(depth=2, width=12, heads=heads, intermediate=27, image=8, patch=4)
        model = ViT(config, nnx.Rngs(0))
        graph, state = nnx.split(model)
        images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 8, 8)), jnp.float32)
        program = jax.jit(lambda state, images, graph=graph: nnx.merge(graph, state)(images))
        expected = program(state, images)

        def inside(state: Any, images: Any, graph: Any = graph, mesh: Any = mesh) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return nnx.merge(graph, state)(images)

        everywhere = jax.sharding.NamedSharding(mesh, jax.P())
        state, images = jax.device_put((state, images), everywhere)
        compiled = jax.jit(inside).lower(state, images).compile()
        text = compiled.as_text() or ""
        facts[name] = {"error": error_of(compiled(state, images), expected), "shapes": _shapes_of_products(text)}
    return facts


def _shapes_of_products(text: str) -> list[str]:
    """Shapes of the results of the program's matrix products on one device."""
    return sorted({line.split(" = ")[1].split("{")[0] for line in text.splitlines() if " dot(" in line})


def main() -> None:
    """Prints {name: facts}."""
    root, *names = sys.argv[1:]
    gc.freeze()
    warnings.simplefilter("error")
    others = {"collectives": collectives, "towers": towers}
    others["session qwen2_5_vl"] = lambda _: session(ROOT / "evals" / "trained" / "documents" / "qwen2_5_vl")
    others["session qwen3_vl_moe"] = lambda directory: session(write_checkpoint("qwen3_vl_moe", directory))
    with jax.default_matmul_precision("highest"):
        found = {}
        for name in names:
            case, _, whole = name.partition("-")
            find = others.get(name, lambda directory, case=case, whole=bool(whole): of_case(case, directory, whole))
            found[name] = find(Path(root) / name)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
