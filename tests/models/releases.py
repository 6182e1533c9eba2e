"""Releases whose files the tests have, and what becomes of each: read, with or without a warning, or refused and why.

`corpus/` has configurations as released (see its README), `released/` a few more.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from kvpatch_jax.models.families.architectures import ALIASES
from kvpatch_jax.models.families.registry import FAMILIES

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Release:
    """A release.

    Attributes:
      name: on the hub. source: where its files were read. config: `config.json`.
      partial: whether keys of it are left out. preprocessor: `preprocessor_config.json`.
      index: of `model.safetensors.index.json`: "names" of tensors that were seen, and "total_size" (bytes) or
        "total_parameters" where known.
    """

    name: str
    source: str
    config: dict[str, Any]
    partial: bool = False
    preprocessor: dict[str, Any] = dataclasses.field(default_factory=dict)
    index: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """What it calls its class, or its `model_type` where it names none."""
        (name, *_) = self.config.get("architectures") or [self.config.get("model_type")]
        return str(name)

    @property
    def known(self) -> bool:
        """Whether its architecture is built."""
        types = {family.model_type for family in FAMILIES.values()}
        name = ALIASES.get(self.architecture, self.architecture)
        return name in FAMILIES or name in types

    @property
    def bare(self) -> bool:
        """Whether no more than its architecture is known, which says something only while that is not built."""
        return self.config.keys() <= {"architectures", "model_type"}

    @property
    def quantised(self) -> bool:
        """Whether its weights are packed."""
        return any("quantization_config" in table for table in (self.config, self.config.get("text_config", {})))

    @property
    def refusal(self) -> str | None:
        """A regular expression of the message that refuses it; None where it is read."""
        if self.quantised:
            return "got weights quantised by .*: dequantise the checkpoint first|quantization_config"
        if self.name in REFUSED:
            return REFUSED[self.name]
        return None if self.known else rf"config\.json: got architectures \['{self.architecture}'\]; expected one of \["


def _corpus() -> list[Release]:
    found = []
    for file in sorted((HERE / "corpus").glob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found.append(Release(entry.pop("release"), **entry))
    return found


def _files() -> list[Release]:
    found = []
    for path in sorted((HERE / "released").glob("*.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        found.append(
            Release(NAMES.get(path.stem, path.stem), f"tests/models/released/{path.name}", config, path.stem in CUT)
        )
    return found


NAMES = {
    "internvl3_5_hf_finetune": "a fine-tune of OpenGVLab/InternVL3_5-1B-HF",
    "qwen25vl_4_53_finetune": "a fine-tune of Qwen2.5-VL-7B saved by transformers 4.53",
    "qwen25vl_model_name": "a fine-tune of Qwen2.5-VL-7B that names its model",
    "qwen25vl_trainer_keys": "a fine-tune of Qwen2.5-VL-7B with keys of a trainer",
    "qwen25vl_unsloth": "a fine-tune of Qwen2.5-VL-7B by Unsloth",
    "qwen2_5_7b": "Qwen/Qwen2.5-7B",
    "qwen3_omni_5_7": "Qwen/Qwen3-Omni-30B-A3B-Instruct as transformers 5.7 writes it",
}
"""What the files of `released/` are of; by the name of the file where that says it."""
CUT = {"qwen3_omni_5_7"}

NOT_BUILT = {
    "LlavaLlamaForCausalLM": "LLaVA's own format",
    "Llama4ForConditionalGeneration": "Llama 4",
    "Gemma2ForCausalLM": "Gemma 2",
    "ChatGLMModel": "GLM-4 in its authors' format",
    "GptOssForCausalLM": "gpt-oss",
    "LlamaForSequenceClassification": "a reward model",
}
"""Architectures of the corpus that are not built, and what they are. Take a line out when its family lands: its
releases are read then, or have a reason in `REFUSED`."""

REFUSED = {
    "Alibaba-NLP/gte-Qwen2-7B-instruct": "got is_causal False, which is not built",
    "mistralai/Devstral-Small-2-24B-Instruct-2512": r"got type 'ministral3', whose queries are scaled",
    "mistralai/Ministral-3-8B-Instruct-2512": r"got type 'ministral3', whose queries are scaled",
}
"""Releases that are refused for another reason than their architecture."""

WARNED = {
    "Qwen/Qwen2.5-Omni-7B-AWQ": {"enable_audio_output_"},
    "humain-ai/ALLaM-7B-Instruct-preview": {"internal_version"},
    "a fine-tune of Qwen2.5-VL-7B by Unsloth": {"unsloth_fixed", "unsloth_version"},
    "a fine-tune of Qwen2.5-VL-7B that names its model": {"model_name"},
    "a fine-tune of Qwen2.5-VL-7B with keys of a trainer": {"image_aspect_ratio"},
}
"""Keys that nothing reads, of releases that have any."""

RELEASES = {
    (release.name, release.source): release
    for release in (*_corpus(), *_files())
    if not (release.bare and release.known)
}
"""By name and source: some are there as released and as fields."""
