"""Settings of segment reuse that are measured, and the sizes of the suite."""

import dataclasses
from typing import Any, NamedTuple

from kvpatch_jax.segment_reuse import ReuseThresholds, SegmentIndexOptions

from .transcripts import TranscriptPlan


class StoreSpec(NamedTuple):
    """What a store of segments depends on: L_reuse, precision, and W tokens of left context."""

    reuse_layers: int
    storage: Any = "bfloat16"
    context: int = 64

    def options(self) -> SegmentIndexOptions:
        """Makes the index's options. Budgets are ample: eviction is tested elsewhere."""
        return SegmentIndexOptions(
            self.reuse_layers, storage=self.storage, context=self.context, budget=1 << 34, generations=4
        )


class ReuseSetting(NamedTuple):
    """A store and the thresholds of a prefill over it."""

    name: str
    store: StoreSpec
    thresholds: ReuseThresholds


MAIN_SETTING = "main"


def settings(reuse: tuple[int, ...]) -> list[ReuseSetting]:
    """Lists the main setting, with L_reuse = reuse[0], and ablations that differ from it in one thing each."""
    main, store = ReuseThresholds(), StoreSpec(reuse[0])

    def other(name: str, **changes: Any) -> ReuseSetting:
        return ReuseSetting(name, store, dataclasses.replace(main, **changes))

    found = [ReuseSetting(MAIN_SETTING, store, main)]
    found += [ReuseSetting(f"L_reuse = {layers}", StoreSpec(layers), main) for layers in reuse[1:]]
    found += [other("h = 4", halo=4), other("h = 16", halo=16), other("all h tokens probed", probes=main.halo)]
    found += [other("ε = 0.02", epsilon=0.02), other("ρ = 0.25", failing=0.25), other("no test", test=False)]
    found += [other("τ_seg = 0.9", segment=0.9), other("every run, whatever it saves", worthwhile=False)]
    strict = dataclasses.replace(main, context=0.5)
    found += [
        ReuseSetting(f"τ_ctx = 0.5, W = {size}", StoreSpec(reuse[0], context=size), strict) for size in (32, 64, 128)
    ]
    found += [ReuseSetting(word, StoreSpec(reuse[0], word), main) for word in ("int8", "float32")]
    return found


RETRIEVAL, SERVING = TranscriptPlan(count=300, seed=1), TranscriptPlan(count=48, seed=2)


@dataclasses.dataclass(frozen=True)
class SegmentsPlan:
    """Sizes of the suite.

    Attributes:
      retrieval: transcripts that retrieval alone is measured on.
      serving: transcripts that the model reads: the first `warm` fill the store, the next `prompts` are served.
      ablated: prompts of them that every setting serves. cold: prompts served while the store fills.
      first: prompts that are measured before the parts that are not about prompts.
      stable: prompts that are answered in three runs, with other stores. steps: tokens of a continuation.
      reuse: L_reuse of the main setting, then of its ablations.
    """

    retrieval: TranscriptPlan = RETRIEVAL
    serving: TranscriptPlan = SERVING
    warm: int = 12
    prompts: int = 24
    ablated: int = 4
    cold: int = 8
    stable: int = 4
    first: int = 8
    steps: int = 24
    reuse: tuple[int, ...] = (12, 8, 16)


FULL = SegmentsPlan()
QUICK = SegmentsPlan(
    retrieval=TranscriptPlan(count=20, seed=1),
    serving=TranscriptPlan(count=8, seed=2),
    warm=3,
    prompts=2,
    ablated=1,
    cold=2,
    stable=1,
    steps=4,
    reuse=(1,),
)
