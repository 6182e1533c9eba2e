"""Certificates as they are made: bounds and coverage against other ways of getting them, and (slow) a whole run."""

import collections
import dataclasses
import itertools
import json
import logging
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from evals.certify import (
    certification,
    journal,
    own_images,
    packed_questions,
    pages,
    plans,
    scores,
    serving_modes,
    time_estimate,
    window_sources,
)
from evals.certify.certification_run import CertificationRun, batch_name
from evals.certify.window_sizes import CertifiedSizes
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import CertificateError, InputError
from kvpatch_jax.plan import Certificate
from models import Buckets, load

# --------------------------------------------------------------------------------------------------------- bounds


def brute_force_bound(values: np.ndarray, cluster: np.ndarray, level: float) -> float:
    """The least value below which the weights of answers, and of a window to come at infinity, reach the level."""
    names = sorted(set(cluster.tolist()))
    for bound in sorted(values.tolist()):
        reached = 0.0
        for name in names:
            own = values[cluster == name]
            reached += (own <= bound).sum() / len(own) / (len(names) + 1)
        if reached >= level - 1e-12:
            return bound
    return math.inf


def test_bounds_are_the_hierarchical_quantile():
    rng = np.random.default_rng(0)
    for _ in range(60):
        cluster = rng.integers(0, 12, 60)
        values = rng.choice(20, 60) / 7  # with ties
        level = rng.uniform(0.5, 0.9)
        assert scores.conformal_bound(values, cluster, level) == brute_force_bound(values, cluster, level)


def test_a_bound_covers_new_windows_at_its_level():
    """Windows differ far more than answers behind one of them: the coverage of a random answer, over many draws."""
    rng, level, within = np.random.default_rng(1), 0.9, []
    for _ in range(800):
        easy = rng.exponential(size=31) ** 2
        values = easy[:, None] * rng.uniform(0.8, 1.2, (31, 6))
        bound = scores.conformal_bound(values[:30].ravel(), np.repeat(np.arange(30), 6), level)
        within.append((values[30] <= bound).mean())
    assert np.mean(within) > level - 3 * np.std(within) / math.sqrt(len(within))
    assert np.mean(within) < level + 0.06


def test_too_few_windows_for_a_level_are_refused():
    assert [scores.least_windows(level) for level in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    values = np.arange(19.0)
    assert scores.conformal_bound(values, np.arange(19), 0.95) == 18.0
    with pytest.raises(InputError, match=r"18 calibration windows for level 0\.95; expected 19 or more"):
        scores.conformal_bound(values[:18], np.arange(18), 0.95)
    with pytest.raises(InputError, match="1 calibration windows"):  # many answers behind one window are one window
        scores.conformal_bound(values, np.zeros(19, int), 0.95)


def test_coverage_counts_windows_alike_with_wilsons_interval():
    every = scores.covered(np.ones(40, bool), np.repeat(np.arange(8), 5))
    assert every.value == 1.0
    assert every.low == pytest.approx(8 / (8 + 1.959964**2), abs=1e-6)  # Wilson's, of eight windows and not 40 answers
    assert every.high == 1.0
    none = scores.covered(np.zeros(40, bool), np.repeat(np.arange(8), 5))
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - every.low)
    # A window with one answer counts as much as one with nine.
    uneven = scores.covered(np.arange(10) < 9, np.array([0] * 9 + [1]))
    assert uneven.value == 0.5


def test_bounds_are_rounded_up():
    for value in (0.123456789, 1e-9, 3.0, 0.9999999, 1.23456e-5):
        assert value <= scores.rounded_up(value) <= value * (1 + 2e-5)


# ----------------------------------------------------------------------------------------------------------- rows


def said(kl: dict[tuple[str, int], float], held_out: float = 1.0) -> scores.Scores:
    """Answers of 24 windows, four each, half of them held out, whose KL is about as given (times `held_out` there)."""
    rng = np.random.default_rng(2)
    cluster, side = np.repeat(np.arange(24), 4), np.repeat(np.arange(24) >= 12, 4)
    found = scores.Scores()
    for promise in ("forget", "remember"):
        for (point, rank), mean in kl.items():
            for behind in (0, 3):
                values = mean * rng.uniform(0.9, 1.1, 96) * np.where(side, held_out, 1.0)
                found.kl[point, rank, behind, promise] = [values]
                found.flips[point, rank, behind, promise] = [(values > 1.0).astype(float)]
    found.cluster, found.held_out = [cluster], [side]
    return found


def test_bounds_depend_on_calibration_windows_alone():
    found = {row.key: row for row in scores.rows_of([said({("bare", 0): 2.0, ("stored", 8): 0.1})], 0.9)}
    assert len(found) == 8
    row = found["stored", 8, 3, "forget"]
    assert 0.1 < row.kl_bound <= 0.1101
    assert row.kl_low <= row.kl <= row.kl_high
    assert row.coverage > 0.8
    assert row.coverage_low < row.coverage <= row.coverage_high
    assert row.eta == pytest.approx(0.95, abs=0.01)
    assert (row.flips, row.answers) == (0.0, 96)
    assert found["bare", 0, 0, "forget"].flips == 1.0
    # Bounds do not move with what is held out, coverage does.
    worse = {row.key: row for row in scores.rows_of([said({("bare", 0): 2.0, ("stored", 8): 0.1}, 1.5)], 0.9)}
    assert worse["stored", 8, 3, "forget"].kl_bound == row.kl_bound
    assert worse["stored", 8, 3, "forget"].coverage == 0.0


def test_answers_that_are_not_finite_are_not_certified():
    found = said({("bare", 0): 2.0, ("stored", 8): 0.1})
    found.kl["stored", 8, 0, "forget"][0][3] = math.nan
    with pytest.raises(CertificateError, match="kl"):
        scores.rows_of([found], 0.9)


@pytest.mark.parametrize(
    ("kl", "goal", "rank", "why"),
    [
        ({0: 2.0, 4: 1.0, 8: 0.15, 16: 0.05}, None, 8, "removes at least"),
        ({0: 2.0, 4: 1.0, 8: 0.15, 16: 0.05}, 0.1, 16, "loses at most"),
        ({0: 2.0, 4: 1.0, 8: 0.9, 16: 0.8}, None, 16, "not enough"),
        ({0: 2.0, 4: 1.0, 8: 0.15, 16: 0.05}, 1e-6, 16, "not enough"),
        ({0: 1e-4, 4: 1e-5, 8: 1e-6, 16: 1e-6}, None, 4, "hardly any patch"),
    ],
)
def test_the_recommended_rank_is_the_smallest_sufficient_one(kl, goal, rank, why):
    found = said({("bare" if own == 0 else "stored", own): mean for own, mean in kl.items()})
    recommended = scores.recommend([found], goal, 0.9)
    assert recommended.rank == rank
    assert why in recommended.reason
    # What is held out has no say.
    other = said({("bare" if own == 0 else "stored", own): mean for own, mean in kl.items()}, 50.0)
    assert scores.recommend([other], goal, 0.9) == recommended


def test_a_table_has_a_line_for_every_row():
    made = shipped_certificate()
    text = certification.table(made)
    assert len(text.splitlines()) == 1 + len(made.rows) + len(made.plans)
    assert "repair" in text


# -------------------------------------------------------------------------------------------- runs that are killed


def test_scores_are_restored_bit_by_bit():
    before = said({("bare", 0): 2.0, ("stored", 8): 1e-7})
    before.kl["bare", 0, 0, "forget"][0][:2] = [math.inf, -5e-324]
    after = scores.Scores.from_json(json.loads(json.dumps(before.to_json())))
    assert set(after.kl) == set(before.kl)
    for table, other in ((before.kl, after.kl), (before.flips, after.flips)):
        for key, values in table.items():
            assert [part.tobytes() for part in values] == [part.tobytes() for part in other[key]]
    assert np.array_equal(after.sides, before.sides)
    assert [part.dtype for part in after.sides] == [int, bool]


def test_measured_batches_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both batches are in the journal: nothing is loaded, and the scores are those of one run."""
    source, asked = window_sources.DrawnImageSource.of(CertifiedSizes((4,), (4,), 2), 7), {"model": "a", "ranks": [8]}
    file, own = tmp_path / "certificate.json.parts", [said({("bare", 0): each}) for each in (2.0, 3.0)]
    first = journal.Journal(file, asked)
    for number, found in enumerate(own):
        assert batch_name(number) not in first
        first.add(
            batch_name(number),
            scores=found.to_json(),
            asked="some",
            tokens=10 + number,
            spans=[3 - number, 5],
        )
    with file.open("a") as lines:
        lines.write('{"part": "windows 2", "sco')  # killed while it wrote
    again = journal.Journal(file, asked)
    assert "windows 2" not in again
    monkeypatch.setattr(window_sources.DrawnImageSource, "load", lambda *_: pytest.fail("a batch is loaded again"))
    backbone = load(shipped(MAIN), dtype="float32")
    run = CertificationRun(backbone, source, tmp_path, (8,), again, pytest.fail)
    found, what, tokens, spans = certification.measure(run)
    assert (what, tokens, spans) == ("some", 11, (2, 5))
    kl = found[4].of(("bare", 0, 3, "forget"))[0]
    assert kl.tobytes() == b"".join(each.kl["bare", 0, 3, "forget"][0].tobytes() for each in own)

    with pytest.raises(InputError, match=r"holds parts of another ranks; expected a's"):
        journal.Journal(file, {**asked, "ranks": [8, 16]})
    again.delete()
    assert not file.exists()


def test_the_estimate_has_a_step_for_each_remaining_measurement(tmp_path: Path):
    """A step for every way of every batch and for every batch of plans; what was measured is not among them."""
    backbone, source = load(shipped(MAIN), dtype="float32"), window_sources.DrawnImageSource.of(CertifiedSizes(), 7)
    kept = journal.Journal()
    run = CertificationRun(backbone, source, tmp_path, journal=kept)
    modes, pace = run.modes.number(4), time_estimate.Pace.assumed()
    ahead = [*time_estimate.expected_steps(run, pace)]
    assert len(ahead) == 2 * modes + 1
    kept.add(batch_name(0), scores={})
    later = [*time_estimate.expected_steps(run, pace)]
    assert len(later) == len(ahead) - modes
    compiling = time_estimate.COMPILED * pace.compilation
    assert sum(later) == pytest.approx(sum(ahead) - sum(ahead[:modes]) + compiling)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_certificate(tmp_path: Path):
    """Killed once in the middle of the windows and once among the plans; each batch was measured by one run alone."""
    command = [sys.executable, "-m", "evals.certify", f"--model={MAIN}", "--dtype=float32", "--n=6", "--batch=2"]
    command += ["--level=0.5", "--ranks=8,16,64"]
    run = lambda out: subprocess.run(
        [*command, f"--out={out}"], capture_output=True, text=True, timeout=900, check=True
    )
    run(tmp_path / "whole.json")
    out, parts = tmp_path / "killed.json", tmp_path / "killed.json.parts"
    lines = lambda: parts.read_text().splitlines() if parts.exists() else []
    for wanted in (3, 6):  # a line of what they are parts of; four batches, of which two are held out and planned for
        with subprocess.Popen(
            [*command, f"--out={out}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as run_on:
            while len(lines()) < wanted:
                assert run_on.poll() is None
                time.sleep(0.01)
            run_on.kill()
        assert not out.exists()
    done = run(out)
    assert "4 of 4 batches were measured by an earlier run" in done.stdout
    assert not parts.exists()
    made, expected = (Certificate.read(path, backbone=None) for path in (out, tmp_path / "whole.json"))
    assert made == dataclasses.replace(expected, made=made.made)


# ----------------------------------------------------------------------------------------------- what is asked


def test_packed_questions_do_not_see_each_other():
    parts = [(np.full((2, 3), 7), [1, 2]), (np.full((2, 2), 8), [1])]
    asked = packed_questions.packed(parts, 3, "two answers")
    assert asked.tail.ids.tolist() == [[7, 7, 7, 8, 8]] * 2
    assert asked.tail.positions[0, :, 2].tolist() == [0, 1, 2, 0, 1]
    assert asked.behind(100).positions[1, :, 0].tolist() == [100, 101, 102, 100, 101]
    assert asked.tail.among.sum(axis=1).tolist() == [1, 2, 3, 1, 2]
    assert asked.tail.asked.tolist() == [[1, 2, 4]] * 2
    values = np.array([[1.0, 3.0, 5.0], [0.0, 2.0, 9.0]])
    assert asked.scored(values).tolist() == [[2.0, 5.0], [1.0, 9.0]]


def test_windows_share_images_only_if_there_are_too_few():
    rng = np.random.default_rng(0)
    dealt, apart = own_images.deal(np.arange(40), 5, 8, rng)
    assert apart
    assert len(set(dealt.ravel().tolist())) == 40
    dealt, apart = own_images.deal(np.arange(10, 20), 5, 8, rng)
    assert not apart
    assert all(len(set(row)) == 8 and set(row) <= set(range(10, 20)) for row in dealt.tolist())
    dealt, apart = own_images.deal(np.arange(5), 3, 5, rng)
    assert not apart
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in dealt.tolist())


def test_drawn_pages_are_all_different_and_of_four_sizes(tmp_path: Path):
    from PIL import Image

    images = sorted(pages.draw(tmp_path, 8, 5).iterdir())
    assert len({path.read_bytes() for path in images}) == 8
    sizes = collections.Counter[tuple[int, int]]()
    for path in images:
        with Image.open(path) as image:
            sizes[image.size] += 1
    assert sizes == {(columns, rows): 2 for rows, columns in pages.SIZES}
    backbone = load(shipped(MAIN), dtype="float32")
    asked = (tmp_path / pages.QUESTIONS).read_text().splitlines()
    assert len(packed_questions.questions_of(backbone, asked, 1)) == len(asked) == 8


def test_folders_without_matching_files_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="is no folder"):
        window_sources.files_in(tmp_path / "missing", "images")
    (tmp_path / "text.txt").write_text("words")
    with pytest.raises(InputError, match="holds no images"):
        window_sources.files_in(tmp_path, "images")
    assert window_sources.files_in(tmp_path, "texts") == [tmp_path / "text.txt"]


def test_held_out_windows_are_decided_before_anything_is_computed():
    source = window_sources.DrawnImageSource.of(CertifiedSizes((4,), (10,), 2), 5)
    sides = [spec.held_out for spec in source.specs for _ in spec.clusters]
    assert sides == [False] * 5 + [True] * 5
    assert sorted(np.concatenate([spec.clusters for spec in source.specs]).tolist()) == list(range(10))
    assert len({tuple(spec.batch) for spec in source.specs}) == len(source.specs)


# ----------------------------------------------------------------------------------------------- the shipped one


def shipped_certificate() -> Certificate:
    return Certificate.read(shipped(MAIN) / "certificate.json", backbone=None)


@pytest.mark.slow
def test_the_shipped_certificate_is_of_the_shipped_weights_in_float32():
    path = shipped(MAIN) / "certificate.json"
    backbone = load(shipped(MAIN), dtype="float32")
    made = Certificate.read(path, backbone=backbone)
    assert path.stat().st_size < 30_000
    for promise in ("forget", "remember"):
        for rank in serving_modes.RANKS:
            assert made.bound("stored", rank, behind=3, promise=promise) is not None
            assert made.bound("update", rank, promise=promise) is not None
    assert made.bound("orbit", 16) is not None
    assert made.bound("orbit", 16, promise="remember") is None
    bounds = [made.bound("stored", rank, behind=3) or 0.0 for rank in serving_modes.RANKS]
    bare = made.bound("bare", behind=3) or 0.0
    assert bare > bounds[1] > bounds[-1]
    assert plans.goals_of(made, serving_modes.RANKS, 4)
    with pytest.raises(CertificateError, match="another dtype"):
        Certificate.read(path, backbone=load(shipped(MAIN), dtype="bfloat16"))


@pytest.mark.slow
def test_a_run_measures_every_mode(tmp_path: Path):
    """Few windows of the small task: every way is there, exact ways are exact, a bare chunk loses most."""
    backbone = load(shipped(MAIN), dtype="float32")
    source, ranks, steps = window_sources.DrawnImageSource.of(CertifiedSizes((4,), (4,), 2), 7), (8, 64), []
    run = CertificationRun(backbone, source, tmp_path, ranks, step=steps.append)
    made = certification.certify(run, MAIN, level=0.6, plan_seed=7)
    assert len(steps) - steps.count("plans") == len(source.specs) * run.modes.number(4)
    assert (made.calibration, made.held_out, made.chunks, made.disjoint) == (2, 2, 4, True)
    few, many = (made.row("orbit", rank) for rank in ranks)
    assert few is not None
    assert many is not None
    assert few.kl != many.kl, "each rank is served at that rank"
    exact = made.row("prefill", behind=3)
    assert exact is not None
    assert abs(exact.kl) < 1e-6
    for promise in ("forget", "remember"):
        whole, bare = (made.row(*way, behind=3, promise=promise) for way in (("stored", 64), ("bare", 0)))
        assert whole is not None
        assert bare is not None
        assert whole.kl < 1e-4 < 0.5 < bare.kl
        fresh, stored = (made.row(point, 64, promise=promise) for point in ("fresh", "stored"))
        assert fresh is not None
        assert stored is not None
        assert dataclasses.replace(fresh, point="stored") == stored
    assert made.plans
    assert Certificate.from_json(made.to_json(), backbone=backbone) == made
    assert json.loads(made.to_json())["certificate"]["model"] == MAIN


@pytest.mark.slow
def test_a_users_own_images_and_texts(tmp_path: Path):
    """Images of two sizes, and texts, on a backbone whose tokenizer knows few words."""
    from PIL import Image

    backbone, sizes = load(shipped(MAIN), dtype="float32"), CertifiedSizes((3,), (4,), 2)
    rng = np.random.default_rng(0)
    for number in range(12):
        size = (30, 70, 3) if number % 5 else (40, 40, 3)
        Image.fromarray(rng.integers(0, 255, size, np.uint8)).save(tmp_path / f"{number}.png")
    images = own_images.OwnImageSource.of(backbone, tmp_path, sizes, 0, ("glyph? r1t2", "no word of it"))
    assert not images.disjoint
    made = certification.certify(CertificationRun(backbone, images, tmp_path, (8,)), MAIN, level=0.6)
    assert made.chunks == 3
    assert "1 questions" in made.asked
    assert made.bound("stored", 8, behind=2) is not None
    with pytest.raises(InputError, match=r"12 images in .*; expected 20 or more"):
        own_images.OwnImageSource.of(backbone, tmp_path, CertifiedSizes((5,), (4,), 2), 0, ("glyph?",))
    with pytest.raises(InputError, match="--questions=FILE"):
        packed_questions.questions_of(backbone, ("nothing that it knows",), 1)

    words = " ".join(f"r{row} t{tag} a{row % 8} b{tag % 8}" for row in range(10) for tag in range(9))
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(" ".join(rng.permutation((words + " " + words).split())))
    texts = window_sources.TextSource.of(backbone, tmp_path, sizes, 0, packed_questions.QUESTIONS)
    made = certification.certify(CertificationRun(backbone, texts, tmp_path, (8,)), MAIN, level=0.6)
    assert made.bound("stored", 8, behind=2) is not None
    with pytest.raises(InputError, match=r"0 texts of"):
        window_sources.TextSource.of(backbone, tmp_path, CertifiedSizes((300,), (4,), 2), 0, ("glyph?",))


class Compiled(logging.Handler):
    """Names of the programs that are compiled, as jax says them to its own log."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Compiling (?:jit\()?(\w+)", record.getMessage())
        self.names += [found[1]] if found else []


@pytest.mark.slow
def test_images_of_other_sizes_in_a_bucket_compile_no_operator(tmp_path: Path):
    """Windows of twelve images, no two of one shape: what serves and forms was compiled for the first of them."""
    from PIL import Image

    rng, log = np.random.default_rng(0), logging.getLogger("jax._src.interpreters.pxla")
    backbone, kept = load(shipped(MAIN), dtype="float32", buckets=Buckets()), []
    for number, (rows, columns) in enumerate(itertools.product(range(4, 16), repeat=2)):
        path = tmp_path / f"{number:02}.png"
        Image.fromarray(rng.integers(0, 255, (12 * rows, 12 * columns, 3), np.uint8)).save(path)
        fits = Buckets().round_up(np.asarray(backbone.prepare([path])["input_ids"]).shape[1]) == 80
        if fits and len(kept) < 12:
            kept.append(path)
        else:
            path.unlink()
    source = own_images.OwnImageSource.of(backbone, tmp_path, CertifiedSizes((3,), (2,), 2), 0, ("glyph? r1t2",))
    lengths = {int(tokens.embeddings.shape[1]) for spec in source.specs for tokens in spec.batch}
    assert len(kept) == 12
    assert len(lengths) > 3
    assert {Buckets().round_up(length) for length in lengths} == {80}

    handler, level, compiled = Compiled(), log.level, []
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        for spec in source.specs:
            windows = source.load(backbone, spec, tmp_path)
            scored, _ = certification.score_batch(windows, serving_modes.ModeSet((8,), (3,)), lambda _: None)
            assert all(np.isfinite(np.concatenate(parts)).all() for parts in scored.kl.values())
            compiled.append(collections.Counter(handler.names))
            handler.names = []
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    operators = {"form", "apply", "factorise_deficit", "merge"}
    assert operators <= set(compiled[0])
    assert not operators & set(compiled[1])
    assert compiled[1]["_prefill"] <= 4, "another bucket of a whole window, no other length"
    assert compiled[1].total() < compiled[0].total() / 2
