"""Imports run one way: between packages, between the rooms of each package, and never in a circle."""

import ast
from pathlib import Path

import pytest

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
