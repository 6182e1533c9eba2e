"""Compiled programs are kept in a folder of the user's alone, unless the user chose otherwise."""

import jax
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
