"""Methods refuse budgets, settings and splices that they cannot take, with a typed error, before they compute."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax.errors import InputError, LayoutError, ShapeError
from kvpatch_jax.repair import (
    METHODS,
    OtherAntecedent,
    PromptPiece,
    RepairBudget,
    best_schedule,
    recomputed_sensitivity,
    reordered_by_question,
    splice_prompt,
)
from tests.shared.splices import (
    CHUNK,
    LAYERS,
    LONG,
    ROWS,
    SPARE,
    STORED_METHODS,
    TOKEN_METHODS,
    text_tokens,
)

TWO, PLENTY, SMALL = RepairBudget(tokens=2), RepairBudget(kv_bytes=10**7), RepairBudget(kv_bytes=10)
KEEPING = ("anchored", "joint_pair", *STORED_METHODS)
"""Methods that keep bytes."""


@pytest.fixture(scope="module")
def kind(_highest_precision) -> str:
    """Refusals are those of one layout: four layers of grouped queries."""
    return "gqa"


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_another_kind_are_refused_by_name(backbone, spliced, name, unchecked):
    call = lambda **settings: METHODS[name](backbone, spliced[0], 0.5, **settings)
    with pytest.raises(InputError, match=f"{name}: got option 'nonsense'; expected"):
        call(nonsense=1)
    for parameter in inspect.signature(inspect.unwrap(METHODS[name])).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            for wrong in ([1], object(), b"x", True):
                with pytest.raises(InputError, match=rf"{name}\.{parameter.name}: got .*; expected"):
                    call(**{parameter.name: wrong})
    with pytest.raises(InputError, match="got 3; expected a RepairBudget, or a float"):
        METHODS[name](backbone, spliced[0], 3)


def test_budgets_that_cannot_be_are_refused(backbone, spliced, long, unchecked):
    impossible: list[tuple[dict[str, Any], str]] = [
        ({}, "got nothing; expected one of"),
        ({"share": 0.5, "tokens": 2}, "expected one of"),
        ({"share": float("nan")}, "got nan"),
        ({"tokens": -1}, "got -1"),
        ({"kv_bytes": 2.5}, "got 2.5"),
    ]
    for settings, words in impossible:
        with pytest.raises(InputError, match=words):
            RepairBudget(**settings)
    calls: list[tuple[str, Any, str]] = [("blind", 0.5, "expected 0"), ("layer_reprefill", TWO, "share of the layers")]
    calls += [(name, RepairBudget(tokens=CHUNK + 1), f"expected 0 to the {CHUNK}") for name in TOKEN_METHODS]
    calls += [(name, 0.5, "expected all tokens") for name in ("full_reprefill", "prefix_caching")]
    calls += [(name, None, f"{name}.budget: got None") for name in ("first_k", "gear")]
    for name, budget, words in calls:
        with pytest.raises(InputError, match=words):
            METHODS[name](backbone, spliced[0], budget)
    for name in KEEPING:
        with pytest.raises(InputError, match="expected bytes, or a share"):
            METHODS[name](long[0], long[1], TWO)
    for name in ("gear", "cachegen", "quantised", "low_rank", "shadowkv", "anchored", "joint_pair"):
        with pytest.raises(InputError, match=r"budget: got .* bytes; expected at least"):
            METHODS[name](long[0], long[1], SMALL)


def test_splices_that_do_not_fit(backbone, spliced, unchecked):
    splice, chunks = spliced[0], r"repair\.chunks"
    recorded = {name: kv[:, :, :2] for name, kv in splice.recorded.items()}
    for error, words, changes in (
        (InputError, "got 18; expected 0 to 17", {"slots": splice.slots + SPARE + 1}),
        (ShapeError, "embeddings", {"tokens": splice.tokens.take(0, 5)}),
        (ShapeError, "seen", {"seen": jnp.ones((ROWS, 3), bool)}),
        (ShapeError, "length", {"length": jnp.ones((ROWS + 1,), jnp.int32)}),
        (ShapeError, "recorded", {"recorded": recorded}),
        (LayoutError, "repair: cache", {"cache": {"k": splice.cache["k"]}}),
        (InputError, chunks, {"chunks": ((0, CHUNK + 1),)}),
        (InputError, chunks, {"chunks": ((0, 0),)}),
        (InputError, chunks, {"chunks": ((0, 4), (3, 5))}),
    ):
        with pytest.raises(error, match=words):
            METHODS["first_k"](backbone, splice.replace(**changes), TWO)


MISSING = [
    *[(name, {}, {"question": None}, "question: got None") for name in ("infoflow", "prophetkv", "quest", "prcr")],
    *[(name, {}, {"recorded": None}, "recorded: got None") for name in STORED_METHODS],
    *[(name, {}, {"chunks": ((0, LONG),)}, "splice of one chunk") for name in KEEPING],
    *[(name, {}, {"front": None}, "front: got None") for name in ("anchored", "joint_pair")],
    ("layer_reprefill", {"boundary": 2}, {"hidden": {}}, "layer 2"),
    ("anchored", {}, {"others": ()}, r"others: got \(\)"),
    *[("patch", {"base": base}, {"others": ()}, r"others: got \(\)") for base in ("mean", "others")],
    ("layer_reprefill", {"boundary": 5}, {}, "got 5; expected 0 to 4"),
    ("cacheblend", {"check_layer": LAYERS}, {}, "check_layer: got 4; expected 0 to 3"),
    ("infoflow", {"geometry": "tp"}, {}, "geometry"),
    ("quest", {"page": 0}, {}, "page: got 0"),
    ("prcr", {}, {"chunks": ((0, 4),)}, "new text"),
    ("block_differences", {"base": "last"}, {}, "base"),
    ("patch", {"rank": 1000}, {}, "got 1000; expected 0 to"),
    ("patch", {"rank": 2, "dtype": "int9"}, {}, "got dtype 'int9'"),
    ("gear", {"rank": 99}, {}, r"gear\.rank: got 99"),
    ("gear", {"bits": 9}, {}, "got 9 bits"),
    ("cachegen", {"step": 0.0}, {}, "expected a positive number"),
    ("mpic", {}, {}, "ends with new text"),
]


def test_settings_out_of_range_and_inputs_that_are_missing(long, unchecked):
    backbone, splice, _ = long
    for name, settings, changes, words in MISSING:
        with pytest.raises(InputError, match=words):
            METHODS[name](backbone, splice.replace(**changes), PLENTY if name in KEEPING else 0.5, **settings)
    unknown = splice.replace(others=(splice.others[0], OtherAntecedent(splice.others[1].kv)))
    with pytest.raises(InputError, match=r"others\[1\].embedding: got None"):
        METHODS["anchored"](backbone, unknown, PLENTY)


def test_prompts_and_orders_that_cannot_be(prompt, spliced, backbone):
    tokens = text_tokens(backbone, np.arange(1, 9)[None])
    with pytest.raises(InputError, match="expected at least one cached chunk"):
        splice_prompt(backbone, [PromptPiece(tokens)])
    with pytest.raises(InputError, match="expected 0"):
        METHODS["two_step_reuse"](prompt[0], prompt[1], TWO)
    with pytest.raises(InputError, match="at least two"):
        reordered_by_question(backbone, spliced[0])


def test_schedules_that_cannot_be(backbone, spliced, unchecked):
    for sensitivity, ratios, target, words in (
        (np.ones((4, 2)), [0.1, 0.1], 1.0, "ascending"),
        (np.ones((4, 2)), [0.1, 0.2], 0.3, r"at least 0\.4"),
        (np.full((2, 2), np.nan), [0.1, 0.3], 1.0, "expected finite"),
    ):
        with pytest.raises(InputError, match=words):
            best_schedule(sensitivity, ratios, target)
    for shares in ((0.5, 0.2), (0.1, 0.2, 0.1, 0.1), (1.1, 0.2, 0.1, 0.1)):
        with pytest.raises(InputError, match="expected 4 shares, none larger"):
            METHODS["vlcache"](backbone, spliced[0], 0.2, schedules={0.2: shares})
    with pytest.raises(InputError, match=r"expected a share of \[0\.2\]"):
        METHODS["vlcache"](backbone, spliced[0], 0.3, schedules={0.2: (0.2,) * LAYERS})
    with pytest.raises(InputError, match="got none"):
        recomputed_sensitivity(backbone, [], [0.1], lambda *_: 0.0)
    with pytest.raises(InputError, match=r"got \[1\.5\]"):
        recomputed_sensitivity(backbone, [spliced[0]], [1.5], lambda *_: 0.0)
