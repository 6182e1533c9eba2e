"""Replays agents' recorded episodes and asks for the next action at every step, in every way of showing a window.

    python -m evals.measure.trajectories --model=DIR --data=FILE --keep=3 --out=out/trajectories

A session that slides and recalls, beside re-prefill, a prefix cache, dropping old screenshots and never dropping any:
score by the data's own rule, KL of the first token to a re-prefill of the window, tokens computed. The same command
resumes after a kill.
"""

from . import startup_message as startup_message  # isort: split

from ... import extra as extra  # isort: split

import shlex
import sys
from pathlib import Path

from absl import app, flags

from kvpatch_jax.errors import InputError

from ...command_line import begin_program, errors_as_one_line
from ...harness.parts import alone, finished_parts, make_out, measure_parts
from .. import formats
from ..episodes import EpisodeSet
from ..frame import FRAMES, frame_of
from ..plan import longest_prompt
from ..preparation import load_asked
from .plan import PlannedReplay, planned_replay
from .replayed import EpisodeReplay
from .report import write_steps

_MODEL = flags.DEFINE_string("model", None, "a checkpoint directory, or the name of a shipped small model")
_DATA = flags.DEFINE_string("data", None, "a file or folder of trajectories")
_FORMAT = flags.DEFINE_string("format", None, "of the data, where the file does not say: --format=help lists them")
_MEDIA = flags.DEFINE_string("media", None, "folder of the screenshots, where it is not the data's own")
_KEEP = flags.DEFINE_integer("keep", 3, "screenshots that stay", lower_bound=1)
_LIMIT = flags.DEFINE_integer("limit", 0, "so many episodes, the first ones; 0: all", lower_bound=0)
_ANSWER = flags.DEFINE_integer(
    "answer_tokens", None, "of an answer at most; by default as its rule says", lower_bound=1
)
_BLIND = flags.DEFINE_bool("blind", False, "serve windows blind, too: pieces prefilled alone, moved to their places")
_RANKS = flags.DEFINE_list("rank", [], "and with patches of these ranks, formed behind the very same pieces before")
_FRAME = flags.DEFINE_enum("frame", "chat", FRAMES, "what stands around window and question; plain: nothing")
_OUT = flags.DEFINE_string("out", "out/trajectories", "folder of steps and table")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "as models.load takes it")


def main(arguments: list[str]) -> None:
    """Replays, and writes steps.jsonl and table.md."""
    begin_program(arguments)
    if _FORMAT.value == "help":
        print(formats.help_text())
        return
    with errors_as_one_line():
        _replay()


def _replay() -> None:
    again = shlex.join(["python", "-m", "evals.measure.trajectories", *sys.argv[1:]])
    if not _MODEL.value or not _DATA.value:
        raise InputError(f"--model, --data: got {_MODEL.value!r}, {_DATA.value!r}; expected both; see --help")
    if not all(rank.isdecimal() and int(rank) for rank in _RANKS.value):
        raise InputError(f"--rank: got {','.join(_RANKS.value)!r:.80}; expected whole numbers from 1 on, such as 8,16")
    ranks = tuple(int(rank) for rank in _RANKS.value)
    out = Path(_OUT.value)
    # Data is read before a model is loaded: the one takes seconds, the other minutes.
    media = None if _MEDIA.value is None else Path(_MEDIA.value)
    episodes = formats.read_episodes(Path(_DATA.value), _FORMAT.value, media=media)
    model, backbone = load_asked(_MODEL.value, _DTYPE.value)
    frame = frame_of(backbone, _FRAME.value, again)
    replay = EpisodeReplay(backbone, frame, _KEEP.value, longest_prompt(model), _ANSWER.value, _BLIND.value, ranks)
    planned = planned_replay(replay, episodes, _LIMIT.value, {"model": Path(model).name, "dtype": _DTYPE.value})

    make_out(out)
    with alone(out / "parts.jsonl"):
        _write(episodes, planned, out)


def _write(episodes: EpisodeSet, planned: PlannedReplay, out: Path) -> None:
    """Measures the episodes that are missing and writes what all of them leave."""
    done = finished_parts(out / "parts.jsonl", planned.config)
    steps = sum(len(episode.steps) for episode in planned.episodes)
    print(f"{episodes.source.name} ({episodes.format}): {len(planned.episodes)} episodes of {steps} steps")
    for refusal in planned.left_out:
        print(f"left out: {refusal.where}: {refusal.reason}")
    if done:
        print(f"{len(done)} of {len(planned.parts)} episodes are finished", flush=True)
    print(write_steps(measure_parts(out / "parts.jsonl", planned.config, planned.parts), out))
    print(f"steps: {out / 'steps.jsonl'}; table: {out / 'table.md'}")


if __name__ == "__main__":
    app.run(main)
