"""Windows: what is pinned, what is refused, what a patch must fit, forks, and the cost of edits."""

import dataclasses
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_cases import COSTS, LEAD, chunk, kinds, note_of, window_of

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.cache import Antecedent, Member
from kvpatch_jax.errors import PatchMismatchError, StalePatchError, WindowError
from kvpatch_jax.window import Copy, Drop, Entry, Fetch, PatchNote, Prefill, Recompute, Rotate, Window

# ------------------------------------------------------------------------------------------------ what is pinned


def test_texts_in_front_of_the_first_chunk_are_the_lead():
    window, _ = window_of().append(Entry("more", None, 5, 5, "text"))
    window, _ = window.append(chunk("A"))
    window, _ = window.append(Entry("question", None, 5, 5, "text"))
    assert (window.lead, window.lead_settled) == (2, True)
    slid, edits = window.slide(0)
    assert list(slid.ids) == ["system", "more"]
    assert edits == (Drop("A"), Drop("question"))
    with pytest.raises(WindowError, match=r"'more', one of 2 pinned in front"):
        slid.evict("more")


def test_without_a_text_the_first_chunk_is_pinned():
    window = window_of("A", "B", lead=False)
    assert window.lead == 1
    with pytest.raises(WindowError, match=r"evict: got 'A', one of 1 pinned"):
        window.evict("A")
    assert not window.slide(0)[0].sink_left


def test_a_window_without_a_lead_reports_that_the_sink_has_left():
    window = Window.empty(COSTS, lead=0)
    for name in "ABC":
        window, _ = window.append(chunk(name))
    assert not window.sink_left
    left, _ = window.evict("A")
    assert left.sink_left
    assert [piece.fidelity for piece in left.pieces] == ["survivor", "survivor"]
    back, _ = left.recall("A", "prefill", before="B")
    assert not back.sink_left
    assert [piece.fidelity for piece in back.pieces] == ["exact"] * 3


# ------------------------------------------------------------------------------------------------ the operations


def test_a_slide_drops_and_rotates_what_stays_and_nothing_else():
    window = window_of(*"ABCD")
    slid, edits = window.slide(2)
    assert kinds(edits) == ["Drop", "Drop", "Rotate", "Rotate"]
    assert [(edit.id, edit.old, edit.new) for edit in edits if isinstance(edit, Rotate)] == [
        ("C", 38, 18),
        ("D", 48, 28),
    ]
    assert slid.next_start == 38
    assert slid.as_promised
    assert not slid.promising("forget").as_promised


def test_a_canonical_that_leads_is_its_own_prefill():
    empty = window_of(lead=False)
    placed, edits = empty.append(chunk("A"), "leading")
    assert placed == empty.append(chunk("A"))[0]
    assert edits == (Fetch("A", "canonical", None, 96 * 10), Copy("A", "canonical", None, 2 * 96 * 10, 3 * 8 * 10))
    assert kinds(empty.append(chunk("A"), "leading", fetched=True)[1]) == ["Copy"]
    for window, behind in ((placed, 1), (window_of(), 1)):
        with pytest.raises(WindowError, match=f"'B' leading behind {behind} pieces; expected none"):
            window.append(chunk("B"), "leading")
    with pytest.raises(WindowError, match="is a text"):
        empty.append(LEAD, "leading")


def test_recall_to_the_old_place_makes_the_pieces_behind_exact_again():
    window = window_of(*"ABC")
    left, _ = window.evict("B")
    assert left.fidelity("C") == "survivor"
    back, edits = left.recall("B", before="C")
    assert kinds(edits) == ["Rotate", "Prefill"]
    assert back.start("B") == window.start("B")
    assert [piece.fidelity for piece in back.pieces] == ["exact"] * 4


def test_reorder_moves_order_free_chunks_alone():
    window = window_of(*"ABCD", free="AC")
    moved, edits = window.reorder(["C", "A"])
    assert list(moved.ids) == ["system", "C", "B", "A", "D"]
    assert [edit.id for edit in edits if isinstance(edit, Rotate)] == ["C", "A"]
    assert len(edits) == 2
    assert [piece.fidelity for piece in moved.pieces[1:]] == ["survivor", "approximate", "approximate", "approximate"]
    assert [piece.fidelity for piece in moved.reorder(["A", "C"])[0].pieces] == ["exact"] * 5
    assert moved.reorder(["C", "A"]) == (moved, ())
    assert window.reorder(["system", "C", "B", "A", "D"])[0].ids == moved.ids
    with pytest.raises(WindowError, match=r"'B', not order-free"):
        window.reorder(["B", "A"])
    with pytest.raises(WindowError, match=r"pinned"):
        window.reorder(["A", "system"])


def test_reorder_serves_by_orbit_patches():
    window = window_of(*"ABC", free="ABC")
    everyone = window.antecedent("C")
    orbit = PatchNote("o", "C", None, "canonical", everyone.sorted(), None, True, 8, 100, 5)
    moved, edits = window.reorder(["B", "A"], {})
    assert kinds(edits) == ["Rotate", "Rotate"]
    forget = window.promising("forget")
    moved, edits = forget.reorder(["B", "A", "C"], {"C": orbit})
    assert kinds(edits) == ["Rotate", "Rotate", "Fetch", "Fetch", "ApplyPatch"]
    assert moved.fidelity("C") == "approximate"
    with pytest.raises(StalePatchError, match=r"any ordering of"):
        forget.reorder(["C", "A", "B"], {"C": orbit})


def test_a_bare_chunk_stands_for_its_prefill():
    window = window_of(*"AB")
    bare, edits = window.bare("A")
    assert edits == (Copy("A", "canonical", None, 2 * 96 * 10, 3 * 8 * 10),)
    assert bare.bare("A") == (bare, ())
    assert bare.fidelity("B") == "survivor"
    assert not bare.antecedent("B").exact
    assert bare.target("B") == window.target("B"), "B's KV is B's own"
    again, _ = bare.recompute("A")
    assert [piece.fidelity for piece in again.pieces] == ["exact"] * 3
    late, _ = bare.append(chunk("C"))
    assert late.recompute("A")[0].fidelity("C") == "approximate", "C was made behind a bare A"


def test_recompute_is_exact_only_from_layer_zero():
    window, _ = window_of(*"ABC").evict("A")
    again, edits = window.recompute("B")
    assert again.fidelity("B") == "exact"
    assert again.fidelity("C") == "approximate", "it has seen B as it was when A stood in front of it"
    assert edits == (Recompute("B", 0, 18, 96 * 28, sum(2000 + 80 * (18 + token + 1) for token in range(10))),)
    deep, edits = window.recompute("B", 1)
    assert deep.fidelity("B") == "approximate"
    assert edits[0].bytes == 48 * 28


def test_a_patch_formed_behind_a_bare_chunk_is_refused_behind_a_conditioned_one():
    window = window_of("A")
    blind, _ = window.bare("A")
    note = PatchNote("d", "N", None, "canonical", blind.antecedent(), None, False, 8, 100, 5)
    with pytest.raises(StalePatchError, match=r"'A' as it was served 'bare:"):
        window.append(chunk("N"), patch=note)
    with pytest.raises(StalePatchError):
        blind.append(chunk("N"), patch=note)
    true = note_of(window, None, "N")
    for there in (window, blind):
        served, edits = there.append(chunk("N"), patch=true)
        assert served.fidelity("N") == "approximate"
        assert kinds(edits) == ["Fetch", "Fetch", "ApplyPatch"]
    _, edits = window.append(chunk("N"), patch=true, fetched=True)
    assert kinds(edits) == ["ApplyPatch"]
    assert window.append(chunk("N"), patch=note, allow_stale=True)[0].fidelity("N") == "approximate"


def test_targets_differ_between_remember_and_forget():
    window, _ = window_of(*"AB").evict("A")
    forget = window.promising("forget")
    assert forget.target().exact
    assert not window.target().exact
    assert window.target() == window.antecedent()
    note = note_of(forget, None, "N")
    with pytest.raises(StalePatchError):
        window.append(chunk("N"), patch=note)
    assert forget.append(chunk("N"), patch=note)[0].piece("N").state.patch == "digest"


def test_a_removal_patch_needs_the_base_that_the_window_holds():
    window = window_of(*"AB").promising("forget")
    before = window.antecedent("B")
    left, _ = window.evict("A")
    removal = note_of(left, "B", "B", base="conditioned", base_antecedent=before)
    served, edits = left.condition("B", removal)
    assert served.piece("B").state.base == "conditioned"
    assert kinds(edits) == ["Fetch", "ApplyPatch"]
    other = dataclasses.replace(removal, base_antecedent=Antecedent((Member("system"),)))
    with pytest.raises(StalePatchError, match=r"got a base conditioned on \('system',\)"):
        left.condition("B", other)
    with pytest.raises(PatchMismatchError, match="base 'conditioned'"):
        left.append(chunk("N"), patch=dataclasses.replace(removal, chunk="N"))


@pytest.mark.slow
def test_notes_describe_real_patches():
    layout = kvp.KVLayout.gqa(2, 2, 4, kvp.Rope(1e4, 4))
    rng = np.random.default_rng(0)
    draw = lambda: {name: jnp.asarray(rng.normal(size=(2, 10, 2, 4)), jnp.float32) for name in layout.names}
    own = kvp.Chunk(draw(), np.arange(10, dtype=np.float32), 10, 10, "N", layout, "fingerprint", content="n")
    window = window_of("A")
    patch = kvp.form_patch(own, draw(), 2, window.target())
    note = PatchNote.of(patch)
    assert (note.rank, note.nbytes) == (2, patch.nbytes)
    assert note.flops == 2 * (2 * 2 * 8) * 2, "two channels of 8 features, rank 2, two layers"
    dense = kvp.form_patch(own, draw(), 8, window.target())
    assert PatchNote.of(dense).rank == 8
    for less in (kvp.keep_layers(patch, [1]), kvp.quantise(patch, "int8"), kvp.quantise(dense, "int8")):
        assert PatchNote.of(less).rank == 0, "no bound of whole patches is for it"
    unequal = kvp.form_patch(own, draw(), {"k": 1, "v": 2}, window.target())
    assert PatchNote.of(unequal).rank == 1
    assert PatchNote.of(kvp.form_patch(own, draw(), {"v": 2}, window.target())).rank == 0
    served, edits = window.append(Entry.of(own), patch=patch, fetched=True)
    assert served.piece("N").state.patch == note.digest
    assert edits[0].bytes == 2 * 96 * 10 + patch.nbytes
    with pytest.raises(StalePatchError):
        window_of("A", "B").append(Entry.of(own), patch=patch)


def test_entries_of_embedded_tokens_span_their_largest_extent():
    positions = np.array([[[0, 0, 0], [1, 1, 1], [1, 1, 7], [1, 5, 2]]])
    tokens = Tokens(jnp.zeros((1, 4, 2)), positions)
    assert Entry.of_tokens("image", tokens, kind="chunk") == Entry("image", None, 4, 8)
    assert Entry.of_tokens("image", tokens.shift(100)).span == 8
    two = Tokens(jnp.zeros((2, 4, 2)), np.concatenate([positions, positions * 2]))
    with pytest.raises(WindowError, match=r"rows that span \[8, 15\]"):
        Entry.of_tokens("image", two)


def test_a_window_prints_a_line_for_each_piece():
    window, _ = window_of(*"AB", free="B").bare("A")
    lines = str(window).splitlines()
    assert len(lines) == 4
    assert "Window(3 pieces, 38 tokens" in lines[0]
    assert "'A': 10 tokens, approximate, bare" in lines[2]
    assert "28–37  chunk  'B': 10 tokens, survivor, order-free" in lines[3]


# ------------------------------------------------------------------------------------------------- what is refused


BAD = {
    "recall of an unknown chunk": lambda w: w.recall("X"),
    "recall of one that is there": lambda w: w.recall("B"),
    "recall of a text": lambda w: w.recall("question"),
    "reorder of ordered chunks": lambda w: w.reorder(["C", "B"]),
    "reorder names one twice": lambda w: w.reorder(["B", "B"]),
    "a repeated id": lambda w: w.append(chunk("B")),
    "an evicted id": lambda w: w.append(chunk("A")),
    "evicting the lead": lambda w: w.evict("system"),
    "evicting one twice": lambda w: w.evict("B", "B"),
    "evicting nobody": lambda w: w.evict("X"),
    "evicting no name": lambda w: w.evict(["B"]),
    "replacing the lead": lambda w: w.replace("system", chunk("X")),
    "inserting into the lead": lambda w: w.insert(chunk("X"), "system"),
    "sliding to less than none": lambda w: w.slide(-1),
    "sliding to a truth": lambda w: w.slide(True),
    "a text bare": lambda w: w.bare("question"),
    "a text by a patch": lambda w: w.append(Entry("X", None, 1, 1, "text"), patch=note_of(w, None, "X")),
    "no entry": lambda w: w.append("X"),
    "no patch": lambda w: w.append(chunk("X"), patch="patch"),
    "a patch that is missing": lambda w: w.append(chunk("X"), "patch"),
    "a word unknown": lambda w: w.append(chunk("X"), "other"),
    "a layer that is not there": lambda w: w.recompute("B", 2),
    "a fork of no name": lambda w: w.fork(""),
    "a fork of a path": lambda w: w.fork("a/b"),
    "positions beyond the limit": lambda w: w.append(chunk("X", 2**30 - 1)),
}


@pytest.fixture(scope="module")
def used() -> Window:
    window, _ = window_of(*"ABC").append(Entry("question", None, 4, 4, "text"))
    return window.evict("A")[0]


@pytest.mark.parametrize("what", BAD)
def test_invalid_operations_are_refused_and_change_nothing(unchecked, used, what):
    before = used.to_json()
    with pytest.raises(WindowError, match="expected"):
        BAD[what](used)
    assert used.to_json() == before


@pytest.mark.parametrize(
    "changes",
    [
        *({"id": ""}, {"id": 3}, {"content": ""}, {"kind": "image"}, {"kind": "text", "order_free": True}),
        *({"tokens": 0}, {"tokens": True}, {"span": 0}, {"span": -1}, {"span": 2.5}, {"span": 2**30}),
    ],
)
def test_invalid_entries_are_refused(unchecked, changes):
    with pytest.raises(WindowError, match="expected"):
        dataclasses.replace(chunk("A"), **changes)


def test_a_patch_of_another_chunk_is_refused():
    window = window_of("A")
    with pytest.raises(PatchMismatchError, match="chunk 'other'; expected 'N'"):
        window.append(chunk("N"), patch=note_of(window, None, "other"), allow_stale=True)
    with pytest.raises(PatchMismatchError, match="content 'another'"):
        window.append(chunk("N"), patch=note_of(window, None, "N", content="another"), allow_stale=True)


# -------------------------------------------------------------------------------------------------------- branches


def test_a_fork_shares_every_piece_under_a_name_of_its_own(used):
    first, edits = used.fork("first")
    assert edits == tuple(Copy(piece.id, "shared", "") for piece in used.pieces)
    assert (first.branch, first.pieces) == ("/first", used.pieces)
    assert first.fork("inner")[0].branch == "/first/inner"
    assert used.fork()[0].branch != used.fork()[0].branch


def test_windows_that_are_no_forks_have_names_of_their_own(unchecked, used):
    own = Window.empty(used.costs, branch="first")
    assert (own.branch, Window.empty(used.costs).branch) == ("first", "")
    fork, _ = own.fork("try")
    assert fork.branch == "first/try"
    for window in (own, fork):
        assert Window.from_json(window.to_json(), backbone=own.backbone) == window
    again = fork.renamed("second")
    assert (again.branch, again.pieces) == ("second", fork.pieces)
    names: tuple[Any, ...] = ("a/b", "/", 3)
    for wrong in names:
        with pytest.raises(WindowError, match="expected a name without a slash"):
            own.renamed(wrong)


# ----------------------------------------------------------------------------------------------------------- speed


def test_edits_of_a_slide_grow_with_survivors_and_those_of_a_recall_do_not():
    found = {}
    for count in (4, 16, 64):
        window = window_of(*(f"c{number}" for number in range(count)))
        slid, edits = window.slide(count - 1)
        survivors = sum(edit.bytes + edit.flops for edit in edits)
        _, back = slid.recall("c0", "bare")
        _, patched = slid.recall("c0", patch=note_of(slid, None, "c0"))
        found[count] = survivors / (count - 1), back, patched
        assert len(edits) == count
    assert len({each[0] for each in found.values()}) == 1
    assert len({each[1:] for each in found.values()}) == 1
    assert [type(edit) for edit in found[4][1]] == [Fetch, Copy]


PROGRAM = """
import time
from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.window import Costs, Entry, Window

window = Window.empty(Costs("f", 2, 96, 32, 8, ForwardCosts((10, 10), (4, 4), (0, 0), 5)))
window, _ = window.append(Entry("system", None, 18, 18, "text"))
for number in range(256):
    window, _ = window.append(Entry(f"c{number}", f"content {number}", 96, 96))
evicted, _ = window.evict("c9")

def least(function):
    found = []
    for _ in range(15):
        begin = time.process_time()
        function()
        found.append(1e3 * (time.process_time() - begin))
    return min(found)

for name, function in {
    "slide": lambda: window.slide(255), "append": lambda: window.append(Entry("new", None, 5, 5)),
    "evict": lambda: window.evict("c128"), "recall": lambda: evicted.recall("c9"),
    "recall to its place": lambda: evicted.recall("c9", before="c10"), "hash": lambda: hash(window),
}.items():
    print(name, round(least(function), 2))
"""


@pytest.mark.slow
def test_edits_of_256_chunks_are_computed_in_five_milliseconds():
    """Of processor time, in a process without checks of types."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=300)
    times = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    assert len(times) == 6
    assert max(times.values()) < 5, times


def test_prefill_costs_count_the_tokens_in_front():
    _, edits = window_of("A").append(chunk("B"))
    assert edits == (Prefill("B", 28, 96 * 38, sum(2000 + 80 * (28 + token + 1) for token in range(10))),)


def test_a_long_loop_costs_no_more_at_its_end():
    """A step calls as many functions after 1 100 chunks have left as after 600: of what has left the last 512 stay."""
    window, calls = window_of("A"), 0

    def count(frame: Any, what: str, argument: Any) -> None:
        nonlocal calls
        calls += what == "call"

    taken = {}
    for step in range(1101):
        calls = 0
        sys.setprofile(count if step in (600, 1100) else None)
        try:
            window, _ = window.slide(3)
            window, _ = window.append(chunk(f"c{step}"))
        finally:
            sys.setprofile(None)
        taken[step] = calls
    assert taken[1100] == taken[600]
    assert (len(window.evicted), window.evicted[-1].id) == (512, "c1096")
    with pytest.raises(WindowError, match="expected an evicted one"):
        window.recall("c100", "bare")
    back, _ = window.recall("c600", "bare")
    again, _ = window.append(chunk("c100"))
    assert "c600" in back
    assert "c100" in again
