"""Every family, by its architecture's name in `config.json`."""

from . import (
    deepseek_ocr2,
    deepseek_vl,
    deepseek_vl2,
    gemma3,
    gemma4,
    glm4v,
    internvl,
    kimi_vl,
    llava,
    llava_onevision,
    mistral3,
    omni,
    phi3_v,
    qwen2_vl,
    qwen3_vl,
    smolvlm,
)
from .family import Family
from .text_families import TEXT_FAMILIES

FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *qwen2_vl.FAMILIES.values(),
        *qwen3_vl.FAMILIES.values(),
        *omni.FAMILIES.values(),
        *llava.FAMILIES.values(),
        llava_onevision.FAMILY,
        *kimi_vl.FAMILIES.values(),
        *glm4v.FAMILIES.values(),
        mistral3.FAMILY,
        *deepseek_vl.FAMILIES.values(),
        deepseek_ocr2.FAMILY,
        deepseek_vl2.FAMILY,
        internvl.FAMILY,
        phi3_v.FAMILY,
        smolvlm.FAMILY,
        gemma3.FAMILY,
        gemma4.FAMILY,
        *TEXT_FAMILIES.values(),
    )
}
"""Which family reads a configuration, by the architectures that it names. A family of your own is one more entry."""
