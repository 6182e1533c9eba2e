"""Imports run one way and load only what is asked for, public names are there, and `kvpatch` refuses other words."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import kvpatch_jax
import kvpatch_jax as kvp
from kvpatch_jax import __main__ as command

ROOT = Path(__file__).parents[2]
PACKAGES = ["evals", "models", "kvpatch_jax", "pallas_kernels"]
ORDERS = {
    "": PACKAGES,
    "kvpatch_jax": [
        *("serving", "store", "batch", "session", "traces", "plan", "window", "repair", "pool", "patching", "cache"),
        *("segments", "answers", "backbone", "core", "utils", "errors"),
    ],
    "kvpatch_jax.store": [
        *("metrics", "linker", "fetch", "libraries", "references", "retriever", "orbax_item", "store", "snapshot"),
        *("patches", "codec", "objects", "remote", "queue", "memory", "index", "names", "files", "forks"),
    ],
    "models": ["parallel", "", "decoding", "families", "inputs", "towers", "decoder", "attention", "checkpoints"],
}
"""Rooms from the top down, by the package that they divide; "" is the package's own modules."""


def plain(name: str) -> str:
    """Names a module of `models` by its folder, in place of the name that the package gives it."""
    return name.removeprefix("kvpatch_jax.") if name.startswith("kvpatch_jax.models") else name


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    """Which module of the packages imports which, in functions and for type checkers too."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    imports: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                imports[name] |= {plain(alias.name) for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                for alias in node.names:
                    module = plain(f"{base}.{alias.name}")
                    imports[name] |= {module} if module in modules else {plain(base)} & modules.keys()
    return imports


def room(name: str, package: str) -> int | None:
    """Numbers a module's room from the top; None: it is in none."""
    rooms = ORDERS[package]
    if package and name != package and not name.startswith(f"{package}."):
        return None
    inside = name.removeprefix(package).lstrip(".").split(".")[0]
    return rooms.index(inside) if inside in rooms else rooms.index("") if "" in rooms else None


@pytest.mark.parametrize("package", ORDERS)
def test_rooms_import_one_way(edges: dict[str, set[str]], package: str):
    pairs = [(name, other, room(name, package), room(other, package)) for name in edges for other in edges[name]]
    pairs = [pair for pair in pairs if None not in pair]
    assert len(pairs) > 20
    assert [f"{name} imports {other}" for name, other, above, below in pairs if below < above] == []


def test_nothing_imports_in_a_circle(edges: dict[str, set[str]]):
    """A package and its own modules make no circle."""
    assert "kvpatch_jax.plan" in edges["kvpatch_jax.session.placing"]  # a relative import
    assert "kvpatch_jax.errors" in edges["models.directory"]  # an absolute one
    left = {name: others - {name} for name, others in edges.items()}
    assert len(left) > 150
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert sorted(left) == []


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


def test_the_command_lists_versions_devices_and_missing_extras(monkeypatch: pytest.MonkeyPatch, capsys):
    lines = {
        "kvpatch_jax": [
            "jax>=0.11",
            'pillow>=11; extra == "models"',
            'no-such-package>=1; extra == "store"',
            'jax[fast]>=0.11; extra == "fast"',
            'kvpatch_jax[models,store]; extra == "all"',
        ],
        "jax": ['no-such-plugin==1; extra == "fast"', 'nothing; extra == "slow"'],
    }
    monkeypatch.setattr(command, "requires", lambda name: lines.get(name))
    store = ["no-such-package"]
    assert command.missing_packages() == {"models": [], "store": store, "fast": ["no-such-plugin"], "all": store}
    assert command.main([]) == 0
    printed = capsys.readouterr().out
    assert kvpatch_jax.__version__ == importlib.metadata.version("kvpatch_jax")
    assert f"kvpatch_jax {kvpatch_jax.__version__}, jax " in printed
    assert "missing no-such-package: pip install 'kvpatch_jax[store]'" in printed
    assert "cpu" in printed


def test_other_words_are_refused(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    assert command.main(["--help"]) == 0
    assert "kvpatch measure" in capsys.readouterr().out
    assert command.main(["frobnicate"]) == 2
    assert "got 'frobnicate'; expected store, run" in capsys.readouterr().err
    assert command.main(["store", "ls", str(tmp_path / "nothing")]) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main(["run"]) == 2
    assert "expected the folder of a checkout" in capsys.readouterr().err
