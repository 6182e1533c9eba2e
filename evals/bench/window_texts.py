"""Text that every machine with Python has: the documentation inside the standard library's modules.

Licence: Python Software Foundation License Version 2, as of Python itself. Nothing of it is shipped here.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

LICENCE = "documentation strings of Python's standard library, Python Software Foundation License Version 2"
LEAST_CHARACTERS = 200
"""Shorter documentation strings are mostly of one line, and left out."""


def documentation(path: Path) -> str:
    """Joins the documentation strings of a module, its classes and functions, blank lines between them."""
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(text for text in found if len(text) > LEAST_CHARACTERS)


def streams(backbone: Any, count: int, tokens: int) -> dict[str, np.ndarray]:
    """Cuts one stream of token ids from each of the first modules, by name, that have enough documentation.

    Args:
      backbone: whose tokenizer reads the text.
      count: streams. tokens: of each.

    Returns:
      {module's path below the library's folder: int32 [tokens]}.

    Raises:
      ValueError: fewer modules than `count` have so many tokens.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, np.ndarray] = {}
    for path in sorted([*root.glob("[a-z]*.py"), *root.glob("[a-z]*/[a-z_]*.py")]):
        if path.parts[-2] in ("site-packages", "test"):
            continue
        text = documentation(path)
        if len(text) < 2 * tokens:  # fewer than two characters a token no tokenizer makes of prose
            continue
        ids = np.asarray(backbone.prepare([text])["input_ids"])[0]
        if len(ids) >= tokens:
            found[str(path.relative_to(root))] = ids[:tokens].astype(np.int32)
        if len(found) == count:
            return found
    raise ValueError(f"{len(found)} modules below {root} with {tokens} tokens of documentation; expected {count}")


def digest(found: Mapping[str, np.ndarray]) -> str:
    """Digests names and tokens: which text was measured, 16 hexadecimal digits."""
    total = hashlib.blake2b(digest_size=8)
    for name, ids in found.items():
        total.update(name.encode() + b"\0" + np.ascontiguousarray(ids, np.int32).tobytes())
    return total.hexdigest()
