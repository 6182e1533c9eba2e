"""A kernel runs only where a committed result says that it is right and faster than XLA, or where it is asked for."""

import json
import types

import jax
import pytest

from pallas_kernels import KernelUnavailableError, _dispatch, preferring, targeting
from pallas_kernels._dispatch import Case, dispatch

CASE = Case("op", patched=True)


def runs(implementation=None, refuses=()) -> str:
    """What runs of an operation that has a kernel for TPUs, where none of `refuses` takes the call."""

    def run(name: str) -> str:
        if name in refuses:
            raise NotImplementedError("too wide")
        return name

    return dispatch(CASE, implementation, run, kernels=("tpu",))


@pytest.fixture
def results(monkeypatch, tmp_path):
    """The folder of results, as on a TPU of which nothing was measured."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind="TPU test")])
    monkeypatch.setattr(_dispatch, "RESULTS", tmp_path)
    _dispatch.measured.cache_clear()
    yield tmp_path
    _dispatch.measured.cache_clear()


def write(folder, day: str, device: str, kernels: dict[str, float]) -> None:
    _dispatch.measured.cache_clear()
    rows = {"environment": {"device": device}, "kernels": kernels}
    (folder / f"{device.replace(' ', '-')}-{day}.json").write_text(json.dumps(rows))


def test_a_kernel_is_taken_where_a_result_has_it_right_and_faster(results, monkeypatch):
    assert runs() == "xla"
    write(results, "2026-01-02", "TPU test", {str(CASE): 1.3, str(Case("op")): 0.0})
    assert runs() == "tpu"
    assert runs(refuses=("tpu",)) == "xla"
    write(results, "2026-01-03", "TPU other", {str(CASE): 0.0})
    assert runs() == "tpu"
    # The latest counts; 0 is a kernel that was wrong.
    write(results, "2026-01-04", "TPU test", {str(CASE): 0.0})
    assert runs() == "xla"
    write(results, "2026-01-05", "TPU test", {str(CASE): 1.0})
    assert runs() == "xla"
    write(results, "2026-01-06", "TPU test", {str(CASE): 1.01})
    assert runs() == "tpu"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert runs() == "xla"


def test_the_platform_that_is_targeted_decides_where_nothing_is_asked_for():
    assert runs() == "xla"
    with targeting("tpu"):
        assert runs() == "tpu"
        assert runs(refuses=("tpu",)) == "xla"
        assert runs(("gpu", "tpu", "xla")) == "tpu"
        assert runs(("tpu", "xla"), refuses=("tpu",)) == "xla"
        with pytest.raises(KernelUnavailableError, match=r"op: .*'gpu': the operation has no.*'tpu': too wide"):
            runs(("gpu", "tpu"), refuses=("tpu",))
    with targeting("gpu"):
        assert runs() == "xla"
    with pytest.raises(KernelUnavailableError, match="'tpu': the platform is 'cpu'"):
        runs("tpu")
    with pytest.raises(KernelUnavailableError, match="'cuda': unknown; expected one of"):
        runs("cuda")


def test_preferring_says_what_none_means_and_no_more(results):
    with preferring("tpu"):
        assert runs() == "tpu"
        assert runs(refuses=("tpu",)) == "xla"
        assert runs("xla") == "xla"
        with preferring():
            assert runs() == "xla"
    assert runs() == "xla"
    with preferring("gpu"):
        assert runs() == "xla"
    with pytest.raises(KernelUnavailableError, match="'cuda'; expected one of"), preferring("cuda"):
        pass
