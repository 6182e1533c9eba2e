"""Imports run one way: between the packages, between the rooms of the store and of `models`, and without circles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["evals", "models", "kvpatch_jax", "pallas_kernels"]
CORE = ["serving", "store", "batch", "session", "traces", "plan", "window", "repair", "pool", "patching", "cache"]
CORE += ["segments", "answers", "backbone", "core", "utils", "errors"]
STORE = [
    "metrics",
    "linker",
    "fetch",
    "libraries",
    "references",
    "retriever",
    "orbax_item",
    "store",
    "snapshot",
    "patches",
]
STORE += ["codec", "objects", "remote", "queue", "memory", "index", "names", "files", "forks"]
MODELS = ["parallel", "", "decoding", "families", "inputs", "towers", "decoder", "attention", "checkpoints"]
"""From the top down; "" is the room's own modules."""

Edges = dict[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Every module of the packages below a directory, by its dotted name."""
    paths = [path for package in PACKAGES for path in (root / package).rglob("*.py")]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def own(name: str) -> str:
    """The name by the folder of what is imported by the package's name."""
    return name.removeprefix("kvpatch_jax.") if name.startswith("kvpatch_jax.models") else name


def imports(root: Path) -> Edges:
    """Which module imports which, in functions and for type checkers too."""
    known = modules(root)
    edges: Edges = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        edges[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {own(alias.name) for alias in node.names}
                edges[name] |= names & known.keys()
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                for alias in node.names:
                    whole = own(f"{base}.{alias.name}")
                    edges[name] |= {whole} if whole in known else {own(base)} & known.keys()
    return edges


def circle(edges: Edges) -> list[str]:
    """The modules of circles of imports and those that lead into one. A package and its own modules make none."""
    left = {name: {other for other in others if other != name} for name, others in edges.items()}
    while free := [name for name, others in left.items() if not others]:
        for name in free:
            del left[name]
        left = {name: others - set(free) for name, others in left.items()}
    return sorted(left)


def backwards(edges: Edges, rooms: list[str], below: str = "") -> list[str]:
    """Imports that run against the order of the rooms of a package."""

    def floor(name: str) -> int | None:
        if below and name != below and not name.startswith(f"{below}."):
            return None
        room = name.removeprefix(below).lstrip(".").split(".")[0]
        return rooms.index(room) if room in rooms else rooms.index("") if "" in rooms else None

    found = []
    for name, others in edges.items():
        for other in others:
            first, second = floor(name), floor(other)
            if first is not None and second is not None and second < first:
                found.append(f"{name} imports {other}")
    return found


@pytest.fixture(scope="module")
def edges() -> Edges:
    return imports(ROOT)


def test_nothing_imports_in_a_circle(edges: Edges):
    assert len(edges) > 150
    assert circle(edges) == []


def test_packages_import_one_way(edges: Edges):
    assert backwards(edges, PACKAGES) == []


def test_the_operators_do_not_know_the_store(edges: Edges):
    above = ("kvpatch_jax.store", "kvpatch_jax.serving", "kvpatch_jax.__main__")
    core = [name for name in edges if name.startswith("kvpatch_jax.") and not name.startswith(above)]
    assert [name for name in core if any(other.startswith("kvpatch_jax.store") for other in edges[name])] == []


def test_rooms_of_the_operators_import_one_way(edges: Edges):
    # the package's face stands above all rooms
    inside = {name: others for name, others in edges.items() if name != "kvpatch_jax"}
    assert backwards(inside, CORE, "kvpatch_jax") == []
    assert any(other.startswith("kvpatch_jax.plan") for other in edges["kvpatch_jax.session.placing"])


def test_rooms_of_the_store_import_one_way(edges: Edges):
    # its front door and the program stand above all rooms
    inside = {name: others for name, others in edges.items() if not name.endswith((".store", "__main__"))}
    assert backwards(inside, STORE, "kvpatch_jax.store") == []


def test_rooms_of_the_models_import_one_way(edges: Edges):
    assert backwards(edges, MODELS, "models") == []


def test_an_arrow_back_and_a_circle_are_found(tmp_path: Path):
    """The reading of imports itself: relative, absolute, in functions."""
    for name, text in {
        "models/__init__.py": "",
        "models/decoder/__init__.py": "",
        "models/decoder/one.py": "def late():\n    from ..families import two\n",
        "models/families/__init__.py": "",
        "models/families/two.py": "import kvpatch_jax.models.decoder.one\n",
        "kvpatch_jax/__init__.py": "from kvpatch_jax.models.families.two import anything\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = imports(tmp_path)
    assert backwards(found, MODELS, "models") == ["models.decoder.one imports models.families.two"]
    assert backwards(found, PACKAGES) == ["kvpatch_jax imports models.families.two"]
    assert circle(found) == ["kvpatch_jax", "models.decoder.one", "models.families.two"]
