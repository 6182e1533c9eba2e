"""The package's face: few names, a table of contents, and nothing imported that was not asked for."""

import pydoc
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import kvpatch_jax as kvp

PROGRAM = """
import sys
import jax, jax.numpy

sys.modules["fcntl"] = None  # as where there is none
before = set(sys.modules)
import kvpatch_jax as kvp

new = set(sys.modules) - before
for name in ("kvpatch_jax.store", "kvpatch_jax.pool", "kvpatch_jax.batch", "kvpatch_jax.repair", "models", "flax",
             "orbax", "einops", "cryptography", "PIL", "tokenizers", "jinja2", "absl.app", "jax.experimental.pallas"):
    found = sorted(module for module in new if module == name or module.startswith(name + "."))
    assert not found, found
assert len([module for module in new if module.startswith("kvpatch_jax")]) < 44, sorted(new)
assert kvp.pool.make_pool and kvp.engines.to_paged_attention and kvp.repair.REPAIRS and kvp.deficit.e90
try:
    kvp.ChunkStore
except kvp.errors.StorePlatformError as error:
    assert "fcntl" in str(error)
else:
    raise AssertionError("a store without fcntl")
import pydoc
import re
assert not hasattr(kvp, "ChunkStore") and not hasattr(kvp, "store") and hasattr(kvp, "form_patch")
assert "form_patch(" in pydoc.render_doc(kvp, renderer=pydoc.plaintext)
"""


def test_importing_loads_nothing_that_is_not_asked_for():
    """What is counted are modules, for seconds differ from machine to machine."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_names_are_few_and_all_there():
    functions = [name for name in kvp.__all__ if not isinstance(getattr(kvp, name), types.ModuleType)]
    assert len(functions) <= 41
    assert kvp.__all__ == sorted(kvp.__all__) == dir(kvp)
    assert kvp.ChunkStore is kvp.store.ChunkStore
    with pytest.raises(AttributeError, match=r"no attribute 'splice'; expected one of .*apply_patch"):
        kvp.splice  # noqa: B018 # pyright: ignore


def test_every_name_is_used_in_the_readme_or_a_guide():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", root / "docs/start.md", root / "docs/concepts.md", *root.glob("docs/guides/*.md")]
    text = "\n".join(page.read_text() for page in pages if page.exists())
    names = set(re.findall(r"\b(?:kvp|kvpatch_jax)\.(\w+)", text)) | set(re.findall(r"`(\w+)[.(`]", text))
    for imported in re.findall(r"from kvpatch_jax import ([\w, ]+)", text):
        names |= set(imported.split(", "))
    assert set(kvp.__all__) <= names, sorted(set(kvp.__all__) - names)


def test_help_is_a_table_of_contents():
    contents = kvp.__doc__ or ""
    for name in set(kvp.__all__) - {"errors"}:
        assert name in contents, name
    said = pydoc.render_doc(kvp, renderer=pydoc.plaintext)  # pyright: ignore[reportAttributeAccessIssue]
    assert "form_patch(" in said
    assert "class Chunk(" in said
