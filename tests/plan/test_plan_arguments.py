"""Goals, device costs and arguments of plans: what is refused, and by which error."""
# pyright: reportArgumentType=false

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch_jax.errors import InputError, SessionError
from kvpatch_jax.plan import DeviceCosts, Goal, Inventory, Rates, plan
from kvpatch_jax.window import Action, Window
from tests.plan.plan_cases import BACKBONE, DEVICES, PRICES, certificate, entry, planned

pytestmark = pytest.mark.usefixtures("unchecked")
EMPTY = Window.empty(BACKBONE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": None}, r"plan\.window: got None"),
        ({"stored": {}}, r"plan\.stored: got \{\}"),
        ({"goal": 0.05}, r"plan\.goal: got 0.05"),
        ({"wanted": None}, r"plan\.wanted: got None"),
        ({"wanted": ["page"]}, r"plan\.wanted: got 'page'"),
        ({"costs": "costs.json"}, r"plan\.costs: got 'costs.json'"),
        ({"prices": None, "goal": Goal("certified")}, r"plan\.prices: got None"),
        ({"certificate": "certificate.json"}, r"plan\.certificate: got 'certificate.json'"),
        ({"certificate": certificate(backbone="e" * 64)}, "of backbone 'e+'"),
        ({"stored": Inventory(None, "e" * 64, None)}, "inventory of backbone 'e+'"),
        ({"goal": Goal("certified"), "certificate": None}, r"plan\.certificate: got None"),
    ],
)
def test_arguments_of_another_type_or_backbone_are_refused(changed: dict[str, Any], message: str):
    arguments = {"window": EMPTY, "wanted": [entry(0)], "goal": None, "stored": Inventory(None, BACKBONE, None)}
    arguments |= {"costs": DEVICES, "prices": PRICES} | changed
    first = [arguments.pop(word) for word in ("window", "wanted", "goal")]
    with pytest.raises(InputError, match=message + ".*expected"):
        plan(*first, **arguments)


def test_entries_are_planned_once():
    assert [chunk.id for chunk in planned(EMPTY, iter([entry(0)])).chunks] == ["c0"]
    assert not planned(EMPTY, []).chunks
    with pytest.raises(SessionError, match="twice"):
        planned(EMPTY, [entry(0), entry(0)])


@pytest.mark.parametrize(
    ("field", "value"), [("kl", math.nan), ("kl", -1), ("kl", 10**400), ("kl", "0.1"), ("kl", True), ("reuse", "fast")]
)
def test_goals_are_known_words_and_finite_numbers(field: str, value: Any):
    with pytest.raises(InputError, match=rf"goal\.{field}: got .*; expected"):
        Goal(**{field: value})


def test_inventories_and_device_costs_check_their_arguments():
    reader = SimpleNamespace(fingerprint=BACKBONE, layout=None, prepare=None, embed=None, prefill=None)
    for make, arguments in ((Inventory.of, (None, 3)), (DeviceCosts.assumed, (3,))):
        with pytest.raises(InputError, match="got 3; expected"):
            make(*arguments)
    with pytest.raises(InputError, match=r"inventory.store: got 'a folder'; expected a kvpatch_jax\.ChunkStore"):
        Inventory.of("a folder", reader)


def test_device_costs_are_read_back_and_damage_is_detected(tmp_path: Path):
    path = tmp_path / "costs.json"
    DEVICES.write(path)
    assert DeviceCosts.read(path, device="a desk") == DEVICES
    rotations = [Action("rotate", id, 5, 100, 10) for id in "ab"]
    assert DEVICES.seconds(rotations) == pytest.approx(1e-4 + 20 * 2e-7 + 200 * 3e-9)
    for place, device, message in ((path, "another", "of device"), (tmp_path / "none.json", None, "No such file")):
        with pytest.raises(InputError, match=message):
            DeviceCosts.read(place, device=device)
    text = path.read_text("utf-8")
    for damaged in (text[:-9], "[]", json.dumps({"format": "x"}), text.replace("2e-07", "-2e-07")):
        path.write_text(damaged)
        with pytest.raises(InputError, match="device costs"):
            DeviceCosts.read(path)
    DeviceCosts("x", None, {"teleport": Rates()}).write(path)
    with pytest.raises(InputError, match="'teleport'"):
        DeviceCosts.read(path)


def test_assumed_device_costs_say_so_in_a_plan():
    guess = DeviceCosts.assumed("NVIDIA H200")
    assert not guess.measured
    assert "assumed on NVIDIA H200" in planned(EMPTY, [entry(0)], costs=guess).explain()
