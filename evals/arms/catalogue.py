"""All arms by name, in the order of tables."""

from collections.abc import Collection, Iterator

from kvpatch_jax import KVLayout

from .arm import AlternativeArm, ArmFactory, ArmMaker, make_blind, make_reprefill
from .class_mean import make_class_mean
from .conditioned_kv import conditioned_makers
from .patches import compressed_patch_makers, int8_makers, patch_makers
from .recomputed_tokens import rerun_makers, residual_layers, token_repair_makers
from .reused_page import ReusedPage


def arm_makers(layout: KVLayout) -> dict[str, ArmMaker]:
    """Lists every arm that makes one cache for all questions; those of `query_aware` come on top.

    Of a hybrid model those alone that choose no tokens of the page to run again: what its linear layers made of one
    token stands in no cache. Its pages are kept in no encoding, and in no pooled basis.
    """
    always: dict[str, ArmMaker] = {"re-prefill": make_reprefill, "blind": make_blind, **patch_makers(layout)}
    if layout.parts:
        return {**always, **int8_makers(), **conditioned_makers(layout), **rerun_makers(layout)}
    return {
        **always,
        **token_repair_makers(),
        **compressed_patch_makers(),
        **conditioned_makers(layout),
        **rerun_makers(layout),
        "class_mean": make_class_mean,
    }


def make_arms(page: ReusedPage, names: Collection[str]) -> Iterator[tuple[str, AlternativeArm]]:
    """Makes the arms of these names one after another, in the order of tables; other names are skipped."""
    layout = page.page.layout
    wanted = {name: make for name, make in arm_makers(layout).items() if name in names}
    factory = ArmFactory(page, [layer for layer in residual_layers(layout) if f"residual.layer={layer}" in wanted])
    for name, make in wanted.items():
        yield name, make(factory)
