"""Makes the goldens of the tiny models in `table.py` with transformers 5.24 and torch (CPU, float32, eager attention).

    python -m tests.goldens.make [family …]

Needs torch, transformers, Pillow and safetensors, and no network. README.md beside this file names the arrays.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import functools
import importlib
import json
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.goldens.held_out import AXES, settings
from tests.goldens.joined import DeepseekVL2, Phi3V
from tests.goldens.load import GOLDENS, drawn_parts
from tests.goldens.redraw import digest, draw_image, draw_numbers, redraw_all
from tests.goldens.table import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEO,
    Both,
    Clip,
    Picture,
    Row,
    Sound,
    words,
)

STEPS, LONG = 6, 200
DIRECTIONS = draw_numbers("directions", 320, 16)
NAMED = ("qwen2_vl", "qwen2_5_vl", "llava", "llava_next", "internvl", "gemma3", "mistral3", "pixtral")
NAMED += ("qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Families whose files have other names than transformers' modules."""
JOINED = {"phi3_v": Phi3V, "deepseek_vl2": DeepseekVL2, "deepseek_vl2_tiny": DeepseekVL2}


def processor_of(row: Row) -> Any:
    """Returns the image processor without torchvision by the settings in the family's folder, or None."""
    path = GOLDENS / row.family / "preprocessor_config.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    # PixtralProcessor sets the patch size to what a token shows.
    known |= {"patch_size": 8} if row.family == "mistral3" else {}
    cls = getattr(transformers, f"{known.pop('image_processor_type', '')}Pil", None)
    return None if cls is None else cls(**known)


def build(row: Row, directory: Path) -> tuple[Any, dict[str, list[int]]]:
    """Builds the model with every parameter redrawn under its file's name, and writes `config.json`.

    Returns the model and the shapes of its tensors.
    """
    if row.model in JOINED:
        model = JOINED[row.model](row.config)
        (directory / "config.json").write_text(json.dumps(row.config, indent=2) + "\n")
        return model.eval(), model.shapes
    cls = getattr(transformers, row.config["architectures"][0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(row.config))
        config = transformers.AutoConfig.from_pretrained(folder)
        cls(config).save_pretrained(folder, **({"save_original_format": False} if row.new_names else {}))
        path = Path(folder) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        save_file(redraw_all(shapes), path, metadata={"format": "pt"})
        (directory / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
        model, report = cls.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    return model.eval(), shapes


# ------------------------------------------------------------------------------------------------------ prompts


class Prompt:
    """Ids of a prompt and what the family's processors hand over beside them."""

    def __init__(self, row: Row, model: Any, processor: Any, case: str, parts: list[Any]) -> None:
        self.row, self.model, self.processor, self.case = row, model, processor, case
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.inputs: dict[str, Any] = {}
        self.joint = any(isinstance(part, Both) for part in parts)
        drawn = {name: torch.from_numpy(value) for name, value in drawn_parts(row, case, parts).items()}
        drawn = {name: value.long() if value.dtype == torch.int32 else value for name, value in drawn.items()}
        if "Omni" in row.model and "second_per_grid_ts" in drawn:
            drawn["video_second_per_grid"] = drawn.pop("second_per_grid_ts")
        if "pixel_values" in drawn:  # of Kimi, whose processor needs torchvision
            self.inputs = {name: drawn.pop(name) for name in ("pixel_values", "image_grid_thw")}
        counts = self.image_tokens([part for part in parts if isinstance(part, Picture)])
        self.inputs |= drawn
        for part in parts:
            self.add(part, counts)

    def image_tokens(self, sizes: list[Picture]) -> list[list[int]]:
        """Processes the images; returns how many placeholders each of an image's blocks takes."""
        if not sizes:
            return []
        images = [Image.fromarray(draw_image(f"image {number}", *size)) for number, size in enumerate(sizes)]
        name = self.row.model
        if name == "SmolVLM":
            out = self.processor(images=[images], return_tensors="pt", return_row_col_info=True)
            self.inputs = {name: out[name] for name in ("pixel_values", "pixel_attention_mask")}
        elif name in JOINED:
            self.inputs = self.model.process(images)
        elif not self.inputs:
            self.inputs = dict(self.processor(images=images, return_tensors="pt"))
        blocks = [1] * len(images)
        if "num_patches" in self.inputs:
            blocks = self.inputs.pop("num_patches").tolist()
        self.inputs.pop("num_soft_tokens_per_image", None)
        tower = self.model if hasattr(self.model, "get_image_features") else self.model.model
        features = tower.get_image_features(**self.inputs).pooler_output
        lengths = [len(block.flatten(0, -2)) for block in features]
        if len(lengths) == sum(blocks):
            return [[sum(lengths[sum(blocks[:number]) :][:count])] for number, count in enumerate(blocks)]
        return [lengths]

    def sound_tokens(self, frames: int) -> int:
        if self.row.model == "Gemma4":
            return (frames + 3) // 4
        if "Qwen3" in self.row.model:
            module = importlib.import_module("transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe")
            return int(module._get_feat_extract_output_lengths(torch.tensor(frames)))
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1

    def put(self, *ids: int, kind: int = 0) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)

    def add(self, part: Any, counts: list[list[int]]) -> None:
        if isinstance(part, int):
            self.put(*words(part, len(self.ids)))
        elif isinstance(part, Picture):
            for count in counts.pop(0) if counts else []:  # SmolVLM's tiles all stand where the first image does
                self.put(START)
                self.put(*[IMAGE] * count, kind=1)
                self.put(END)
        elif isinstance(part, Clip) and self.row.frames:
            self.add_frames(part.grid)
        elif isinstance(part, Clip):
            self.put(START)
            self.put(*[VIDEO] * (int(np.prod(part.grid)) // 4), kind=2)
            self.put(END)
        elif isinstance(part, Sound):
            self.put(AUDIO_START)
            self.put(*[AUDIO] * self.sound_tokens(part.frames), kind=3)
            self.put(AUDIO_END)
        else:
            self.put(START, AUDIO_START, *self.interleaved(part), AUDIO_END, END)

    def add_frames(self, grid: tuple[int, int, int]) -> None:
        """Adds a video of which each frame has placeholders of its own: GLM's within one start and one end."""
        glm = self.row.model == "Glm4v"
        self.put(*[AUDIO_START] * glm)
        for _ in range(grid[0]):
            self.put(*words(1, len(self.ids)), START)
            self.put(*[IMAGE if glm else VIDEO] * (grid[1] * grid[2] // 4), kind=2)
            self.put(END)
        self.put(*[AUDIO_END] * glm)

    def interleaved(self, part: Both) -> list[int]:
        """Returns placeholders of a video with its sound in the order of the processors."""
        package = "qwen3_omni_moe" if "Qwen3" in self.row.model else "qwen2_5_omni"
        module = importlib.import_module(f"transformers.models.{package}.processing_{package}")
        cls = module.Qwen3OmniMoeProcessor if "Qwen3" in self.row.model else module.Qwen2_5OmniProcessor
        fake = types.SimpleNamespace(video_token="v", audio_token="a", audio_bos_token="", audio_eos_token="")
        fake.video_processor = types.SimpleNamespace(merge_size=2)
        fake.get_chunked_index = functools.partial(cls.get_chunked_index, fake)
        videos = {"video_grid_thw": np.array([part.grid]), "video_second_per_grid": [part.seconds]}
        sounds = {"num_audio_tokens": [self.sound_tokens(part.frames)]}
        rate = {"position_id_per_seconds": self.model.config.position_id_per_seconds, "seconds_per_chunk": 2.0}
        text = cls.replace_video_with_audio_token(fake, videos, 0, sounds, 0, **rate)
        return [{"v": VIDEO, "a": AUDIO}[letter] for letter in text]


# ----------------------------------------------------------------------------------------------------- forwards


class Watched(Exception):
    """Ends a forward whose positions alone are asked for."""


class Watch:
    """Collects by hooks what enters the language model."""

    def __init__(self, model: Any) -> None:
        inner = getattr(model, "model", model)
        language = getattr(inner, "language_model", None) or getattr(inner, "text_model", None) or inner
        self.values: dict[str, Any] = {}
        self.axes = "mrope_section" in str(getattr(language, "config", "")) and inner is not language
        self.stop = False
        language.register_forward_pre_hook(self.enter, with_kwargs=True)
        language.layers[0].register_forward_pre_hook(self.enter_layer, with_kwargs=True)

    def enter(self, module: Any, inputs: Any, keywords: dict[str, Any]) -> None:
        self.values["position_ids"] = keywords.get("position_ids")
        if self.stop:
            raise Watched

    def enter_layer(self, module: Any, inputs: Any, keywords: dict[str, Any]) -> None:
        self.values["embeddings"] = inputs[0] if inputs else keywords["hidden_states"]


def arguments(row: Row, model: Any, prompt: Prompt, more: list[int], positions: Any) -> dict[str, Any]:
    """Returns what the model is called with: the prompt and tokens behind it."""
    ids = torch.tensor([prompt.ids + more])
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **prompt.inputs}
    if "vision_config" in row.config:
        kinds = torch.tensor([prompt.kinds + [0] * len(more)])
        if row.model == "Gemma3":
            given["token_type_ids"] = kinds
        elif "Thinker" not in row.model:
            given["mm_token_type_ids"] = kinds
        else:
            given["use_audio_in_video"] = prompt.joint
    if row.first:
        positions = row.first + torch.arange(len(prompt.ids))[None]
    if positions is not None:
        last = positions.max() + 1 + torch.arange(len(more))
        given["position_ids"] = torch.cat([positions, last.expand(*positions.shape[:-1], -1)], dim=-1)
    if hasattr(model, "rope_deltas"):
        model.rope_deltas = None
    if hasattr(getattr(model, "model", None), "rope_deltas"):
        model.model.rope_deltas = None
    return given


def positions_of(watch: Watch, length: int, first: int) -> Any:
    """Returns positions [1, T], or of three axes [3, 1, T]."""
    found = watch.values["position_ids"]
    found = first + torch.arange(length)[None] if found is None else found
    if watch.axes:
        return found[-3:] if found.ndim == 3 else found.expand(3, 1, -1)
    return found


def authors_positions(positions: torch.Tensor, kinds: list[int]) -> torch.Tensor:
    """Returns positions [3, 1, T] by which what follows a video follows its largest position.

    transformers from 5.3 on lets it follow the height and width alone.
    """
    positions = positions.clone()
    after = len(kinds) - kinds[::-1].index(2)
    positions[..., after:] += positions[..., :after].max() + 1 - positions[0, 0, after]
    return positions


def cached(cache: Any, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns both channels [L, R, K, H] as transformers keeps them, and states of linear attention.

    Of layers of unlike widths an array each, `first.<layer>`; those that read another's keep none.
    """
    full = {n: layer for n, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None}
    out: dict[str, np.ndarray] = {}
    for name, part in (("first", "keys"), ("second", "values")):
        values = {n: getattr(layer, part)[0].transpose(0, 1).numpy()[rows] for n, layer in full.items()}
        if len({value.shape for value in values.values()}) == 1:
            out[name] = np.stack(list(values.values()))
        else:
            out |= {f"{name}.{number}": value for number, value in values.items()}
    linear = [layer for layer in cache.layers if hasattr(layer, "recurrent_states")]
    if linear:
        out["state"] = np.stack([layer.recurrent_states[0][0].transpose(0, 1).numpy() for layer in linear])
        out["tail"] = np.stack([layer.conv_states[0][0, :, 1:].T[:, None].numpy() for layer in linear])
    return out


def cut(pixels: np.ndarray, sizes: np.ndarray, patch: int) -> np.ndarray:
    """Returns patches [P, 3, p, p] in raster order of images that Pixtral's processor padded to one size."""
    found = []
    for image, (height, width) in zip(pixels, sizes, strict=True):
        cells = image[:, :height, :width].reshape(3, height // patch, patch, width // patch, patch)
        found.append(cells.transpose(1, 3, 0, 2, 4).reshape(-1, 3, patch, patch))
    return np.concatenate(found)


def run(row: Row, model: Any, watch: Watch, prompt: Prompt) -> dict[str, np.ndarray]:
    """Returns the arrays of one case."""
    length, positions = len(prompt.ids), None
    if row.authors and 2 in prompt.kinds:
        watch.stop = True
        try:
            model(**arguments(row, model, prompt, [], None))
        except Watched:
            positions = authors_positions(positions_of(watch, length, 0), prompt.kinds)
        watch.stop = False
    # A cache without a configuration keeps all keys of layers that slide.
    linear = "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or [])
    room = {} if linear else {"cache": transformers.DynamicCache()}
    out = model(**arguments(row, model, prompt, [], positions), use_cache=True, **room)
    cache = out["cache"] if "cache" in out else out["past_key_values"]
    embeddings, places = watch.values["embeddings"][0].numpy(), positions_of(watch, length, row.first)
    places = (places[:, 0].T if places.ndim == 3 else places[0]).numpy()

    pads = np.flatnonzero(prompt.kinds)
    chosen = [0, *pads[:1], *pads[len(pads) // 2 :][:1], *pads[-1:], length // 2, length - 1]
    rows = np.unique(chosen).astype(np.int16)
    embedded = np.unique(np.linspace(0, length - 1, 48).astype(np.int16))
    logits = out.logits[0].numpy()
    arrays = {
        "input_ids": np.array(prompt.ids, np.int16),
        "position_ids": places.astype(np.float32 if places.dtype.kind == "f" else np.int32),
        "rows": rows,
        "logits": logits[rows],
        "embedded": embedded,
        "embeddings": embeddings[embedded],
        **cached(cache, rows),
    }
    for name, value in prompt.inputs.items():
        value = np.asarray(value)
        # Of Phi-3-vision the crops that count; the small whole image is torch's bicubic one.
        if row.family == "phi3_v" and name == "pixel_values":
            counts = [1 + height // 16 * (width // 16) for height, width in prompt.inputs["image_sizes"].tolist()]
            value = np.concatenate([tiles[1:count] for tiles, count in zip(value, counts, strict=True)])
        if row.family in ("mistral3", "pixtral") and name == "pixel_values":
            value = cut(value, np.asarray(prompt.inputs["image_sizes"]), 4)
        arrays[f"digest.{name}"] = digest(value)

    # Greedily, by a whole forward for every token; a placeholder ends it, since it would ask for features.
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < STEPS and tokens[-1] < IMAGE:
        tokens.append(int(model(**arguments(row, model, prompt, tokens, positions)).logits[0, -1].argmax()))
    return arrays | {"generated": np.array(tokens, np.int16)}


def positions_alone(row: Row, model: Any, watch: Watch, prompt: Prompt) -> dict[str, np.ndarray]:
    """Returns ids, positions and grids of images of a prompt whose forward ends there."""
    watch.stop = True
    try:
        model(**arguments(row, model, prompt, [], None))
    except Watched:
        places = positions_of(watch, len(prompt.ids), 0)[:, 0].T.numpy()
    watch.stop = False
    places = places.astype(np.float32 if places.dtype.kind == "f" else np.int16)
    grids = {name: value.numpy() for name, value in prompt.inputs.items() if name == "image_grid_thw"}
    return {"input_ids": np.array(prompt.ids, np.int16), "position_ids": places, **grids}


def make(family: str, row: Row) -> None:
    """Writes the folder of one family."""
    out = GOLDENS / family
    model, shapes = build(row, out)
    watch, processor = Watch(model), processor_of(row)
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (out / "shapes.json").write_text("{\n" + lines + "\n}\n")

    arrays: dict[str, np.ndarray] = {}
    prompts = {case: Prompt(row, model, processor, case, parts) for case, parts in row.cases.items()}
    longest = max(len(prompt.ids) for prompt in prompts.values())
    for case, prompt in prompts.items():
        # Of one length, where that is no long one: a compiler has one shape to do.
        prompt.put(*words((longest - len(prompt.ids)) * (longest < LONG), 7))
        arrays |= {f"{case}.{name}": value for name, value in run(row, model, watch, prompt).items()}
    for case, parts in row.positions.items():
        found = positions_alone(row, model, watch, Prompt(row, model, processor, case, parts))
        arrays |= {f"{case}.{name}": value for name, value in found.items()}
    np.savez_compressed(out / "arrays.npz", **arrays)
    print(f"{family:>20} {(out / 'arrays.npz').stat().st_size / 1024:7.1f} KiB")


def pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def namings(family: str) -> dict[str, str]:
    """Returns what transformers 5 calls a file's tensors within: the pattern of each of its names → of the file's."""
    with tempfile.TemporaryDirectory() as folder:
        model, shapes = build(FAMILIES[family], Path(folder))
        model.save_pretrained(folder, save_original_format=False)
        theirs = load_file(Path(folder) / "model.safetensors")
    files = {value.tobytes(): name for name, value in redraw_all(shapes).items()}
    return {pattern(name): pattern(files.get(value.tobytes(), "fused")) for name, value in sorted(theirs.items())}


def make_held_out(family: str) -> None:
    """Writes `held_out.npz`: ten settings' configurations and shapes, logits of the last token, sums of two others'."""
    arrays: dict[str, np.ndarray] = {}
    written = []
    for number, row in enumerate(settings(family)):
        with tempfile.TemporaryDirectory() as folder:
            model, shapes = build(row, Path(folder))
            written.append({"config": json.loads((Path(folder) / "config.json").read_text()), "shapes": shapes})
        found = run(row, model, Watch(model), Prompt(row, model, processor_of(row), "held", row.cases["held"]))
        kept = {"input_ids": found["input_ids"], "position_ids": found["position_ids"], "last": found["logits"][-1]}
        kept |= {"rows": found["rows"][:2], "sums": found["logits"][:2] @ DIRECTIONS[: found["logits"].shape[1]]}
        arrays |= {f"{number}.{name}": value for name, value in kept.items()}
    arrays["written"] = np.frombuffer(json.dumps(written).encode(), np.uint8)
    np.savez_compressed(GOLDENS / family / "held_out.npz", **arrays)
    print(f"{family:>20} {(GOLDENS / family / 'held_out.npz').stat().st_size / 1024:7.1f} KiB held out")


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        if not sys.argv[1:]:
            found = {family: namings(family) for family in NAMED}
            (GOLDENS / "namings.json").write_text(json.dumps(found, indent=1) + "\n")
        for family in sys.argv[1:] or FAMILIES:
            make(family, FAMILIES[family])
            if family in AXES:
                make_held_out(family)


if __name__ == "__main__":
    main()
