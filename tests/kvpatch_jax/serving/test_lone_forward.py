"""Prefills of chunks alone on a stand-in of tpu-inference's runner, whose model says what it was given."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false

import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from serving_sides import LAYOUT, PAGE

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.serving.vllm import PromptSegment, lone_forward
from kvpatch_jax.serving.vllm.layouts import page_format
from kvpatch_jax.serving.vllm.lone_forward import LoneChunk, LoneForward, read_chunk

METADATA = "tpu_inference.layers.common.attention_metadata"
WIDTH, LAYERS, SLICE = 3, 2, 8
SECTIONED = kvp.KVLayout.gqa(LAYERS, 1, 64, kvp.Rope(1e4, 64, sections=(8, 12, 12), angles="float32"))


class Runner:
    """What of a runner is used. Its model keeps of each token: what it is, its place, and the sum of those before it.

    The sum is read from the pages, so that it is wrong if a slice does not find the earlier ones.
    """

    max_model_len, is_multimodal_model = 64, True

    def __init__(self, devices=1):
        chosen = np.array([jax.devices()[0]])
        self.mesh = jax.sharding.Mesh(chosen, ("data",)) if devices == 1 else SimpleNamespace(size=devices)
        place = jax.sharding.NamedSharding(jax.sharding.Mesh(chosen, ("data",)), jax.sharding.PartitionSpec())
        pages = np.full((9, PAGE, 1, 1, 128), -1, np.float32)
        self.kv_caches = [jax.device_put(pages, place) for _ in range(LAYERS)]
        self.layer_name_to_kvcache_index = {"layer.0": 0, "layer.1": 1}
        self.state_leaves = ("weights",)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(get_hidden_size=lambda: WIDTH))
        self.calls, self.requests, self.encoder_cache = [], {}, {}

    def embed_input_ids_fn(self, leaves, ids, embeddings, is_multimodal):
        assert leaves == self.state_leaves
        mask, result = np.asarray(is_multimodal), np.repeat(np.asarray(ids, np.float32)[:, None], WIDTH, 1)
        (rows,) = embeddings
        result[mask] = np.asarray(rows)[: mask.sum()]
        return jax.device_put(result)

    def model_fn(self, leaves, pages, ids, metadata, embedded, positions, layers, *more, shared_attention_metadata):
        assert (leaves, layers) == (self.state_leaves, (("layer.0", 0), ("layer.1", 1)))
        assert (more, shared_attention_metadata) == ((None, None, True, True), None)
        assert (ids is None) != (embedded is None)
        own = np.asarray(ids, np.float32) if embedded is None else np.asarray(embedded)[:, 0]
        (begin, end), (length,) = np.asarray(metadata.query_start_loc), np.asarray(metadata.seq_lens)
        assert np.asarray(metadata.request_distribution).tolist() == [0, 0, 1]
        places, tables = np.asarray(positions), np.asarray(metadata.block_tables)
        self.calls.append((int(end), int(length), own.shape[0], embedded is not None))
        done = [np.array(page) for page in pages]
        for page in pages:
            page.delete()  # donated
        for index in range(begin, end):
            slot = length - end + index
            before = sum(done[0][tables[each // PAGE], each % PAGE, 0, 0, 64] for each in range(slot))
            place = places[index] if places.ndim == 1 else places[:, index] @ [1, 100, 10000]
            for layer, page in enumerate(done):
                page[tables[slot // PAGE], slot % PAGE, 0, 0] = [*[place] * 64, own[index] + layer, *[before] * 63]
        place = self.kv_caches[0].sharding
        return [jax.device_put(page, place) for page in done], "hidden", [], None


@pytest.fixture(autouse=True)
def metadata(monkeypatch):
    module = ModuleType(METADATA)
    module.AttentionMetadata = SimpleNamespace
    monkeypatch.setitem(sys.modules, METADATA, module)
    monkeypatch.setattr(lone_forward, "SLICE", SLICE)


def chunk_of(tokens, local=None, embeddings=(), is_embedded=None):
    count = len(tokens)
    return LoneChunk(
        "default",
        "tiny",
        PromptSegment("id", 0, count),
        np.asarray(tokens, np.int32),
        np.arange(count, dtype=np.int32) if local is None else local,
        embeddings,
        np.zeros(count, bool) if is_embedded is None else is_embedded,
    )


def forward_of(runner, layout=LAYOUT, max_bytes=1 << 20):
    return LoneForward(runner, layout, page_format(layout), max_bytes)


def test_a_chunk_is_prefilled_slice_by_slice_on_pages_of_its_own():
    runner, asked, tokens = Runner(), [], list(range(100, 119))
    kv = forward_of(runner).prefill(chunk_of(tokens), lambda count: asked.append(count) or True)
    assert asked == [8, 8, 3]
    assert runner.calls == [(8, 8, SLICE, False), (8, 16, SLICE, False), (3, 19, SLICE, False)], "padded alike"
    assert (np.asarray(kv["k"])[:, :, 0, 0] == np.arange(19)).all()
    assert (np.asarray(kv["v"])[:, :, 0, 0] == [tokens, [token + 1 for token in tokens]]).all()
    assert (np.asarray(kv["v"])[:, :, 0, 1] == np.cumsum(tokens) - tokens).all()
    assert all((np.asarray(page) == -1).all() for page in runner.kv_caches), "the engine's pages are its own"


def test_embeddings_of_images_go_to_their_slices_and_positions_have_three_axes():
    runner = Runner()
    mask = np.zeros(19, bool)
    mask[[2, 3, 6, 7, 8, 9, 17]] = True
    numbers = np.repeat(1000 + np.arange(7, dtype=np.float32)[:, None], WIDTH, 1)
    rows = [jax.device_put(numbers[:6]), jax.device_put(numbers[6:])]
    local = np.stack([np.arange(19), np.arange(19) // 2, np.arange(19) // 3], axis=1).astype(np.int32)
    chunk = chunk_of(list(range(100, 119)), local, tuple(rows), mask)
    kv = forward_of(runner, SECTIONED).prefill(chunk, lambda count: True)
    expected = np.arange(100.0, 119)
    expected[mask] = 1000 + np.arange(7)
    assert (np.asarray(kv["v"])[0, :, 0, 0] == expected).all()
    assert (np.asarray(kv["k"])[0, :, 0, 0] == local @ [1, 100, 10000]).all()
    assert [embedded for *_, embedded in runner.calls] == [True, True, True]

    runner.calls.clear()
    mask[16:] = False
    chunk = chunk_of(list(range(100, 119)), local, (rows[0],), mask)
    forward_of(runner, SECTIONED).prefill(chunk, lambda count: True)
    assert [embedded for *_, embedded in runner.calls] == [True, True, False], "as the engine does it for texts"


def test_a_prefill_ends_where_it_may_not_go_on():
    runner = Runner()
    assert forward_of(runner).prefill(chunk_of(list(range(19))), lambda count: len(runner.calls) < 1) is None
    assert len(runner.calls) == 1


def test_pages_are_bounded_by_bytes_and_by_the_engine():
    runner = Runner()
    page = PAGE * 128 * 4 * LAYERS
    assert (forward_of(runner).capacity, forward_of(runner).nbytes) == (64, 16 * page)
    small = forward_of(runner, max_bytes=3 * page)
    assert (small.capacity, small.nbytes) == (3 * PAGE, 3 * page)
    with pytest.raises(InputError, match="got 13 tokens; expected at most 12"):
        small.prefill(chunk_of(list(range(13))), lambda count: True)
    assert runner.calls == []


def test_programs_of_texts_and_images_are_compiled_before_requests_come():
    runner = Runner()
    forward_of(runner).compile()
    assert runner.calls == [(1, 1, SLICE, False), (1, 1, SLICE, True)]


def test_an_engine_on_several_devices_is_refused():
    with pytest.raises(ConfigError, match="got an engine on 2 devices; expected one"):
        forward_of(Runner(devices=2))


def test_a_chunk_is_read_with_the_tokens_and_images_of_its_request():
    runner = Runner()
    span = lambda offset, length, mask=None: SimpleNamespace(offset=offset, length=length, is_embed=mask)
    features = [
        SimpleNamespace(identifier="before", mm_position=span(1, 2)),
        SimpleNamespace(identifier="whole", mm_position=span(5, 2)),
        SimpleNamespace(identifier="parts", mm_position=span(8, 4, np.array([True, False, True, True]))),
    ]
    runner.requests["asks"] = SimpleNamespace(prompt_token_ids=list(range(50, 70)), mm_features=features)
    runner.encoder_cache = {"whole": np.ones((2, WIDTH), np.float32), "parts": np.full((3, WIDTH), 2, np.float32)}
    runner.encoder_cache = {name: jax.device_put(value) for name, value in runner.encoder_cache.items()}
    segment, local = PromptSegment("id", 4, 13, "images"), np.arange(9)
    chunk = read_chunk(runner, "asks", "default", "tiny", segment, local)
    assert chunk.tokens.tolist() == list(range(54, 63))
    assert np.flatnonzero(chunk.is_embedded).tolist() == [1, 2, 4, 6, 7]
    assert [own.shape for own in chunk.embeddings] == [(2, WIDTH), (3, WIDTH)]

    del runner.encoder_cache["parts"]
    with pytest.raises(InputError, match="got no embeddings of an image"):
        read_chunk(runner, "asks", "default", "tiny", segment, local)
