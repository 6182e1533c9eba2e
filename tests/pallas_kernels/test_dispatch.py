"""Dispatch: which implementation runs, and what is said of those that cannot."""

import json
import types

import jax
import pytest

from pallas_kernels import KernelUnavailableError, _dispatch, preferring, targeting
from pallas_kernels._dispatch import Case, dispatch

CASE = Case("op", patched=True)


def takes(implementation=None, refuses=()) -> str:
    """What runs of an operation that has a kernel for TPUs, where none of `refuses` takes the call."""

    def run(name: str) -> str:
        if name in refuses:
            raise NotImplementedError("too wide")
        return name

    return dispatch(CASE, implementation, run, kernels=("tpu",))


def test_the_platform_that_is_aimed_at_decides_where_nothing_is_asked_for():
    assert takes() == "xla"
    with targeting("tpu"):
        assert takes() == "tpu"
        assert takes(refuses=("tpu",)) == "xla"
    with targeting("gpu"):
        assert takes() == "xla"


@pytest.fixture
def tpu(monkeypatch, tmp_path):
    """As on a TPU of which nothing was measured; the folder of results."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU test")])
    monkeypatch.setattr(_dispatch, "RESULTS", tmp_path)
    _dispatch.measured.cache_clear()
    yield tmp_path
    _dispatch.measured.cache_clear()


def write(folder, day: str, device: str, kernels: dict[str, float]) -> None:
    _dispatch.measured.cache_clear()
    results = {"environment": {"device": device}, "kernels": kernels}
    (folder / f"{device.replace(' ', '-')}-{day}.json").write_text(json.dumps(results))


def test_a_kernel_is_taken_where_a_result_has_it_right_and_faster(tpu, monkeypatch):
    assert takes() == "xla"
    write(tpu, "2026-01-02", "TPU test", {str(CASE): 1.3, str(Case("op")): 1.3})
    assert takes() == "tpu"
    assert takes(refuses=("tpu",)) == "xla"
    write(tpu, "2026-01-03", "TPU other", {str(CASE): 0.0})
    assert takes() == "tpu"
    # The latest counts; 0 is a kernel that was wrong.
    write(tpu, "2026-01-04", "TPU test", {str(CASE): 0.0})
    assert takes() == "xla"
    write(tpu, "2026-01-05", "TPU test", {str(CASE): 1.01})
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert takes() == "xla"


def test_preferring_says_what_none_means_and_no_more(tpu):
    with preferring("tpu"):
        assert takes() == "tpu"
        assert takes(refuses=("tpu",)) == "xla"
        assert takes("xla") == "xla"
        with preferring():
            assert takes() == "xla"
    assert takes() == "xla"
    with preferring("gpu"):
        assert takes() == "xla"
    with pytest.raises(KernelUnavailableError, match="'cuda'; expected one of"), preferring("cuda"):
        pass


def test_a_sequence_falls_to_the_next():
    with targeting("tpu"):
        assert takes(("gpu", "tpu", "xla")) == "tpu"
        assert takes(("tpu", "xla"), refuses=("tpu",)) == "xla"
        with pytest.raises(KernelUnavailableError, match=r"op: .*'gpu': the operation has no.*'tpu': too wide"):
            takes(("gpu", "tpu"), refuses=("tpu",))
    with pytest.raises(KernelUnavailableError, match="'tpu': the platform is 'cpu'"):
        takes("tpu")
    with pytest.raises(KernelUnavailableError, match="'cuda': unknown; expected one of"):
        takes("cuda")
