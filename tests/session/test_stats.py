"""Counts of a session: what each step computed and reused, against counts that are taken apart from it."""

import random

import pytest

import kvpatch_jax as kvp
from tests.shared.session_cases import image_of, words


@pytest.mark.parametrize("seed", range(2))
def test_steps_count_what_was_computed_and_what_others_would_have_computed(backbone, seed):
    """A prefix cache that holds every earlier window computes what follows the longest one that it has."""
    rng, seen, computed = random.Random(seed), set[tuple[str, ...]](), list[int]()
    with kvp.Session(backbone, keep=4, reuse=rng.choice(["exact", "patched"])) as session:
        session.runtime.executor.observers.append(lambda *prefill: computed.append(prefill[3]))
        session.add(words(5, 6), id="history 0")
        seen |= {tuple(piece.entry.key for piece in session.window.pieces[:length]) for length in (1, 2)}
        for step in range(20):
            before, starts = session.window, {piece.made: piece.start for piece in session.window.pieces}
            del computed[:]
            act(session, rng, step)
            counted, window = session.stats().steps[-1], session.window
            if window == before:
                continue
            contents = [piece.entry.key for piece in window.pieces]
            prefixes = [tuple(contents[: length + 1]) for length in range(len(contents))]
            sizes = [piece.entry.tokens for piece in window.pieces]
            missed = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
            assert counted.prefix_cache == sum(sizes[missed:])
            seen |= set(prefixes)
            assert counted.computed == sum(computed)
            assert counted.reprefill == sum(sizes) == counted.computed + sum(counted.reused.values())
            stays = [piece for piece in window.pieces if piece.made in starts]
            rotated = sum(piece.entry.tokens for piece in stays if starts[piece.made] != piece.start)
            assert counted.reused.get("rotated", 0) == rotated
        stats = session.stats()
        assert stats.tokens == sum(step.computed for step in stats.steps)
        assert stats.prefix_cache == sum(step.prefix_cache for step in stats.steps) < stats.reprefill
        assert stats.flops == sum(step.flops for step in stats.steps)
        assert stats.tokens_held == session.window.tokens
        assert f"{stats.tokens} computed; a prefix cache {stats.prefix_cache}" in str(stats)


def act(session: kvp.Session, rng: random.Random, step: int) -> None:
    """Does one of the things that a session does, drawn."""
    op = rng.choice(["add", "add", "add", "recall", "replace", "evict", "slide"])
    chunks = [name for name in session.ids if name.startswith("shot")]
    if op == "recall" and session.gone:
        session.recall(rng.choice(session.gone))
    elif op == "replace":
        history = next(name for name in session.ids if name.startswith("history") and "sink" not in name)
        session.replace(history, words(5 + step, 1 + step % 5), name=f"history {step + 1}")
    elif op == "evict" and chunks:
        session.evict(rng.choice(chunks))
    elif op == "slide":
        session.slide(2)
    else:
        session.add(image_of(rng.randrange(6)), id=f"shot {step}")
