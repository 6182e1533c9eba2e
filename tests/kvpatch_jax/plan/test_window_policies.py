"""Prices of ways to keep a window, against the edits of windows and plans that do it, step by step."""
# pyright: reportArgumentType=false

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from plan_cases import BACKBONE, COSTS, DEVICES, certificate
from window_oracle import tiny, tokens_of

from kvpatch_jax.errors import CertificateError, PlanError
from kvpatch_jax.plan import (
    EvictionPolicy,
    Goal,
    LoopSizes,
    PatchInventory,
    compare_policies,
    plan,
    price_policy,
)
from kvpatch_jax.window import Costs, Edits, Entry, PagedExecutor, Window

HYBRID = dataclasses.replace(COSTS, transition_bytes=1000, composing=70)
SIZES = LoopSizes(9, text=4, lead=5, placeholder=2, span=6, steps=23)
NO_TEXT = LoopSizes(9, lead=5, placeholder=9, steps=11)
ALL = [
    EvictionPolicy(3, 3, "rotated"),
    EvictionPolicy(3, 5, "rotated"),
    EvictionPolicy(1, 1, "rotated"),
    EvictionPolicy(3, 3),
    EvictionPolicy(3, 6),
    EvictionPolicy(1, 4),
    EvictionPolicy(3, 3, placeholder=True),
    EvictionPolicy(2, 5, placeholder=True),
    EvictionPolicy(2, None),
]


def chunk(number: int, sizes: LoopSizes) -> Entry:
    return Entry(f"chunk {number}", f"content {number}", sizes.chunk, sizes.span or sizes.chunk, modality="image")


def text(number: int | str, tokens: int) -> Entry:
    return Entry(f"text {number}", f"words {number}", tokens, tokens, "text")


def simulated(
    policy: EvictionPolicy, sizes: LoopSizes, promise: str, costs: Costs = COSTS
) -> Iterator[tuple[Window, list[Edits]]]:
    """Runs a loop on a window, by its operations or by plans, and yields each step's window and edits without end."""
    window, numbers = Window.empty(costs, lead=1 if sizes.lead else 0, promise=promise), itertools.count()
    if sizes.lead:
        window, _ = window.append(text("lead", sizes.lead))

    def units(number: int) -> list[Entry]:
        return [chunk(number, sizes), *([text(number, sizes.text)] if sizes.text else [])]

    for number in itertools.islice(numbers, policy.low):
        for entry in units(number):
            window, _ = window.append(entry)

    for number in numbers:
        new, done = units(number), []
        shown = [piece.entry for piece in window.pieces[window.lead :]]
        chunks = [entry for entry in shown if entry.kind == "chunk"]
        full = policy.high is not None and len(chunks) + 1 > policy.high
        leaving = {entry.id for entry in chunks[: len(chunks) + 1 - policy.low]} if full else set()

        if policy.survivors == "rotated":
            window, slid = window.slide(policy.low - 1) if full else (window, ())
            window, placed = window.append(new[0])
            done.append((*slid, *placed))
        else:
            # What a plan is asked for: all that is to be there, in its order.
            if policy.placeholder:
                wanted = [text(f"for {each.id}", sizes.placeholder) if each.id in leaving else each for each in shown]
            else:
                first = next((place for place, each in enumerate(shown) if each in chunks[len(leaving) :]), len(shown))
                wanted = shown[first:] if leaving else shown
            made = plan(window, [*wanted, new[0]], stored=PatchInventory(BACKBONE), costs=DEVICES)
            window, edits = made.window, made.edits
            done.append(edits)

        for entry in new[1:]:
            window, edits = window.append(entry)
            done.append(edits)
        yield window, done


@pytest.mark.parametrize("costs", [COSTS, HYBRID], ids=["attention", "hybrid"])
@pytest.mark.parametrize("sizes", [SIZES, NO_TEXT], ids=["texts", "no text"])
@pytest.mark.parametrize("policy", ALL, ids=lambda policy: policy.name)
def test_prices_are_those_of_the_edits(policy, sizes, costs):
    # Nothing but placeholders is planned differently by a window that remembers: it would keep what stays.
    for promise in ("remember", "forget") if policy.placeholder or policy.survivors == "rotated" else ("forget",):
        price = price_policy(policy, sizes, costs=costs, devices=DEVICES, promise=promise)
        total, worst, tokens, last = np.zeros(2, np.int64), 0, 0, Window.empty(costs)
        for window, done in itertools.islice(simulated(policy, sizes, promise, costs), price.steps):
            edits = [edit for each in done for edit in each]
            total += [sum(edit.bytes for edit in edits), sum(edit.flops for edit in edits)]
            worst, tokens = max(worst, sum(edit.bytes for edit in edits)), max(tokens, window.tokens)
            assert window.as_promised or price.kl is None
            last = window
        # A cycle ends once chunks have left. Survivors are what a window that remembers promises, and no more.
        assert last.as_promised == (price.kl == 0)
        assert (price.bytes, price.flops, price.worst_bytes, price.tokens) == (*total, worst, tokens)
        assert price.steps >= sizes.steps if policy.grows else price.steps == policy.cycle


@pytest.mark.parametrize("policy", [ALL[0], ALL[4], ALL[7]], ids=lambda policy: policy.name)
def test_seconds_are_those_of_a_plan(policy):
    price = price_policy(policy, SIZES, costs=COSTS, devices=DEVICES)
    steps = [done for _, done in itertools.islice(simulated(policy, SIZES, "forget"), price.steps)]
    seconds = [sum(DEVICES.seconds(edits) for edits in done) for done in steps]
    assert price.seconds == pytest.approx(sum(seconds), rel=1e-9)
    assert price.worst_seconds == pytest.approx(max(seconds), rel=1e-9)


@pytest.mark.parametrize("policy", ALL[:6], ids=lambda policy: policy.name)
def test_what_does_not_grow_costs_the_same_in_every_cycle(policy):
    price = price_policy(policy, SIZES, costs=COSTS, devices=DEVICES)
    flops = []
    for _, done in itertools.islice(simulated(policy, SIZES, "forget"), 3 * price.steps):
        flops.append(sum(edit.flops for edits in done for edit in edits))
    assert np.sum(np.reshape(flops, (3, -1)), axis=1).tolist() == [price.flops] * 3


def test_questions_and_answers_cost_what_an_executor_counts():
    backbone = tiny("gqa")
    costs = Costs.of(backbone, "float32")
    executor, window = PagedExecutor(backbone, 16, 16, "float32"), Window.empty(costs, lead=1)
    for name, length, kind in (("lead", 4, "text"), ("first", 6, "chunk"), ("second", 6, "chunk")):
        tokens = tokens_of(backbone, len(name), length)
        window, edits = window.append(Entry.of_tokens(name, tokens, kind=kind))
        executor.provide(name, tokens=tokens)
        executor.run(window, edits)
    for seed, length in ((1, 5), (2, 1), (3, 1)):  # a question, and two tokens of an answer of three
        executor.decode(window, tokens_of(backbone, seed, length))
    counted = executor.ledger.of("question")

    prices = [
        price_policy(EvictionPolicy(1, None), LoopSizes(6, lead=4, steps=1, **asked), costs=costs, devices=DEVICES)
        for asked in ({}, {"asked": 5, "answered": 3})
    ]
    assert counted.flops == prices[1].flops - prices[0].flops
    assert counted.bytes == prices[1].bytes - prices[0].bytes
    assert prices[1].tokens - prices[0].tokens == 8


def compared(**options):
    given = {"costs": COSTS, "devices": DEVICES, "promise": "forget", **options}
    return compare_policies(given.pop("sizes", SIZES), given.pop("low", 3), given.pop("high", 6), **given)


def test_batched_eviction_is_taken_where_it_is_the_cheapest_of_exact_ways():
    made = compared(never=False)
    chosen = made.cheapest
    assert (chosen.policy.survivors, chosen.policy.placeholder, chosen.kl, chosen.flips) == ("prefilled", False, 0, 0)
    assert chosen.policy.low == 3
    assert chosen.policy.cycle > 1
    # Of all numbers up to the highest it is the best one.
    exact = [price_policy(EvictionPolicy(3, high), SIZES, costs=COSTS, devices=DEVICES) for high in range(3, 7)]
    assert chosen.step_seconds == min(price.step_seconds for price in exact)
    # Sliding is quicker and refused: nothing bounds it.
    reasons = dict(zip((price.policy.name for price in made.prices), made.reasons, strict=True))
    assert made.prices[0].policy.survivors == "rotated"
    assert reasons["slide, 3"] == "nothing bounds what its survivors lose"
    lines = made.explain().splitlines()
    assert lines[0].startswith(f"{chosen.policy.name}: ")
    assert [line.startswith("  not ") for line in lines[1:]] == [True] * (len(made.prices) - 1)
    assert any(line.endswith("times the seconds") for line in lines)


def test_survivors_are_taken_within_what_a_certificate_bounds():
    # Invented of texts, as the chunks are here. Three chunks and three texts: five others are approximate.
    slide = certificate({("survivor", 0): [0.01, 0.01, 0.02, 0.02, 0.02, 0.04, 0.09, 0.09]})
    given = {"sizes": dataclasses.replace(SIZES, modality="text"), "certificate": slide, "high": 3, "never": False}
    chosen = compared(goal=Goal(kl=0.05), **given).cheapest
    assert (chosen.kl, chosen.flips, chosen.policy) == (0.04, 0.01, EvictionPolicy(3, 3, "rotated"))
    for goal, reason in (
        (Goal(kl=0.03), "KL 0.04 is beyond the goal"),
        (Goal(), "the goal is what the window promises"),
        (Goal(flips=0.001), "flips 0.01 are beyond the goal"),
    ):
        made = compared(goal=goal, **given)
        assert (made.cheapest.kl, made.reasons[0]) == (0, reason)
    # Beyond what was measured nothing is certified.
    for other, reason in (
        ({"low": 7, "high": 7}, "window of 14 chunks; certified up to 12"),
        ({"sizes": SIZES}, "chunk of image; certified of text"),
    ):
        made = compared(goal=Goal(kl=0.05), **{**given, **other})
        assert (made.cheapest.kl, made.reasons[0]) == (0, f"uncertified ({reason})")


def test_where_nothing_survives_sliding_is_exact():
    made = compared(low=1, high=1, never=False, sizes=NO_TEXT, promise="forget")
    assert (made.prices[0].policy.name, made.prices[0].kl) == ("slide, 1", 0)
    exact = price_policy(EvictionPolicy(1, 1), NO_TEXT, costs=COSTS, devices=DEVICES)
    assert (exact.bytes, exact.flops, exact.seconds) == dataclasses.astuple(made.prices[0])[2:5]
    for window, _ in itertools.islice(simulated(EvictionPolicy(1, 1, "rotated"), NO_TEXT, "forget"), 4):
        assert window.as_promised


def test_a_window_that_remembers_slides():
    made = compared(promise="remember", sizes=NO_TEXT, never=False)
    assert (made.cheapest.policy.survivors, made.cheapest.kl) == ("rotated", 0)


def test_texts_that_must_stay_leave_placeholders_or_nothing_to_leave():
    made = compared(keep_text=True, promise="remember")
    assert made.cheapest.policy.grows
    assert {reason for price, reason in zip(made.prices, made.reasons, strict=True) if not price.policy.grows} == {
        "texts leave with their chunks"
    }
    # A limit of tokens rules out a window that only grows.
    limit = price_policy(EvictionPolicy(3, None), SIZES, costs=COSTS, devices=DEVICES).tokens - 1
    made = compared(keep_text=True, sizes=dataclasses.replace(SIZES, limit=limit))
    assert made.cheapest.policy.placeholder
    assert f"exceed the limit of {limit}" in made.explain()


def test_a_budget_is_of_the_most_expensive_step():
    spread = compared(never=False)
    most = spread.cheapest.worst_seconds
    with pytest.raises(PlanError, match=r"policies: got goal seconds ≤ .*; expected one that a policy meets:\n  not "):
        compared(never=False, goal=Goal(seconds=most / 10)).cheapest  # noqa: B018
    assert compared(goal=Goal(seconds=most / 1.5), sizes=NO_TEXT).cheapest.worst_seconds <= most / 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoopSizes(0), r"loop\.chunk: got 0; expected a whole number from 1"),
        (lambda: LoopSizes(4, text=-1), r"loop\.text: got -1"),
        (lambda: LoopSizes(4, placeholder=0), r"loop\.placeholder: got 0"),
        (lambda: LoopSizes(4, answered=3), r"loop\.answered: got 3 without a question"),
        (lambda: EvictionPolicy(4, 3), r"policies: got 4 to 3 chunks; expected 1 <= low <= high"),
        (lambda: EvictionPolicy(True, 3), r"policies: got True to 3 chunks"),
        (lambda: EvictionPolicy(2, 3, "kept"), r"policy\.survivors: got 'kept'"),
        (lambda: EvictionPolicy(2, 3, "rotated", True), r"'rotated' with a placeholder; expected 'prefilled'"),
        (lambda: price_policy("slide", SIZES, costs=COSTS), r"policies\.policy: got 'slide'; expected an Evict"),
        (lambda: price_policy(ALL[6], LoopSizes(4), costs=COSTS), r"loop\.placeholder: got None for 'placeholder, 3'"),
        (lambda: compared(sizes=(4, 2)), r"policies\.sizes: got \(4, 2\); expected LoopSizes"),
        (lambda: compared(costs=None), r"policies\.costs: got None; expected Costs"),
        (lambda: compared(goal=0.05), r"policies\.goal: got 0\.05; expected a Goal"),
        (lambda: compared(promise="keep"), r"policies\.promise: got 'keep'"),
        (lambda: compared(low=0), r"policies: got 0 to 6 chunks"),
    ],
)
def test_invalid_arguments_are_refused(make, message, unchecked):
    with pytest.raises(PlanError, match=message):
        make()


def test_a_certificate_of_other_weights_is_refused(unchecked):
    other = certificate({("survivor", 0): [0.1]}, backbone="e" * 64)
    with pytest.raises(CertificateError, match=r"policies\.certificate: got .* backbone 'e+'; expected backbone 'f+'"):
        compared(certificate=other)
    with pytest.raises(CertificateError, match=r"policies\.certificate: got 0\.1; expected Certificate"):
        compared(certificate=0.1)
