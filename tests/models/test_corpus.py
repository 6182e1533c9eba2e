"""Every release of the corpus is read, or refused for the reason that `releases` states."""

import json
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvpatch_jax.errors import ConfigError, WeightsError
from kvpatch_jax.models import FAMILIES, UnknownKeyWarning, load
from kvpatch_jax.models.checkpoints import flatten_params, translate
from kvpatch_jax.models.checkpoints.entries import plan
from kvpatch_jax.models.families.architectures import find_architecture
from kvpatch_jax.models.families.family import abstract, parameters
from kvpatch_jax.models.files import open_files
from tests.models.releases import NOT_BUILT, REFUSED, RELEASES, WARNED, Release

IDS = [f"{name} ({source.split('/')[-1].split('.')[0][:24]})" for name, source in RELEASES]
INDEXED = [release for release in RELEASES.values() if release.index]


def written(root: Path, release: Release) -> Path:
    """A directory with the release's files and no weights."""
    (root / "config.json").write_text(json.dumps(release.config))
    (root / "preprocessor_config.json").write_text(json.dumps(release.preprocessor or {"do_resize": True}))
    return root


@pytest.mark.parametrize("release", RELEASES.values(), ids=IDS)
def test_a_release_is_read_or_refused_for_the_stated_reason(release, tmp_path):
    """Read: `load` misses nothing but the weights, and warns of the stated keys, each once."""
    directory = written(tmp_path, release)
    expected = (WeightsError, "safetensors") if release.refusal is None else (ConfigError, release.refusal)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with pytest.raises(expected[0], match=expected[1]):
            load(directory)
    assert all(warning.category is UnknownKeyWarning for warning in found)
    keys = Counter(re.search(r"got '(.*?)'", str(warning.message))[1] for warning in found)  # type: ignore[index]
    assert keys == Counter(WARNED.get(release.name, set()) if release.refusal is None else ())


def test_the_tables_name_releases_of_the_corpus_and_nothing_that_is_built():
    """A line that stays in `NOT_BUILT` when its family lands fails here."""
    assert not {name for name in NOT_BUILT if name in FAMILIES}
    unknown = {release.architecture for release in RELEASES.values() if not release.known}
    assert unknown == set(NOT_BUILT)
    assert {*REFUSED, *WARNED} <= {name for name, _ in RELEASES}


# ------------------------------------------------------------------------------------------------------- dtypes


def configuration(directory: Path) -> Any:
    """What `load` makes of a directory's configuration."""
    raw = open_files(directory).config
    return FAMILIES[find_architecture(raw, "config.json")].config(raw, "exact", None)


# ------------------------------------------------------------------------------------------------- tensors


def without_numbers(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


@pytest.mark.filterwarnings("ignore::kvpatch_jax.models.UnknownKeyWarning")
@pytest.mark.parametrize("release", INDEXED, ids=[release.name for release in INDEXED])
def test_tensors_are_those_of_the_releases_index(release, tmp_path):
    """Their bytes, or parameters, add up to the index's total, and every name seen in it is one that is read."""
    config = configuration(written(tmp_path, release))
    leaves = flatten_params(parameters(abstract(config)))
    count = sum(leaf.size for leaf in leaves.values())
    assert release.index.get("total_size", 2 * count) == 2 * count
    assert release.index.get("total_parameters", count) == count

    family = config.family
    asked = {without_numbers(tensor.name) for tensor in plan(family.entries(config, {}), leaves)}
    for name in release.index["names"]:
        ours = translate(family.knows(config), name.replace("#", "3"))
        assert without_numbers(str(ours)) in asked, name
