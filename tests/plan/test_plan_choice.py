"""A plan is the quickest of all selections that its goal and certificate allow, and states its true totals."""
# pyright: reportArgumentType=false

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.plan import DeviceCosts, Goal, Inventory, Rates, plan
from kvpatch_jax.window import BARE, PREFILL, Action, Entry, PatchNote, Promise, Service, Window, from_json, to_json
from tests.plan.plan_cases import (
    BACKBONE,
    DEVICES,
    PRICES,
    RANKS,
    Shelf,
    certificate,
    check_totals,
    entries_of,
    entry,
    filled,
    note,
    planned,
    points,
    stocked,
    within,
)
from tests.shared.examples import examples

# ----------------------------------------------------------------------------------------------- every selection


rows = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5).map(sorted)


def seconds(kind: str, bytes: int, flops: int) -> float:
    launch, flop, byte = DEVICES.kinds[kind]
    return launch + flops * flop + bytes * byte


def menu_of(index: int, entries: list[Entry], ranks: Sequence[int], bare: bool) -> list[tuple[str, int, float]]:
    """All ways of serving a piece: (point, rank, seconds)."""
    tokens, behind = entries[index].tokens, sum(other.tokens for other in entries[:index])
    flops = PRICES.forward.flops(tokens, behind) + PRICES.forward.logit
    options = [("prefill", 0, seconds("prefill", PRICES.forward_bytes(tokens, behind), flops))]
    copied, turning = 2 * PRICES.kv_bytes * tokens, 3 * PRICES.rotary * tokens
    fetch = seconds("fetch", PRICES.kv_bytes * tokens, 0)
    if bare or ranks:
        options.append(("bare", 0, seconds("copy", copied, turning) + fetch))
    for rank in ranks:
        patched = seconds("patch", copied + 40 * rank, turning + 6 * rank * tokens)
        options.append(("stored", rank, patched + fetch + seconds("fetch", 40 * rank, 0)))
    return options


@examples(200)
@given(data=st.data())
def test_no_allowed_selection_is_quicker(data: st.DataObject):
    """Against all choices of up to five pieces, bounded as the certificate itself bounds them."""
    entries = [entry(number, data.draw(st.integers(1, 60))) for number in range(data.draw(st.integers(1, 5)))]
    stock, menus = stocked(), []
    for index, chunk in enumerate(entries):
        # At the front nothing conditions a chunk.
        ranks = data.draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=2)) if index else []
        bare = data.draw(st.booleans())
        stock.add(*(note(chunk, entries[:index], rank) for rank in ranks), *([chunk] if bare or ranks else []))
        menus.append(menu_of(index, entries, ranks, bare))
    known = data.draw(st.dictionaries(st.sampled_from([("bare", 0), *(("stored", rank) for rank in RANKS)]), rows))
    signed = certificate(known) if known else None
    goal = Goal("certified" if signed else "exact", data.draw(st.floats(0.0, 1.0)))

    allowed = []
    for choice in itertools.product(*menus):
        served = [(point, rank) for point, rank, _ in choice]
        approximate = any(point != "prefill" for point, _ in served)
        bound = (None if signed is None else signed.together(served)) if approximate else 0.0
        if bound is not None and bound <= goal.kl:
            allowed.append(sum(option[2] for option in choice))

    made = planned(Window.empty(BACKBONE), entries, goal, stored=stock, certificate=signed)
    assert made.seconds == pytest.approx(min(allowed), rel=1e-9)
    assert made.kl is not None
    assert made.kl <= goal.kl
    served = [(chunk.point, chunk.rank) for chunk in made.chunks]
    bound = 0.0 if signed is None else signed.together(served)
    assert bound is not None
    assert made.kl <= bound + 1e-12
    check_totals(made)


@given(data=st.data(), promise=st.sampled_from(["remember", "forget"]))
def test_consecutive_plans_keep_their_totals_and_bounds(data: st.DataObject, promise: Promise):
    """Windows that slide, reorder and recall, some pieces by patches: totals, words, and what was bounded before."""
    entries = [entry(number) for number in range(6)]
    window = filled(3, promise=promise)
    losses = {("stored", 4): 0.1, ("orbit", 4): 0.2, ("bare", 0): 0.9, ("survivor", 1): 0.3}
    signed = certificate({way: [bound] * 8 for way, bound in losses.items()})
    for _ in range(4):
        chosen = data.draw(st.lists(st.sampled_from(entries[1:]), unique=True, min_size=1))
        stock, front = stocked(*entries), [entries[0], *chosen]
        for place, chunk in enumerate(front):
            if data.draw(st.booleans()):
                stock.add(note(chunk, front[:place], 4, orbit=data.draw(st.booleans())))
        highest = data.draw(st.sampled_from([0.0, 0.15, 0.25, 1.0]))
        made: Any = planned(window, chosen, within(highest), stored=stock, certificate=signed)
        assert entries_of(made.window) == front
        assert made.kl is not None
        assert made.kl <= highest
        check_totals(made)
        assert len(made.explain().splitlines()) == 1 + len(front)
        assert made.as_promised == (made.kl == 0.0 and not any(standing.ways for standing in made.window.standings))
        # No piece is of unknown loss where the plan states a bound.
        assert all(("", 0) not in standing.ways for standing in made.window.standings)
        window = made.window


# --------------------------------------------------------------------------------------------------------------- scenes


A, B, C, D, E = ENTRIES = [entry(number, 50) for number in range(5)]
STOCK = stocked(*ENTRIES, note(C, [A, B]), note(D, [B]))
ORBIT = stocked(*ENTRIES, note(C, [A, B]), note(C, [A, B], orbit=True))
SECOND = stocked(*ENTRIES, note(B, [A]))
SIGNED = certificate({("stored", 4): [0.2] * 5, ("orbit", 4): [0.3] * 5})
GROWING = certificate({("stored", 4): [0.2, 0.3]})
BY_RANK = certificate({("stored", 2): [0.5] * 4, ("stored", 8): [0.05] * 4})
SLID = certificate({("survivor", 1): [0.3] * 4})
SLID_LESS = certificate({("survivor", 1): [0.1, 0.4]})  # the lower bound is that of the last piece alone
REMEMBERED = certificate({("bare", 0, "remember"): [0.3] * 4, ("bare", 0, "forget"): [0.1] * 4})
PATCHED, BLIND = Goal("patched"), Goal("blind")


class Fronts(Shelf):
    """A stock whose canonicals may serve in front, which a window takes only of a piece that comes in."""

    def canonical(self, entry: Entry, leading: bool = False) -> bool:
        return entry in self.items


class Restoring(Shelf):
    """A stock with any prefill of the last chunk."""

    def prefill(self, entry: Entry, made: str) -> bool:
        return entry.id == "c3"


def window_of(*entries: Entry, stock: Shelf = STOCK, promise: Promise = "remember") -> Window:
    window = Window.empty(BACKBONE, promise=promise)
    return planned(window, entries, within(0.5), stored=stock, certificate=SIGNED).window


def turned() -> Window:
    """The chunks in front of a patched one come back in the order that its patch was formed behind."""
    window = Window.empty(BACKBONE, lead=0).append(A).append(B)
    window = window.append(C, Service("patch", note(C, [A, B], orbit=True))).reorder(["c1", "c0"])
    return window.serve({id: PREFILL for id in ("c1", "c0")})


def formed_behind_another_patch() -> Window:
    """A chunk left: the first patch stands for what saw it, and the second was formed behind just that."""
    window = filled(2)
    for number, rank in ((2, 2), (3, 8)):
        chunk, behind = entry(number), window.target()
        patch = PatchNote(f"{number}", chunk.id, chunk.content, "canonical", behind, None, False, rank, 9, 9)
        window = window.append(chunk, Service("patch", patch))
    return window.evict("c1")


class Scene(NamedTuple):
    """A window, the entries of its next plan, and the points and the bound that the plan has."""

    window: Window
    entries: list[Entry]
    goal: Goal
    signed: Any
    points: str
    kl: float | None
    stock: Shelf = STOCK
    beyond: str | None = None


def scenes() -> dict[str, Scene]:
    run_again, patches = "leading prefill prefill", formed_behind_another_patch()
    pair, patch = window_of(A, B), window_of(A, B, C)
    behind = window_of(A, B, C, D)
    unseen = filled(3).insert(entry(7), "c1").append(entry(3)).append(entry(4)).evict("c7", "c2", "c1")
    front = filled(2, lead=0).serve({"c1": BARE}).evict("c0")
    changed = filled(4).evict("c1").serve({"c2": Service("patch", note(entry(2), [entry(0)]), allow_stale=True)})
    survivors = filled(3, promise="forget").evict("c1").append(entry(3)).append(entry(4)).evict("c3")
    restored = filled(1, lead=0).serve({"c0": BARE}).append(entry(1)).append(entry(2)).evict("c1")
    rest = [entry(0), entry(2), entry(3)]
    table = {
        "nothing uncertified is asked for": Scene(
            pair, ENTRIES[:4], Goal(), None, "leading leading prefill prefill", 0.0
        ),
        "patched": Scene(pair, ENTRIES[:4], PATCHED, None, "leading leading stored prefill", None),
        "certified": Scene(pair, ENTRIES[:4], within(0.3), GROWING, "leading leading stored prefill", 0.3),
        # One is prefilled behind it.
        "beyond the goal": Scene(pair, ENTRIES[:4], within(0.25), GROWING, "leading leading prefill prefill", 0.0),
        "a patch stays": Scene(patch, [A, B, C], within(0.5), SIGNED, "leading leading stored", 0.2),
        # Nothing says how far a patch is off behind another chunk.
        "stale": Scene(patch, [A, B, D, C], within(0.5), SIGNED, "leading leading prefill prefill", 0.0),
        "the patch has left": Scene(behind, [A, B, D], within(0.5), SIGNED, "leading leading kept", 0.2),
        "a patch fits again": Scene(turned(), [B, A, C], within(0.3), SIGNED, "leading leading orbit", 0.3, ORBIT),
        "unseen": Scene(unseen, entries_of(unseen), Goal(), None, run_again, 0.0),
        "unseen, kept": Scene(unseen, entries_of(unseen), PATCHED, None, "leading kept kept", None),
        "first, exactly": Scene(front, entries_of(front), Goal(), None, "prefill", 0.0, Fronts(entry(1))),
        "first, blind": Scene(front, entries_of(front), BLIND, None, "bare", None, Fronts(entry(1))),
        # The piece in front of a survivor is approximate: what the window remembers bounds it.
        "restored": Scene(restored, rest, within(0.3), REMEMBERED, "bare kept restored", 0.3, Restoring()),
        # What c3 has seen remembered a chunk that has left, and does not any more.
        "changed in front": Scene(changed, entries_of(changed), Goal(), None, run_again, 0.0),
        "survivors": Scene(survivors, entries_of(survivors), within(0.4), SLID_LESS, "leading survivor survivor", 0.4),
        "formed behind another": Scene(patches, rest, within(0.5), BY_RANK, "leading stored prefill", 0.5),
    }
    promises: tuple[tuple[Promise, float], ...] = (("remember", 0.2), ("forget", 0.0))
    for promise, kl in promises:
        window = window_of(A, B, C, stock=SECOND, promise=promise)
        for entries, served, bound in (
            ([A, B, C], "leading stored kept", 0.2),
            ([A, B, D, C], "leading stored prefill prefill", 0.2),
            ([A, C], "leading kept" if kl else "leading prefill", kl),
        ):
            name = f"{promise} {' '.join(chunk.id for chunk in entries)}"
            table[name] = Scene(window, entries, within(0.5), SIGNED, served, bound, SECOND)
    # Survivors of a slide lose far more where nothing is pinned, and certificates are measured with a lead.
    for lead, served, bound, reason in (
        (1, "leading survivor survivor", 0.3, None),
        (0, "prefill prefill prefill", 0.0, "window whose first tokens have left; certified with them pinned"),
    ):
        window = filled(4, promise="forget", lead=lead).evict("c1" if lead else "c0")
        table[f"lead of {lead}"] = Scene(window, entries_of(window), within(0.5), SLID, served, bound, beyond=reason)
    for name, limit, reason in (
        ("tokens", 20, f"window of {A.tokens + B.tokens + C.tokens} tokens; certified up to 20"),
        ("modalities", ("image",), "chunk of text; certified of image"),
    ):
        signed, exact = dataclasses.replace(SIGNED, **{name: limit}), "leading leading prefill"
        table[f"beyond the {name}"] = Scene(pair, [A, B, C], within(0.5), signed, exact, 0.0, beyond=reason)
    return table


def test_scenes_are_served_by_their_points_within_their_bounds():
    """In the window, in a fork of it, and in what JSON makes of it."""
    for name, scene in scenes().items():
        for window in (scene.window, scene.window.fork("side"), from_json(to_json(scene.window), BACKBONE)):
            made = planned(window, scene.entries, scene.goal, stored=scene.stock, certificate=scene.signed)
            assert (points(made), made.kl) == (scene.points.split(), scene.kl), name
            assert made.as_promised == (scene.kl == 0.0), name
            assert made.beyond == scene.beyond, name
            assert (f"uncertified: {scene.beyond}" in made.explain()) == (scene.beyond is not None), name
            check_totals(made)
    assert (
        planned(window_of(A, B, C), [A, B, C], within(0.5), stored=STOCK, certificate=SIGNED).certificate
        == SIGNED.digest
    )


# ----------------------------------------------------------------------------------------------------- arguments

EMPTY = Window.empty(BACKBONE)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"window": None}, r"plan\.window: got None"),
    ({"stored": {}}, r"plan\.stored: got \{\}"),
    ({"goal": 0.05}, r"plan\.goal: got 0.05"),
    ({"wanted": ["page"]}, r"plan\.wanted: got 'page'"),
    ({"costs": "costs.json"}, r"plan\.costs: got 'costs.json'"),
    ({"prices": None, "goal": Goal("certified")}, r"plan\.prices: got None"),
    ({"certificate": "certificate.json"}, r"plan\.certificate: got 'certificate.json'"),
    ({"certificate": certificate(backbone="e" * 64)}, "of backbone 'e+'"),
    ({"stored": Inventory(None, "e" * 64, None)}, "inventory of backbone 'e+'"),
    ({"goal": Goal("certified"), "certificate": None}, r"plan\.certificate: got None"),
]


def test_arguments_of_another_type_or_backbone_are_refused(unchecked):
    for changed, message in REFUSED:
        arguments = {"window": EMPTY, "wanted": [entry(0)], "goal": None, "stored": Inventory(None, BACKBONE, None)}
        arguments |= {"costs": DEVICES, "prices": PRICES} | changed
        first = [arguments.pop(word) for word in ("window", "wanted", "goal")]
        with pytest.raises(InputError, match=message + ".*expected"):
            plan(*first, **arguments)
    for field, value in (*(("kl", kl) for kl in (math.nan, -1, 10**400, "0.1", True)), ("reuse", "fast")):
        with pytest.raises(InputError, match=rf"goal\.{field}: got .*; expected"):
            Goal(**{field: value})
    assert not planned(EMPTY, []).chunks
    with pytest.raises(SessionError, match="twice"):
        planned(EMPTY, [entry(0), entry(0)])


def test_device_costs_are_read_back_and_damage_is_detected(tmp_path: Path):
    path = tmp_path / "costs.json"
    DEVICES.write(path)
    assert DeviceCosts.read(path, device="a desk") == DEVICES
    rotations = [Action("rotate", id, 5, 100, 10) for id in "ab"]
    assert DEVICES.seconds(rotations) == pytest.approx(1e-4 + 20 * 2e-7 + 200 * 3e-9)
    for place, device, message in ((path, "another", "of device"), (tmp_path / "none.json", None, "No such file")):
        with pytest.raises(InputError, match=message):
            DeviceCosts.read(place, device=device)
    text = path.read_text("utf-8")
    for damaged in (text[:-9], "[]", json.dumps({"format": "x"}), text.replace("2e-07", "-2e-07")):
        path.write_text(damaged)
        with pytest.raises(InputError, match="device costs"):
            DeviceCosts.read(path)
    DeviceCosts("x", None, {"teleport": Rates()}).write(path)
    with pytest.raises(InputError, match="'teleport'"):
        DeviceCosts.read(path)
