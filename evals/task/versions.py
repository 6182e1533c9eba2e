"""Pages that were met behind several antecedents: the same sheets with other values, so every answer that needs both
page and sheets is another one. The probe is the number of antecedents, of which one is served.
"""

import dataclasses

import numpy as np

from kvpatch_jax.models import ModelBackbone
from kvpatch_jax.repair import OtherAntecedent, pooled_embedding

from .contexts import UNITS, VALUES, Contexts
from .dataset import DOCUMENTS, TaskBatch, drawn
from .questions import KINDS
from .reading import image_tokens


def revalued(contexts: Contexts, rng: np.random.Generator) -> Contexts:
    """Gives every entry of the sheets another value and another unit."""
    value = (contexts.sheet_value + rng.integers(1, VALUES, contexts.sheet_value.shape)) % VALUES
    unit = (contexts.sheet_unit + rng.integers(1, UNITS, contexts.sheet_unit.shape)) % UNITS
    return dataclasses.replace(contexts, sheet_value=value, sheet_unit=unit)


def behind(backbone: ModelBackbone, contexts: Contexts) -> OtherAntecedent:
    """Prefills the contexts, and returns the pages' KV and what is known of their antecedents."""
    prefix, tokens, _ = image_tokens(backbone, contexts)
    page = prefix.page
    kv = {name: value[:, :, page] for name, value in backbone.prefill(tokens).kv.items()}
    return OtherAntecedent(kv, pooled_embedding(tokens.take(0, page.start)))


class VersionsDataset:
    """Pages behind several antecedents; see `harness.datasets.Dataset`."""

    name, kinds, probes = "bytes", KINDS, ("1", "2", "4", "16")

    def batch(self, backbone: ModelBackbone, probe: str, number: int, size: int, seed: int) -> TaskBatch:
        """Draws one batch of pages, served behind the first of their antecedents."""
        contexts, questions = drawn(DOCUMENTS.name, "4", number, size, seed)
        batch = TaskBatch(backbone, contexts, questions, clusters=number * 100_000 + np.arange(size))
        rng = np.random.default_rng([seed, number, 1])
        others = [behind(backbone, revalued(contexts, rng)) for _ in range(int(probe) - 1)]
        batch.splice = batch.splice.replace(others=tuple(others))
        return batch


VERSIONS = VersionsDataset()
