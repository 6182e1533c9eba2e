"""Compiled programs are kept where nobody chose otherwise, and a long compilation is announced once."""

import logging
import random

import jax
import jax.numpy as jnp
import pytest

from kvpatch_jax.utils import compiling

OPTIONS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def unset(monkeypatch, tmp_path):
    """jax as a user has it who set nothing, beside an empty cache folder, which is returned."""
    before = {option: getattr(jax.config, option) for option in OPTIONS}
    for option in OPTIONS:
        monkeypatch.delenv(option.upper(), raising=False)
    monkeypatch.setenv(compiling.CACHE, str(tmp_path / "cache"))
    for option, value in zip(OPTIONS, (None, -1, True, 1.0), strict=True):
        jax.config.update(option, value)
    yield tmp_path / "cache"
    for option, value in before.items():
        jax.config.update(option, value)


def test_programs_are_kept_in_the_cache_folder(unset):
    compiling.keep_compiled()
    folder = jax.config.jax_compilation_cache_dir
    assert folder is not None
    assert folder.startswith(str(unset / "compiled"))
    assert [path.stat().st_mode & 0o077 for path in unset.glob("compiled/*")] == [0]
    assert jax.config.jax_compilation_cache_max_size > 0
    assert jax.config.jax_persistent_cache_min_compile_time_secs < 1
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == folder


def test_what_a_user_chose_stays(unset, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
    # An empty variable says that there is to be none.
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None


def test_without_a_folder_or_switched_off_nothing_is_kept(unset, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiling.CACHE, str(tmp_path / "file"))
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv(compiling.CACHE, str(unset))
    jax.config.update("jax_enable_compilation_cache", False)
    compiling.keep_compiled()
    assert jax.config.jax_compilation_cache_dir is None
    assert not unset.exists()


def compiled(function: str, words: str | None) -> None:
    """Compiles a program of this name that takes a while and no earlier process has compiled."""
    salt = random.random()

    def program(value):
        if words is not None:
            compiling.describe_program(function, words)
        for _ in range(40):
            value = jnp.sort(value @ value + salt)
        return value

    program.__name__ = function
    jax.jit(program)(jnp.ones((4, 4)))


def test_a_long_compilation_is_announced_once(unset, monkeypatch, caplog, capsys):
    compiling.keep_compiled()
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    monkeypatch.setattr(compiling, "_announced", set())
    with caplog.at_level(logging.WARNING, "kvpatch_jax"):
        compiled("prefill", "prefill of 8 tokens")
        compiled("prefill", "prefill of 8 tokens")
        compiled("prefill", "prefill of 1024 tokens")
        compiled("program of a user's", None)
    assert caplog.messages == ["compiling prefill of 8 tokens …", "compiling prefill of 1 024 tokens …"]
    assert capsys.readouterr().out == ""

    caplog.clear()
    monkeypatch.setattr(compiling, "PATIENCE", 600.0)
    monkeypatch.setattr(compiling, "_announced", set())
    compiled("prefill", "prefill of 8 tokens")
    assert not caplog.messages  # it was short
    assert not compiling._local.timers
