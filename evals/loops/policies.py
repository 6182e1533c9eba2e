"""Policies of agents: which pieces of an episode stand in the prompt of each round, from the front.

Each keeps system text and goal in front. Who does so is in the table of docs/guides/agents.md.
"""

from collections.abc import Callable, Sequence

import kvpatch_jax as kvp

from .episodes import Episode, Prompt, PromptPiece, Shown

ROUNDS = 4
"""Of `four-rounds`."""
LIMIT, BATCH = 20, 8
"""Of `batch-8-at-20`: screenshots at most, and how many leave together."""
SLIDING = 8
"""Screenshots of `sliding`."""
TASK = 24
"""Rounds of `dedup` until a new task begins with an empty history."""


def four_rounds(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows the last four rounds; all older ones are lines of a list in the first user text, in front of the images."""
    first = max(0, number + 1 - ROUNDS)
    lines = [older.line for older in episode.rounds[:first] if older.line is not None]
    *system, goal = _front(episode)
    goal = goal._replace(shown=joined([goal.shown, *lines]), movable=True)
    return [*system, goal, *_rounds(episode, first, number)]


def batch_8_at_20(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows all rounds; of more than 20 screenshots the oldest eight leave together, each for a text in its place."""
    screens = sum(len(passed.screens) for passed in episode.rounds[: number + 1])
    return _held(episode, number, BATCH * -(-max(0, screens - LIMIT) // BATCH))


def placeholder_1(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows all rounds and the newest screenshot; a text stands in the place of every older one."""
    screens = sum(len(passed.screens) for passed in episode.rounds[: number + 1])
    return _held(episode, number, screens - 1)


def sliding(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows the last eight rounds; older ones have left."""
    return [*_front(episode), *_rounds(episode, max(0, number + 1 - SLIDING), number)]


def reopened(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows what the newest round opened, in its order, and nothing of earlier rounds."""
    opened = {screen.content: screen for screen in episode.rounds[number].screens}
    return [*_front(episode), *(PromptPiece(f"page {name}", page, movable=True) for name, page in opened.items())]


def dedup(episode: Episode, number: int) -> list[PromptPiece]:
    """Shows all rounds of the task; a text stands for a screenshot that is the same as an earlier one."""
    first, seen = number - number % TASK, set[str]()
    pieces = _front(episode)
    for piece in _rounds(episode, first, number):
        repeated = piece.id.startswith("screen ") and piece.shown.content in seen
        seen.add(piece.shown.content)
        pieces.append(piece._replace(shown=episode.placeholder) if repeated else piece)
    return pieces


Policy = Callable[[Episode, int], list[PromptPiece]]
POLICIES: dict[str, Policy] = {
    "four-rounds": four_rounds,
    "batch-8-at-20": batch_8_at_20,
    "placeholder-1": placeholder_1,
    "sliding": sliding,
    "reopened": reopened,
    "dedup": dedup,
}


def prompts_of(episode: Episode, policy: Policy) -> list[Prompt]:
    """Lists the prompts of an episode under a policy."""
    return [
        Prompt(episode.name, tuple(policy(episode, number)), passed.questions)
        for number, passed in enumerate(episode.rounds)
    ]


def joined(texts: Sequence[Shown]) -> Shown:
    """Joins texts to one."""
    if len(texts) == 1:
        return texts[0]
    known = all(text.item is not None for text in texts)
    item = kvp.Text(" ".join(text.item for text in texts)) if known else None
    return Shown("\n".join(text.content for text in texts), sum(text.tokens for text in texts), item)


def _front(episode: Episode) -> list[PromptPiece]:
    goal = PromptPiece("goal", episode.goal)
    return [goal] if episode.system is None else [PromptPiece("system", episode.system), goal]


def _rounds(episode: Episode, first: int, last: int) -> list[PromptPiece]:
    """Lists the pieces of rounds; the reply to the last one is not there yet."""
    pieces = []
    for number in range(first, last + 1):
        passed = episode.rounds[number]
        if passed.text is not None:
            pieces.append(PromptPiece(f"text {number}", passed.text))
        pieces += [PromptPiece(f"screen {number}.{place}", screen) for place, screen in enumerate(passed.screens)]
        if passed.reply is not None and number < last:
            pieces.append(PromptPiece(f"reply {number}", passed.reply))
    return pieces


def _held(episode: Episode, number: int, gone: int) -> list[PromptPiece]:
    """Lists the pieces of all rounds, the oldest screenshots replaced by the placeholder."""
    pieces = _front(episode)
    for piece in _rounds(episode, 0, number):
        leaves = gone > 0 and piece.id.startswith("screen ")
        gone -= leaves
        pieces.append(piece._replace(shown=episode.placeholder) if leaves else piece)
    return pieces
