"""Make `namings.json`: what transformers (5.23) calls the tensors of the tiny models with save_original_format=False.

Run it in an environment with torch and transformers: `python tests/goldens/make_namings.py`. See README.md beside it.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import transformers
from safetensors.numpy import load_file, save_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.goldens.load import write_checkpoint  # noqa: E402

IMAGES = {
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "deepseek_vl": "DeepseekVLForConditionalGeneration",
    "deepseek_vl_hybrid": "DeepseekVLHybridForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "pixtral": "LlavaForConditionalGeneration",
}
TEXTS = ("qwen3_moe", "deepseek_v2", "deepseek_v3")


def digest(tensors: dict[str, np.ndarray]) -> str:
    """Of names and bytes, in order of names."""
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        found.update(f"{name} {list(tensors[name].shape)} ".encode())
        found.update(np.ascontiguousarray(tensors[name]).tobytes())
    return found.hexdigest()


def without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def load(directory: Path, architecture: str):
    """The model. Fails where a tensor is missing or left over."""
    cls = getattr(transformers, architecture)
    model, report = cls.from_pretrained(directory, output_loading_info=True)
    assert not [*report["missing_keys"], *report["unexpected_keys"]], report
    return model


def written(directory: Path, architecture: str, out: Path) -> dict:
    """What transformers writes of a checkpoint: pattern of each name there → of the checkpoint's own tensor."""
    load(directory, architecture).save_pretrained(out, save_original_format=False)
    ours, theirs = load_file(directory / "model.safetensors"), load_file(out / "model.safetensors")
    of = {value.tobytes(): name for name, value in ours.items()}
    names = {name: of.get(value.tobytes(), "fused") for name, value in theirs.items()}
    patterns = {without_numbers(name): without_numbers(known) for name, known in names.items()}
    return {"digest": digest(theirs), "names": dict(sorted(patterns.items()))}


def reads(directory: Path, architecture: str, old: str, new: str, out: Path) -> None:
    """Fails where transformers does not read the checkpoint under names that begin otherwise, as the same model."""
    before = load(directory, architecture).state_dict()
    tensors = load_file(directory / "model.safetensors")
    renamed = {re.sub(f"^{re.escape(old)}", new, name): value for name, value in tensors.items()}
    out.mkdir()
    (out / "config.json").write_text((directory / "config.json").read_text())
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})
    after = load(out, architecture).state_dict()
    assert set(renamed) != set(tensors)
    assert all(bool((after[name] == before[name]).all()) for name in before)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for family, architecture in IMAGES.items():
            found[family] = written(write_checkpoint(family, root / family), architecture, root / f"{family}_out")
        for family in ("deepseek_vl", "deepseek_vl_hybrid"):
            assert all(theirs == ours for theirs, ours in found.pop(family)["names"].items())
        for family in TEXTS:
            made = write_checkpoint(family, root / family)
            architecture = json.loads((made / "config.json").read_text())["architectures"][0]
            found[family] = written(made, architecture, root / f"{family}_out")
        for family in ("llava", "llava_next"):
            reads(root / family, IMAGES[family], "vision_tower.", "vision_tower.vision_model.", root / f"{family}_old")
        tower = "model.vision_model."
        for family in ("deepseek_vl", "deepseek_vl_hybrid"):
            reads(root / family, IMAGES[family], tower, f"{tower}vision_model.", root / f"{family}_old")
    (HERE / "namings.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
