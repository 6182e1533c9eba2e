"""Reads the goldens and rebuilds the Hugging Face directory of the tiny model they were made with."""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.goldens.redraw import draw_image, draw_numbers, redraw_all
from tests.goldens.table import FAMILIES, MELS, Both, Clip, Picture, Row, Sound, merged

GOLDENS = Path(__file__).parent


def golden_shapes(family: str) -> dict[str, list[int]]:
    """Returns name → shape of every tensor of the family's tiny checkpoint, in Hugging Face's names and layout."""
    return json.loads((GOLDENS / family / "shapes.json").read_text())


def golden_config(family: str) -> dict[str, Any]:
    """Returns `config.json` of the tiny model, as transformers 5 writes it."""
    return json.loads((GOLDENS / family / "config.json").read_text())


@functools.cache
def _arrays(family: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / family / "arrays.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return {name: value.astype(np.int32) if value.dtype == np.int16 else value for name, value in arrays.items()}


def golden_arrays(family: str, case: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one case, or of a file beside the cases; README.md beside this file says what each is."""
    if (GOLDENS / family / f"{case}.npz").is_file():
        with np.load(GOLDENS / family / f"{case}.npz") as file:
            return {name: file[name] for name in file.files}
    return {
        name.removeprefix(f"{case}."): value for name, value in _arrays(family).items() if name.startswith(f"{case}.")
    }


def golden_images(family: str, case: str) -> list[np.ndarray]:
    """Returns the images of one case, drawn again."""
    sizes = [part for part in FAMILIES[family].cases[case] if isinstance(part, Picture)]
    return [draw_image(f"image {number}", *size) for number, size in enumerate(sizes)]


def drawn_inputs(family: str, case: str) -> dict[str, np.ndarray]:
    """Returns what a case's videos and sounds (and Kimi's images) are: drawn patches and log-mel features."""
    row = FAMILIES[family]
    return drawn_parts(row, case, row.cases[case] if case in row.cases else row.positions[case])


def drawn_parts(row: Row, case: str, parts: list[Any]) -> dict[str, np.ndarray]:
    """Returns the same of the parts of any prompt."""
    family, inputs = row.family, {}
    grids = [part.grid for part in parts if isinstance(part, Clip | Both)]
    if grids:
        drawn = [draw_numbers(f"{case} video {number}", int(np.prod(grid)), 96) for number, grid in enumerate(grids)]
        inputs |= {"pixel_values_videos": np.concatenate(drawn), "video_grid_thw": np.array(grids, np.int32)}
        if "omni" in family or family == "qwen2_5_vl":
            seconds = [part.seconds for part in parts if isinstance(part, Clip | Both)]
            inputs["second_per_grid_ts"] = np.array(seconds, np.float32)
    frames = [part.frames for part in parts if isinstance(part, Sound | Both)]
    if frames:
        features = np.zeros((len(frames), MELS, max(frames)), np.float32)
        for number, count in enumerate(frames):
            features[number, :, :count] = draw_numbers(f"{case} sound {number}", MELS, count)
        mask = (np.arange(max(frames)) < np.array(frames)[:, None]).astype(np.int32)
        if family == "gemma4":
            inputs |= {"input_features": features.swapaxes(1, 2), "input_features_mask": mask.astype(bool)}
        else:
            inputs |= {"input_features": features, "feature_attention_mask": mask}
    if row.model == "Kimi_K25" and (sizes := [part for part in parts if isinstance(part, Picture)]):
        images = np.array([(1, size.height // 4, size.width // 4) for size in sizes], np.int32)
        inputs["pixel_values"] = draw_numbers(case, int(images.prod(axis=1).sum()), 3, 4, 4)
        inputs["image_grid_thw"] = images
    return inputs


def golden_prompt(backbone: Any, family: str, case: str) -> dict[str, np.ndarray]:
    """Returns what `backbone.embed` takes of a case: ids, images as `prepare` makes them, drawn videos and sounds."""
    inputs, images = drawn_inputs(family, case), golden_images(family, case)
    if images and "pixel_values" not in inputs:
        prompt = backbone.prepare([item for image in images for item in ([5], image)])
        inputs |= {name: value for name, value in prompt.items() if name not in ("input_ids", "position_ids")}
    return {"input_ids": golden_arrays(family, case)["input_ids"][None], **inputs}


@functools.cache
def held_out(family: str) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """Returns of each held-out setting the configuration and shapes, and all arrays, `<setting>.<name>`."""
    with np.load(GOLDENS / family / "held_out.npz") as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(arrays.pop("written").tobytes()), arrays


def write_held_out(family: str, number: int, directory: Path) -> Path:
    """Writes the directory of one held-out setting."""
    written = held_out(family)[0][number]
    directory = write_checkpoint(family, directory)
    (directory / "config.json").write_text(json.dumps(written["config"]))
    save_file(redraw_all(written["shapes"]), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_checkpoint(family: str, directory: Path, **changes: Any) -> Path:
    """Writes a whole Hugging Face directory of the tiny model: configuration, preprocessing and redrawn weights.

    `changes` go to `config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(merged(golden_config(family), changes)))
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (GOLDENS / family / name).is_file():
            shutil.copy(GOLDENS / family / name, directory)
    save_file(redraw_all(golden_shapes(family)), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@functools.cache
def golden_chat(family: str, videos: bool = False) -> dict[str, Any]:
    """Returns a family's golden conversation: of `chat.json`, or of `videos/` where asked for or alone there."""
    shared, own = json.loads((GOLDENS / "chat.json").read_text())["families"], GOLDENS / family / "chat.json"
    if videos or (family not in shared and not own.is_file()):
        own = GOLDENS / "videos" / f"{family}.json"
    return json.loads(own.read_text()) if videos or family not in shared else shared[family]


def write_chatting(family: str, directory: Path, videos: bool = False) -> Path:
    """Writes the tiny checkpoint with the tokenizer and the template of its golden conversation."""
    gold, directory = golden_chat(family, videos), write_checkpoint(family, directory)
    (directory / "tokenizer.json").write_text(json.dumps(gold["tokenizer"]))
    (directory / "chat_template.jinja").write_text(gold["template"])
    (directory / "tokenizer_config.json").write_text(json.dumps(gold.get("special_tokens", {})))
    return directory
