"""The window's suite: its arithmetic against other ways of getting the same, and (slow) a run of it."""

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from evals import run, small_task
from evals.harness.frame import Rows
from evals.harness.intervals import Interval
from evals.probes import ResultsTable
from evals.probes.window import QUICK, parts, suite, work_of
from evals.probes.window.common import add
from evals.probes.window.drift import kept_is_exact
from evals.probes.window.image_sequence import AgentLoop, Image, ImageSequence, read_in_one
from evals.probes.window.operations import SLIDE_KINDS, bands, slide_questions, without
from evals.probes.window.probe_images import irrelevant, load_probe_images, with_foreign
from evals.report import documents, window, window_paper
from evals.scene_jobs import planned_ticks
from evals.small_task import KINDS, LEGENDS, VOCABULARY
from evals.small_task.scenes import Answers
from evals.trained import shipped
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import Rope
from kvpatch_jax.errors import InputError
from models import ModelBackbone, load
from tests.evals.made_rows import as_row

LAYOUT = kvp.KVLayout.gqa(layers=2, kv_heads=1, head_dim=4, rope=Rope(1e4, 4))


def image(rng: np.random.Generator, name: str, tokens: int = 3, rows: int = 2) -> Image:
    """An image of random numbers."""
    kv = {channel: jnp.asarray(rng.normal(size=(2, rows, tokens, 1, 4)), jnp.float32) for channel in LAYOUT.names}
    local = np.arange(tokens, dtype=np.int32)
    chunk = kvp.Chunk(kv, local, tokens, tokens, name, LAYOUT, "0" * 64, content=name)
    embeddings = jnp.asarray(rng.normal(size=(rows, tokens, 8)), jnp.float32)
    return Image(Tokens(embeddings, np.tile(local, (rows, 1))), chunk)


@pytest.fixture(scope="module")
def contexts() -> small_task.Contexts:
    return small_task.sample_contexts(np.random.default_rng(3), 6)


def test_an_order_that_is_tested_is_not_in_its_orbit():
    """The sum without one order is the mean over the others, taken one by one in float64."""
    rng = np.random.default_rng(0)
    page = image(rng, "page").chunk
    orders = [image(rng, "x").canonical for _ in range(4)]
    total = None
    for kv in orders:
        total = kvp.accumulate(total, kv, page, ("a", "b"))
    assert total is not None
    for held in range(4):
        left = without(total, orders[held])
        assert left.count == 3
        for name in LAYOUT.names:
            others = [np.asarray(kv[name], np.float64) for number, kv in enumerate(orders) if number != held]
            mean = np.mean(others, axis=0) - np.asarray(page.kv[name], np.float64)
            np.testing.assert_allclose(np.asarray(left.total[name]) / left.count, mean, atol=2e-6)


def test_images_of_others_are_those_of_the_next_contexts():
    own = image(np.random.default_rng(1), "legend", rows=5)
    other = own.of_others(2)
    for row in range(5):
        from_row = (row + 2) % 5
        np.testing.assert_array_equal(other.tokens.embeddings[row], own.tokens.embeddings[from_row])
        np.testing.assert_array_equal(other.chunk.kv["k"][:, row], own.chunk.kv["k"][:, from_row])
    assert other.chunk.id != own.chunk.id
    assert other.chunk.content != own.chunk.content


def test_foreign_legends_mean_what_they_show(contexts: small_task.Contexts):
    which = np.array([False, True, True])
    swapped = with_foreign(contexts, which, 1)
    for row, legend in itertools.product(range(len(contexts)), range(LEGENDS)):
        source = (row + 1) % len(contexts) if which[legend] else row
        for name in ("legend_glyph", "legend_fill", "legend_stripe"):
            np.testing.assert_array_equal(getattr(swapped, name)[row, legend], getattr(contexts, name)[source, legend])
    # The page's pixels are drawn as before, so that it is the same chunk.
    np.testing.assert_array_equal(small_task.render(swapped)[1], small_task.render(contexts)[1])


def test_irrelevant_legends_change_no_answer_about_the_page(contexts: small_task.Contexts):
    made = irrelevant(contexts, np.random.default_rng(5))
    for row in range(len(contexts)):
        page = set(contexts.page_glyph[row].ravel().tolist())
        for legend in range(LEGENDS):
            glyphs = made.legend_glyph[row, legend].tolist()
            assert not page & set(glyphs)
            colours = zip(made.legend_fill[row, legend].tolist(), made.legend_stripe[row, legend].tolist(), strict=True)
            meanings = set(zip(glyphs, colours, strict=True))
            assert len(meanings) == len(set(glyphs))


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_slide_questions_are_sorted_by_who_defines_the_glyph(contexts: small_task.Contexts, gone: int):
    """Checked cell by cell, in plain loops over the legends' rows."""
    questions, kind = slide_questions(contexts, np.random.default_rng(2), gone)
    seen = Counter()
    for row, question in np.argwhere(questions.valid):
        name, sorted_as = KINDS[questions.kind[row, question]], SLIDE_KINDS[kind[row, question]]
        seen[sorted_as] += 1
        if name in ("page", "aggregate"):
            assert sorted_as == name
            continue
        if name == "legend":
            glyph = questions.argument[row, question] - VOCABULARY.glyph
        else:
            glyph = contexts.page_glyph[row, questions.row[row, question], questions.cell[row, question]]
        owners = [which for which in range(LEGENDS) if glyph in contexts.legend_glyph[row, which]]
        assert len(owners) == 1
        left = owners[0] in contexts.order[row, :gone]
        assert not (name == "legend" and left)
        if name == "chain":
            assert sorted_as == ("evicted" if left else "survivor")
    assert seen["evicted"] > 0
    assert (seen["survivor"] > 0) == (gone < LEGENDS)


def test_bands_are_those_of_a_window_that_slides():
    """A window of three, played chunk by chunk: each legend makes room first, the page looks at all that is there."""
    for front in (0, 1):
        count = front + 7
        band, sees = bands(count, front, 3)
        held: list[int] = []
        for number in range(count - 1):
            if number >= front:
                held = held[-2:] if len(held) == 3 else held
            ahead = {*range(min(front, number)), *held, number}
            assert set(np.flatnonzero(band[number])) == ahead
            if number >= front:
                held.append(number)
        assert set(np.flatnonzero(sees)) == {*range(front), *held, count - 1}
        assert (band[-1] == sees).all()


def test_masks_are_bands_of_whole_images():
    rng = np.random.default_rng(4)
    nobody = object.__new__(ModelBackbone)
    line = ImageSequence(nobody, [image(rng, "a", 2), image(rng, "b", 3), image(rng, "c", 1)])
    sees = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], bool)
    mask = line.band(sees)
    assert mask.shape == (2, 1, 6, 6)
    owner = [0, 0, 1, 1, 1, 2]
    for i, j in itertools.product(range(6), repeat=2):
        assert mask[0, 0, i, j] == (j <= i and bool(sees[owner[i], owner[j]]))
    assert line.starts.tolist() == [0, 2, 5]
    assert line.end == 6
    assert line.antecedent(2) == ("a", "b")


def test_a_prefill_behind_kept_legends_is_the_re_prefill_where_nothing_moved():
    """Found image by image: replaced behind what stays, the kept ones stand as they stood; else some do not."""
    rng, nobody = np.random.default_rng(10), object.__new__(ModelBackbone)
    a, b, c, page, x, y, z = (image(rng, name) for name in ("a", "b", "c", "page", "x", "y", "z"))
    before = ImageSequence(nobody, [a, b, c, page])
    exact = lambda *front: kept_is_exact(before, ImageSequence(nobody, [*front, page]))
    assert exact(a, x, y)
    assert exact(x, y, z)
    assert exact(a, b, c, x)
    for front in ((b, c, a), (a, b, b), (a, x, c), (x, a, b, c), (b,)):
        assert not exact(*front)


def test_eta_is_undefined_where_blind_reuse_loses_nothing():
    """A quotient of rounding is no share of damage."""
    rng = np.random.default_rng(11)
    columns = {name: np.zeros((4, 3), int) for name in ("kind", "ask", "argument", "answer", "row", "cell")}
    questions = small_task.Questions(**columns, valid=np.ones((4, 3), bool))
    reference = rng.dirichlet(np.ones(len(VOCABULARY)), (4, 3))
    other = rng.dirichlet(np.ones(len(VOCABULARY)), (4, 3))
    near = lambda share: Answers(np.log((1 - share) * reference + share * other).astype(np.float32))
    for share, defined in ((1e-4, False), (0.5, True)):
        table = ResultsTable("m")
        add(table, "p", "s", questions, np.arange(4), {"re-prefill": near(0), "blind": near(share), "arm": near(0.1)})
        found = [row for row in table.rows() if row["arm"] == "arm.s" and row["metric"].startswith("eta")]
        assert [(math.isfinite(row["value"]), row["n"]) for row in found] == [(defined, 12)]


def test_the_paper_stands_beside_rows_and_differences_are_said():
    """Verdicts and words are computed: within, above and below the paper's range, and across its edge."""
    made = {
        ("window.reorder", "orbit.k=3.lead=0", "eta.chain"): Interval(0.95, 0.9, 0.99, 50),
        ("window.reorder", "orbit.k=4.lead=0", "eta.chain"): Interval(0.5, 0.4, 0.6, 50),
        ("window.slide", "keep.gone=1.lead=1", "kl.aggregate"): Interval(1.0, 0.8, 1.2, 50),
        ("window.drift", "deep.replaced=3.lead=0", "eta.chain"): Interval(0.88, 0.75, 0.95, 50),
        ("window.drift", "stored.replaced=3.lead=0", "eta.chain"): Interval(-3.4, -3.9, -2.9, 50),
        ("window.drift", "stored.distractors=3.lead=0", "flip_recover.chain"): Interval(0.17, 0.1, 0.2, 7),
    }
    rows = [as_row(probe, "small", arm, metric, interval) for (probe, arm, metric), interval in made.items()]
    results = {"config": {"model": "small", "backbone": "small", "kv": {"k": 1, "v": 1}}, "rows": rows}
    found = {each.about: each for each in window_paper.beside_the_paper(results)}
    assert len(found) == 5  # seven flips say nothing
    said = [(each.verdict, each.how) for each in found.values()]
    assert said == [
        ("within", ""),
        ("differs", "0.430 below the paper's"),
        ("differs", "0.985 above the paper's"),
        ("undecided", "0.100 above the paper's, but the interval reaches it"),
        ("undecided", "the value agrees, its interval does not"),
    ]
    # What is quoted is what the paper prints, whatever ours is held against.
    assert [each.paper.split(" (")[0] for each in found.values()] == ["0.920", "0.930", "0.015", "−3.500", "0.900"]
    results["config"]["kv"] = {"ckv": 1}
    assert len(window_paper.beside_the_paper(results)) == 3  # the deep refresh has no figure for latent attention
    assert window.split_arm("orbit.k=3.lead=0") == ("orbit", "k=3", "lead=0")
    assert window.split_arm("stored.reorder.lead=1") == ("stored", "reorder", "lead=1")
    assert window_paper.attention_of(results) == "MLA"
    lines = window.window_lines(results)
    assert any("orbit 0.950" in line for line in lines)
    assert "differs" in lines[-1]
    assert window.window_tables(Rows(results))[0].probe == "reorder"


def test_backbones_stand_side_by_side_in_one_table(tmp_path: Path):
    """A line per figure that any of them has, a column per backbone, cells out of their own rows."""
    results = {}
    for name, value in (("first", 0.5), ("second", 0.75)):
        eta = Interval(value, value - 0.1, value + 0.1, 9)
        row = as_row("window.drift", name, "stored.replaced=1.lead=0", "eta.chain", eta)
        results[name] = {"config": {"backbone": name, "kv": {"ckv": 1}}, "rows": [row]}
    lines = window_paper.write_windows(results, tmp_path).read_text().splitlines()
    assert len(lines) == 3
    assert lines[0] == "| figure | first (MLA) | second (MLA) |"
    assert "| 0.500 | 0.750 |" in lines[2]


def test_a_page_gets_the_table_of_the_models_that_were_run(tmp_path: Path):
    """Between its marks, and again: of every results.json that has the suite; other runs and pages are left alone."""
    page = tmp_path / documents.RESULTS
    page.parent.mkdir(parents=True)
    page.write_text("before\n<!-- windows -->\nold\n<!-- /windows -->\nafter\n")
    for name, suites in (("first", ["window"]), ("second", ["repair"])):
        row = as_row("window.drift", name, "stored.replaced=1.lead=0", "eta.chain", Interval(0.5, 0.4, 0.6, 9))
        config = {"backbone": name, "suite": suites, "kv": {"k": 1}, "window": {"contexts": 12}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps({"config": config, "rows": [row]}))
    for _ in range(2):
        documents.write(tmp_path, tmp_path)
        text = page.read_text()
        assert text.startswith("before\n<!-- windows -->\n\n`python -m evals.run --suite=window`, first: 12 contexts;")
        assert "| figure | first (GQA) |" in text
        assert text.endswith("| 0.500 |\n\n<!-- /windows -->\nafter\n")
        assert "old" not in text
    with pytest.raises(ValueError, match="got no results"):
        documents.write(tmp_path / "none", tmp_path)
    page.write_text("no marks")
    with pytest.raises(ValueError, match="got 0 places"):
        documents.write(tmp_path, tmp_path)


def test_the_default_run_does_not_have_it():
    """It is asked for by name; how much it measures is in the configuration."""
    assert run.WINDOW not in run.SUITES
    config = run.RunConfig(run.MAIN, run.SUITES, 1)
    assert planned_ticks(config, 5) == planned_ticks(dataclasses.replace(config, window=QUICK), 5)
    with_window = dataclasses.replace(config, suite=(run.WINDOW,), window=QUICK)
    assert sum(planned_ticks(with_window, 5).values()) == work_of(QUICK)


def stub_probe(table: ResultsTable, stock: object, rng: np.random.Generator, step: Callable[[str], None]):
    """Adds random answers and the effect of an order."""
    shape = (4, 3)
    columns = {name: rng.integers(0, 5, shape) for name in ("kind", "ask", "argument", "answer", "row", "cell")}
    questions = small_task.Questions(**columns, valid=rng.random(shape) < 0.8)
    clusters = np.arange(4) + 4 * int(rng.integers(0, 9))
    said = lambda: Answers(np.log(rng.dirichlet(np.ones(len(VOCABULARY)), shape)).astype(np.float32))
    arms = {name: said() for name in ("re-prefill", "blind", "orbit", "oracle")}
    add(table, "reorder", "k=3.lead=0", questions, clusters, arms)
    table.sample("window.reorder", "order", "relative_order_effect", rng.random(4), clusters)
    step("stub")


class Watched(Counter):
    """Counts what a run tells of."""

    def __call__(self, name: str, work: int = 1) -> None:
        self[name] += work

    def skip(self, work: int) -> None:
        self["skipped"] += work


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[ResultsTable, Watched]]:
    """Runs the suite with three stubs per batch in place of probes; `fails`: how many come before one that fails."""
    monkeypatch.setattr(suite, "load_probe_images", lambda backbone, *more: backbone)

    def run_suite(folder: Path | None, fails: int | None = None, seed: int = 1) -> tuple[ResultsTable, Watched]:
        left = itertools.count()

        def probe(*arguments: Any, **more: Any) -> None:
            if next(left) == fails:
                raise KeyboardInterrupt
            stub_probe(*arguments, **more)

        plan = lambda sizes, batch: [suite.PlannedProbe(f"{batch}.{n}", probe, 1, n + 1) for n in range(3)]
        monkeypatch.setattr(suite, "planned", plan)
        table, watch = ResultsTable("m"), Watched()
        parts = suite.ProbeParts(folder, {"seed": seed})
        nobody = object.__new__(ModelBackbone)
        sizes = dataclasses.replace(QUICK, contexts=8, batch=4)
        suite.measure_window(table, nobody, sizes, seed, Path("unused"), watch, parts)
        return table, watch

    return run_suite


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(stubbed: Callable[..., tuple[ResultsTable, Watched]], tmp_path: Path):
    """Stopped anywhere, the same command gives the rows of a run in one go, and measures nothing twice."""
    whole, watch = stubbed(None)
    assert watch == {"stub": 12}
    rows = json.dumps(whole.rows())
    assert "window.reorder" in rows
    for fails in (0, 2, 3, 5):
        folder = tmp_path / str(fails)
        with pytest.raises(KeyboardInterrupt):
            stubbed(folder, fails)
        table, watch = stubbed(folder)
        done = sum((number % 3) + 1 for number in range(fails))
        assert (watch["skipped"], watch["stub"]) == (done, 12 - done)
        assert json.dumps(table.rows()) == rows
    again, watch = stubbed(tmp_path / "3")
    assert watch == {"skipped": 12}
    assert json.dumps(again.rows()) == rows
    for name, table in (("one.jsonl", whole), ("other.jsonl", again)):
        table.write_items(tmp_path / name)
    assert (tmp_path / "one.jsonl").read_text() == (tmp_path / "other.jsonl").read_text()


def test_parts_of_another_run_are_refused(stubbed: Callable[..., tuple[ResultsTable, Watched]], tmp_path: Path):
    """Another seed, another version of what is measured, parts and settings that were cut off, a file for a folder."""
    stubbed(tmp_path)
    with pytest.raises(InputError, match=r"seed 1 \(now 2\); expected .* choose another folder"):
        stubbed(tmp_path, seed=2)
    folder = tmp_path / parts.FOLDER
    part, about = folder / "0.1.npz", folder / "config.json"
    for size in (0, 10, part.stat().st_size - 1):
        part.write_bytes(part.read_bytes()[:size])
        with pytest.raises(InputError, match=r"0\.1\.npz, which is not a whole part .*delete it"):
            stubbed(tmp_path)
    part.unlink()
    assert stubbed(tmp_path)[1] == {"skipped": 10, "stub": 2}

    about.write_text(about.read_text().replace('"version": 2', '"version": 0'))
    with pytest.raises(InputError, match=r"version 0 \(now 2\)"):
        stubbed(tmp_path)
    about.write_text(about.read_text()[:9])
    with pytest.raises(InputError, match=r"config\.json, .*delete"):
        stubbed(tmp_path)
    for out in (about, about / "below"):
        with pytest.raises(InputError, match="is or lies below a file"):
            stubbed(out)


# ------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
def test_a_loop_is_the_model_under_the_band(tmp_path: Path):
    """Images prefilled one by one behind a sliding window have the KV of one forward under the mask of what each saw.

    Keys are phase-free, so both may differ by rounding alone, wherever the window stood.
    """
    backbone = load(shipped(run.MAIN), dtype="float32")
    contexts = small_task.sample_contexts(np.random.default_rng(8), 2)
    stock = load_probe_images(backbone, contexts, np.arange(2), 8, tmp_path)
    history = [*[legend.of_others(1) for legend in stock.legends], *stock.legends, stock.page]
    band, sees = bands(len(history), 0, 3)
    together = ImageSequence(backbone, history).prefill(band)

    loop = AgentLoop(backbone, 4 * stock.page.size)
    for number, each in enumerate(history):
        if number == len(history) - 1:
            loop = loop.only(range(len(loop.held) - 3, len(loop.held)))
        elif len(loop.held) >= 3:
            loop = loop.only(range(len(loop.held) - 2, len(loop.held)))
        for name, value in loop.prefill(each).items():
            scale = float(jnp.abs(together[number][name]).max())
            np.testing.assert_allclose(value, together[number][name], atol=2e-5 * scale)
        loop.append(each)
    questions = small_task.ask(contexts, np.random.default_rng(9), {"chain": 3, "page": 2})
    assert read_in_one(ImageSequence(backbone, history), questions, band, sees.tolist()).log_probabilities.shape[
        :2
    ] == (2, 5)


@pytest.mark.slow
def test_a_quick_run_of_the_suite(tmp_path: Path):
    """Every probe writes rows, figures and its part of the report; what must hold by construction holds."""
    sizes = dataclasses.replace(QUICK, contexts=4, batch=4, orders=4, counts=(3, 4))
    results = run.run_backbone(run.RunConfig(run.MAIN, (run.WINDOW,), 77, window=sizes), tmp_path)
    rows = results["rows"]
    assert max(Counter((row["probe"], row["arm"], row["metric"]) for row in rows).values()) == 1
    value = {(row["probe"], row["arm"], row["metric"]): row["value"] for row in rows}
    json.loads((tmp_path / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert {row["probe"] for row in rows} == {
        "window.reorder", "window.slide", "window.slide.remember", "window.recall", "window.recall.remember",
        "window.drift", "window.many",
    }  # fmt: skip

    for (_, arm, metric), got in value.items():
        if arm.startswith("re-prefill."):
            assert metric.split(".")[0] not in ("kl", "flips", "difference") or got == 0
    for gone in (1, 2, 3):
        # What is kept and turned answers as the model that never moved anything.
        assert abs(value["window.slide.remember", f"keep.gone={gone}.lead=0", "kl.aggregate"]) < 1e-5
        oracle, keep = (value["window.slide", f"{arm}.gone={gone}.lead=0", "kl.evicted"] for arm in ("oracle", "keep"))
        assert oracle < keep
    assert value["window.recall", "fresh.turnover=3.lead=0", "kl.chain"] < 0.5
    assert value["window.recall", "stale.turnover=3.lead=0", "kl.chain"] > 1
    drifted = {arm.rpartition(".")[0] for probe, arm, _ in value if probe == "window.drift"}
    assert {"rebuilt.replaced=1", "update.reorder", "oracle.replaced=3", "oracle_update.replaced=2"} <= drifted
    assert not {f"{arm}.replaced={n}" for arm in ("rebuilt", "update") for n in (2, 3)} & drifted
    arms = {arm.split(".")[0] for probe, arm, _ in value if probe == "window.recall.remember"}
    assert "fresh" not in arms, "a patch made of what the reference is made of is called oracle"

    page = (tmp_path / "report.html").read_text()
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert names == set(window.FIGURES)
    assert page.count("data:image/png;base64,") == len(names)
    assert "η of one orbit patch, K = 3" in page
    # Four contexts are fewer than what is shown at least.
    assert "How far an order moves the deficit" not in page
