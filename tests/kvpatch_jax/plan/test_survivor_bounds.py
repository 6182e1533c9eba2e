"""Bounds of survivors by the slides of their window, and of stored prefills by their likeness."""

import itertools
import random

from evals.trained import shipped
from kvpatch_jax.cache import SURVIVOR_WAYS
from kvpatch_jax.plan import Certificate, CertifiedLoss, Losses, RankChoice


def row(point: str, rank: int, bound: float, behind: int = 3) -> CertifiedLoss:
    numbers = {"kl": bound / 2, "kl_low": bound / 4, "kl_high": bound, "kl_bound": bound, "eta": None}
    shares = {"coverage": 1.0, "coverage_low": 0.9, "coverage_high": 1.0, "flips": 0.0, "flips_high": bound / 10}
    return CertifiedLoss(point=point, rank=rank, behind=behind, promise="forget", answers=9, **numbers, **shares)


def certificate(*rows: CertifiedLoss, chunks: int = 4) -> Certificate:
    return Certificate(
        backbone="a" * 32,
        model="a model",
        made="2026-11-26",
        level=0.95,
        calibration=20,
        held_out=20,
        chunks=chunks,
        tokens=900,
        content="images",
        asked="questions",
        disjoint=True,
        rows=rows,
        recommended=RankChoice(4, "because"),
        spans=(9, 12),
        modalities=("image",),
    )


def test_survivors_take_the_worse_of_the_neighbouring_slides():
    made = certificate(*(row("survivor", slides, bound) for slides, bound in ((1, 0.1), (2, 0.4), (8, 0.3))))
    found = {slides: made.bound("survivor", slides, behind=3) for slides in (1, 2, 3, 8, 9, 400)}
    assert found == {1: 0.1, 2: 0.4, 3: 0.4, 8: 0.3, 9: None, 400: None}
    assert made.bound("survivor", 2, behind=4) is None


def test_uncounted_slides_take_the_worst_of_all():
    """Whoever does not know how often a window slid gets no better bound than from any row."""
    draw = random.Random(3)
    for _ in range(50):
        measured = sorted(draw.sample(range(1, 20), draw.randint(1, 4)))
        table = {(slides, behind): draw.random() for slides in measured for behind in (3, 7)}
        rows = [row("survivor", slides, bound, behind) for (slides, behind), bound in table.items()]
        made = certificate(*rows, chunks=8)
        for behind, near in ((0, (3,)), (3, (3,)), (5, (3, 7)), (7, (7,))):
            worst = max(table[slides, own] for slides in measured for own in near)
            assert made.bound("survivor", behind=behind) == worst
            assert Losses(made, "forget", 8).kl(SURVIVOR_WAYS, behind) == max(
                made.bound("survivor", behind=own) or 0.0 for own in range(behind + 1)
            )
            for slides in range(1, 20):
                bound = made.bound("survivor", slides, behind=behind)
                assert (bound is None) == (slides > measured[-1])
                assert (bound or 0.0) <= worst
        assert made.bound("survivor", behind=8) is None


def test_a_missing_number_of_slides_bounds_nothing():
    made = certificate(row("survivor", 1, 0.1), row("survivor", 2, 0.1, behind=7), chunks=8)
    assert made.bound("survivor", 1, behind=3) == 0.1
    assert made.bound("survivor", 2, behind=3) is None
    assert made.bound("survivor", behind=3) is None


def test_stored_prefills_are_bounded_by_their_likeness():
    rows = [row(point, 0, bound, behind) for point, bound in (("near", 0.4), ("mean", 0.1)) for behind in (0, 3)]
    made = certificate(*rows)
    assert made.bound("mean", behind=2) == 0.1
    assert made.bound("bare") is None
    assert made.together([("leading", 0), ("mean", 0), ("prefill", 0), ("near", 0)]) == 0.4
    assert made.together([("near", 0)] * 5) is None


def test_shipped_certificates_reach_no_longer_windows_than_measured():
    made = Certificate.read(shipped("documents/qwen2_5_vl") / "certificate.json", backbone=None)
    page = (made.spans[1], "image")
    assert made.beyond(made.tokens, [page] * made.chunks) is None
    assert made.beyond(400_020, [page]) == f"window of 400020 tokens; certified up to {made.tokens}"
    assert "chunks; certified up to" in (made.beyond(made.tokens, [page] * (made.chunks + 1)) or "")


def test_growing_bounds_of_survivors_are_running_maxima():
    table = {(slides, behind): slides / 10 + behind / 100 for slides, behind in itertools.product((1, 4), (3, 7))}
    made = certificate(*(row("survivor", slides, bound, behind) for (slides, behind), bound in table.items()), chunks=8)
    growing = made.growing("survivor", 2, "forget", 9)
    assert growing == [table[4, 3]] * 4 + [table[4, 7]] * 4
    assert made.growing("survivor", 5, "forget", 9) == []
