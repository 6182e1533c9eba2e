"""Random operations on windows: pool and host arrays stay what a naive window builds from scratch."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from window_drill import Drill

NUMBERS = st.integers(0, 1 << 16)
MOST = 6
"""Pieces of a window."""


class Loop(RuleBasedStateMachine):
    """Every operation, in any order, on branches."""

    drill: Drill

    @property
    def window(self):
        return self.drill.window

    def some(self, number: int, lead: bool = False) -> str:
        pieces = self.window.pieces[0 if lead else self.window.lead :]
        return pieces[number % len(pieces)].entry.id

    def unused(self, number: int) -> str:
        known = {piece.entry.id for piece in (*self.window.pieces, *self.window.evicted)}
        free = [id for id in (f"c{index}" for index in range(12)) if id not in known]
        return free[number % len(free)]

    def has(self, least: int) -> bool:
        return len(self.window.pieces) - self.window.lead >= least

    def room(self) -> bool:
        return len(self.window.pieces) < MOST and len(self.window.pieces) + len(self.window.evicted) < 11

    @precondition(lambda self: self.room())
    @rule(number=NUMBERS)
    def append(self, number: int):
        self.drill.append(self.unused(number))

    @precondition(lambda self: self.room() and self.has(1))
    @rule(number=NUMBERS, at=NUMBERS)
    def insert(self, number: int, at: int):
        self.drill.insert(self.unused(number), self.some(at))

    @precondition(lambda self: self.has(1))
    @rule(at=NUMBERS)
    def evict(self, at: int):
        self.drill.evict(self.some(at))

    @precondition(lambda self: self.has(3))
    @rule(keep=st.integers(1, 3))
    def slide(self, keep: int):
        self.drill.slide(keep)

    @precondition(lambda self: self.window.evicted and len(self.window.pieces) < MOST)
    @rule(at=NUMBERS, how=st.sampled_from(["patch", "bare", "prefill"]))
    def recall(self, at: int, how: str):
        evicted = self.window.evicted
        self.drill.recall(evicted[at % len(evicted)].entry.id, how)

    @precondition(lambda self: self.has(1) and len(self.window.pieces) + len(self.window.evicted) < 11)
    @rule(at=NUMBERS, number=NUMBERS)
    def replace(self, at: int, number: int):
        self.drill.replace(self.some(at), self.unused(number))

    @precondition(lambda self: self.has(2))
    @rule(order=st.randoms(use_true_random=False))
    def reorder(self, order):
        ids = [piece.entry.id for piece in self.window.pieces[self.window.lead :]]
        order.shuffle(ids)
        self.drill.reorder(ids)

    @precondition(lambda self: self.has(1))
    @rule(at=NUMBERS)
    def switch(self, at: int):
        id = self.some(at, lead=True)
        self.drill.bare(id)

    @precondition(lambda self: self.has(1))
    @rule(at=NUMBERS)
    def patch(self, at: int):
        self.drill.patch_in_place(self.some(at))

    @precondition(lambda self: self.has(1))
    @rule(at=NUMBERS, layer=st.integers(0, 1))
    def recompute(self, at: int, layer: int):
        self.drill.recompute(self.some(at), layer)

    @precondition(lambda self: self.has(1) and len(self.drill.windows) < 3)
    @rule(name=st.sampled_from("xy"))
    def fork(self, name: str):
        branch = f"{self.drill.branch}/{name}"
        if branch not in self.drill.windows:
            self.drill.fork(name)

    @precondition(lambda self: self.drill.branch)
    @rule()
    def leave(self):
        if not any(name.startswith(f"{self.drill.branch}/") for name in self.drill.windows):
            self.drill.abandon()

    @rule(number=NUMBERS)
    def turn_to(self, number: int):
        """Goes on with another branch."""
        names = sorted(self.drill.windows)
        self.drill.branch = names[number % len(names)]
        self.drill.compare()

    @rule()
    def compact(self):
        self.drill.compact()

    @rule()
    def ask(self):
        self.drill.ask()

    def teardown(self):
        """Everything that is let go of is free again."""
        if not hasattr(self, "drill"):
            return
        for name in list(self.drill.windows):
            self.drill.branch = name
            self.drill.compare()
        for name in list(self.drill.windows):
            self.drill.paged.release(name)
        allocator = self.drill.paged.books.allocator
        assert allocator.free == allocator.pages * allocator.page_size


def drive(name: str, steps: int, examples: int, **options) -> None:
    class Own(Loop):
        def __init__(self):
            super().__init__()
            self.drill = Drill(name, **options)

    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    how = settings(
        stateful_step_count=steps,
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=quiet,
    )
    run_state_machine_as_test(Own, settings=how)


def test_a_short_random_loop():
    drive("gqa", 25, 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mla", "mrope", "unlike"])
@pytest.mark.parametrize("options", [{}, {"aligned": False, "page_size": 4}], ids=["aligned", "shared pages"])
def test_long_random_loops_equal_plain_prefills(name: str, options: dict):
    drive(name, 200, 2, **options)
