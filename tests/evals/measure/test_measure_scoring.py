"""Scorers on answers whose scores are known, from their publishers' definitions."""

import pytest

from evals.measure.items import Item
from evals.measure.scoring import SCORERS


def score(scorer, prediction, *answers, options=()):
    item = Item("1", "1", (), "Q", answers, scorer, options=options)
    return SCORERS[scorer].score(prediction, item)


@pytest.mark.parametrize(
    ("scorer", "prediction", "answers", "expected"),
    [
        ("exact_match", "The  Oslo.", ("oslo",), 1),
        ("exact_match", "Oslo city", ("Oslo",), 0),
        ("token_f1", "the city of Oslo", ("Oslo city",), 2 * (2 / 3) / (2 / 3 + 1)),
        ("token_f1", "", ("the",), 1),
        ("token_f1", "Bern", ("Oslo", "Bern"), 1),
        ("anls", "osl0", ("Oslo",), 0.75),
        ("anls", "abcd", ("abxy",), 0.5),
        ("anls", "none", ("none",), 0),
        ("anls", "Bergen", ("Oslo",), 0),
    ],
)
def test_texts(scorer, prediction, answers, expected):
    assert score(scorer, prediction, *answers) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "expected"),
    [
        ("B", 1), ("(B) green", 1), ("B. green", 1), ("The answer is B.", 1), ("Answer: b", 1), ("It is green.", 1),
        ("A", 0), ("A green one", 1), ("red or green", 0), ("", 0), ("E", 0),
    ],
)  # fmt: skip
def test_choices(prediction, expected):
    assert score("choice", prediction, "B", options=("red", "green", "blue", "grey")) == expected


@pytest.mark.parametrize(
    ("prediction", "answer", "expected"),
    [
        ('{"action_type": "click", "x": 500, "y": 620}', '{"action_type": "click", "x": 500, "y": 500}', 1),
        ('{"action_type": "click", "x": 500, "y": 680}', '{"action_type": "click", "x": 500, "y": 500}', 0),
        ('{"action_type": "long_press", "x": 500, "y": 500}', '{"action_type": "click", "x": 500, "y": 500}', 0),
        ('{"action_type": "click"}', '{"action_type": "click", "x": 500, "y": 500}', 0),
        (
            '```json\n{"action_type": "scroll", "direction": "up"}\n```',
            '{"action_type": "scroll", "direction": "Up"}',
            1,
        ),
        ('{"action_type": "scroll", "direction": "left"}', '{"action_type": "scroll", "direction": "up"}', 0),
        ('{"action_type": "type", "text": "oslo"}', '{"action_type": "type", "text": "Oslo weather"}', 1),
        ('{"name": "open", "arguments": {"tab": 2}}', '{"name": "open", "arguments": {"tab": 3}}', 0),
        ("press back", "Press back", 1),
        ("no action", '{"action_type": "wait"}', 0),
    ],
)
def test_actions(prediction, answer, expected):
    assert score("action", prediction, answer) == expected
