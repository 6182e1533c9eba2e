"""Writers of the formats that `formats` reads, by the field lists of their releases: to export a task of one's own.

Every writer takes a folder and questions or episodes, makes the release's layout there, and returns the path that
`formats.read` takes. A file that is there already is never overwritten.
"""

import base64
import dataclasses
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpatch_jax.errors import InputError

from .formats.cua_trace import OMITTED
from .formats.reader import letter_of
from .tfrecord import framed


@dataclasses.dataclass(frozen=True)
class ExportedQuestion:
    """A question to be written.

    Attributes:
      id: a number as text, since most formats have numbers. group: the document, deck or video of the pieces.
      pieces: texts, and images as encoded PNG. question, answers: as asked; of a choice, its letter.
      kind: the category. options: of a choice.
      answer_format: of MMLongBench-Doc ("Str", "Int", "Float", "List", "None").
    """

    id: str
    group: str
    pieces: tuple[str | bytes, ...]
    question: str
    answers: tuple[str, ...]
    kind: str = ""
    options: tuple[str, ...] = ()
    answer_format: str = "Str"

    @property
    def images(self) -> list[bytes]:
        """The pieces that are images."""
        return [piece for piece in self.pieces if isinstance(piece, bytes)]

    @property
    def texts(self) -> list[str]:
        """The pieces that are texts."""
        return [piece for piece in self.pieces if isinstance(piece, str)]


@dataclasses.dataclass(frozen=True)
class ExportedEpisode:
    """An episode to be written.

    Attributes:
      id: a number as text. goal: what the agent is told. kind: its category.
      screenshots: encoded PNG, one for each action and the last one, behind it.
      actions: as AndroidControl has them: {"action_type": …, …} in pixels.
      size: width and height of a screenshot.
    """

    id: str
    goal: str
    screenshots: tuple[bytes, ...]
    actions: tuple[dict[str, Any], ...]
    size: tuple[int, int]
    kind: str = ""


def write_file(path: Path, content: bytes) -> Path:
    """Writes a file that is not there; one with the same bytes stays.

    Raises:
      InputError: there is another file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError as error:
        if not path.is_file() or path.read_bytes() != content:
            raise InputError(f"export: got {str(path)!r:.300}, which is there; expected a new file") from error
    return path


def _lines(values: Sequence[Any]) -> bytes:
    return "".join(f"{json.dumps(value, ensure_ascii=False)}\n" for value in values).encode()


def write_jsonl(folder: Path, questions: Sequence[ExportedQuestion], name: str = "items.jsonl") -> Path:
    """Writes plain JSON Lines with the pieces in their order, images in images/."""
    records = []
    for question in questions:
        pieces = []
        for piece in question.pieces:
            if isinstance(piece, str):
                pieces.append({"text": piece})
            else:
                # Named by its content, so that questions about the same images share a context.
                name_of = hashlib.blake2b(piece, digest_size=16).hexdigest()
                image = write_file(folder / "images" / f"{name_of}.png", piece)
                pieces.append({"image": image.name})
        record = {"id": question.id, "cluster": question.group, "kind": question.kind, "pieces": pieces}
        record |= {"question": question.question, "answer": list(question.answers)}
        records.append(record | ({"options": list(question.options)} if question.options else {}))
    return write_file(folder / name, _lines(records))


def write_episodes(folder: Path, episodes: Sequence[Mapping[str, Any]]) -> Path:
    """Writes plain episodes, records as `formats.plain_episodes` reads them but for images, which are encoded PNG."""
    records = []
    for episode in episodes:
        steps = []
        for step in episode["steps"]:
            names = []
            for image in step.get("images", ()):
                # Named by its content, as in `write_jsonl`.
                name = f"{hashlib.blake2b(image, digest_size=16).hexdigest()}.png"
                names.append(write_file(folder / "images" / name, image).name)
            steps.append({**step, "images": names})
        records.append({**episode, "steps": steps})
    return write_file(folder / "episodes.jsonl", _lines(records))


def write_mm_niah(folder: Path, questions: Sequence[ExportedQuestion], task: str = "retrieval-text") -> Path:
    """Writes MM-NIAH's annotations/<task>.jsonl and images/; counting answers are JSON lists."""
    records = []
    for question in questions:
        names = [f"{task}_{question.id}_{number}.png" for number in range(len(question.images))]
        for name, image in zip(names, question.images, strict=True):
            write_file(folder / "images" / name, image)
        answer: Any = question.answers[0]
        if question.options:
            answer = ord(answer) - ord("A")
        elif task.startswith("counting"):
            answer = json.loads(answer)
        context = "".join(piece if isinstance(piece, str) else "<image>" for piece in question.pieces)
        meta = {"placed_depth": 0.5, "context_length": len(context), "context_length_text": len(context)}
        meta |= {"context_length_image": 0, "num_images": len(names), "needles": []}
        meta |= {"choices": list(question.options) or None, "choices_image_path": None}
        record = {"id": int(question.id), "images_list": names, "context": context, "question": question.question}
        records.append(record | {"answer": answer, "meta": meta})
    return write_file(folder / "annotations" / f"{task}.jsonl", _lines(records))


def write_mmlongbench_doc(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes MMLongBench-Doc's samples.json, pages as images in documents/<doc_id without .pdf>/."""
    records = []
    for question in questions:
        for number, page in enumerate(question.images, 1):
            write_file(folder / "documents" / question.group / f"page-{number}.png", page)
        record = {"doc_id": f"{question.group}.pdf", "doc_type": question.kind, "question": question.question}
        record |= {"answer": question.answers[0], "evidence_pages": "[1]", "evidence_sources": "['Chart']"}
        records.append(record | {"answer_format": question.answer_format})
    return write_file(folder / "samples.json", json.dumps(records, ensure_ascii=False, indent=1).encode())


def write_slidevqa(folder: Path, questions: Sequence[ExportedQuestion], split: str = "test") -> Path:
    """Writes SlideVQA's annotations/qa/<split>.jsonl as annotations/<split>.jsonl, slides in images/<split>/<deck>/."""
    records = []
    for question in questions:
        names = [f"slide-{number}-1024.png" for number in range(1, len(question.images) + 1)]
        for name, slide in zip(names, question.images, strict=True):
            write_file(folder / "images" / split / question.group / name, slide)
        record = {"deck_name": question.group, "deck_url": "", "image_urls": names, "qa_id": int(question.id)}
        record |= {"question": question.question, "answer": question.answers[0], "arithmetic_expression": "None"}
        records.append(record | {"evidence_pages": [1], "reasoning_type": question.kind, "answer_type": "Single-Span"})
    return write_file(folder / "annotations" / f"{split}.jsonl", _lines(records))


def write_mp_docvqa(folder: Path, questions: Sequence[ExportedQuestion], split: str = "val") -> Path:
    """Writes MP-DocVQA's <split>.json, pages in images/<page id>.png (the release has .jpg)."""
    records = []
    for question in questions:
        pages = [f"{question.group}_p{number}" for number in range(len(question.images))]
        for page, image in zip(pages, question.images, strict=True):
            write_file(folder / "images" / f"{page}.png", image)
        record = {"questionId": int(question.id), "question": question.question, "doc_id": question.group}
        record |= {"page_ids": pages, "answers": list(question.answers), "answer_page_idx": 0, "data_split": split}
        records.append(record)
    content = {"dataset_name": "MP-DocVQA", "dataset_split": split, "dataset_version": "1.0", "data": records}
    return write_file(folder / f"{split}.json", json.dumps(content, ensure_ascii=False).encode())


def write_docvqa(folder: Path, questions: Sequence[ExportedQuestion], split: str = "val") -> Path:
    """Writes DocVQA's <split>.json, the page of each question in documents/."""
    records = []
    for question in questions:
        name = f"documents/{question.group}_1.png"
        write_file(folder / name, question.images[0])
        record = {"questionId": int(question.id), "question": question.question, "question_types": [question.kind]}
        record |= {"image": name, "docId": int(question.id), "ucsf_document_id": question.group}
        record |= {"ucsf_document_page_no": "1", "answers": list(question.answers), "data_split": split}
        records.append(record)
    content = {"dataset_name": "docvqa", "dataset_split": split, "dataset_version": "0.1", "data": records}
    return write_file(folder / f"{split}.json", json.dumps(content, ensure_ascii=False).encode())


def write_video_mme(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes Video-MME's records as test.jsonl, the frames of each video in frames/<videoID>/."""
    records = []
    for question in questions:
        for number, frame in enumerate(question.images, 1):
            write_file(folder / "frames" / question.group / f"frame_{number}.png", frame)
        options = [f"{letter_of(number)}. {option}" for number, option in enumerate(question.options)]
        record = {"video_id": question.group, "duration": question.kind, "domain": "", "sub_category": "", "url": ""}
        record |= {"videoID": question.group, "question_id": question.id, "task_type": "", "options": options}
        records.append(record | {"question": question.question, "answer": question.answers[0]})
    return write_file(folder / "test.jsonl", _lines(records))


def write_vlmeval_tsv(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes VLMEvalKit's TSV, images as base64; several as Python writes a list. Tabs in texts become spaces."""
    letters = [letter_of(number) for number in range(max((len(question.options) for question in questions), default=0))]
    rows = [["index", "image", "question", *letters, "answer", "category"]]
    for question in questions:
        encoded = [base64.b64encode(image).decode() for image in question.images]
        options = [*question.options, *[""] * (len(letters) - len(question.options))]
        cells = [question.id, encoded[0] if len(encoded) == 1 else repr(encoded), question.question, *options]
        rows.append([*cells, question.answers[0], question.kind])
    clean = ["\t".join(" ".join(cell.split()) for cell in row) for row in rows]
    return write_file(folder / "questions.tsv", ("\n".join(clean) + "\n").encode())


def write_hotpotqa(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes HotpotQA's JSON list; a text's first line is its paragraph's title."""
    records = []
    for question in questions:
        context = [[text.partition("\n")[0], [text.partition("\n")[2]]] for text in question.texts]
        record = {"_id": question.id, "question": question.question, "answer": question.answers[0]}
        record |= {"supporting_facts": [[context[0][0], 0]], "context": context, "type": question.kind}
        records.append(record | {"level": "hard"})
    return write_file(folder / "dev_distractor.json", json.dumps(records, ensure_ascii=False).encode())


def write_musique(folder: Path, questions: Sequence[ExportedQuestion]) -> Path:
    """Writes MuSiQue-Ans's JSON Lines; a text's first line is its paragraph's title."""
    records = []
    for question in questions:
        paragraphs = []
        for number, text in enumerate(question.texts):
            title, _, body = text.partition("\n")
            paragraphs.append({"idx": number, "title": title, "paragraph_text": body, "is_supporting": number == 0})
        record = {"id": f"2hop__{question.id}", "paragraphs": paragraphs, "question": question.question}
        record |= {"question_decomposition": [], "answer": question.answers[0]}
        records.append(record | {"answer_aliases": list(question.answers[1:]), "answerable": True})
    return write_file(folder / "musique_ans_dev.jsonl", _lines(records))


def write_gui_odyssey(folder: Path, episodes: Sequence[ExportedEpisode]) -> Path:
    """Writes GUI-Odyssey's annotations/<episode>.json and screenshots/; points in thousandths of the screen."""
    for episode in episodes:
        steps = []
        for number, action in enumerate(episode.actions):
            name = f"{episode.id}_{number}.png"
            write_file(folder / "screenshots" / name, episode.screenshots[number])
            kind, info = _odyssey_action(action, episode.size)
            steps.append({"step": number, "screenshot": name, "action": kind, "info": info, "ps": "", "sam2_bbox": []})
        width, height = episode.size
        device = {"product": "", "release_version": "", "sdk_version": "", "h": height, "w": width, "device_name": ""}
        task = {"category": episode.kind, "app": [], "meta_task": "", "task": episode.goal, "instruction": episode.goal}
        record = {"episode_id": episode.id, "device_info": device, "task_info": task, "step_length": len(steps)}
        content = json.dumps(record | {"steps": steps}, ensure_ascii=False, indent=1)
        write_file(folder / "annotations" / f"{episode.id}.json", content.encode())
    return folder


def _odyssey_action(action: dict[str, Any], size: tuple[int, int]) -> tuple[str, Any]:
    kind = action["action_type"]
    keys = {"navigate_home": "KEY_HOME", "navigate_back": "KEY_BACK"}
    ends = {"up": [500, 200], "down": [500, 800], "left": [200, 500], "right": [800, 500]}
    if kind in keys:
        return "CLICK", keys[kind]
    if kind == "scroll":
        return "SCROLL", [[500, 500], ends[action["direction"]]]
    if kind == "input_text":
        return "TEXT", action["text"]
    if kind in ("click", "long_press"):
        point = [round(1000 * action[axis] / side) for axis, side in zip("xy", size, strict=True)]
        return kind.upper(), [point]
    if kind == "complete":
        return "COMPLETE", ""
    raise InputError(f"export: got action {kind!r:.40}; expected one that GUI-Odyssey has")


def _message(field: int, content: bytes) -> bytes:
    """Writes a field of a protobuf message that holds bytes."""
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    written = b""
    while value > 0x7F:
        written += bytes([value & 0x7F | 0x80])
        value >>= 7
    return written + bytes([value])


def write_android_control(folder: Path, episodes: Sequence[ExportedEpisode]) -> Path:
    """Writes AndroidControl's TFRecord with gzip: android_control-00000-of-00001."""
    records = []
    for episode in episodes:
        texts: dict[str, list[bytes]] = {"goal": [episode.goal.encode()], "screenshots": list(episode.screenshots)}
        texts["accessibility_trees"] = [b""] * len(episode.screenshots)
        texts["actions"] = [json.dumps(action).encode() for action in episode.actions]
        texts["step_instructions"] = [b"next"] * len(episode.actions)
        numbers = {"episode_id": [int(episode.id)]}
        for name, side in zip(("screenshot_widths", "screenshot_heights"), episode.size, strict=True):
            numbers[name] = [side] * len(episode.screenshots)

        features = [
            (name, _message(1, b"".join(_message(1, value) for value in values))) for name, values in texts.items()
        ]
        features += [
            (name, _message(3, _message(1, b"".join(map(_varint, values))))) for name, values in numbers.items()
        ]
        entries = [_message(1, _message(1, name.encode()) + _message(2, feature)) for name, feature in features]
        records.append(framed(_message(1, b"".join(entries))))
    content = gzip.compress(b"".join(records), mtime=0)
    return write_file(folder / "android_control-00000-of-00001", content)


def write_osworld(folder: Path, episodes: Sequence[ExportedEpisode]) -> Path:
    """Writes OSWorld-like trajectories as JSON Lines, screenshots in screenshots/; actions as JSON."""
    records = []
    for episode in episodes:
        names = [f"{episode.id}_{number}.png" for number in range(len(episode.actions))]
        for name, screenshot in zip(names, episode.screenshots, strict=False):
            write_file(folder / "screenshots" / name, screenshot)
        record = {"task_id": episode.id, "domain": episode.kind, "instruction": episode.goal, "score": 1.0}
        record |= {"num_steps": len(names), "actions": [json.dumps(action) for action in episode.actions]}
        empty = [""] * len(names)
        records.append(record | {"responses": empty, "screenshots": names, "accessibility_trees": empty})
    return write_file(folder / "trajectories.jsonl", _lines(records))


def write_cua_trace(folder: Path, episodes: Sequence[ExportedEpisode], keep: int = 1) -> Path:
    """Writes a computer-use trace as AIPerf reads it: h_cua.jsonl, the newest `keep` screenshots in every request."""
    records = []
    for episode in episodes:
        observations: list[list[dict[str, Any]]] = []
        calls: list[dict[str, Any]] = []
        for number, screenshot in enumerate(episode.screenshots):
            url = f"data:image/png;base64,{base64.b64encode(screenshot).decode()}"
            image = {"type": "image_url", "image_url": {"url": url}, "uuid": f"{episode.id}-{number}"}
            observations.append([image] if number else [{"type": "text", "text": episode.goal}, image])

            messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a computer-use agent."}]
            for turn, observation in enumerate(observations):
                role = "tool" if turn else "user"
                parts = observation
                if turn <= number - keep:
                    omitted = {"type": "text", "text": f"\n\n{OMITTED}\n\n\n\n"}
                    parts = [omitted if part["type"] == "image_url" else part for part in observation]
                messages.append({"role": role, "content": parts})
                messages += calls[turn : turn + 1]
            record = {"session_id": episode.id, "messages": messages, "tools": [], "output_length": 20}
            records.append(record | {"extra": {"tool_choice": "auto"}} | ({"delay": 500} if number else {}))
            if number < len(episode.actions):
                action = dict(episode.actions[number])
                function = {"name": action.pop("action_type"), "arguments": json.dumps(action)}
                call = {"id": str(number), "type": "function", "function": function}
                calls.append({"role": "assistant", "content": None, "tool_calls": [call]})
    return write_file(folder / "h_cua.jsonl", _lines(records))
