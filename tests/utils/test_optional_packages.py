"""Optional packages: what is changed while transformers is imported is put back, whatever several threads do."""

import importlib
import os
import threading
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
    errors: list[BaseException] = []

    def load() -> None:
        try:
            optional_packages.require("transformers.some.module", "transformers")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert seen == ["1"] * 4
    assert ADVICE not in os.environ
