"""Pages over several devices, beside pages on one: a program, for the number of devices is settled once per process.

`test_split_pages.py` runs it on four. What a row should hold is arranged in NumPy, head by head, as tpu-inference 0.32
arranges it: each head of its key projection repeated, then every device's own, filled up to the packing. Prints what
was found as JSON.
"""

import json
import math
import re
import sys
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvpatch_jax as kvp
from kvpatch_jax.errors import KVPatchError
from kvpatch_jax.pool import page_format
from kvpatch_jax.serving.vllm import ChunkStep, ConnectorConfig, PromptSegment
from kvpatch_jax.serving.vllm.messages import ChunkPayload, LoadCommand, StepCommands, slots_of
from kvpatch_jax.serving.vllm.worker_side import WorkerSide

LAYERS, PAGES, PAGE_SIZE, TOKENS, LENGTH, RANK = 2, 512, 8, 32, 27, 4
SLOTS = np.random.default_rng(0).permutation(PAGES * PAGE_SIZE)[:TOKENS].astype(np.int32)


class SplitPagesCase(NamedTuple):
    """Pages of a model with this many KV heads of a width, over devices; `encoded`: the chunk's KV is in few bits."""

    heads: int
    width: int
    dtype: str
    devices: int
    encoded: bool = False


CASES = {
    "a head on each": SplitPagesCase(2, 128, "float32", 2),
    "two heads repeated, packed": SplitPagesCase(2, 128, "bfloat16", 4),
    "joined, each filled up, encoded": SplitPagesCase(2, 64, "bfloat16", 2, True),
    "two on each, packed": SplitPagesCase(4, 128, "bfloat16", 2),
    "joined, three on each, filled up": SplitPagesCase(6, 64, "bfloat16", 2),
    "joined, repeated and filled up": SplitPagesCase(2, 64, "bfloat16", 4),
}


def format_of(case: SplitPagesCase) -> kvp.pool.PageFormat:
    return kvp.pool.JOINED if case.width == 64 else kvp.pool.RAGGED


def parts_of(case: SplitPagesCase, devices: int) -> list[list[int]]:
    """Numbers of the heads of each device."""
    repeated = [head for head in range(case.heads) for _ in range(max(1, devices // case.heads))]
    share = len(repeated) // devices
    return [repeated[device * share : (device + 1) * share] for device in range(devices)]


def packing_of(case: SplitPagesCase) -> int:
    return 4 // jnp.dtype(case.dtype).itemsize


def row_of(case: SplitPagesCase, devices: int) -> tuple[int, int, int]:
    packing, vectors = packing_of(case), (1 if case.width == 64 else 2) * len(parts_of(case, devices)[0])
    return devices * -(-vectors // packing), packing, 128


def arranged(case: SplitPagesCase, devices: int, rows: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Rows [..., *row] with these keys and values [..., K, 2, H] in their places; padding stays."""
    report = rows.reshape(*rows.shape[:-3], devices, -1, 128).copy()
    for device, heads in enumerate(parts_of(case, devices)):
        for place, head in enumerate(heads):
            if case.width == 64:
                report[..., device, place, :] = np.concatenate([pairs[..., head, 0, :], pairs[..., head, 1, :]], -1)
            else:
                report[..., device, 2 * place : 2 * place + 2, :] = pairs[..., head, :, :]
    return report.reshape(rows.shape)


def taken(case: SplitPagesCase, rows: np.ndarray) -> np.ndarray:
    """Keys and values [..., K, 2, H] of rows on one device."""
    flat = rows.reshape(*rows.shape[:-3], -1, 128)
    if case.width == 64:
        return flat[..., : case.heads, :].reshape(*flat.shape[:-2], case.heads, 2, 64)
    return flat[..., : 2 * case.heads, :].reshape(*flat.shape[:-2], case.heads, 2, 128)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def layout_of(case: SplitPagesCase) -> kvp.KVLayout:
    return kvp.KVLayout.gqa(LAYERS, case.heads, case.width, kvp.Rope(1e4, case.width, angles="float32"))


def chunk_of(case: SplitPagesCase, length: int = LENGTH) -> tuple[kvp.Chunk, kvp.Patch]:
    layout = layout_of(case)
    value = lambda seed, dtype: jnp.asarray(drawn(seed, LAYERS, TOKENS, case.heads, case.width), dtype)
    keys = "float32"  # whatever the pages are: so the connector keeps what it forms
    chunk = kvp.Chunk(
        {"k": value(1, keys), "v": value(2, case.dtype)},
        np.arange(TOKENS, dtype=np.float32),
        TOKENS,
        length,
        "B",
        layout,
        "tiny",
    )
    chunk = kvp.encode_chunk(chunk, "k8v8") if case.encoded else chunk
    return chunk, kvp.form_patch(chunk, {"k": value(3, keys), "v": value(4, case.dtype)}, RANK, ("A",))


def sharding_of(devices: int, *spec: str | None) -> jax.sharding.NamedSharding:
    """As tpu-inference lays its pages: axes `data`, of one device, and `model`."""
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, devices), ("data", "model"), axis_types=types, devices=jax.devices()[:devices])
    return jax.sharding.NamedSharding(mesh, jax.P(*(spec or ("data", None, "model"))))


def placed(pages: np.ndarray, sharding: jax.sharding.NamedSharding) -> list[jax.Array]:
    return [jax.device_put(layer, sharding) for layer in pages]


def host(pages: list[jax.Array]) -> np.ndarray:
    return np.stack([np.asarray(page) for page in pages])


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()


COLLECTIVE = re.compile(r"= (.*?) (?:all-|reduce-scatter|collective-|ragged-all-)[\w-]*\(")


def bytes_of(shapes: str) -> int:
    """Of the arrays that an instruction of HLO gives, as it writes their shapes."""
    arrays = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shapes)
    return sum(int(bits) // 8 * math.prod(int(size) for size in sizes.split(",") if size) for bits, sizes in arrays)


class CallRecorder:
    """Stands for a jitted function: compiles what is called, and notes what the program does with its pages."""

    def __init__(self, jitted):
        self.jitted, self.noted = jitted, []

    def __call__(self, form, pages, *others, **options):
        compiled = self.jitted.lower(form, pages, *others, **options).compile()
        memory = compiled.memory_analysis()
        self.noted.append(
            {
                "pool": sum(page.addressable_data(0).nbytes for page in pages),
                "aliased": memory.alias_size_in_bytes,
                "temporary": memory.temp_size_in_bytes,
                "between_devices": [bytes_of(shapes) for shapes in COLLECTIVE.findall(compiled.as_text())],
            }
        )
        return compiled(pages, *others)


def recorded(name: str, call):
    """What a call gives, and what its program does."""
    jitted = getattr(page_format, name)
    recorder = CallRecorder(jitted)
    setattr(page_format, name, recorder)
    try:
        report = call()
    finally:
        setattr(page_format, name, jitted)
    (noted,) = recorder.noted
    return report, noted


def report_of(case: SplitPagesCase) -> dict:
    """A chunk spliced, keys turned and tokens read, over devices and on one."""
    kind, layout, sharding = format_of(case), layout_of(case), sharding_of(case.devices)
    chunk, patch = chunk_of(case)
    slots, written = np.where(np.arange(TOKENS) < LENGTH, SLOTS, -1), SLOTS[:LENGTH]
    dtype = jnp.dtype(case.dtype)
    alone = drawn(7, LAYERS, PAGES, PAGE_SIZE, *row_of(case, 1)).astype(dtype)
    over = drawn(8, LAYERS, PAGES, PAGE_SIZE, *row_of(case, case.devices)).astype(dtype)
    over = arranged(case, case.devices, over, taken(case, alone))
    flat = lambda pages: pages.reshape(LAYERS, PAGES * PAGE_SIZE, *pages.shape[3:])
    report = {}

    def compare(name: str, result: list[jax.Array], given: list[jax.Array], expected: np.ndarray, noted: dict):
        report[name] = {
            **noted,
            "same": same(flat(host(result)), expected),
            "lies_alike": all(page.sharding == sharding for page in result),
            "donated": all(page.is_deleted() for page in given),
        }

    pages = placed(over, sharding)
    call = lambda pages, slots: kind.splice(pages, slots, kvp.Placed(chunk, patch, 7, ("A",)))
    result, noted = recorded("jitted_splice", lambda: call(pages, slots))
    one = flat(host(call([jnp.asarray(layer) for layer in alone], slots)))
    expected = flat(over).copy()
    empty = np.zeros((LAYERS, LENGTH, *row_of(case, case.devices)), dtype)
    expected[:, written] = arranged(case, case.devices, empty, taken(case, one[:, written]))
    compare("splice", result, pages, expected, noted)

    pages, offset = placed(over, sharding), np.arange(LENGTH) * 3 - 40
    result, noted = recorded("jitted_rotate", lambda: kind.rotate(layout, pages, written, offset))
    one = flat(host(kind.rotate(layout, [jnp.asarray(layer) for layer in alone], written, offset)))
    expected = flat(over).copy()
    expected[:, written] = arranged(case, case.devices, expected[:, written], taken(case, one[:, written]))
    compare("rotate", result, pages, expected, noted)

    pages = placed(over, sharding)
    result, noted = recorded("jitted_read", lambda: kind.read(layout, pages, written))
    pairs = taken(case, flat(alone)[:, written])
    report["read"] = {
        **noted,
        "same": all(same(np.asarray(result[name]), pairs[..., place, :]) for place, name in enumerate("kv")),
        "whole": all(value.sharding.is_fully_replicated for value in result.values()),
        "donated": any(page.is_deleted() for page in pages),
    }
    return report


def whole_latents() -> bool:
    """Latent rows, which every device has whole: as on one."""
    layout = kvp.KVLayout.mla(LAYERS, 32, 16, rope=kvp.Rope(1e4, 16))
    rows = drawn(8, LAYERS, PAGES, PAGE_SIZE, 1, 256).astype(np.float32)
    turned = kvp.pool.LATENT.rotate(layout, placed(rows, sharding_of(2, "data")), SLOTS, 5)
    one = kvp.pool.LATENT.rotate(layout, [jnp.asarray(layer) for layer in rows], SLOTS, 5)
    return same(host(turned), host(one)) and turned[0].sharding == sharding_of(2, "data")


def connected() -> dict[str, bool]:
    """The connector's worker on an engine of two devices: what it writes, and what it gives to be formed."""
    case, blocks = CASES["joined, repeated and filled up"], (3, 9, 5, 2)
    layout, kind, (chunk, _) = layout_of(case), format_of(case), chunk_of(case, TOKENS)
    zeros = np.zeros((LAYERS, PAGES, PAGE_SIZE, *row_of(case, case.devices)), jnp.dtype(case.dtype))
    runner = SimpleNamespace(kv_caches=placed(zeros, sharding_of(case.devices)))
    runner.requests = {"own": SimpleNamespace(mrope_positions=None)}
    worker = WorkerSide(ConnectorConfig.read({"store": "/nowhere", "backbone": "tiny"}), layout, PAGE_SIZE)
    worker.register(runner)
    segment = PromptSegment("B", 0, TOKENS)
    worker.load(
        StepCommands((LoadCommand("own", (ChunkPayload(ChunkStep(segment, "leading", "B"), chunk),), 0, blocks),))
    )
    formed = worker._rows(blocks, segment)

    slots = slots_of(blocks, PAGE_SIZE, 0, TOKENS)
    alone = list(jnp.zeros((LAYERS, PAGES, PAGE_SIZE, *row_of(case, 1)), case.dtype))
    expected = kind.read(layout, kind.splice(alone, slots, kvp.Placed(chunk)), slots)
    return {
        "written": worker.take_failed() == set() and runner.kv_caches[0].sharding == sharding_of(case.devices),
        "same": all(same(np.asarray(formed[name]), np.asarray(expected[name])) for name in "kv"),
        "on_one_device": all(len(value.devices()) == 1 for value in formed.values()),
    }


def refused() -> dict[str, str]:
    """Pages that lie otherwise, and what is said of them."""
    case = CASES["a head on each"]
    layout, kind = layout_of(case), format_of(case)
    pages = np.zeros((LAYERS, PAGES, PAGE_SIZE, *row_of(case, 2)), np.float32)
    three = kvp.KVLayout.gqa(LAYERS, 3, 128, kvp.Rope(1e4, 128))
    explicit = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    calls = {
        "by pages": (layout, placed(pages, sharding_of(2, "model"))),
        "by width": (layout, placed(pages, sharding_of(2, None, None, None, None, "model"))),
        "unlike": (layout, [*placed(pages[:1], sharding_of(2)), *placed(pages[1:], sharding_of(2, None))]),
        "explicit": (layout, placed(pages, jax.sharding.NamedSharding(explicit, jax.P(None, None, "model")))),
        "three heads": (three, placed(np.zeros((LAYERS, PAGES, PAGE_SIZE, 6, 1, 128)), sharding_of(2))),
        "not repeated": (layout, placed(pages, sharding_of(4))),
    }
    messages = {}
    for name, (form, arrays) in calls.items():
        try:
            kind.read(form, arrays, SLOTS)
        except KVPatchError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


if __name__ == "__main__":
    report = {name: report_of(CASES[name]) for name in sys.argv[1:]}
    report = {"cases": report, "latents": whole_latents(), "connected": connected()}
    json.dump({**report, "refused": refused()}, sys.stdout)
