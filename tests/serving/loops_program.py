"""Three loops as agents make them, each turn answered in several ways: `python loops_program.py WORK TURNS LOOP`.

LOOP is one of `LOOPS`. WORK/LOOP-TURNS.json is written, and WORK/LOOP.json, its certificate. A prompt is a lead that
stays, images, and a question; no client forms anything, and a request declares nothing but its policy:

sliding    every turn brings an image; the last eight are in the window.
reopened   every turn opens a few of six images, in another order.
appended   every turn brings an image, and none leaves until the task ends.

The ways: what the engine computes with nothing in its cache ("re-prefill", to which all others are compared), with its
prefix cache, and with our chunks under several policies. Beside them two ways of keeping windows small with a prefix
cache alone: evicting eight at once when sixteen are there, and putting a word in the place of an old image.
"""
# pyright: reportMissingImports=false

import collections
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import rig_engine
import trained_model
from PIL import Image
from rig_engine import Engine
from scipy.special import log_softmax
from trained_task import FRAME

from evals.harness import intervals
from evals.task.contexts import ITEMS, SIZES, sample
from evals.task.drawing import DRAWINGS
from evals.task.vocabulary import IMAGE, PAD, vocabulary
from kvpatch_jax.serving.vllm import ConnectorConfig

SEED, WINDOW, PAGES, TASK = 90031, 8, 6, 12
SIZE, MODEL = SIZES["8"], trained_model.SHIPPED
WORDS = vocabulary()
LEAD_TOKENS = [WORDS[word] for word in ("value", "unit", "most", "values")]
"""What certificates of this model are measured behind: the first words that it has."""
OPENED = (3, 5)
"""Images that a turn opens of the six: at least, at most."""
BATCH = 2 * WINDOW
MOST_IMAGES = BATCH
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 768,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 1024,
    "num_gpu_blocks_override": 4000,
    "async_scheduling": False,
    "limit_mm_per_prompt": {"image": MOST_IMAGES, "video": 0},
    "disable_chunked_mm_input": True,
    "skip_mm_profiling": True,
}
WAYS: dict[str, Mapping[str, Any] | None] = {
    "re-prefill": None,
    "prefix cache": None,
    "exact": {"policy": "exact"},
    "remember": {"policy": "approximate", "promise": "remember"},
    "forget": {"policy": "approximate"},
}
RECORDED_SEED, RECORDED, QUESTIONS = 4711, 480, 8
"""Of other tasks than those that are served: a window of each is recorded, and so many questions behind it."""
RECORDED_TURNS = {"sliding": (2, 4, 2 * WINDOW - 1), "reopened": (1,), "appended": (2, 5, TASK - 1)}
"""Turns of a task at which its window is recorded, one after another."""
PAUSE = 0.2
"""Seconds between turns, in which an agent acts and the engine is idle."""


class Turn(NamedTuple):
    """What one turn shows: images behind the lead by their number, and what is asked about one of them.

    Attributes:
      images: in the window. evicted: those that batched eviction has. old: how many stand there as a word.
      question: two tokens. answer: the right one.
    """

    images: tuple[int, ...]
    evicted: tuple[int, ...]
    old: int
    question: tuple[int, int]
    answer: int


class Scene:
    """Sheets of the task, drawn by a seed: lists, keys and menus of eleven items, each with a value and a unit.

    A question asks for the value or the unit of an item that some image in the window shows; if several do, the latest
    one counts.
    """

    def __init__(self, count: int, rng: np.random.Generator):
        contexts = sample(rng, -(-count // SIZE.sheets), SIZE)
        sheets, _ = DRAWINGS["documents"].render(contexts)
        self.pictures = [Image.fromarray(image) for image in sheets.reshape(-1, *sheets.shape[2:])]
        # Words, bars and icons are named by tokens of their own.
        items = WORDS.first["item"] + ITEMS * contexts.document[:, None, None] + contexts.sheet_item
        entries = (items, contexts.sheet_value, contexts.sheet_unit)
        flat = [each.reshape(-1, each.shape[2]).tolist() for each in entries]
        self.entries = [list(zip(*own, strict=True)) for own in zip(*flat, strict=True)]

    def turn(self, images: Sequence[int], rng: np.random.Generator, evicted: Sequence[int] = (), old: int = 0) -> Turn:
        """Draws a question about one of the images."""
        meanings = {item: meaning for image in images for item, *meaning in self.entries[image]}
        item = int(rng.choice(sorted(meanings)))
        group = "value" if rng.random() < 0.5 else "unit"
        answer = WORDS.first[group] + meanings[item][group == "unit"]
        return Turn(tuple(images), tuple(evicted or images), old, (WORDS[group], item), answer)

    def declared(self, turn: Turn) -> dict[str, Any]:
        """Returns what a request says of its chunks: nothing, since images are found."""
        return {}

    def prompts(self, turn: Turn) -> dict[str, dict[str, Any]]:
        """Returns the prompt of every way."""
        return {
            **dict.fromkeys(WAYS, self.prompt(turn.images, turn.question)),
            "batched eviction": self.prompt(turn.evicted, turn.question),
            "placeholders": self.prompt(turn.images, turn.question, turn.old),
        }

    def prompt(self, images: Sequence[int], question: Sequence[int], old: int = 0) -> dict[str, Any]:
        """Returns a prompt of the lead, words in place of old images, images and a question."""
        pictures = [self.pictures[image] for image in images]
        image = [FRAME[0], IMAGE, FRAME[1]]
        ids = [*LEAD_TOKENS, *[PAD] * old, *(image * len(images)), *question]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}}


def sliding(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns of a window of the last images."""
    first = 0
    for turn in range(turns):
        if turn - first + 1 > BATCH:
            first = turn - WINDOW + 1
        images = range(max(0, turn - WINDOW + 1), turn + 1)
        yield scene.turn(images, rng, range(first, turn + 1), images[0])


def reopened(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns that open some of a few images in an order of their own."""
    for _ in range(turns):
        yield scene.turn(rng.permutation(PAGES)[: rng.integers(OPENED[0], OPENED[1] + 1)].tolist(), rng)


def appended(scene: Scene, turns: int, rng: np.random.Generator) -> Iterator[Turn]:
    """Yields turns of tasks whose images all stay."""
    for turn in range(turns):
        yield scene.turn(range(turn - turn % TASK, turn + 1), rng)


LOOPS = {"sliding": sliding, "reopened": reopened, "appended": appended}


def divergence(own: np.ndarray, other: np.ndarray) -> float:
    """KL(own ‖ other) of two answers' first tokens: log-probabilities of the whole vocabulary."""
    return float(np.sum(np.exp(own) * (own - other)))


def measured(engine: Engine, turns: Sequence[Turn], scene: Any) -> dict[str, Any]:
    """Answers every turn in every way.

    Args:
      scene: makes prompts as `Scene` does, and says what requests with them declare.
    """
    answers: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    logits = engine.note_logits()
    began = time.perf_counter()
    for number, turn in enumerate(turns):
        time.sleep(PAUSE)
        for way, prompt in scene.prompts(turn).items():
            # Each way has blocks of its own in the engine's cache, and chunks of its own in the store.
            salt = f"{way} {number}" if way == "re-prefill" else way
            asked = WAYS.get(way)
            own = {} if asked is None else {**asked, **scene.declared(turn), "tenant": way}
            start = time.perf_counter()
            answers[way].append(answer_with(engine, logits, prompt, salt, **own))
            seconds[way].append(time.perf_counter() - start)
        if number % 20 == 19:
            print(f"turn {number + 1}: {time.perf_counter() - began:.0f} s", flush=True)
    return {way: row(own, answers["re-prefill"], turns, seconds[way]) for way, own in answers.items()}


def answer_with(
    engine: Engine, logits: list[np.ndarray], prompt: Any, salt: str, fresh: bool = False, **own: Any
) -> dict[str, Any]:
    """Answers one prompt; with the log-probabilities of the whole vocabulary, of what `Engine.note_logits` notes."""
    logits.clear()
    (answer,) = engine.ask(prompt, salts=[salt], steps=1, likely=1, fresh=fresh, **own)
    assert answer["tokens"] == [int(logits[-1][0].argmax())], "the logits are another request's"
    return {**answer, "log_probabilities": log_softmax(logits[-1][0].astype(np.float64))}


def row(
    answers: Sequence[Mapping[str, Any]],
    truth: Sequence[Mapping[str, Any]],
    turns: Sequence[Turn],
    seconds: Sequence[float],
) -> dict[str, Any]:
    """One way's row."""
    computed = [answer["prompt"] - answer["cached"] for answer in answers]
    right = np.array([answer["tokens"][0] == turn.answer for answer, turn in zip(answers, turns, strict=True)])
    likely = "log_probabilities"
    kl = np.array([divergence(own[likely], other[likely]) for own, other in zip(truth, answers, strict=True)])
    flips = np.array([own["tokens"][0] != other["tokens"][0] for own, other in zip(truth, answers, strict=True)])
    bounds = [answer["told"].get("kl") for answer in answers]
    known = [(own, bound) for own, bound in zip(kl, bounds, strict=True) if bound is not None]
    points: dict[str, int] = {}
    whys: dict[str, int] = {}
    for answer in answers:
        for point, _ in answer["told"].get("served", []):
            points[point] = points.get(point, 0) + 1
        why = "".join(letter for letter in answer["told"].get("why", "") if not letter.isdigit())
        whys[why] = whys.get(why, 0) + 1
    cluster = np.arange(len(answers))

    def interval(values: np.ndarray) -> dict[str, float]:
        found = intervals.mean(np.asarray(values, float), cluster)
        return {"value": found.value, "low": found.low, "high": found.high}

    return {
        "prompt_tokens": int(sum(answer["prompt"] for answer in answers)),
        "prefilled_tokens": int(sum(computed)),
        "right": interval(right),
        "kl": interval(kl),
        "largest_kl": float(kl.max()),
        "flips": interval(flips),
        # Two prefills of one prompt differ by rounding.
        "within_their_bounds": sum(bool(own <= max(bound, 1e-5)) for own, bound in known),
        "bounded": len(known),
        "points": points,
        "why": dict(sorted(whys.items(), key=lambda item: -item[1])[:8]),
        "median_seconds": float(np.median(seconds)),
    }


Draw = Callable[[Scene, int, np.random.Generator], Iterator[Turn]]
"""Yields so many turns of a scene."""


def recorded(draw: Draw, turns: Sequence[int], folder: Path) -> Path:
    """Draws windows of other tasks with the same traffic, and writes their images and their file, which is returned.

    Args:
      turns: of a task at which its window is recorded, one after another.
    """
    rng, names, lines = np.random.default_rng(RECORDED_SEED), WORDS.names, list[str]()
    for task in range(RECORDED):
        count = turns[task % len(turns)] + 1
        scene = Scene(count + PAGES, rng)
        *_, shown = (turn.images for turn in draw(scene, count, rng))
        asked = [scene.turn(shown, rng).question for _ in range(QUESTIONS)]
        for image in shown:
            scene.pictures[image].save(folder / f"{task:03}-{image:02}.png")
        images = [f"{task:03}-{image:02}.png" for image in shown]
        for question in asked:
            lines.append(json.dumps({"images": images, "question": " ".join(names[token] for token in question)}))
    path = folder / "windows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def certify(folder: Path, loop: str, draw: Draw, turns: Sequence[int]) -> Path:
    """Certifies the model on recorded windows, as an operator does with its own; returns the file.

    Args:
      draw, turns: as of `recorded`.
    """
    path, images = folder / f"{loop}.json", folder / f"recorded-{loop}"
    if path.exists():
        return path
    images.mkdir(parents=True, exist_ok=True)
    windows = recorded(draw, turns, images)
    flags = [f"--model={MODEL}", "--dtype=float32", f"--data={windows}", f"--out={path}"]
    flags += ["--n=160", "--batch=32", "--ranks=8,16", "--skip=update,fresh,repair"]
    subprocess.run([sys.executable, "-m", "evals.certify", *flags], check=True)
    return path


def main(work: str, turns: str, loop: str) -> None:
    """Draws, serves, and writes what was found."""
    folder, count = Path(work), int(turns)
    certificate = certify(folder, loop, LOOPS[loop], RECORDED_TURNS[loop])
    saved = json.loads(certificate.read_text())
    settings = {"backbone": saved["certificate"]["backbone"], "certificate": str(certificate), "uncertified": False}
    settings |= {"image_frame": list(FRAME), "patch_after": ConnectorConfig.patch_after}  # as it comes
    rng = np.random.default_rng(SEED)
    scene = Scene(max(count, PAGES) + 1, rng)
    listed = list(LOOPS[loop](scene, count, rng))
    model = trained_model.write(folder / "model-loops", MODEL)
    engine = Engine(model, folder / f"store-loops-{loop}", settings, **OPTIONS)

    def scenario(engine: Engine) -> dict[str, Any]:
        found = measured(engine, listed, scene)
        assert engine.scheduler is not None
        assert engine.worker is not None
        files = [file.stat().st_size for file in engine.store.rglob("*") if file.is_file()]
        return {
            "loop": loop,
            "turns": count,
            "ways": found,
            "formed": dict(engine.worker.former.counts),
            "scheduled": dict(engine.scheduler.counts),
            "store_bytes": sum(files),
            "survivor_bytes": engine.scheduler.survivors.nbytes,
            "certificate": saved["digest"],
        }

    rig_engine.written(folder / f"{loop}-{count}.json", engine, scenario, seed=SEED)


if __name__ == "__main__":
    main(*sys.argv[1:])
