"""Video-MME: questions with four options about videos (Fu et al. 2024, arXiv 2405.21075).

Fields by the hub's Parquet and lmms-eval's videomme task: video_id, duration, domain, sub_category, url, videoID,
question_id, task_type, question, options (["A. …", …]), answer (a letter). A video is data/<videoID>.mp4, .MP4 or .mkv,
or a folder data/<videoID>/ of frames, which are taken at `frame_rate` in a second. The prompt is lmms-eval's without
subtitles.
"""

import re

from kvpatch_jax import Video
from kvpatch_jax.errors import InputError

from ..data_files import DataFolder
from ..items import Item, Piece
from ..records import Record
from .reader import Reader, each, has, letter_of

_BEFORE = (
    "Select the best answer to the following multiple-choice question based on the video. Respond with only the letter "
    "(A, B, C, or D) of the correct option."
)
_RATE = 1.0
"""Frames of a folder in a second, as Video-MME's frames are extracted where nothing else is said."""


def _item(record: Record, files: DataFolder) -> Item:
    options = record.texts("options")
    plain = tuple(re.sub(r"^[A-Z][.:)]\s*", "", option) for option in options)
    answer = record.text("answer").strip()
    letters = [letter_of(number) for number in range(len(options))]
    if answer not in letters:
        raise InputError(f"answer: got {answer!r:.80}; expected one of {', '.join(letters)}")
    name = record.text("videoID")
    listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, plain, strict=True))
    question = f"{record.text('question')}\n{listed}"
    kind = record.get("duration")
    return Item(
        id=record.name("question_id"),
        cluster=name,
        pieces=(Piece(_video(name, files), "video"),),
        question=f"{_BEFORE}\n{question}\nThe best answer is:" if files.options.instruct else question,
        answers=(answer,),
        kind=kind if isinstance(kind, str) else "",
        rule="option_letter",
        options=plain,
        where=record.where,
    )


def _video(name: str, files: DataFolder) -> Video:
    frames = files.options.frames
    for suffix in (".mp4", ".MP4", ".mkv", ".webm"):
        try:
            path = files.find(f"{name}{suffix}", "videoID")
        except InputError:
            continue
        return Video(path, frames=frames)

    folder = files.find(name, "videoID")
    if not folder.is_dir():
        raise InputError(f"videoID: got {name!r:.80}; expected a video, or a folder of its frames")
    # Sorted by the numbers in the names: frame_10 is behind frame_9.
    return Video(files.images_in(folder, "videoID"), frames=frames, rate=_RATE)


READER = Reader(
    name="video_mme",
    fits=has("videoID", "question_id", "question", "options", "answer"),
    read=each(_item),
    chunk_rule="The video is a piece, of the frames that are sampled.",
    beside=("data", "videos", "frames"),
)
