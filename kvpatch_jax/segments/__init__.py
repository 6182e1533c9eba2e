"""Reuse of repeated segments in the prompts of template-heavy agents (segment reuse, a proposal without experiments).

    store = SegmentStore(backbone, SegmentOptions(reuse_layers=8))
    prompt = SegmentPrompt.of_text(text, backbone.tokenizer.encode)
    prefill = segment_prefill(backbone, prompt, store)
    store_segments(backbone, prompt, prefill, store)

Needs the extra `segments` (datasketch).
"""

from .index import SegmentIndex as SegmentIndex
from .index import StoredSpan as StoredSpan
from .options import ReuseThresholds as ReuseThresholds
from .options import SegmentOptions as SegmentOptions
from .plan import PlannedRun as PlannedRun
from .plan import plan_runs as plan_runs
from .serve import SegmentDecision as SegmentDecision
from .serve import SegmentPrefill as SegmentPrefill
from .serve import segment_prefill as segment_prefill
from .serve import store_segments as store_segments
from .store import SegmentStore as SegmentStore
from .text import SegmentPrompt as SegmentPrompt
from .text import canonicalise as canonicalise
from .text import segments as segments
from .text import spans as spans
