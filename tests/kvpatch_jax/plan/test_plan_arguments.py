"""Goals, device costs and arguments of plans: what is refused, and by which error."""
# pyright: reportArgumentType=false

import json
import math
import types
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import CertificateError, PlanError
from kvpatch_jax.plan import DeviceCosts, Goal, PatchInventory, Rates, plan
from kvpatch_jax.window import Drop, Rotate, Window
from tests.kvpatch_jax.plan.plan_cases import BACKBONE, COSTS, DEVICES, entry

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"window": None}, r"plan\.window: got None"),
        ({"stored": {}}, r"plan\.stored: got \{\}"),
        ({"goal": 0.05}, r"plan\.goal: got 0.05"),
        ({"wanted": None}, r"plan\.wanted: got None"),
        ({"wanted": ["page"]}, r"plan\.wanted: got 'page'"),
        ({"costs": "costs.json"}, r"plan\.costs: got 'costs.json'"),
        ({"uncertified": "no"}, r"plan\.uncertified: got 'no'"),
        ({"forming": 1}, r"plan\.forming: got 1"),
        ({"executor": "x"}, r"plan\.executor: got 'x'"),
        ({"certificate": "certificate.json"}, r"plan\.certificate: got 'certificate.json'"),
    ],
)
def test_arguments_of_another_type_are_refused(changed: dict[str, Any], said: str):
    given = {
        "window": Window.empty(COSTS),
        "wanted": [entry(0)],
        "goal": None,
        "stored": PatchInventory(BACKBONE),
        "costs": DEVICES,
    } | changed
    first = [given.pop(word) for word in ("window", "wanted", "goal")]
    with pytest.raises(CertificateError if "certificate" in changed else PlanError, match=said + ".*expected"):
        plan(*first, **given)


def test_an_iterator_of_entries_is_planned():
    given = {"stored": PatchInventory(BACKBONE), "costs": DEVICES}
    assert [chunk.id for chunk in plan(Window.empty(COSTS), (each for each in [entry(0)]), **given).chunks] == ["c0"]
    assert not plan(Window.empty(COSTS), [], **given).edits


@pytest.mark.parametrize(
    ("word", "bound"), [("kl", math.nan), ("flips", -1), ("bytes", 10**400), ("seconds", math.inf), ("kl", "0.1")]
)
def test_bounds_are_finite_numbers(word: str, bound: Any):
    with pytest.raises(PlanError, match=rf"goal\.{word}: got .*; expected a number >= 0"):
        Goal(**{word: bound})


def test_inventories_and_device_costs_check_their_arguments():
    reader = types.SimpleNamespace(fingerprint=BACKBONE, layout=None, prepare=None, embed=None, prefill=None)
    for make in (lambda: PatchInventory(3), lambda: PatchInventory.of(None, 3), lambda: DeviceCosts.assumed(3)):
        with pytest.raises(PlanError, match="got 3; expected"):
            make()
    with pytest.raises(PlanError, match=r"inventory.store: got 'a folder'; expected a kvpatch_jax\.ChunkStore"):
        PatchInventory.of("a folder", reader)


def test_device_costs_are_read_back_and_damage_is_detected(tmp_path: Path):
    path = tmp_path / "costs.json"
    DEVICES.write(path)
    assert DeviceCosts.read(path, device="a desk") == DEVICES
    edits = (Drop("a"), Rotate("a", 0, 1, 100, 10), Rotate("b", 0, 1, 100, 10))
    assert DEVICES.seconds(edits) == pytest.approx(1e-4 + 20 * 2e-7 + 200 * 3e-9)
    with pytest.raises(PlanError, match="of device"):
        DeviceCosts.read(path, device="another")
    with pytest.raises(PlanError, match="No such file"):
        DeviceCosts.read(tmp_path / "none.json")
    text = path.read_text("utf-8")
    for damaged in (
        text[:-9],
        "[]",
        text.replace("0.0001", "0.0002"),
        json.dumps({"format": "x"}),
        text.replace("2e-07", "-2e-07"),
    ):
        path.write_text(damaged)
        with pytest.raises(PlanError):
            DeviceCosts.read(path)
    guess = DeviceCosts.assumed("NVIDIA H200")
    assert not guess.measured
    assert guess.about.startswith("assumed")
    assert (
        "assumed on NVIDIA H200"
        in plan(Window.empty(COSTS), [entry(0)], stored=PatchInventory(BACKBONE), costs=guess).explain()
    )
    with pytest.raises(PlanError, match="expected one of"):
        DeviceCosts("x", None, {"Teleport": Rates()})
