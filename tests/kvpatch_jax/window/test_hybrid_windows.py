"""Windows of a hybrid model (a tiny Qwen3.5): every edit, against prefills and transitions composed by definition."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from window_drill import BAR, Drill
from window_oracle import rows_of, tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import fold
from kvpatch_jax.errors import NotFiniteError
from kvpatch_jax.window import (
    Compose,
    Entry,
    Prefill,
    placed,
    taken,
)
from kvpatch_jax.window.costs import composing_flops
from tests.compilations import compilations

SLOW = pytest.mark.slow


def drill_of(*ids: str, **options: Any) -> Drill:
    drill = Drill("hybrid", **options)
    for id in ids:
        drill.append(id)
    return drill


@SLOW
@pytest.mark.parametrize("options", [{}, {"aligned": False}])
def test_every_edit_equals_a_prefill_over_contiguous_contexts(options: dict[str, Any]):
    """Rows and composed transitions; bytes and FLOPs of the edits are what was executed."""
    drill = drill_of("c0", "c1", "c2", **options)
    assert [piece.fidelity for piece in drill.window.pieces] == ["exact"] * 3
    drill.ask()
    drill.reorder(["c2", "c1"])
    drill.evict("c1")
    # The state is composed without what left; what stayed is as it was computed.
    assert [piece.fidelity for piece in drill.window.pieces] == ["exact", "survivor"]
    drill.recall("c1", "prefill")
    drill.patch_in_place("c1")
    drill.bare("c2")
    drill.recompute("c2", 1)
    drill.fork("x")
    drill.slide(2)
    drill.insert("c3", "c1")
    drill.replace("c3", "c4")
    drill.compact()
    drill.ask()
    drill.abandon()


def test_exact_windows_equal_one_forward_over_all_their_tokens():
    """What is called exact is what the model computes of the whole prompt at once, whatever was done before."""
    drill = drill_of("c0", "c1", "c2")
    drill.evict("c1")
    drill.recompute("c2")
    drill.append("c4")
    assert {piece.fidelity for piece in drill.window.pieces} == {"exact"}
    parts, start = [], 0
    for piece in drill.window.pieces:
        parts.append(drill.tokens[piece.id].shift(start))
        start += piece.entry.span
    whole = Tokens(
        jnp.concatenate([part.embeddings for part in parts], axis=1),
        np.concatenate([np.asarray(part.positions) for part in parts], axis=1),
    )
    kv = drill.backbone.prefill(whole).kv
    wanted = kvp.to_engine(drill.backbone.layout, kv, np.asarray(whole.positions)[0], 0)
    found = rows_of(drill.paged, drill.window)
    for name, value in wanted.items():
        own = np.asarray(value)[:, 0]
        assert np.abs(found[name] - own).max() <= BAR * np.abs(own).max(), name


def test_forks_share_transitions_and_unchanged_windows_compose_once():
    drill = drill_of("c0", "c1")
    books, composed = drill.paged.books, drill.paged.ledger.of("transition").launches
    drill.ask()
    drill.ask()
    assert drill.paged.ledger.of("transition").launches == composed
    drill.fork("x")
    held, shared = (drill.paged.books.held(branch, "c1").transition for branch in ("", "/x"))
    assert held is shared
    one = 4 * drill.backbone.layout.transition_numbers
    assert drill.paged.books.transition_bytes == books.transition_bytes == 2 * one
    drill.ask()
    assert drill.paged.ledger.of("transition").launches == composed

    # The branch's own, when it changes; the parent's stays what it is.
    drill.recompute("c1")
    assert drill.paged.books.held("", "c1").transition is held
    assert drill.paged.books.transition_bytes == 3 * one
    drill.abandon()
    drill.ask()
    assert drill.paged.books.transition_bytes == 2 * one


def test_bytes_of_transitions_are_of_pieces_and_of_what_is_kept_composed():
    """Every array once: an answer shares all but the map with the composition that it is decoded behind."""
    drill = drill_of("c0", "c1")
    executor, layout = drill.paged, drill.backbone.layout
    one = 4 * layout.transition_numbers
    drill.ask()  # c1 was prefilled behind c0 alone
    assert executor.transition_bytes == (2 + 2) * one
    drill.ask()
    assert executor.transition_bytes == (2 + 2) * one

    token = drill.tokens["c0"].take(0, 1)
    executor.decode(drill.window, token)
    own_map = 4 * layout.depth("map") * (layout.channel("map").rows or 0) * layout.channel("map").features
    assert executor.transition_bytes == (2 + 2) * one + own_map + one
    assert executor.books.transition_bytes == (2 + 1) * one + one

    # What is composed of a piece that left goes with the next composition.
    executor.discard(drill.window)
    drill.evict("c1")
    drill.ask()
    assert executor.transition_bytes == (1 + 1) * one
    for number in range(2, 8):
        drill.append(f"c{number}")
        drill.ask()
    assert executor.transition_bytes == (7 + 4) * one
    executor.renew()
    assert executor.transition_bytes == 0


def test_a_piece_behind_a_composed_window_is_composed_with_that():
    """One composition, whatever the window's length; bit for bit that of the window from its start."""
    drill = drill_of("c0", "c1", "c2")
    drill.ask()
    before = drill.paged.ledger.of("transition")
    drill.append("c3")
    pieces = [drill.paged.books.held("", id) for id in ("c0", "c1", "c2", "c3")]
    extended = drill.paged.pool.composed(pieces)
    spent = [
        getattr(drill.paged.ledger.of("transition"), name) - getattr(before, name) for name in ("launches", "flops")
    ]
    assert spent == [1, composing_flops(drill.backbone.layout)]

    stretches = [{name: np.asarray(value) for name, value in piece.transition.parts.items()} for piece in pieces]
    whole = fold(stretches, [piece.length for piece in pieces])
    for name, value in whole.items():
        np.testing.assert_array_equal(extended[name][:, 0], value, err_msg=name)


def test_other_orders_and_fewer_pieces_compile_nothing():
    drill = drill_of("c0", "c2", "c5", "c8")  # all of one length
    drill.ask()
    drill.reorder(["c5", "c8", "c2"])
    drill.evict("c2")
    drill.ask()
    drill.recall("c2", "prefill")
    window = drill.window.reorder(["c8", "c2", "c5"])
    question = tokens_of(drill.backbone, 99, 7)
    with compilations() as compiled:
        drill.paged.run(*window)
        np.asarray(drill.paged.prefill(window[0], question).logits)
        fewer = window[0].evict("c5")
        drill.paged.run(*fewer)
        np.asarray(drill.paged.prefill(fewer[0], question).logits)
    assert not compiled, compiled


def test_a_failed_run_leaves_rows_and_transitions(monkeypatch: pytest.MonkeyPatch):
    """The second of two forwards gives NaN; the first has made a transition that nobody holds then."""
    drill = drill_of("c0", "c1")
    before, held = rows_of(drill.paged, drill.window), drill.paged.books.held("", "c1").transition
    forwards, run = [], drill.backbone.prefill

    def failing(*args: Any, **options: Any) -> Any:
        out = run(*args, **options)
        forwards.append(args)
        return out if len(forwards) == 1 else out._replace(logits=out.logits * np.nan)

    again, first = drill.window.recompute("c1")
    both, second = again.append(drill.make("c3"))
    monkeypatch.setattr(drill.backbone, "prefill", failing)
    with pytest.raises(NotFiniteError):
        drill.paged.run(both, (*first, *second))
    monkeypatch.undo()
    assert len(forwards) == 2
    assert drill.paged.books.held("", "c1").transition is held
    after = rows_of(drill.paged, drill.window)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@SLOW
@pytest.mark.parametrize("parts", [(1, 1), (4, 3)])
def test_a_decoded_answer_becomes_a_piece_without_a_forward(parts: tuple[int, int]):
    """Its transition is that of its own tokens: fewer than the convolution reads, and more."""
    drill, count = drill_of("c0", "c1"), sum(parts)
    ids = np.random.default_rng(3).integers(3, 40, (1, count))
    positions = np.broadcast_to(np.arange(count, dtype=np.int32)[None, :, None], (1, count, 3))
    said = drill.backbone.embed(ids, position_ids=positions if drill.backbone.layout.rope.axes else None)
    behind = drill.model.run(said, drill.window.next_start)
    for begin, size in ((0, parts[0]), (parts[0], parts[1])):
        part = said.take(begin, begin + size)
        logits = drill.paged.decode(drill.window, part.shift(-int(np.asarray(part.positions).min())), "said")
    assert np.abs(np.asarray(logits - behind.logits)).max() <= BAR * np.abs(np.asarray(behind.logits)).max()

    drill.model.place("said", said, 2)
    window, edits = drill.window.append(Entry("said", None, count, count, "text"))
    assert [type(edit) for edit in edits] == [Compose, Prefill]
    counted = drill.paged.run(window, edits)
    assert not counted.of("Prefill").launches
    drill.windows[""] = window
    drill.compare()
    own = drill.paged.read(window, "said")
    for name, value in drill.model.find("said").kv.items():
        wanted = value[:, 0]
        assert np.abs(np.asarray(own[name]) - wanted).max() <= BAR * max(np.abs(wanted).max(), 1e-3), name
    drill.evict("c1")
    drill.ask()


def test_a_snapshot_is_placed_bit_for_bit():
    drill = drill_of("c0", "c1", "c2")
    drill.bare("c1")
    kept = taken(drill.paged, drill.window)
    before = rows_of(drill.paged, drill.window)
    other = Drill("hybrid")
    placed(other.paged, drill.window, kept)
    after = rows_of(other.paged, drill.window)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_removal_patch_mends_rows_and_transition():
    drill = drill_of("c0", "c1", "c2")
    conditioned = {name: np.asarray(value)[:, 0] for name, value in drill.model.find("c2").kv.items()}
    base = drill.window.antecedent("c2")
    drill.evict("c1")
    out = drill.model.run(drill.tokens["c2"], drill.window.start("c2"), 1)
    target = {name: np.asarray(value)[:, 0] for name, value in out.kv.items()}
    ranks = {"rows": 8, "transition": 256}
    patch = kvp.removal_patch(drill.chunks["c2"], target, conditioned, ranks, drill.window.target("c2"), base)
    drill.paged.provide("c2", patch=patch)
    drill.model.find("c2").kv = {name: value[:, None] for name, value in target.items()}
    drill.do(drill.window.condition("c2", patch, fetched=True))
    drill.ask()
