"""Names of the same tensor in different releases: one table of what names begin with, for every family.

Checked against what transformers 5.23 writes with `save_original_format` True and False and reads back; names that
transformers 4 wrote are those it still reads.
"""

from collections.abc import Callable

from kvpatch_jax.errors import WeightsError

from .source import RenamedSource, TensorSource

PREFIXES = (
    # transformers' modules (save_original_format=False, state dictionaries of training scripts).
    ("model.language_model.", "model."),
    ("model.language_model.", "language_model.model."),
    ("model.visual.", "visual."),
    ("model.audio_tower.", "audio_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.image_newline", "image_newline"),
    ("lm_head.", "language_model.lm_head."),
    # What transformers 4 wrote.
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_model.vision_model.", "model.vision_model."),
    # An Omni's thinker beside its talker; Phi-3-V's second name of its embedding.
    ("thinker.", ""),
    ("model.vision_embed_tokens.wte.", "model.embed_tokens."),
)
"""What a name begins with in some files, and in the family's entries."""

SILENT = (
    # Buffers, and what predicts further tokens.
    *("*inv_freq", "*.rotary_emb.*", "*.position_ids", "mtp.*", "*.mtp.*", "*.mtp_*"),
    # An Omni's talker, and the marks of its audio encoder, which its forward never reads.
    *("talker.*", "token2wav.*", "code2wav.*", "*audio_tower.audio_bos_eos_token.*"),
    # Pooling heads of towers; Phi-3-V's second embedding; a whole release's tower, of which a text model is read.
    *("*vision_model.head.*", "*vision_tower.head.*", "vision.attn_pool.*", "*.vision_embed_tokens.wte.weight"),
    *("model.visual.*", "*.self_attn.[kv]_proj.weight", "*.self_attn.[kv]_norm.weight"),
)
"""Patterns (`fnmatch`) of tensors in released files that no model reads; the last two are of layers of Gemma 4 that
read another's KV.
"""

Known = Callable[[str], bool]
"""Whether a name, as the family's entries use them, is one of the model's tensors."""


def translate(known: Known, name: str) -> str | None:
    """Turns a tensor's name in a file into the one of the family's entries; None where it is of another model."""
    if known(name):
        return name
    ours = (new + name.removeprefix(old) for old, new in PREFIXES if name.startswith(old))
    return next(filter(known, ours), None)


def rename(source: TensorSource, known: Known) -> TensorSource:
    """Gives the tensors of a file the names of the family's entries; names that are not known stay.

    Raises:
      WeightsError: two tensors that are the same one of the model.
    """
    names: dict[str, str] = {}
    for old in source.tensors:
        new = translate(known, old) or old
        new = old if new in source.tensors else new
        if new in names:
            raise WeightsError(
                f"{source.origin}: got tensors {names[new]!r} and {old!r} for {new!r}; expected one of them"
            )
        names[new] = old
    return source if all(new == old for new, old in names.items()) else RenamedSource(source, names)
