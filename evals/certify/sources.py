"""Where windows come from: a folder of images, texts, a data set or log of windows, or the task."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError, KVPatchError
from kvpatch_jax.models import ModelBackbone

from ..harness.lines import Contents, Question
from ..measure import fields
from ..measure.items import Item, Refusal, content_key
from ..measure.media import IMAGE_SUFFIXES
from ..task.contexts import SIZES, sample
from ..task.drawing import images_of
from ..task.questions import ask
from ..task.vocabulary import check_words, vocabulary
from ..texts.corpus import long_documents
from .windows import SEED, Window, WindowSet, halved

QUESTIONS = [
    "What is shown?",
    "What changed since the last one?",
    "What is in the first one?",
    "How many are there?",
    "Which one is the largest?",
    "What does the text say?",
    "Is the last one like the first?",
    "In one word, it is",
]
"""Asked behind a user's images and texts; an answer is the next token behind each."""
PIECE, CONTINUED = 64, 16
"""Tokens of a text's chunk, and of the continuation behind a window, which is scored."""
TEXT_SUFFIXES = (".txt", ".md", ".rst")
MOST_ASKED = 16
"""Questions behind one context of a data set that are asked: the first ones."""
Chunks = Sequence[int]
"""Sizes of windows, ascending."""
LEAST_CHUNKS, TASK_CHUNKS = 3, 4
"""Chunks of the smallest window, and of a context of the task."""
TASK_QUESTIONS = {"page": 2, "sheet": 2, "chain": 3, "aggregate": 2, "override": 2}


def read_questions(path: Path) -> list[str]:
    """Reads questions, a line each. Raises InputError: there is no such file, or none in it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not any(map(str.strip, lines)):
        raise InputError(f"--questions: got {path}; expected a file with a question a line")
    return [line.strip() for line in lines if line.strip()]


def files_below(folder: Path, flag: str, suffixes: Sequence[str]) -> list[Path]:
    """Lists the files with these suffixes in a folder and below it, by name. InputError: there are none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes and path.is_file())
    if not paths:
        reason = f"has no {flag}" if folder.is_dir() else "is no folder"
        raise InputError(f"--{flag}: got {folder}, which {reason}; expected a folder with {', '.join(suffixes)}")
    return paths


def questions_of(backbone: ModelBackbone, questions: Sequence[str], least: int = 1) -> tuple[Question, ...]:
    """Returns the questions whose words the tokenizer knows, scored at their last tokens. InputError: too few."""
    known = []
    for question in questions:
        try:
            ids = np.asarray(backbone.prepare([Text(question)])["input_ids"])[0].tolist()
        except InputError:
            continue
        known += [Question(tuple(ids), (len(ids) - 1,))] if ids else []
    if len(known) < least:
        shown = f"{len(questions)} questions, such as {questions[0]!r:.60}, in words that the tokenizer does not know"
        raise InputError(f"certify: got {shown}; expected questions in its vocabulary (--questions=FILE, a line each)")
    return tuple(known)


def image_windows(
    backbone: ModelBackbone, folder: Path, chunks: Chunks, count: int, batch: int, asked: Sequence[str]
) -> WindowSet:
    """Draws windows from either half of the images in a folder, each of similar sizes, as one agent's images have.

    Raises:
      InputError: too few images, or no question in words that the tokenizer knows; an unreadable one.
    """
    questions, rng = questions_of(backbone, asked), np.random.default_rng(SEED)
    files, most = files_below(folder, "images", IMAGE_SUFFIXES), chunks[-1]
    names = [path.relative_to(folder).as_posix() for path in files]
    contents = Contents(backbone, dict(zip(names, files, strict=True)))
    pools = np.split(rng.permutation(len(names)), [halved(len(names))[0]])
    if len(pools[1]) < 2 * most:
        raise InputError(f"--images: got {len(names)} in {folder}; expected {4 * most} or more for windows of {most}")
    shapes, windows = [contents.shape(name) for name in names], list[Window]()
    for size, (pool, number) in itertools.product(chunks, zip(pools, halved(count), strict=True)):
        for row in deal(pool, number, size + most, rng, shapes):
            shown = tuple(names[image] for image in row)
            windows.append(Window(shown[:size], shown[size:], questions))
    shown = f"{len(names)} images of {folder.name or folder}, like sizes together"
    return WindowSet(contents, windows, shown, f"{len(questions)} questions, the next token behind each", batch)


def deal(
    pool: np.ndarray, windows: int, count: int, rng: np.random.Generator, shapes: Sequence[Any]
) -> list[list[int]]:
    """Draws `count` items for each window, neighbours by shape; windows share items if the pool is too small."""
    if len(pool) >= windows * count:
        drawn = sorted(rng.permutation(pool)[: windows * count].tolist(), key=shapes.__getitem__)
        return np.reshape(drawn, (windows, count)).tolist()
    rows = []
    for _ in range(windows):
        drawn = sorted(rng.permutation(pool).tolist(), key=shapes.__getitem__)
        first = int(rng.integers(len(pool) - count + 1))
        rows.append(drawn[first : first + count])
    return rows


def text_windows(
    backbone: ModelBackbone, folder: Path, chunks: Chunks, count: int, batch: int, asked: Sequence[str]
) -> WindowSet:
    """Cuts windows of consecutive pieces, one of each text of a folder; windows of all sizes end where it goes on.

    Raises:
      InputError: too few texts that are long enough.
    """
    most, paths = chunks[-1], files_below(folder, "texts", TEXT_SUFFIXES)
    order = np.random.default_rng(SEED).permutation(len(paths))
    texts = ((paths[place].name, paths[place].read_text(encoding="utf-8", errors="replace")) for place in order)
    where, tokens = folder.name or str(folder), 2 * most * PIECE + CONTINUED
    documents = [document.ids.tolist() for document in long_documents(backbone, texts, where, count, tokens, tokens)]
    questions = questions_of(backbone, asked, least=0)  # the continuation is scored anyway
    values, windows, half, scored = {}, [], CONTINUED // 2, tuple(range(CONTINUED))
    for size, document in itertools.product(chunks, range(count)):
        *pieces, behind = (documents[document][start : start + PIECE] for start in range(0, tokens, PIECE))
        names = tuple(f"text {document}, piece {place}" for place in range(len(pieces)))
        values |= dict(zip(names, pieces, strict=True))
        # The continuation is scored in two halves, the second of them given the first.
        continued = Question(tuple(behind[:half]), scored[:half]), Question(tuple(behind), scored[half:])
        windows.append(Window(names[-size:], names[-most - size : -size], (*continued, *questions)))
    shown = f"{len(documents)} texts of {where}, {PIECE} tokens a chunk"
    asked = f"the next {CONTINUED} tokens in two halves, and {len(questions)} questions, a token each"
    return WindowSet(Contents(backbone, values), windows, shown, asked, batch)


def data_windows(backbone: ModelBackbone, path: Path, least: int, most: int, batch: int) -> WindowSet:
    """Takes the contexts of a data set, or of an agent's log, as windows, and asks their questions behind them.

    Args:
      least, most: windows of one size that are needed, and that are measured.

    Raises:
      InputError: too few contexts of every size that the backbone can read; a line is printed for each other.
    """
    data, values = fields.read(path), dict[str, Any]()
    left_out, contexts = list(data.refusals), dict[tuple[str, ...], list[Item]]()
    for item in data.items:
        names = tuple(content_key(piece.content) for piece in item.pieces)
        values |= {name: piece.content for name, piece in zip(names, item.pieces, strict=True)}
        contexts.setdefault(names, []).append(item)

    contents, by_size = Contents(backbone, values, data.media), dict[int, list[Window]]()
    for names, items in contexts.items():
        windows = by_size.setdefault(len(names), [])
        if len(names) < LEAST_CHUNKS or len(windows) == most:
            continue
        try:
            questions = questions_of(backbone, [item.question for item in items])[:MOST_ASKED]
            contents.shape(*names)
            windows.append(Window(names, (), questions))
        except (KVPatchError, OSError) as error:
            left_out.append(Refusal(items[0].where, " ".join(str(error).split())))
    for refusal in left_out:
        print(f"left out: {refusal.where}: {refusal.reason}", flush=True)
    enough = {chunks: windows for chunks, windows in by_size.items() if len(windows) >= least}
    if not enough:
        shown = ", ".join(map(str, sorted(by_size))) or "no"
        raise InputError(f"--data: got contexts of {shown} pieces; expected {least} or more of {LEAST_CHUNKS} or more")
    chosen = []
    for windows in enough.values():
        edge = halved(len(windows))[0]
        chosen += [*_with_before(windows[:edge], max(enough)), *_with_before(windows[edge:], max(enough))]
    asked = f"what was asked behind each window, at most {MOST_ASKED} questions, a token each"
    return WindowSet(contents, chosen, f"{len(chosen)} contexts of {path.name}", asked, batch)


def _with_before(windows: Sequence[Window], count: int) -> list[Window]:
    """Adds to each window what was there before: pieces of those in front of it, of the first one of the last ones."""
    filled = []
    for number, window in enumerate(windows):
        earlier = [*windows[number + 1 :], *windows[:number]]
        names = [name for other in reversed(earlier) for name in reversed(other.pieces) if name not in window.pieces]
        latest = list(dict.fromkeys(names)) or [*window.pieces]
        before = [latest[place % len(latest)] for place in range(count)]
        filled.append(window._replace(before=tuple(reversed(before))))
    return filled


def task_windows(backbone: ModelBackbone, chunks: Chunks, count: int, batch: int) -> WindowSet:
    """Draws contexts of the task for one window each; questions are about the last.

    Raises:
      InputError: the model does not have the words of the task, or no room for a context.
    """
    check_words(backbone.tokenizer, "documents")
    if chunks[0] < TASK_CHUNKS:
        raise InputError(f"--chunks: got {chunks[0]}; expected {TASK_CHUNKS} or more of the task's images")
    values, windows = {}, list[Window]()
    for size, number in itertools.product(chunks, range(count)):
        rng, total, images = np.random.default_rng([SEED, size, number]), size + chunks[-1], list[np.ndarray]()
        contexts = [sample(rng, 1, SIZES[str(TASK_CHUNKS)]) for _ in range(-(-total // TASK_CHUNKS))]
        for context in contexts:
            images += images_of(context)
        names = tuple(f"{size} chunks, {number}, {place}" for place in range(total))
        values |= dict(zip(names, images[-total:], strict=True))
        asked = ask(contexts[-1], rng, TASK_QUESTIONS).in_words(vocabulary())
        windows.append(Window(names[-size:], names[:-size], questions_of(backbone, asked)))
    described = f"at most {sum(TASK_QUESTIONS.values())} questions of the task, a token each"
    shown = f"images drawn by the task, seed {SEED}"
    return WindowSet(Contents(backbone, values), windows, shown, described, batch)
