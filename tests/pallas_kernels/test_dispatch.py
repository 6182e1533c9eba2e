"""Dispatch: which implementation runs, and what is said of those that cannot."""

import types

import jax
import pytest

from pallas_kernels import KernelUnavailableError, preferring, targeting
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
    """As on a TPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU test")])


@pytest.mark.usefixtures("tpu")
def test_no_kernel_is_taken_unasked_where_nothing_is_aimed():
    assert choose("op", None, TAKES) == "xla"
    assert choose("op", "tpu", TAKES) == "tpu"
    assert choose("op", ("tpu", "xla"), TOO_WIDE) == "xla"


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
