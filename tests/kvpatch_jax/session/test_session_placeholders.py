"""Placeholders: a text takes the place of a chunk that leaves, and the texts around it stay."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import dataclasses

import numpy as np
import pytest
from session_cases import QUESTION, image_of, logits, state

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.plan import Certificate, CertifiedLoss, DeviceCosts, RankChoice, Rates
from kvpatch_jax.session import CheapestKeep
from kvpatch_jax.traces import Event

LEAD, LEFT = "w5 w6", "w9 w10"


def prompted(backbone, items) -> np.ndarray:
    """Returns the logits of a question behind a prompt of these items, which the model reads in one piece."""
    prompt = backbone.prepare([kvp.Text(item) if isinstance(item, str) else item for item in [*items, QUESTION]])
    return np.asarray(backbone.prefill(backbone.embed(**prompt)).logits)


def expect_prompt(session, items, bar: float = 2e-4) -> None:
    np.testing.assert_allclose(logits(session), prompted(session.backbone, items), atol=bar, rtol=0)


def add_steps(session, *numbers: int) -> None:
    """Adds an image and a text for each number."""
    for number in numbers:
        session.add(image_of(number), id=f"shot {number}")
        session.add(f"w{20 + number}")


@pytest.mark.parametrize("promise", ["forget", "remember"])
@pytest.mark.parametrize("keep", [(1, 3), *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
def test_answers_are_those_of_the_window_as_a_prompt(backbone, keep, promise):
    low, high = keep if isinstance(keep, tuple) else (keep, keep)
    with kvp.Session(backbone, None, keep, lead=LEAD, promise=promise, placeholder=LEFT) as session:
        shown = []
        for number in range(5):
            add_steps(session, number)
            # By hand: what is shown once the oldest have left.
            shown = [*shown, number]
            if len(shown) > high:
                shown = shown[-low:]
            items = [LEAD]
            for step in range(number + 1):
                items += [image_of(step) if step in shown else LEFT, f"w{20 + step}"]
            expect_prompt(session, items)
            assert session.window.as_promised
            assert session.stats().placeholders == number + 1 - len(shown)
            assert len(session) == 1 + 2 * (number + 1)
        assert [name for name in session.ids if name.startswith("shot")][:2] == ["shot 0 left", "shot 1 left"]
        assert session.gone[:2] == ("shot 0", "shot 1")
        audited = session.ask(QUESTION, steps=2, audit=True)
        str(audited)
        assert audited.audit.as_promised
        assert audited.audit.kl < 1e-6


def test_without_a_placeholder_texts_leave_with_their_chunks(backbone):
    """The option is what keeps texts; without it nothing has changed."""
    with kvp.Session(backbone, None, 1, lead=LEAD, promise="forget") as session:
        add_steps(session, 0, 1)
        expect_prompt(session, [LEAD, image_of(1), "w21"])
        assert session.stats().placeholders == 0


def test_what_a_placeholder_costs_is_what_a_policy_is_priced_at(backbone):
    done = []
    with kvp.Session(backbone, None, (1, 2), lead=LEAD, promise="forget", placeholder=LEFT) as session:
        for number in range(5):
            add_steps(session, number)
            done.append(session.stats())
        costs = session.window.costs
        chunk = session.window.pieces[-2].entry
        sizes = kvp.plan.LoopSizes(chunk.tokens, 1, 2, placeholder=2, span=chunk.span, steps=4)
    price = kvp.plan.price_policy(kvp.plan.EvictionPolicy(1, 2, placeholder=True), sizes, costs=costs)
    # A ledger counts the logits of each forward, which are no part of an edit.
    forwards, flops = done[-1].forwards - done[0].forwards, done[-1].flops - done[0].flops
    assert (price.steps, price.flops) == (4, flops - forwards * costs.forward.logit)


def test_a_chunk_that_left_comes_back_and_its_placeholder_stays(backbone):
    with kvp.Session(backbone, None, 1, lead=LEAD, promise="forget", placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        assert session.recall("shot 0") == "shot 0"
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", image_of(0)])
        # It leaves again, under a name that is free.
        assert session.add(image_of(1)) == "shot 1"
        assert [name for name in session.ids if "left" in name] == ["shot 0 left", "shot 1 left", "shot 0 left#2"]
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", LEFT, image_of(1)])
        assert session.window.as_promised


def test_forks_have_placeholders_of_their_own(backbone):
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        with session.fork() as branch:
            add_steps(branch, 2)
            expect_prompt(branch, [LEAD, LEFT, "w20", LEFT, "w21", image_of(2), "w22"])
        expect_prompt(session, [LEAD, LEFT, "w20", image_of(1), "w21"])
        add_steps(session, 3)
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", image_of(3), "w23"])


@pytest.mark.parametrize("kv", [True, False])
def test_a_saved_session_keeps_them(backbone, tmp_path, kv):
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        before = logits(session)
        session.save(tmp_path / "session", kv=kv)
    with kvp.Session.restore(tmp_path / "session", backbone) as session:
        assert session.config.placeholder == LEFT
        np.testing.assert_allclose(logits(session), before, atol=0 if kv else 2e-4)
        add_steps(session, 2)
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", image_of(2), "w22"])
        session.recall("shot 0")
        expect_prompt(session, [LEAD, LEFT, "w20", LEFT, "w21", LEFT, "w22", image_of(0)])


def test_a_store_serves_the_same_placeholders_again(backbone, tmp_path):
    """Text is part of what a stored prefill was computed behind."""
    with kvp.ChunkStore(tmp_path / "store") as store:
        seen = []
        for left in (LEFT, LEFT, "w11"):
            with kvp.Session(backbone, store, 1, lead=LEAD, placeholder=left) as session:
                add_steps(session, 0, 1, 2)
                expect_prompt(session, [LEAD, left, "w20", left, "w21", image_of(2), "w22"])
                session.runtime.former.flush()
                seen.append(session.stats().hits)
    assert seen == [0, 3, 1]


@pytest.mark.parametrize("options", [{"placeholder": LEFT}, {"promise": "forget"}])
def test_what_was_deleted_from_the_store_is_prefilled_and_as_promised(backbone, tmp_path, monkeypatch, options):
    with kvp.ChunkStore(tmp_path / "store") as store:
        with kvp.Session(backbone, store, 2, lead=LEAD, **options) as session:
            add_steps(session, 0, 1, 2)
            expected = logits(session)
        with kvp.Session(backbone, store, 2, lead=LEAD, **options) as session:
            add_steps(session, 0, 1)
            monkeypatch.setattr(store, "get", lambda *args, **options: None)  # since it was looked for
            add_steps(session, 2)
            assert session.stats().hits == 2
            assert session.window.as_promised
            np.testing.assert_allclose(logits(session), expected, atol=2e-4)


def test_an_uncertified_session_may_leave_what_follows_as_it_is(backbone):
    with kvp.Session(backbone, None, 2, lead=LEAD, placeholder=LEFT, uncertified=True) as session:
        add_steps(session, 0, 1, 2)
        assert session.fidelity("shot 0 left") == "exact"
        assert session.fidelity("shot 1") == "approximate"
        assert not session.window.as_promised


def test_what_leaves_by_hand_leaves_nothing(backbone):
    with kvp.Session(backbone, None, 2, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0, 1, 2)
        assert session.evict("shot 0 left") == ()
        assert session.evict("shot 1") == ("shot 1",)
        assert session.slide(0) == ("shot 2",)
        assert len(session) == 1


def test_a_trace_says_what_took_whose_place(backbone):
    events: list[Event] = []
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        session.watchers.append(lambda event, _: events.append(event))
        add_steps(session, 0, 1)
        session.recall("shot 0")
    told = [
        (event.op, event.chunk, event.replaced, event.text)
        for event in events
        if event.kind == "chunk" or event.replaced
    ]
    assert told == [
        ("add", "shot 0", None, None),
        ("replace", "shot 0 left", "shot 0", LEFT),
        ("add", "shot 1", None, None),
        ("replace", "shot 1 left", "shot 1", LEFT),
        ("recall", "shot 0", None, None),
        ("close", None, None, None),
    ]


def test_an_image_that_cannot_be_placed_leaves_everything_as_it_was(backbone):
    with kvp.Session(backbone, None, 2, lead=LEAD, placeholder=LEFT, pages=10, page_size=16) as session:
        add_steps(session, 0, 1)
        before = state(session), session.stats()
        with pytest.raises(kvp.errors.PoolError):
            session.add(image_of(2, 28 * 150))
        assert (state(session), session.stats()) == before
        assert "shot 0 left" not in session.runtime.executor.sources
        add_steps(session, 3)
        expect_prompt(session, [LEAD, LEFT, "w20", image_of(1), "w21", image_of(3), "w23"])


def test_a_plan_shows_them_and_changes_nothing(backbone):
    with kvp.Session(backbone, None, 1, lead=LEAD, placeholder=LEFT) as session:
        add_steps(session, 0)
        before = state(session), session.stats()
        planned = session.plan(image_of(1))
        assert planned.window.ids[1] == "shot 0 left"
        assert planned.as_promised
        assert (state(session), session.stats()) == before


@pytest.mark.parametrize("text", ["", "  ", 3, ["w5"], b"w5"])
def test_what_is_no_text_is_refused(backbone, text, unchecked):
    with pytest.raises(SessionError, match=r"session\.placeholder: got .*; expected a text such as"):
        kvp.Session(backbone, placeholder=text)


def test_a_text_that_is_a_file_or_too_long_is_refused(backbone):
    with pytest.raises(InputError, match=r"session: placeholder"):
        kvp.Session(backbone, placeholder="shot.png")
    with pytest.raises(SessionError, match=r"session\.placeholder: got .* 3 tokens; expected 1 to 2"):
        kvp.Session(backbone, placeholder="w5 w6 w7", largest_text=2)


# ------------------------------------------------------------------------------------------- the cheapest way


def add_images(session, first: int, last: int) -> None:
    for number in range(first, last):
        session.add(image_of(number), id=f"shot {number}")


@pytest.mark.parametrize(
    ("promise", "names"),
    [("remember", ("slide, 2", "batched slide, 2 to ")), ("forget", ("batched eviction, 2 to ",))],
)
def test_the_cheapest_way_is_chosen_and_told(backbone, promise, names):
    with kvp.Session(backbone, None, CheapestKeep(2, 5), lead=LEAD, promise=promise) as session:
        add_images(session, 0, 2)
        assert session.keep == CheapestKeep(2, 5)
        assert session.stats().policy is None
        add_images(session, 2, 3)
        chosen, policy = session.keep.chosen, str(session.stats().policy)
        # What forgets would prefill all that stays at each step, so the classic way is taken.
        assert policy.startswith(names)
        assert f"policy    {policy.splitlines()[0]}" in str(session.stats())

        # It behaves as that pair does.
        add_images(session, 3, 8)
        ids, answers = session.ids, logits(session)
        assert session.window.as_promised
        with session.fork() as branch:
            assert (branch.keep, branch.stats().policy) == (session.keep, policy)
        with session.fork(keep=1) as branch:
            assert (branch.keep, branch.stats().policy) == (1, None)
    with kvp.Session(backbone, None, chosen, lead=LEAD, promise=promise) as pair:
        add_images(pair, 0, 8)
        assert pair.ids == ids
        np.testing.assert_array_equal(logits(pair), answers)
        assert pair.stats().policy is None


@pytest.mark.parametrize(("kl", "fidelity"), [(0.01, "survivor"), (0.2, "exact")])
def test_a_certificate_that_bounds_survivors_lets_a_window_that_forgets_slide(backbone, kl, fidelity):
    """The goal of a session with a certificate is 0.05 nats."""
    row = CertifiedLoss("survivor", 0, 0, "forget", 0.0, 0.0, 0.0, kl, 0.95, 0.9, 1.0, 0.5, 0.0, 0.0, 40)
    rows = (row, dataclasses.replace(row, behind=9))
    texts = ("tiny", "2026-11-22", 0.95, 20, 20, 9, 999, "images", "questions", True)
    signed = Certificate(backbone.fingerprint, *texts, rows, RankChoice(4, "invented"), (), (1, 99), ("image",))
    rates = {kind: Rates(flop=1.0) for kind in ("Prefill", "Recompute")}
    options = {"promise": "forget", "certificate": signed, "costs": DeviceCosts("slow", None, rates)}
    with kvp.Session(backbone, None, CheapestKeep(2, 4), lead=LEAD, **options) as session:
        add_images(session, 0, 5)
        assert session.keep.chosen == ((2, 2) if fidelity == "survivor" else (2, 4))
        assert str(session.stats().policy).startswith(
            "slide, 2" if fidelity == "survivor" else "batched eviction, 2 to 4"
        )
        assert session.fidelity("shot 3") == fidelity


def test_the_choice_is_that_of_the_policies_at_these_sizes(backbone):
    with kvp.Session(backbone, None, CheapestKeep(1, 4), lead=LEAD, promise="forget", placeholder=LEFT) as session:
        add_steps(session, 0, 1)
        chunk = session.window.piece("shot 1" if "shot 1" in session.window else session.window.ids[-2]).entry
        sizes = kvp.plan.LoopSizes(chunk.tokens, 1, 2, placeholder=2, span=chunk.span)
        expected = kvp.plan.compare_policies(
            sizes, 1, 4, costs=session.window.costs, promise="forget", keep_text=True, never=False
        ).cheapest.policy
        assert session.keep.chosen == (expected.low, expected.high)
        assert expected.placeholder


def test_a_saved_session_keeps_its_choice(backbone, tmp_path):
    with kvp.Session(backbone, None, CheapestKeep(1, 3), lead=LEAD, promise="forget") as session:
        session.save(tmp_path / "before")
        add_images(session, 0, 2)
        session.save(tmp_path / "after")
        keep, policy = session.keep, session.stats().policy
    assert keep.chosen is not None
    with kvp.Session.restore(tmp_path / "before", backbone) as session:
        assert (session.keep, session.stats().policy) == (CheapestKeep(1, 3), None)
    with kvp.Session.restore(tmp_path / "after", backbone) as session:
        assert (session.keep, session.stats().policy) == (keep, policy)


def test_a_budget_that_no_policy_meets_leaves_the_bounds_as_they_are(backbone):
    """A plan is asked for one piece at a time, and a policy for a whole step."""
    costs = kvp.plan.DeviceCosts("a desk", None, {"Prefill": kvp.plan.Rates(1.0)})
    goal = kvp.plan.Goal(kl=1.0, seconds=1.5)
    with kvp.Session(backbone, None, CheapestKeep(1, 3), lead=LEAD, goal=goal, costs=costs) as session:
        add_steps(session, 0, 1)
        assert session.keep.chosen == (1, 3)
        assert "a step of 2 s is beyond the goal" in str(session.stats().policy)


@pytest.mark.parametrize(
    "numbers", [(0, 2), (3, 2), (1.0, 2), (True, 2), (1, 4, (0, 2)), (1, 4, (3, 2)), (1, 4, (2, 5))]
)
def test_bounds_that_are_none_are_refused(numbers, unchecked):
    with pytest.raises(SessionError, match=r"session\.keep: got CheapestKeep\(.*; expected 1 <= low <= high"):
        CheapestKeep(*numbers)
