"""Importing the package loads nothing that is not asked for, and every public name is there."""

import subprocess
import sys

import pytest

import kvpatch_jax as kvp

PROGRAM = """
import sys
import jax, jax.numpy

sys.modules["fcntl"] = None  # as where there is none
before = set(sys.modules)
import kvpatch_jax as kvp

new = set(sys.modules) - before
for name in ("kvpatch_jax.store", "kvpatch_jax.pool", "kvpatch_jax.batch", "kvpatch_jax.repair", "kvpatch_jax.models",
             "flax", "orbax", "einops", "cryptography", "PIL", "tokenizers", "jinja2", "absl.app",
             "jax.experimental.pallas"):
    loaded = sorted(module for module in new if module == name or module.startswith(name + "."))
    assert not loaded, loaded
assert kvp.pool.make_pool and kvp.pool.RAGGED and kvp.repair.METHODS and kvp.core.deficit.e90
try:
    kvp.ChunkStore
except AttributeError as error:
    assert "fcntl" in str(error)
else:
    raise AssertionError("a store without fcntl")
import pydoc
assert not hasattr(kvp, "ChunkStore") and not hasattr(kvp, "store") and hasattr(kvp, "form_patch")
assert "form_patch(" in pydoc.render_doc(kvp, renderer=pydoc.plaintext)
"""


def test_importing_loads_nothing_that_is_not_asked_for():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_all_names_are_there():
    assert all(hasattr(kvp, name) for name in kvp.__all__)
    assert kvp.__all__ == sorted(kvp.__all__) == dir(kvp)
    assert kvp.ChunkStore is kvp.store.ChunkStore
    with pytest.raises(AttributeError, match=r"no attribute 'splice'; expected one of .*apply_patch"):
        getattr(kvp, "spl" + "ice")
