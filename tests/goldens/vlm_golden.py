"""What the scripts of the image families share: building a redrawn tiny model, recording it, writing cases.

Imported by `make_<family>.py` only; needs torch and transformers 5.23. See README.md beside this file.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from redraw import redraw_all, standard_values
from safetensors import safe_open
from safetensors.numpy import save_file

HERE = Path(__file__).parent
START, END, IMAGE, VIDEO = 303, 304, 301, 302
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WHOLE = "one_image"  # the case that is kept in full; of the others, three rows of tokens


def build_model(family: str, config, cls, **save_options):
    """The tiny model, every parameter redrawn under the name its Hugging Face file gives it; writes shapes.json."""
    out = HERE / family
    out.mkdir(exist_ok=True)
    config.architectures = [cls.__name__]
    config.save_pretrained(out)
    with tempfile.TemporaryDirectory() as directory:
        cls(config).save_pretrained(directory, **save_options)
        path = Path(directory) / "model.safetensors"
        with safe_open(path, "np") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        save_file(redraw_all(shapes), path, metadata={"format": "pt"})
        model, report = cls.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    write_shapes(family, shapes)
    return model.eval()


def write_shapes(family: str, shapes: dict, name: str = "shapes.json") -> None:
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in shapes.items())
    (HERE / family / name).write_text("{\n" + lines + "\n}\n")


def draw_image(name: str, height: int, width: int, channels: int = 3) -> np.ndarray:
    """A uint8 image [H, W, C]: waves with noise, so that neither resizing nor patch order can hide."""
    rows, columns = np.mgrid[:height, :width]
    base = 128 + 60 * np.sin(rows / 3.0)[..., None] + 40 * np.cos(columns / 2.0)[..., None] * np.arange(1, channels + 1)
    noise = standard_values(name, height * width * channels).reshape(height, width, channels)
    return np.clip(base + 25 * noise, 0, 255).astype(np.uint8)


def draw_pixels(name: str, *shape: int) -> np.ndarray:
    """Numbers that stand for normalised pixels."""
    return standard_values(name, int(np.prod(shape))).reshape(shape).astype(np.float32)


def tokens_of(parts: list, start: int | None = START, end: int | None = END, pad: int = IMAGE) -> torch.Tensor:
    """Ids [1, T] from text lengths (int) and image token counts ((count,) tuples, between start and end tokens)."""
    text = iter((np.arange(400) * 37 + 11) % 290 + 3)
    ids: list[int] = []
    for part in parts:
        if isinstance(part, tuple):
            ids += [*([start] if start is not None else []), *[pad] * part[0], *([end] if end is not None else [])]
        else:
            ids += [int(next(text)) for _ in range(part)]
    return torch.tensor([ids])


class LayerRecorder:
    """Collects, by forward hooks, what the model computes inside."""

    def __init__(self, language, vision: dict, keys: str | None = "k_proj", heads: int = 2) -> None:
        self.values: dict[str, list[np.ndarray]] = {}
        self.heads = heads
        language.layers[0].register_forward_pre_hook(self.enter, with_kwargs=True)
        for layer in language.layers:
            layer.register_forward_hook(self.store("hidden"))
            if keys and hasattr(layer, "self_attn"):
                getattr(layer.self_attn, keys).register_forward_hook(self.store("k_phase_free"))
        for name, modules in vision.items():
            for module in modules:
                module.register_forward_hook(self.store(name))

    def store(self, name: str):
        first = lambda output: output[0] if isinstance(output, tuple) else output
        return lambda module, inputs, output: self.add(name, first(output))

    def add(self, name: str, value: torch.Tensor) -> None:
        self.values.setdefault(name, []).append(value.detach().numpy().copy())

    def enter(self, module, inputs, keywords) -> None:
        self.add("inputs_embeds", inputs[0] if inputs else keywords["hidden_states"])

    def take(self) -> dict[str, np.ndarray]:
        """What one prefill recorded, without the batch axis where there is one row."""
        values, self.values = self.values, {}
        out = {name: np.stack(value) for name, value in values.items()}
        out["inputs_embeds"] = out["inputs_embeds"][0, 0]
        out["hidden"] = out["hidden"][:, 0]
        if "k_phase_free" in out:
            keys = out["k_phase_free"][:, 0]
            out["k_phase_free"] = keys.reshape(*keys.shape[:2], self.heads, -1)
        return out


def caches_of(cache, names=("k", "v")) -> dict[str, np.ndarray]:
    """Keys (after RoPE) and values as [layer, T, K, H]; for MLA their names are ckv and kpe."""
    first, second = names
    return {
        first: np.stack([layer.keys[0].transpose(0, 1).numpy() for layer in cache.layers]),
        second: np.stack([layer.values[0].transpose(0, 1).numpy() for layer in cache.layers]),
    }


def prefill(
    model, recorder: LayerRecorder, input_ids: torch.Tensor, position_ids: torch.Tensor, names=("k", "v"), **extra
):
    """One forward with explicit positions ([1, T] or [3, 1, T]). Returns the arrays of the case and the cache."""
    recorder.values.clear()
    out = model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **extra)
    arrays = recorder.take() | caches_of(out.past_key_values, names)
    arrays |= {"logits": out.logits[0].numpy(), "input_ids": input_ids[0].numpy().astype(np.int32)}
    ids = position_ids[:, 0].T if position_ids.ndim == 3 else position_ids[0]
    arrays["position_ids"] = ids.numpy().astype(np.int32)
    return arrays, out.past_key_values


def decode(model, cache, logits: np.ndarray, first: int, axes: int, steps: int = 4) -> dict[str, np.ndarray]:
    """Greedy cached decode from position `first`: tokens fed, positions, and the logits [steps, V] that follow."""
    tokens, positions, rows = [], [], []
    token = int(logits[-1].argmax())
    for step in range(steps):
        shape = (3, 1, 1) if axes == 3 else (1, 1)
        out = model(
            input_ids=torch.tensor([[token]]),
            position_ids=torch.full(shape, first + step),
            past_key_values=cache,
            use_cache=True,
        )
        tokens.append(token)
        positions.append(first + step)
        rows.append(out.logits[0, -1].numpy())
        token = int(rows[-1].argmax())
    return {
        "decode_tokens": np.array(tokens, np.int32),
        "decode_positions": np.array(positions, np.int32),
        "decode_logits": np.stack(rows),
    }


def save(family: str, case: str, arrays: dict[str, np.ndarray]) -> None:
    """Write a case. Logits are kept at three tokens (`rows`), and of cases but one image all else per token."""
    length = len(arrays["input_ids"])
    rows = np.array([0, length // 2, length - 1], np.int32)
    if case != WHOLE:
        arrays = {name: value for name, value in arrays.items() if not name.endswith("_blocks")}
        for name in ("hidden", "k", "v", "ckv", "kpe", "k_phase_free"):
            if name in arrays:
                arrays[name] = arrays[name][:, rows]
    arrays = arrays | {"logits": arrays["logits"][rows], "rows": rows}
    np.savez_compressed(HERE / family / f"{case}.npz", **arrays)


def line(length: int) -> torch.Tensor:
    """Positions [1, T]: 0, 1, 2, …"""
    return torch.arange(length)[None]


def run_cases(family: str, model, recorder: LayerRecorder, cases: dict, names=("k", "v"), pad: int = IMAGE) -> None:
    """Cases of families with one-dimensional positions: name → (parts, extra inputs, extra arrays)."""
    for case, (input_ids, inputs, kept) in cases.items():
        positions = line(input_ids.shape[1])
        arrays, cache = prefill(model, recorder, input_ids, positions, names, **inputs)
        inputs = {name: value for name, value in inputs.items() if name != "past_key_values"}
        arrays |= {name: np.asarray(value) for name, value in {**inputs, **kept}.items()}
        arrays = {n: v.astype(np.int32) if v.dtype == np.int64 else v for n, v in arrays.items()}
        if case == WHOLE:
            arrays |= decode(model, cache, arrays["logits"], input_ids.shape[1], 1)
        save(family, case, arrays)
