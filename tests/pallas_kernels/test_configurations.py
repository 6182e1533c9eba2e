"""Block sizes: what ships, what is chosen, the heuristic without either, and the tuning program on a CPU."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import KernelError, KernelShapeError, configured_by, targeting, tune
from pallas_kernels._configurations import block_of, file_name, shape_word
from pallas_kernels.rotate_patch import tpu

SHIPPED = sorted((Path(pallas_kernels.__file__).parent / "configurations").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_say_where_they_come_from(path: Path):
    body = json.loads(path.read_text())
    assert path.name == file_name(body["device"])
    assert set(body["operations"]) == set(tune.OPERATIONS)
    if body["source"] == tune.UNTIMED:
        assert body == tune.heuristic_configuration(body["device"])
    else:
        assert body["source"] == "timed"
        assert body["seconds"]


def test_a_shape_is_looked_up_for_the_device_that_is_traced_for(tmp_path: Path):
    word = shape_word(4, 128, 30, 2)
    assert word == "heads=4 width=128 rank=32 bytes=2"
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"device": "TPU test", "operations": {"splice": {word: {"tokens": 96}}}}))
    heuristic = tpu.tile_of(1000, 4, 128, 30, 2)
    with configured_by(path), targeting("tpu", kind="TPU test"):
        assert block_of("splice", 4, 128, 17, 2) == {"tokens": 96}
        assert block_of("splice", 4, 128, 17, 4) is None
        assert tpu.configured("splice", 1000, 4, 128, 30, 2) == tpu.Tile(96)
        assert tpu.configured("rotate_patch", 1000, 4, 128, 30, 2) == heuristic
    with configured_by(path), targeting("tpu"):
        assert tpu.configured("splice", 1000, 4, 128, 30, 2) == heuristic
    assert block_of("splice", 4, 128, 17, 2) is None
    path.write_text("[]")
    with pytest.raises(KernelShapeError, match=r"own\.json"), configured_by(path):
        pass


def test_tuning_on_a_cpu_says_that_nothing_was_tuned(tmp_path: Path, capsys):
    out = tmp_path / "made" / "cpu.json"
    tune.main([f"--out={out}", "--op=splice", "--quick"])
    body = json.loads(out.read_text())
    assert body["device"] == jax.devices()[0].device_kind
    assert body["operations"] == {"splice": {}}
    assert body["source"].startswith("nothing tuned: the platform 'cpu'")
    assert all(set(timed) == {"xla"} and timed["xla"] > 0 for timed in body["seconds"]["splice"].values())
    assert "nothing tuned" in capsys.readouterr().out


def test_tuning_checks_each_candidate_against_the_xla_path(monkeypatch):
    shape, rank = tune.shapes.SMALL[0], 4
    for operation in tune.OPERATIONS:
        calls = tune._calls
        xla = lambda *given, calls=calls: dict(calls(*given))["xla"]
        both = lambda *given, xla=xla: [("xla", xla(*given)), ("gpu", xla(*given))]
        monkeypatch.setattr(tune, "_calls", both)
        assert set(tune._candidates(operation, shape, rank, "gpu", 1)) == {"xla", "gpu"}
        wrong = lambda *given, xla=xla: [("xla", xla(*given)), ("gpu", lambda: xla(*given)() * 1.02)]
        monkeypatch.setattr(tune, "_calls", wrong)
        with pytest.raises(KernelError, match=f"{operation} .* gpu: off by 0.0"):
            tune._candidates(operation, shape, rank, "gpu", 1)
        monkeypatch.setattr(tune, "_calls", calls)
        assert set(tune._candidates(operation, shape, rank, "gpu", 1)) == {"xla"}  # no GPU here


def test_the_heuristic_fits_its_budget_and_takes_short_chunks_whole():
    assert tpu.tile_of(100, 4, 128, 64, 2).tokens == 100
    long = tpu.tile_of(1 << 20, 32, 128, 256, 2).tokens
    assert long % 32 == 0
    assert long < tpu.tile_of(1 << 20, 4, 128, 256, 2).tokens
    assert jnp.dtype(jnp.bfloat16).itemsize * long * 32 * 128 < tpu.VMEM_BUDGET
