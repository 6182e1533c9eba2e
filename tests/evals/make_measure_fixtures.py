"""Ten items of our own for every format that `evals.measure` reads, drawn with Pillow.

    python -m tests.evals.make_measure_fixtures FOLDER

writes them all, to look at; tests make them into a temporary folder. A page says in words and in a bar what a question
asks, so every right answer can be read off its picture.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image, ImageDraw

from evals.measure import exports
from evals.measure.exports import ExportedEpisode, ExportedQuestion

ITEMS = 10
COLOURS = ("red", "green", "blue", "orange")
CITIES = ("Oslo", "Lima", "Cairo", "Perth", "Quito", "Turin", "Delhi", "Seoul", "Accra", "Minsk")


def png(lines: list[str], colour: str = "white", size: tuple[int, int] = (96, 64)) -> bytes:
    """Draws lines of text above a bar of a colour, as PNG."""
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((4, size[1] - 14, size[0] - 4, size[1] - 4), fill=colour)
    draw.multiline_text((4, 2), "\n".join(lines), fill="black")
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def pages(group: int, count: int = 3) -> tuple[bytes, ...]:
    """Draws a document's pages: a city and a number on each, a bar in a colour."""
    return tuple(
        png([f"Doc {group} page {page + 1}", CITIES[group], f"units {10 * group + page}"], COLOURS[page % 4])
        for page in range(count)
    )


def page_questions() -> list[ExportedQuestion]:
    """Ten questions about five documents of three pages."""
    questions = []
    for number in range(ITEMS):
        group = number // 2
        if number % 2:
            asked = (f"How many units does page 2 of document {group} have?", str(10 * group + 1), "Int")
        else:
            asked = (f"Which city does document {group} name?", CITIES[group], "Str")
        question, answer, answer_format = asked
        questions.append(
            ExportedQuestion(
                str(100 + number), f"doc{group}", pages(group), question, (answer,), "chart", (), answer_format
            )
        )
    return questions


def choice_questions() -> list[ExportedQuestion]:
    """Ten questions with four options, one image of its own each."""
    questions = []
    for number in range(ITEMS):
        image = png([f"bar {number}"], COLOURS[number % 4])
        letter = "ABCD"[number % 4]
        question = f"What colour has bar {number}?"
        questions.append(ExportedQuestion(str(number), f"v{number}", (image,), question, (letter,), "colour", COLOURS))
    return questions


def video_questions() -> list[ExportedQuestion]:
    """Ten questions about five videos of twelve frames each, so that frame 10 comes behind frame 9."""
    questions = []
    for number in range(ITEMS):
        video = number // 2
        frames = tuple(png([f"video {video}", f"t {time}"], COLOURS[video % 4]) for time in range(12))
        question = f"What colour has the bar? ({number})"
        answer = ("ABCD"[video % 4],)
        questions.append(
            ExportedQuestion(f"{video}-{number % 2}", f"vid{video}", frames, question, answer, "short", COLOURS)
        )
    return questions


def niah_questions(task: str) -> list[ExportedQuestion]:
    """Ten of MM-NIAH's documents: three texts with two images between them, of the kind that a task asks for."""
    questions = []
    for number in range(ITEMS):
        city = CITIES[number]
        pictures = [png([city], COLOURS[(number + place) % 4]) for place in range(2)]
        pieces = (
            f"The ship left {city} at dawn.\n\n",
            pictures[0],
            "It met calm seas.\n",
            pictures[1],
            "It came home.",
        )
        if task.startswith("counting"):
            asked = ("How many bars has each picture? Answer as a list.", "[1, 1]", ())
        elif task.endswith("image"):
            asked = ("What colour has the first bar?", "ABCD"[number % 4], COLOURS)
        else:
            asked = ("Where did the ship leave from?", city, ())
        question, answer, options = asked
        questions.append(ExportedQuestion(str(number), city, pieces, question, (answer,), "", options))
    return questions


def text_questions() -> list[ExportedQuestion]:
    """Ten questions over three paragraphs, whose first lines are titles."""
    questions = []
    for number, city in enumerate(CITIES):
        paragraphs = (
            f"Ship {number}\nShip {number} was built in {city}.",
            f"{city}\n{city} is a city. It has a harbour.",
            f"Captain {number}\nThe captain of ship {number} was born in 19{number:02}.",
        )
        question = f"In which city was the ship of captain {number} built?"
        questions.append(
            ExportedQuestion(str(number), str(number), paragraphs, question, (city, f"{city} city"), "bridge")
        )
    return questions


def mixed_questions() -> list[ExportedQuestion]:
    """Ten questions of plain JSON Lines, an image and a text in turn."""
    return [
        ExportedQuestion(
            f"q{number}", f"c{number // 2}", (png([city], COLOURS[number % 4]), f"Note {number}: {city} is far.\n"),
            "Which city is far?", (city,), "note",
        )
        for number, city in enumerate(CITIES)
    ]  # fmt: skip


def episodes() -> list[ExportedEpisode]:
    """Ten episodes of four actions and five screens, 90 × 160 pixels."""
    made = []
    for number in range(ITEMS):
        screens = tuple(png([f"app {number}", f"screen {step}"], COLOURS[step % 4], (90, 160)) for step in range(5))
        actions = (
            {"action_type": "click", "x": 45, "y": 16 * (1 + number % 8)},
            {"action_type": "input_text", "text": CITIES[number]},
            {"action_type": "scroll", "direction": "up"},
            {"action_type": "navigate_back"},
        )
        goal = f"Search for {CITIES[number]} in app {number}"
        made.append(ExportedEpisode(str(number), goal, screens, actions, (90, 160), "General_Tool"))
    return made


NIAH_TASKS = tuple(
    f"{kind}-{medium}" for kind in ("retrieval", "counting", "reasoning") for medium in ("text", "image")
)


def _niah(folder: Path) -> Path:
    for task in NIAH_TASKS:
        exports.write_mm_niah(folder, niah_questions(task), task)
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "mm_niah": _niah,
    "mmlongbench_doc": lambda folder: exports.write_mmlongbench_doc(folder, page_questions()),
    "slidevqa": lambda folder: exports.write_slidevqa(folder, page_questions()),
    "mp_docvqa": lambda folder: exports.write_mp_docvqa(folder, page_questions()),
    "docvqa": lambda folder: exports.write_docvqa(folder, page_questions()),
    "video_mme": lambda folder: exports.write_video_mme(folder, video_questions()),
    "vlmeval_tsv": lambda folder: exports.write_vlmeval_tsv(folder, choice_questions()),
    "hotpotqa": lambda folder: exports.write_hotpotqa(folder, text_questions()),
    "musique": lambda folder: exports.write_musique(folder, text_questions()),
    "gui_odyssey": lambda folder: exports.write_gui_odyssey(folder, episodes()),
    "android_control": lambda folder: exports.write_android_control(folder, episodes()),
    "cua_trace": lambda folder: exports.write_cua_trace(folder, episodes()),
    "osworld": lambda folder: exports.write_osworld(folder, episodes()),
    "jsonl": lambda folder: exports.write_jsonl(folder, mixed_questions()),
}
"""For each format, what writes its ten items into a folder and returns the path to read."""


if __name__ == "__main__":
    for name, write in WRITERS.items():
        print(name, write(Path(sys.argv[1]) / name))
