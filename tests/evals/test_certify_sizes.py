"""Certificates of several sizes of windows: what each mode serves, against prefills of whole histories."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.certify import (
    certification,
    journal,
    plans,
    scores,
    serving_modes,
    time_estimate,
    window_sources,
)
from evals.certify.certification_run import CertificationRun
from evals.certify.packed_questions import packed
from evals.certify.window_sizes import CertifiedSizes
from evals.probes.window.probe_images import of_ids
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from models import ModelBackbone, load

LENGTHS = {"lead": 3, "older": 4, "piece": 5}
ROWS, CHUNKS = 2, 5
"""Windows of a batch, and chunks of each."""


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return load(shipped(MAIN), dtype="float32")


class Histories:
    """Token ids of a small batch, and what they give by the backbone's own prefills, without any helper of ours."""

    def __init__(self, backbone: ModelBackbone):
        self.backbone, rng = backbone, np.random.default_rng(4)
        draw = lambda size: rng.integers(6, 150, (ROWS, size)).astype(np.int32)
        self.lead = np.repeat(draw(LENGTHS["lead"])[:1], ROWS, axis=0)
        self.pieces = [draw(LENGTHS["piece"]) for _ in range(CHUNKS)]
        self.older = [draw(LENGTHS["older"]) for _ in range(CHUNKS)]
        self.questions = [(draw(3), [2]), (draw(2), [0, 1])]

    def windows(self) -> window_sources.WindowBatch:
        image = lambda ids, name: of_ids(self.backbone, ids, name, name)
        return window_sources.WindowBatch(
            backbone=self.backbone,
            lead=image(self.lead, "lead"),
            pieces=tuple(image(ids, f"piece {place}") for place, ids in enumerate(self.pieces)),
            older=tuple(image(ids, f"older {place}") for place, ids in enumerate(self.older)),
            other=image(self.older[0], "older 0"),
            questions=packed(self.questions, self.backbone.layout.rope.axes, "questions"),
            clusters=np.arange(ROWS),
            held_out=False,
        )

    def positions(self, first: int, count: int) -> np.ndarray:
        return np.broadcast_to(np.arange(first, first + count, dtype=np.int32)[None, :, None], (ROWS, count, 3))

    def last_of(self, history: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Phase-free KV of the last piece of a prompt, prefilled whole."""
        ids = np.concatenate(history, axis=1)
        kv = self.backbone.prefill(self.backbone.embed(ids, self.positions(0, ids.shape[1]))).kv
        return {name: np.asarray(value)[:, :, -history[-1].shape[1] :] for name, value in kv.items()}

    def behind(self, context: Mapping[str, Any] | None, first: int, ids: np.ndarray, logits: Any = "last") -> Any:
        """Runs tokens at positions from `first` on, behind phase-free KV that fills the positions in front."""
        tokens = self.backbone.embed(ids, self.positions(first, ids.shape[1]))
        if context is not None:
            context = kvp.to_engine(self.backbone.layout, dict(context), self.positions(0, first), 0)
        return self.backbone.prefill(tokens, context, logits=logits)

    def promised(self) -> list[dict[str, np.ndarray]]:
        """Phase-free KV of the lead and every piece, by one prefill of the window."""
        history = [self.lead, *self.pieces]
        return [self.last_of(history[: place + 1]) for place in range(len(history))]

    def losses(self, served: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
        """KL of every answer behind a window that is served so, in plain NumPy: [rows, answers]."""
        found = []
        for ids, scored in self.questions:
            logits = []
            for parts in (self.promised(), served):
                whole = {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}
                end = next(iter(whole.values())).shape[2]
                output = self.behind(whole, end, ids, np.broadcast_to(np.array(scored, np.int32), (ROWS, len(scored))))
                own = np.asarray(output.logits, np.float64)
                own -= own.max(-1, keepdims=True)
                logits.append(own - np.log(np.exp(own).sum(-1, keepdims=True)))
            expected, other = logits
            found.append((np.exp(expected) * (expected - other)).sum(-1).mean(-1))
        return np.stack(found, axis=1)


@pytest.fixture(scope="module")
def histories(backbone: ModelBackbone) -> Histories:
    return Histories(backbone)


@pytest.fixture(scope="module")
def measured(histories: Histories) -> dict[Any, np.ndarray]:
    """KL of every answer by mode, as a run measures them."""
    modes = serving_modes.ModeSet((8,), (3, CHUNKS), frozenset({"orbit", "update", "fresh", "repair"}))
    steps: list[str] = []
    found, tokens = certification.score_batch(histories.windows(), modes, steps.append)
    assert len(steps) == len(found.kl) == modes.number(CHUNKS)
    assert tokens == LENGTHS["lead"] + CHUNKS * LENGTHS["piece"]
    return {key: parts[0].reshape(ROWS, -1) for key, parts in found.kl.items()}


def expected_kv(histories: Histories, likeness: str) -> dict[int, dict[str, np.ndarray]]:
    """Phase-free KV of every piece behind another history, which is written out here, place by place."""
    lead, (a, b, c, d, e), (v, w, x, y, z) = histories.lead, histories.pieces, histories.older
    near = {1: [v, a], 2: [v, a, b], 3: [v, b, c], 4: [v, w, c, d], 5: [v, w, x, d, e]}
    second = {2: [w, a, b], 3: [w, b, c], 4: [w, x, c, d], 5: [w, x, y, d, e]}
    third = {2: [x, a, b], 3: [x, b, c], 4: [x, y, c, d], 5: [x, y, z, d, e]}
    if likeness == "mean":
        mean = {1: histories.last_of([lead, v, a])}
        for place in range(2, 6):
            parts = [histories.last_of([lead, *own[place]]) for own in (near, second, third)]
            mean[place] = {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}
        return mean
    return {place: histories.last_of([lead, *history]) for place, history in near.items()}


@pytest.mark.slow
@pytest.mark.parametrize("likeness", ["mean", pytest.param("near", marks=pytest.mark.slow)])
def test_stored_prefills_lose_what_prefills_of_the_other_histories_lose(histories, measured, likeness: str):
    other, promised = expected_kv(histories, likeness), histories.promised()
    for count in (1, 3, CHUNKS):
        first = CHUNKS + 1 - count
        served = [other[place] if place >= first else promised[place] for place in range(CHUNKS + 1)]
        expected = histories.losses(served)
        assert expected.max() > 1e-3, "it loses something"
        np.testing.assert_allclose(
            measured[likeness, 0, count - 1, "forget"], expected, rtol=2e-2, atol=2e-5, err_msg=f"{likeness} {count}"
        )


@pytest.mark.slow
def test_survivors_lose_what_a_window_loses_that_slid_so_often(histories: Histories, measured):
    """A window that is filled with older pieces and slides, piece by piece, each prefilled behind what is there."""
    assert sorted(key[1] for key in measured if key[0] == "survivor") == [1, 2, 4, 5]
    for slides in (1, 2, 4, 5):
        window = [(LENGTHS["lead"], histories.last_of([histories.lead]))]
        for ids in [*histories.older[-slides:], *histories.pieces]:
            if len(window) > CHUNKS:
                del window[1]
            context = {name: np.concatenate([kv[name] for _, kv in window], axis=2) for name in window[0][1]}
            own = histories.behind(context, sum(size for size, _ in window), ids).kv
            window.append((ids.shape[1], {name: np.asarray(value) for name, value in own.items()}))
        expected = histories.losses([kv for _, kv in window])
        assert expected.max() > 1e-4
        np.testing.assert_allclose(
            measured["survivor", slides, CHUNKS - 1, "forget"], expected, rtol=2e-2, atol=2e-5, err_msg=f"{slides}"
        )


@pytest.mark.slow
def test_the_last_pieces_are_served_as_many_as_smaller_windows_have(histories: Histories, measured):
    canonical = [histories.last_of([ids]) for ids in [histories.lead, *histories.pieces]]
    promised = histories.promised()
    for count in (1, 3, CHUNKS):
        first = CHUNKS + 1 - count
        expected = histories.losses([*promised[:first], *canonical[first:]])
        np.testing.assert_allclose(measured["bare", 0, count - 1, "forget"], expected, rtol=2e-2, atol=2e-5)
    assert np.abs(measured["prefill", 0, CHUNKS - 1, "forget"]).max() < 1e-5


# ------------------------------------------------------------------------------------------------------------- rows


def scores_of(kl: Mapping[Any, float], windows: range, held_out_from: int) -> scores.Scores:
    rng, found = np.random.default_rng(windows.start), scores.Scores()
    cluster = np.repeat([*windows], 3)
    for key, mean in kl.items():
        values = mean * rng.uniform(0.9, 1.1, len(cluster))
        found.kl[key], found.flips[key] = [values], [(values > 1.0).astype(float)]
    found.cluster, found.held_out = [cluster], [cluster >= held_out_from]
    return found


def test_a_bound_is_that_of_the_worst_size():
    small = scores_of({("bare", 0, 0, "forget"): 2.0, ("bare", 0, 3, "forget"): 3.0}, range(24), 12)
    large = scores_of(
        {("bare", 0, 0, "forget"): 0.5, ("bare", 0, 3, "forget"): 4.0, ("bare", 0, 7, "forget"): 5.0},
        range(24, 48),
        36,
    )
    both = {row.key: row for row in scores.rows_of([small, large], 0.9)}
    alone = [{row.key: row for row in scores.rows_of([own], 0.9)} for own in (small, large)]
    assert sorted(key[2] for key in both) == [0, 3, 7]
    for behind in (0, 3):
        key = "bare", 0, behind, "forget"
        assert both[key].kl_bound == max(own[key].kl_bound for own in alone)
        assert both[key].flips_high == max(own[key].flips_high for own in alone)
        assert both[key].answers == 144
        assert both[key].kl == pytest.approx(np.mean([own[key].kl for own in alone]), rel=1e-4)
    assert both["bare", 0, 7, "forget"] == alone[1]["bare", 0, 7, "forget"]


def test_each_size_needs_its_calibration_windows():
    whole = {("bare", 0, 0, "forget"): 2.0}
    with pytest.raises(InputError, match=r"5 calibration windows for level 0\.9; expected 9 or more"):
        scores.rows_of([scores_of(whole, range(24), 12), scores_of(whole, range(24, 34), 29)], 0.9)


def test_a_recommended_rank_suffices_at_every_size():
    def patched(behind: int, kl: tuple[float, float], windows: range) -> scores.Scores:
        table = {("bare", 0, behind, "forget"): 2.0}
        table |= {("stored", rank, behind, "forget"): mean for rank, mean in zip((4, 8), kl, strict=True)}
        return scores_of(table, windows, windows.start + 12)

    small, large = patched(3, (0.01, 0.005), range(24)), patched(7, (0.2, 0.02), range(24, 48))
    assert scores.recommend([small], 0.1, 0.9).rank == 4
    assert scores.recommend([small, large], 0.1, 0.9).rank == 8


# ------------------------------------------------------------------------------------------------------------ sizes


@pytest.mark.slow
def test_sizes_share_documents_and_never_across_the_halves(backbone: ModelBackbone, tmp_path: Path):
    """A document that calibrates one size is held out of none, and every window ends where its text goes on."""
    rng = np.random.default_rng(0)
    words = [f"r{row}" for row in range(10)] + [f"t{tag}" for tag in range(9)]
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(" ".join(rng.choice(words, 1400)))
    sizes = CertifiedSizes((3, 5), (8, 6), 4)
    source = window_sources.TextSource.of(backbone, tmp_path, sizes, 0, ("glyph?",))
    assert source.sizes == sizes
    assert [(spec.chunks, len(spec.clusters), spec.held_out) for spec in source.specs] == [
        *[(3, 4, False), (3, 4, True)],
        *[(5, 2, False), (5, 1, False), (5, 2, True), (5, 1, True)],
    ]
    clusters = np.concatenate([spec.clusters for spec in source.specs])
    assert sorted(clusters.tolist()) == list(range(14))
    sides: dict[bytes, set[bool]] = {}
    for spec in source.specs:
        for ids in spec.batch:
            sides.setdefault(ids.tobytes(), set()).add(spec.held_out)
    assert len(sides) == 8
    assert all(len(side) == 1 for side in sides.values())

    windows = [source.load(backbone, spec, tmp_path) for spec in (source.specs[0], source.specs[2])]
    assert [(len(own.pieces), len(own.older)) for own in windows] == [(3, 5), (5, 5)]
    same = [own.pieces[-1].canonical for own in windows]
    for name, value in same[0].items():
        np.testing.assert_allclose(value[:, :2], same[1][name][:, :2], atol=1e-5)


@pytest.mark.parametrize(
    ("chunks", "counts", "flag"),
    [((2, 4), (8, 8), "--chunks"), ((8, 4), (8, 8), "--chunks"), ((4, 4), (8, 8), "--chunks"), ((4, 8), (8,), "--n")],
)
def test_invalid_sizes_are_refused(chunks, counts, flag):
    with pytest.raises(InputError, match=flag):
        CertifiedSizes(chunks, counts)


def test_modes_are_counted_by_size():
    modes = serving_modes.ModeSet((8, 16), (4, 8, 16))
    assert modes.slides == (1, 2, 4, 8, 16)
    assert serving_modes.ModeSet((8,), (6,)).slides == (1, 2, 4, 6)
    assert modes.counts(8) == (1, 4, 8)
    assert modes.repaired(16) == (1, 4, 8)
    fewer = serving_modes.ModeSet((8, 16), (4, 8, 16), frozenset({"orbit", "survivor"}))
    assert modes.number(16) - fewer.number(16) == 5 + 2 * 4


def test_a_run_that_measured_nothing_leaves_no_configuration_behind(tmp_path: Path):
    file = tmp_path / "c.json.parts"
    journal.Journal(file, {"model": "a", "ranks": [8]})
    again = journal.Journal(file, {"model": "a", "ranks": [16]})
    again.add("windows 0", found=1)
    assert "windows 0" in journal.Journal(file, {"model": "a", "ranks": [16]})
    with pytest.raises(InputError, match="parts of another ranks"):
        journal.Journal(file, {"model": "a", "ranks": [8]})


# ---------------------------------------------------------------------------------------------------------- one run


@pytest.mark.slow
def test_one_run_measures_several_sizes(backbone: ModelBackbone, tmp_path: Path):
    sizes, steps, ranks = CertifiedSizes((4, 6), (4, 4), 2), list[str](), (8, 64)
    run = CertificationRun(backbone, window_sources.DrawnImageSource.of(sizes, 7), tmp_path, ranks, step=steps.append)
    expected = [*time_estimate.expected_steps(run, time_estimate.Pace.assumed())]
    made = certification.certify(run, MAIN, level=0.6, plan_seed=7)
    assert len(steps) == len(expected)
    assert (made.chunks, made.calibration, made.held_out) == (6, 2, 2)
    for point in ("bare", "near", "mean"):
        for promise, behind in itertools.product(("forget", "remember"), (0, 3, 5)):
            assert made.row(point, behind=behind, promise=promise) is not None
    assert made.bound("stored", 64, behind=4) is not None
    assert made.bound("stored", 64, behind=6) is None
    assert [made.row("survivor", slides, behind=5) is not None for slides in (1, 2, 4, 6)] == [True] * 4
    assert {plan.name.rpartition(", ")[2] for plan in made.plans} == {"4 chunks", "6 chunks"}
    assert plans.goals_of(made, ranks, 6)
    assert math.isfinite(sum(row.kl for row in made.rows))
