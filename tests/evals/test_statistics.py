"""Intervals, metrics and certified bounds are those of a second computation, and bounds cover unseen windows."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.certify import scores, sources
from evals.certify.certification import certify, table
from evals.certify.modes import OPTIONAL_POINTS, Mode, ModeSet
from evals.certify.scores import conformal_bound, least_clusters
from evals.certify.windows import Window, WindowSet, lead_ids
from evals.harness import intervals, metrics
from evals.harness.frame import measured_row
from evals.harness.intervals import Interval
from evals.harness.lines import RUN, Contents, Question
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import ModelBackbone, load
from kvpatch_jax.plan import Certificate
from tests.shared.window_oracle import BUCKETS

# ------------------------------------------------------------------------------------------------ intervals and metrics


def draw_clusters(seed=0, clusters=40, size=6):
    rng = np.random.default_rng(seed)
    cluster = np.repeat(np.arange(clusters), rng.integers(1, size, clusters))
    values = rng.normal(size=clusters)[cluster] + rng.normal(size=len(cluster))
    return rng.permutation(np.stack([values, cluster]), axis=1)


def test_an_interval_is_that_of_resampled_clusters():
    """The matrix product gives, draw for draw, what repeating the items of every drawn cluster gives."""
    values, cluster = draw_clusters()
    counts = np.random.default_rng(0).multinomial(40, np.full(40, 1 / 40), intervals.DRAWS)
    direct = [np.mean(np.repeat(values, count[cluster.astype(int)])) for count in counts]
    got = intervals.mean(values, cluster)
    np.testing.assert_allclose(got[:3], [values.mean(), *np.percentile(direct, [2.5, 97.5])], atol=1e-12)
    assert got.n == len(values)


def test_arms_are_paired():
    """Two arms that differ by a constant differ by that constant in every draw: an interval of width zero."""
    values, cluster = draw_clusters()
    gap = intervals.paired_difference(values + 0.25, values, cluster)
    np.testing.assert_allclose(gap[:3], 0.25)
    assert intervals.mean(values + 0.25, cluster).high - intervals.mean(values, cluster).high == pytest.approx(0.25)


def test_eta_is_the_share_of_the_blind_loss_that_is_recovered():
    blind, cluster = np.array([1.0, 3.0, 0.0, 4.0]), np.array([0, 0, 1, 1])
    assert intervals.eta(blind, blind, cluster)[:3] == (0, 0, 0)
    assert intervals.eta(0 * blind, blind, cluster)[:3] == (1, 1, 1)
    half = intervals.eta(np.array([4.0, 0.0, 0.0, 0.0]), blind, cluster)
    assert (half.value, half.n) == (0.5, 4)
    assert half.low <= half.value <= half.high
    assert intervals.eta(3 * blind, blind, cluster).value == -2


def test_an_undefined_statistic_is_nan():
    nothing, zeros, cluster = np.zeros(0), np.zeros(4), np.arange(4)
    one_context = intervals.mean(np.array([0.0, 1.0]), np.zeros(2))
    assert one_context.value == 0.5
    assert intervals.eta(np.array([np.inf, 0, 0, 0]), zeros + 1, cluster).value == -math.inf
    undefined = [
        intervals.mean(nothing, nothing).value,
        one_context.low,
        one_context.high,
        intervals.eta(zeros + 1, zeros, cluster).value,
        intervals.eta(zeros, zeros + np.inf, cluster).value,
        intervals.mean(np.array([1.0, np.nan]), np.arange(2)).value,
    ]
    assert np.isnan(undefined).all()


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
    expected = {
        "accuracy": (0.75, 4),
        "difference": (-0.25, 4),
        "kl": (4.5 / 4, 4),
        "flips": (0.25, 4),
        "within": (0.0, 4),
        "eta": (1 - 4.5 / 8, 4),
        "flip_recover": (0.75, 4),
        "worse": (0.25, 4),
        "harmful": (0.25, 4),
    }
    chain = probe.metrics("arm", "chain")
    assert {name: (pytest.approx(chain[name].value), chain[name].n) for name in expected} == expected
    # Blind reuse loses nothing of the page's questions: there is no share of it to bring back.
    assert math.isnan(probe.metrics("arm", "page")["eta"].value)
    rows = list(probe.rows("documents.4", "m", ("accuracy",)))
    assert {row["arm"] for row in rows} == {"re-prefill", "blind", "arm"}, "an arm of one batch alone has no rows"
    blind = [row["metric"] for row in rows if row["arm"] == "blind"]
    assert blind == ["accuracy.chain", "accuracy.page", "stored_bytes"]


def test_an_estimate_is_correlated_with_what_it_estimates_over_contexts():
    """Eight contexts of one question; estimates that are the share left correlate at 1, their inverse at −1."""
    left = np.array([0.9, 0.5, 0.1, 0.01, 0.3, 0.7, 0.05, 0.2])
    asked = {"kind": [0] * 8, "answer": [1] * 8, "cluster": list(range(8)), "predicted": [1] * 8}
    kl = {"re-prefill": 0 * left, "blind": 0 * left + 2, "right": 2 * left, "inverse": 2 * left}
    lines = [{"arm": arm, **asked, "kl": values.tolist()} for arm, values in kl.items()]
    lines[2]["estimate"], lines[3]["estimate"] = left.tolist(), (0.005 / left).tolist()
    probe = metrics.ProbeRecords(lines, ("chain",))
    for arm, correlation in (("right", 1), ("inverse", -1)):
        estimate = probe.metrics(arm, "chain")["estimate"]
        assert (estimate.value, estimate.n) == (pytest.approx(correlation), 8)


def test_means_over_seeds_need_every_seed():
    def rows(model, value):
        return [measured_row("p", model, "a", "accuracy.chain", Interval(value, 0.0, 1.0, 9))]

    (mean,) = metrics.mean_rows([*rows("a", 0.5), *rows("b", 0.9), *rows("control", 0.1)], ["a", "b"])
    assert (mean["value"], mean["low"], mean["high"], mean["n"]) == (pytest.approx(0.7), 0.5, 0.9, 2)
    assert metrics.mean_rows(rows("a", 0.5), ["a", "b"]) == []


# --------------------------------------------------------------------------------------------------------------- bounds


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return load(shipped(MAIN), dtype="float32", buckets=BUCKETS)


def brute_force_bound(values: np.ndarray, cluster: np.ndarray, level: float) -> float:
    """The least value below which the weights of items, and of a cluster to come at infinity, reach the level."""
    names = sorted(set(cluster.tolist()))
    for bound in sorted(values.tolist()):
        shares = [(values[cluster == name] <= bound).mean() for name in names]
        if sum(shares) / (len(names) + 1) >= level - 1e-12:
            return bound
    return math.inf


def test_bounds_are_the_hierarchical_quantile():
    rng = np.random.default_rng(0)
    for _ in range(25):
        cluster, level = rng.integers(0, 12, 60), rng.uniform(0.5, 0.9)
        values = rng.choice(20, 60) / 7  # with ties
        assert conformal_bound(values, cluster, level) == brute_force_bound(values, cluster, level)
    assert [least_clusters(level) for level in (0.5, 0.9, 0.95, 0.99)] == [1, 9, 19, 99]
    with pytest.raises(InputError, match=r"got 18 clusters for level 0\.95; expected 19 or more"):
        conformal_bound(np.arange(18.0), np.arange(18), 0.95)


def test_a_bound_covers_new_clusters_at_its_level():
    rng, level, within = np.random.default_rng(1), 0.9, []
    for _ in range(800):
        easy = rng.exponential(size=31) ** 2
        values = easy[:, None] * rng.uniform(0.8, 1.2, (31, 6))
        bound = conformal_bound(values[:30].ravel(), np.repeat(np.arange(30), 6), level)
        within.append((values[30] <= bound).mean())
    assert level - 3 * np.std(within) / math.sqrt(len(within)) < np.mean(within) < level + 0.06


def scored(kl: Mapping[tuple[str, int], float], held_out: float = 1.0, size: int = 4, first: int = 0) -> scores.Scores:
    """Scores of 24 windows, four answers each, the later half held out with `held_out` times the KL."""
    rng = np.random.default_rng(first)
    cluster, side = first + np.repeat(np.arange(24), 4), np.repeat(np.arange(24) >= 12, 4)
    tables: list[dict[Mode, np.ndarray]] = [{}, {}]
    for promise, behind in itertools.product(("forget", "remember"), (0, size - 1)):
        for (point, rank), mean in kl.items():
            values = mean * rng.uniform(0.9, 1.1, 96) * np.where(side, held_out, 1.0)
            for column, numbers in zip(tables, (values, (values > 1).astype(float)), strict=True):
                column[Mode(*(point, rank, behind, promise))] = numbers
    return scores.Scores(tables[0], tables[1], cluster, side)


def rows(*by_size: scores.Scores) -> dict[Any, Any]:
    return {row.key: row for row in scores.rows_of(by_size, 0.9)}


def test_bounds_depend_on_calibration_windows_alone():
    kl, key = {("bare", 0): 2.0, ("stored", 8): 0.1}, ("stored", 8, 3, "forget")
    row, worse = rows(scored(kl))[key], rows(scored(kl, 1.5))[key]
    assert 0.1 < row.kl_bound <= 0.1101
    assert row.kl_low <= row.kl <= row.kl_high
    assert row.coverage_low < row.coverage <= row.coverage_high
    assert (row.eta, row.flips, row.answers) == (pytest.approx(0.95, abs=0.01), 0.0, 96)
    assert (worse.kl_bound, worse.coverage) == (row.kl_bound, 0.0)
    for value in (0.123456789, 1e-9, 3.0, 1.23456e-5):
        assert value <= scores.rounded_up(value) <= value * (1 + 2e-5)
    # Answers that are not finite are not certified.
    broken = scored({("bare", 0): 2.0})
    broken.kl[Mode("bare", 0, 0, "forget")][3] = math.nan
    with pytest.raises(InputError, match="kl"):
        rows(broken)


def test_a_bound_is_that_of_the_worst_size():
    small, large = scored({("bare", 0): 2.0}), scored({("bare", 0): 0.5}, size=8, first=24)
    both, alone = rows(small, large), [rows(small), rows(large)]
    assert sorted(key[2] for key in both if key[3] == "forget") == [0, 3, 7]
    shared = "bare", 0, 0, "forget"
    assert both[shared].kl_bound == max(row[shared].kl_bound for row in alone)
    assert both[shared].kl == pytest.approx(np.mean([row[shared].kl for row in alone]), rel=1e-4)
    assert both["bare", 0, 7, "forget"] == alone[1]["bare", 0, 7, "forget"]


@pytest.mark.parametrize(
    ("kl", "goal", "rank"),
    [
        ((2.0, 1.0, 0.15, 0.05), None, 8),
        ((2.0, 1.0, 0.15, 0.05), 0.1, 16),
        ((2.0, 1.0, 0.9, 0.8), None, 16),
        ((1e-4, 1e-5, 1e-6, 1e-6), None, 4),
    ],
)
def test_the_recommended_rank_is_the_smallest_that_suffices_at_every_size(kl, goal, rank):
    table = {("stored" if size else "bare", size): mean for size, mean in zip((0, 4, 8, 16), kl, strict=True)}
    choice = scores.recommend([scored(table)], goal, 0.9)
    assert choice.rank == rank
    assert scores.recommend([scored(table, 50.0)], goal, 0.9) == choice  # windows that are held out have no say
    easy = scored({**table, ("stored", 4): 1e-9}, size=8, first=24)
    assert scores.recommend([easy, scored(table)], goal, 0.9).rank == rank


CHUNKS, WINDOWS = 5, 2
SIZE = 32
"""Tokens that prompts are filled up to, those behind which see all else: a bucket, as the measured ones are."""
FEW = ModeSet((64,), (3, CHUNKS), frozenset(OPTIONAL_POINTS))
ALL = ModeSet((2, 64), (3, CHUNKS))


class Histories:
    """Token ids of two windows, and what they give by the backbone's own prefills, without any helper of ours."""

    def __init__(self, backbone: ModelBackbone):
        self.backbone, rng = backbone, np.random.default_rng(4)
        draw = lambda size: rng.integers(6, 150, (WINDOWS, size)).astype(np.int32)
        self.pieces, self.older = ([draw(size) for _ in range(CHUNKS)] for size in (5, 4))
        self.questions = [(draw(3), (2,)), (draw(3), (0, 1))]

    def windows(self) -> WindowSet:
        values, windows = {}, []
        for row in range(WINDOWS):
            names = [f"{kind} {place} {row}" for kind in ("piece", "older") for place in range(CHUNKS)]
            values |= dict(zip(names, [ids[row].tolist() for ids in (*self.pieces, *self.older)], strict=True))
            asked = tuple(Question(tuple(ids[row].tolist()), scored) for ids, scored in self.questions)
            windows.append(Window(tuple(names[:CHUNKS]), tuple(names[CHUNKS:]), asked))
        return WindowSet(Contents(self.backbone, values), windows, "drawn ids", "two questions", 2)

    @property
    def lead(self) -> np.ndarray:
        return np.repeat(np.array([lead_ids(self.backbone)], np.int32), WINDOWS, axis=0)

    def positions(self, first: int, count: int) -> np.ndarray:
        return np.broadcast_to(np.arange(first, first + count, dtype=np.int32)[None, :, None], (WINDOWS, count, 3))

    def last_of(self, history: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Phase-free KV of the last piece of a prompt, prefilled with others behind it, which it does not see."""
        ids = np.concatenate([*history, *self.pieces], axis=1)[:, :SIZE]
        ids = np.pad(ids, [(0, 0), (0, SIZE - ids.shape[1])])
        places, end = self.positions(0, SIZE)[:1], sum(part.shape[1] for part in history)
        kv = [self.backbone.prefill(self.backbone.embed(row[None], places), chunk=RUN).kv for row in ids]
        rows = {name: np.concatenate([np.asarray(part[name]) for part in kv], axis=1) for name in kv[0]}
        return {name: value[:, :, end - history[-1].shape[1] : end] for name, value in rows.items()}

    def behind(self, context: Mapping[str, Any], first: int, ids: np.ndarray) -> Any:
        """Runs tokens behind phase-free KV that fills the positions in front."""
        placed = kvp.to_engine(self.backbone.layout, dict(context), self.positions(0, first), 0)
        tokens = self.backbone.embed(ids, self.positions(first, ids.shape[1]))
        return self.backbone.prefill(tokens, placed, logits="all")

    def promised(self) -> list[dict[str, np.ndarray]]:
        history = [self.lead, *self.pieces]
        return [self.last_of(history[: place + 1]) for place in range(len(history))]

    def loss(self, served: Sequence[Mapping[str, np.ndarray]]) -> float:
        """Mean KL of all answers behind windows that are served so, in plain NumPy."""
        losses = []
        for ids, places in self.questions:
            logits = []
            for parts in (self.promised(), served):
                window = {name: np.concatenate([part[name] for part in parts], axis=2) for name in parts[0]}
                output = np.asarray(self.behind(window, window["k"].shape[2], ids).logits, np.float64)[:, places]
                logits.append(output - np.log(np.exp(output).sum(-1, keepdims=True)))
            losses.append((np.exp(logits[0]) * (logits[0] - logits[1])).sum(-1).mean())
        return float(np.mean(losses))


@pytest.fixture(scope="module")
def histories(backbone: ModelBackbone) -> Histories:
    return Histories(backbone)


@pytest.fixture(scope="module")
def measured(histories: Histories, tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return certify(histories.windows(), ALL, tmp_path_factory.mktemp("parts"), {"model": "small"}, level=0.5)


def agrees(certificate: Certificate, expected: float, *mode: Any) -> None:
    row = certificate.row(mode[0], mode[1], behind=mode[2])
    assert row is not None
    np.testing.assert_allclose(row.kl, expected, rtol=2e-2, atol=2e-5, err_msg=str(mode))


@pytest.mark.nightly
def test_stored_prefills_lose_what_prefills_of_the_other_histories_lose(histories: Histories, measured: Certificate):
    lead, (a, b, c, d, e), (v, w, x, y, z) = histories.lead, histories.pieces, histories.older
    first = {1: [v, a], 2: [v, a, b], 3: [v, b, c], 4: [v, w, c, d], 5: [v, w, x, d, e]}
    second = {1: [v, a], 2: [w, a, b], 3: [w, b, c], 4: [w, x, c, d], 5: [w, x, y, d, e]}
    third = {1: [v, a], 2: [x, a, b], 3: [x, b, c], 4: [x, y, c, d], 5: [x, y, z, d, e]}
    promised = histories.promised()
    for likeness, several in (("near", [first]), ("mean", [first, second, third])):
        other = {}
        for place in range(1, CHUNKS + 1):
            parts = [histories.last_of([lead, *history[place]]) for history in several]
            other[place] = {name: np.mean([part[name] for part in parts], axis=0) for name in parts[0]}
        for count in (1, 3, CHUNKS):
            front = CHUNKS + 1 - count
            expected = histories.loss([*promised[:front], *(other[place] for place in range(front, CHUNKS + 1))])
            agrees(measured, expected, likeness, 0, count - 1)


@pytest.mark.nightly
def test_survivors_lose_what_a_window_loses_that_slid_so_often(histories: Histories, measured: Certificate):
    assert sorted(row.rank for row in measured.rows if row.point == "survivor") == [1, 2, 4, 5]
    for slides in (1, 2, 4, 5):
        window = [(histories.lead.shape[1], histories.last_of([histories.lead]))]
        for ids in [*histories.older[-slides:], *histories.pieces]:
            if len(window) > CHUNKS:
                del window[1]
            context = {name: np.concatenate([kv[name] for _, kv in window], axis=2) for name in window[0][1]}
            kv = histories.behind(context, sum(size for size, _ in window), ids).kv
            window.append((ids.shape[1], {name: np.asarray(value) for name, value in kv.items()}))
        agrees(measured, histories.loss([kv for _, kv in window]), "survivor", slides, CHUNKS - 1)


def test_canonicals_lose_what_pieces_alone_lose_and_full_patches_nothing(histories: Histories, tmp_path: Path):
    few = certify(histories.windows(), FEW, tmp_path, {"model": "small"}, level=0.5)
    promised, alone = histories.promised(), [histories.last_of([ids]) for ids in [histories.lead, *histories.pieces]]
    for count in (1, 3, CHUNKS):
        front = CHUNKS + 1 - count
        agrees(few, histories.loss([*promised[:front], *alone[front:]]), "bare", 0, count - 1)
        agrees(few, 0.0, "stored", 64, count - 1)
    agrees(few, 0.0, "prefill", 0, CHUNKS - 1)
    assert [plan.windows for plan in few.plans] == [1] * len(few.plans) != []
    assert len(table(few).splitlines()) == 1 + len(few.rows) + len(few.plans)


def words_of(backbone: ModelBackbone) -> list[str]:
    return [word for word in sorted(backbone.tokenizer.get_vocab()) if word.isalnum()][:12]


def test_windows_of_a_log_follow_one_another_and_bad_lines_are_left_out(backbone, tmp_path, capsys):
    """Seven contexts of an image, a text and an image; one has an unknown word, and one a broken image."""
    image_module = pytest.importorskip("PIL.Image")
    rng, words, lines = np.random.default_rng(1), words_of(backbone), []
    for number in range(7):
        images = [f"{number}_{place}.png" for place in range(2)]
        for name in images:
            image_module.fromarray(rng.integers(0, 255, (56, 56, 3), np.uint8)).save(tmp_path / name)
        text = " ".join(words[number : number + 3]) if number != 5 else "a word unheard of"
        pieces = [{"image": images[0]}, {"text": text}, {"image": images[1]}]
        lines += [{"pieces": pieces, "question": word, "answer": "x"} for word in words[: 1 + number % 2]]
    (tmp_path / "3_0.png").write_bytes((tmp_path / "3_0.png").read_bytes()[:60])
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    windows = sources.data_windows(backbone, log, 2, 6, 2)
    assert any("unheard" in line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: "))
    assert windows.fewest == (3, 2)
    first, second, third, *_ = windows.windows
    assert [len(window.questions) for window in windows.windows] == [1, 2, 1, 1, 1]
    assert second.before == first.pieces
    assert first.before == third.pieces  # nothing of the other half
    planned = list(windows.batches())
    assert [(batch.held_out, batch.clusters) for batch in planned] == [(False, [0, 1]), (False, [2]), (True, [3, 4])]
    with pytest.raises(InputError, match="--data: got contexts of 3 pieces; expected 10 or more of 3 or more"):
        sources.data_windows(backbone, log, 10, 10, 2)


def test_texts_of_one_half_are_in_no_window_of_the_other(backbone: ModelBackbone, tmp_path: Path):
    rng, words = np.random.default_rng(0), words_of(backbone)
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text(" ".join(rng.choice(words, 1400)))
    batches = list(sources.text_windows(backbone, tmp_path, (3, 5), 8, 4, words[:1]).batches())
    shapes = [(batch.chunks, len(batch.windows), batch.held_out) for batch in batches]
    assert shapes == [(3, 4, False), (3, 4, True), *[(5, 2, False)] * 2, *[(5, 2, True)] * 2]
    sides: dict[str, set[bool]] = {}
    for batch in batches:
        for name in (name for window in batch.windows for name in (*window.pieces, *window.before)):
            sides.setdefault(name.partition(",")[0], set()).add(batch.held_out)
    assert sorted(map(len, sides.values())) == [1] * 8
