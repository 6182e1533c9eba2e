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
from tests.models.releases import NOT_BUILT, REFUSED, RELEASES, WARNED, Release

IDS = [f"{name} ({source.split('/')[-1].split('.')[0][:24]})" for name, source in RELEASES]
INDEXED = [release for release in RELEASES.values() if release.index]
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


def configuration(directory: Path) -> Any:
    """What `load` makes of a directory's configuration."""
    raw = open_files(directory).config
    return FAMILIES[find_architecture(raw, "config.json")].config(raw, "exact", None)


@pytest.mark.parametrize(("size", "billions"), [("-tiny", 3), ("-small", 16), ("", 27)])
def test_deepseek_vl2_has_the_published_sizes(size, billions, tmp_path):
    """Parameters in whole billions, as the authors' paper has them."""
    (release,) = [found for (name, _), found in RELEASES.items() if name == f"deepseek-ai/deepseek-vl2{size}"]
    config = FAMILIES["DeepseekVLV2ForCausalLM"].config(release.config, "exact", None)
    leaves = jax.tree.leaves(parameters(abstract(config)))
    assert sum(leaf.size for leaf in leaves) // 10**9 == billions
    assert "bfloat16" in {str(leaf.dtype) for leaf in leaves}


def test_phi_3_visions_configuration_is_read():
    config = FAMILIES["Phi3VForCausalLM"].config(RELEASED["microsoft/Phi-3-vision-128k-instruct"].config, "exact", None)
    assert (config.vision.side, config.tile_side, config.vision.layers_run) == (24, 12, 23)
    assert (config.text.rope.scaling.kind, config.text.window, config.whole_first) == ("longrope", 131072, False)
    assert config.image_token == 32044


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
