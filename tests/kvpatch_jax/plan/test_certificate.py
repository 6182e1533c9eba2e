"""Certificates: what they vouch for between and beyond what was measured, and files that are damaged or hostile."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import CertificateError
from kvpatch_jax.plan import Certificate, CertifiedLoss, CertifiedPlan, RankChoice

BACKBONE = "0123456789abcdef" * 2


def row(point: str = "stored", rank: int = 8, bound: float = 0.5, **more: Any) -> CertifiedLoss:
    """A row of which only what is named matters."""
    given: dict[str, Any] = {
        "point": point,
        "rank": rank,
        "behind": 0,
        "promise": "forget",
        "kl": bound / 4,
        "kl_low": bound / 8,
        "kl_high": bound / 2,
        "kl_bound": bound,
        "coverage": 0.96,
        "coverage_low": 0.9,
        "coverage_high": 0.99,
        "eta": 0.9,
        "flips": 0.01,
        "flips_high": 0.02,
        "answers": 100,
    }
    return CertifiedLoss(**given | more)


def certificate(*rows: CertifiedLoss, **more: Any) -> Certificate:
    given: dict[str, Any] = {
        "backbone": BACKBONE,
        "model": "a model",
        "made": "2026-01-31",
        "level": 0.95,
        "calibration": 32,
        "held_out": 32,
        "chunks": 4,
        "tokens": 200,
        "content": "pictures",
        "asked": "ten questions",
        "disjoint": True,
        "spans": (4, 40),
        "modalities": ("image",),
        "rows": rows or (row(),),
        "recommended": RankChoice(16, "it is enough"),
    }
    return Certificate(**given | more)


GRID = [
    row(rank=8, bound=0.5),
    row(rank=16, bound=0.2),
    row(rank=32, bound=0.3),  # noise: more than at 16
    row(rank=8, bound=2.0, behind=3),
    row(rank=16, bound=0.9, behind=3),
    row(rank=32, bound=0.4, behind=3),
]
PLAN = CertifiedPlan("a plan", 0.1, 32, 320, 0.5, 0.97, 0.9, 1.0)


# ------------------------------------------------------------------------------------------------------- lookups


@pytest.mark.parametrize(
    ("rank", "behind", "expected"),
    [
        (8, 0, 0.5),
        (12, 0, 0.5),  # the worse neighbour
        (16, 0, 0.2),
        (24, 0, 0.3),  # the worse neighbour, which is the larger rank
        (64, 0, 0.3),
        (7, 0, None),  # below all that was measured
        (0, 0, None),
        (16, 1, 0.9),  # one other: at most as bad as three others
        (12, 2, 2.0),
        (16, 3, 0.9),
        (16, 4, None),  # more than were measured
    ],
)
def test_between_measured_values_the_worse_neighbour_bounds(rank, behind, expected):
    assert certificate(*GRID).bound("stored", rank, behind=behind) == expected


def test_a_bound_is_never_below_the_rows_around_it():
    """Against a search over all rows, in every place of random grids."""
    draw = random.Random(5)
    for _ in range(50):
        ranks = sorted(draw.sample(range(1, 40), 4))
        others = sorted(draw.sample(range(6), 2))
        table = {(rank, behind): draw.random() for rank in ranks for behind in others}
        made = certificate(*(row(rank=rank, behind=behind, bound=bound) for (rank, behind), bound in table.items()))
        for rank in range(45):
            for behind in range(8):
                found = made.bound("stored", rank, behind=behind)
                if rank < ranks[0] or behind > others[-1]:
                    assert found is None
                    continue
                lower = max(own for own in ranks if own <= rank)
                upper = min((own for own in ranks if own >= rank), default=lower)
                more = min(own for own in others if own >= behind)
                fewer = max((own for own in others if own <= behind), default=more)
                assert found == max(table[r, b] for r in (lower, upper) for b in (fewer, more))


def test_growing_bounds_are_running_maxima():
    generator = random.Random(4)
    for _ in range(200):
        behinds = sorted(generator.sample(range(12), generator.randint(1, 4)))
        table = itertools.product((4, 16), behinds)
        rows = [row(rank=rank, behind=behind, bound=generator.uniform(0, 2)) for rank, behind in table]
        certified = certificate(*rows)
        for rank, most in itertools.product((2, 4, 9, 16, 20), (0, 3, 14)):
            expected: list[float] = []
            for others in range(most + 1):
                number = certified.bound("stored", rank, behind=others)
                if number is None:
                    break
                expected.append(max([number, *expected]))
            assert certified.growing("stored", rank, "forget", most) == expected
    assert certificate().growing("prefill", 0, "forget", 2) == [0.0, 0.0, 0.0]


def test_unmeasured_points_have_no_bound_and_exact_ones_lose_nothing():
    made = certificate(row("bare", 0), row("survivor", 2, behind=3))
    assert made.bound("orbit", 16) is None
    assert made.bound("stored", 16) is None
    assert made.bound("bare", promise="remember") is None
    for point in ("leading", "prefill"):
        assert made.bound(point, behind=99) == 0.0
    assert made.bound("survivor") == 0.5  # measured with three others alone
    assert made.bound("survivor", promise="remember", behind=99) == 0.0
    assert made.row("bare") is made.rows[0]
    assert made.row("bare", 1) is None


def test_a_missing_row_leaves_its_neighbourhood_unbounded():
    made = certificate(row(rank=8), row(rank=16, behind=3))
    assert made.bound("stored", 8) == 0.5
    assert made.bound("stored", 12) is None
    assert made.bound("stored", 16) is None


def test_mixed_windows_have_the_worst_bound_of_their_chunks():
    made = certificate(*GRID, row("bare", 0, 3.0), row("bare", 0, 5.0, behind=3))
    exact, stored, bare = ("leading", 0), ("stored", 16), ("bare", 0)
    assert made.together([]) == 0.0
    assert made.together([exact, exact]) == 0.0
    assert made.together([exact, stored]) == 0.2
    assert made.together([stored, exact]) == 0.9  # what is prefilled behind it counts
    assert made.together([exact, stored, bare]) == 5.0
    assert made.together([stored] * 4) == 0.9
    assert made.together([stored] * 5) is None
    assert made.together([exact, ("orbit", 16)]) is None
    assert made.together([("survivor", 0)] * 9, promise="remember") == 0.0
    assert made.together([("survivor", 0)]) is None


@pytest.mark.parametrize(
    ("point", "rank", "more"),
    [("guess", 8, {}), ("stored", -1, {}), ("stored", True, {}), ("stored", 8.0, {}), ("stored", 8, {"behind": -1})],
)
def test_bounds_of_unknown_points_are_refused(unchecked, point, rank, more):
    with pytest.raises(CertificateError, match="expected"):
        certificate(*GRID).bound(point, rank, **more)
    with pytest.raises(CertificateError, match="'hope'"):
        certificate(*GRID).bound("stored", 8, promise="hope")  # pyright: ignore[reportArgumentType]


def test_windows_beyond_the_measured_ones_are_reported():
    made = certificate(*GRID)
    page = (9, "image")
    assert made.beyond(200, [page] * 4) is None
    assert made.beyond(12, [(4, "image"), (40, "image"), (None, "image")]) is None
    said = {
        "window of 400020 tokens; certified up to 200": made.beyond(400_020, [page]),
        "window of 5 chunks; certified up to 4": made.beyond(200, [page] * 5),
        "chunk that spans 41 positions; certified from 4 to 40": made.beyond(200, [page, (41, "image")]),
        "chunk that spans 3 positions; certified from 4 to 40": made.beyond(200, [(3, "image")]),
        "chunk of text; certified of image": made.beyond(200, [page, (9, "text")]),
        "chunk of a modality that nobody said; certified of image": made.beyond(200, [(9, None)]),
    }
    assert {said: found for said, found in said.items() if said != found} == {}


# ---------------------------------------------------------------------------------------------- what it may say


def test_eta_may_be_undefined():
    made = certificate(row(eta=None))
    assert Certificate.from_json(made.to_json(), backbone=BACKBONE).rows[0].eta is None


# ------------------------------------------------------------------------------------------------------- as files


@pytest.fixture
def made() -> Certificate:
    numbers = [0.1, 1e-300, 1 / 3, 2.5e-7, 5e-324, 12345.678]
    rows = [row(rank=place + 1, bound=bound) for place, bound in enumerate(numbers)]
    return certificate(*rows, plans=(PLAN,), content='pictures of Zürich\n"quoted", \u2028 odd')


def test_a_written_certificate_is_read_back_equal(tmp_path: Path, made: Certificate):
    path = made.write(tmp_path / "certificate.json")
    found = Certificate.read(path, backbone=BACKBONE)
    assert found == made
    assert found.digest == made.digest == json.loads(path.read_text())["digest"]
    assert [file.name for file in tmp_path.iterdir()] == ["certificate.json"]
    assert Certificate.read(str(path), backbone=None) == made
    other = dataclasses.replace(made, level=0.9)
    assert other.digest != made.digest
    assert "6 rows" in repr(made)


def test_a_certificate_of_other_weights_is_refused(made: Certificate):
    with pytest.raises(CertificateError, match="other weights"):
        Certificate.from_json(made.to_json(), backbone="f" * 32)


def test_every_flip_and_cut_is_detected(made: Certificate):
    """Bytes changed and files cut short: damage, or (of white space, of 1E-7) the very same certificate."""
    whole = made.to_json().encode()
    draw, same = random.Random(1), 0
    places = range(0, len(whole), 3)
    for place in places:
        changed = whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :]
        try:
            assert Certificate.from_json(changed, backbone=BACKBONE) == made
            same += 1
        except CertificateError:
            continue
    assert same < len(places) / 8
    for end in range(0, len(whole) - 2, 17):
        with pytest.raises(CertificateError):
            Certificate.from_json(whole[:end], backbone=BACKBONE)


def forged(made: Certificate, change: Any) -> str:
    """Returns a changed certificate with a matching digest, as another program might write it."""
    saved = json.loads(made.to_json())
    body = saved["certificate"]
    change(body)
    tables = {}
    for name in ("rows", "plans"):
        columns, *rows = body[name] or [[]]
        tables[name] = [dict(zip(columns, row, strict=True)) for row in rows]
    whole = json.dumps(body | tables, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    saved["digest"] = hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()
    return json.dumps(saved)


def set_cell(name: str, value: Any) -> Callable[[Any], None]:
    """Returns a change of one value of the first row."""

    def change(body: Any) -> None:
        body["rows"][1][body["rows"][0].index(name)] = value

    return change


CELLS = [("kl_bound", 0), ("kl_bound", "0.1"), ("kl_bound", -0.1), ("kl_bound", None), ("kl", 9e9), ("coverage", 0.2)]
CELLS += [("rank", True), ("rank", 10**30), ("rank", -8), ("rank", 2), ("answers", 0), ("point", "stale")]
CELLS += [("promise", "both"), ("flips_high", 0.001), ("behind", 1.0)]
FIELDS: list[dict[str, Any]] = [
    {"recommended": {"rank": 16}},
    {"recommended": {"rank": 0, "reason": "why"}},
    {"more": 1},
]
FIELDS += [{"rows": []}, {"backbone": ""}, {"model": "x" * 3000}, {"level": 1}, {"calibration": 0}, {"disjoint": 1}]
FIELDS += [{"spans": spans} for spans in ([4], [5, 4], [0, 4], [1.0, 4], None, "ab")]
FIELDS += [{"modalities": words} for words in ([], "image", [3], ["a"] * 99)]


@pytest.mark.parametrize(
    "change",
    [
        *(set_cell(*cell) for cell in CELLS),
        *(functools.partial(dict.update, **fields) for fields in FIELDS),
        lambda body: body["rows"].append(body["rows"][1]),
        lambda body: body["rows"].extend(body["rows"][1:] * 5000),
        lambda body: body.pop("model"),
    ],
)
def test_values_are_checked_although_the_digest_matches(unchecked, made: Certificate, change):
    assert Certificate.from_json(forged(made, lambda body: None), backbone=BACKBONE) == made
    with pytest.raises(CertificateError, match="expected"):
        Certificate.from_json(forged(made, change), backbone=BACKBONE)


def test_hostile_json_is_refused(unchecked, made: Certificate):
    whole = made.to_json()
    hostile: list[Any] = [
        "",
        b"\xff\xfe\x00",
        "null",
        "[]",
        "7",
        "{}",
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5_000,
        whole.replace("kvpatch certificate", "kvpatch window"),
        whole.replace('"version": 1', '"version": 2'),
        whole.replace('"version": 1', '"version": true'),
        whole.replace('"version": 1', '"version": 1.0'),
        whole.replace('"version": 1', '"version": 1, "version": 1'),
        whole.replace("0.95", "NaN", 1),
        whole.replace("0.95", "1e999", 1),
        whole.replace("0.95", "-Infinity", 1),
        whole.replace('"a model"', '"\\ud800"'),
        whole.replace('"rows": [', '"rows": {"a": [').replace("\n ]", "]}"),
        whole.replace('["point", "rank"', '["rank", "rank"', 1),
        whole.replace('["point", "rank"', '[["point"], "rank"', 1),
        made,
        None,
    ]
    for text in hostile:
        with pytest.raises(CertificateError):
            Certificate.from_json(text, backbone=BACKBONE)


def test_unusual_files_are_refused_without_hanging(tmp_path: Path, made: Certificate):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", (4 << 20) + 1)
    for name in ("missing", "pipe", "large", "", "missing/either"):
        with pytest.raises(CertificateError, match="expected"):
            Certificate.read(tmp_path / name, backbone=BACKBONE)
    with pytest.raises(CertificateError, match="No such file"):
        made.write(tmp_path / "missing" / "certificate.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CertificateError, match="directory"):
        made.write(tmp_path / "folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "large", "pipe"]


def test_the_package_exports_certificates():
    assert kvp.Certificate is Certificate
