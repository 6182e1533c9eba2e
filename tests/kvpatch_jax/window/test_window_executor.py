"""Edits on a paged pool: what is refused or fails leaves everything as it was; forks, switches, dtypes, the mask."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import copy
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from window_drill import BAR, Drill, backbone_of
from window_oracle import rows_of, tokens_of

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import InputError, NotFiniteError, PatchMismatchError, PoolError, ShapeError, WindowError
from kvpatch_jax.window import Costs, Entry, PagedExecutor, Rotate, Window


class FailingPrefills:
    """Makes the prefills of a copy of a backbone fail after `left` more of them; None: never."""

    def __init__(self, backbone, nan: bool = False):
        self.left, self.nan = None, nan
        self._prefill, self.backbone = backbone.prefill, copy.copy(backbone)
        self.backbone.prefill = self.prefill

    def prefill(self, *args, **options):
        out = self._prefill(*args, **options)
        if self.left is not None:
            self.left -= 1
            if self.left < 0 and self.nan:
                return out._replace(logits=out.logits * np.nan)
            if self.left < 0:
                raise RuntimeError("no memory left")
        return out


def bits(executor) -> dict[str, np.ndarray]:
    pools = executor.pool.vectors
    return {
        f"{side}.{name}": np.asarray(value).copy()
        for side, vectors in zip(("engine", "source"), pools, strict=True)
        for name, value in vectors.items()
    }


def lying(executor, window) -> dict[str, np.ndarray]:
    """Bits of every slot that a window owns, in the pool and in its source."""
    slots = np.concatenate([held.slots for held in executor.books.ordered(window.branch)])
    return {name: value.reshape(len(value), -1, *value.shape[3:])[:, slots] for name, value in bits(executor).items()}


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return first.keys() == second.keys() and all((first[name] == second[name]).all() for name in first)


@pytest.fixture
def drill() -> Drill:
    made = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        made.append(id)
    return made


@pytest.mark.parametrize("nan", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failed_forward_changes_neither_pool_nor_books(nan: bool):
    """Others were turned, dropped and overwritten by then."""
    drill = Drill("gqa", pages=4)
    broken = FailingPrefills(drill.backbone, nan)
    drill.paged.backbone = broken.backbone
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    before, pool, books = drill.window, lying(drill.paged, drill.window), drill.paged.books
    counts = books.allocator.counts
    one, dropped = before.evict("c1")
    two, first = one.append(drill.make("c4"))  # into the slots of c1
    three, second = two.append(drill.make("c3"))
    broken.left = 1
    with pytest.raises(NotFiniteError if nan else RuntimeError):
        drill.paged.run(three, (*dropped, *first, *second))
    assert drill.paged.books is books
    assert (drill.paged.books.allocator.counts == counts).all()
    assert same(lying(drill.paged, before), pool)
    drill.compare()

    broken.left = None
    drill.paged.run(three, (*dropped, *first, *second))
    drill.model.remove("c1")
    for id in ("c4", "c3"):
        drill.model.place(id, drill.tokens[id], len(drill.model.parts))
    drill.windows[""] = three
    drill.compare()


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_edits_that_cannot_run_are_refused_before_anything_is_written(drill: Drill):
    paged, window = drill.paged, drill.window
    big = tokens_of(drill.backbone, 5, 8)
    unknown = Entry("c9", None, 8, 8)
    blind = Window.empty(Costs.of(backbone_of("gqa"), jnp.float32))
    other = dataclasses.replace(window, costs=dataclasses.replace(window.costs, backbone="f" * 64))
    before, pools, books = bits(paged), paged.pool.vectors, paged.books

    full = window
    edits: tuple = ()
    for index in range(50):
        paged.provide(f"d{index}", tokens=big)
        full, more = full.append(Entry.of_tokens(f"d{index}", big, kind="chunk"))
        edits += more
    gone, dropping = window.evict("c2")
    wrong, placing = window.append(dataclasses.replace(drill.make("c5"), content="another"), "bare", fetched=True)
    fetched, fetching = window.append(Entry("c8", None, 8, 8), "bare")
    for error, words, target, run in (
        (PoolError, "pages", full, edits),
        (InputError, "provide", *window.append(unknown)),
        (InputError, "no store", fetched, fetching),
        (PatchMismatchError, "content", wrong, placing),
        (WindowError, "nothing more", gone, ()),
        (WindowError, "no piece", gone, (*dropping, *dropping)),
        (WindowError, "where it is", window, (Rotate("c1", 2, 3),)),
        (WindowError, "backbone", other, ()),
        (WindowError, "'c0'", blind, ()),
        (WindowError, "expected those", window, (object(),)),
    ):
        with pytest.raises(error, match=words):
            paged.run(target, run)
        assert paged.pool.vectors is pools
        assert paged.books is books
    assert same(bits(paged), before)
    for stale in (gone, other, blind):
        with pytest.raises(WindowError):
            paged.context(stale)
    drill.compare()


@pytest.mark.slow
def test_a_window_in_other_states_is_refused(drill: Drill):
    bare, _ = drill.window.bare("c1")
    with pytest.raises(WindowError, match="other states"):
        drill.paged.context(bare)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_provided_inputs_are_checked(drill: Drill):
    paged, chunk, tokens = drill.paged, drill.chunks["c1"], drill.tokens["c1"]
    two = Tokens(jnp.repeat(tokens.embeddings, 2, 0), np.repeat(tokens.positions, 2, 0))
    foreign = dataclasses.replace(chunk, backbone="f" * 64)
    for error, given in (
        (PatchMismatchError, {"chunk": drill.chunks["c2"]}),
        (PatchMismatchError, {"chunk": foreign}),
        (ShapeError, {"tokens": tokens, "length": 99}),
        (ShapeError, {"tokens": tokens.take(0, 3)}),
        (InputError, {"tokens": two}),
        (InputError, {"tokens": "text"}),
    ):
        with pytest.raises(error):
            paged.provide("c1", **given)
    with pytest.raises(InputError, match="first"):
        paged.provide("new", hidden={1: np.zeros((4, 64), np.float32)})


@pytest.mark.slow
def test_forks_share_slots_until_one_changes_a_piece(drill: Drill):
    paged, parent = drill.paged, drill.window
    before, used = lying(paged, parent), paged.books.allocator.free
    drill.fork("x")
    assert paged.books.allocator.free == used  # no slot was taken
    assert same(lying(paged, drill.window), before)
    drill.bare("c1")
    drill.evict("c1")  # c2 turns: to slots of its own
    own, theirs = (paged.books.held(branch, "c2").slots for branch in (drill.branch, ""))
    assert not set(own.tolist()) & set(theirs.tolist())
    assert paged.ledger.of("copy on write").bytes > 0
    assert same(lying(paged, parent), before)
    drill.branch = ""
    drill.compare()
    drill.branch = "/x"
    drill.abandon()
    assert "/x" not in paged.books.branches
    drill.ask()


def test_a_fork_that_is_released_changes_no_bit(drill: Drill):
    before, counts = lying(drill.paged, drill.window), drill.paged.books.allocator.counts
    drill.fork("x")
    drill.abandon()
    assert same(lying(drill.paged, drill.window), before)
    assert (drill.paged.books.allocator.counts == counts).all()


def test_a_chunk_is_bare_in_a_fork_and_as_it_was_in_the_parent():
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    drill.evict("c1")  # so that c2 was turned once
    before = lying(drill.paged, drill.window)
    drill.fork("x")
    drill.bare("c2")
    assert not same(lying(drill.paged, drill.window), before)
    drill.abandon()
    assert same(lying(drill.paged, drill.window), before)


@pytest.mark.slow
def test_a_removal_patch_is_added_to_the_conditioned_kv():
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    held = drill.window
    conditioned = {name: np.asarray(value)[:, 0] for name, value in drill.model.find("c2").kv.items()}
    base = held.antecedent("c2")
    drill.evict("c1")
    target = {
        name: np.asarray(value)[:, 0]
        for name, value in drill.model.run(drill.tokens["c2"], drill.window.start("c2"), 1).kv.items()
    }
    # The window remembers: what a prefill in its place would meet, and that is c0 as it stands.
    patch = kvp.removal_patch(drill.chunks["c2"], target, conditioned, 8, drill.window.target("c2"), base)
    drill.paged.provide("c2", patch=patch)
    drill.model.find("c2").kv = {name: value[:, None] for name, value in target.items()}
    drill.bar = 1e-3  # of rank 8
    drill.do(drill.window.condition("c2", patch, fetched=True))


@pytest.mark.slow
def test_forty_rotations_in_bfloat16_round_once():
    """Each is one rounding away from float64, because all start from the phase-free source."""
    drill = Drill("gqa")
    paged = PagedExecutor(drill.backbone, 8, 8, jnp.bfloat16)
    window = Window.empty(drill.backbone)
    for id in ("c0", "c1"):
        drill.make(id)
        paged.provide(id, tokens=drill.tokens[id])
        window, edits = window.append(Entry.of(drill.chunks[id]))
        paged.run(window, edits)
    start = window.start("c1")
    first = np.asarray(rows_of(paged, window)["k"], np.float64)[:, -7:]
    there = [Rotate("c1", start + step, start + step + 1) for step in range(39)]
    paged.run(window, (*there, Rotate("c1", start + 39, start)))
    found = np.asarray(rows_of(paged, window)["k"], np.float64)[:, -7:]
    assert (found == first).all()
    assert paged.ledger.of("Rotate").launches == 40


@pytest.mark.slow
def test_remembering_is_the_model_under_a_chunk_banded_mask():
    """One dense prefill of the whole history: each token sees its chunk and those that the window held by then.

    Without a lead everything that stays moves up alike, so that distances are those of the history.
    """
    drill = Drill("gqa")
    backbone, window = drill.backbone, Window.empty(drill.window.costs, lead=0)
    held, seen, parts = [], {}, []
    for index in range(6):
        id = f"c{index}"
        entry = drill.make(id)
        edits: tuple = ()
        if len(held) == 3:
            window, edits = window.slide(2)
            held = held[1:]
        window, more = window.append(entry)
        drill.paged.run(window, (*edits, *more))
        held.append(id)
        seen[id] = set(held)
        parts.append(id)
    lengths = [drill.tokens[id].embeddings.shape[1] for id in parts]
    owner = np.repeat(parts, lengths)
    mask = np.array([[key in seen[query] for key in owner] for query in owner]) & np.tri(len(owner), dtype=bool)
    embeddings = jnp.concatenate([drill.tokens[id].embeddings for id in parts], axis=1)
    places = np.arange(len(owner), dtype=np.int32)[None]
    dense = backbone.prefill(Tokens(embeddings, places), mask=mask[None, None])
    kept = np.isin(owner, held)
    own = {name: value[:, :, kept] for name, value in dense.kv.items()}
    engine = kvp.to_engine(backbone.layout, own, np.arange(kept.sum(), dtype=np.int32), 0)
    for name, value in rows_of(drill.paged, window).items():
        expected = np.asarray(engine[name])[:, 0]
        assert np.abs(value - expected).max() <= 1e-5 * np.abs(expected).max()
    assert {window.fidelity(id) for id in held} == {"survivor"}


@pytest.mark.slow
def test_compaction_is_suggested_only_if_it_pays():
    drill = Drill("gqa", aligned=False)
    for index in range(5):
        drill.append(f"c{index}")
    assert drill.paged.compaction(steps=1000) is None  # without holes
    drill.evict("c1", "c3")
    edit = drill.paged.compaction(steps=1000)
    assert edit is not None
    drill.paged.run(drill.window, (edit,))
    drill.compare()
    moved = drill.paged.ledger.of("Compact")
    assert moved.bytes == edit.bytes
    assert moved.launches == 1
    assert drill.paged.compaction(steps=1000) is None
    context = drill.paged.context(drill.window)
    assert drill.paged.context(Window.empty(drill.window.costs, branch="other")) is None
    assert context is not None


@pytest.mark.slow
def test_survivors_rotate_in_one_launch(drill: Drill):
    drill.append("c3")
    window, edits = drill.window.evict("c1")
    counted = drill.paged.run(window, edits)
    assert len(edits) == 3
    tokens = sum(window.piece(id).entry.tokens for id in ("c2", "c3"))
    tally, layout = counted["Rotate"], drill.backbone.layout
    each = 2 * layout.layers * layout.channel("k").features * 4
    assert (tally.launches, tally.bytes, tally.padded_bytes) == (1, each * tokens, each * 16)
    assert set(counted) == {"Rotate"}


@pytest.mark.slow
def test_answers_equal_those_behind_plain_kv(drill: Drill):
    question = tokens_of(drill.backbone, 50, 6)
    start = drill.window.next_start
    expected = drill.backbone.generate(question.shift(start), 5, drill.model.context())
    assert drill.paged.generate(drill.window, question, 5).tolist() == expected.tolist()
    pieces = [piece.ids.tolist() for piece in drill.paged.stream(drill.window, question, 5)]
    assert np.array(pieces).T.tolist() == expected.tolist()


@pytest.mark.slow
def test_a_decoded_answer_becomes_a_piece_without_a_forward():
    """Token by token; appended it needs no forward, and turns like any other."""
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    text = tokens_of(drill.backbone, 60, 6)
    expected = drill.model.run(text, drill.window.next_start).logits
    free = drill.paged.books.allocator.free
    parts = [text.take(0, 3), *(text.take(place, place + 1) for place in range(3, 6))]
    for part in parts:
        logits = drill.paged.decode(drill.window, part.shift(-int(part.positions.min())), "said")
    assert np.abs(np.asarray(logits - expected)).max() <= BAR * np.abs(np.asarray(expected)).max()
    drill.ask()  # the window is as it was
    with pytest.raises(InputError, match="expected 'said'"):
        drill.paged.decode(drill.window, parts[1].shift(-3), "another")
    drill.paged.discard(drill.window)
    assert drill.paged.books.allocator.free == free

    for part in parts:
        drill.paged.decode(drill.window, part.shift(-int(part.positions.min())), "said")
    window, edits = drill.window.append(Entry.of_tokens("said", text))
    counted = drill.paged.run(window, edits)
    assert set(counted) == {"adopted"}
    drill.tokens["said"] = text
    drill.model.place("said", text, 3)
    drill.windows[""] = window
    drill.compare()
    drill.evict("c1")
    for part in parts[:2]:
        drill.paged.decode(drill.window, part.shift(-int(part.positions.min())), "more")
    drill.append("c4")  # lets go of it
    assert not drill.paged.books.answers


@pytest.mark.slow
def test_a_decoded_answer_follows_a_compaction_and_ends_with_its_branch():
    """What grows behind one branch is moved with the pool, and is given up where its branch is released."""
    drill = Drill("gqa", aligned=False)
    drill.append("c0")
    drill.fork("side")
    drill.append("c1")
    paged, root = drill.paged, drill.windows[""]
    text = tokens_of(drill.backbone, 60, 6)
    expected = drill.naive[""].run(text, root.next_start).logits
    paged.decode(root, text.take(0, 5), "said")
    for window, edits in (side := drill.window.evict("c1"), side[0].compact()):
        paged.run(window, edits)
    assert (paged.books.owners() == paged.books.allocator.counts).all()
    logits = paged.decode(root, text.take(5, 6).shift(-5), "said")
    assert np.abs(np.asarray(logits - expected)).max() <= BAR * np.abs(np.asarray(expected)).max()

    paged.decode(side[0].compact()[0], text.take(0, 5), "tried")
    paged.release("/side")
    assert set(paged.books.answers) == {""}
    paged.discard(root)
    assert set(paged.books.branches) == {""}
    assert (paged.books.owners() == paged.books.allocator.counts).all()
    assert (paged.books.allocator.counts > 0).sum() == root.tokens
