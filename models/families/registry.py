"""Every family, by its architecture's name in `config.json`."""

from . import (
    deepseek_ocr2,
    deepseek_vl,
    deepseek_vl2,
    deepseek_vl_hybrid,
    gemma3,
    gemma4,
    glm4v,
    internvl,
    kimi_vl,
    llava,
    mistral3,
    phi3_v,
    qwen2_5_omni,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_5,
    qwen3_omni,
    qwen3_vl,
    smolvlm,
)
from .family import Family
from .text_families import TEXT_FAMILIES

IMAGE_FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *qwen3_vl.FAMILIES.values(),
        *qwen3_5.FAMILIES.values(),
        *qwen2_5_omni.FAMILIES.values(),
        *qwen3_omni.FAMILIES.values(),
        *llava.FAMILIES.values(),
        *kimi_vl.FAMILIES.values(),
        mistral3.FAMILY,
        *glm4v.FAMILIES.values(),
        deepseek_vl.FAMILY,
        deepseek_vl_hybrid.FAMILY,
        deepseek_ocr2.FAMILY,
        deepseek_vl2.FAMILY,
        internvl.FAMILY,
        phi3_v.FAMILY,
        smolvlm.FAMILY,
        gemma3.FAMILY,
        gemma4.FAMILY,
        qwen2_vl.FAMILY,
    )
}
"""Families with images, beside Qwen2.5-VL."""

FAMILIES: dict[str, Family] = {qwen2_5_vl.FAMILY.architecture: qwen2_5_vl.FAMILY} | IMAGE_FAMILIES | TEXT_FAMILIES
