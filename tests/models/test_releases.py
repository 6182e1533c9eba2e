"""Configurations of sixty releases load with their published parameter counts, or are refused for a stated reason."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest

from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models import FAMILIES, UnknownKeyWarning, load
from kvpatch_jax.models.checkpoints import flatten_params, translate
from kvpatch_jax.models.checkpoints.entries import plan
from kvpatch_jax.models.families.architectures import find_architecture
from kvpatch_jax.models.families.family import abstract, parameters
from kvpatch_jax.models.files import open_files
from tests.models.released_configs import RELEASED

# One release a line, with what becomes of it: see the README there.
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.jsonl"))
RELEASES: list[dict[str, Any]] = [json.loads(line) for file in CORPUS for line in file.read_text("utf-8").splitlines()]
INDEXED = [release for release in RELEASES if "index" in release]
PUBLISHED = {name: released for name, released in RELEASED.items() if released.published is not None}
FIRST = list({released.config["architectures"][0]: name for name, released in reversed(PUBLISHED.items())}.values())
"""The first of every architecture."""
MORE = [pytest.param(name, marks=pytest.mark.nightly) for name in PUBLISHED if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *MORE])
def test_a_release_has_the_published_number_of_parameters(name):
    raw, published = RELEASED[name]
    config = FAMILIES[raw["architectures"][0]].config(raw, "exact", None)
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters(abstract(config))))
    assert count / 1e9 == pytest.approx(published, rel=0.01)


def written(root: Path, release: dict[str, Any]) -> Path:
    """A directory with the release's files and no weights."""
    (root / "config.json").write_text(json.dumps(release["config"]))
    (root / "preprocessor_config.json").write_text(json.dumps(release.get("preprocessor", {"do_resize": True})))
    return root


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release["release"])
def test_a_release_is_read_or_refused_for_the_stated_reason(release, tmp_path):
    """Read: `load` misses nothing but the weights, and warns of the stated keys, each once."""
    error, message = (ConfigError, release["refused"]) if "refused" in release else (WeightsError, "safetensors")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(error, match=message):
            load(written(tmp_path, release))
    assert all(warning.category is UnknownKeyWarning for warning in found)
    keys = Counter(re.search(r"got '(.*?)'", str(warning.message))[1] for warning in found)  # type: ignore[index]
    assert keys == Counter(release.get("warned", ()))
    if "billions" in release:  # of parameters, in the authors' paper
        config = FAMILIES[find_architecture(release["config"], "config.json")].config(release["config"], "exact", None)
        leaves = jax.tree.leaves(parameters(abstract(config)))
        assert sum(leaf.size for leaf in leaves) // 10**9 == release["billions"]


def without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


@pytest.mark.filterwarnings("ignore::kvpatch_jax.models.UnknownKeyWarning")
@pytest.mark.parametrize("release", INDEXED, ids=lambda release: release["release"])
def test_tensors_are_those_of_the_releases_index(release, tmp_path):
    """Their bytes, or parameters, add up to the index's total, and every name seen in it is one that is read."""
    raw, index = open_files(written(tmp_path, release)).config, release["index"]
    config = FAMILIES[find_architecture(raw, "config.json")].config(raw, "exact", None)
    leaves = flatten_params(parameters(abstract(config)))
    count = sum(leaf.size for leaf in leaves.values())
    assert index.get("total_size", 2 * count) == 2 * count
    assert index.get("total_parameters", count) == count

    family = config.family
    asked = {without_numbers(tensor.name) for tensor in plan(family.entries(config, {}), leaves)}
    for name in index["names"]:
        ours = translate(family.knows(config), name.replace("#", "3"))
        assert without_numbers(str(ours)) in asked, name
