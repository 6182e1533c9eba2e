"""What is changed while transformers is imported is put back, whatever several threads do."""

import concurrent.futures
import importlib
import os
import time

import pytest

from kvpatch_jax.utils import optional_packages

ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def test_threads_that_import_at_once_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ADVICE, raising=False)
    seen: list[str | None] = []
    delays = iter((0.02, 0.05, 0.01, 0.03))

    def slow(name: str) -> object:
        time.sleep(next(delays))
        seen.append(os.environ.get(ADVICE))
        return importlib

    monkeypatch.setattr(importlib, "import_module", slow)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(optional_packages.require, "transformers.some.module", "transformers") for _ in range(4)]
        assert [load.result() for load in loads] == [importlib] * 4
    assert seen == ["1"] * 4
    assert ADVICE not in os.environ
