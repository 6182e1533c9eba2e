"""The window's operations on the sheets task: what is placed, what is meant, and what exact patches must give back."""

import json
from collections.abc import Iterator

import jax
import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.arms.reused_page import joined
from evals.probes.item_records import answer_records, items_from
from evals.probes.results_table import ProbeItems
from evals.sheet_windows import document, suite
from evals.sheet_windows.image_window import WindowImages, load_images
from evals.sheet_windows.operations import (
    BLIND,
    OPERATIONS,
    REFERENCE,
    SLIDE_KINDS,
    MeasuredPart,
    reordered,
    slide_questions,
    with_foreign,
)
from evals.sheets_task.packed_answers import items_of
from evals.sheets_task.task import COLOURS, KINDS, SIZES, VOCABULARY, ask, latest, sample_contexts
from evals.trained import ROOT
from models import load

CONTEXTS = 3


def tiny_images(kind: str, name: str) -> WindowImages:
    """Loads tiny contexts' images on an instance that ships."""
    contexts = sample_contexts(np.random.default_rng(3), CONTEXTS, SIZES["tiny"])
    return load_images(load(ROOT / kind / name, dtype="float32"), contexts, np.arange(CONTEXTS))


@pytest.fixture(scope="module")
def hybrid() -> WindowImages:
    """Images on the hybrid."""
    return tiny_images("sheets_qwen3_5", "qwen3_5")


@pytest.mark.slow
def test_images_one_by_one_are_one_prompt(hybrid: WindowImages):
    """KV of images prefilled behind one another, joined at their places, is what one forward over all leaves."""
    window = hybrid.window([*hybrid.sheets, hybrid.page])
    parts = window.prefilled()
    found = joined([window.placed(place, kv) for place, kv in enumerate(parts)])

    tokens = [image.tokens.shift(np.int32(window.start(place))) for place, image in enumerate(window.images)]
    whole = jax.tree.map(lambda *columns: np.concatenate(columns, axis=1), *tokens)
    expected = kvp.to_engine(hybrid.backbone.layout, hybrid.backbone.prefill(whole).kv, whole.positions, 0)
    assert set(found) == set(expected) == {"k", "v", "map", "state", "tail"}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=2e-4)

    # The page prefilled behind sheets as they are kept is the same once more.
    front = hybrid.window(hybrid.sheets)
    again = front.behind(parts[:-1], hybrid.page)
    for name, value in again.items():
        np.testing.assert_allclose(value, parts[-1][name], atol=2e-4)


def measured(images: WindowImages, operation: str) -> Iterator[tuple[MeasuredPart, dict[str, np.ndarray]]]:
    """Yields an operation's settings with every arm's KL of each question that counts."""
    for part in OPERATIONS[operation](images, np.random.default_rng(1)):
        valid = items_of(part.questions).valid
        assert valid.any()
        reference = part.answers[REFERENCE]
        yield part, {arm: said.divergence_from(reference)[valid] for arm, said in part.answers.items()}


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_patches_of_full_rank_give_re_prefill_back(name: str, operation: str):
    """Tiny images have fewer tokens than a patch has directions: the context's own patch leaves no difference."""
    images, settings = tiny_images(f"sheets_{name}", name), 0
    for part, kl in measured(images, operation):
        settings += 1
        assert ("orbit.rows_only" in kl) == (name == "qwen3_5" and operation == "reorder")
        # In a reordered window sheets are canonicals, and behind a turnover they remember what left.
        if operation == "slide" or part.part == "turnover=0":
            assert kl["oracle"].max() < 1e-4 < kl[BLIND].max()
        assert kl["oracle"].mean() < kl[BLIND].mean()
        if part.part == "turnover=0":
            np.testing.assert_array_equal(kl["stale"], kl["fresh"])
    assert settings == {"reorder": 2, "slide": 1, "recall": 3}[operation]


def test_meaning_follows_the_sheets():
    """Reordered and foreign sheets define what the sheets that stand there do, the last one counting."""
    contexts = sample_contexts(np.random.default_rng(0), 4, SIZES["4"])
    order, replaced = np.array([2, 0, 1]), np.array([False, True, False])
    for changed, sheet_of in (
        (reordered(contexts, order), lambda row, place: (row, order[place])),
        (with_foreign(contexts, replaced), lambda row, place: ((row + replaced[place]) % 4, place)),
    ):
        fill, stripe, times = latest(changed)
        for row in range(4):
            known: dict[int, tuple[int, int, int]] = {}
            for place in range(3):
                source, sheet = sheet_of(row, place)
                shown = zip(
                    contexts.sheet_address[source, sheet],
                    contexts.sheet_fill[source, sheet],
                    contexts.sheet_stripe[source, sheet],
                    strict=True,
                )
                for address, own_fill, own_stripe in shown:
                    seen = known.get(int(address), (0, 0, 0))[2]
                    known[int(address)] = int(own_fill), int(own_stripe), seen + 1
            for address in range(fill.shape[1]):
                expected = known.get(address, (-1, -1, 0))
                assert (fill[row, address], stripe[row, address], times[row, address]) == expected
    np.testing.assert_array_equal(changed.page_address, contexts.page_address)


@pytest.mark.parametrize("gone", [1, 2])
def test_questions_behind_a_slide_are_about_what_stays_or_what_left(gone: int):
    contexts = sample_contexts(np.random.default_rng(4), 8, SIZES["4"])
    questions = slide_questions(contexts, np.random.default_rng(2), gone)
    assert {SLIDE_KINDS[kind] for kind in questions.kind} == set(SLIDE_KINDS)

    seen = 0
    for row in range(len(contexts)):
        sheets = [set(contexts.sheet_address[row, sheet].tolist()) for sheet in range(3)]
        left, stay = set().union(*sheets[:gone]), set().union(*sheets[gone:])
        for number, kind in enumerate(questions.kind):
            (token,) = np.flatnonzero((questions.own == number) & (questions.step == 1))
            answer = int(questions.answer[row, token])
            if answer < 0 or SLIDE_KINDS[kind] not in ("survivor", "evicted"):
                continue
            address = int(contexts.page_address[row, questions.cell[row, number]])
            assert (address in stay) == (SLIDE_KINDS[kind] == "survivor")
            assert address in left | stay
            # The colour that the last sheet with this address shows.
            shown = [
                (sheet, place)
                for sheet in range(3)
                for place in np.flatnonzero(contexts.sheet_address[row, sheet] == address)
            ]
            sheet, place = shown[-1]
            by_fill = answer < VOCABULARY.fill + COLOURS
            expected = (
                VOCABULARY.fill + contexts.sheet_fill[row, sheet, place]
                if by_fill
                else VOCABULARY.stripe + contexts.sheet_stripe[row, sheet, place]
            )
            assert answer == expected
            seen += 1
    assert seen > 40


def test_records_give_the_items_back():
    """Records through JSON are the items that were measured, batch behind batch."""
    contexts = sample_contexts(np.random.default_rng(0), 4, SIZES["4"])
    questions = ask(contexts, np.random.default_rng(1), {"page": 2, "chain": 3})
    asked, rng = items_of(questions), np.random.default_rng(2)

    class Said:
        def __init__(self) -> None:
            self.predicted = rng.integers(0, 2, asked.valid.shape)
            self.kl = rng.random(asked.valid.shape)

        def divergence_from(self, reference: "Said") -> np.ndarray:
            return 0 * self.kl if reference is self else self.kl

    direct, records = ProbeItems("probe", "whole", "none"), []
    for batch in range(2):
        answers, clusters = {"none": Said(), "whole": Said()}, 4 * batch + np.arange(4)
        direct.add(asked, clusters, answers)
        records += json.loads(json.dumps(list(answer_records({"part": "x"}, asked, clusters, answers, "whole"))))
    assert [record["arm"] for record in records] == ["whole", "none"] * 2
    assert {record["part"] for record in records} == {"x"}

    found = items_from(records, "probe", "whole", "none", KINDS)
    for column in ("kind", "cluster", "answer"):
        np.testing.assert_array_equal(found.column(column), direct.column(column))
    for arm in ("whole", "none"):
        np.testing.assert_array_equal(found.arm(arm)[0], direct.arm(arm)[0])
        np.testing.assert_allclose(found.arm(arm)[1], direct.arm(arm)[1], rtol=1e-3)


def test_rows_pool_orders_and_keep_settings_apart():
    """A kind's mean stands beside its seeds; settings are arms of their own."""
    head = {"probe": "slide", "kinds": list(SLIDE_KINDS)}
    parts = []
    for name, right in (("a", 1), ("b", 0), ("c", 1)):
        for part in ("gone=1", "gone=2"):
            asked = {"kind": [2, 2, 3], "cluster": [0, 1, 1]}
            whole = {
                **head,
                "instance": name,
                "part": part,
                "arm": REFERENCE,
                **asked,
                "predicted": [1] * 3,
                "kl": [0] * 3,
            }
            blind = {**head, "instance": name, "part": part, "arm": BLIND, "predicted": [right] * 3, "kl": [0.5] * 3}
            parts.append({"part": f"{name}{part}", "records": [whole, blind]})
    rows = suite.rows_of(parts, {"a": "x", "b": "x", "c": "y"})
    value = {
        (row["model"], row["arm"], row["metric"]): row["value"] for row in rows if row["probe"] == "sheet_windows.slide"
    }
    assert value["a", "blind.gone=2", "accuracy.survivor"] == 1
    assert value[suite.mean_of("x"), "blind.gone=1", "accuracy.evicted"] == 0.5
    assert value["c", "re-prefill.gone=1", "kl.survivor"] == 0
    assert not any(model == suite.mean_of("y") for model, *_ in value)

    # Of a run that was stopped, what is measured is shown.
    config = {"kinds": {"a": "x", "b": "x", "c": "y", "d": "z"}}
    assert {kind: seeds for kind, (_, seeds) in document.models_of({"config": config, "rows": rows}).items()} == {
        "x": 2,
        "y": 1,
    }
    one = suite.rows_of(parts[:1], config["kinds"])
    [line, *_] = document.operation_table({"config": config, "rows": one}, "slide")[1]
    assert line[:2] == ["`re-prefill.gone=1`", "1.000 [1.000, 1.000]"]


def test_instances_are_those_of_both_architectures():
    names = [path.name for path in suite.instances("all")]
    assert {"qwen3_vl", "qwen3_5"} <= set(names)
    assert not any("no_window" in name for name in names)
    assert [path.name for path in suite.instances("sheets_qwen3_5")] == [name for name in names if "3_5" in name]


def test_page_shows_what_was_kept():
    """The page's tables are those of the rows beside it."""
    kept = json.loads((document.ROOT / document.KEPT).read_text(encoding="utf-8"))
    page = (document.ROOT / document.PAGE).read_text(encoding="utf-8")
    assert f"<!-- {document.MARK} -->\n\n{document.section(kept)}\n\n<!-- /{document.MARK} -->" in page
