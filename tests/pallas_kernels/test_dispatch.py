"""Dispatch: which implementation runs, and what is said of those that cannot."""

import json
import types

import jax
import pytest

from pallas_kernels import KernelUnavailableError, configured_by, preferring, targeting
from pallas_kernels._dispatch import choose

TAKES = {"tpu": lambda: None}
"""An operation with a kernel for TPUs that can take its arguments; and one that cannot."""
TOO_WIDE = {"tpu": lambda: "too wide"}


def test_the_platform_decides_where_nothing_is_asked_for():
    assert choose("op", None, TAKES) == "xla"
    with targeting("tpu"):
        assert choose("op", None, TAKES) == "tpu"
        assert choose("op", None, TOO_WIDE) == "xla"
        assert choose("op", None) == "xla"
    with targeting("gpu"):
        assert choose("op", None, TAKES) == "xla"


@pytest.fixture
def tpu(monkeypatch):
    """As on a TPU of a kind that no configuration ships for."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU test")])


@pytest.mark.usefixtures("tpu")
def test_a_process_of_several_devices_gets_no_kernel_unasked(monkeypatch, tmp_path):
    rows = {"op": {"shape": {"winner": "tpu"}}}
    (tmp_path / "own.json").write_text(json.dumps({"device": "TPU test", "source": "timed", "operations": rows}))
    for count, expected in ((1, "tpu"), (4, "xla")):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        with configured_by(tmp_path / "own.json"):
            assert choose("op", None, TAKES, "shape") == expected
            assert choose("op", "tpu", TAKES, "shape") == "tpu"


@pytest.mark.usefixtures("tpu")
@pytest.mark.parametrize(
    ("device", "source"), [("TPU test", "heuristic, not timed"), ("TPU test", "timed, quick"), ("TPU other", "timed")]
)
def test_a_kernel_that_was_not_timed_on_this_kind_of_device_is_not_taken_unasked(device, source, tmp_path):
    assert choose("op", None, TAKES) == "xla"
    rows = {"op": {"shape": {"winner": "tpu"}}}
    (tmp_path / "own.json").write_text(json.dumps({"device": device, "source": source, "operations": rows}))
    with configured_by(tmp_path / "own.json"):
        assert choose("op", None, TAKES, "shape") == "xla"
        assert choose("op", ("tpu", "xla"), TAKES, "shape") == "tpu"


@pytest.mark.usefixtures("tpu")
def test_a_kernel_is_taken_unasked_for_the_shapes_it_won_and_no_other(tmp_path):
    rows = {"op": {"won": {"winner": "tpu"}, "lost": {"winner": "xla"}}}
    (tmp_path / "own.json").write_text(json.dumps({"device": "TPU test", "source": "timed", "operations": rows}))
    with configured_by(tmp_path / "own.json"):
        assert choose("op", None, TAKES, "won") == "tpu"
        assert choose("op", None, TOO_WIDE, "won") == "xla"
        assert choose("op", None, TAKES, "lost") == "xla"
        assert choose("op", None, TAKES, "never timed") == "xla"
        assert choose("other", None, TAKES, "won") == "xla"
    assert choose("op", None, TAKES, "won") == "xla"


@pytest.mark.usefixtures("tpu")
def test_preferring_says_what_none_means_and_no_more():
    with preferring("tpu"):
        assert choose("op", None, TAKES) == "tpu"
        assert choose("op", None, TOO_WIDE) == "xla"
        assert choose("op", "xla", TAKES) == "xla"
        with preferring():
            assert choose("op", None, TAKES) == "xla"
    assert choose("op", None, TAKES) == "xla"
    with preferring("gpu"):
        assert choose("op", None, TAKES | {"gpu": lambda: None}) == "xla"
    with pytest.raises(KernelUnavailableError, match="'cuda'; expected one of"), preferring("cuda"):
        pass


def test_a_sequence_falls_to_the_next():
    with targeting("tpu"):
        assert choose("op", ("gpu", "tpu", "xla"), TAKES) == "tpu"
        assert choose("op", ("tpu", "xla"), TOO_WIDE) == "xla"
        with pytest.raises(KernelUnavailableError, match=r"op: .*'gpu': the operation has no.*'tpu': too wide"):
            choose("op", ("gpu", "tpu"), TOO_WIDE)
    with pytest.raises(KernelUnavailableError, match="'tpu': the platform is 'cpu'"):
        choose("op", "tpu", TAKES)
    with pytest.raises(KernelUnavailableError, match="'cuda': unknown; expected one of"):
        choose("op", "cuda", TAKES)
