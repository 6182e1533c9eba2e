"""Claims of windows over random programs of all operations, held against whole histories of the KV."""
# pyright: reportArgumentType=false

import collections
import random
from collections.abc import Mapping
from typing import Any

import pytest
from edit_histories import EditHistories

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.errors import StalePatchError
from kvpatch_jax.plan import Certificate, DeviceCosts, Goal, PatchInventory, Rates, plan
from kvpatch_jax.window import (
    KEEP,
    PREFILL,
    UNKNOWN,
    Costs,
    Entry,
    Likeness,
    PatchNote,
    Promise,
    ServingChoice,
    StoredPrefills,
    Window,
    arrange,
)

BACKBONE = "f" * 64
COSTS = Costs(BACKBONE, 2, 96, 32, 8, ForwardCosts((1000, 1100), (40, 44), (0, 24), 5000))
KINDS = ("Fetch", "Rotate", "Copy", "ApplyPatch", "Prefill", "Recompute")
SLOW = DeviceCosts("a desk", None, {kind: Rates(1e-4, 2e-7 if "re" in kind.lower() else 0.0, 3e-9) for kind in KINDS})
MOST = 7
"""Pieces of a window."""


class EveryWay(Certificate):
    """A certificate that bounds every way, so that plans use all of them."""

    def __init__(self) -> None:
        object.__setattr__(self, "backbone", BACKBONE)

    @property
    def digest(self) -> str:
        return "every way"

    def beyond(self, tokens: int, chunks: Any) -> str | None:
        return None

    def growing(self, what: str, point: str, rank: int = 0, *, promise: Promise = "forget", most: int) -> list[float]:
        return [0.01 * (1 + rank)] * most


def likeness_of(front: str) -> Likeness | None:
    """How a stored prefill is served behind others: one digest is not of a mean and of one prefill."""
    return (None, "near", "mean")[int(front, 16) % 3]


class Prefills(StoredPrefills):
    """Everything that was ever prefilled is stored; what is alike is drawn."""

    def __init__(self, program: "Program") -> None:
        self.program = program

    def may_have(self, id: str, front: str) -> bool:
        return (id, front) in self.program.truth.stored

    def alike(self, id: str, keys: Mapping[Likeness, str], *, far: bool = True) -> dict[Likeness, str]:
        stored = sorted(front for own, front in self.program.truth.stored if own == id)
        found = dict[Likeness, str]()
        for likeness, key in keys.items():
            fronts = [front for front in stored if likeness_of(front) == likeness]
            if fronts and int(key, 16) % 3:
                found[likeness] = fronts[int(key, 16) % len(fronts)]
        return found


class Program:
    """A window, and the histories that its edits make."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        promise = self.draw.choice(["remember", "forget"])
        self.window = Window.empty(COSTS, lead=self.draw.choice([None, 0, 1]), promise=promise)
        self.truth = EditHistories()
        self.notes: list[PatchNote] = []
        self.count = 0
        self.missed = False

    # ------------------------------------------------------------------------------------------------ operations

    def step(self) -> None:
        window, names = self.window, [*OPERATIONS]
        name = self.draw.choices(names, [OPERATIONS[name] for name in names])[0]
        done = getattr(self, name)()
        if done is not None:
            after, edits, *alike = done
            self.truth.run(after, edits, *alike, emptied=name == "anew")
            self.window = after
            self.truth.remember(after)
        assert name in ("compact", "fork", "saved") or self.window is not window or done is None or not done[1]

    def behind(self) -> list[str]:
        return [piece.id for piece in self.window.pieces[self.window.lead :]]

    def chunks(self) -> list[str]:
        return [piece.id for piece in self.window.pieces if piece.entry.kind == "chunk"]

    def entry(self, text: bool = False) -> Entry:
        self.count += 1
        number = self.count
        free = not text and number % 3 > 0
        content = None if number % 4 == 0 else f"content {number}"
        return Entry(f"{'t' if text else 'c'}{number}", content, 3, 1 + number % 3, "text" if text else "chunk", free)

    def note(self, id: str, index: int, content: str | None, orbit: bool = False) -> PatchNote:
        """A patch formed behind what is promised in front of an index."""
        window = self.window
        target = window.target(window.pieces[index].id if index < len(window) else None)
        orbit = orbit and target.exact and index > 1
        digest, rank = f"{len(self.notes)}", self.draw.choice([2, 4])
        note = PatchNote(
            digest, id, content, "canonical", target.sorted() if orbit else target, None, orbit, rank, 9, 3
        )
        self.truth.ranks[digest] = (note.point, rank)
        self.truth.note(digest, index, orbit, window)
        self.notes.append(note)
        return note

    def append(self):
        if len(self.window) >= MOST:
            return None
        entry = self.entry(text=self.draw.random() < 0.15)
        how = "prefill" if entry.kind == "text" else self.draw.choice(["prefill", "prefill", "bare", "patch"])
        patch = self.note(entry.id, len(self.window), entry.content) if how == "patch" else None
        return self.window.append(entry, how, patch)

    def insert(self):
        behind = self.behind()
        if not behind or len(self.window) >= MOST:
            return None
        return self.window.insert(self.entry(), self.draw.choice(behind), self.draw.choice(["prefill", "bare"]))

    def evict(self):
        behind = self.behind()
        chosen = [id for id in behind if self.draw.random() < 0.4]
        return self.window.evict(*chosen) if chosen else None

    def slide(self):
        return self.window.slide(self.draw.randrange(4))

    def recall(self):
        gone, behind = self.window.evicted, self.behind()
        if not gone or len(self.window) >= MOST:
            return None
        piece = self.draw.choice(gone)
        before = self.draw.choice([None, *behind])
        how = self.draw.choice(["prefill", "bare", "restored", "restored"])
        fronts = sorted(front for id, front in self.truth.stored if id == piece.id)
        if how == "restored" and fronts:
            front = self.draw.choice(fronts)
            likeness = likeness_of(front)
            done = self.window.recall(piece.id, how, before=before, behind=front, likeness=likeness)
            # What happens to be behind the very pieces that are promised is no other prefill.
            return *done, {} if done[0].piece(piece.id).state.patch is None else {piece.id: likeness or ""}
        return self.window.recall(piece.id, "prefill" if how == "restored" else how, before=before)

    def replace(self):
        behind = self.behind()
        return self.window.replace(self.draw.choice(behind), self.entry(), "prefill") if behind else None

    def reorder(self):
        free = [piece.id for piece in self.window.pieces[self.window.lead :] if piece.entry.order_free]
        order = self.draw.sample(free, len(free))
        return self.window.reorder(order)

    def bare(self):
        chunks = self.chunks()
        return self.window.bare(self.draw.choice(chunks)) if chunks else None

    def condition(self):
        chunks = self.chunks()
        if not chunks:
            return None
        id = self.draw.choice(chunks)
        index, piece = self.window.index(id), self.window.piece(id)
        own = [note for note in self.notes if note.chunk == id]
        if own and self.draw.random() < 0.6:
            # One of before, which may have become stale.
            note = self.draw.choice(own)
            try:
                return self.window.condition(id, note)
            except StalePatchError:
                assert self.truth.is_stale(note.digest, index, self.window)
                return self.window.condition(id, note, allow_stale=True)
        return self.window.condition(id, self.note(id, index, piece.entry.content, self.draw.random() < 0.5))

    def recompute(self):
        if not len(self.window):
            return None
        return self.window.recompute(self.draw.choice(self.window.ids), self.draw.choice([0, 0, 0, 1]))

    def compact(self):
        return self.window.compact()

    def anew(self):
        return self.window.anew()

    def fork(self):
        """Goes another way, and goes on there or gives up."""
        kept, truth = self.window, self.truth
        self.window, self.truth = kept.fork(f"{self.count}.{self.draw.random()}")[0], truth.copy()
        for _ in range(3):
            name = self.draw.choice(["append", "insert", "evict", "condition", "planned"])
            done = getattr(self, name)()
            if done is not None:
                after, edits, *alike = done
                self.truth.run(after, edits, *alike)
                self.window = after
                self.truth.remember(after)
        if self.draw.random() < 0.5:
            self.window, self.truth = kept, truth

    def saved(self):
        self.window = Window.from_json(self.window.to_json(), backbone=BACKBONE)

    def arranged(self):
        """Everything at once: some leave, some come, in another order, each served in some way."""
        entries = self.wanted()
        arranged = arrange(self.window, entries)
        choices, alike = [], {}
        for piece, kept in zip(arranged.window.pieces, arranged.kept, strict=True):
            how = self.draw.choice(["keep", "keep", "prefill", "bare", "restored"])
            fronts = sorted(front for id, front in self.truth.stored if id == piece.id)
            if piece.entry.kind == "text" or (how == "restored" and not fronts):
                how = "keep" if kept else "prefill"
            if how == "restored":
                front = self.draw.choice([*fronts, piece.target])
                likeness = likeness_of(front)
                if (piece.id, front) in self.truth.stored:
                    choices.append(ServingChoice("restored", behind=front, likeness=likeness))
                    if front != piece.target:
                        alike[piece.id] = likeness or ""
                    continue
                how = "keep"
            if how == "keep":
                choices.append(KEEP if kept else PREFILL)
            else:
                choices.append(PREFILL if how == "prefill" else ServingChoice("bare"))
        return *arranged.serve(choices), alike

    def planned(self):
        goal = self.draw.choice([Goal(), Goal(), Goal(kl=0.02), Goal(kl=1.0)])
        stock = PatchInventory(BACKBONE)
        stock.prefills = Prefills(self)
        stock.add(*self.notes, *(piece.entry for piece in self.window.pieces if self.draw.random() < 0.3))
        uncertified = self.draw.random() < 0.3
        options = {"certificate": EveryWay(), "costs": SLOW, "uncertified": uncertified}
        found = plan(self.window, self.wanted(), goal, stored=stock, **options)
        if goal.as_promised and not uncertified:
            assert found.as_promised
            assert found.window.as_promised
        alike = {
            piece.id: piece.state.ways[0][0]
            for piece, before in zip(found.window.pieces, found.chunks, strict=True)
            if before.point in ("mean", "near")
        }
        # What a plan says of a piece, the window says too: it is bounded in the same ways.
        for chunk, piece in zip(found.chunks, found.window.pieces, strict=True):
            assert (chunk.kl is None) == (UNKNOWN in piece.ways) or found.kl is None
            assert chunk.kl != 0.0 or not piece.ways
        return found.window, found.edits, alike

    def wanted(self) -> list[Entry]:
        pieces, lead = self.window.pieces, self.window.lead
        stay = [piece.entry for piece in pieces[lead:] if self.draw.random() < 0.8][: MOST - 2]
        gone = [piece.entry for piece in self.window.evicted if self.draw.random() < 0.4][:2]
        free = [each for each in stay if each.order_free]
        turned = iter(self.draw.sample(free, len(free)) if self.draw.random() < 0.3 else free)
        entries = [next(turned) if each.order_free else each for each in stay]
        for each in [*gone, *([self.entry()] if self.draw.random() < 0.5 else [])]:
            entries.insert(self.draw.randrange(len(entries) + 1), each)
        return [*(piece.entry for piece in pieces[:lead]), *entries]

    # ---------------------------------------------------------------------------------------------------- claims

    def check(self, claims: collections.Counter) -> None:
        window, truth = self.window, self.truth
        fidelities, promised = truth.fidelities(window.promise), truth.as_promised(window.promise)
        held = truth.promises(len(window), held=True)
        for index, (piece, expected) in enumerate(zip(window.pieces, fidelities, strict=True)):
            claims[piece.fidelity, expected] += 1
            claims["as promised", not piece.ways, promised[index]] += 1
            assert (piece.fidelity == "exact") == (expected == "exact")
            assert piece.fidelity != "survivor" or expected == "survivor"
            assert piece.ways or promised[index], (piece, expected)
            # What is a survivor unknown to the window counts as made again, and so do targets behind it from then on.
            own = truth.list[index]
            self.missed = self.missed or (held[index] == own["kv"] and piece.promised is None)
            if UNKNOWN not in piece.ways and not self.missed:
                claims["bounded", bool(piece.ways)] += 1
                assert truth.bounds(index, piece.ways, window.promise), (piece, expected)
        assert window.as_promised == (not any(piece.ways for piece in window.pieces))


OPERATIONS = {
    **{"append": 6, "insert": 2, "evict": 2, "slide": 1, "recall": 4, "replace": 1, "reorder": 1, "bare": 2},
    **{"condition": 4, "recompute": 2, "compact": 1, "anew": 0.3, "fork": 1, "saved": 0.5, "arranged": 2, "planned": 3},
}
"""How often each is drawn."""


def check_programs(seeds: range) -> collections.Counter:
    claims: collections.Counter = collections.Counter()
    for seed in seeds:
        program = Program(seed)
        for _ in range(program.draw.randrange(6, 24)):
            program.step()
            program.check(claims)
    return claims


def test_claims_hold_over_random_programs():
    claims = check_programs(range(500))
    check_shares(claims)


@pytest.mark.slow
def test_claims_hold_over_ten_thousand_random_programs():
    claims = check_programs(range(1000, 11000))
    check_shares(claims)


def check_shares(claims: collections.Counter) -> None:
    """Most of what is true is claimed, and every kind of claim is made."""
    survivors = claims["survivor", "survivor"]
    assert claims["exact", "exact"] > 1000
    assert survivors > 400
    assert claims["approximate", "survivor"] < survivors / 5
    assert claims["as promised", False, True] < claims["as promised", True, True] / 10
    assert claims["bounded", True] > 200
