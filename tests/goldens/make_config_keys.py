"""Make the list of the keys of `config.json` that a class of transformers (5.23) reads. See README.md beside this file.

A key is read where a model file takes it from a configuration, or where a configuration class declares it. The files
are parsed and not run, so that torch is not needed. Run it in an environment that has transformers:
`python tests/goldens/make_config_keys.py`. It rewrites `models/decoder/key_tables/class_keys.json`.
"""
# pyright: reportMissingImports=false

import ast
import importlib.util
import json
import re
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

OUT = Path(__file__).parents[2] / "models" / "decoder" / "key_tables" / "class_keys.json"
READ = re.compile(r"\b\w*config\.([a-z_]\w*)\b(?!\()|(?:get|has)attr\((?:self\.)?\w*config, ?[\"'](\w+)[\"']")
"""`config.name`, `self.text_config.name`, `getattr(config, "name")`; calls of methods are none."""
SHARED = ("modeling_rope_utils", "masking_utils", "modeling_utils", "cache_utils")


def declared(path: Path) -> Iterator[str]:
    """Yields the fields of a file's configuration classes, and the further names that they have."""
    for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(found, ast.ClassDef):
            continue
        for line in found.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id
            if isinstance(line, ast.Assign) and isinstance(line.value, ast.Dict):
                (target, *_) = line.targets
                if isinstance(target, ast.Name) and target.id == "attribute_map":
                    yield from (str(key.value) for key in line.value.keys if isinstance(key, ast.Constant))


def main() -> None:
    """Writes the list."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    keys: set[str] = set()
    for path in [*root.glob("models/*/modeling_*.py"), *(root / f"{name}.py" for name in SHARED)]:
        keys |= {first or second for first, second in READ.findall(path.read_text(encoding="utf-8"))}
    for path in root.glob("models/*/configuration_*.py"):
        keys |= set(declared(path))

    # Names with a leading underscore are the library's own bookkeeping.
    public = sorted(key for key in keys if not key.startswith("_"))
    lines = textwrap.wrap(", ".join(map(json.dumps, public)), 118, break_long_words=False)
    OUT.write_text(f'{{"transformers": "{version("transformers")}",\n"keys": [\n' + "\n".join(lines) + "\n]}\n")
    print(f"{len(public)} keys, {OUT.stat().st_size / 1024:.1f} KiB")


if __name__ == "__main__":
    main()
