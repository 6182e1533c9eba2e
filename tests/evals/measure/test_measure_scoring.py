"""Scoring rules of data sets against answers that were scored by hand from the published rule.

Each table has rows (prediction, right answers, score), and what else the rule needs; the arithmetic stands beside.
"""

import pytest

from evals.measure.items import Item
from evals.measure.scoring import RULES


def item(answers, *, options=(), answer_format="", question="What is it?"):
    answers = (answers,) if isinstance(answers, str) else answers
    return Item("i", "c", (), question, answers, "", "", options, answer_format)


SQUAD_EM = [
    ("Oslo", "Oslo", 1), ("oslo", "Oslo", 1), ("Oslo.", "Oslo", 1), (" the  Oslo ", "Oslo", 1), ("Oslo!", "oslo", 1),
    ("an apple", "apple", 1), ("theatre", "atre", 0), ("Lima", "Oslo", 0), ("Oslo, Norway", "Oslo", 0),
    ("Norway", ("Oslo", "Norway"), 1), ("U.S.", "US", 1), ("state-of-the-art", "stateoftheart", 1), ("", "Oslo", 0),
    ("the", "a", 1), ("42", "42", 1), ("42.0", "42", 0), ("forty two", "42", 0), ("A B\nC", "b c", 1),
]  # fmt: skip

# precision p and recall r of words: 2pr / (p + r)
SQUAD_F1 = [
    ("Oslo", "Oslo", 1), ("Oslo Norway", "Oslo", 2 / 3), ("Oslo", "Oslo in Norway", 1 / 2), ("Lima", "Oslo", 0),
    ("the city of Oslo", "Oslo city", 4 / 5), ("Oslo Oslo", "Oslo", 2 / 3), ("Oslo Oslo", "Oslo Oslo Lima", 4 / 5),
    ("", "Oslo", 0), ("the", "a", 1), ("the", "Oslo", 0), ("Lima Oslo", ("Lima", "Oslo Lima"), 1),
    ("yes sir", "yes", 2 / 3), ("one two three four", "three four five six", 1 / 2),
]  # fmt: skip

HOTPOT_F1 = [
    ("yes", "yes", 1), ("Yes.", "yes", 1), ("yes sir", "yes", 0), ("no", "yes", 0), ("noanswer", "Oslo", 0),
    ("no way", "way", 2 / 3), ("Oslo", "no", 0), ("Oslo Norway", "Oslo", 2 / 3), ("the Oslo", "Oslo", 1),
    ("", "Oslo", 0), ("", "", 0), ("a big red ship", "red ship", 4 / 5),
]  # fmt: skip

# 1 - distance / longer, 0 below .5
ANLS = [
    ("Oslo", "Oslo", 1), ("oslo ", "Oslo", 1), ("Osla", "Oslo", 3 / 4), ("Os", "Oslo", 1 / 2), ("O", "Oslo", 0),
    ("Oslo Norway", "Oslo", 0), ("Oslo!", "Oslo", 4 / 5), ("", "Oslo", 0), ("none", "none", 0), ("None", "nine", 0),
    ("nine", "none", 3 / 4), ("Lima", ("Oslo", "Lima"), 1), ("Lina", ("Lino", "Lima"), 3 / 4),
    ("kitten", "sitting", 4 / 7), ("1,000", "1000", 4 / 5), ("2001", "2010", 1 / 2), ("abcdef", "abc", 1 / 2),
    ("abcdefg", "abc", 0), ("ab", "ba", 0), ("abc", "acb", 0), ("$ 12", "$12", 3 / 4), ("The Oslo", "Oslo", 1 / 2),
    ("0.5", ".5", 2 / 3), ("flaw", "lawn", 1 / 2), ("January 5", "5 January", 5 / 9), ("ÉCOLE", "école", 1),
    ("a  b", "a b", 3 / 4), ("university of oslo", "university of osla", 17 / 18), ("n/a", "none", 0),
    ("Saturday", "Sunday", 5 / 8), ("gumbo", "gambol", 2 / 3), ("book", "back", 1 / 2),
]  # fmt: skip

# (prediction, answer, question, exact match, F1)
SLIDEVQA = [
    ("Oslo", "Oslo", "Where?", 1, 1), ("the Oslo.", "oslo", "Where?", 1, 1), ("It is Oslo", "Oslo", "Where?", 1, 1),
    ("this is Oslo", "Oslo", "Where?", 1, 1), ("three", "3", "Count?", 1, 1), ("Twelve", "12", "Count?", 1, 1),
    ("twenty", "20", "Count?", 0, 0), ("5 percent", "5%", "Share?", 1, 1), ("5%", "5", "Share?", 1, 1),
    ("3 ships", "3", "So how many ships?", 0, 2 / 3), ("3 ships", "3", "So how many ships came?", 1, 1),
    ("3 ships", "3", "How many ships came?", 0, 2 / 3), ("red ship", "red", "And which ship came?", 1, 1),
    ("A and B", "A & B", "Who?", 1, 1), ("Ann and Bob", "Ann, Bob", "Who?", 1, 1),
    ("Bob and Ann", "Ann, Bob", "Who?", 0, 1), ("Yes, it did", "yes", "Did it?", 1, 1),
    ("No way", "no", "Did it?", 1, 1), ("North pole", "northern", "Where?", 0, 0),
    ("because of rain", "rain", "Why?", 1, 1), ("due to rain", "rain", "Why?", 1, 1),
    ("5 hours", "5 hrs", "Long?", 1, 1), ("organisation", "organization", "What?", 1, 1),
    ("red blue", "red", "What?", 0, 2 / 3), ("", "Oslo", "Where?", 0, 0), ("the", "the", "What?", 0, 0),
    ("1,000", "1000", "Count?", 1, 1), ("10.5", "105", "Count?", 1, 1), ("Lima", "Oslo", "Where?", 0, 0),
    ("Oslo Lima Rome", "Rome Oslo", "Where?", 0, 4 / 5), ("how many", "x", "how many", 0, 0),
    ("sandy hill", "s,y hill", "Where?", 1, 1),
]  # fmt: skip

MMLONGBENCH = [
    ("8", "8", "Int", 1), ("8.0", "8", "Int", 1), ("8.9", "8", "Int", 1), ("9", "8", "Int", 0),
    ("eight", "8", "Int", 0), ("8 pages", "8", "Int", 0), ("inf", "8", "Int", 0), ("-3", "-3", "Int", 1),
    ("0.5", "0.5", "Float", 1), ("50%", "0.5", "Float", 1), ("50", "0.5", "Float", 1), ("0.005", "0.5", "Float", 1),
    ("0.504", "0.5", "Float", 1), ("0.51", "0.5", "Float", 0), ("$12.5", "12.5", "Float", 1),
    ("12.49", "12.5", "Float", 1), ("about 12", "12.5", "Float", 0), ("12.7", "12.5", "Float", 0),
    ("1,250", "1250", "Float", 0), ("Less well-off", "Less well-off", "Str", 1),
    ("less well off", "Less well-off", "Str", 12 / 13), ("Lima", "Oslo", "Str", 0), ("Os", "Oslo", "Str", 0),
    ("Osl", "Oslo", "Str", 3 / 4), ("Oslo (Norway)", "Oslo", "Str", 1), ("'Oslo'", "Oslo", "Str", 1),
    ("12%", "12", "Str", 1), ("13", "12", "Str", 0), ("page 4", "page 5", "Str", 0),
    ("2020-01-05", "2020-01-06", "Str", 0), ("a@b.org", "a@b.com", "Str", 0), ("10 a.m.", "11 a.m.", "Str", 0),
    ("main.py", "mein.py", "Str", 0), ("Not answerable", "Not answerable", "None", 1),
    ("Oslo", "Not answerable", "None", 0), ("", "Oslo", "Str", 0), ("['a', 'b']", "['b', 'a']", "List", 1),
    ("['Oslo', 'Lima']", "['Lima', 'Oslp']", "List", 3 / 4), ("['Oslo']", "['Oslo', 'Lima']", "List", 0),
    ("[1, 2]", "[2, 1]", "List", 1), ("[1, 2]", "[1, 3]", "List", 0), ("Oslo", "['Oslo']", "List", 1),
    ("[oops", "['oops']", "List", 4 / 5), ("['x', 'Lima']", "['Oslo', 'Lima']", "List", 0), ("[]", "[]", "List", 1),
    ("[__import__('os')]", "['a']", "List", 0),
]  # fmt: skip

NIAH = [
    ("oak", "oak", "text", 1), ("An oak tree.", "oak", "text", 1), ("oaks", "oak", "text", 0),
    ("Oak", "oak", "text", 1), ("the oak", "oak", "text", 1), ("three ships", "3", "text", 1),
    ("3", "three", "text", 1), ("oak, elm", "elm", "text", 1), ("elm", "oak", "text", 0),
    ("red oak", "oak red", "text", 0), ("1,000", "1000", "text", 1), ("twenty", "20", "text", 1),
    ("thirty", "30", "text", 1), ("", "oak", "text", 0), ("x-ray", "x ray", "text", 1), ("a b", "a", "text", 1),
    ("B", "B", "choice", 1), ("b", "B", "choice", 1), ("B.", "B", "choice", 1), ("1", "B", "choice", 1),
    ("0", "B", "choice", 0), ("The answer is B", "B", "choice", 1), ("**B**", "B", "choice", 1),
    ("B. red", "B", "choice", 1), ("B, red", "B", "choice", 0), ("none", "B", "choice", 0),
    ("I think B", "B", "choice", 0), ("The camera is moving right.", "B", "choice", 1),
    ("The camera is moving left", "A", "choice", 1), ("²", "B", "choice", 0), ("", "B", "choice", 0),
    ("[1, 2]", "[1, 2]", "list", 1), ("[1, 3]", "[1, 2]", "list", 1 / 2), ("[2, 1]", "[1, 2]", "list", 0),
    ("[1]", "[1, 2]", "list", 1 / 2), ("[1, 2, 3]", "[1, 2]", "list", 1), ("1, 2", "[1, 2]", "list", 0),
    ("```json\n[1, 2]\n```", "[1, 2]", "list", 1), ('{"a": [1], "b": [2]}', "[1, 2]", "list", 1),
    ("3", "[1, 2]", "list", 0), ('{"a": 1}', "[1, 2]", "list", 0), ("[1, 2].", "[1, 2]", "list", 1),
]  # fmt: skip

CITIES = ("Oslo", "Lima", "Cairo", "Perth")
OPTION_LETTER = [
    ("B", "B", 1), ("B.", "B", 1), ("(B)", "B", 1), ("b", "B", 0), ("The best answer is: B", "B", 1),
    ("Answer: B", "B", 1), ("The answer is (C).", "B", 0), ("The correct answer is B. Lima", "B", 1),
    ("Option: B", "B", 1), ("", "B", 0), ("E", "B", 0), ("Best answer: C", "C", 0), ("Best answer: C", "B", 1),
    ("Cats, so B", "B", 0), ("I pick B", "B", 1), ("It is B, not C", "B", 1), ("**B**", "B", 1),
    ("none of these", "B", 0), ("A", "A", 1), ("D) Perth", "D", 1),
]  # fmt: skip
VLMEVAL = [
    ("B", "B", 1), ("B.", "B", 1), ("(B)", "B", 1), ("b", "B", 0), ("Lima", "B", 1), ("lima.", "B", 1),
    ("It is Lima", "B", 1), ("Lima or Oslo", "B", 0), ("The answer is B", "B", 1),
    ("The answer is **B**. A is wrong.", "B", 1), ("A B", "B", 0),
    ("B is the one of these four that I would take", "B", 0), ("I would take B", "B", 1), ("", "B", 0), ("Z", "B", 0),
    ("Cannot determine the answer", "B", 0), ("A", "B", 0), ("It is " + "very " * 20 + "Lima", "B", 0), ("D", "D", 1),
    ("Answer: Perth", "D", 1),
]  # fmt: skip

ODYSSEY = [
    ("CLICK: (500, 300)", "CLICK: (500, 300)", "", 1), ("CLICK: (640, 300)", "CLICK: (500, 300)", "", 1),
    ("CLICK: (641, 300)", "CLICK: (500, 300)", "", 0), ("CLICK: (600, 400)", "CLICK: (500, 300)", "", 0),
    ("CLICK: (590, 390)", "CLICK: (500, 300)", "", 1), ("CLICK: [500, 300]", "CLICK: (500, 300)", "", 1),
    ("CLICK: (900, 900)", "CLICK: (500, 300)", "0,0,1000,1000", 1),
    ("CLICK: (900, 900)", "CLICK: (500, 300)", "400,200,600,400", 0),
    ("CLICK: (400, 200)", "CLICK: (600, 400)", "400,200,600,400", 1),
    ("LONG_PRESS: (500, 300)", "CLICK: (500, 300)", "", 0), ("LONG_PRESS: (510, 300)", "LONG_PRESS: (500, 300)", "", 1),
    ("CLICK", "CLICK: (500, 300)", "", 0), ("CLICK: here", "CLICK: (500, 300)", "", 0),
    ("SCROLL: UP", "SCROLL: UP", "", 1), ("SCROLL: up", "SCROLL: UP", "", 1), ("SCROLL: DOWN", "SCROLL: UP", "", 0),
    ("TYPE: Oslo", "TYPE: Oslo", "", 1), ("TYPE: Oslo weather", "TYPE: Oslo", "", 1), ("TYPE: Os", "TYPE: Oslo", "", 1),
    ("TYPE: Osla", "TYPE: Oslo", "", 1), ("TYPE: Lima", "TYPE: Oslo", "", 0), ("TYPE: oxlx", "TYPE: oslo", "", 1),
    ("TYPE: oxxx", "TYPE: oslo", "", 0), ("COMPLETE", "COMPLETE", "", 1), ("IMPOSSIBLE", "COMPLETE", "", 0),
    ("PRESS_HOME", "PRESS_HOME", "", 1), ("PRESS_BACK", "PRESS_HOME", "", 0), ("press_home", "PRESS_HOME", "", 0),
    ("", "COMPLETE", "", 0), ("I would click", "CLICK: (500, 300)", "", 0), (" COMPLETE\n", "COMPLETE", "", 1),
    ("CLICK: (-1, 300.5)", "CLICK: (100, 300)", "", 1),
]  # fmt: skip

CLICK = '{"action_type": "click", "x": 540, "y": 1200}'
TYPE = '{"action_type": "type", "x": 540, "y": 1200, "text": "a"}'
ANDROID = [
    (CLICK, CLICK, 1), ('{"action_type": "click", "x": 691, "y": 1200}', CLICK, 1),
    ('{"action_type": "click", "x": 692, "y": 1200}', CLICK, 0),
    ('{"action_type": "click", "x": 540, "y": 1536}', CLICK, 1),
    ('{"action_type": "click", "x": 540, "y": 1537}', CLICK, 0),
    ('{"action_type": "long_press", "x": 540, "y": 1200}', CLICK, 0), ('{"action_type": "click"}', CLICK, 0),
    ('{"action_type": "click", "x": "540", "y": 1200}', CLICK, 0), ("```json\n" + CLICK + "\n```", CLICK, 1),
    ("click", CLICK, 0), ('{"action_type": "click", "x": 540, "y": 1200', CLICK, 0), ("[]", CLICK, 0), ("", CLICK, 0),
    ('{"action_type": "scroll", "direction": "up"}', '{"action_type": "scroll", "direction": "up"}', 1),
    ('{"action_type": "scroll", "direction": "UP"}', '{"action_type": "scroll", "direction": "up"}', 1),
    ('{"action_type": "scroll", "direction": "down"}', '{"action_type": "scroll", "direction": "up"}', 0),
    ('{"action_type": "open_app", "app_name": "clock"}', '{"action_type": "open_app", "app_name": "Clock"}', 1),
    ('{"action_type": "open_app", "app_name": "Clock app"}', '{"action_type": "open_app", "app_name": "Clock"}', 1),
    ('{"action_type": "open_app", "app_name": "Maps"}', '{"action_type": "open_app", "app_name": "Clock"}', 0),
    ('{"action_type": "open_app"}', '{"action_type": "open_app", "app_name": "Clock"}', 0),
    ('{"action_type": "input_text", "text": "oslo"}', '{"action_type": "input_text", "text": "Oslo"}', 1),
    ('{"action_type": "input_text", "text": "lima"}', '{"action_type": "input_text", "text": "Oslo"}', 0),
    ('{"action_type": "navigate_back"}', '{"action_type": "navigate_back"}', 1),
    ('{"action_type": "navigate_home"}', '{"action_type": "navigate_back"}', 0),
    ('{"action_type": "wait"}', '{"action_type": "wait"}', 1),
    ('{"action_type": "wait", "s": 3}', '{"action_type": "wait"}', 1),
    (TYPE, TYPE, 1),
    ('{"action_type": "type", "x": 40, "y": 1200, "text": "a"}', TYPE, 0),
    ('{"action_type": "type", "x": 540, "y": 1200, "text": "b"}', TYPE, 0),
    ('{"action_type": 3}', CLICK, 0),
]  # fmt: skip

CALL = '{"arguments": {"button": "left", "x": 500, "y": 300}, "name": "click"}'
TOOLS = [
    (CALL, CALL, 1), ('{"name": "click", "arguments": {"x": 510, "y": 310, "button": "left"}}', CALL, 1),
    ('{"name": "click", "arguments": {"x": 900, "y": 310, "button": "left"}}', CALL, 0), ('{"name": "click"}', CALL, 0),
    ('{"name": "click", "arguments": {"x": 510, "y": 310, "button": "right"}}', CALL, 0), ("click", CALL, 0),
    ('{"name": "drag", "arguments": {"x": 500, "y": 300, "button": "left"}}', CALL, 0), ("Done. ", "done.", 1),
    ("", "done", 0), ('{"name": "wait", "arguments": {"s": 1}}', '{"name": "wait", "arguments": {"s": 1}}', 1),
    ('{"name": "wait", "arguments": {"s": 2}}', '{"name": "wait", "arguments": {"s": 1}}', 0),
]  # fmt: skip


@pytest.mark.parametrize("rule", ["exact_match", "squad_em", "hotpotqa_em"])
@pytest.mark.parametrize(("said", "right", "score"), SQUAD_EM)
def test_exact_match_is_squads(rule, said, right, score):
    assert RULES[rule].score(said, item(right)) == score


@pytest.mark.parametrize(("said", "right", "score"), SQUAD_F1)
def test_overlap_of_words_is_squads(said, right, score):
    assert RULES["squad_f1"].score(said, item(right)) == pytest.approx(score)


@pytest.mark.parametrize(("said", "right", "score"), HOTPOT_F1)
def test_overlap_of_words_is_hotpotqas(said, right, score):
    assert RULES["hotpotqa_f1"].score(said, item(right)) == pytest.approx(score)


@pytest.mark.parametrize(("said", "right", "score"), ANLS)
def test_anls_is_docvqas(said, right, score):
    assert RULES["anls"].score(said, item(right)) == pytest.approx(score)


@pytest.mark.parametrize(("said", "right", "question", "exact", "overlap"), SLIDEVQA)
def test_slidevqas_rules_normalise_numbers_and_units(said, right, question, exact, overlap):
    asked = item(right, question=f"{question}\nAnswer the question using a single word or phrase.")
    assert RULES["slidevqa_em"].score(said, asked) == exact
    assert RULES["slidevqa_f1"].score(said, asked) == pytest.approx(overlap)


@pytest.mark.parametrize(("said", "right", "kind", "score"), MMLONGBENCH)
def test_mmlongbench_doc_scores_by_the_answers_format(said, right, kind, score):
    assert RULES["mmlongbench_doc"].score(said, item(right, answer_format=kind)) == pytest.approx(score)


@pytest.mark.parametrize(("said", "right", "kind", "score"), NIAH)
def test_mm_niah_has_inclusion_letters_and_soft_accuracy(said, right, kind, score):
    assert RULES["mm_niah"].score(said, item(right, answer_format=kind, options=CITIES)) == score


@pytest.mark.parametrize(("said", "right", "score"), OPTION_LETTER)
def test_video_mmes_letter_is_the_first_capital_of_an_option(said, right, score):
    assert RULES["option_letter"].score(said, item(right, options=CITIES)) == score


@pytest.mark.parametrize(("said", "right", "score"), VLMEVAL)
def test_vlmevalkit_infers_the_letter_and_then_the_text(said, right, score):
    assert RULES["vlmeval_option"].score(said, item(right, options=CITIES)) == score


@pytest.mark.parametrize(("said", "right", "box", "score"), ODYSSEY)
def test_gui_odysseys_actions_match_by_type_and_place(said, right, box, score):
    assert RULES["gui_odyssey"].score(said, item(right, answer_format=box)) == score


@pytest.mark.parametrize(("said", "right", "score"), ANDROID)
def test_android_controls_actions_match_by_type_and_place(said, right, score):
    assert RULES["android_control"].score(said, item(right, answer_format="1080x2400")) == score


@pytest.mark.parametrize(("said", "right", "score"), TOOLS)
def test_tool_calls_match_by_name_and_arguments(said, right, score):
    assert RULES["tool_call"].score(said, item(right)) == score


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "said", ["", "\0", "[" * 5000, "{" * 5000 + "}" * 5000, "(1e999, 2)", '{"x": NaN}', "²", "\ud800"]
)
def test_no_prediction_breaks_a_rule(rule, said):
    rights = {"mm_niah": "[1]", "android_control": CLICK, "gui_odyssey": "CLICK: (1, 2)", "tool_call": CALL}
    right = rights.get(rule, "A" if "option" in rule else "Lima")
    kinds = {"mm_niah": ("list",), "mmlongbench_doc": ("Int", "Float", "Str", "List", "None")}.get(rule, ("",))
    for kind in kinds:
        asked = item("1" if kind in ("Int", "Float") else right, options=CITIES, answer_format=kind)
        assert RULES[rule].score(said, asked) == 0
    assert RULES[rule].tokens > 0
    assert RULES[rule].source


def test_every_group_of_rules_has_thirty_worked_examples():
    for table in (SQUAD_EM + SQUAD_F1, ANLS, SLIDEVQA, MMLONGBENCH, NIAH, OPTION_LETTER + VLMEVAL, ODYSSEY, ANDROID):
        assert len(table) >= 30
