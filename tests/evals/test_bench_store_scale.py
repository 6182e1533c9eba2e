"""Sides of the store's comparison do what is timed, direct filling makes real objects, rows and tables say what was."""

import importlib.util
from pathlib import Path

import pytest

from evals.bench import store, store_fill, store_rivals, store_scale, store_side, store_tables
from evals.bench.store_rivals import OTHERS, StoreSide
from evals.bench.store_workload import BACKBONE
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import Budget, ChunkStore, PatchKey

SIDES = [store_side.OURS, *OTHERS]


def side_of(name: str, folder: Path) -> StoreSide:
    if name == store_side.OURS:
        return store_side.ChunkStoreSide(folder)
    package, make = OTHERS[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    return make(folder)


def holds(side: StoreSide, key: str) -> bool:
    try:
        side.get(key)
    except (InputError, FileNotFoundError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", SIDES)
def test_a_side_puts_lists_evicts_and_deletes(name: str, tmp_path: Path):
    side = side_of(name, tmp_path / "side")
    keys = [f"small{number:03}" for number in range(12)]
    side.fill(keys)
    side.fill_group("group0", 5)
    side.put("another")
    assert side.first_rows() > 0
    assert holds(side, "another")
    assert all(holds(side, key) for key in keys)
    assert not holds(side, "absent")

    assert side.delete_group("group0") > 0
    assert all(holds(side, key) for key in [*keys, "another"])
    with pytest.raises(InputError, match="expected what was put"):
        side.delete_group("group0")

    side.limit()
    late = [f"late{number:03}" for number in range(20)]
    for key in late:
        side.put(key)
    held = [key for key in [*keys, "another", *late] if holds(side, key)]
    assert late[-1] in held
    assert keys[0] not in held
    assert len(held) <= len(keys) + 1
    side.close()
    assert not (tmp_path / "side").exists()


def test_direct_filling_makes_objects_that_the_store_reads(tmp_path: Path):
    root = str(tmp_path)
    store_fill.write_chunks(root, ["one", "two"])
    store_fill.write_group(root, "group", 9)
    with ChunkStore(root, budget=Budget(host=0)) as opened:
        assert opened.get("one", BACKBONE) is not None
        assert opened.get("three", BACKBONE) is None
        assert opened.patch_count("group", BACKBONE) == 9
        assert len(opened.get_patches(PatchKey("group", BACKBONE, ("0",)))) == store_fill.MATCHING
        assert len(opened.get_patches(PatchKey("group", BACKBONE, ("7",)))) == 1
    files = list(tmp_path.glob("obj/**/*.safetensors"))
    assert len(files) == 12
    assert store_fill.stored_bytes(root) == sum(path.stat().st_size for path in files)


def test_putting_and_direct_filling_store_the_same(tmp_path: Path):
    store_fill.write_chunks(str(tmp_path / "direct"), ["one"])
    store_fill.put_chunks(str(tmp_path / "put"), ["one"])
    sizes = [path.stat().st_size for path in tmp_path.glob("*/obj/**/*.safetensors")]
    assert len(sizes) == 2
    assert len(set(sizes)) == 1


def test_sides_that_do_not_fit_together_are_measured_one_after_another(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(store_scale, "TOGETHER", 10)
    monkeypatch.setattr(store_scale, "installed", lambda: (["raw files"], {}))
    options = store_scale.ScaleOptions(tmp_path, 20, "ext4", group=4, repeats=2, quick=True)
    seen: list[tuple[str, int]] = []
    for row in store_scale.rows(options):
        seen.append((row["side"], len(list(tmp_path.iterdir()))))
        assert row["turns"] is False
    assert set(seen) == {("kvpatch_jax", 1), ("raw files", 1)}
    assert not list(tmp_path.iterdir())


def test_what_is_not_installed_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(store_rivals.importlib.util, "find_spec", lambda package: None)
    present, absent = store_rivals.installed()
    assert present == ["raw files", "safetensors"]
    assert set(absent) == {"diskcache", "LMDB"}
    assert "extra `bench`" in absent["LMDB"]


def test_numbers_of_objects_say_where_they_are(tmp_path: Path):
    assert store_scale.count_and_place("1000", tmp_path) == (1000, tmp_path)
    assert store_scale.count_and_place("20@/dev/shm", tmp_path) == (20, Path("/dev/shm"))
    for word in ("many", "0", "-3", "@/dev/shm"):
        with pytest.raises(InputError, match="expected a number such as 1000"):
            store_scale.count_and_place(word, tmp_path)


def test_an_unknown_section_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="expected some of"):
        store.run(out=str(tmp_path), sections=["scales"], quick=True)


def test_percentiles_are_values_that_were_measured():
    values = [float(number) for number in range(1, 201)]
    assert store_scale.percentile(values, 0.99) == 198
    assert store_scale.percentile(values, 0.5) == 100
    assert store_scale.percentile([3.0], 0.99) == 3


def test_the_tail_is_over_the_median_of_plain_puts():
    slow, plain = [[1.0] * 99 + [8.0], [1.0] * 98 + [6.0, 9.0]], [[2.0] * 3, [2.0, 2.0, 4.0]]
    labels = {"objects": 10, "place": "disk"}
    row = store_scale.tail_row("tail", "LMDB", slow, plain, 2.0, labels)
    assert row["value"] == 6.0 / 2  # two of two hundred are longer
    assert (row["low"], row["high"]) == (0.5, 3)
    assert row["passed"] is False


def test_the_table_has_a_column_per_number_and_marks_what_missed():
    def row(count: int, seconds: float, side: str, **more: object) -> dict:
        labels = {"objects": count, "place": "ext4"}
        return store_scale.operation_row(store_scale.LISTED, side, [[seconds] * 10] * 2, **labels, **more)  # pyright: ignore

    rows = [row(1000, 0.004, "kvpatch_jax", at_most=0.05), row(10_000, 0.3, "kvpatch_jax", at_most=0.05)]
    rows.append(row(1000, 2e-5, "LMDB"))
    lines = store_tables.scale_table(rows).splitlines()
    assert lines[0] == "| operation | side | 1,000 ext4 | 10,000 ext4 | bar |"
    assert (
        lines[2] == "| ls, first rows | kvpatch_jax | 4 ms / 4 ms / 4 ms | 300 ms / 300 ms / 300 ms **no** | 0.05 s |"
    )
    assert lines[3] == "| ls, first rows | LMDB | 20 µs / 20 µs / 20 µs |  |  |"
    text = store_tables.format_result({"rows": rows, "config": {"absent": {"diskcache": "not there"}}})
    assert "1 of 2 of these within their bars" in text
    assert "diskcache was left out: not there" in text
