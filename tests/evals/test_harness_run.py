"""Configurations, arms' names, metrics and pages: each against what is computed by hand."""

import json
import math

import pytest

from evals.harness import config, frame, metrics, pages, runner
from evals.harness.datasets import find_dataset
from evals.harness.frame import Lookup, measured_row
from evals.harness.intervals import Interval
from evals.harness.methods import parse
from evals.harness.parts import Part, Shard
from kvpatch_jax.errors import InputError


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
        rows = []
        for model in dict.fromkeys(key.split()[0] for key in records):
            values = [line["value"] for key, lines in records.items() if key.startswith(model) for line in lines]
            rows.append(
                measured_row("toy", model, "arm", "sum", Interval(float(sum(values)), math.nan, math.nan, len(values)))
            )
        return rows


TOY = Toy()
FILE = """
title = "A toy"
models = ["MODEL"]
n = 5
[[data]]
dataset = "tests.evals.test_harness_run:TOY"
[quick]
n = 2
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
    path.write_text(FILE.replace("MODEL", str(tmp_path / "model")))
    return path


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_of_a_run_write_the_same_rows(toy, tmp_path, count):
    read = config.read_config(str(toy))
    finished = [runner.run(read, tmp_path / "out", Shard(index, count)) for index in range(count)]
    assert finished[:-1] == [None] * (count - 1)
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["value"], row["n"], row["low"]) == (10.0, 5, None)


def test_another_model_under_the_same_path_is_refused(toy, tmp_path):
    read = config.read_config(str(toy))
    runner.run(read, tmp_path / "out")
    before = (tmp_path / "out" / "results.json").read_bytes()
    (tmp_path / "model" / "config.json").write_text('{"other": 1}')
    with pytest.raises(InputError, match="another digests"):
        runner.run(read, tmp_path / "out")
    assert (tmp_path / "out" / "results.json").read_bytes() == before


def test_settings_and_variants_replace_what_the_file_says(toy):
    assert config.read_config(str(toy), variants=["quick"]).n == 2
    assert config.read_config(str(toy), ["n=9"], ["quick"]).n == 9
    assert config.read_config(str(toy), ["methods=re-prefill,blind"]).methods == ("re-prefill", "blind")


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        (["n=0"], "", "at least 1"),
        (["contexts=4"], "", "expected one of"),
        (["n"], "", "key=value"),
        ([], "sizes = 3\n", "'sizes'"),
        ([], "n = [\n", "no TOML"),
    ],
)
def test_a_wrong_configuration_is_one_error(toy, settings, text, message):
    toy.write_text(text + toy.read_text())
    with pytest.raises(InputError, match=message):
        config.read_config(str(toy), settings)


def test_unknown_names_are_refused_before_anything_runs(toy, tmp_path):
    with pytest.raises(InputError, match="expected a TOML file, or one of"):
        config.read_config("nowhere")
    with pytest.raises(InputError, match="not found"):
        find_dataset("evals.harness:NOTHING")
    with pytest.raises(InputError, match="expected a checkpoint directory"):
        runner.run(config.read_config(str(toy), ["models=nowhere"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_shipped_configuration_names_what_there_is():
    for name in config.names():
        for variants in ([], ["quick"], ["all"]):
            read = config.read_config(name, variants=variants)
            for data in read.data:
                dataset = find_dataset(data.dataset)
                assert set(data.probes) <= set(getattr(dataset, "probes", data.probes))
                # Data sets with parts of their own name ways of serving a window, not methods of one splice.
                for method in () if hasattr(dataset, "parts") else data.methods or read.methods:
                    assert parse(method).name == method


def test_a_name_says_method_budget_and_settings():
    arm = parse("cacheblend.budget=0.15")
    assert (arm.method, arm.tokens, arm.bytes, dict(arm.settings)) == ("cacheblend", 0.15, None, {})
    arm = parse("quantised.bits=3.axes=token")
    assert (arm.tokens, dict(arm.settings)) == (None, {"bits": 3, "axes": "token"})  # the method's own default
    assert parse("low_rank.bytes=0.05").bytes == 0.05
    for wrong in ("nothing", "blind.rank", "cacheblend.budget="):
        with pytest.raises(InputError, match="method"):
            parse(wrong)


def records():
    """Two batches of two contexts with two questions each; what blind reuse flips, the arm brings back but once."""
    asked = {"kind": [0, 1, 0, 1], "answer": [5, 6, 7, 8]}
    batches = []
    for first in (0, 2):
        cluster = [first, first, first + 1, first + 1]
        batches += [
            {"arm": "re-prefill", "predicted": [5, 6, 7, 0], "kl": [0.0] * 4, "cluster": cluster, **asked},
            {"arm": "blind", "predicted": [1, 6, 1, 0], "kl": [2.0, 0.0, 2.0, 0.0], "costs": {"stored_bytes": 0.0}},
            {"arm": "arm", "predicted": [5, 6, 1 if first else 7, 0], "kl": [0.5, 0.0, 3.0 if first else 0.5, 0.0]},
        ]
    batches.append({"arm": "half", "predicted": [5, 6, 7, 8], "kl": [0.0] * 4})
    return batches


def test_metrics_are_those_counted_by_hand():
    probe = metrics.ProbeRecords(records(), ("chain", "page"))
    chain = probe.metrics("arm", "chain")
    assert chain["accuracy"].value == 0.75
    assert chain["difference"].value == -0.25
    assert chain["kl"].value == pytest.approx(4.5 / 4)
    assert chain["eta"].value == pytest.approx(1 - 4.5 / 8)
    assert (chain["flip_recover"].value, chain["flip_recover"].n) == (0.75, 4)
    assert (chain["worse"].value, chain["worse"].n) == (0.25, 4)
    # Blind reuse loses nothing of the page's questions: there is no share of it to bring back.
    assert math.isnan(probe.metrics("arm", "page")["eta"].value)
    rows = list(probe.rows("documents.4", "m", ("accuracy",)))
    assert {row["arm"] for row in rows} == {"re-prefill", "blind", "arm"}, "an arm of one batch alone has no rows"
    assert [row["metric"] for row in rows if row["arm"] == "blind"] == [
        "accuracy.chain",
        "accuracy.page",
        "stored_bytes",
    ]


def test_means_over_seeds_need_every_seed():
    def rows(model, value):
        return [measured_row("p", model, "a", "accuracy.chain", Interval(value, 0.0, 1.0, 9))]

    (mean,) = metrics.mean_rows([*rows("a", 0.5), *rows("b", 0.9), *rows("control", 0.1)], ["a", "b"])
    assert (mean["value"], mean["low"], mean["high"], mean["n"]) == (pytest.approx(0.7), 0.5, 0.9, 2)
    assert metrics.mean_rows(rows("a", 0.5), ["a", "b"]) == []


def table_rows():
    rows = [
        measured_row("p", "m", "blind", "accuracy.chain", Interval(0.0781, 0.05, 0.1, 256)),
        measured_row("p", "m", "blind", "stored_bytes", Interval(0.0, 0.0, 0.0, 1)),
        measured_row("p", "m", "cacheblend.budget=0.15", "accuracy.chain", Interval(0.93, 0.9, 0.96, 256)),
        measured_row("p", "m", "cacheblend.budget=0.15", "stored_bytes", Interval(0.0151, 0.0151, 0.0151, 1)),
        measured_row("p", "m", "lost", "accuracy.chain", Interval(math.nan, math.nan, math.nan, 0)),
    ]
    return frame.without_nan(rows)


SPEC = {
    "probe": "p",
    "model": "m",
    "corner": "way",
    "columns": [
        {"head": "chain", "metric": "accuracy.chain", "form": "three±"},
        {"head": "bytes", "metric": "stored_bytes", "form": "share"},
    ],
}


def test_a_pivot_makes_a_page_s_table():
    assert pages.markdown(Lookup(table_rows()), SPEC).splitlines() == [
        "| way | chain | bytes |",
        "| --- | --- | --- |",
        "| blind | 0.078 (0.050 to 0.100) | 0 % |",
        "| cacheblend.budget=0.15 | 0.930 (0.900 to 0.960) | 1.5 % |",
    ]


def test_a_page_shows_part_of_a_table_whose_whole_is_csv():
    lookup, table = Lookup(table_rows()), SPEC | {"lines": ["cacheblend.budget=0.15", ["blind", "blind reuse"]]}
    assert pages.comma_separated(lookup, table).splitlines() == [
        "way,chain,bytes",
        "cacheblend.budget=0.15,0.930 (0.900 to 0.960),1.5 %",
        "blind reuse,0.078 (0.050 to 0.100),0 %",
    ]
    part = pages.shown(table | {"shown": {"lines": ["blind"], "columns": ["bytes"]}})
    assert pages.markdown(lookup, part).splitlines() == ["| way | bytes |", "| --- | --- |", "| blind reuse | 0 % |"]
    assert pages.markdown(lookup, pages.shown(table)) == pages.markdown(lookup, table)


def test_a_report_shows_sentence_table_and_nothing_unescaped(tmp_path):
    results = {"config": {"title": "<b>", "name": "x", "command": "c"}, "environment": {}, "rows": table_rows()}
    sentence = "Blind: {{ value('two', probe='p', model='m', arm='blind', metric='accuracy.chain') }}."
    text = pages.write_report(results, {"sentence": sentence}, [SPEC], tmp_path).read_text()
    assert "Blind: 0.08." in text
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "0.930 (0.900 to 0.960)" in text


def test_a_block_of_a_page_is_replaced_and_nothing_else():
    page = "a\n<!-- run -->\nold\n<!-- /run -->\nb <!-- other -->\n"
    assert pages.fill(page, "run", "new \\1") == "a\n<!-- run -->\n\nnew \\1\n\n<!-- /run -->\nb <!-- other -->\n"
    with pytest.raises(ValueError, match="no block"):
        pages.fill(page, "other", "")
