"""A question in one forward with what is appended in front of it: as two forwards, and nothing of it is kept."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import jax.numpy as jnp
import numpy as np
import pytest
from window_drill import BAR, Drill
from window_oracle import rows_of, tokens_of

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import NotFiniteError, PoolError, PoolLostError, ShapeError, WindowError
from kvpatch_jax.window import ApplyPatch, Copy, Fetch, Prefill, programs


@pytest.fixture(scope="module")
def drill() -> Drill:
    drill = Drill("gqa", pages=5, page_size=8)
    for id in ("c0", "c1"):
        drill.append(id)
    return drill


def asked(drill: Drill, id: str, question: Tokens, length: int | None = None) -> np.ndarray:
    """Slides to one chunk, appends another and asks, both ways, the second in a fork; the logits of `ask`."""
    backbone, executor, entry = drill.backbone, drill.paged, drill.make(id)
    window, slid = drill.window.slide(keep=1)
    window, placed = window.append(entry)
    before, count = executor.ledger, question.embeddings.shape[1] if length is None else length
    found = np.asarray(executor.ask(window, (*slid, *placed), question, length))
    counted = executor.ledger - before

    drill.model.remove(*(part.id for part in drill.model.parts if part.id not in window))
    drill.model.place(id, drill.tokens[id], len(drill.model.parts))
    drill.windows[""] = window
    drill.compare()
    expected = np.asarray(drill.model.run(question, window.next_start).logits)
    assert found.shape == (1, 1, expected.shape[-1])
    if length is None:
        assert np.abs(found - expected).max() <= BAR * np.abs(expected).max()
    again = np.asarray(executor.prefill(window, question, length).logits)
    assert np.abs(found - again).max() <= BAR * np.abs(again).max()

    # What was counted is what the edits say, the question beside it as a forward of its own would be.
    costs = backbone.forward_costs
    behind = sum(piece.entry.tokens for piece in window.pieces[:-1])
    assert (counted["Prefill"].flops, counted["Prefill"].bytes) == (placed[-1].flops, placed[-1].bytes)
    assert counted["question"].flops == costs.flops(count, behind + entry.tokens) + costs.logit
    assert counted["Prefill"].launches + counted["question"].launches == 2  # a forward, and the launch that writes
    assert counted.total.padded_flops >= counted.total.flops
    return found


@pytest.fixture
def forwards(drill: Drill, monkeypatch) -> list[Tokens]:
    """What each forward is given."""
    given = []
    own = drill.backbone.prefill_padded
    monkeypatch.setattr(
        drill.backbone, "prefill_padded", lambda *args, **more: (given.append(args[0]), own(*args, **more))[1]
    )
    return given


@pytest.mark.slow
def test_a_fused_question_equals_two_forwards(drill: Drill, forwards):
    asked(drill, "c2", tokens_of(drill.backbone, 99, 3))
    assert [one.embeddings.shape[1] for one in forwards] == [8 + 4]


@pytest.mark.slow
def test_a_fused_question_ignores_its_padding(drill: Drill, forwards):
    """Of more tokens than its bucket has; five pages hold three chunks and no question."""
    long = tokens_of(drill.backbone, 98, 21)
    found = asked(drill, "c3", long, 3)
    short = np.asarray(drill.paged.prefill(drill.window, long.take(0, 3)).logits)
    assert np.abs(found - short).max() <= BAR * np.abs(short).max()
    assert [one.embeddings.shape[1] for one in forwards] == [8 + 21]


@pytest.mark.slow
def test_a_refused_question_changes_nothing():
    drill = Drill("gqa", pages=4, page_size=8)
    for id in ("c0", "c1"):
        drill.append(id)
    executor, window = drill.paged, drill.window
    bits = rows_of(executor, window)
    question = tokens_of(drill.backbone, 99, 3)
    there, edits = window.append(drill.make("c4"))
    broken = question._replace(embeddings=question.embeddings.at[0, 1, 0].set(jnp.nan))
    for wrong, error in ((question.take(0, 0), ShapeError), (broken, NotFiniteError)):
        with pytest.raises(error):
            executor.ask(there, edits, wrong)
        drill.compare()
    with pytest.raises(WindowError):
        executor.ask(there, (), question)  # edits that do not lead there
    # A chunk a page: c6 takes the third of four, and of the two behind it the second finds none.
    drill.append("c6")
    full, more = drill.window.append(drill.make("c7"))
    fuller, most = full.append(drill.make("c9"))
    with pytest.raises(PoolError, match="free"):
        executor.ask(fuller, (*more, *most), question)
    drill.compare()
    drill.evict("c6")
    assert all((value == bits[name]).all() for name, value in rows_of(executor, drill.window).items())


def test_edits_that_end_in_no_prefill_give_the_question_its_own_forward(drill: Drill):
    question, last = tokens_of(drill.backbone, 99, 3), drill.window.pieces[-1].entry.id
    fork, sharing = drill.window.fork()
    window, edits = fork.bare(last)
    drill.paged.run(fork, sharing)
    found = np.asarray(drill.paged.ask(window, edits, question))
    assert (found == np.asarray(drill.paged.prefill(window, question).logits)).all()
    drill.paged.release(fork.branch)
    drill.compare()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mla", "mrope", "experts", "unlike"])
def test_every_layout_asks_in_one_forward(name: str):
    drill = Drill(name, pages=8, aligned=False)
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    for id, length in (("c3", 3), ("c4", 7), ("c5", 1)):
        asked(drill, id, tokens_of(drill.backbone, 99, length))


def test_a_lost_pool_is_reported_and_renewed(monkeypatch):
    drill = Drill("gqa", pages=5, page_size=8)
    for id in ("c0", "c1", "c2"):
        drill.append(id)
    window, edits = drill.window.evict("c1")  # c2 is a survivor now

    def dies(layout, pools, *_, **__):
        for value in (*pools.engine.values(), *pools.source.values()):
            value.delete()
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(programs, "rotate_slots", dies)
        with pytest.raises(PoolLostError, match=r"expected `renew\(\)`") as caught:
            drill.paged.run(window, edits)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(PoolLostError):
        drill.paged.run(window, edits)

    anew, edits = window.anew()
    drill.paged.renew()
    drill.model.parts = []
    for id in ("c0", "c2"):
        drill.model.place(id, drill.tokens[id], len(drill.model.parts))
    drill.do((anew, edits))
    assert (window.fidelity("c2"), anew.fidelity("c2")) == ("survivor", "exact")
    drill.append("c3")


@pytest.mark.slow
def test_anew_keeps_bare_and_patched_states():
    """Bare and patched chunks stay so, in a pool that is renewed; what only the old pool had is gone."""
    drill = Drill("gqa")
    for id in ("c0", "c1", "c2", "c3"):
        drill.append(id)
    drill.bare("c1")
    drill.patch_in_place("c2")
    window, edits = drill.window.anew()
    assert [type(edit) for edit in edits] == [Fetch, Fetch, Fetch, Copy, ApplyPatch, Prefill, Prefill]
    drill.paged.renew()
    drill.paged.run(window, edits)
    states = lambda of: [piece.state.kind for piece in of.pieces]
    assert states(window) == states(drill.window) == ["conditioned", "bare", "patched", "conditioned"]
