"""Every family with images beside Qwen2.5-VL, by its architecture's name in `config.json`."""

from . import deepseek_vl, internvl, kimi_vl, llava, qwen3_vl, smolvlm
from .family import Family

IMAGE_FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *qwen3_vl.FAMILIES.values(),
        *llava.FAMILIES.values(),
        *kimi_vl.FAMILIES.values(),
        deepseek_vl.FAMILY,
        internvl.FAMILY,
        smolvlm.FAMILY,
    )
}
