"""Where a kernel wins: what ships, what is chosen, the heuristic without either, and the tuning program on a CPU."""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import KernelError, KernelShapeError, configured_by, targeting, tune
from pallas_kernels._kernel_wins import TIMED, block_of, shape_word, shipped, winner
from pallas_kernels._timing import OverSets, ThroughPool, seconds_of
from pallas_kernels.tpu import prepare as tpu

WORD = "heads=4 width=128 rank=32 bytes=2"


@pytest.fixture
def few_sets(monkeypatch):
    """Programs of three calls: what a table says of them is the same, and they compile in an eighth of the time."""
    monkeypatch.setattr(tune, "SETS", 3)


def test_every_shipped_table_was_timed_on_its_device():
    for kind, table in shipped().items():
        assert table["device"] == kind
        assert table["source"] == TIMED
        for operation in tune.OPERATIONS:
            for row in table["operations"][operation].values():
                assert row["winner"] in ("xla", "gpu", "tpu")
                assert row["seconds"]["xla"] > 0


def _write(path: Path, **table) -> Path:
    path.write_text(json.dumps({"device": "TPU test", "source": TIMED} | table))
    return path


def test_a_shape_is_looked_up_for_the_device_that_is_traced_for(tmp_path: Path):
    word = shape_word(4, 128, 30, 2)
    assert word == WORD
    path = _write(tmp_path / "own.json", operations={"splice": {word: {"winner": "tpu", "tokens": 96}}})
    heuristic = tpu.tile_of(1000, 4, 128, 30, 2)
    with configured_by(path), targeting("tpu", kind="TPU test"):
        assert block_of("splice", 4, 128, 17, 2) == {"tokens": 96}
        assert block_of("splice", 4, 128, 17, 4) is None
        assert tpu.configured("splice", 1000, 4, 128, 30, 2) == tpu.Tile(96)
        assert tpu.configured("rotate_patch", 1000, 4, 128, 30, 2) == heuristic
    with configured_by(path), targeting("tpu"):
        assert tpu.configured("splice", 1000, 4, 128, 30, 2) == heuristic
    assert block_of("splice", 4, 128, 17, 2) is None


def test_a_kernel_that_lost_is_no_winner_though_its_block_is_known(tmp_path: Path):
    rows = {WORD: {"winner": "xla", "tokens": 96}, shape_word(4, 128, 0, 2): {"winner": "tpu"}}
    with configured_by(_write(tmp_path / "own.json", operations={"splice": rows})):
        assert winner("TPU test", "splice", WORD) == "xla"
        assert winner("TPU test", "splice", shape_word(4, 128, 0, 2)) == "tpu"
        assert winner("TPU test", "splice", shape_word(8, 128, 0, 2)) is None
        assert winner("TPU test", "rotate_patch", WORD) is None
        assert winner("TPU other", "splice", WORD) is None
    with configured_by(_write(tmp_path / "own.json", source="timed, quick", operations={"splice": rows})):
        assert winner("TPU test", "splice", WORD) is None


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"operations": []}',
        '{"operations": {"splice": 3}}',
        '{"operations": {"splice": {"w": 64}}}',
        '{"operations": {"splice": {"w": {"tokens": "64"}}}}',
    ],
)
def test_a_file_that_is_no_table_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(KernelShapeError, match=r"own\.json"), configured_by(tmp_path / "own.json"):
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("few_sets")
def test_tuning_on_a_cpu_says_that_nothing_was_tuned(tmp_path: Path, capsys):
    out = tmp_path / "made" / "cpu.json"
    tune.main([f"--out={out}", "--op=splice", "--quick"])
    body = json.loads(out.read_text())
    assert body["device"] == jax.devices()[0].device_kind
    assert body["source"].startswith("nothing tuned: the platform 'cpu'")
    assert set(body["operations"]) == {"splice"}
    for row in body["operations"]["splice"].values():
        assert row["winner"] == "xla"
        assert set(row["seconds"]) == {"xla"}
        assert row["seconds"]["xla"] > 0
    assert "nothing tuned" in capsys.readouterr().out
    with configured_by(out):
        assert winner(body["device"], "splice", shape_word(2, 16, 0, 2)) is None


@pytest.mark.parametrize("operation", tune.OPERATIONS)
def test_a_timed_program_is_handed_its_inputs_and_makes_every_result(operation: str):
    """XLA folds what a program closes over, and leaves out what nobody asks for: such a timing is of nothing."""
    # One layer: a loop over several counts as one turn in the compiler's analysis.
    shape, rank, count = tune.shapes.SMALL[0]._replace(leading=(1,)), 4, 3
    sets = [tune._draw(shape, rank, index, count) for index in range(count)]
    xla = next(tune.candidates(operation, shape, rank, "cpu"))
    size = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    program = tune._program(operation, xla, shape, sets)
    if operation == "rotate_patch":
        assert isinstance(program, OverSets)
        compiled = program.jitted.lower(program.sets).compile()
        found, results = program(), size([one["x"] for one in sets])
        assert [each.shape for each in found] == [one["x"].shape for one in sets]
        assert not bool((found[0] == found[1]).all())
    else:
        assert isinstance(program, ThroughPool)
        pool = tune.make_pool(shape, count)
        compiled, results = program.jitted.lower(pool, program.sets).compile(), pool.nbytes
        flat = program().reshape(*shape.leading, -1, shape.heads, shape.width)
        for one in sets:
            assert not bool((flat[:, one["slots"]] == 1).all())
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes >= size(program.sets)
    assert memory.output_size_in_bytes >= results
    assert compiled.cost_analysis()["flops"] >= 2 * rank * sum(one["x"].size for one in sets)


def test_a_program_is_queued_several_times_and_its_seconds_are_of_one_call():
    runs = []
    taken = seconds_of(lambda: runs.append(0) or jnp.zeros(3), calls=10, repeats=3)
    assert len(taken) == 3
    assert len(runs) == 4 * 5
    assert all(0 < seconds < 0.01 for seconds in taken)


@pytest.mark.usefixtures("few_sets")
@pytest.mark.parametrize("operation", [pytest.param("rotate_patch", marks=pytest.mark.slow), "splice"])
def test_tuning_checks_each_candidate_against_the_xla_path(operation: str, monkeypatch):
    shape, rank = tune.shapes.SMALL[0], 4
    xla = next(tune.candidates(operation, shape, rank, "cpu"))
    same = xla._replace(name="gpu", implementation="gpu")
    wrong = same._replace(call=lambda *given: xla.call(*given) * 1.02)
    assert set(tune.tune_case(operation, shape, rank, "gpu", 1)["seconds"]) == {"xla"}  # no GPU here
    monkeypatch.setattr(tune, "candidates", lambda *given: iter([xla, same]))
    assert set(tune.tune_case(operation, shape, rank, "gpu", 1)["seconds"]) == {"xla", "gpu"}
    monkeypatch.setattr(tune, "candidates", lambda *given: iter([xla, wrong]))
    with pytest.raises(KernelError, match=f"{operation} .* gpu: got a result off by 0.0"):
        tune.tune_case(operation, shape, rank, "gpu", 1)


@pytest.mark.usefixtures("few_sets")
def test_the_fastest_wins_and_its_block_is_kept_even_where_the_xla_path_is_faster(monkeypatch):
    shape, rank = tune.shapes.SMALL[0], 4
    xla = next(tune.candidates("rotate_patch", shape, rank, "cpu"))
    blocks = [xla._replace(name=str(size), implementation="tpu", tokens=size) for size in (64, 128)]
    monkeypatch.setattr(tune, "candidates", lambda *given: iter([xla, *blocks]))
    for seconds, winner_ in (((3.0, 2.0, 1.0), "tpu"), ((0.5, 2.0, 1.0), "xla")):
        left = list(seconds)
        monkeypatch.setattr(tune, "median_seconds", lambda *given, left=left: left.pop(0))
        row = tune.tune_case("rotate_patch", shape, rank, "tpu", 1)
        assert row["winner"] == winner_
        assert row["tokens"] == 128
        assert row["over_xla"] == seconds[0] / 1.0


def test_the_heuristic_fits_its_budget_and_takes_short_chunks_whole():
    assert tpu.tile_of(100, 4, 128, 64, 2).tokens == 100
    long = tpu.tile_of(1 << 20, 32, 128, 256, 2).tokens
    assert long % 32 == 0
    assert long < tpu.tile_of(1 << 20, 4, 128, 256, 2).tokens
    assert jnp.dtype(jnp.bfloat16).itemsize * long * 32 * 128 < tpu.VMEM_BUDGET
