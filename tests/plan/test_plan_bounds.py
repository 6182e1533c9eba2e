"""What a plan may keep, patch or take bare, and what a certificate bounds of it: scenes, and how they are served."""

import dataclasses
from typing import Any, NamedTuple

import pytest

from kvpatch_jax.plan import Goal
from kvpatch_jax.window import BARE, PREFILL, Entry, PatchNote, Promise, Service, Window, from_json, to_json
from tests.plan.plan_cases import (
    BACKBONE,
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

A, B, C, D, E = ENTRIES = [entry(number, 50) for number in range(5)]
STOCK = stocked(*ENTRIES, note(C, [A, B]), note(D, [B]))
ORBIT = stocked(*ENTRIES, note(C, [A, B]), note(C, [A, B], orbit=True))
SECOND = stocked(*ENTRIES, note(B, [A]))
SIGNED = certificate({("stored", 4): [0.2] * 5, ("orbit", 4): [0.3] * 5})
GROWING = certificate({("stored", 4): [0.2, 0.3]})
RANKS = certificate({("stored", 2): [0.5] * 4, ("stored", 8): [0.05] * 4})
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


RUN_AGAIN, TWO_PATCHES = "leading prefill prefill", formed_behind_another_patch()
TWO, PATCH = window_of(A, B), window_of(A, B, C)
BEHIND = window_of(A, B, C, D)
UNSEEN = filled(3).insert(entry(7), "c1").append(entry(3)).append(entry(4)).evict("c7", "c2", "c1")
FRONT = filled(2, lead=0).serve({"c1": BARE}).evict("c0")
CHANGED = filled(4).evict("c1").serve({"c2": Service("patch", note(entry(2), [entry(0)]), allow_stale=True)})
SURVIVORS = filled(3, promise="forget").evict("c1").append(entry(3)).append(entry(4)).evict("c3")
RESTORED = filled(1, lead=0).serve({"c0": BARE}).append(entry(1)).append(entry(2)).evict("c1")


THREE = [entry(0), entry(2), entry(3)]


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


SCENES = {
    "nothing uncertified is asked for": Scene(TWO, ENTRIES[:4], Goal(), None, "leading leading prefill prefill", 0.0),
    "patched": Scene(TWO, ENTRIES[:4], PATCHED, None, "leading leading stored prefill", None),
    "blind": Scene(TWO, ENTRIES[:4], BLIND, None, "leading leading bare bare", None),
    "certified": Scene(TWO, ENTRIES[:4], within(0.3), GROWING, "leading leading stored prefill", 0.3),
    # One is prefilled behind it.
    "beyond the goal": Scene(TWO, ENTRIES[:4], within(0.25), GROWING, "leading leading prefill prefill", 0.0),
    "a patch stays": Scene(PATCH, [A, B, C], within(0.5), SIGNED, "leading leading stored", 0.2),
    # Nothing says how far a patch is off behind another chunk.
    "stale": Scene(PATCH, [A, B, D, C], within(0.5), SIGNED, "leading leading prefill prefill", 0.0),
    "prefilled behind a patch": Scene(PATCH, ENTRIES[:4], within(0.5), SIGNED, "leading leading stored prefill", 0.2),
    "the patch has left": Scene(BEHIND, [A, B, D], within(0.5), SIGNED, "leading leading kept", 0.2),
    "a patch fits again": Scene(turned(), [B, A, C], within(0.3), SIGNED, "leading leading orbit", 0.3, ORBIT),
    "unseen": Scene(UNSEEN, entries_of(UNSEEN), Goal(), None, RUN_AGAIN, 0.0),
    "unseen, kept": Scene(UNSEEN, entries_of(UNSEEN), PATCHED, None, "leading kept kept", None),
    "first, exactly": Scene(FRONT, entries_of(FRONT), Goal(), None, "prefill", 0.0, Fronts(entry(1))),
    "first, patched": Scene(FRONT, entries_of(FRONT), PATCHED, None, "prefill", 0.0, Fronts(entry(1))),
    "first, blind": Scene(FRONT, entries_of(FRONT), BLIND, None, "bare", None, Fronts(entry(1))),
    "first, certified": Scene(FRONT, [entry(1)], within(0.05), REMEMBERED, "prefill", 0.0, Fronts(entry(1))),
    # The piece in front of a survivor is approximate: what the window remembers bounds it.
    "restored": Scene(RESTORED, THREE, within(0.3), REMEMBERED, "bare kept restored", 0.3, Restoring()),
    "restored, exactly": Scene(RESTORED, THREE, within(0.2), REMEMBERED, "prefill prefill restored", 0.0, Restoring()),
    # What c3 has seen remembered a chunk that has left, and does not any more.
    "changed in front": Scene(CHANGED, entries_of(CHANGED), Goal(), None, RUN_AGAIN, 0.0),
    "survivors": Scene(SURVIVORS, entries_of(SURVIVORS), within(0.4), SLID_LESS, "leading survivor survivor", 0.4),
    # The last one has seen the one in front as it was.
    "survivors run again": Scene(SURVIVORS, entries_of(SURVIVORS), within(0.1), SLID_LESS, RUN_AGAIN, 0.0),
    "formed behind another": Scene(TWO_PATCHES, THREE, within(0.5), RANKS, "leading stored prefill", 0.5),
    "formed behind what is run again": Scene(TWO_PATCHES, THREE, within(0.1), RANKS, RUN_AGAIN, 0.0),
}
PROMISES: tuple[tuple[Promise, float], ...] = (("remember", 0.2), ("forget", 0.0))
for promise, kl in PROMISES:
    window = window_of(A, B, C, stock=SECOND, promise=promise)
    for entries, served, bound in (
        ([A, B, C], "leading stored kept", 0.2),
        ([A, B, D, C], "leading stored prefill prefill", 0.2),
        ([A, C], "leading kept" if kl else "leading prefill", kl),
    ):
        name = f"{promise} {' '.join(chunk.id for chunk in entries)}"
        SCENES[name] = Scene(window, entries, within(0.5), SIGNED, served, bound, SECOND)
# Survivors of a slide lose far more where nothing is pinned, and certificates are measured with a lead.
for lead, served, bound, reason in (
    (1, "leading survivor survivor", 0.3, None),
    (0, "prefill prefill prefill", 0.0, "window whose first tokens have left; certified with them pinned"),
):
    window = filled(4, promise="forget", lead=lead).evict("c1" if lead else "c0")
    SCENES[f"lead of {lead}"] = Scene(window, entries_of(window), within(0.5), SLID, served, bound, beyond=reason)
for name, limit, reason in (
    ("tokens", 20, f"window of {A.tokens + B.tokens + C.tokens} tokens; certified up to 20"),
    ("modalities", ("image",), "chunk of text; certified of image"),
):
    signed, exact = dataclasses.replace(SIGNED, **{name: limit}), "leading leading prefill"
    SCENES[f"beyond the {name}"] = Scene(TWO, [A, B, C], within(0.5), signed, exact, 0.0, beyond=reason)


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_a_scene_is_served_by_its_points_within_its_bound(scene: Scene):
    """In the window, in a fork of it, and in what JSON makes of it."""
    for window in (scene.window, scene.window.fork("side"), from_json(to_json(scene.window), BACKBONE)):
        made = planned(window, scene.entries, scene.goal, stored=scene.stock, certificate=scene.signed)
        assert (points(made), made.kl) == (scene.points.split(), scene.kl)
        assert made.as_promised == (scene.kl == 0.0)
        assert made.beyond == scene.beyond
        assert (f"uncertified: {scene.beyond}" in made.explain()) == (scene.beyond is not None)
        check_totals(made)


def test_a_plan_explains_what_it_does_not_take():
    made = planned(TWO, ENTRIES[:4], stored=STOCK)
    assert "not stored rank 4: uncertified; not bare: uncertified" in made.explain()
    assert planned(PATCH, [A, B, C], within(0.5), stored=STOCK, certificate=SIGNED).certificate == SIGNED.digest
