"""A window arranged in one step, held against the window's own operations one after the other."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.backbone import ForwardCosts
from kvpatch_jax.cache import Antecedent
from kvpatch_jax.errors import PatchMismatchError, StalePatchError, WindowError
from kvpatch_jax.window import (
    KEEP,
    PREFILL,
    Compact,
    Costs,
    Drop,
    Entry,
    Fetch,
    PatchNote,
    Prefill,
    Recompute,
    Rotate,
    ServingChoice,
    Window,
    arrange,
)

COSTS = Costs("f" * 64, 4, 512, 256, 32, ForwardCosts((7, 9, 7, 9), (3, 5, 3, 5), (0, 12, 0, 12), 11))


def entry(number: int, other: int = 0) -> Entry:
    """Chunk `number`; every third one keeps its place among others, and two in seven span more than their tokens."""
    tokens = 3 + number % 4
    return Entry(f"c{number}", f"{number}.{other}", tokens, tokens + number % 7 // 5, "chunk", number % 3 != 0)


def note(entry: Entry, behind: Antecedent, orbit: bool = False) -> PatchNote:
    behind = behind.sorted() if orbit else behind
    return PatchNote(
        f"{entry.id}-{behind.digest}"[:32], entry.id, entry.content, "canonical", behind, None, orbit, 4, 99, 7
    )


def one_by_one(
    window: Window, entries: list[Entry], services: list[Any]
) -> tuple[Window, list[Any], list[ServingChoice]]:
    """What `arrange` must come to, by operations alone. A service "patch" takes the note of what stands in front."""
    wanted, edits, told = {each.id: each for each in entries}, [], []
    gone = [piece.id for piece in window.pieces if wanted.get(piece.id) != piece.entry]
    replaced = [id for id in gone if id in wanted]
    for id in [id for id in gone if id not in replaced]:
        window, more = window.evict(id)
        edits += more
    for id in replaced:  # only where it stands is known; it is moved to its place by leaving and coming in again
        window, more = window.replace(id, wanted[id], "bare")
        edits += more
        window, more = window.evict(id)
        edits += more
    kept = [each.id for each in entries if each.id in window]
    window, more = window.reorder(kept)
    edits += more
    for place, (each, how) in enumerate(zip(entries, services, strict=True)):
        behind = [other.id for other in entries[place + 1 :] if other.id in window]
        stands, patch = each.id in window, None
        if how == "patch":
            there = window if stands else placed(window, each, "bare", None, behind)[0]
            patch = note(each, there.target(each.id))
        if stands:
            changed = (window, ())
            if how == "prefill":
                changed = window.recompute(each.id)
            elif how == "patch":
                assert patch is not None
                changed = window.condition(each.id, patch)
            elif how == "bare":
                changed = window.bare(each.id)
            told.append(KEEP if how == "keep" else ServingChoice(how, patch))
        else:
            how = "prefill" if how == "keep" else how
            changed = placed(window, each, how, patch, behind)
            told.append(ServingChoice(how, patch))
        window, more = changed
        edits += more
    return window, edits, told


def placed(window: Window, entry: Entry, how: Any, patch: PatchNote | None, behind: list[str]) -> tuple[Window, Any]:
    """An entry in front of the first of those behind it."""
    if any(piece.id == entry.id for piece in window.evicted):
        return window.recall(entry.id, how, patch, before=behind[0] if behind else None)
    return window.insert(entry, behind[0], how, patch) if behind else window.append(entry, how, patch)


def seen(window: Window) -> dict[str, Any]:
    """What of a window does not depend on how many steps led there."""
    return {
        "pieces": [(each.entry, each.start, each.state, each.front, each.fidelity) for each in window.pieces],
        "evicted": {each.id: each.entry for each in window.evicted},
        "next": window.next_start,
        "lead": (window.lead, window.lead_settled),
        "promise": window.as_promised,
        "targets": [window.target(each.id) for each in window.pieces],
    }


def start(promise: str, lead: int) -> Window:
    return Window.empty(COSTS, lead=lead, promise=promise)  # pyright: ignore[reportArgumentType]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), promise=st.sampled_from(["remember", "forget"]))
def test_arrange_equals_the_operations_one_by_one(data: st.DataObject, promise: str):
    window = start(promise, 1)
    for number in range(data.draw(st.integers(1, 6))):
        window, _ = window.append(entry(number), "bare" if number == 3 else "prefill")
    for id in data.draw(st.lists(st.sampled_from([piece.id for piece in window.pieces]), unique=True, max_size=2)):
        if window.index(id):
            window, _ = window.evict(id)
    if data.draw(st.booleans()):
        window, _ = window.bare(window.pieces[-1].id)

    standing = [piece.entry for piece in window.pieces[1:] if data.draw(st.booleans(), label=piece.id)]
    free = [each for each in standing if each.order_free]
    shuffled = iter(data.draw(st.permutations(free)))
    entries = [next(shuffled) if each.order_free else each for each in standing]
    left = [piece.entry for piece in window.evicted]
    ids = {each.id for each in (*standing, *left)}
    fresh = [each for each in (entry(number) for number in range(10, 14)) if each.id not in ids]
    for each in data.draw(st.lists(st.sampled_from([*left, *fresh]), unique=True, max_size=4)):
        entries.insert(data.draw(st.integers(0, len(entries))), each)
    entries = [window.pieces[0].entry, *entries]
    hows = [data.draw(st.sampled_from(["keep", "prefill", "patch", "bare"])) for _ in entries]
    hows[0] = "keep"

    there, edits, services = one_by_one(window, entries, hows)
    found, own = arrange(window, entries).serve(services)
    assert seen(found) == seen(there)
    kinds = lambda edits, kind: {each for each in edits if isinstance(each, kind)}
    for kind in (Drop, Prefill, Recompute):
        assert kinds(own, kind) == kinds(edits, kind)
    turned = {piece.id: piece.start for piece in window.pieces}
    placed = {each.id for each in own if not isinstance(each, Drop | Rotate | Recompute | Compact)}
    for piece in found.pieces:
        turns = [each for each in own if isinstance(each, Rotate) and each.id == piece.id]
        moved = turned.get(piece.id, piece.start) != piece.start and piece.id not in placed
        assert [(each.old, each.new) for each in turns] == ([(turned[piece.id], piece.start)] if moved else [])
    fetched = {each.id for each, how in zip(entries, hows, strict=True) if how == "bare" and each.id in window}
    other = lambda edits: sorted(
        (type(each).__name__, each.id)
        for each in edits
        if not isinstance(each, Drop | Rotate) and not (isinstance(each, Fetch) and each.id in fetched)
    )  # `Window.bare` leaves it to the caller that the canonical is there
    assert other(own) == other(edits)
    assert all(isinstance(each, Drop | Rotate | Fetch) or each in edits for each in own)


def test_invalid_rearrangements_are_refused():
    window = start("remember", 1)
    for number in range(5):
        window, _ = window.append(entry(number))
    whole = [piece.entry for piece in window.pieces]
    gone, _ = window.evict("c2")
    for words, of, entries in (
        ("twice", window, [*whole, whole[1]]),
        ("pinned", window, whole[1:]),
        ("pinned", window, [whole[1], whole[0]]),
        ("not order-free", window, [whole[0], whole[1], whole[3], whole[2], whole[4]][::1]),
        ("evicted as", gone, [*(piece.entry for piece in gone.pieces), entry(2, other=1)]),
        ("2\\*\\*30", window, [*whole, Entry("c9", None, 1, 2**30 - 8)]),
    ):
        if words == "not order-free":
            entries = [whole[0], whole[3], whole[1], whole[2], whole[4]]
        with pytest.raises(WindowError, match=words):
            arrange(of, entries)


def test_an_entry_of_other_content_replaces_that_of_the_same_id():
    window = start("remember", 1)
    for number in range(4):
        window, _ = window.append(entry(number))
    entries = [piece.entry for piece in window.pieces]
    entries[2] = entry(2, other=1)
    there, edits = arrange(window, entries).serve([KEEP, KEEP, PREFILL, KEEP])
    assert [type(each) for each in edits] == [Drop, Prefill]
    assert not there.evicted
    assert [piece.fidelity for piece in there.pieces] == ["exact", "exact", "exact", "approximate"]


def test_arrange_checks_patches_as_the_operations_do():
    window = start("forget", 1)
    for number in range(3):
        window, _ = window.append(entry(number))
    window, _ = window.evict("c1")
    own = [piece.entry for piece in window.pieces]
    arranged = arrange(window, [*own, entry(1)])
    right, stale = note(entry(1), window.target()), note(entry(1), window.target("c2"))
    foreign = note(entry(5), window.target())
    orbit = note(entry(1), window.target(), orbit=True)
    for service in (
        ServingChoice("patch", right),
        ServingChoice("patch", orbit),
        ServingChoice("patch", stale, allow_stale=True),
    ):
        there, edits = arranged.serve([KEEP, KEEP, service])
        assert there.fidelity("c1") == "approximate"
        assert [type(each).__name__ for each in edits] == ["Fetch", "Fetch", "ApplyPatch"]
    with pytest.raises(StalePatchError, match="c1"):
        arranged.serve([KEEP, KEEP, ServingChoice("patch", stale)])
    with pytest.raises(PatchMismatchError, match="c5"):
        arranged.serve([KEEP, KEEP, ServingChoice("patch", foreign, allow_stale=True)])
    removal = PatchNote("d", "c1", right.content, "conditioned", right.antecedent, right.antecedent, False, 4, 9, 9)
    with pytest.raises(PatchMismatchError, match="comes in"):
        arranged.serve([KEEP, KEEP, ServingChoice("patch", removal)])
    for service in (KEEP, ServingChoice("patch"), ServingChoice("bare", right)):
        with pytest.raises(WindowError):
            arranged.serve([KEEP, KEEP, service])


def test_a_survivor_that_is_run_again_is_another_one_to_those_behind():
    """Where a window remembers, what a patch must have met is the survivor as it will be."""
    window = start("remember", 1)
    for number in range(4):
        window, _ = window.append(entry(number))
    window, _ = window.evict("c1")
    window, _ = window.evict("c3")
    entries = [*(piece.entry for piece in window.pieces), entry(3)]
    before = note(entry(3), window.target())
    there, _ = window.recompute("c2")
    after = note(entry(3), there.target())
    arranged = arrange(window, entries)
    with pytest.raises(StalePatchError):
        arranged.serve([KEEP, PREFILL, ServingChoice("patch", before)])
    assert arranged.serve([KEEP, PREFILL, ServingChoice("patch", after)])[0].start("c3") == there.next_start


def test_what_follows_a_chunk_that_comes_back_patched_is_as_promised():
    """It has seen that chunk prefilled, which is what the window promises there, however the chunk is served now."""
    window = start("remember", 1)
    for number in range(3):
        window, _ = window.append(entry(number))
    window, _ = window.evict("c1")
    back = note(entry(1), window.target("c2"))
    recalled, _ = window.recall("c1", patch=back, before="c2")
    there, _ = arrange(window, [entry(0), entry(1), entry(2)]).serve([KEEP, ServingChoice("patch", back), KEEP])
    assert there.fidelity("c2") == recalled.fidelity("c2") == "survivor"
    assert [piece.ways for piece in there.pieces] == [(), (("stored", back.rank),), ()]
    # Behind another chunk in its place it has not.
    other, _ = recalled.replace("c1", entry(3))
    assert other.fidelity("c2") == "approximate"
    assert seen(there) == seen(recalled)


@pytest.mark.parametrize("how", ["leading", "restored"])
def test_what_is_no_forward_counts_as_one_only_where_it_is_one(how):
    """A canonical only at the front, a stored prefill only of what comes in; and of a text there is neither."""
    window = start("remember", 1)
    for number in range(2):
        window, _ = window.append(entry(number))
    text = Entry("text", None, 3, 3, "text")
    held = [piece.entry for piece in window.pieces]
    for entries in (held, [*held, text], *([[*held, entry(2)]] if how == "leading" else [])):
        services = [KEEP] * (len(entries) - 1) + [ServingChoice(how)]
        with pytest.raises(WindowError, match="expected"):
            arrange(window, entries).serve(services)
    empty = start("remember", 1)
    with pytest.raises(WindowError, match="expected it prefilled"):
        arrange(empty, [text]).serve([ServingChoice(how)])
