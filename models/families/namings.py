"""The ways in which each family's tensors are named in files, that of the family's entries first.

Checked against what transformers 5.23 writes with `save_original_format` True and False and reads back; names that
transformers 4 wrote are those it still reads.
"""

from ..checkpoints import Naming, same

RELEASED = "as released"
MODULES = "as transformers' modules (save_original_format=False, state dictionaries of training scripts)"


def _split(*own: str) -> tuple[Naming, ...]:
    """Returns the naming of families whose files say `language_model`, `vision_tower`, `multi_modal_projector` and
    these `own` parts.
    """
    parts = ("language_model.", "vision_tower.", "multi_modal_projector.", *own)
    modules = {f"model.{part}": part for part in parts}
    modules |= {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    # transformers 5 leaves the second word of the tower's names out.
    tower, inner = "vision_tower.", "vision_tower.vision_model."
    return (
        same("as transformers 5 saves them", *parts),
        Naming(RELEASED, (*((part, part) for part in parts), (inner, tower))),
        Naming(MODULES, tuple(modules.items())),
        Naming(f"{MODULES} of version 4", (*modules.items(), (f"model.{inner}", tower))),
    )


def _siglip_inside(*own: str) -> tuple[Naming, ...]:
    """Returns the naming of DeepSeek-VL's families, with these `own` parts beside those that both have."""
    parts = ("model.language_model.", "model.vision_model.", "model.aligner.", "lm_head.", *own)
    longer = ("model.vision_model.vision_model.", "model.vision_model.")
    return (
        same("as transformers 5 saves them", *parts),
        Naming("as transformers 4 saved them", (*((part, part) for part in parts), longer)),
    )


QWEN2_5_VL = (
    same(RELEASED, "model.", "visual.", "lm_head."),
    Naming(MODULES, (("model.language_model.", "model."), ("model.visual.", "visual."), ("lm_head.", "lm_head."))),
)
QWEN3_5_TEXT = (
    same("as transformers saves a model without a tower", "model.", "lm_head.", "mtp."),
    Naming(
        "as transformers saves a text model that it read out of a whole release",
        (
            ("model.language_model.", "model."),
            ("model.visual.", "model.visual."),
            ("lm_head.", "lm_head."),
            ("mtp.", "mtp."),
        ),
    ),
)
LLAVA = _split()
LLAVA_NEXT = _split("image_newline")
INTERNVL = _split()
GEMMA3 = _split()
DEEPSEEK_VL = _siglip_inside()
DEEPSEEK_VL_HYBRID = _siglip_inside(
    "model.high_res_vision_model.",
    "model.high_res_vision_neck.",
    "model.high_res_vision_proj.",
    "model.high_res_vision_alpha",
)
