"""What a program says while it works: a line before the imports, an honest estimate from the first step on."""

import subprocess
import sys
import types

import pytest

from evals import console


def test_the_first_line_waits_for_no_slow_import():
    code = "import sys, evals.startup_message; print(sorted({'jax', 'numpy', 'matplotlib', 'absl'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [("evals.run", [], True), ("evals.run", ["--help"], False), ("evals.bench.__main__", [], False)],
)
def test_only_the_program_that_was_started_says_it(monkeypatch, capsys, program, arguments, said):
    main = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=program)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    console.say_at_once("evals.run", "hello")
    assert capsys.readouterr().out == ("hello\n" if said else "")


def test_time_left_is_said_from_the_start_and_follows_the_pace(monkeypatch, capsys):
    """Twice as slow as expected: the estimate of what is left goes from the expected time to nearly twice that."""
    now = [0.0]
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    progress = console.Progress({"repair": 100, "slide": 4})
    whole = 100 * console.STEP + 4 * console.SECONDS["slide"] + console.SETTING_UP
    assert progress.left() == pytest.approx(whole)
    now[0] = 2 * console.SETTING_UP
    for _ in range(80):
        now[0] += 2 * console.STEP
        progress("patch.rank=8")
    remaining = 20 * console.STEP + 4 * console.SECONDS["slide"]
    assert 1.8 * remaining < progress.left() < 2 * remaining
    progress.skip(10)
    assert progress.left() < 2 * (remaining - 10 * console.STEP)
    for name, count in (("repair", 10), ("slide", 4)):
        for _ in range(count):
            progress(name)
    assert progress.left() == pytest.approx(0, abs=1e-6)
    progress.close()
    assert "about" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.0, "5 s"), (61.0, "60 s"), (175.0, "3 min"), (5000.0, "83 min"), (7300.0, "2 h 2 min")]
)
def test_times_are_said_in_words(seconds, words):
    assert console.in_words(seconds) == words
