"""The suite of repairs: one quick batch of one backbone, its rows, and the page that is written from a run."""

import json
import math

import numpy as np
import pytest

from evals.harness.frame import Rows
from evals.repairs import document, suite
from evals.repairs.arms import QUESTION_METHODS, SHARES, STORED, TOKEN_METHODS, repair_arms
from evals.small_task import KINDS
from evals.small_task.reader import EVICTED, VISIBLE
from evals.trained import MAIN, shipped
from kvpatch_jax.repair import REPAIRS, SHARED_FORMS, STORED_FORMS
from models import load


def record(arm, probe=VISIBLE, cluster=0, kl=(0.0, 0.0), predicted=(1, 2), **more):
    about = {"backbone": "m", "probe": probe, "arm": arm, "kl": list(kl), "predicted": list(predicted), **more}
    if arm == suite.REFERENCE:
        about |= {"kind": [KINDS.index("chain")] * 2, "cluster": [cluster] * 2, "answer": [1, 2]}
    return about


def test_every_repair_has_an_arm_and_every_budget():
    arms = repair_arms(1000, 6, {share: (share,) * 6 for share in SHARES[:4]})
    names = [arm.name for arm in arms]
    assert len(set(names)) == len(names)
    # Whole prompts have two of their own, which a single page cannot be asked; other forms of stored bytes have another
    # suite.
    elsewhere = {"mpic", "two_step_reuse", *SHARED_FORMS} | set(STORED_FORMS) - set(STORED)
    assert {arm.method.partition(".")[0] for arm in arms} == set(REPAIRS) - elsewhere
    for method in (*TOKEN_METHODS, *QUESTION_METHODS, *STORED):
        assert [f"{method}.budget={share:g}" in names for share in SHARES] == [True] * 5
    assert [arm.asks for arm in arms if arm.method in QUESTION_METHODS] == [True] * 20


def test_rows_hold_the_patch_against_others_of_the_same_bytes_and_questions():
    parts = []
    for cluster in range(4):
        own = [
            record(suite.REFERENCE, cluster=cluster),
            record("blind", cluster=cluster, kl=(1.0, 2.0), predicted=(3, 2), costs={"flops": 0.0}),
            record("patched.budget=0.1", cluster=cluster, kl=(0.1, 0.2)),
            record("first_k.budget=0.1", cluster=cluster, kl=(0.6, 0.8), predicted=(3, 2), costs={"flops": 0.1}),
        ]
        if cluster:  # an arm that one batch lacks is left out
            own.append(record("quantised.budget=0.1", cluster=cluster))
        parts.append({"records": own})
    rows = suite.rows_of(parts)
    found = Rows({"rows": rows}, "m")
    kind = "chain"
    assert found.get(VISIBLE, "patched.budget=0.1", f"eta.{kind}").value == pytest.approx(0.9)
    assert found.get(VISIBLE, "first_k.budget=0.1", f"eta.{kind}").value == pytest.approx(1 - 1.4 / 3)
    assert found.get(VISIBLE, "first_k.budget=0.1", f"flip_recover.{kind}").value == 0.0
    minus = found.get(VISIBLE, "first_k.budget=0.1", f"patch_minus.kl.{kind}")
    assert minus.value == pytest.approx(0.15 - 0.7)
    assert minus.high < 0
    assert found.get(VISIBLE, "first_k.budget=0.1", "flops").value == 0.1
    assert not found.get(VISIBLE, "quantised.budget=0.1", f"eta.{kind}").n


def test_the_page_shows_the_published_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = (document.ROOT / document.PAGE).read_text()
    for text in document.sections(kept).values():
        assert text in page
    assert kept["config"]["parts_done"] == kept["config"]["parts"]


@pytest.mark.slow
def test_a_batch_has_every_arm_in_both_settings_and_reprefills_lose_nothing():
    backbone = load(shipped(MAIN), dtype="float32")
    plain = dict.fromkeys(SHARES[:4], (0.1,) * backbone.layout.layers)
    records = list(suite.records_of(backbone, MAIN, 5, 0, 4, plain))
    arms = {probe: {r["arm"] for r in records if r["probe"] == probe} for probe in (VISIBLE, EVICTED)}
    assert arms[VISIBLE] == arms[EVICTED]
    by_arm = {r["arm"]: r for r in records if r["probe"] == VISIBLE}
    for name in ("full_reprefill", "prefix_caching", "encoder_cached_reprefill"):
        assert max(by_arm[name]["kl"]) < 1e-4
    assert np.mean(by_arm["blind"]["kl"]) > 0.3
    assert by_arm["prefix_caching"]["costs"]["flops"] == pytest.approx(1.0)
    for name, own in by_arm.items():
        if name.endswith("budget=0.5") and name.partition(".")[0] in ("first_k", "oracle_delta", "random_tokens"):
            assert own["costs"]["flops"] == pytest.approx(0.5, abs=0.02)
        assert all(math.isfinite(value) for value in own["kl"])
    # A question over its own row reads what it reads over the row of its context.
    blind, unread = by_arm["blind"], by_arm["prcr.budget=0.5"]
    assert len(blind["kl"]) == len(unread["kl"])
