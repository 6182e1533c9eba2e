"""Traces of agents: what is drawn is a function of its seed, windows follow events, every way answers the same."""

import json

import numpy as np
import pytest

from evals.traces import KINDS, generate
from evals.traces.figures import draw
from evals.traces.prefix_cache import divergence
from evals.traces.replay_modes import PromptReplay, WindowPolicy, WindowReplay
from evals.traces.replay_run import (
    AGAIN,
    BLIND,
    FIRST,
    MODES,
    PREFILL,
    PREFIX,
    WINDOW,
    rank_table,
    replay,
    table,
)
from evals.traces.window_tracker import TraceContents, TracedClose, TracedFork, TracedQuestion, config_of, moments
from evals.trained import MAIN, shipped
from kvpatch_jax.backbone import ForwardCosts, Tokens
from kvpatch_jax.errors import InputError, TraceError
from kvpatch_jax.patching import one_behind_the_other
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Costs
from models import load
from tests.evals.banded_mask import banded_mask, history

COSTS = Costs("f" * 64, 2, 8, 4, 4, ForwardCosts((1, 1), (1, 1), (0, 0), 1))


def contents_of(trace: Trace) -> TraceContents:
    """Tokens of the right number for each piece, that say nothing."""
    some = Tokens(np.zeros((1, 3, 2), np.float32), np.arange(3)[None])  # pyright: ignore[reportArgumentType]
    return TraceContents({event.content: some for event in trace if event.content}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_is_a_function_of_its_seed(tmp_path, kind):
    first = generate(kind, 3, tmp_path / "a", steps=9)
    again = generate(kind, 3, tmp_path / "b", steps=9)
    assert first.events == again.events
    assert (tmp_path / "a" / f"{kind}.jsonl").read_bytes() == (tmp_path / "b" / f"{kind}.jsonl").read_bytes()
    assert generate(kind, 4, tmp_path / "c", steps=9).events != first.events
    assert Trace.read(tmp_path / "a" / f"{kind}.jsonl").events == first.events
    for event in first:
        for path in first.payloads(event):
            assert path.stat().st_size > 100
    asked = [moment for moment in moments(first, contents_of(first), COSTS) if isinstance(moment, TracedQuestion)]
    assert len(asked) == sum(event.op == "ask" for event in first) >= 9
    assert all(1 <= len(each.pieces) <= 4 for each in asked)  # as the shipped models were trained


def test_each_kind_has_its_events(tmp_path):
    traces = {kind: generate(kind, 1, tmp_path / kind, steps=12) for kind in KINDS}
    ops = {kind: {event.op for event in trace} for kind, trace in traces.items()}
    assert ops["screenshots"] == {"add", "slide", "ask"}
    assert ops["video"] == {"add", "slide", "ask", "recall"}
    assert ops["pages"] == {"add", "ask", "evict", "recall", "reorder"}
    assert ops["tree"] == {"add", "ask", "fork", "close"}
    assert config_of(traces["pages"]) == ("forget", 0)
    assert config_of(traces["tree"]) == ("remember", None)

    seen = list(moments(traces["pages"], contents_of(traces["pages"]), COSTS))
    assert all(each.pieces[-1].id == "page" for each in seen if isinstance(each, TracedQuestion))
    orders = [tuple(entry.id for entry in each.pieces) for each in seen if isinstance(each, TracedQuestion)]
    assert len(set(orders)) < len(orders)  # rankings come back
    tree = list(moments(traces["tree"], contents_of(traces["tree"]), COSTS))
    closed = {each.session for each in tree if isinstance(each, TracedClose)}
    assert {each.session for each in tree if isinstance(each, TracedFork)} <= closed


def test_impossible_events_and_kinds_are_refused(tmp_path):
    add = [Event(0, "a", "add", name, f"shows {name}") for name in ("one", "two")]
    trace = Trace((*add, Event(1, "a", "reorder", order=("two", "one"))))
    with pytest.raises(TraceError, match=r"event 2, reorder of 'a': .*(not order-free|pinned)"):
        list(moments(trace, contents_of(trace), COSTS))
    with pytest.raises(TraceError, match="promise 'forever'"):
        config_of(Trace((), parameters={"promise": "forever"}))
    with pytest.raises(TraceError, match="lead True"):
        config_of(Trace((), parameters={"lead": True}))
    for kind, steps in (("films", 3), ("pages", 0)):
        with pytest.raises(InputError, match="expected"):
            generate(kind, 0, tmp_path, steps=steps)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="expected a folder"):
        generate("pages", 0, tmp_path / "file")


def test_a_new_piece_evicts_the_oldest():
    events = [Event(0, "a", "add", str(number), f"shows {number}", keep=2) for number in range(5)]
    events += [Event(1, "a", "ask", text="?"), Event(1, "a", "recall", "1", keep=2), Event(1, "a", "ask", text="?")]
    trace = Trace(tuple(events))
    asked = [each for each in moments(trace, contents_of(trace), COSTS) if isinstance(each, TracedQuestion)]
    assert [[entry.id for entry in each.pieces] for each in asked] == [["0", "3", "4"], ["0", "4", "1"]]


def test_divergence_matches_values_by_hand():
    same = np.log(np.array([0.5, 0.25, 0.25]))
    other = np.log(np.array([0.25, 0.5, 0.25]))
    assert divergence(same, same + 7) == pytest.approx((0, False), abs=1e-12)
    kl, flip = divergence(same, other)
    assert (kl, flip) == (pytest.approx(0.5 * np.log(2) + 0.25 * np.log(0.5)), True)
    far = np.array([1e4, 0.0, -1e4])
    assert divergence(far, far)[0] == 0


@pytest.mark.slow
def test_every_mode_replays_the_pages(tmp_path):
    """On a trained model: exact ways equal re-prefill, patches need no forward once met, ranks come nearer."""
    backbone = load(shipped(MAIN), dtype="float32")
    trace = generate("pages", 0, tmp_path, steps=3, backbone=backbone)
    found = replay(trace, backbone, rank=16, ranks=(4, 16))
    ways = found["ways"]
    assert list(ways) == list(MODES)
    for name in (PREFILL, PREFIX, WINDOW, FIRST):
        assert max(map(abs, ways[name]["kls"])) < 1e-6
    assert ways[AGAIN]["forwards"] == ways[PREFILL]["forwards"] == found["asks"] == 3
    assert ways[AGAIN]["misses"] == 0
    assert ways[AGAIN]["flops"] < 0.1 * ways[PREFILL]["flops"]
    assert ways[AGAIN]["kl"] < 1e-3 < ways[BLIND]["kl"]
    assert found["ranks"][1]["kl"] < found["ranks"][0]["kl"]
    assert all(len(line) == len(table(found)[0]) for line in table(found)[1])
    assert len(rank_table(found)[1]) == 2
    json.dumps(found, allow_nan=False)
    assert all(path.stat().st_size > 1000 for path in draw({"pages": found}, tmp_path))


@pytest.mark.slow
def test_a_slide_equals_the_model_under_the_banded_mask(tmp_path):
    """The reference of what windows remember, against one forward over the whole history."""
    backbone = load(shipped(MAIN), dtype="float32")
    trace = generate("screenshots", 0, tmp_path, steps=7, backbone=backbone)
    contents = TraceContents.of(trace, backbone)
    seen = [
        each for each in moments(trace, contents, Costs.of(backbone, np.float32)) if isinstance(each, TracedQuestion)
    ]
    own = [
        WindowReplay(backbone, contents, config_of(trace), WindowPolicy("prefill", host=host)) for host in (True, False)
    ]
    taken = [[way.see(each) for each in seen] for way in own]

    images = [contents.pieces[event.content or ""] for event in trace if event.op == "add"]
    spans = [int(np.asarray(image.positions).max()) + 1 for image in images]
    question = contents.questions[seen[-1].text]
    # The pinned image is the lead; two more stay in front of each new one.
    segments = history(spans[1:], 3, spans[0], [5])
    whose = {"lead": lambda _: images[0], "chunk": lambda index: images[1 + index], "question": lambda _: question}
    parts = [whose[each.kind](each.index).shift(each.start) for each in segments]
    mask = banded_mask(segments, [part.embeddings.shape[1] for part in parts])[None, None]
    expected = np.asarray(backbone.prefill(one_behind_the_other(parts), mask=mask).logits)[0, -1]
    for answers in taken:
        last = answers[-1]
        assert last is not None
        assert divergence(expected, last.logits)[0] < 1e-6
    forgetting = PromptReplay(backbone, contents).see(seen[-1])
    assert forgetting is not None
    assert divergence(expected, forgetting.logits)[0] > 1e-6  # the two meanings differ
