"""Random sequences of operations on windows, held against a naive model that keeps whole histories."""

import collections
import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_model import NaiveWindow

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.plan import PatchInventory, plan
from kvpatch_jax.window import (
    ApplyPatch,
    Copy,
    Costs,
    Drop,
    Edits,
    Entry,
    Fetch,
    PatchNote,
    Prefill,
    Recompute,
    Rotate,
    Window,
)

COSTS = Costs("fingerprint", 2, 96, 32, 8, ForwardCosts((1000, 1100), (40, 44), (0, 24), 5000))
STEP = st.tuples(st.integers(0, 13), st.integers(0, 99), st.integers(0, 99))
STEPS = st.lists(STEP, max_size=20)


def note_for(window: Window, id: str, digest: str) -> PatchNote:
    """A patch for a piece where it stands, or will be appended."""
    target = window.target(id if id in window else None)
    return PatchNote(digest, id, None, "canonical", target, None, False, 4, 64, 3)


class Both:
    """A window and its naive model, changed together."""

    def __init__(self, lead, promise) -> None:
        self.window = Window.empty(COSTS, lead=lead, promise=promise)
        self.naive = NaiveWindow(lead)
        self.count = 0
        self.only_leaving = True  # nothing was inserted, recalled, replaced or moved

    def step(self, op: int, a: int, b: int) -> None:
        """One operation, chosen by the numbers; nothing where it does not apply."""
        before = self.window
        behind = [piece.id for piece in before.pieces[before.lead :]]
        gone = list(self.naive.gone)
        if op <= 2 or not len(before):
            edits = self.append(text=op == 0, bare=b % 4 == 1, a=a)
        elif op == 3 and behind:
            edits = self.insert(behind[a % len(behind)], b)
        elif op == 4 and behind:
            ids = sorted({behind[a % len(behind)], behind[b % len(behind)]}, key=behind.index)
            self.window, edits = before.evict(*ids)
            self.naive.remove(ids)
        elif op == 5:
            edits = self.slide(a % 4)
        elif op == 6 and gone:
            edits = self.recall(gone[a % len(gone)], behind, b)
        elif op == 7:
            edits = self.reorder(b)
        elif op == 8 and behind:
            edits = self.replace(behind[a % len(behind)], b)
        elif op == 9:
            edits = self.switch(a)
        elif op == 10:
            edits = self.recompute(a, b)
        elif op == 11:
            self.window, edits = before.compact()
        elif op == 12:
            self.window, edits = before.anew()
            self.naive.anew()
        elif op == 13:
            self.fork(a, b)
            return
        else:
            return
        replay(before if op != 12 else dataclasses.replace(before, pieces=()), self.window, edits)

    def fork(self, a: int, b: int) -> None:
        """A branch that goes another way, and goes on or is let go of; or the window as it is read back."""
        kept = self.window, self.naive
        if b % 3 == 0:
            self.window = Window.from_json(self.window.to_json(), backbone="fingerprint")
            return
        self.window, self.naive = self.window.fork(f"branch {self.count}")[0], self.naive.fork()
        self.append(text=False, bare=a % 2 == 0, a=a)
        behind = [piece.id for piece in self.window.pieces[self.window.lead :]]
        self.insert(behind[b % len(behind)], b) if behind else None
        self.append(text=True, bare=False, a=b)
        if b % 3 == 2:
            self.window, self.naive = kept

    def entry(self, a: int, text: bool = False) -> Entry:
        self.count += 1
        id = f"{'t' if text else 'c'}{self.count}"
        free = not text and a % 3 == 0
        return Entry(id, None if a % 2 else f"content of {id}", 1 + a % 7, 1 + a % 5, "text" if text else "chunk", free)

    def piece(self, entry: Entry) -> dict:
        told = {"id": entry.id, "content": entry.key, "tokens": entry.tokens, "span": entry.span}
        return told | {"text": entry.kind == "text", "free": entry.order_free}

    def append(self, text: bool, bare: bool, a: int) -> Edits:
        entry, bare = self.entry(a, text), bare and not text
        self.window, edits = self.window.append(entry, "bare" if bare else "prefill")
        self.naive.place(self.piece(entry), len(self.naive.list), ("bare", ()) if bare else "prefill")
        return edits

    def insert(self, before: str, b: int) -> Edits:
        self.only_leaving = False
        entry, index = self.entry(b), self.window.index(before)
        self.window, edits = self.window.insert(entry, before, "prefill")
        self.naive.place(self.piece(entry), index, "prefill")
        return edits

    def slide(self, keep: int) -> Edits:
        pieces = self.naive.list[self.naive.lead :]
        chunks = [piece["id"] for piece in pieces if not piece["text"]]
        ids = [piece["id"] for piece in pieces]
        if len(chunks) > keep:
            stop = ids.index(chunks[len(chunks) - keep]) if keep else len(ids)
            self.naive.remove(ids[:stop])
        self.window, edits = self.window.slide(keep)
        return edits

    def recall(self, id: str, behind: list[str], b: int) -> Edits:
        self.only_leaving = False
        place = behind[b % len(behind)] if behind and b % 3 else None
        index = len(self.naive.list) if place is None else self.window.index(place)
        how = ("prefill", "bare")[b % 2]
        piece = self.naive.gone[id]
        self.window, edits = self.window.recall(id, how, before=place)
        self.naive.place(piece, index, "prefill" if how == "prefill" else ("bare", ()))
        return edits

    def reorder(self, b: int) -> Edits:
        free = [piece["id"] for piece in self.naive.list[self.naive.lead :] if piece["free"]]
        if len(free) > 1:
            self.only_leaving = False
        turn = b % len(free) if free else 0
        order = [*free[turn:], *free[:turn]]
        self.window, edits = self.window.reorder(order)
        self.naive.reorder(order)
        return edits

    def replace(self, id: str, b: int) -> Edits:
        self.only_leaving = False
        index, entry = self.window.index(id), self.entry(b)
        self.window, edits = self.window.replace(id, entry, "prefill")
        self.naive.remove([id])
        self.naive.place(self.piece(entry), index, "prefill")
        return edits

    def switch(self, a: int) -> Edits:
        """Bare, or by a patch."""
        chunks = [piece for piece in self.window.pieces if piece.entry.kind == "chunk"]
        if not chunks:
            return ()
        piece = chunks[a % len(chunks)]
        own = self.naive.list[self.window.index(piece.id)]
        if a % 5 == 0:
            note = note_for(self.window, piece.id, f"patch {self.count}")
            own["kv"] = self.naive.histories.number(("patch", (), note))
            own["promised"] = self.naive.as_promised(self.window.index(piece.id))
            self.window, edits = self.window.condition(piece.id, note)
            return edits
        if piece.state.kind != "bare":
            own["kv"] = self.naive.histories.number(("bare", ()))
            own["promised"] = self.naive.as_promised(self.window.index(piece.id))
            self.window, edits = self.window.bare(piece.id)
            return edits
        return ()

    def recompute(self, a: int, b: int) -> Edits:
        index = a % len(self.window)
        own, layer = self.naive.list[index], b % 2
        # Behind what is approximate, or after it was so itself, the window knows less of what it was than we do.
        self.only_leaving = self.only_leaving and self.window.promising("remember").as_promised
        if layer:
            own["kv"] = self.naive.histories.number(("deep", (), own["kv"], b))
        else:
            self.naive.run_again(index)
        self.window, edits = self.window.recompute(own["id"], layer)
        return edits

    def check(self) -> None:
        window, naive = self.window, self.naive
        assert [piece.id for piece in window.pieces] == [piece["id"] for piece in naive.list]
        assert [piece.start for piece in window.pieces] == [piece["start"] for piece in naive.list]
        assert window.next_start == naive.next
        assert window.lead == naive.lead
        assert {piece.id for piece in window.evicted} == set(naive.gone)

        expected = naive.fidelities()
        found = [window.fidelity(piece["id"]) for piece in naive.list]
        if self.only_leaving:
            assert found == expected
        for real, true in zip(found, expected, strict=True):
            assert (real == "exact") == (true == "exact")
            assert real != "survivor" or true == "survivor"


def replay(before: Window, after: Window, edits: Edits) -> None:
    """Executes edits on a table of places, in their order, and checks that they are all, minimal and paid for."""
    held = {piece.id: (piece.start, piece.state, piece.entry) for piece in before.pieces}
    wanted = {piece.id: (piece.start, piece.state, piece.entry) for piece in after.pieces}
    most = max(before.tokens, after.tokens)
    fetched, touched = set(), set()
    for edit in edits:
        assert edit.bytes >= 0
        assert edit.flops >= 0
        if isinstance(edit, Drop):
            del held[edit.id]
            continue
        if isinstance(edit, Fetch):
            assert (edit.id, edit.what) not in fetched
            fetched.add((edit.id, edit.what))
            continue
        if not isinstance(edit, Rotate | Copy | ApplyPatch | Prefill | Recompute):
            continue
        assert edit.id not in touched, "one edit moves or makes a piece"
        touched.add(edit.id)
        start, state, entry = wanted[edit.id]
        if isinstance(edit, Rotate):
            assert held[edit.id] == (edit.old, state, entry)
            assert edit.new == start != edit.old
            assert (edit.bytes, edit.flops) == (2 * 32 * entry.tokens, 3 * 8 * entry.tokens)
        elif isinstance(edit, Prefill | Recompute):
            front = after.pieces[: after.index(edit.id)]
            assert all(held.get(piece.id) == (piece.start, piece.state, piece.entry) for piece in front)
            assert edit.behind == sum(piece.entry.tokens for piece in front)
            check_forward(edit, entry.tokens)
        elif isinstance(edit, ApplyPatch):
            assert edit.patch == state.patch
            assert edit.bytes == 2 * 96 * entry.tokens + 64
            assert edit.flops == (3 * 8 + 3) * entry.tokens
        held[edit.id] = (start, state, entry)
        assert sum(entry.tokens for _, _, entry in held.values()) <= most
    assert held == wanted
    moved = {id for id in wanted if id in {piece.id for piece in before.pieces} and before.start(id) != after.start(id)}
    made = {piece.id for piece in after.pieces if piece.id not in before or before.piece(piece.id).state != piece.state}
    again = {edit.id for edit in edits if isinstance(edit, Recompute)}
    assert touched == moved | made | again


def check_forward(edit: Prefill | Recompute, tokens: int) -> None:
    """Counts a forward's FLOPs pair by pair: the second layer sees 24 keys."""
    flops = 0
    for token in range(tokens):
        keys = edit.behind + token + 1
        flops += 1100 + 44 * min(keys, 24)
        if isinstance(edit, Prefill) or edit.start_layer == 0:
            flops += 1000 + 40 * keys
    assert edit.flops == flops
    layers = 1 if isinstance(edit, Recompute) and edit.start_layer else 2
    assert edit.bytes == 96 * layers // 2 * (tokens + edit.behind)


LEADS = st.sampled_from([None, 0, 2])
PROMISES = st.sampled_from(["remember", "forget"])


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, lead=LEADS, promise=PROMISES)
def test_windows_equal_the_model_that_keeps_histories(steps, lead, promise):
    check_sequence(steps, lead, promise)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(steps=st.lists(STEP, max_size=100), lead=LEADS, promise=PROMISES)
def test_windows_equal_the_model_over_long_sequences(steps, lead, promise):
    check_sequence(steps, lead, promise)


def check_sequence(steps, lead, promise):
    both = Both(lead, promise)
    pinned: list[str] = []
    for step in steps:
        both.step(*step)
        both.check()
        window = both.window
        if window.lead_settled:
            ids = [piece.id for piece in window.pieces[: window.lead]]
            assert ids[: len(pinned)] == pinned, "the lead never leaves"
            pinned = ids
        ends = [0, *(piece.end for piece in window.pieces)]
        assert [*(piece.start for piece in window.pieces), window.next_start] == ends
        everything = [piece.id for piece in (*window.pieces, *window.evicted)]
        assert len(set(everything)) == len(everything)


@pytest.mark.slow
def test_no_piece_is_called_more_faithful_than_it_is():
    """Hundreds of programs in which things come in front of others, are prefilled behind, and leave again."""
    rng, claims, wrong, unlike = random.Random(26), collections.Counter(), collections.Counter(), 0
    for _ in range(300):
        both = Both(rng.choice([None, 0]), rng.choice(["remember", "forget"]))
        few = [rng.choice([3, 6, 7, 8, 9, 10, 12, 13]) for _ in range(2)]  # of what can go wrong, a little at a time
        for _ in range(rng.randrange(6, 16)):
            both.step(rng.choice([0, 1, 1, 1, 4, 4, 5, *few]), rng.randrange(100), rng.randrange(100))
            true = both.naive.fidelities()
            for piece, expected in zip(both.window.pieces, true, strict=True):
                claims[piece.fidelity] += 1
                wrong[piece.fidelity, expected] += piece.fidelity != expected
        planned = plan(both.window, [p.entry for p in both.window.pieces], stored=PatchInventory("fingerprint"))
        assert planned.as_promised
        unlike += not planned.window.as_promised
    assert not unlike
    assert claims["exact"] > 3000
    assert claims["survivor"] > 400
    assert set(+wrong) <= {("approximate", "survivor")}, wrong
    assert wrong["approximate", "survivor"] < claims["survivor"] / 10


@settings(max_examples=20, deadline=None)
@given(steps=STEPS, lead=LEADS)
def test_windows_are_saved_and_forked(steps, lead):
    both = Both(lead, "remember")
    for step in steps:
        both.step(*step)
    window = both.window
    read = Window.from_json(window.to_json(), backbone="fingerprint")
    assert read == window
    assert hash(read) == hash(window)
    assert read.pieces == window.pieces
    assert read.digest == window.digest

    branch, edits = window.fork("one")
    assert branch.pieces == window.pieces
    assert {edit.id for edit in edits if isinstance(edit, Copy)} == set(window.ids)


@settings(max_examples=20, deadline=None)
@given(steps=STEPS, data=st.data())
def test_targets_and_antecedents_are_what_provenance_accepts(steps, data):
    """They are in order, say what is exact, and a patch formed behind a target is served there."""
    both = Both(None, data.draw(PROMISES))
    for step in steps:
        both.step(*step)
    window = both.window
    ids = [piece.id for piece in window.pieces]
    for index, piece in enumerate(window.pieces):
        served, target = window.antecedent(piece.id), window.target(piece.id)
        assert served.ids == target.ids == tuple(ids[:index])
        assert served.exact == all(each.fidelity == "exact" for each in window.pieces[:index])
        assert window.promise == "remember" or target.exact
        if served.exact:
            assert target == served
    note = note_for(window, "new", "d")
    there, _ = window.append(Entry("new", None, 3, 3), patch=note)
    assert there.fidelity("new") == "approximate"
