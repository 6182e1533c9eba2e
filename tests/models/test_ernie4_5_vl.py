"""Ernie-4.5-VL beside its forwards (`test_image_families.py`): who chooses among which experts, its rope, its plan of
frames, the authors' files, and what flows through sessions, batches and pages.
"""

import json
import re

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import kvpatch_jax as kvp
from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError, LayoutError, ShapeError
from kvpatch_jax.models import load, save
from kvpatch_jax.models.decoder.config import ExpertConfig
from kvpatch_jax.models.decoder.moe import Experts
from kvpatch_jax.models.families.registry import IMAGE_FAMILIES
from kvpatch_jax.models.towers.ernie import ErnieVisionConfig, plan_patches
from tests.arrays import placed
from tests.goldens.load import GOLDENS, golden_arrays, golden_shapes, write_checkpoint
from tests.goldens.redraw import draw_frames
from tests.tolerances import assert_close_to_largest

FAMILY = IMAGE_FAMILIES["Ernie4_5_VLMoeForConditionalGeneration"]
CONFIG = json.loads((GOLDENS / "ernie4_5_vl" / "config.json").read_text())
RELEASE = json.loads((GOLDENS / "ernie4_5_vl" / "config_release.json").read_text())
IMAGES = [draw_frames("image", 1, 20, 41)[0], draw_frames("other", 1, 33, 17)[0]]
START, END, PAD = 303, 304, 301

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    return load(write_checkpoint("ernie4_5_vl", tmp_path_factory.mktemp("ernie")))


# ---------------------------------------------------------------------------------------------------- experts

ROUTED = ExpertConfig(
    experts=8,
    chosen=2,
    intermediate=12,
    router="softmax",
    renormalise=True,
    shared=6,
    corrected=True,
    images=ExpertConfig(experts=8, chosen=2, intermediate=4, router="softmax", renormalise=True, corrected=True),
    image_tokens=(1, 2),
)


def block(experts: Experts, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One set of routed experts over tokens [T,D], in float64, after transformers' Ernie4_5_VLMoeSparseMoeBlock: the
    softmax chooses with the correction and weighs without it, and the chosen weights are made to sum to one.
    """
    get = lambda leaf: np.asarray(leaf[...], np.float64)
    scores = x @ get(experts.router.kernel)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    chosen = np.argsort(-(scores + get(experts.correction)), axis=-1)[:, : experts.config.chosen]
    gate, up, down = get(experts.gate), get(experts.up), get(experts.down)
    out = np.zeros(x.shape)
    for token, row in enumerate(x):
        weights = scores[token, chosen[token]]
        for expert, weight in zip(chosen[token], weights / weights.sum(), strict=True):
            inner = row @ gate[expert]
            out[token] += weight * ((inner / (1 + np.exp(-inner)) * (row @ up[expert])) @ down[expert])
    return out, chosen


@pytest.mark.parametrize("implementation", ["ragged", "dense"])
def test_tokens_choose_among_the_experts_of_their_kind(implementation):
    rng = np.random.default_rng(5)
    experts = Experts(ROUTED, 16, rngs=nnx.Rngs(3))
    assert experts.images is not None
    assert experts.shared is not None
    for own in (experts, experts.images):
        assert own.correction is not None
        own.correction[...] = placed(0.1 * rng.normal(size=8).astype(np.float32))
    x, image = rng.normal(size=(1, 14, 16)).astype(np.float32), rng.random((1, 14)) < 0.4
    assert 0 < image.sum() < 14

    wide = x[0].astype(np.float64)
    (texts, by_text), (pictures, by_image) = block(experts, wide), block(experts.images, wide)
    shared = np.asarray(experts.shared(placed(x)))[0]
    found = experts(placed(x), implementation=implementation, image=placed(image))[0]
    assert_close_to_largest(found, np.where(image[0][:, None], pictures, texts) + shared, "mixed", bar=1e-5)
    alone = experts(placed(x), implementation=implementation)[0]
    assert_close_to_largest(alone, texts + shared, "texts", bar=1e-5)

    counted = rng.random((1, 14)) < 0.7
    load = np.asarray(experts.load(placed(x), placed(counted), placed(image)))
    of = lambda chosen, kind: np.bincount(chosen[(counted & kind)[0]].reshape(-1), minlength=8)
    assert load.tolist() == [*of(by_text, ~image), *of(by_image, image)]


def test_sets_of_experts_must_be_alike():
    with pytest.raises(ConfigError, match="experts of images: got 4, with shared ones of width 0; expected 8"):
        ExpertConfig(8, 2, 12, "softmax", True, images=ExpertConfig(4, 2, 4, "softmax", True))


# ------------------------------------------------------------------------------------------------------- rope


def test_frequencies_are_ernies():
    """Height and width take turns and time has the last frequencies: a transcription of transformers' rotary embedding,
    which sorts frequencies first and puts them back behind the cosine.
    """
    head, (height, width, time), theta = 32, (6, 6, 4), 30.0
    plain = 1.0 / theta ** (np.arange(0, head, 2) / head)
    spatial = plain[:-time]
    sorted_first = np.concatenate([spatial[0::2], spatial[1::2], plain[-time:]])
    place = np.array([3.0, 50.0, 700.0])  # time, height, width
    angles = place[:, None] * sorted_first
    parts = np.split(angles, [height, height + width], axis=1)
    of = [parts[number][(number + 1) % 3] for number in range(3)]
    expected = np.concatenate([np.stack(of[:2], axis=-1).reshape(-1), of[2]])

    rope = Rope(theta, head, cached="pairs", sections=(time, height, width), order="time_last")
    np.testing.assert_allclose(place[rope.axis_of_frequency] * rope.inverse_frequencies, expected, rtol=1e-12)
    with pytest.raises(LayoutError, match="expected as many for height as for width"):
        Rope(theta, head, sections=(4, 7, 5), order="time_last")


# --------------------------------------------------------------------------------------------------- the tower

TOWER = ErnieVisionConfig(2, 32, 2, 64, 64, 4, 2)


def test_pairs_of_frames():
    """An image is its own second frame; a video's frames are paired in order."""
    plan = plan_patches(TOWER, np.array([[1, 2, 4], [4, 2, 2]]))
    assert plan["first"].tolist() == [0, 4, 8, 16]
    assert plan["second"].tolist() == [0, 4, 12, 20]
    assert plan["frames"].shape == (5, 8)
    with pytest.raises(ShapeError, match="got 3 frames; expected a multiple of 2"):
        plan_patches(TOWER, np.array([[3, 2, 2]]))


def test_text_behind_a_video_by_transformers_rule(tmp_path):
    backbone = load(write_checkpoint("ernie4_5_vl", tmp_path), video_rule="hf5")
    gold = golden_arrays("ernie4_5_vl", "video")
    found = FAMILY.positions(backbone.config, gold["input_ids"], {"video_grid_thw": gold["video_grid_thw"]})
    assert np.array_equal(found, gold["position_ids_hf5"])
    assert not np.array_equal(found, gold["position_ids"])


# --------------------------------------------------------------------------------------------------- the files


def test_a_saved_file_has_the_released_names(backbone, tmp_path):
    """transformers writes and reads these: both routers' corrections in one tensor, image experts behind the others."""
    written = load_file(save(backbone, tmp_path / "saved") / "model.safetensors")
    assert {name: list(value.shape) for name, value in written.items()} == golden_shapes("ernie4_5_vl")
    original = load_file(write_checkpoint("ernie4_5_vl", tmp_path / "original") / "model.safetensors")
    for name, value in original.items():
        np.testing.assert_array_equal(written[name], value, name)


def test_the_authors_files_are_the_same_model(backbone, tmp_path):
    """Their configuration, and the tower outside `model.`."""
    directory = write_checkpoint("ernie4_5_vl", tmp_path, "config_release.json")
    path = directory / "model.safetensors"
    save_file({re.sub(r"^model\.vision_model\.", "vision_model.", n): v for n, v in load_file(path).items()}, path)
    released = load(directory)
    assert (released.config.text, released.config.vision) == (backbone.config.text, backbone.config.vision)
    jax.tree.map(np.testing.assert_array_equal, released.parameters, backbone.parameters)
    # What is written is transformers' form.
    again = load(save(released, tmp_path / "saved"))
    assert again.config.to_dict()["model_type"] == "ernie4_5_vl_moe"
    assert again.config.text == backbone.config.text


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (CONFIG, {"text_config": {"use_bias": True}}, "use_bias True, which is not built"),
        (CONFIG, {"text_config": {"mlp_layer_types": ["dense", "sparse", "dense"]}}, "expected 'dense' layers"),
        (CONFIG, {"text_config": {"moe_intermediate_size": [24]}}, "one for texts and one for images"),
        (CONFIG, {"text_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}}, "expected 'default'"),
        (CONFIG, {"vision_config": {"temporal_merge_size": 3}}, "temporal_merge_size 3, which is not built"),
        (RELEASE, {"moe_num_experts": [8, 4]}, "expected two equal numbers, of texts and of images"),
        (RELEASE, {"moe_gate": "top2"}, "moe_gate 'top2', which is not built"),
        (RELEASE, {"moe_layer_interval": 2}, "expected 'dense' layers"),
        (RELEASE, {"some_new_switch": True}, "got 'some_new_switch': True, which this library does not know"),
    ],
)
def test_configurations_that_are_refused(raw, change, message):
    raw = json.loads(json.dumps(raw))
    for name, value in change.items():
        raw[name] = {**raw[name], **value} if isinstance(value, dict) else value
    sections = {"mrope_section": [3, 3, 2], "rope_theta": 30.0}
    if "rope_parameters" in change.get("text_config", {}):
        raw["text_config"]["rope_parameters"] |= sections
    with pytest.raises(ConfigError, match=message):
        FAMILY.config(raw, "float32", None)


# ------------------------------------------------------------------------------------- sessions, batches, pages


def whole_answer(backbone, items, steps=5):
    """Greedy continuation of the whole prompt, computed at once."""
    return np.asarray(backbone.generate(backbone.embed(**backbone.prepare(items)), steps))[0].tolist()


@pytest.mark.slow
def test_a_session_answers_as_the_whole_prompt(backbone):
    """Behind one image, which is exact there; the kinds of tokens reach the pool's forwards."""
    question = [5, 9, 12]
    session = kvp.Session(backbone, chat=False)
    session.add(IMAGES[0])
    assert list(session.ask(question, steps=5).ids) == whole_answer(backbone, [IMAGES[0], question])
    # An image behind a text, every chunk prefilled behind what is in front of it.
    behind = kvp.Session(backbone, chat=False, keep=8)
    behind.add([21, 22, 23])
    behind.add(IMAGES[1])
    assert len(behind.ask(question, steps=5).ids) == 5


@pytest.mark.slow
def test_a_batch_answers_as_the_whole_prompt(backbone, tmp_path):
    items = [
        {"front": [IMAGES[0]], "question": [5, 9, 12], "steps": 4},
        {"front": [[7, 8]], "question": [9], "steps": 4},
    ]
    kvp.answer_batch(backbone, None, [kvp.batch.BatchItem(**item) for item in items], out=tmp_path / "answers.jsonl")
    answers = kvp.batch.read_answers(tmp_path / "answers.jsonl")
    for item, answer in zip(items, answers, strict=True):
        assert answer["ids"] == whole_answer(backbone, [*item["front"], item["question"]], 4)
