"""The suite of bytes: accounting by hand, numbers of antecedents, forms against the library's, parts, page."""
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportArgumentType=false

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.bytes import document, fronts, suite
from evals.bytes.arms import base_arm, kv_arm, patch_arm
from evals.bytes.forms import FormFactory
from evals.bytes.sources import scene_chunks
from evals.bytes.versions import MetChunks, ScoredItems
from evals.harness.frame import Rows, measured_row
from evals.harness.intervals import Interval
from evals.harness.parts import PlannedPart
from evals.runner import run_recorded
from evals.trained import MAIN, shipped
from kvpatch_jax.core import ops
from kvpatch_jax.errors import InputError
from models import load


@pytest.fixture(scope="module")
def chunks(tmp_path_factory):
    backbone = load(shipped(MAIN), dtype="float32")
    return scene_chunks(backbone, 3, 0, 2, 3, tmp_path_factory.mktemp("images"))


# -------------------------------------------------------------------------------------------------------- accounting


def test_bytes_of_all_antecedents_are_what_each_keeps_and_a_share_of_what_is_kept_once():
    assert fronts.total_share(0.25, 0.0, 16) == 0.25
    assert fronts.total_share(0.05, 0.33, 1) == pytest.approx(0.38)
    assert fronts.total_share(0.05, 0.32, 4) == pytest.approx(0.13)
    assert fronts.total_share(0.05, 0.32, 16) == pytest.approx(0.07)


@pytest.mark.slow
def test_kv_in_few_bits_counts_codes_scales_and_least_values(chunks):
    factory = FormFactory(chunks)
    layout, tokens = factory.layout, factory.tokens
    features = layout.channels[0].features
    assert factory.kv_bytes == 2 * layout.layers * tokens * features * 2
    # Keys: 5 bits are planes of 4 and 1, a bfloat16 scale and least value for each feature. Values: 4 bits, for each
    # token. Rows are whole bytes.
    keys = tokens * (features // 2 + -(-features // 8)) + 4 * features
    values = tokens * (features // 2) + 4 * tokens
    form = kv_arm("k5v4gall").make(factory, 1, 2)
    assert form.bytes.stored == layout.layers * (keys + values)
    assert (form.bytes.canonical, form.bytes.shared, form.bytes.inputs) == (0, 0, 0)
    shares = suite.costs_of(factory, form)
    assert shares["kept"] == form.bytes.stored / factory.kv_bytes
    assert shares["once"] == 0


# ------------------------------------------------------------------------------------------------------------- forms


@pytest.mark.slow
def test_a_patch_within_a_budget_is_that_of_the_library(chunks):
    """One chunk of the batch, by `encode_chunk` and `form_patch`: as many bytes, and the same numbers."""
    factory, version, share = FormFactory(chunks), 1, 0.1
    page = chunks.readers[version].page
    form = patch_arm("mean", "k4v4g32", "int4", share=share).make(factory, version, 3)
    mean = factory.base("mean", version, 3)
    kv = {name: jnp.asarray(value[:, 0]) for name, value in mean.items()}
    chunk = kvp.encode_chunk(dataclasses.replace(page.page, kv=kv), "k4v4g32")
    conditioned = {name: jnp.asarray(value[:, 0]) for name, value in chunks.conditioned[version].items()}
    patch = kvp.form_patch(chunk, conditioned, kvp.ByteBudget.share(chunk, share), ["in front"], dtype="int4")
    served = {}
    for name, added in ops.correction(factory.layout, dict(patch.factors)).items():
        served[name] = np.asarray(kvp.decode_chunk(chunk).kv[name]) + np.asarray(added)
    assert patch.nbytes <= share * factory.kv_bytes
    assert abs(patch.nbytes - form.bytes.stored) <= 0.01 * factory.kv_bytes
    for name, value in served.items():
        error = np.linalg.norm(value - np.asarray(conditioned[name]))
        own = np.linalg.norm(np.asarray(form.kv[name][:, 0]) - np.asarray(conditioned[name]))
        assert own == pytest.approx(error, rel=0.05)


# -------------------------------------------------------------------------------------------------- records and rows


class Echo:
    """A reader whose KL is the distance of the cache's values from KV(B|A), chunk by chunk."""

    def __init__(self, reader):
        self.page, self.seen = reader.page, 0

    def score(self, cache):
        self.seen += 1
        expected = np.asarray(self.page.reference["v"])
        apart = np.abs(np.asarray(cache["v"]) - expected).max(axis=(0, 2, 3, 4)).astype(float)
        return ScoredItems(apart, apart > 1, None, np.arange(len(apart)))


@pytest.mark.slow
def test_records_have_every_version_and_number_of_antecedents_once(chunks):
    readers = [Echo(reader) for reader in chunks.readers[:2]]
    arms = [base_arm("canonical"), kv_arm("16"), kv_arm("k2v2g32"), base_arm("mean")]
    made = MetChunks(readers, chunks.embeddings[:2])
    records = {r["arm"]: r for r in suite.records_of(made, arms, (1, 2), "small", "m", ["a", "b"], None)}
    assert set(records) == {"base.canonical.16", "kv.16", "kv.k2v2g32", "base.mean.16@1", "base.mean.16@2"}
    # Of fewer antecedents than versions, the first group alone is measured.
    assert records.pop("base.mean.16@1")["cluster"] == ["a", "b"]
    assert all(record["cluster"] == ["a", "b", "a", "b"] for record in records.values())
    assert max(records["kv.16"]["kl"]) < 0.05
    assert min(records["base.canonical.16"]["kl"]) > max(records["kv.k2v2g32"]["kl"]) > 0.05
    assert (readers[0].seen, readers[1].seen) == (5, 4)


def record(arm, kl, cluster, **costs):
    zeros = [0.0] * len(kl)
    return {"arm": arm, "probe": "text", "model": "m", "kl": kl, "flips": zeros, "right": [], "cluster": cluster} | {
        "costs": {"kept": 0.0, "once": 0.0, "moved": 0.0, "serving": 0.0, "forming": 0.0, **costs}
    }


def parts_by_hand():
    first = [
        record("base.canonical.16", [1.0, 3.0], ["a", "b"], once=1.0),
        record("kv.k5v4gall", [0.1, 0.1], ["a", "b"], kept=0.30),
        record("kv.k4v4gall", [0.6, 0.6], ["a", "b"], kept=0.26),
        record("base.mean.16@2", [0.5], ["a"], once=1.0),
        record("patch.mean.k5v5gall.int4.share=0.05@4", [0.1, 0.1], ["a", "b"], kept=0.05, once=0.32),
        record("patch.canonical.k5v5gall.int4.share=0.1", [0.1, 0.1], ["a", "b"], kept=0.10, once=0.32),
    ]
    second = [
        record("base.canonical.16", [2.0, 2.0], ["c", "d"], once=1.0),
        record("kv.k5v4gall", [0.1, 0.1], ["c", "d"], kept=0.30),
        record("gear.bits=4", [0.0, 1.0], ["c", "d"], kept=0.4),
    ]
    return [{"records": first}, {"records": second}]


def test_eta_is_over_the_items_that_an_arm_was_measured_on():
    rows = Rows({"rows": suite.rows_of(parts_by_hand())}, "m")
    assert rows.get("text", "kv.k5v4gall", "eta").value == pytest.approx(1 - 0.4 / 8)
    assert rows.get("text", "gear.bits=4", "eta").value == pytest.approx(1 - 1 / 4)
    assert rows.get("text", "kv.k4v4gall", "eta").value == pytest.approx(1 - 1.2 / 4)
    assert rows.get("text", "gear.bits=4", "eta").n == 2
    assert rows.get("text", "base.mean.16@2", "eta").value == pytest.approx(0.5)


def test_the_winner_at_each_number_of_antecedents_has_the_fewest_bytes_at_the_quality():
    found = {own.antecedents: own for own in fronts.winners({"rows": suite.rows_of(parts_by_hand())}, "m", "text")}
    assert found[1].winner.row == "kv.k5v4gall"
    assert found[4].winner.row == "patch.mean.k5v5gall.int4.share=0.05@4"
    assert found[4].ratio == pytest.approx(0.13 / 0.30)
    assert found[4].within
    # A mean over four is no base of sixteen: there the canonical is what was measured.
    assert found[16].ours.row == "patch.canonical.k5v5gall.int4.share=0.1"
    assert found[16].ratio == pytest.approx(0.12 / 0.30)
    assert found[16].within is False
    assert found[2].ratio == pytest.approx(0.26 / 0.30)
    assert found[4].rival is None


def test_a_front_has_no_point_with_more_bytes_and_less_quality():
    arm = kv_arm("k4v4gall")
    points = []
    for total, eta in ((0.3, 0.9), (0.1, 0.5), (0.2, 0.4), (0.3, 0.95), (0.4, 0.95)):
        points.append(fronts.Point(arm, "row", "text", total, Interval(eta, math.nan, math.nan, 2)))
    assert [(point.total, point.eta.value) for point in fronts.front(points)] == [(0.1, 0.5), (0.3, 0.95)]


def test_sixteen_antecedents_are_read_where_they_were_measured():
    rows = suite.rows_of(parts_by_hand())
    for arm, total in (("patch.mean.k5v5gall.int4.share=0.05@16", 0.05), ("kv.k5v4gall", 0.3)):
        rows.append(measured_row("text.16", "m", arm, "eta", Interval(0.94, 0.9, 0.96, 9)))
        rows.append(measured_row("text.16", "m", arm, "kept", Interval(total, total, total, 1)))
        rows.append(measured_row("text.16", "m", arm, "once", Interval(0.0, 0.0, 0.0, 1)))
    found = fronts.points_of({"rows": rows}, "m", "text", 16)
    assert {(point.row, point.probe) for point in found} == {
        ("patch.mean.k5v5gall.int4.share=0.05@16", "text.16"),
        ("kv.k5v4gall", "text.16"),
        ("gear.bits=4", "text"),
    }


# -------------------------------------------------------------------------------------------------- parts and the page


def test_a_run_resumes_after_its_finished_parts_and_refuses_another_plan(tmp_path):
    calls, parts = [], parts_by_hand()

    def planned(number):
        def measure(_):
            calls.append(number)
            yield from parts[number]["records"]

        return PlannedPart(f"part {number}", measure, 0)

    dataset = suite.small_dataset([], 7, suite.SMALL_QUICK)
    dataset = dataclasses.replace(dataset, parts=[planned(0), planned(1)], config={**dataset.config, "model": "m"})
    first = run_recorded(dataset, tmp_path, 1)
    assert (first["config"]["parts_done"], calls) == (1, [0])
    whole = run_recorded(dataset, tmp_path)
    assert (whole["config"]["parts_done"], calls) == (2, [0, 1])
    other = dataclasses.replace(dataset, config={**dataset.config, "seed": 8})
    with pytest.raises(InputError, match="seed"):
        run_recorded(other, tmp_path)


def test_the_page_of_bytes_shows_the_kept_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text(encoding="utf-8"))
    page = (document.ROOT / document.PAGE).read_text(encoding="utf-8")
    for text in document.sections(kept).values():
        assert text in page
    assert (document.ROOT / document.PICTURE).exists()


@pytest.mark.slow
def test_a_page_is_written_from_a_run(tmp_path):
    rows = suite.rows_of(parts_by_hand())
    config = {"model": "m", "plan": {}, "parts_done": 1, "parts": 2}
    (tmp_path / "run" / "text").mkdir(parents=True)
    results = {"config": config, "rows": rows}
    (tmp_path / "run" / "text" / "results.json").write_text(json.dumps(results).replace("NaN", "null"))
    for folder in ("docs/experiments", "docs/pictures"):
        (tmp_path / folder).mkdir(parents=True)
    page = document.ROOT / document.PAGE
    (tmp_path / document.PAGE).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    text = document.write(tmp_path / "run", tmp_path).read_text(encoding="utf-8")
    assert "Not finished (text): 1 of 2 parts" in text
    assert "N = 4: **patch.mean.k5v5gall.int4.share=0.05@4** keeps 13.0%" in text
    assert (tmp_path / document.PICTURE).stat().st_size > 10_000
    with pytest.raises(ValueError, match="expected a run"):
        document.write(tmp_path / "docs", tmp_path)


@pytest.mark.slow
def test_a_quick_part_ranks_more_bits_and_larger_patches_higher():
    plan = dataclasses.replace(suite.SMALL_QUICK, contexts=4, batch=4)
    dataset = suite.small_dataset(suite.instances_of(MAIN), 5, plan)
    rows = Rows({"rows": suite.rows_of([{"records": list(part.measure([]))} for part in dataset.parts])}, MAIN)

    def eta(arm):
        return rows.get("small", arm, "eta").value

    assert eta("base.canonical.16") == 0
    assert eta("kv.16") > 0.99
    assert eta("kv.k4v4gall") > eta("kv.k2v2gall") > eta("kv.k1v1g32")
    assert eta("patch.mean.k4v4gall.int4.share=0.07@2") > 0.9
    assert rows.get("small", "patch.mean.k4v4gall.int4.share=0.07@2", "kept").value <= 0.07
