"""Episodes replayed step by step: what is exact is exact, tokens are those counted otherwise, kills change nothing."""

import dataclasses
import json

import numpy as np
import pytest

from evals.harness.parts import measure_parts
from evals.measure import formats
from evals.measure.frame import frame_of
from evals.measure.trajectories.plan import planned_replay
from evals.measure.trajectories.replayed import BLIND, DROP, NEVER, PREFIX, REFERENCE, SESSION, WAYS, EpisodeReplay
from evals.measure.trajectories.report import kind_table, rows_of, verdict, write_steps
from evals.traces.prefix_cache import PrefixCache
from kvpatch_jax.errors import InputError
from tests.evals.measure import released as releases

KEEP = 2


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """Two episodes of four steps, of which the last shows the first one's screenshot again."""
    folder = releases.released(tmp_path_factory.mktemp("episodes"), "gui_odyssey")
    for path in (folder / "annotations").iterdir():
        if path.stem not in "01":
            path.unlink()
    for number in range(2):
        screens = folder / "screenshots"
        (screens / f"{number}_3.png").write_bytes((screens / f"{number}_0.png").read_bytes())
    return folder


def read(folder, number):
    """An episode, with a short instruction: the question of the format is longer than the window."""
    return dataclasses.replace(formats.read_episodes(folder).episodes[number], instruction="Act.")


@pytest.fixture(scope="module")
def replay(loaded):
    """`replay(keep)`: of the tiny model, with short answers."""
    backbone = loaded("qwen2_5_vl")
    return lambda keep=KEEP: EpisodeReplay(backbone, frame_of(backbone, "chat", "again"), keep, None, 3)


@pytest.fixture(scope="module")
def records(replay, released):
    """Of the first episode, by way."""
    episode = read(released, 0)
    found = list(replay().records(episode))
    return {way: [record for record in found if record["way"] == way] for way in WAYS}


def windows(replay, episode, keep):
    """Token by token, written down by hand: what each step shows, as the window, as all texts, and as everything."""
    backbone, frame = replay.backbone, replay.frame
    lead = [("id", token) for token in (*frame.front, *backbone.ids(f"Goal: {episode.goal}\n"))]
    asked = backbone.ids(f"{frame.before}Goal: {episode.goal}\n{episode.instruction}\nNext action:{frame.behind}")
    question, shown, said = [("id", token) for token in asked], [], []
    for number, step in enumerate(episode.steps):
        [screen] = step.screenshots
        ids = np.asarray(backbone.prepare([screen.content])["input_ids"])[0]
        # The fourth screenshot is the first.
        shown.append([(f"screen {number % 3}", place) for place in range(len(ids))])
        turns = [*said, []]
        oldest = max(0, number + 1 - keep)
        window = [token for turn in range(oldest, number + 1) for token in (*shown[turn], *turns[turn])]
        texts = [
            token for turn in range(number + 1) for token in (*(shown[turn] if turn >= oldest else ()), *turns[turn])
        ]
        everything = [token for turn in range(number + 1) for token in (*shown[turn], *turns[turn])]
        yield [[*lead, *own, *question] for own in (window, texts, everything)]
        said.append([("id", token) for token in backbone.ids(f"Action {number + 1}: {step.response}\n")])


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_a_prefix_cache_answers_as_re_prefill(records):
    assert [len(own) for own in records.values()] == [4] * len(WAYS)
    assert all(record["agrees"] and record["kl_first"] < 1e-9 for record in records[PREFIX])
    assert [own["said"] for own in records[PREFIX]] == [own["said"] for own in records[REFERENCE]]
    # It did reuse something, and what shows something else does answer from something else.
    assert all(
        own["tokens"] < full["tokens"] for own, full in zip(records[PREFIX][1:], records[REFERENCE][1:], strict=True)
    )
    assert [own["kl_first"] < 1e-9 for own in records[DROP]] == [True, True, False, False]
    assert [own["kl_first"] < 1e-9 for own in records[NEVER]] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_a_session_is_exact_until_something_has_left(records, replay, released):
    assert max(record["kl_first"] for record in records[SESSION][:KEEP]) < 1e-5
    episode = read(released, 0)
    # As many steps as stay; the same shapes as "never drop" has compiled.
    short = dataclasses.replace(episode, steps=episode.steps[:3])
    kept = [record for record in replay(3).records(short) if record["way"] == SESSION]
    assert len(kept) == 3
    assert max(record["kl_first"] for record in kept) < 1e-5
    assert all(record["agrees"] for record in kept)


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_tokens_are_those_of_the_prompts_as_written_down(records, replay, released):
    episode = read(released, 0)
    caches = {way: PrefixCache() for way in (PREFIX, DROP, NEVER)}
    before = None
    for number, prompts in enumerate(windows(replay(), episode, KEEP)):
        window, texts, everything = prompts
        assert records[REFERENCE][number]["tokens"] == len(window)
        for way, prompt in ((PREFIX, window), (DROP, texts), (NEVER, everything)):
            assert records[way][number]["tokens"] == len(prompt) - caches[way].hit(prompt), (way, number)
        # A session computes what entered: a screenshot, the action behind the one before it, and the question.
        [screen] = {name for name, _ in window if name == f"screen {number % 3}"}
        entered = sum(name == screen for name, _ in window)
        if before is None:
            assert records[SESSION][0]["tokens"] == len(window)
        else:
            question = len(replay().frame.question_ids(replay().backbone, _question(episode)))
            action = len(replay().backbone.ids(f"Action {number}: {episode.steps[number - 1].response}\n"))
            assert records[SESSION][number]["tokens"] == entered + action + question
        before = window


def _question(episode):
    return f"Goal: {episode.goal}\n{episode.instruction}\nNext action:"


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_a_resumed_run_leaves_the_same_files_and_a_broken_screenshot_ends_its_episode(
    replay, released, tmp_path, capsys
):
    for file in released.rglob("*"):
        if file.is_file():
            copied = tmp_path / "data" / file.relative_to(released)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(file.read_bytes())
    broken = tmp_path / "data" / "screenshots" / "0_2.png"
    broken.write_bytes(broken.read_bytes()[:60])

    data = formats.read_episodes(tmp_path / "data")
    data = dataclasses.replace(data, episodes=[read(tmp_path / "data", number) for number in range(2)])
    planned = planned_replay(replay(), data, 0, {"model": "tiny"})
    for out in ("whole", "cut"):
        if out == "cut":
            (tmp_path / out).mkdir()
            lines = (tmp_path / "whole" / "parts.jsonl").read_bytes()
            (tmp_path / out / "parts.jsonl").write_bytes(lines[:-40])
        parts = measure_parts(tmp_path / out / "parts.jsonl", planned.config, planned.parts)
        said = write_steps(parts, tmp_path / out)
        assert said.startswith("fewest tokens: ")
    for name in ("steps.jsonl", "table.md"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()

    lines = [json.loads(line) for line in (tmp_path / "cut" / "steps.jsonl").read_text().splitlines()]
    assert [(own["episode"], own["step"]) for own in lines if "refused" in own] == [("0", 2)]
    assert [sum(own["episode"] == name and "way" in own for own in lines) for name in "01"] == [10, 20]
    assert capsys.readouterr().out.count("left out from step 3 on: ") == 1
    assert "left out from step 3 on" in (tmp_path / "cut" / "table.md").read_text()

    other = planned_replay(replay(1), data, 0, {"model": "tiny"})
    with pytest.raises(InputError, match="parts of another keep"):
        measure_parts(tmp_path / "cut" / "parts.jsonl", other.config, other.parts)


@pytest.mark.slow
def test_what_the_model_is_too_short_for_is_said_of_the_way_or_ends_the_episode(replay, released, records):
    episode = read(released, 0)
    most = max(own["tokens"] for own in records[REFERENCE]) + 3
    short = list(dataclasses.replace(replay(), most=most).records(episode))
    failed = [(own["way"], own["step"]) for own in short if "failed" in own]
    assert (NEVER, 3) in failed
    assert {way for way, _ in failed} <= {DROP, NEVER}
    tiny = list(dataclasses.replace(replay(), most=20).records(episode))
    assert len(tiny) == 1
    assert "expected at most 20, which the model serves" in tiny[0]["refused"]


def test_rows_compare_the_steps_that_a_way_answered():
    """Two episodes; a way that failed at one step is compared with re-prefill at the others."""
    records = []
    for episode in "ab":
        for step in range(2):
            for way, score, tokens in ((REFERENCE, 1.0, 100), (SESSION, 0.5, 25), (NEVER, 1.0, 10)):
                own = {"episode": episode, "step": step, "way": way}
                answered = {"score": score, "kl_first": 0.0, "agrees": score == 1, "tokens": tokens * (1 + step)}
                records.append(own | ({"failed": "long"} if (way, step) == (NEVER, 1) else answered))
    rows = {row.way: row for row in rows_of(records)}
    assert [rows[way].score.n for way in (REFERENCE, SESSION, NEVER)] == [4, 4, 2]
    assert rows[SESSION].difference.value == -0.5
    assert rows[SESSION].share.value == 0.25
    assert rows[NEVER].share.value == 0.1
    said = verdict(list(rows.values()))
    assert said.startswith("fewest tokens: never drop, 10 % of re-prefill's; session: score -0.500, KL 0, 25 %")
    assert "never drop: answers as re-prefill" in said


def test_kinds_have_a_column_each():
    records = []
    for step, kind in enumerate("abb"):
        for way, score in ((REFERENCE, 1.0), (SESSION, 0.0 if kind == "b" else 1.0)):
            own = {"episode": "0", "step": step, "kind": kind, "way": way}
            records.append(own | {"score": score, "kl_first": 0.25, "agrees": True, "tokens": 3})
    table = kind_table(records)
    assert table is not None
    assert table[0] == ["way", "a, 1", "b, 2"]
    assert table[1][1] == [SESSION, "1.000; 0.25", "0.000; 0.25"]
    assert kind_table([own for own in records if own["kind"] == "a"]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("highest_precision")
def test_patches_of_full_rank_answer_as_re_prefill_and_blind_reuse_does_not(replay, released):
    patched = dataclasses.replace(replay(), blind=True, ranks=(1, 128))
    by_way = {}
    for record in patched.records(read(released, 0)):
        by_way.setdefault(record["way"], []).append(record)
    assert max(own["kl_first"] for own in by_way["patch, rank 128"]) < 1e-6
    assert max(own["kl_first"] for own in by_way[BLIND]) > 1e-3
