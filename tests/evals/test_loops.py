"""Agents' loops: what policies show, what each way computes, and that sessions compute what is priced."""

import json

import pytest

from evals.harness.datasets import Run
from evals.loops.costs import PrefixCache, Survivors, changes, tokens
from evals.loops.dataset import ALONE, LOOPS
from evals.loops.drawn import drawn_episode
from evals.loops.episodes import Episode, Prompt, PromptPiece, Round, Shown
from evals.loops.policies import POLICIES, prompts_of
from evals.loops.replay import SessionReplay
from evals.trained import shipped
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, load

MODEL = "documents/qwen2_5_vl"


def shown(content: str, size: int = 10) -> Shown:
    return Shown(content, size)


def episode(screens: str) -> Episode:
    """An episode of screenshots that are named by letters."""
    rounds = [
        Round((shown(letter, 100),), None, shown(f"reply {place}"), shown(f"line {place}", 2))
        for place, letter in enumerate(screens)
    ]
    return Episode("e", shown("system"), shown("goal"), tuple(rounds), shown("gone", 1))


def contents(policy: str, screens: str) -> list[list[str]]:
    """What each prompt shows behind the system text, replies left out."""
    prompts = [prompt.pieces for prompt in prompts_of(episode(screens), POLICIES[policy])]
    return [[piece.shown.content for piece in pieces[1:] if "reply" not in piece.id] for pieces in prompts]


def spent(way, prompts: list[Prompt]) -> list[int]:
    return [tokens(way.computed(prompt.pieces)) for prompt in prompts]


@pytest.mark.parametrize(
    ("policy", "screens", "shown"),
    [
        ("four-rounds", "abcd", "goal|a|b|c|d"),
        ("four-rounds", "abcdef", "goal\nline 0\nline 1|c|d|e|f"),
        ("placeholder-1", "abc", "goal|gone|gone|c"),
        ("sliding", "abcdefghij", "goal|c|d|e|f|g|h|i|j"),
        ("dedup", "aaba", "goal|a|gone|b|gone"),
    ],
)
def test_a_policy_shows_what_its_agent_shows(policy: str, screens: str, shown: str):
    assert contents(policy, screens)[-1] == shown.split("|")


def test_eight_screenshots_leave_together_when_there_would_be_more_than_twenty():
    prompts = contents("batch-8-at-20", "abcdefghijklmnopqrstuvwxyz012")
    assert [prompt.count("gone") for prompt in prompts] == [0] * 20 + [8] * 8 + [16]
    assert prompts[20][1:10] == ["gone"] * 8 + ["i"]


def test_a_prompt_becomes_another_by_leaving_replacing_and_entering():
    before = [PromptPiece(name, shown(name)) for name in ("s", "g", "a", "b", "c")]
    after = [before[0], PromptPiece("g", shown("g and more")), before[3], before[4], PromptPiece("d", shown("d"))]
    found = changes(before, after)
    assert [piece.id for piece in found.evicted] == ["a"]
    assert [piece.shown.content for piece in found.replaced] == ["g and more"]
    assert [piece.id for piece in found.entering] == ["d"]
    # What would have to move to the front enters anew, with all behind it.
    turned = changes(before, [before[0], before[3], before[2], before[4]])
    assert [piece.id for piece in turned.entering] == ["a", "c"]


def test_a_list_that_grows_in_front_costs_a_prefix_cache_all_images():
    prompts = prompts_of(episode("abcdefgh"), POLICIES["four-rounds"])
    prompt = 10 + 10 + 2 * 4 + 4 * 100 + 3 * 10
    assert spent(PrefixCache(), prompts)[-1] == prompt - 10  # the system text is a prefix that stays
    assert spent(Survivors(), prompts)[-1] == 10 + 2 * 4 + 10 + 100  # the list, a reply, a screenshot


def test_an_order_for_the_cache_puts_known_pieces_first():
    cache = PrefixCache()
    pages = [PromptPiece(f"page {name}", shown(name, 100), movable=True) for name in "abcd"]
    system = PromptPiece("system", shown("system"))
    cache.computed([system, *pages[:3]])
    order = cache.ordered([system, pages[3], pages[1], pages[0]])
    assert [piece.shown.content for piece in order] == ["system", "a", "b", "d"]
    assert tokens(cache.computed(order)) == 100


@pytest.mark.parametrize("loop", ["four-rounds", "placeholder-1"])
def test_a_session_computes_what_is_priced(loop):
    """Screenshots that never come back: `remember` is what stays, `exact` is the prefix cache without its loss."""
    drawn = drawn_episode("walk", "e", 3, 6)
    rounds = [
        passed._replace(screens=(passed.screens[0]._replace(content=str(number)),))
        for number, passed in enumerate(drawn.rounds)
    ]
    prompts = prompts_of(drawn._replace(rounds=tuple(rounds)), POLICIES[loop])
    backbone = load(shipped(MODEL), dtype="float32", buckets=Buckets(64, 1))
    for arm, way in (("remember", Survivors()), ("exact", PrefixCache())):
        replay = SessionReplay(backbone, arm)
        served = [tokens(replay.serve(prompt.pieces)) for prompt in prompts]
        kls, flips = replay.divergence(prompts[-1].questions)
        replay.close()
        assert served == spent(way, prompts)
        if arm == "exact":
            assert max(kls) < 1e-6
            assert not any(flips)


def test_rows_do_not_depend_on_the_order_of_parts():
    run = Run({}, ("four-rounds", "sliding"), ("re-prefill", "prefix cache", "remember"), 3, 1, 5, {"long": 12})
    parts = LOOPS.parts(run)
    assert len(parts) == 6
    records = {part.key: json.loads(json.dumps(list(part.measure()))) for part in parts}
    rows = LOOPS.rows(records)
    assert rows == LOOPS.rows(dict(sorted(records.items())))
    by_name = {(row["probe"], row["arm"], row["metric"]): row for row in rows}
    assert by_name["sliding", "prefix cache", "over_prefix_cache"]["value"] == 1
    ours = by_name["four-rounds", "remember", "over_prefix_cache"]
    assert ours["low"] <= ours["value"] <= ours["high"] < 1
    assert {row["model"] for row in rows} == {ALONE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"probes": ("spinning",)}, "loops.probes: got 'spinning'"),
        ({"methods": ("magic",)}, "loops.methods: got 'magic'"),
        ({"settings": {"stride": 3}}, "loops.settings: got 'stride'"),
        ({"settings": {"trace": "t.jsonl", "format": "tar"}}, "loops.settings.format: got 'tar'"),
    ],
)
def test_what_no_loop_has_is_refused(change, message):
    run = Run({}, (), ("re-prefill",), 1, 1, 0, {})._replace(**change)
    with pytest.raises(InputError, match=message):
        LOOPS.parts(run)
