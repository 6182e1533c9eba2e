"""Whatever a caller passes is taken or refused with a typed error, and a refused call changes nothing."""
# pyright: reportArgumentType=false

from pathlib import Path

import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.errors import KVPatchError, PoolError, SessionError
from tests.shared.session_cases import QUESTION, image_of, state
from tests.shared.window_oracle import tiny

IMAGE = image_of(5)
INPUTS = (None, 7, True, 1.5, "", "  ", "\ud800", "shot.png", b"text", b"\x89PNG nothing", {}, {"image": 1}, [], [[]],
          [None], [1.5], [2**70], [5, 2**40], [-1], object(), Path("a\0b"), Path("/dev/zero"),
          np.zeros((4, 4, 3), np.float32), np.zeros((0, 4, 3), np.uint8),
          {"role": "user", "content": [{"type": "text", "text": ""}]})  # fmt: skip
NAMES = (None, 7, 2.0, True, "", "no such", "\ud800", "x" * 10**5, b"lead", [], ["lead"], {}, object(), np.zeros(3))
COUNTS = (-1, -(2**70), 1.5, "2", True, [], {}, object(), np.ones(2), b"1")
NUMBERS = ("hot", [[]], {1: 2}, float("nan"), float("inf"), -1.5, object())
# The values that mean nothing in place of "?": as an argument, or as an option by name.
TABLE = [
    (INPUTS, ("add", "?"), ("insert", "?", "shot"), ("replace", "shot", "?"), ("recall", "?"), ("ask", "?"),
     ("needs", "shot", "?"), ("plan", "?")),
    (NAMES, ("evict", "?"), ("insert", IMAGE, "?"), ("replace", "?", IMAGE), ("needs", "?", QUESTION),
     ("fidelity", "?")),
    (COUNTS, ("slide", "?"), ("fork", "keep"), ("ask", QUESTION, "steps"), ("ask", QUESTION, "look"),
     ("needs", "shot", QUESTION, "steps")),
    (NUMBERS, ("ask", QUESTION, "temperature"), ("ask", QUESTION, "top_p"), ("ask", QUESTION, "top_k"),
     ("add", IMAGE, "kind"), ("reorder", "?")),
    ((0,), ("needs", "shot", QUESTION, "steps")),
    (("hot", [[]], float("nan"), -1.5), ("needs", "last", QUESTION, "bound")),
    (("", "\ud800", 7, [], {}, b"x", "shot"), ("add", IMAGE, "id"), ("replace", "shot", "w5", "name")),
    (("lead",), ("evict", "?"), ("insert", "w5", "?"), ("replace", "?", "w5"), ("needs", "?", QUESTION)),
    ((None, 7, "a\0b", "/no folder/file", []), ("save", "?")),
    ((["shot", "lead"], ["shot", "shot"], ["no such"], [7]), ("reorder", "?")),
]  # fmt: skip
OPTIONS = ("keep", "steps", "look", "temperature", "top_p", "top_k", "kind", "bound", "id", "name")


@pytest.mark.usefixtures("unchecked")
def test_hostile_calls_change_nothing(backbone):
    with kvp.Session(backbone, keep=2) as session:
        for number, name in enumerate(("lead", "gone", "shot", "last")):
            session.add(image_of(number), id=name)
        answer, before, wrong, count = session.ask(QUESTION, steps=2, stop=()).ids, state(session), [], 0
        for values, *calls in TABLE:
            for name, *arguments in calls:
                option = arguments[-1] if isinstance(arguments[-1], str) and arguments[-1] in OPTIONS else None
                for value in values:
                    given = [value if isinstance(item, str) and item == "?" else item for item in arguments]
                    outcome, count = "no error", count + 1
                    try:
                        getattr(session, name)(
                            *given[: len(given) - bool(option)], **({option: value} if option else {})
                        )
                    except KVPatchError:
                        outcome = ""
                    except Exception as error:
                        outcome = repr(error)[:80]
                    if outcome or state(session) != before:
                        wrong.append((name, arguments, f"{value!r:.40}", outcome))
                        before = state(session)
        assert not wrong, "\n".join(map(str, wrong))
        assert count >= 200
        assert session.ask(QUESTION, steps=2, stop=()).ids == answer


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_of_a_session_are_refused(backbone):
    linker = type("Linker", (), {"backbone": "f" * 64})()
    with kvp.Session(tiny("gqa")) as other:
        for error, name, *values in (
            (SessionError, "backbone", "evals/trained/documents/qwen2_5_vl"),
            (SessionError, "keep", 0, True, 2.0, (2, 1), (0, 1), (1,), [1, 2], "2"),
            (SessionError, "kl", -0.1, float("nan"), True, "0.1"),
            (SessionError, "around", "w5", ("w5",), (1, 2)),
            (SessionError, "chat", "yes", {1: 2}, 5),
            (SessionError, "encoding", "k9v9", "int8", 4, "k4v4g0", "auto"),
            (KVPatchError, "placeholder", "  ", 3, "shot.png", "\ud800"),
            (SessionError, "memory", -1, "many", None, float("nan")),
            (SessionError, "reuse", "uncertified", "certified", 5, np.ones(2)),
            *((SessionError, name, 5) for name in ("store", "name", "certificate", "retriever", "config")),
            (SessionError, "runtime", 5, other.runtime),
            (SessionError, "linker", linker),
            (SessionError, "promise", "recall", None),
            (PoolError, "pages", 0, True, 1.5),
            (KVPatchError, "rank", -1, {"nope": 4}, "four", True),
            (KVPatchError, "lead", b"\x89PNG nothing", -1, [None]),
        ):
            for value in values:
                with pytest.raises(error):
                    kvp.Session(**{"backbone": backbone, name: value})
        with pytest.raises(SessionError, match="got option 'colour'; expected one of around, audit, certificate"):
            kvp.Session(backbone, colour="red")
        with pytest.raises(SessionError, match="got option 'kep'; expected 'keep', or another of around"):
            kvp.Session(backbone, kep=2)
