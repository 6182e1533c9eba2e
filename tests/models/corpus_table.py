"""Write the corpus's tables into docs/reference/backbones.md: `python -m tests.models.corpus_table`."""

import itertools
import re
from pathlib import Path

from models.families.architectures import ALIASES
from models.families.registry import AUTHORS, FAMILIES

from .releases import NOT_BUILT, REFUSED, RELEASES, WARNED, Release

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "backbones.md"
HUB = re.compile(r"[\w.-]+/[\w.-]+")

PAPERS = {
    "Kamera": {
        "Qwen2.5-VL": "Qwen2_5_VLForConditionalGeneration",
        "Qwen3-VL": "Qwen3VLForConditionalGeneration",
        "Kimi-VL": "KimiVLForConditionalGeneration",
        "Qwen2.5-Omni": "Qwen2_5OmniForConditionalGeneration",
        "Qwen3-Omni": "Qwen3OmniMoeForConditionalGeneration",
        "DeepSeek-VL (7B)": "DeepseekVLHybridForConditionalGeneration",
        "InternVL3": "InternVLForConditionalGeneration",
        "LLaVA-1.5": "LlavaForConditionalGeneration",
        "SmolVLM2": "SmolVLMForConditionalGeneration",
        "Phi-3-vision": "Phi3VForCausalLM",
        "DeepSeek-V2 (as MLA's source)": "DeepseekV2ForCausalLM",
    },
    "InfoFlow KV": {
        "Qwen3-14B": "Qwen3ForCausalLM",
        "Llama-3.1-8B-Instruct": "LlamaForCausalLM",
        "GLM-4-9B": "GlmForCausalLM",
        "Qwen3-VL-8B": "Qwen3VLForConditionalGeneration",
    },
    "MPIC": {
        "LLaVA-1.6-vicuna-7B, LLaVA-1.6-mistral-7B": "LlavaNextForConditionalGeneration",
        "LLaVA-1.5": "LlavaForConditionalGeneration",
        "InternVL-2.5": "InternVLChatModel",
    },
    "Cross-query segment reuse": {
        "Llama-2-7B, and a variant tuned for instructions": "LlamaForCausalLM",
        "Mistral-7B, and a variant tuned for instructions": "MistralForCausalLM",
    },
    "VLCache": {
        "Qwen3-VL-8B, -32B": "Qwen3VLForConditionalGeneration",
        "Qwen3-VL-30B-A3B": "Qwen3VLMoeForConditionalGeneration",
        "Qwen2.5-VL-7B, -32B": "Qwen2_5_VLForConditionalGeneration",
    },
}
"""Paper → model that it names → its architecture. Services (Gemini, GPT-4o, Kimi's and DeepSeek's) have no weights."""
SIZES = {"InternVL-2.5": "built with InternViT-300M; InternViT-6B is refused"}
"""What there is to say of a model beside its architecture."""


def status(architecture: str) -> str:
    """Says whether an architecture is built."""
    name = ALIASES.get(architecture, architecture)
    return "built" if name in FAMILIES or name in AUTHORS else "not built: `load` refuses it by name"


def papers() -> list[str]:
    """Returns the table of models that the papers name."""
    rows = ["| paper | model | architecture | status |", "|---|---|---|---|"]
    for paper, models in PAPERS.items():
        for model, architecture in models.items():
            rows.append(f"| {paper} | {model} | `{architecture}` | {SIZES.get(model, status(architecture))} |")
    return rows


def outcome(release: Release) -> str:
    """Says what becomes of a release, and how that was verified."""
    if release.name in REFUSED:
        (key,) = re.findall(r"'(\w+)'", REFUSED[release.name])[:1]
        return f"refused: `{key}`"
    if release.refusal is not None:
        return f"refused: {NOT_BUILT[release.architecture]} is not built"
    keys = ", ".join(f"`{key}`" for key in sorted(WARNED.get(release.name, ())))
    read = "read, from the fields that readers need" if release.partial else "read, as released"
    totals = {"total_size": "bytes and ", "total_parameters": "parameters and "}
    seen = "".join(said for key, said in totals.items() if key in release.index) + "tensor names"
    read += f", with the {seen} of its index" if release.index else ""
    return f"{read}; warns of {keys}" if keys else read


def corpus() -> list[str]:
    """Returns the table of releases, one row per architecture and outcome."""
    key = lambda release: (release.refusal is not None, release.architecture, outcome(release))
    rows = ["| architecture | releases | verified |", "|---|---|---|"]
    for (_, architecture, said), group in itertools.groupby(sorted(RELEASES.values(), key=key), key):
        names = [f"`{release.name}`" if HUB.fullmatch(release.name) else release.name for release in group]
        rows.append(f"| `{architecture}` | {', '.join(sorted(dict.fromkeys(names)))} | {said} |")
    return rows


TABLES = {"## Models of the papers": papers, "## Corpus": corpus}
"""Heading → what makes its table. Sentences around a table are written by hand."""


def with_tables(text: str) -> str:
    """Returns the document with these tables made anew."""
    for heading, make in TABLES.items():
        before, found, after = text.partition(f"\n{heading}\n")
        assert found, heading
        section, line, rest = after.partition("\n## ")
        table = "\n".join(make())
        section = re.sub(r"(?:^\|.*\n?)+", lambda _, table=table: table + "\n", section, count=1, flags=re.MULTILINE)
        text = before + found + section + line + rest
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
