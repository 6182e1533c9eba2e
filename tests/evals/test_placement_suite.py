"""The suite of placement: what windows of a trace want, the prefix cache that it is held against, its tables."""

from evals.placement import ONLINE, Terms, WindowRequest, replay, total
from evals.placement.prefix_cache import serve_by_prefix
from evals.placement.synthetic_traces import KINDS, released_costs, requests_of, synthetic_trace
from kvpatch_jax.traces import Event, Trace
from kvpatch_jax.window import Entry

COSTS = released_costs()


def entry(name: str, tokens: int = 10, free: bool = True) -> Entry:
    return Entry(name, name, tokens, tokens, order_free=free)


def test_synthetic_traces_are_functions_of_their_seed():
    for kind in KINDS:
        assert synthetic_trace(kind, 3, 6).events == synthetic_trace(kind, 3, 6).events
        requests = requests_of(synthetic_trace(kind, 3, 6), COSTS)
        assert len(requests) >= 6
        assert all(request.pieces[0].id == "system" for request in requests)


def test_requests_of_a_recorded_trace_are_its_windows():
    look = lambda at, name, **more: Event(at, "one", "add", chunk=name, content=name, tokens=7, span=7, **more)
    events = (
        Event(0, "one", "add", chunk="said", kind="text", text="hello"),
        look(1, "a", keep=2),
        look(2, "b", keep=2),
        look(3, "c", keep=2),
        Event(4, "one", "ask", text="?"),
        Event(5, "one", "fork", branch="one/x"),
        Event(6, "one/x", "recall", chunk="a", keep=2),
        Event(7, "one/x", "ask", text="?"),
    )
    first, second = requests_of(Trace(events), COSTS, tokens=5)
    assert [piece.id for piece in first.pieces] == ["said", "b", "c"]
    assert first.pieces[0].tokens == 5
    assert [piece.id for piece in second.pieces] == ["said", "c", "a"]
    assert (second.session, second.parent) == ("one/x", "one")


def test_a_prefix_cache_computes_from_the_first_difference():
    a, b, c = entry("a", 10), entry("b", 20), entry("c", 30)
    requests = [WindowRequest("one", (a, b, c)), WindowRequest("two", (a, c, b)), WindowRequest("one", (a, b, c))]
    terms = Terms(COSTS)
    whole, behind_a = terms.forward(60, 0), terms.forward(50, 10)
    assert serve_by_prefix(requests, terms, budget=None) == [whole, behind_a, 0]
    assert serve_by_prefix(requests, terms, budget=None, ordered=True) == [whole, 0, 0]
    # Room for one window: the other leaves.
    assert serve_by_prefix(requests, terms, budget=60 * COSTS.kv_bytes) == [whole, behind_a, behind_a]
    assert serve_by_prefix([request._replace(pieces=(b, a)) for request in requests], terms, budget=0)[0] > 0


def test_survivors_reduce_the_cost_of_sliding_windows():
    requests = requests_of(synthetic_trace("screenshots", 1, 8), COSTS)
    remember, forget = (total(replay(requests, Terms(COSTS, promise=each), ONLINE)) for each in ("remember", "forget"))
    assert remember < 0.6 * forget
