"""Batches over a hybrid model: with whole patches, answers are those of the whole prompt in one forward."""
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from window_oracle import BUCKETS, span_of, tiny

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.batch import BatchItem, answer_batch, read_answers
from models import Buckets


@pytest.mark.slow
@pytest.mark.parametrize("buckets", [None, BUCKETS])
def test_answers_are_those_of_the_whole_prompt(buckets: Buckets | None, tmp_path: Path):
    """Questions behind nothing, behind one image and behind two, in one forward each, whatever their lengths."""
    backbone = tiny("hybrid", buckets)
    draw = np.random.default_rng(5)
    first, second, third = (draw.integers(0, 256, (24, 24, 3), np.uint8) for _ in range(3))
    fronts = [[], [first], [first, second], [third, second, first]]
    asked = [[5, 6, 7, 8, 9], [11, 12], [20, 21, 22]]
    items = [BatchItem(front, question, steps=4, stop=()) for front in fronts for question in asked]
    report = answer_batch(backbone, None, items, out=tmp_path / "answers.jsonl", rank=4096, batch=2)
    assert (report.answered, report.failed) == (len(items), 0)

    lines = {line["item"]: line["ids"] for line in read_answers(tmp_path / "answers.jsonl")}
    found = [lines[item] for item in sorted(lines)]
    expected = []
    for front in fronts:
        for question in asked:
            parts, start = [], 0
            for content in (*front, question):
                tokens = backbone.embed(**backbone.prepare([content]))
                parts.append(tokens.shift(start))
                start += span_of(tokens)
            embeddings = jnp.concatenate([part.embeddings for part in parts], axis=1)
            positions = np.concatenate([np.asarray(part.positions) for part in parts], axis=1)
            expected.append(backbone.generate(Tokens(embeddings, positions), 4, stop=())[0].tolist())
    assert found == expected
