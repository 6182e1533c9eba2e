"""Where windows come from: a folder of images, texts, a data set or log of windows, or the task."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpatch_jax import Text
from kvpatch_jax.errors import InputError, KVPatchError
from models import ModelBackbone

from ..harness.files import images_of, texts_of
from ..harness.lines import Contents, Question
from ..measure import fields
from ..measure.items import Refusal, content_key
from ..task.contexts import SIZES, sample
from ..task.drawing import images_of as task_images
from ..task.questions import ask
from ..task.vocabulary import vocabulary
from ..texts.corpus import SOURCES, long_documents
from .windows import Window, WindowSet, halved

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
MOST_ASKED = 16
"""Questions behind one context of a data set that are asked: the first ones."""
LEAST_CHUNKS, TASK_CHUNKS = 3, 4
"""Chunks of the smallest window, and of a context of the task."""
TASK_QUESTIONS = {"page": 2, "sheet": 2, "chain": 3, "aggregate": 2, "override": 2}
Sizes = dict[int, int]
"""How many windows have so many chunks; ascending."""


def numbered(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """Yields the chunks and the number of every window."""
    for chunks, count in sizes.items():
        yield from ((chunks, number) for number in range(count))


def read_questions(path: Path) -> list[str]:
    """Reads questions, a line each. Raises InputError: there is no such file, or none in it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    if not any(map(str.strip, lines)):
        raise InputError(f"--questions: got {path}; expected a file with a question a line")
    return [line.strip() for line in lines if line.strip()]


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
    backbone: ModelBackbone, folder: Path, sizes: Sizes, seed: int, asked: Sequence[str], batch: int
) -> WindowSet:
    """Draws windows from either half of the images in a folder, each of similar sizes, as one agent's images have.

    Raises:
      InputError: too few images, or no question in words that the tokenizer knows. ImageError: an unreadable one.
    """
    questions, rng = questions_of(backbone, asked), np.random.default_rng(seed)
    files, most = images_of(folder), max(sizes)
    names = [path.relative_to(folder).as_posix() for path in files]
    contents = Contents(backbone, dict(zip(names, files, strict=True)))
    pools = np.split(rng.permutation(len(names)), [halved(len(names))[0]])
    if len(pools[1]) < 2 * most:
        raise InputError(f"--images: got {len(names)} in {folder}; expected {4 * most} or more for windows of {most}")
    shapes, windows = [contents.shape(name) for name in names], list[Window]()
    for chunks, count in sizes.items():
        for pool, number in zip(pools, halved(count), strict=True):
            for row in deal(pool, number, chunks + most, rng, shapes):
                shown = tuple(names[image] for image in row)
                windows.append(Window(shown[:chunks], shown[chunks:], questions))
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
    backbone: ModelBackbone, folder: Path | None, sizes: Sizes, seed: int, asked: Sequence[str], batch: int
) -> WindowSet:
    """Cuts windows of consecutive pieces, one of each document of a folder (None: of Python's documentation).

    Windows of all sizes end where the text goes on, and those of one half are of the same documents.

    Raises:
      InputError: too few texts that are long enough.
    """
    most, rng, where = max(sizes), np.random.default_rng(seed), "Python's documentation"
    texts: Iterable[tuple[str, str]] = SOURCES["prose"]()
    if folder is not None:
        paths, where = texts_of(folder), folder.name or str(folder)
        order = rng.permutation(len(paths))
        texts = ((paths[place].name, paths[place].read_text(encoding="utf-8", errors="replace")) for place in order)
    size, count = 2 * most * PIECE + CONTINUED, max(sizes.values())
    documents = [tuple(document.ids.tolist()) for document in long_documents(backbone, texts, where, count, size, size)]
    questions = questions_of(backbone, asked, least=0)  # the continuation is scored anyway
    values, windows, half, scored = {}, [], CONTINUED // 2, tuple(range(CONTINUED))
    for chunks, number in numbered(sizes):
        # Those held out of smaller sizes are of documents held out of the largest number.
        held_out = number >= halved(sizes[chunks])[0]
        document = number + held_out * (halved(count)[0] - halved(sizes[chunks])[0])
        *pieces, behind = (documents[document][start : start + PIECE] for start in range(0, size, PIECE))
        names = tuple(f"text {document}, piece {place}" for place in range(len(pieces)))
        values |= {name: list(ids) for name, ids in zip(names, pieces, strict=True)}
        # The continuation is scored in two halves, the second of them given the first.
        continued = Question(behind[:half], scored[:half]), Question(behind, scored[half:])
        windows.append(Window(names[-chunks:], names[-most - chunks : -chunks], (*continued, *questions)))
    shown = f"{len(documents)} texts of {where}, {PIECE} tokens a chunk"
    asked = f"the next {CONTINUED} tokens in two halves, and {len(questions)} questions, a token each"
    return WindowSet(Contents(backbone, values), windows, shown, asked, batch)


def data_windows(backbone: ModelBackbone, path: Path, least: int, most: int, batch: int) -> WindowSet:
    """Takes the contexts of a data set, or of an agent's log, as windows, and asks their questions behind them.

    Contexts with videos are left out: what was measured of a clip's frames holds for no other number of frames.

    Args:
      least, most: windows of one size that are needed, and that are measured.

    Raises:
      InputError: too few contexts of every size that the backbone can read; a line is printed for each other.
    """
    data, values = fields.read(path), dict[str, Any]()
    left_out, contexts = list(data.refusals), dict[tuple[str, ...], list[Any]]()
    for item in data.items:
        names = tuple(content_key(piece.content) for piece in item.pieces)
        if all(isinstance(piece.content, Text | Path) for piece in item.pieces):
            values |= {name: piece.content for name, piece in zip(names, item.pieces, strict=True)}
            contexts.setdefault(names, []).append(item)

    contents, by_size = Contents(backbone, values, data.media), dict[int, list[Window]]()
    for names, items in contexts.items():
        windows = by_size.setdefault(len(names), [])
        if len(names) >= LEAST_CHUNKS and len(windows) < most:
            try:
                questions = questions_of(backbone, [item.question for item in items])[:MOST_ASKED]
                for name in names:
                    contents.tokens(name)
                windows.append(Window(names, (), questions))
            except (KVPatchError, OSError) as error:
                left_out.append(Refusal(items[0].where, " ".join(str(error).split())))
    for refusal in left_out:
        print(f"left out: {refusal.where}: {refusal.reason}", flush=True)
    enough = {size: windows for size, windows in by_size.items() if len(windows) >= least}
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


def reads_task(backbone: ModelBackbone) -> bool:
    """Says whether a backbone has the words of the task."""
    words, tokenizer = vocabulary().names[:-2], backbone.tokenizer
    return tokenizer is not None and [tokenizer.id_to_token(number) for number in range(len(words))] == words


def task_windows(backbone: ModelBackbone, sizes: Sizes, seed: int, batch: int) -> WindowSet:
    """Draws contexts of the task for one window each; questions are about the last. InputError: no room for one."""
    if min(sizes) < TASK_CHUNKS:
        raise InputError(f"--chunks: got {min(sizes)}; expected {TASK_CHUNKS} or more of the task's images")
    values, windows = {}, list[Window]()
    for chunks, number in numbered(sizes):
        rng, total, images = np.random.default_rng([seed, chunks, number]), chunks + max(sizes), list[np.ndarray]()
        contexts = [sample(rng, 1, SIZES[str(TASK_CHUNKS)]) for _ in range(-(-total // TASK_CHUNKS))]
        for context in contexts:
            images += task_images(context)
        names = tuple(f"{chunks} chunks, {number}, {place}" for place in range(total))
        values |= dict(zip(names, images[-total:], strict=True))
        asked = ask(contexts[-1], rng, TASK_QUESTIONS).in_words(vocabulary())
        windows.append(Window(names[-chunks:], names[:-chunks], questions_of(backbone, asked)))
    described = f"at most {sum(TASK_QUESTIONS.values())} questions of the task, a token each"
    return WindowSet(Contents(backbone, values), windows, f"images drawn by the task, seed {seed}", described, batch)
