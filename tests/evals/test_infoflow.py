"""InfoFlow KV's experiments: splits, contexts, what methods read, constructed cases, rows, and the page."""

import dataclasses
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals import small_task
from evals.bench.checkpoints import random_backbone, tiny_config
from evals.harness.frame import Rows
from evals.infoflow import document, image_arms, suite, text_arms
from evals.infoflow.contexts import CODES, PEOPLE, PROSE, TASKS, TextContext, draw_context
from evals.infoflow.plan import (
    GEOMETRIES,
    IMAGE_METHODS,
    METHODS,
    PASSAGES,
    QUICK,
    REORDER,
    REORDERED_BASELINE,
    SPLITS,
    arm_name,
    band_name,
    bands,
)
from evals.infoflow.splits import block_mask, fixed_parts, local_positions, passage_parts, row_parts
from evals.small_task import scenes
from evals.small_task.reader import SceneReader
from evals.trained import MAIN, shipped
from kvpatch_jax.errors import InputError
from kvpatch_jax.repair import infoflow, scaled_queries
from models import ModelBackbone, load

PLAN = dataclasses.replace(QUICK, context=40, passages=4, asked=4, follow=4, band=1)
ENDS = (11, 19, 33, 40)


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return random_backbone(tiny_config("LlamaForCausalLM"))


def context_of(seed: int = 0) -> TextContext:
    ids = np.random.default_rng(seed).integers(3, 250, 48).astype(np.int32)
    return TextContext(ids[:40], passage_parts(ENDS), ids[40:44], ids[44:], 4)


def covers_once(parts: Any, tokens: int) -> bool:
    return [token for first, last in parts for token in range(first, last)] == list(range(tokens))


# ---------------------------------------------------------------------------------------------------------- splits


def test_splits_cover_every_token_exactly_once():
    rng = np.random.default_rng(0)
    for _ in range(30):
        tokens, size, least = (int(value) for value in rng.integers(1, 90, 3))
        assert covers_once(fixed_parts(tokens, size), tokens)
        ends = sorted({tokens, *rng.integers(1, tokens + 1, 5).tolist()})
        parts = passage_parts(ends, least)
        assert covers_once(parts, tokens)
        assert {last for _, last in parts} <= set(ends)
        assert len(parts) == 1 or min(last - first for first, last in parts) >= least

        rows, width = (int(value) for value in rng.integers(1, 12, 2))
        before, behind, count = *rng.integers(0, 3, 2).tolist(), int(rng.integers(1, rows + 1))
        is_cell = np.array([False] * before + [True] * rows * width + [False] * behind)
        parts = row_parts(is_cell, rows, count)
        assert covers_once(parts, len(is_cell))
        assert len(parts) == count
        # Every cut stands between two rows.
        assert all((first - before) % width == 0 for first, _ in parts[1:])


def test_chunks_of_a_block_mask_see_themselves_alone():
    parts = passage_parts([2, 5])
    expected = np.zeros((5, 5), bool)
    expected[:2, :2], expected[2:, 2:] = np.tri(2, dtype=bool), np.tri(3, dtype=bool)
    assert (block_mask(parts) == expected).all()
    assert local_positions(parts).tolist() == [0, 1, 0, 1, 2]


# -------------------------------------------------------------------------------------------------------- contexts


class LetterTokenizer:
    """A backbone that reads four letters as one token."""

    def prepare(self, content: Any) -> dict[str, np.ndarray]:
        text = str(content[0])
        found = [text[first : first + 4] for first in range(0, len(text), 4)]
        return {"input_ids": np.array([[sum(map(ord, letters)) for letters in found]])}


@pytest.mark.parametrize("task", TASKS)
def test_contexts_are_of_one_size_and_their_passages_cover_them(task):
    plan = dataclasses.replace(QUICK, context=400, passages=5)
    drawn = [draw_context(LetterTokenizer(), plan, task, number) for number in range(4)]
    for context in drawn:
        assert len(context.ids) == 400
        assert 0 < len(context.asked) <= plan.asked
        assert len(context.asked) + len(context.behind) == plan.asked + plan.follow
        assert 0 < context.scored <= plan.follow
        for split in SPLITS:
            assert covers_once(context.split(split, plan), 400)
        assert len(context.split("fixed", plan)) == 5
        if task != PROSE:
            assert len(context.passages) == 5
        assert bool(context.choices) == (task == PEOPLE)
    again = draw_context(LetterTokenizer(), plan, task, 1)
    assert (again.ids == drawn[1].ids).all()
    assert len({context.ids.tobytes() for context in drawn}) == 4


def test_an_unknown_task_is_refused(unchecked):
    with pytest.raises(InputError, match="expected one of codes, people, prose"):
        draw_context(LetterTokenizer(), QUICK, "nope", 0)


# ------------------------------------------------------------------------------------------- what is read and chosen


@pytest.mark.slow
def test_no_method_reads_what_follows_the_prompt(backbone):
    context = context_of()
    other = context._replace(behind=context.behind[::-1].copy() + 1)
    arms = {name: result for name, _, result in text_arms.repairs_of(backbone, PLAN, context, CODES)}
    again = {name: result for name, _, result in text_arms.repairs_of(backbone, PLAN, other, CODES)}
    assert list(arms) == list(again)
    for name, result in arms.items():
        assert (result.positions == again[name].positions).all(), name
        assert all((result.cache[channel] == again[name].cache[channel]).all() for channel in result.cache)

    # What is asked is read by the methods that say so, and by no other.
    asked = context._replace(asked=context.asked[::-1].copy() + 3)
    third = {name: result for name, _, result in text_arms.repairs_of(backbone, PLAN, asked, CODES)}
    changed = {name for name, result in arms.items() if result.positions.tolist() != third[name].positions.tolist()}
    assert any(".infoflow" in name for name in changed)
    assert all(".infoflow" in name for name in changed)

    # All arms are there, at one number of tokens; EPIC's shares are of each chunk.
    expected = [arm_name(split, name) for split in SPLITS for name in METHODS]
    expected += [arm_name(PASSAGES, f"infoflow.{geometry}") for geometry in GEOMETRIES]
    expected += [arm_name(PASSAGES, REORDER)]
    expected += [arm_name(PASSAGES, band_name(band)) for band in bands(backbone.layout.layers, PLAN.band)]
    assert set(arms) == set(expected)
    for name, result in arms.items():
        count = 0 if name.endswith("blind") else 6
        assert abs(len(result.positions) - count) <= (len(ENDS) // 2 if "first_k" in name else 0), name


@pytest.mark.slow
def test_bands_choose_and_recompute_what_infoflow_does_with_their_layers(backbone):
    context = context_of(1)
    splice = text_arms.splice_of(backbone, context.ids, context.passages, context.asked)
    for (first, last), result in zip(
        bands(backbone.layout.layers, 1), text_arms.band_sweep(backbone, splice, 1).values(), strict=True
    ):
        expected = text_arms.result_of(splice, infoflow(backbone, splice, 0.15, layers=range(first, last + 1)))
        assert result.positions.tolist() == expected.positions.tolist()
        for name, value in expected.cache.items():
            np.testing.assert_allclose(result.cache[name], value, atol=1e-5)


def planted(backbone: ModelBackbone, layer: int, chunk: int) -> Any:
    """Gives one chunk, at one layer, keys that the prompt's last query looks for; lower layers stay as they are."""
    context = context_of(2)
    splice = text_arms.splice_of(backbone, context.ids, context.passages, context.asked)
    assert splice.question is not None
    queries = backbone.attention(splice.question, splice.cache, layers=(layer,), reduce=scaled_queries)[0, 0, -1]
    channel, (first, last) = backbone.layout.channels[0], splice.parts[chunk]
    key = np.asarray(queries).reshape(channel.heads, -1, queries.shape[-1])
    key = 400 * (key / np.linalg.norm(key, axis=-1, keepdims=True)).sum(axis=1)

    kv = {name: np.array(value[:, :, first:last]) for name, value in splice.cache.items()}
    kv[channel.name][layer] = key
    cache = dict(splice.cache)
    cache[channel.name] = cache[channel.name].at[layer, :, first:last].set(kv[channel.name][layer])
    return splice.replace(cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "chunk"), [(0, 2), (2, 1)])
def test_the_sweep_finds_the_layer_that_looks_for_a_chunk(backbone, layer, chunk):
    splice = planted(backbone, layer, chunk)
    first, last = splice.parts[chunk]
    found = text_arms.band_sweep(backbone, splice, 1)
    inside = [((result.positions >= first) & (result.positions < last)).mean() for result in found.values()]
    assert inside[layer] == 1.0
    # Layers below do not know; those above read what it found.
    assert all(share < 1.0 for share in inside[:layer])


def test_answers_are_compared_over_the_tokens_that_count():
    context = context_of()._replace(behind=np.array([1, 0, 2, 2]), scored=2)
    expected, found = (
        np.log(np.array(rows))
        for rows in (
            [[0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [1 / 3] * 3, [1 / 3] * 3],
            [[0.2, 0.7, 0.1], [0.3, 0.6, 0.1], [0.9, 0.05, 0.05], [0.9, 0.05, 0.05]],
        )
    )
    same = text_arms.compared(context, expected, expected)
    assert same == {"kl": 0.0, "flips": 0.0, "right": 1.0}
    other = text_arms.compared(context, expected, found)
    assert other["kl"] == pytest.approx((0.6 * math.log(2) - 0.3 * math.log(2)) / 2, rel=1e-4)
    assert (other["flips"], other["right"]) == (0.5, 0.0)
    assert text_arms.compared(context._replace(choices=(1, 2)), expected, found)["right"] == 1.0
    assert text_arms.compared(context._replace(choices=(2, 1)), expected, found)["right"] == 0.0


@pytest.mark.slow
def test_reading_behind_a_whole_prefill_is_the_reference(backbone):
    context = context_of(3)
    whole = text_arms.splice_of(backbone, context.ids, ((0, 40),), context.asked)
    apart = text_arms.splice_of(backbone, context.ids, context.passages, context.asked)
    expected = text_arms.reference_logits(backbone, context, 4)
    found = text_arms.read(backbone, context, 4, [whole.cache, apart.cache])
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert np.abs(found[1] - expected).max() > 1e-2
    np.testing.assert_allclose(text_arms.reference_logits(backbone, context, 4, whole.tokens), expected, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- cut images


@pytest.mark.slow
def test_parts_of_a_page_are_prefilled_alone():
    backbone = load(shipped(MAIN), dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        scene, rng = scenes.scene_at(backbone, 5, 0, Path(folder), 2)
        reader = SceneReader(scene, small_task.ask(scene.contexts, rng, {"page": 1, "chain": 1}))
    whole = image_arms.cut_page(reader, image_arms.page_parts(reader, 1))
    cut = image_arms.cut_page(reader, image_arms.page_parts(reader, 2))
    start, (_, middle) = reader.page.slots.start, cut.parts[0]
    blind = reader.page.splice()
    for name, value in cut.cache.items():
        np.testing.assert_allclose(whole.cache[name], blind.cache[name], atol=1e-4)
        # The first part sees what it saw; the second no longer sees the first.
        same, other = slice(0, start + middle), slice(start + middle, None)
        np.testing.assert_allclose(value[:, :, same], whole.cache[name][:, :, same], atol=1e-4)
        assert np.abs(np.asarray(value[1:, :, other] - whole.cache[name][1:, :, other])).max() > 1e-2
    assert cut.conditioned is None
    assert cut.recorded is None


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK.backbones)
def test_a_batch_of_images_has_every_method_and_cut(name):
    backbone = load(shipped(name), dtype="float32")
    plan = dataclasses.replace(QUICK, images=4, batch=4)
    records = list(image_arms.records_of(backbone, name, plan, 0))
    assert records[0]["arm"] == "baseline"
    assert len(records) == 1 + len(plan.cuts) * len(IMAGE_METHODS)
    by_arm = {(record["cut"], record["arm"]): record for record in records}
    counts = {record["count"] for record in records if record["arm"] not in ("baseline", "blind", "first_k")}
    assert len(counts) == 1
    for parts in plan.cuts:
        assert np.mean(by_arm[parts, "blind"]["kl"]) > 0.3
        assert np.mean(by_arm[parts, "infoflow"]["kl"]) < np.mean(by_arm[parts, "blind"]["kl"])
        assert abs(by_arm[parts, "first_k"]["count"] - counts.copy().pop()) <= parts


@pytest.mark.pretrained
def test_a_text_has_every_arm(tmp_path):
    plan = dataclasses.replace(QUICK, texts=(("people", 2),), backbones=())
    described = suite.dataset(plan)
    records = list(described.parts[0].measure([]))
    assert {record["cluster"] for record in records} == {0, 1}
    arms = {record["arm"] for record in records}
    assert {"baseline", "fixed.blind", f"{PASSAGES}.{REORDER}", f"{PASSAGES}.{REORDERED_BASELINE}"} <= arms
    assert all(math.isfinite(record["kl"]) for record in records)
    assert described.rows([{"records": records}])


# ------------------------------------------------------------------------------------------------------ rows, page


def test_rows_of_texts_hold_arms_against_blind_reuse_and_infoflow():
    records = []
    for task, clusters in (("codes", 3), ("prose", 2)):
        for cluster in range(clusters):
            for arm, kl in (("baseline", 0.0), ("fixed.blind", 0.4), ("fixed.infoflow", 0.1), ("fixed.first_k", 0.2)):
                about = {"task": task, "cluster": cluster, "arm": arm, "flips": kl, "right": 1.0}
                records.append({**about, "kl": kl * (cluster + 1), "mom": 0.5, "max": 0.9, "count": 6})
        if task == "codes":
            records += [{**record, "arm": "fixed.other"} for record in records[-4:-3]] * clusters
    found = Rows({"rows": suite.text_rows(records)}, "smollm2")
    assert found.get("text.codes", "fixed.first_k", "eta").value == pytest.approx(0.5)
    assert found.get("text.all", "fixed.infoflow", "eta").value == pytest.approx(0.75)
    minus = found.get("text.codes", "fixed.first_k", "minus_infoflow.kl")
    assert minus.value == pytest.approx(0.2)
    assert minus.low > 0
    assert found.get("text.all", "fixed.first_k", "mom").value == 0.5
    # What one task lacks has no mean over all.
    assert found.get("text.codes", "fixed.other", "kl").n
    assert not found.get("text.all", "fixed.other", "kl").n


def test_rows_of_images_are_by_kind_and_say_nothing_of_what_is_not_lost():
    records = []
    for cluster in range(3):
        about = {"backbone": "m", "kind": ["page", "chain"], "cluster": [cluster] * 2, "cut": 2, "flips": [0, 1]}
        records.append({**about, "arm": "blind", "kl": [1e-5, 1.0], "right": [1, 0], "count": 0.0})
        records.append({**about, "arm": "infoflow", "kl": [1e-5, 0.25], "right": [1, 1], "count": 15.0})
    found = Rows({"rows": suite.image_rows(records)}, "m")
    assert found.get("image.k=2", "infoflow", "eta.chain").value == pytest.approx(0.75)
    assert not found.get("image.k=2", "infoflow", "eta.page").n
    assert found.get("image.k=2", "infoflow", "accuracy.all").value == 1.0
    assert found.get("image.k=2", "blind", "minus_infoflow.kl.chain").value == pytest.approx(0.75)
    assert found.get("image.k=2", "infoflow", "count").value == 15


def test_bands_cover_every_layer_once():
    for layers, width in itertools.product((1, 6, 30), (1, 3, 4)):
        found = [layer for first, last in bands(layers, width) for layer in range(first, last + 1)]
        assert found == list(range(layers))


def test_the_page_shows_the_published_rows():
    kept = json.loads((document.ROOT / document.KEPT).read_text())
    page = (document.ROOT / document.PAGE).read_text()
    for text in document.sections(kept).values():
        assert text in page
    assert kept["config"]["parts_done"] == kept["config"]["parts"]
