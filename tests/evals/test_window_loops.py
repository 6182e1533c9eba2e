"""Windows and agents' loops cost what each way computes, and lose nothing where KV is what a re-prefill computes."""

import base64
import gzip
import io
import itertools
import json

import numpy as np
import pytest

from evals.harness.datasets import Run
from evals.harness.lines import text_piece
from evals.harness.methods import BLIND, REFERENCE
from evals.harness.orders import orders_of
from evals.loops.computer_use import read_computer_use
from evals.loops.costs import PrefixCache, Survivors, changes, tokens
from evals.loops.dataset import LOOPS
from evals.loops.drawn import drawn_episode
from evals.loops.episodes import OMITTED, Episode, PromptPiece, Round, Shown, episodes_of, recorded_prompts
from evals.loops.mooncake import read_mooncake
from evals.loops.policies import POLICIES, prompts_of
from evals.loops.replay import SessionReplay
from evals.task.contexts import SIZES, latest, sample
from evals.trained import MAIN, shipped
from evals.windows import operations, visits
from evals.windows.contents import TaskPieces, TextTail
from evals.windows.operations import OPERATIONS
from evals.windows.tolerance import MENDED, SUM, ReusedChunk, histories, measure_tolerance
from evals.windows.visits import PIECES, PLACEHOLDER_TOKENS, Visit, counted_work, draw_visits
from kvpatch_jax.errors import InputError
from kvpatch_jax.models import Buckets, load
from kvpatch_jax.traces import Event, Trace

# -------------------------------------------------------------------------------------------------------------- windows

COUNT = 4


def test_histories_differ_from_the_truth_in_what_their_names_say():
    """Capitals are pieces of its own context, small letters another's."""
    letters = lambda history: "".join("aAbBcCdD"[2 * piece.place + (not piece.other)] for piece in history)
    behind_four = histories(4)
    assert behind_four[BLIND] is None
    written = {arm: letters(history) for arm, history in behind_four.items() if history is not None}
    assert written == {
        REFERENCE: "ABCD",
        "far differ": "abcD",
        "farthest differs": "aBCD",
        "far missing": "D",
        "far moved": "BCAD",
        "nearest differs": "ABCd",
        "nearest missing": "ABC",
        "all differ": "abcd",
        "the lead alone": "",
        "all canonical": "ABCD",
        "all patched": "ABCD",
    }
    # Behind two pieces the farthest is all that is far, and cannot move.
    assert set(written) - set(histories(2)) == {"farthest differs", "far moved"}
    for count in (2, 3, 8):
        assert len(histories(count)) == len(set(histories(count).values()))


def test_kv_behind_the_true_history_loses_nothing(shipped_instance):
    """Texts of few tokens: patches have all directions, and mend what another history lacks."""
    backbone, rng = shipped_instance(MAIN).with_buckets(None), np.random.default_rng(1)
    lead, *pieces, page = (text_piece(backbone, rng.integers(6, 150, (COUNT, 6)), name) for name in "abcd")
    behind = rng.integers(6, 150, (COUNT, 7))
    tail = TextTail(behind[:, :-1], behind[:, 1:])
    chunk = ReusedChunk(backbone, lead, tuple(pieces), page, tail, np.arange(COUNT))
    measured = measure_tolerance(chunk, "documents.front=2")
    valid, reference = measured.questions.valid, measured.answers[REFERENCE]
    kl = {arm: answers.divergence_from(reference)[valid].max() for arm, answers in measured.answers.items()}
    for arm in (REFERENCE, "all patched", MENDED):
        assert kl[arm] < 1e-3
    # What another history lacks is lost, and so is what sums of single deficits have too much.
    for arm in (BLIND, "far differ", "all differ", SUM):
        assert kl[arm] > 0.01


def test_orders_are_all_up_to_four_and_a_sample_beyond():
    assert orders_of(4) == list(itertools.permutations(range(4)))
    drawn = orders_of(6)
    assert len(drawn) == len(set(drawn)) == len(orders_of(64)) == 24  # of 64! orders
    assert all(sorted(order) == list(range(6)) for order in drawn)
    # Orders that are held out are in no sample.
    assert not set(orders_of(6, hold_out=drawn[:5])) & set(drawn[:5])


@pytest.mark.nightly
@pytest.mark.parametrize("operation", ["reorder", "slide", "recall"])
@pytest.mark.parametrize("instance", ["plain/qwen3_5", MAIN])
def test_patches_of_full_rank_give_re_prefill_back(instance: str, operation: str, shipped_instance):
    """Tiny images have fewer tokens than a patch has directions: the context's own patch leaves no difference."""
    contexts = sample(np.random.default_rng(1), COUNT, SIZES["tiny"], drawing=instance.partition("/")[0])
    backbone = shipped_instance(instance).with_buckets(None)
    images, settings = TaskPieces.of(backbone, contexts, np.arange(COUNT)), 0
    for measured in OPERATIONS[operation](images, np.random.default_rng(1)):
        settings, probe, valid = settings + 1, measured.probe, measured.questions.valid
        reference, answers = measured.answers[REFERENCE], measured.answers.items()
        kl = {arm: read.divergence_from(reference)[valid] for arm, read in answers}
        assert ("orbit, rows" in kl) == (instance != MAIN and operation == "reorder")
        # In a reordered window sheets are canonicals, and behind a turnover they remember what left.
        if operation == "slide" or probe == "recall.turnover=0":
            assert kl["own"].max() < 1e-4 < kl[BLIND].max()
        assert kl["own"].mean() < kl[BLIND].mean()
        if operation == "recall":
            np.testing.assert_allclose(kl["updated"], kl["fresh"], atol=1e-4)
        if probe == "recall.turnover=0":
            np.testing.assert_array_equal(kl["stale"], kl["fresh"])
    assert settings == {"reorder": 2, "slide": 1, "recall": 3}[operation]


def test_meaning_follows_the_sheets():
    """Reordered and foreign sheets define what the sheets that stand there do, the last one counting."""
    contexts = sample(np.random.default_rng(0), 4, SIZES["4"])
    order, replaced = np.array([2, 0, 1]), np.array([False, True, False])
    for changed, standing in (
        (operations.reordered(contexts, order), [(0, 2), (0, 0), (0, 1)]),
        (operations.with_foreign(contexts, replaced), [(0, 0), (1, 1), (0, 2)]),
    ):
        value, unit, times = latest(changed)
        for row in range(4):
            known: dict[int, tuple[int, ...]] = {item: (-1, -1, 0) for item in range(value.shape[1])}
            for by, sheet in standing:
                columns = (contexts.sheet_item, contexts.sheet_value, contexts.sheet_unit)
                for item, *last in zip(*(column[(row + by) % 4, sheet].tolist() for column in columns), strict=True):
                    known[item] = (*last, known[item][2] + 1)
            assert list(known.values()) == list(zip(value[row], unit[row], times[row], strict=True))
        np.testing.assert_array_equal(changed.page_item, contexts.page_item)


def flops(tokens: int, behind: int) -> int:
    """FLOPs that say what they are of."""
    return tokens * (1000 + behind)


@pytest.mark.parametrize(("contexts", "window", "revisits"), [(2, 4, 8), (4, 8, 16)])
def test_visits_differ_as_their_names_say(contexts: int, window: int, revisits: int):
    drawn, count = draw_visits(contexts, window, revisits, 0), contexts * PIECES
    first, again, moved, shuffled, fork = (visit.pieces for visit in drawn)
    for pieces in (first, again, moved, shuffled, fork):
        assert set(pieces[:count]) == set(range(count)) == set(pieces)
        # Nothing is revisited while it is in the window.
        assert all(piece not in pieces[max(step - window, 0) : step] for step, piece in enumerate(pieces))
    # Within a context nothing changes.
    assert all(b == a + 1 for a, b in zip(moved[:count:2], moved[1:count:2], strict=True))
    assert again == first != moved
    assert sum(b == a + 1 for a, b in itertools.pairwise(shuffled)) < count / 2
    # The branch goes back to what its parent goes back to.
    forked = drawn[-1].forked
    assert fork[:forked] == first[:forked]
    assert fork[forked:] != first[forked:]


def test_other_ways_prefill_what_they_do_not_have():
    visit, caches, sizes = Visit("a", (0, 1, 2, 0)), dict[str, PrefixCache](), [10, 100, 1000]
    work = {way: tokens for way, (tokens, _) in counted_work(visit, sizes, 4, 2, flops, caches).items()}
    # (0) (0 1) (1 2) (2 0), all of it each time.
    assert work[visits.REPREFILL] == 10 + 110 + 1100 + 1010
    assert work[visits.ONE_BY_ONE] == 10 + 100 + 1100 + 1010
    # (0) (0 1) (0 1 2) (0 1 2 0): nothing leaves before there are four.
    assert work[visits.BATCHED] == 10 + 100 + 1000 + 10
    # (0) (0 1) (… 1 2) (… … 2 0): what follows a placeholder is prefilled again, the one before is known.
    assert work[visits.PLACEHOLDER] == 10 + 100 + (PLACEHOLDER_TOKENS + 1100) + (PLACEHOLDER_TOKENS + 1010)
    # Every piece once, and 15 % of each piece of every window.
    assert work[visits.MPIC] == 1110 + 2 + (2 + 15) + (15 + 150) + (150 + 2)

    # What outlives the visit is known; what does not begins anew.
    again = {way: tokens for way, (tokens, _) in counted_work(visit, sizes, 4, 2, flops, caches).items()}
    assert again[visits.ONE_BY_ONE + visits.KEPT] == again[visits.BATCHED + visits.KEPT] == 0
    assert again[visits.ONE_BY_ONE] == work[visits.ONE_BY_ONE]
    assert again[visits.MPIC] == work[visits.MPIC] - 1110
    # FLOPs are counted behind the lead; what a fork's parent computed is in the branch's cache.
    assert counted_work(Visit("a", (0, 1)), sizes, 4, 2, flops, {})[visits.REPREFILL][1] == 20 * 1004 + 100 * 1014
    assert counted_work(Visit("a", (0, 1), forked=1), sizes, 4, 2, flops, {})[visits.ONE_BY_ONE][0] == 100


# ---------------------------------------------------------------------------------------------------------------- loops


def shown(content: str, size: int = 10) -> Shown:
    return Shown(content, size)


def episode(screens: str) -> Episode:
    """An episode of screenshots that are named by letters."""
    rounds = [
        Round((shown(letter, 100),), None, shown(f"reply {place}"), shown(f"line {place}", 2))
        for place, letter in enumerate(screens)
    ]
    return Episode("e", shown("system"), shown("goal"), tuple(rounds), shown("gone", 1))


@pytest.mark.parametrize(
    ("policy", "screens", "shown"),
    [
        ("four-rounds", "abcd", "goal|a|b|c|d"),
        ("four-rounds", "abcdef", "goal\nline 0\nline 1|c|d|e|f"),
        ("placeholder-1", "abc", "goal|gone|gone|c"),
        ("sliding", "abcdefghij", "goal|c|d|e|f|g|h|i|j"),
        ("dedup", "aaba", "goal|a|gone|b|gone"),
        # Eight leave together when there would be more than twenty.
        ("batch-8-at-20", "abcdefghijklmnopqrst", "goal|" + "|".join("abcdefghijklmnopqrst")),
        ("batch-8-at-20", "abcdefghijklmnopqrstu", "goal" + "|gone" * 8 + "|" + "|".join("ijklmnopqrstu")),
    ],
)
def test_a_policy_shows_what_its_agent_shows(policy: str, screens: str, shown: str):
    """Behind the system text, replies left out."""
    *_, prompt = prompts_of(episode(screens), POLICIES[policy])
    assert [piece.shown.content for piece in prompt.pieces[1:] if "reply" not in piece.id] == shown.split("|")


def test_a_prompt_becomes_another_by_leaving_replacing_and_entering():
    before = [PromptPiece(name, shown(name)) for name in ("s", "g", "a", "b", "c")]
    after = [before[0], PromptPiece("g", shown("g and more")), before[3], before[4], PromptPiece("d", shown("d"))]
    change = changes(before, after)
    assert [piece.id for piece in change.evicted] == ["a"]
    assert [piece.shown.content for piece in change.replaced] == ["g and more"]
    assert [piece.id for piece in change.entering] == ["d"]
    # What would have to move to the front enters anew, with all behind it.
    turned = changes(before, [before[0], before[3], before[2], before[4]])
    assert [piece.id for piece in turned.entering] == ["a", "c"]


def test_ways_cost_what_is_counted_by_hand():
    prompts = prompts_of(episode("abcdefgh"), POLICIES["four-rounds"])
    prefix, survivors = (
        [tokens(way.computed(prompt.pieces)) for prompt in prompts] for way in (PrefixCache(), Survivors())
    )
    # A list that grows in front costs a prefix cache all images; the system text is a prefix that stays.
    assert prefix[-1] == 10 + 2 * 4 + 4 * 100 + 3 * 10
    assert survivors[-1] == 10 + 2 * 4 + 10 + 100  # the list, a reply, a screenshot

    # An order for the cache puts known pieces first.
    cache = PrefixCache()
    pages = [PromptPiece(f"page {name}", shown(name, 100), movable=True) for name in "abcd"]
    system = PromptPiece("system", shown("system"))
    cache.computed([system, *pages[:3]])
    order = cache.ordered([system, pages[3], pages[1], pages[0]])
    assert [piece.shown.content for piece in order] == ["system", "a", "b", "d"]
    assert tokens(cache.computed(order)) == 100


def test_a_session_computes_what_is_priced():
    """Screenshots that never come back: `remember` is what stays, `exact` is the prefix cache without its loss."""
    drawn = drawn_episode("walk", "e", 3, 5)
    rounds = [
        passed._replace(screens=(passed.screens[0]._replace(content=str(number)),))
        for number, passed in enumerate(drawn.rounds)
    ]
    prompts = prompts_of(drawn._replace(rounds=tuple(rounds)), POLICIES["four-rounds"])
    backbone = load(shipped(MAIN), dtype="float32", buckets=Buckets(256, 1, 32))
    for arm, way in (("remember", Survivors()), ("exact", PrefixCache())):
        replay = SessionReplay(backbone, arm)
        served = [tokens(replay.serve(prompt.pieces)) for prompt in prompts]
        assert served == [tokens(way.computed(prompt.pieces)) for prompt in prompts]
        if arm == "exact":
            kls, flips = replay.divergence(prompts[-1].questions)
            assert max(kls) < 1e-6
            assert not any(flips)
        replay.close()


LINES = [
    {"timestamp": 0, "session_id": "a", "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"delay": 500, "session_id": "a", "input_length": 1600, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 250.5, "input_length": 600, "output_length": 9},
    {"delay": 100, "session_id": "a", "input_length": 1300, "hash_ids": [0, 9, 4]},
    {"session_id": "a", "text_input": "And now?", "output_length": 7},
]


def written(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_mooncake_requests_are_windows_of_blocks_priced_without_a_model(tmp_path):
    path = written(tmp_path / "m.jsonl", LINES)
    trace = read_mooncake(path)
    prompts = list(recorded_prompts(trace))
    contents = [[piece.shown.content.removeprefix("mooncake ") for piece in prompt.pieces] for prompt in prompts]
    # The request without a session has blocks that nobody else has; by its time it is second.
    assert contents[:2] == [["0", "1", "2, 76 tokens"], ["3.0", "3.1, 88 tokens"]]
    assert contents[2:4] == [["0", "1", "3", "4, 64 tokens"], ["0", "9", "4, 276 tokens"]]
    (tmp_path / "m.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read_mooncake(tmp_path / "m.jsonl.gz").events == trace.events

    settings = {"trace": str(written(path, LINES[:4])), "format": "mooncake"}
    run = Run({}, (), ("re-prefill", "prefix cache"), 1, 1, 0, settings)
    records = {part.key: list(part.measure()) for part in LOOPS.parts(run)}
    rows = LOOPS.rows(records)
    assert rows == LOOPS.rows(dict(sorted(records.items())))
    costs = {row["arm"]: row["value"] for row in rows if row["metric"] == "tokens"}
    assert costs == {"re-prefill": (1100 + 600 + 1600 + 1300) / 4, "prefix cache": (1100 + 600 + 576 + 788) / 4}
    with pytest.raises(InputError, match="contents are not known"):
        list(LOOPS.parts(run._replace(models={"m": "some/model"}))[-1].measure())


def requests() -> list[dict]:
    """Two requests of one session, each with its newest screenshot alone, and one that begins again."""
    system, shots = {"role": "system", "content": "You use a computer."}, []
    for number in range(3):
        file = io.BytesIO()
        image = np.full((28, 28, 3), number, np.uint8)
        pytest.importorskip("PIL.Image").fromarray(image).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        shots.append({"type": "image_url", "image_url": {"url": url}, "uuid": str(number)})
    text, gone = ({"type": "text", "text": words} for words in ("Pay the bill.", OMITTED))
    call = {"id": "1", "type": "function", "function": {"name": "click", "arguments": '{"x": 1}'}}
    action = {"role": "assistant", "content": None, "tool_calls": [call]}
    user = lambda *content: {"role": "user", "content": [*content]}
    conversations = [user(text, shots[0])], [user(text, gone), action, user(shots[1])], [user(shots[2])]
    return [{"session_id": "a", "messages": [system, *messages]} for messages in conversations]


def test_computer_use_shows_what_each_request_shows(tmp_path):
    trace = read_computer_use(written(tmp_path / "h.jsonl", requests()))
    prompts = list(recorded_prompts(trace))
    kinds = [[piece.id.partition(" ")[0] for piece in prompt.pieces] for prompt in prompts]
    assert kinds[:2] == [["text", "text", "screen"], ["text"] * 3 + ["screen"]]
    assert [prompt.session for prompt in prompts] == ["a", "a", "a #2"]
    first, again = episodes_of(trace)
    assert (len(first.rounds), len(again.rounds)) == (2, 1)
    assert first.system == Shown("You use a computer.\nPay the bill.", 8, "You use a computer.\nPay the bill.")
    assert "click" in str(first.rounds[0].reply)
    image = pytest.importorskip("PIL.Image").open(first.rounds[1].screens[0].item)
    assert image.getpixel((0, 0)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("read", "change", "message"),
    [
        (read_mooncake, {"hash_ids": [0, 1]}, r"jsonl:1, hash_ids: got 2 for input_length 1100; expected 3"),
        (read_mooncake, {"input_length": 1 << 29}, r"jsonl:1, hash_ids: .*at most 16384"),
        (read_mooncake, {"messages": []}, r"jsonl:1, 'messages': got such a field"),
        (read_computer_use, {"session_id": 3}, "jsonl:1, session_id: got 3"),
    ],
)
def test_a_line_is_refused_by_its_field(tmp_path, read, change, message):
    line = LINES[0] if read is read_mooncake else requests()[0]
    with pytest.raises(InputError, match=message):
        read(written(tmp_path / "h.jsonl", [line | change]))


def test_a_history_in_front_grows_while_screenshots_leave():
    text = {"kind": "text", "tokens": 3, "span": 3}
    events = (
        Event(0, "a", "add", "h1", "h1", text="One.", **text),
        Event(1, "a", "add", "s1", "s1", 9, 9, keep=2),
        Event(2, "a", "add", "s2", "s2", 9, 9, keep=2),
        Event(3, "a", "replace", "h2", "h2", text="One, two.", replaced="h1", **text),
        Event(4, "a", "insert", "s0", "s0", 9, 9, before="s2", keep=2),
        Event(5, "a", "ask", text="and now?"),
        Event(6, "a", "add", "s3", "s3", 9, 9, keep=1),
        Event(7, "a", "ask", text="and now?"),
    )
    prompts = list(recorded_prompts(Trace(events)))
    assert [[piece.id for piece in prompt.pieces] for prompt in prompts] == [["h2", "s0", "s2"], ["h2", "s3"]]


def test_what_cannot_have_happened_is_refused_by_its_number():
    first = Event(0, "a", "add", "1", "1", tokens=3, span=3)
    for last, message in (
        (Event(1, "a", "fork", branch="b"), "event 1: got a branch of 'a'"),
        (Event(1, "a", "add", "1"), "event 1, add of 'a'"),
        (Event(1, "a", "reorder", order=("1", "2")), "event 1, reorder of 'a'"),
        (Event(1, "c", "evict", "1"), "event 1, evict of 'c'"),
    ):
        with pytest.raises(InputError, match=message):
            list(recorded_prompts(Trace((first, last))))
