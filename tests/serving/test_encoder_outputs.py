"""Outputs of vision towers pass from engine to engine through a store bit for bit, and whatever fails is a miss."""

import contextlib
import enum
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from serving_hooks import imported

import kvpatch_jax as kvp

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
