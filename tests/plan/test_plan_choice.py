"""A plan is the quickest of all selections that its goal and certificate allow, and states its true totals."""
# pyright: reportArgumentType=false

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.plan import DeviceCosts, Goal, Inventory, Plan, Rates, plan
from kvpatch_jax.window import (
    BARE,
    PREFILL,
    Action,
    Costs,
    Entry,
    PatchNote,
    Promise,
    Service,
    Window,
    from_json,
    to_json,
)
from tests.shared.certificates import BACKBONE, certificate
from tests.shared.examples import examples

PRICES = Costs(512, 256, 32, ForwardCosts((7, 9, 7, 9), (3, 5, 3, 5), (0, 12, 0, 12), 11))
KINDS = ("fetch", "rotate", "copy", "patch", "prefill")
DEVICES = DeviceCosts("a desk", "2026-11-22", {kind: Rates(1e-4, 2e-7, 3e-9) for kind in KINDS}, "invented")
RANKS = (2, 4, 8)


def entry(number: int, tokens: int = 5) -> Entry:
    return Entry(f"c{number}", f"content {number}", tokens + number % 3, tokens + number % 3, "chunk", True, "text")


def note(chunk: Entry, front: list[Entry], rank: int = 4, orbit: bool = False) -> PatchNote:
    behind = Antecedent(tuple(Member(other.id, other.content) for other in front))
    behind = behind.sorted() if orbit else behind
    digest = f"{chunk.id}.{rank}.{orbit}.{len(front)}"
    return PatchNote(digest, chunk.id, chunk.content, "canonical", behind, None, orbit, rank, 40 * rank, 6 * rank)


def filled(count: int, **options: Any) -> Window:
    window = Window.empty(BACKBONE, **options)
    for number in range(count):
        window = window.append(entry(number))
    return window


def entries_of(window: Window) -> list[Entry]:
    return [piece.entry for piece in window.pieces]


class Shelf(Inventory):
    """A stock of canonicals and of patches without arrays."""

    def __init__(self, *items: Entry | PatchNote):
        super().__init__(None, BACKBONE, None)
        self.items = list(items)

    def canonical(self, entry: Entry, leading: bool = False) -> bool:
        return not leading and entry in self.items

    def patches(self, entry: Entry, target: Antecedent) -> list[PatchNote]:
        notes = [item for item in self.items if isinstance(item, PatchNote) and item.chunk == entry.id]
        return [note for note in notes if note.antecedent.difference(target, note.orbit) is None]


def planned(window: Window, entries: Iterable[Entry], *goal: Any, **options: Any) -> Plan:
    return plan(window, entries, *goal, **{"stored": Shelf(), "costs": DEVICES, "prices": PRICES} | options)


def within(kl: float) -> Goal:
    return Goal("certified", kl)


def check_totals(made: Plan) -> None:
    """What is stated of the pieces agrees with what is stated of the plan, and with its window."""
    assert made.seconds == sum(chunk.seconds for chunk in made.chunks)
    assert made.window == made.before.arranged([chunk.entry for chunk in made.chunks], made.services)
    for chunk, standing in zip(made.chunks, made.window.standings, strict=True):
        assert chunk.fidelity == standing.fidelity
        if chunk.fidelity == "exact":
            assert chunk.point in ("leading", "prefill", "restored")
        if chunk.fidelity == "exact" or not standing.ways:
            assert chunk.kl == 0.0


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
    stock, menus = Shelf(), []
    for index, chunk in enumerate(entries):
        # At the front nothing conditions a chunk.
        ranks = data.draw(st.lists(st.sampled_from(RANKS), unique=True, max_size=2)) if index else []
        bare = data.draw(st.booleans())
        stock.items += [*(note(chunk, entries[:index], rank) for rank in ranks), *([chunk] if bare or ranks else [])]
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


A, B, C, D, E = ENTRIES = [entry(number, 50) for number in range(5)]
STOCK = Shelf(*ENTRIES, note(C, [A, B]), note(D, [B]))
ORBIT = Shelf(*ENTRIES, note(C, [A, B]), note(C, [A, B], orbit=True))
SECOND = Shelf(*ENTRIES, note(B, [A]))
SIGNED = certificate({("stored", 4): [0.2] * 5, ("orbit", 4): [0.3] * 5})
GROWING = certificate({("stored", 4): [0.2, 0.3]})
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
    run_again = "leading prefill prefill"
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
    reason, exact = f"window of {A.tokens + B.tokens + C.tokens} tokens; certified up to 20", "leading leading prefill"
    few = dataclasses.replace(SIGNED, tokens=20)
    table["beyond the tokens"] = Scene(pair, [A, B, C], within(0.5), few, exact, 0.0, beyond=reason)
    return table


def test_scenes_are_served_by_their_points_within_their_bounds():
    """In the window, in a fork of it, and in what JSON makes of it."""
    for name, scene in scenes().items():
        for window in (scene.window, scene.window.fork("side"), from_json(to_json(scene.window), BACKBONE)):
            made = planned(window, scene.entries, scene.goal, stored=scene.stock, certificate=scene.signed)
            assert ([chunk.point for chunk in made.chunks], made.kl) == (scene.points.split(), scene.kl), name
            assert made.as_promised == (scene.kl == 0.0), name
            assert made.beyond == scene.beyond, name
            assert (f"uncertified: {scene.beyond}" in made.explain()) == (scene.beyond is not None), name
            check_totals(made)


EMPTY = Window.empty(BACKBONE)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"wanted": ["page"]}, r"plan\.wanted: got 'page'"),
    ({"prices": None, "goal": Goal("certified")}, r"plan\.prices: got None"),
    ({"certificate": certificate(backbone="e" * 64)}, "of backbone 'e+'"),
    ({"stored": Inventory(None, "e" * 64, None)}, "inventory of backbone 'e+'"),
    ({"goal": Goal("certified"), "certificate": None}, r"plan\.certificate: got None"),
]


def test_arguments_of_another_type_or_backbone_are_refused(unchecked):
    for changed, message in REFUSED:
        arguments = {"wanted": [entry(0)], "stored": Shelf(), "costs": DEVICES, "prices": PRICES} | changed
        with pytest.raises(InputError, match=message + ".*expected"):
            plan(EMPTY, **arguments)
    for field, value in (("kl", math.nan), ("kl", -1), ("reuse", "fast")):
        with pytest.raises(InputError, match=rf"goal\.{field}: got .*; expected"):
            Goal(**{field: value})
    with pytest.raises(SessionError, match="twice"):
        planned(EMPTY, [entry(0), entry(0)])


def test_device_costs_are_read_back_and_damage_is_detected(tmp_path: Path):
    path = tmp_path / "costs.json"
    DEVICES.write(path)
    assert DeviceCosts.read(path, device="a desk") == DEVICES
    rotations = [Action("rotate", id, 5, 100, 10) for id in "ab"]
    assert DEVICES.seconds(rotations) == pytest.approx(1e-4 + 20 * 2e-7 + 200 * 3e-9)
    with pytest.raises(InputError, match="of device"):
        DeviceCosts.read(path, device="another")
    text = path.read_text("utf-8")
    for damaged in (text[:-9], "[]", '{"format": "x"}', text.replace("2e-07", "-2e-07")):
        path.write_text(damaged)
        with pytest.raises(InputError, match="device costs"):
            DeviceCosts.read(path)
