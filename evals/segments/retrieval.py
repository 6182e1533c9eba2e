"""Retrieval without a model: which true repeats the index finds in a stream of transcripts, and how fast."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpatch_jax.segment_reuse import ReuseThresholds, SegmentIndex, SegmentIndexOptions, SegmentPrompt

from .transcripts import Transcript, TruthSpan

COVERED = 0.8
"""The share of a repeat's tokens outside volatile spans that must lie in found runs for it to count as recalled."""


def stable_tokens(prompt: SegmentPrompt, span: TruthSpan) -> np.ndarray:
    """Lists the tokens that lie wholly in a span and touch no volatile part of it."""
    assert prompt.starts is not None
    assert prompt.text is not None
    begins = prompt.starts
    ends = np.append(begins[1:], len(prompt.text))
    inside = (begins >= span.start) & (ends <= span.stop)
    for start, stop in span.volatile:
        inside &= (ends <= start) | (begins >= stop)
    return np.flatnonzero(inside)


def measure_retrieval(
    prompts: Sequence[SegmentPrompt],
    transcripts: Sequence[Transcript],
    options: SegmentIndexOptions,
    similarities: Sequence[float],
    contexts: Sequence[float],
) -> list[dict[str, Any]]:
    """Reads transcripts in order, each looked up among those before it: a record per repeat and threshold.

    Args:
      similarities: τ_seg, each with τ_ctx = 0. contexts: τ_ctx, each with the first τ_seg.
    """
    index, seen, records = SegmentIndex(options), set(), []
    thresholds = [ReuseThresholds(segment=value) for value in similarities]
    thresholds += [ReuseThresholds(segment=similarities[0], context=value) for value in contexts]
    for number, (prompt, transcript) in enumerate(zip(prompts, transcripts, strict=True)):
        repeats = [span for span in transcript.spans if span.content and span.content in seen]
        for options_of in thresholds:
            started = time.perf_counter()
            runs = index.runs(prompt, options_of)
            seconds = time.perf_counter() - started
            found = np.zeros(len(prompt.ids), bool)
            for run in runs:
                found[run.start : run.stop] = True
            for span in repeats:
                share = float(found[stable_tokens(prompt, span)].mean())
                records.append(
                    {
                        "transcript": number,
                        "segment": options_of.segment,
                        "context": options_of.context,
                        "kind": span.kind,
                        "edit": span.edit,
                        "recalled": share >= COVERED,
                        "seconds": seconds,
                        "spans": len(index),
                    }
                )
        for span in transcript.spans:
            seen.update(span.gives)
        for stored in index.described(prompt):
            index.add(prompt, stored)
    return records
