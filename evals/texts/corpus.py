"""Text that every machine with Python has: Python's standard library, and packages beside it.

Four domains: *prose* (the language reference that `pydoc` shows, documentation strings), *code* (modules), *tables*
(data sets, tables of encodings), *transcripts* (sessions of an interpreter: examples with what they printed). Three
kinds are held out, on which no size of a patch is chosen: *descriptions* (what packages say of themselves in the
index), *sources* (modules of jax, flax and pandas), *measures* (tables of numbers: sizes of letters, values of
functions). Nothing of it is shipped here.
"""

import ast
import doctest
import hashlib
import importlib.metadata
import importlib.util
import itertools
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from kvpatch_jax.errors import InputError

LIBRARY = Path(sysconfig.get_path("stdlib"))
LEAST_CHARACTERS = 200
"""Shorter documentation strings are mostly of one line, and left out."""
LEAST_EXAMPLES = 20
"""Examples below which a module is left out."""

NamedTexts = Iterator[tuple[str, str]]
"""Names ("package/path") and their text."""


class Document(NamedTuple):
    """A text's tokens, by the name of the package that it ships in and its path there."""

    name: str
    domain: str
    ids: Int[np.ndarray, " n"]


def documents(backbone: Any, domain: str, count: int, tokens: int, most: int) -> list[Document]:
    """Reads the first documents of a domain that are long enough.

    Args:
      backbone: whose tokenizer reads them.
      count: documents.
      tokens: that each has at least.
      most: tokens kept of one.

    Raises:
      InputError: fewer than `count`.
    """
    return long_documents(backbone, SOURCES[domain](), domain, count, tokens, most)


def long_documents(
    backbone: Any, texts: Iterable[tuple[str, str]], domain: str, count: int, tokens: int, most: int
) -> list[Document]:
    """Reads the first of named texts that are long enough. Arguments and errors as of `documents`."""
    chosen: list[Document] = []
    for name, text in texts:
        if len(text) < 2 * tokens:  # fewer than two characters a token is rare, and none of these texts
            continue
        ids = np.asarray(backbone.ids(text[: 12 * most]), np.int32)[:most]
        if len(ids) >= tokens:
            chosen.append(Document(name, domain, ids))
        if len(chosen) == count:
            return chosen

    raise InputError(f"text: got {len(chosen)} documents of {domain} with {tokens} tokens; expected {count}")


def _shuffled(names: Sequence[str]) -> list[str]:
    """Sorts names by their digest: an order unrelated to the alphabet, and the same everywhere."""
    return sorted(names, key=lambda name: hashlib.blake2b(name.encode(), digest_size=8).digest())


def _folder(package: str) -> Path | None:
    if package == "python":
        return LIBRARY
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _modules(package: str) -> Iterator[tuple[str, Path]]:
    """Yields a package's modules without its tests; of Python those of two levels."""
    root = _folder(package)
    if root is None:
        return

    paths = [*root.glob("[a-z]*.py"), *root.glob("[a-z]*/[a-z_]*.py")]
    if package != "python":
        paths += root.glob("[a-z]*/[a-z]*/[a-z_]*.py")
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
    names = {}
    for path in paths:
        inside = path.relative_to(root)
        if not left_out & set(inside.parts):
            names[f"{package}/{inside}"] = path
    for name in _shuffled(list(names)):
        yield name, names[name]


def documentation(path: Path) -> str:
    """Joins the documentation strings of a module, its classes and functions, blank lines between them."""
    return "\n\n".join(text for text in _docstrings(_read(path)) if len(text) > LEAST_CHARACTERS)


def _docstrings(text: str) -> list[str]:
    """Returns the documentation strings of a module, its classes and functions, empty where there is none."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]


def _read(path: Path) -> str:
    # A few modules of the library's tests and data are in other encodings.
    return path.read_text(encoding="utf-8", errors="replace")


def _prose() -> NamedTexts:
    """Yields the language reference, then documentation strings."""
    from pydoc_data.topics import topics

    for name in _shuffled(list(topics)):
        yield f"python/pydoc_data/topics/{name}", topics[name]
    for name, path in _modules("python"):
        yield name, documentation(path)


def _code() -> NamedTexts:
    """Yields the standard library's modules."""
    for name, path in _modules("python"):
        yield name, _read(path)


def _tables() -> NamedTexts:
    """Yields data sets that packages bring, tables of names and types, then tables of encodings."""
    shipped = {
        "sklearn": ("datasets/data/iris.csv", "datasets/data/wine_data.csv", "datasets/data/breast_cancer.csv"),
        "matplotlib": ("mpl-data/sample_data/Stocks.csv", "mpl-data/sample_data/msft.csv"),
        "python": ("html/entities.py", "mimetypes.py", "stringprep.py"),
    }

    for package, paths in shipped.items():
        root = _folder(package)
        for path in paths if root is not None else ():
            if (root / path).exists():
                text = _read(root / path)
                # In front of the table of entities stands what is not a table.
                begin = text.find("name2codepoint = {") if "entities" in path else 0
                yield f"{package}/{path}", text[begin:]

    names = {f"python/encodings/{path.name}": path for path in (LIBRARY / "encodings").glob("[a-z]*.py")}
    for name in _shuffled(list(names)):
        text = _read(names[name])
        begin = text.find("decoding_table = (")
        if begin >= 0:
            yield name, text[begin:]


def _transcripts() -> NamedTexts:
    """Yields the examples of modules with their output, as an interpreter shows them."""
    for package in ("python", "sklearn", "scipy", "numpy"):
        for name, path in _modules(package):
            text = _read(path)
            if text.count(">>>") >= LEAST_EXAMPLES:
                sessions = map(_session, _docstrings(text))
                yield name, "\n".join(itertools.chain.from_iterable(sessions))


def _session(docstring: str) -> list[str]:
    """Lists the lines of a documentation string's examples, a blank one behind them."""
    try:
        examples = doctest.DocTestParser().get_examples(docstring)
    except ValueError:  # examples that are not laid out as doctest wants them
        return []

    lines = []
    for example in examples:
        first, *more = example.source.splitlines()
        lines += [f">>> {first}", *(f"... {line}" for line in more), *example.want.splitlines()]
    return [*lines, ""] if lines else []


def _descriptions() -> NamedTexts:
    """Yields the descriptions of the packages that are installed, without how each begins: badges and its name."""
    described: dict[str, str] = {}
    for package in importlib.metadata.distributions():
        # A message, whose body is the description.
        metadata: Any = package.metadata
        described[metadata["Name"]] = metadata.get("Description") or metadata.get_payload() or ""
    for name in _shuffled(list(described)):
        yield name, described[name][500:]


def _sources() -> NamedTexts:
    """Yields modules of packages that the corpus does not read."""
    for package in ("jax", "flax", "pandas"):
        for name, path in _modules(package):
            yield name, _read(path)


def _measures() -> NamedTexts:
    """Yields tables of numbers: the sizes of letters in fonts, and values of functions."""
    shipped = (("matplotlib", "mpl-data/fonts/*/*.afm"), ("numpy", "_core/tests/data/*.csv"))
    names: dict[str, Path] = {}
    for package, pattern in shipped:
        root = _folder(package)
        for path in sorted(root.glob(pattern)) if root is not None else ():
            names[f"{package}/{path.name}"] = path
    for name in _shuffled(list(names)):
        text = _read(names[name])
        # In front of the letters stands what every font file says.
        yield name, text[max(text.find("\nC "), 0) + 1 :]


HELD_OUT: dict[str, Callable[[], NamedTexts]] = {
    "descriptions": _descriptions,
    "sources": _sources,
    "measures": _measures,
}
SOURCES: dict[str, Callable[[], NamedTexts]] = {
    "prose": _prose,
    "code": _code,
    "tables": _tables,
    "transcripts": _transcripts,
}
