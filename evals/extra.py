"""Ends a program in one line where packages of the extra `[evals]` are missing.

Programs import it before they import those packages.
"""

import importlib.util

MODULES = ("absl", "jinja2", "matplotlib", "optax", "PIL", "sklearn", "tokenizers", "tqdm")

missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
if missing:
    raise SystemExit(
        f"error: packages {', '.join(missing)} are not installed; expected the extra `evals` (in a checkout: "
        "pip install -e '.[evals]')"
    )
