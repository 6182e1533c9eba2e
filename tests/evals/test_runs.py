"""A run's rows are the same whatever killed, shared or resumed it, and pages run as typed and show those rows."""

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evals.harness import config, frame, pages, program, report, runner
from evals.harness.datasets import find_dataset
from evals.harness.frame import Lookup, measured_row
from evals.harness.intervals import Interval
from evals.harness.methods import parse
from evals.harness.pages import filled_pages
from evals.harness.parts import Part, Shard, run_parts, stored_records
from kvpatch_jax.errors import InputError

ROOT = Path(__file__).parents[2]
CONFIG = {"model": "toy", "seed": 3}


def measured(number: int) -> list[dict[str, float]]:
    return [{"line": line, "value": number * 0.1 + line} for line in range(2)]


PARTS = [Part(f"part {number}", functools.partial(measured, number)) for number in range(30)]
EXPECTED = {part.key: list(part.measure()) for part in PARTS}


def written_once(out: Path) -> bool:
    """Whether the files of all shards together have each part once."""
    written = "".join(file.read_text() for file in out.glob("parts*.jsonl"))
    return [written.count(f'"{key}"') for key in EXPECTED] == [1] * len(EXPECTED)


def test_a_file_cut_off_anywhere_by_a_kill_is_completed(tmp_path):
    run_parts(tmp_path, CONFIG, PARTS[:3])
    file = tmp_path / "parts.jsonl"
    content = file.read_bytes()
    for size in range(0, len(content), 17):
        file.write_bytes(content[:size])
        assert len(stored_records(tmp_path, CONFIG)) == max(0, content[:size].count(b"\n") - 1)
        assert run_parts(tmp_path, CONFIG, PARTS, threads=1 + size % 4) == EXPECTED
        assert written_once(tmp_path)


@pytest.mark.parametrize("count", [2, 5])
def test_shards_measure_every_part_once(tmp_path, count):
    for index in range(count):
        records = run_parts(tmp_path, CONFIG, PARTS, Shard(index, count))
    assert {part.key: records[part.key] for part in PARTS} == EXPECTED
    assert written_once(tmp_path)
    # Other shards, or none, measure nothing again.
    fail = [Part(part.key, pytest.fail) for part in PARTS]
    assert run_parts(tmp_path, CONFIG, fail, Shard(0, 3)) == EXPECTED


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"config": {"model": "other", "seed": 3}}\n', r"another .*expected toy"),
        ('{"config": {"model": "toy", "seed": 3, "n": 64}}\n', r"another n"),
        ("not JSON\n", "not a file of parts"),
        ('{"config": {"model": "toy", "seed": 3}}\n[]\n', "not a file of parts"),
    ],
)
def test_a_file_of_another_run_is_refused_and_kept(tmp_path, content, message):
    (tmp_path / "parts.jsonl").write_text(content)
    with pytest.raises(InputError, match=message):
        run_parts(tmp_path, CONFIG, PARTS)
    assert (tmp_path / "parts.jsonl").read_text() == content


class Toy:
    """Parts of numbers: a data set that measures in its own way."""

    name, kinds = "toy", ("sum",)

    def parts(self, run):
        return [
            Part(f"{model} {number}", lambda number=number: [{"value": number}])
            for model in run.models
            for number in range(run.n)
        ]

    def rows(self, records):
        total = sum(line["value"] for lines in records.values() for line in lines)
        return [measured_row("toy", "MODEL", "arm", "sum", Interval(float(total), math.nan, math.nan, len(records)))]


TOY = Toy()
FILE = """
title = "A <b> toy"
models = ["MODEL"]
n = 5
[[data]]
dataset = "tests.evals.test_runs:TOY"
[quick]
n = 2
[report]
sentence = "Sum: {{ value('two', probe='toy', model='MODEL', arm='arm', metric='sum') }}."
[[table]]
title = "sums"
probe = "toy"
metric = "sum"
model = "MODEL"
columns = [{ head = "sum", form = "two" }]
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "toy.toml"
    path.write_text(FILE.replace('["MODEL"]', f'["{tmp_path / "model"}"]'))
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_writes_rows_and_report_once_all_shards_are_there(toy, tmp_path, count):
    read, out = config.read_config(str(toy)), tmp_path / "out"
    finished = [runner.run(read, out, Shard(index, count)) for index in range(count)]
    assert finished[:-1] == [None] * (count - 1)
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert (row["value"], row["n"], row["low"]) == (10.0, 5, None)
    assert finished[-1] is not None
    report.write(read, finished[-1], out)
    text = (out / "report.html").read_text()
    assert "Sum: 10.00." in text
    assert "A &lt;b&gt; toy" in text
    assert "<b> toy" not in text

    # Another model under the same path is another run.
    (tmp_path / "model" / "config.json").write_text('{"other": 1}')
    before = (out / "results.json").read_bytes()
    with pytest.raises(InputError, match="another digests"):
        runner.run(read, out)
    assert (out / "results.json").read_bytes() == before


def test_settings_and_variants_replace_the_file_s(toy):
    assert config.read_config(str(toy), variants=["quick"]).n == 2
    assert config.read_config(str(toy), ["n=9"], ["quick"]).n == 9
    assert config.read_config(str(toy), ["methods=re-prefill,blind"]).methods == ("re-prefill", "blind")


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        (["n=0"], "", "at least 1"),
        (["contexts=4"], "", "expected one of"),
        ([], "sizes = 3\n", "'sizes'"),
        (["models=nowhere"], "", "expected a checkpoint directory"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_runs(toy, tmp_path, settings, text, message):
    toy.write_text(text + toy.read_text())
    with pytest.raises(InputError, match=message):
        runner.run(config.read_config(str(toy), settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shipped_configurations_name_data_sets_and_methods_that_exist():
    for name, variants in itertools.product(config.names(), ([], ["quick"], ["all"])):
        read = config.read_config(name, variants=variants)
        for data in read.data:
            dataset = find_dataset(data.dataset)
            assert set(data.probes) <= set(getattr(dataset, "probes", data.probes))
            # Data sets with parts of their own name ways of serving a window, not methods of one splice.
            for method in () if hasattr(dataset, "parts") else data.methods or read.methods:
                assert parse(method).name == method
    with pytest.raises(InputError, match="not found"):
        find_dataset("evals.harness:NOTHING")


CELLS = [
    ("blind", "chain", Interval(0.0781, 0.05, 0.1, 256)),
    ("blind", "bytes", Interval(0.0, 0.0, 0.0, 1)),
    ("cacheblend.budget=0.15", "chain", Interval(0.93, 0.9, 0.96, 256)),
    ("cacheblend.budget=0.15", "bytes", Interval(0.0151, 0.0151, 0.0151, 1)),
    ("lost", "chain", Interval(math.nan, math.nan, math.nan, 0)),
]
COLUMNS = [
    {"head": "chain", "metric": "chain", "form": "three±"},
    {"head": "bytes", "metric": "bytes", "form": "share"},
]


def test_tables_are_pivots_of_the_rows():
    rows = [measured_row("p", "m", arm, metric, interval) for arm, metric, interval in CELLS]
    lookup, spec = Lookup(frame.without_nan(rows)), {"probe": "p", "model": "m", "corner": "way", "columns": COLUMNS}
    assert pages.markdown(lookup, spec).splitlines() == [
        "| way | chain | bytes |",
        "| --- | --- | --- |",
        "| blind | 0.078 (0.050 to 0.100) | 0 % |",
        "| cacheblend.budget=0.15 | 0.930 (0.900 to 0.960) | 1.5 % |",
    ]
    named = spec | {"lines": ["cacheblend.budget=0.15", ["blind", "blind reuse"]]}
    assert pages.comma_separated(lookup, named).splitlines()[2] == "blind reuse,0.078 (0.050 to 0.100),0 %"
    part = pages.shown(named | {"shown": {"lines": ["blind"], "columns": ["bytes"]}})
    assert pages.markdown(lookup, part).splitlines()[0::2] == ["| way | bytes |", "| blind reuse | 0 % |"]


def test_the_command_of_a_run_names_no_place(monkeypatch: pytest.MonkeyPatch):
    for flags in (["--out=/somewhere", "--shard=0/2"], ["--out", "/somewhere", "--ray", "auto", "--shards=2"]):
        monkeypatch.setattr(sys, "argv", ["run.py", "--config=main", *flags, "--set", "n=64"])
        assert program.repeated_command("evals.run") == "python -m evals.run --config=main --set n=64"


DOCS, README = ROOT / "docs", ROOT / "README.md"


def blocks_of(path: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)


PAGES = [path for path in sorted(DOCS.rglob("*.md")) if blocks_of(path)]
FIRST = {DOCS / "start.md": (DOCS / "example.py").read_text("utf-8")}
"""What a page shows from a file, in front of its blocks."""
HOLDS = {
    "extending": "page_error < 1e-5 and chain['blind'] < chain['lower_half.share=0.5']",
    "hybrids": "np.allclose(together['state'], again['state'], atol=1e-5)",
    "jax-model": "error < 0.05",
    "operators": "kv['k'].shape[1] == len(slots) and repaired.flops > 0",
}
"""What holds at the end of a page that asserts nothing itself."""


@pytest.mark.parametrize("page", [README, pytest.param(DOCS / "start.md", marks=pytest.mark.nightly)])
def test_a_first_block_prints_what_it_says(page: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.chdir(ROOT)
    exec(compile(blocks_of(page)[0], str(page), "exec"), {})
    assert capsys.readouterr().out == blocks_of(page, "text")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path):
    """In a process of its own from a checkout's root, as a user would run it."""
    holds = f"assert {HOLDS[page.stem]}" if page.stem in HOLDS else ""
    program = "\n".join([FIRST.get(page, ""), *blocks_of(page), holds, ""])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options: dict[str, Any] = {"cwd": ROOT, "env": environment | {"TMPDIR": str(tmp_path), "MPLBACKEND": "Agg"}}
    command = [sys.executable, "-W", "error", "-"]
    done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=600, check=False, **options)
    assert done.returncode == 0, done.stderr


def test_tables_of_pages_are_those_of_the_committed_rows():
    pages = filled_pages()
    assert README in pages
    assert [path.name for path, text in pages.items() if path.read_text("utf-8") != text] == []
