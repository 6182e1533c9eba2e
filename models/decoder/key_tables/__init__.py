"""Which keys of `config.json` are known, by `model_type`; one module per group of families.

A module's `DEFAULTS` name every key that is read, and what an absent one means (None: nothing, or what its reader
derives); its `ONLY` those of which one value is built, which is what an absent one means; its `AUTHORS`, where it has
any, the tables of authors' own formats, which no class of transformers reads. `class_keys.json` lists the keys that
some class reads.
"""

from typing import Any

from . import (
    deepseek_ocr2,
    deepseek_vl2,
    gemma,
    glm_vl,
    kimi,
    mistral_vl,
    paper_models,
    plain_towers,
    qwen_omni,
    qwen_vl,
    texts,
)

MODULES = (
    texts,
    qwen_vl,
    qwen_omni,
    plain_towers,
    kimi,
    gemma,
    glm_vl,
    mistral_vl,
    paper_models,
    deepseek_ocr2,
    deepseek_vl2,
)

DEFAULTS: dict[str, dict[str, Any]] = {kind: table for module in MODULES for kind, table in module.DEFAULTS.items()}
ONLY: dict[str, dict[str, Any]] = {kind: table for module in MODULES for kind, table in module.ONLY.items()}
AUTHORS: frozenset[str] = frozenset().union(*(getattr(module, "AUTHORS", ()) for module in MODULES))
