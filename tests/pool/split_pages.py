"""Checks pages over several devices against pages on one: a program, as a process has one number of devices.

`test_engine_layouts.py` runs it on four. As tpu-inference 0.32 arranges a row, each head is repeated, then every
device's heads are filled up to the packing.
"""

import math
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

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

    @property
    def format(self) -> kvp.pool.PageFormat:
        return kvp.pool.JOINED if self.width == 64 else kvp.pool.RAGGED

    @property
    def packing(self) -> int:
        return 4 // jnp.dtype(self.dtype).itemsize

    def layout(self, heads: int | None = None) -> kvp.KVLayout:
        return kvp.KVLayout.gqa(LAYERS, heads or self.heads, self.width, kvp.Rope(1e4, self.width, angles="float32"))

    def kv(self, seed: int, *sizes: int, keys: str | None = None) -> dict[str, jax.Array]:
        """Random KV [L, *sizes, K, H]; its keys may have another dtype."""
        rng, shape = np.random.default_rng(seed), (LAYERS, *sizes, self.heads, self.width)
        return {name: jnp.asarray(rng.standard_normal(shape), (name == "k" and keys) or self.dtype) for name in "kv"}

    def chunk(self, length: int = LENGTH) -> kvp.Chunk:
        """A chunk with keys in float32, as the connector keeps what it forms."""
        kv, local = self.kv(1, TOKENS, keys="float32"), np.arange(TOKENS, dtype=np.float32)
        chunk = kvp.Chunk(kv, local, TOKENS, length, "B", self.layout(), "tiny")
        return kvp.encode_chunk(chunk, "k8v8") if self.encoded else chunk

    def over_devices(self, kv: Any) -> list[jax.Array]:
        """A pool as pages over devices: on each, its heads lie as they would in pages of their own."""
        heads, parts = np.repeat(np.arange(self.heads), max(1, self.devices // self.heads)), []
        for share in np.split(heads, self.devices):
            pool = {name: value[..., share, :] for name, value in kv.items()}
            parts.append(self.format.to_pages(self.layout(len(share)), pool, self.packing))
        return placed(
            [np.concatenate(layers, axis=2) for layers in zip(*parts, strict=True)], sharding_of(self.devices)
        )


CASES = {
    "a head on each": SplitPagesCase(2, 128, "float32", 2),
    "two heads repeated, packed": SplitPagesCase(2, 128, "bfloat16", 4),
    "joined, each filled up, encoded": SplitPagesCase(2, 64, "bfloat16", 2, True),
    "two on each, packed": SplitPagesCase(4, 128, "bfloat16", 2),
    "joined, three on each, filled up": SplitPagesCase(6, 64, "bfloat16", 2),
    "joined, repeated and filled up": SplitPagesCase(2, 64, "bfloat16", 4),
}


def sharding_of(devices: int, *spec: str | None) -> jax.sharding.NamedSharding:
    """As tpu-inference lays its pages: axes `data`, of one device, and `model`."""
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, devices), ("data", "model"), axis_types=types, devices=jax.devices()[:devices])
    return jax.sharding.NamedSharding(mesh, jax.P(*(spec or ("data", None, "model"))))


def placed(pages: Any, sharding: jax.sharding.NamedSharding) -> list[jax.Array]:
    return [jax.device_put(layer, sharding) for layer in pages]


def same(pages: Sequence[jax.Array], expected: Sequence[jax.Array]) -> bool:
    """Whether pages have the same bits and lie alike."""
    first, second = (np.stack([np.asarray(page) for page in values]) for values in (pages, expected))
    alike = all(page.sharding == other.sharding for page, other in zip(pages, expected, strict=True))
    return alike and first.dtype == second.dtype and first.tobytes() == second.tobytes()


COLLECTIVE = re.compile(r"= (.*?) (?:all-|reduce-scatter|collective-|ragged-all-)[\w-]*\(")


def bytes_between(text: str) -> list[int]:
    """Bytes that each collective of a compiled program gives."""
    arrays = [re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", shapes) for shapes in COLLECTIVE.findall(text)]
    size = lambda bits, sizes: int(bits) // 8 * math.prod(int(number) for number in sizes.split(",") if number)
    return [sum(size(*array) for array in results) for results in arrays]


def recorded(name: str, call: Callable[[], Any]) -> tuple[Any, Any]:
    """What a call gives, and the one program that it runs under this name."""
    jitted, programs = getattr(page_format, name), []

    def run(form, pages, *others, **options):
        programs.append(jitted.lower(form, pages, *others, **options).compile())
        return programs[0](pages, *others)

    setattr(page_format, name, run)
    result = call()
    setattr(page_format, name, jitted)
    return result, programs[0]


def check_case(case: SplitPagesCase) -> None:
    """Chunks are spliced, keys turned and tokens read over devices as on one, without a copy of the pool."""
    layout, kind, chunk = case.layout(), case.format, case.chunk()
    kv, slots = case.kv(7, PAGES, PAGE_SIZE), SLOTS[:LENGTH]
    alone, sharding = kind.to_pages(layout, kv, case.packing), sharding_of(case.devices)
    patch = kvp.form_patch(chunk, case.kv(3, TOKENS, keys="float32"), RANK, ("A",), force=True)
    named = np.where(np.arange(TOKENS) < LENGTH, SLOTS, -1)
    calls = {
        "jitted_splice": lambda pages: kind.splice(pages, named, kvp.Placed(chunk, patch, 7, ("A",))),
        "jitted_rotate": lambda pages: kind.rotate(layout, pages, slots, np.arange(LENGTH) * 3 - 40),
        "jitted_read": lambda pages: kind.read(layout, pages, slots),
    }
    for name, call in calls.items():
        pages = case.over_devices(kv)
        pool = sum(page.addressable_data(0).nbytes for page in pages)
        result, program = recorded(name, lambda call=call, pages=pages: call(pages))
        memory, between = program.memory_analysis(), bytes_between(program.as_text())
        assert memory.temp_size_in_bytes < pool / 8, name
        if name == "jitted_read":
            for channel, value in result.items():
                expected = kv[channel].reshape(LAYERS, -1, case.heads, case.width)[:, slots]
                assert np.asarray(value).tobytes() == np.asarray(expected).tobytes()
                assert value.sharding.is_fully_replicated
            assert not any(page.is_deleted() for page in pages)
            assert between, "else the devices' heads did not meet, or the text was not understood"
            assert max(between) < pool / 16
        else:
            expected = kind.from_pages(layout, call([jnp.array(layer) for layer in alone]))
            assert same(result, case.over_devices(expected)), name
            assert all(page.sharding == sharding for page in result), name
            assert all(page.is_deleted() for page in pages), name
            assert memory.alias_size_in_bytes == pool, name
            assert between == [], name


def check_latents() -> None:
    """Latent rows, which every device has whole, are turned as on one."""
    layout = kvp.KVLayout.mla(LAYERS, 32, 16, rope=kvp.Rope(1e4, 16))
    rows = np.random.default_rng(8).standard_normal((LAYERS, PAGES, PAGE_SIZE, 1, 256)).astype(np.float32)
    turned = kvp.pool.LATENT.rotate(layout, placed(rows, sharding_of(2, "data")), SLOTS, 5)
    alone = kvp.pool.LATENT.rotate(layout, [jnp.asarray(layer) for layer in rows], SLOTS, 5)
    assert same(turned, placed(alone, sharding_of(2, "data")))


def check_connector() -> None:
    """On several devices the connector's worker writes as on one, and reads to one what is to be formed."""
    case, blocks, segment = CASES["joined, repeated and filled up"], (3, 9, 5, 2), PromptSegment("B", 0, TOKENS)
    layout, chunk, empty = case.layout(), case.chunk(TOKENS), case.kv(0, PAGES, PAGE_SIZE)
    request = SimpleNamespace(mrope_positions=None)
    runner = SimpleNamespace(kv_caches=case.over_devices(empty), requests={"request": request})
    worker = WorkerSide(ConnectorConfig.read({"store": "/nowhere", "backbone": "tiny"}), layout, PAGE_SIZE)
    worker.register(runner)
    payload = ChunkPayload(ChunkStep(segment, "leading", "B"), chunk)
    worker.load(StepCommands((LoadCommand("request", (payload,), 0, blocks),)))
    formed = worker._rows(blocks, segment)

    slots = slots_of(blocks, PAGE_SIZE, 0, TOKENS)
    alone = case.format.splice(case.format.to_pages(layout, empty, case.packing), slots, kvp.Placed(chunk))
    assert worker.take_failed() == set()
    assert same(runner.kv_caches, case.over_devices(case.format.from_pages(layout, alone)))
    for name, value in case.format.read(layout, alone, slots).items():
        assert np.asarray(formed[name]).tobytes() == np.asarray(value).tobytes()
        assert len(formed[name].devices()) == 1


def check_refusals() -> None:
    case = CASES["a head on each"]
    layout, pages = case.layout(), np.zeros((LAYERS, PAGES, PAGE_SIZE, 4, 1, 128), np.float32)
    explicit = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    in_types = jax.sharding.NamedSharding(explicit, jax.P(None, None, "model"))
    unlike = [*placed(pages[:1], sharding_of(2)), *placed(pages[1:], sharding_of(2, None))]
    six = placed(np.zeros((LAYERS, PAGES, PAGE_SIZE, 6, 1, 128)), sharding_of(2))
    for form, arrays, *words in (
        (layout, placed(pages, sharding_of(2, "model")), "LayoutError", "[2, 1, 1, 1, 1] parts", "axis 2 alone"),
        (layout, unlike, "ShapeError", "all alike"),
        (layout, placed(pages, in_types), "LayoutError", "Auto axes"),
        (case.layout(3), six, "ShapeError", "over 2 devices", "3 heads shared or repeated evenly"),
    ):
        message = ""
        try:
            case.format.read(form, arrays, SLOTS)
        except KVPatchError as error:
            message = f"{type(error).__name__}: {error}"
        assert all(word in message for word in words), (message, words)


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        check_case(CASES[name])
    check_latents()
    check_connector()
    check_refusals()
