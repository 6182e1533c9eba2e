"""Reuse of stored segments in prompts of template-heavy agents (segment reuse, a proposal without experiments).

    store = SegmentStore(backbone, SegmentIndexOptions(reuse_layers=8))
    prompt = SegmentPrompt.of_text(text, backbone.tokenizer.encode)
    result = segment_prefill(backbone, prompt, store.tenant("a"), tenant="a")
    store_segments(backbone, prompt, result, store.tenant("a"), tenant="a")

Needs the extra `segments` (datasketch).
"""

from .canonical_text import CanonicalRules as CanonicalRules
from .canonical_text import canonical_units as canonical_units
from .canonical_text import canonicalise as canonicalise
from .reuse_plan import PlannedRun as PlannedRun
from .reuse_plan import plan_runs as plan_runs
from .reuse_plan import run_savings as run_savings
from .reuse_plan import run_test_cost as run_test_cost
from .segment_index import EqualRun as EqualRun
from .segment_index import SegmentIndex as SegmentIndex
from .segment_index import SegmentKey as SegmentKey
from .segment_index import StoredSpan as StoredSpan
from .segment_options import ReuseThresholds as ReuseThresholds
from .segment_options import SegmentIndexOptions as SegmentIndexOptions
from .segment_prefill import PrefillFlops as PrefillFlops
from .segment_prefill import SegmentDecision as SegmentDecision
from .segment_prefill import SegmentPrefill as SegmentPrefill
from .segment_prefill import divergences as divergences
from .segment_prefill import segment_prefill as segment_prefill
from .segment_prefill import store_segments as store_segments
from .segment_store import SegmentCounters as SegmentCounters
from .segment_store import SegmentStore as SegmentStore
from .segment_store import TenantSegments as TenantSegments
from .segmentation import REACT_ANCHORS as REACT_ANCHORS
from .segmentation import Segmentation as Segmentation
from .segmentation import SegmentPrompt as SegmentPrompt
from .segmentation import TokenRange as TokenRange
from .segmentation import as_ids as as_ids
from .segmentation import occurrences as occurrences
from .segmentation import segments as segments
from .segmentation import spans as spans
from .segmentation import windows as windows
from .segmented_lru import SegmentedLRU as SegmentedLRU
from .signatures import SignatureMaker as SignatureMaker
from .signatures import jaccard as jaccard
from .signatures import shingles as shingles
from .stored_kv import StoredKV as StoredKV
from .stored_kv import pack as pack
from .stored_kv import unpack as unpack
