"""Ranges for vLLM 0.32, as a change of its scheduler would be: what is stored behind a gap is loaded too.

`Scheduler.schedule` asks a connector once, when it admits a request, how many tokens follow those that it has. With
this change it asks again while it prefills: it ends a step where the next range begins, and goes on behind the range,
once blocks up to its end are allocated. tpu-inference needs no change, since it takes the number of computed tokens of
each request from every step's output. A connector without `get_next_range` is served as before.

`install` changes the running process, for the rig alone. The engine without it is the default.
"""
# pyright: reportMissingImports=false

import collections
import difflib
import inspect
import textwrap
from typing import Any

CHANGES = (
    # Where the next step of a running request begins.
    (
        """
            num_new_tokens = (
                request.num_tokens_with_spec
                + request.num_output_placeholders
                - request.num_computed_tokens
            )
""",
        """
            num_range_tokens = self._num_range_tokens(request)
            num_computed_tokens = request.num_computed_tokens + num_range_tokens
            num_new_tokens = (
                request.num_tokens_with_spec
                + request.num_output_placeholders
                - num_computed_tokens
            )
            num_new_tokens = self._end_at_next_range(
                request, num_computed_tokens, num_new_tokens
            )
""",
    ),
    (
        """
                self.max_model_len
                - request.num_computed_tokens
                - self.num_sampled_tokens_per_step,
""",
        """
                self.max_model_len
                - num_computed_tokens
                - self.num_sampled_tokens_per_step,
""",
    ),
    # Encoder inputs of the range are neither scheduled nor computed.
    (
        """
                    request,
                    request.num_computed_tokens,
                    num_new_tokens,
                    encoder_compute_budget,
""",
        """
                    request,
                    num_computed_tokens,
                    num_new_tokens,
                    encoder_compute_budget,
""",
    ),
    (
        """
                request, request.num_computed_tokens, num_new_tokens
            )

            if num_new_tokens == 0:
""",
        """
                request, num_computed_tokens, num_new_tokens
            )

            if num_new_tokens == 0:
""",
    ),
    # Blocks of the range and of the step are allocated together, or neither.
    (
        """
                        request,
                        num_new_tokens,
                        num_lookahead_tokens=self.num_lookahead_tokens,
""",
        """
                        request,
                        num_range_tokens + num_new_tokens,
                        num_lookahead_tokens=self.num_lookahead_tokens,
""",
    ),
    (
        """
            # Schedule the request.
            scheduled_running_reqs.append(request)
""",
        """
            # Schedule the request.
            if num_range_tokens:
                request.num_computed_tokens = num_computed_tokens
                loaded_ranges[request.request_id] = num_range_tokens
            scheduled_running_reqs.append(request)
""",
    ),
    (
        """
        has_sync_kv_loads = False

""",
        """
        has_sync_kv_loads = False
        # Tokens of the range that each running request loads in this step.
        loaded_ranges: dict[str, int] = {}

""",
    ),
    # Only now it is certain that none of them was preempted again in this step.
    (
        """
        # Record the LoRAs in scheduled_running_reqs
""",
        """
        for request in scheduled_running_reqs:
            if num_range_tokens := loaded_ranges.get(request.request_id, 0):
                has_sync_kv_loads = True
                self._load_range(request, num_range_tokens)

        # Record the LoRAs in scheduled_running_reqs
""",
    ),
    # The first step of a request that is admitted.
    (
        """
                    num_new_tokens = min(num_new_tokens, request_token_budget)
                    assert num_new_tokens > 0
""",
        """
                    num_new_tokens = min(num_new_tokens, request_token_budget)
                    num_new_tokens = self._end_at_next_range(
                        request, num_computed_tokens, num_new_tokens
                    )
                    assert num_new_tokens > 0
""",
    ),
)
"""Of `Scheduler.schedule`: what stands there, and what takes its place."""


# Of `KVConnectorBase_V1`: two methods that a connector may have.


def get_next_range(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, int] | None:
    """Returns begin and end of the next tokens of a request's prompt that can be loaded, None if there are none.

    The begin is at least `num_computed_tokens`. Ranges do not touch each other, and leave a token to be computed.
    """
    return None


def update_state_after_range_alloc(self: Any, request: Any, blocks: Any, begin: int, end: int) -> None:
    """Registers that a range's blocks are allocated: the connector loads it before the step's forward."""


# Of `Scheduler`: three methods.


def _num_range_tokens(self: Any, request: Any) -> int:
    """Counts the tokens that the connector can load from where a request stands."""
    begin, end = self._next_range(request, request.num_computed_tokens)
    return end - begin if begin == request.num_computed_tokens else 0


def _end_at_next_range(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
    """Returns how many of the new tokens come before the next range."""
    begin, _ = self._next_range(request, num_computed_tokens)
    return min(num_new_tokens, begin - num_computed_tokens) if begin > num_computed_tokens else num_new_tokens


def _next_range(self: Any, request: Any, num_computed_tokens: int) -> tuple[int, int]:
    none = (self.max_model_len, self.max_model_len)
    if self.connector is None or num_computed_tokens >= request.num_prompt_tokens:
        return none
    return self.connector.get_next_range(request, num_computed_tokens) or none


def _load_range(self: Any, request: Any, num_tokens: int) -> None:
    """Has the connector load the range that ends where a request's next step begins."""
    end = request.num_computed_tokens
    blocks = self.kv_cache_manager.get_blocks(request.request_id)
    self.connector.update_state_after_range_alloc(request, blocks, end - num_tokens, end)
    if (stats := request.prefill_stats) and request.num_preemptions <= 0:
        external = stats.num_external_cached_tokens + num_tokens
        stats.set(request.num_prompt_tokens, stats.num_local_cached_tokens, external)


CONNECTOR = (get_next_range, update_state_after_range_alloc)
SCHEDULER = (_num_range_tokens, _end_at_next_range, _next_range, _load_range)


def changed_lines() -> dict[str, int]:
    """Counts the lines that an upstream change would add and remove, docstrings included."""
    signs = collections.Counter[str]()
    for before, after in CHANGES:
        signs.update(line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines()))
    methods = [inspect.getsource(method).strip() for method in CONNECTOR + SCHEDULER]
    return {"added": signs["+"] + sum(len(method.splitlines()) for method in methods), "removed": signs["-"]}


def install() -> None:
    """Changes the engine's classes, before an engine is made.

    Raises:
      RuntimeError: the engine is not the one that this change is of.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched import scheduler

    source = inspect.getsource(scheduler.Scheduler.schedule)
    for before, after in CHANGES:
        if source.count(before) != 1:
            raise RuntimeError(f"vLLM: got {source.count(before)} places like {before!r}; expected 1, as in 0.32")
        source = source.replace(before, after)
    made: dict[str, Any] = {}
    exec(compile(textwrap.dedent(source), scheduler.__file__, "exec"), vars(scheduler), made)
    scheduler.Scheduler.schedule = made["schedule"]
    for owner, methods in ((KVConnectorBase_V1, CONNECTOR), (scheduler.Scheduler, SCHEDULER)):
        for method in methods:
            setattr(owner, method.__name__, method)
