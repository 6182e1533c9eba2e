"""What a request leaves for the next one of its agent: chunks as they were served, and as they were prefilled."""

from collections.abc import Sequence

from .messages import ChunkPayload, LeftBehind
from .prompt_history import PromptHistory
from .request_plan import EXACT, ChunkStep, identities_of
from .settings import RequestOptions
from .survivors import Survivor, Survivors


def keep_served(
    survivors: Survivors, history: PromptHistory, options: RequestOptions, payloads: Sequence[ChunkPayload]
) -> None:
    """Keeps the chunks that a request is served exactly; survivors that serve it count as used.

    What is approximate is found again as it was found now. The first chunk is always there as a canonical.
    """
    identities = tuple(payload.step.identity for payload in payloads)
    for index, payload in enumerate(payloads):
        step, key = payload.step, history.survivor_key(index, options)
        if index and step.exact:
            survivors.put(key, Survivor(payload.chunk, step.identity, identities[:index]))
        elif step.point == "survivor":
            survivors.get(key)


def left_behind(
    survivors: Survivors, history: PromptHistory, options: RequestOptions, steps: Sequence[ChunkStep]
) -> tuple[LeftBehind, ...]:
    """Returns the chunks that the engine prefills behind the steps of a plan, and that are not kept yet."""
    identities, left = identities_of(history, steps), []
    # A window that remembers promises its survivors, but not what was computed behind other approximate chunks.
    ways = {way for step in steps for way in (*step.inherited, (step.point, step.rank))}
    ways = tuple(sorted(way for way in ways if way[0] not in (*EXACT, "survivor")))
    for index in range(max(len(steps), 1), len(identities)):
        key = history.survivor_key(index, options)
        known = survivors.get(key)
        if known is None or known.identity != identities[index]:
            left.append(LeftBehind(index, key, identities[index], identities[:index], ways))
    return tuple(left)
