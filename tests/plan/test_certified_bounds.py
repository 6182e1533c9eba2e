"""A certificate bounds what was measured, for its own weights and windows, and a damaged or hostile one is refused."""
# pyright: reportArgumentType=false

import dataclasses
import functools
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.cache import SURVIVOR_WAYS
from kvpatch_jax.errors import InputError
from kvpatch_jax.plan import Certificate, CertifiedPlan, Losses
from tests.shared.certificates import BACKBONE, certificate, row

GRID = {("stored", 8): {0: 0.5, 3: 2.0}, ("stored", 16): {0: 0.2, 3: 0.9}, ("bare", 0): {0: 3.0, 3: 5.0}}


def test_a_bound_is_the_worst_of_the_rows_around_it():
    """Against a search over all rows, in every place of random grids; beyond them nothing is bounded."""
    draw = random.Random(5)
    for _ in range(50):
        ranks = sorted(draw.sample(range(1, 40), 4))
        others = sorted(draw.sample(range(6), 2))
        table = {rank: {behind: draw.random() for behind in others} for rank in ranks}
        made = certificate({("stored", rank): bounds for rank, bounds in table.items()})
        for rank in range(45):
            growing, highest = list[float](), 0.0
            for behind in range(8):
                bound = made.bound("stored", rank, behind=behind)
                if rank < ranks[0] or behind > others[-1]:
                    assert bound is None
                    continue
                lower = max(measured for measured in ranks if measured <= rank)
                upper = min((measured for measured in ranks if measured >= rank), default=lower)
                more = min(measured for measured in others if measured >= behind)
                fewer = max((measured for measured in others if measured <= behind), default=more)
                assert bound == max(table[r][b] for r in (lower, upper) for b in (fewer, more))
                highest = max(highest, bound)
                growing.append(highest)
            assert made.growing("stored", rank, "forget", 7) == growing
    assert certificate().growing("prefill", 0, "forget", 2) == [0.0, 0.0, 0.0]


def test_only_exact_and_promised_points_are_bounded_unmeasured():
    made = certificate({("bare", 0, "forget"): [0.5], ("survivor", 2, "forget"): {3: 0.5}})
    assert [made.bound(point, 16) for point in ("orbit", "stored")] == [None, None]
    assert made.bound("bare", promise="remember") is None
    assert [made.bound(point, behind=99) for point in ("leading", "prefill")] == [0.0, 0.0]
    assert made.bound("survivor", promise="remember", behind=99) == 0.0
    gap = certificate({("stored", 8): [0.5], ("stored", 16): {3: 0.5}})
    assert [gap.bound("stored", rank) for rank in (8, 12, 16)] == [0.5, None, None]


def test_survivors_take_the_worse_of_the_neighbouring_slides():
    made = certificate({("survivor", slides): {3: bound} for slides, bound in ((1, 0.1), (2, 0.4), (8, 0.3))})
    bounds = {slides: made.bound("survivor", slides, behind=3) for slides in (1, 2, 3, 8, 9, 400)}
    assert bounds == {1: 0.1, 2: 0.4, 3: 0.4, 8: 0.3, 9: None, 400: None}
    assert made.bound("survivor", 2, behind=4) is None
    # Whoever does not know how often a window slid gets no better bound than from any row.
    assert made.bound("survivor", behind=3) == Losses(made, "forget", 8).kl(SURVIVOR_WAYS, 3) == 0.4
    gap = certificate({("survivor", 1): {3: 0.1}, ("survivor", 2): {7: 0.1}})
    assert [gap.bound("survivor", slides, behind=3) for slides in (1, 2, 0)] == [0.1, None, None]


def test_mixed_windows_have_the_worst_bound_of_their_chunks():
    made = certificate(GRID | {("near", 0): {0: 0.4, 3: 0.4}, ("mean", 0): {0: 0.1, 3: 0.1}})
    exact, stored, bare, near, mean = ("leading", 0), ("stored", 16), ("bare", 0), ("near", 0), ("mean", 0)
    for served, bound in (
        ([], 0.0),
        ([exact, exact], 0.0),
        ([exact, stored], 0.2),
        ([stored, exact], 0.9),  # what is prefilled behind it counts
        ([exact, stored, bare], 5.0),
        ([exact, mean, ("prefill", 0), near], 0.4),
        ([stored] * 4, 0.9),
        ([stored] * 5, None),
        ([exact, ("orbit", 16)], None),
        ([("survivor", 0)], None),
    ):
        assert made.together(served) == bound, served
    assert made.together([("survivor", 0)] * 9, promise="remember") == 0.0


def test_windows_beyond_the_measured_ones_are_reported():
    made = certificate(GRID, tokens=200, chunks=4, spans=(4, 40), modalities=("image",))
    page = (9, "image")
    for tokens, chunks, reason in (
        (200, [page] * 3 + [(None, "image")], None),
        (201, [page], "window of 201 tokens; certified up to 200"),
        (200, [page] * 5, "window of 5 chunks; certified up to 4"),
        (200, [page, (41, "image")], "chunk that spans 41 positions; certified from 4 to 40"),
        (200, [(3, "image")], "chunk that spans 3 positions; certified from 4 to 40"),
        (200, [page, (9, "text")], "chunk of text; certified of image"),
        (200, [(9, None)], "chunk of a modality that nobody said; certified of image"),
    ):
        assert made.beyond(tokens, chunks) == reason


@pytest.fixture
def made() -> Certificate:
    numbers = (0.1, 1e-300, 1 / 3, 2.5e-7, 5e-324, 12345.678)
    rows = [row("stored", place + 1, 0, bound) for place, bound in enumerate(numbers)]
    rows.append(row("bare", 0, 0, 0.5, eta=None))
    plans = (CertifiedPlan("a plan", 0.1, 32, 320, 0.5, 0.97, 0.9, 1.0),)
    return certificate(rows=tuple(rows), plans=plans, content='pictures of Zürich\n"quoted", \u2028 odd')


def test_a_written_certificate_is_read_back_equal_for_its_weights(tmp_path: Path, made: Certificate):
    path = made.write(tmp_path / "certificate.json")
    for place, backbone in ((path, BACKBONE), (str(path), None)):
        again = Certificate.read(place, backbone=backbone)
        assert again == made
        assert again.digest == made.digest == json.loads(path.read_text())["digest"]
    assert [file.name for file in tmp_path.iterdir()] == ["certificate.json"]
    assert dataclasses.replace(made, level=0.9).digest != made.digest
    with pytest.raises(InputError, match="other weights"):
        Certificate.read(path, backbone="e" * 64)
    text = made.to_json()
    assert "0.95" in text
    for damaged in (text.replace("0.95", "0.96", 1), text[:999]):
        with pytest.raises(InputError, match=r"certificate.*got"):
            Certificate.from_json(damaged, backbone=BACKBONE)


def forged(made: Certificate, change: Any) -> str:
    """Returns a changed certificate with a matching digest, as another program might write it."""
    saved = json.loads(made.to_json())
    body = saved["certificate"]
    change(body)
    tables = {}
    for name in ("rows", "plans"):
        columns, *rows = body[name] or [[]]
        tables[name] = [dict(zip(columns, row, strict=True)) for row in rows]
    text = json.dumps(body | tables, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    saved["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return json.dumps(saved)


CELLS = [("kl_bound", "0.1"), ("kl_bound", -0.1), ("kl_bound", None), ("kl", 9e9), ("coverage", 0.2), ("rank", True)]
CELLS += [("rank", 10**30), ("rank", 2), ("answers", 0), ("point", "stale"), ("promise", "both"), ("flips_high", 0.001)]
FIELDS: list[dict[str, Any]] = [
    {"recommended": {"rank": 16}},
    {"more": 1},
    {"rows": []},
    {"backbone": ""},
    {"level": 1},
]
FIELDS += [{"model": "x" * 3000}, {"calibration": 0}, {"spans": [4]}, {"spans": [5, 4]}, {"modalities": [3]}]


def test_values_are_checked_although_the_digest_matches(unchecked, made: Certificate):
    assert Certificate.from_json(forged(made, lambda body: None), backbone=BACKBONE) == made
    changes: list[Callable[[Any], Any]] = [functools.partial(dict.update, **fields) for fields in FIELDS]
    for name, value in CELLS:
        changes.append(
            lambda body, name=name, value=value: body["rows"][1].__setitem__(body["rows"][0].index(name), value)
        )
    changes += [lambda body: body["rows"].append(body["rows"][1]), lambda body: body.pop("model")]
    changes += [lambda body: body["rows"].extend(body["rows"][1:] * 5000)]
    for change in changes:
        with pytest.raises(InputError, match="expected"):
            Certificate.from_json(forged(made, change), backbone=BACKBONE)
    for point, rank, more in (
        *(("guess", 8, {}), ("stored", -1, {}), ("stored", 8, {"behind": -1}), ("stored", 8, {"promise": "hope"})),
    ):
        with pytest.raises(InputError, match="expected"):
            certificate(GRID).bound(point, rank, **more)


def test_hostile_files_are_refused(unchecked, made: Certificate, tmp_path: Path):
    text = made.to_json()
    hostile: list[Any] = [None, "", b"\xff\xfe\x00", "null", "{}", "[" * 100_000, "9" * 5_000]
    hostile += [text.replace("kvpatch certificate", "kvpatch window"), text.replace('"a model"', '"\\ud800"')]
    hostile += [text.replace('"version": 1', f'"version": {version}') for version in ("2", '1, "version": 1')]
    hostile += [text.replace("0.95", "NaN", 1), text.replace('["point", "rank"', '["rank", "rank"', 1)]
    for content in hostile:
        assert content != text
        with pytest.raises(InputError, match="certificate"):
            Certificate.from_json(content, backbone=BACKBONE)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", (4 << 20) + 1)
    for name in ("missing", "pipe", "large"):
        with pytest.raises(InputError, match="expected"):
            Certificate.read(tmp_path / name, backbone=BACKBONE)
