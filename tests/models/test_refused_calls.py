"""A call that a model cannot compute is refused with a typed error before anything runs."""

import re
from typing import Any

import numpy as np
import pytest

from kvpatch_jax.errors import InputError, KVPatchError, NotFiniteError, ShapeError
from kvpatch_jax.models import Sampling, pad_rows
from kvpatch_jax.models.decoding.sampling import draw_of
from tests.goldens.load import golden_arrays, golden_prompt
from tests.shared.arrays import placed
from tests.shared.compilations import compilations

pytestmark = pytest.mark.usefixtures("unchecked")
AHEAD = np.tri(14, dtype=bool)[None, None].copy()
AHEAD[..., 2, 9] = True
KEEP = np.arange(14) < np.array([14, 9, 4])[:, None, None]


@pytest.fixture(scope="module")
def backbone(tiny):
    return tiny("llama2")


@pytest.fixture(scope="module")
def tokens(backbone):
    return backbone.embed(np.arange(3, 17)[None])


@pytest.fixture(scope="module")
def cache(backbone):
    return {name: placed(np.zeros((3, 1, 14, 4, 16), np.float32)) for name in backbone.layout.names}


REFUSED: list[tuple[str, dict[str, Any], type[KVPatchError], str]] = [
    ("prefill", {"logits": "first"}, InputError, "got logits 'first'; expected 'last', 'all' or indices [B, n]"),
    ("prefill", {"logits": np.array([3])}, InputError, "got logits of shape (1,); expected 'last', 'all' or indices"),
    ("prefill", {"logits": np.array([[14]])}, InputError, "got logits of tokens [[14]]; expected indices from 0 to 13"),
    ("prefill", {"chunk": 0}, InputError, "chunk: got 0; expected a number of tokens, at least 1"),
    ("prefill", {"chunk": 4, "mask": AHEAD}, InputError, "token 2 sees token 9, which is in a later chunk of 4"),
    ("prefill", {"start_layer": 4}, ShapeError, "expected layers of this decoder, 0…3"),
    ("recompute", {"keep": KEEP[::-1]}, ShapeError, "each inside the one below"),
    ("recompute", {"keep": KEEP[:2]}, ShapeError, "per layer (3)"),
    ("recompute", {"stop_layer": 4}, ShapeError, "expected a part of the layers 0 to 3"),
    ("recompute", {"start_layer": 2, "hidden_at": (1,)}, ShapeError, "and residuals inside it"),
    ("recompute", {"slots": np.zeros((1, 3), np.int32)}, ShapeError, "got slots of shape (1, 3); expected (1, 14)"),
    *(
        (call, options, error, "expected")  # a stream too is refused before its first token
        for call in ("generate", "stream")
        for options, error in (
            ({"steps": -1}, InputError),
            ({"stop": (300_000,)}, InputError),
            ({"lengths": [15]}, ShapeError),
            ({"sampling": Sampling(0.5)}, InputError),  # without a key
        )
    ),
]


@pytest.mark.parametrize(("call", "options", "error", "message"), REFUSED, ids=str)
def test_calls(backbone, tokens, cache, call, options, error, message):
    if call == "recompute":
        options = {"cache": cache, "slots": np.arange(14)[None], **options}
    elif call != "prefill":
        options = {"steps": 3, **options}
    with compilations() as compiled, pytest.raises(error, match=re.escape(message)):
        getattr(backbone, call)(tokens, **options)
    assert not compiled


def test_logits_that_are_no_numbers_and_prompts_of_nothing(backbone, tokens):
    spoilt = np.array(tokens.embeddings)
    spoilt[0, 2] = np.nan
    with pytest.raises(NotFiniteError, match=r"row 0: got logits of token 0 .*expected"):
        backbone.generate(tokens._replace(embeddings=placed(spoilt)), 3, stop=())
    with pytest.raises(InputError, match="no prompts; expected"):
        pad_rows([])
    with pytest.raises(ShapeError, match="expected"):
        pad_rows([tokens, tokens._replace(embeddings=placed(spoilt[..., :3]))])
    assert backbone.generate(tokens, 0).shape == (1, 0)
    for empty in (tokens.take(0, 0), tokens._replace(embeddings=placed(spoilt[:0]), positions=tokens.positions[:0])):
        for call in (backbone.prefill, lambda none: backbone.generate(none, 3), lambda none: backbone.stream(none, 3)):
            with pytest.raises(ShapeError, match="expected at least one row and one token"):
                call(empty)
    with pytest.raises(ShapeError, match=r"token ids \(0, 4\); expected at least one row"):
        backbone.embed(np.zeros((0, 4), np.int32))
    with pytest.raises(InputError, match="at most 64 bits"):
        draw_of(Sampling(0.7), 2**63, ())
    with pytest.raises(InputError, match=r"features: got some for .*, which takes no images"):
        backbone.embed(np.arange(4)[None], features=np.zeros((1, 2, 4), np.float32))


def test_images_that_do_not_match_their_prompt(tiny):
    backbone, family = tiny("qwen2_5_vl"), "qwen2_5_vl"
    gold = golden_prompt(backbone, family, "two_images")
    places = golden_arrays(family, "two_images")["position_ids"][None]
    ids, grid, pixels = gold["input_ids"], gold["image_grid_thw"], gold["pixel_values"]
    with pytest.raises(InputError, match=r"pixel_values: got shape \(96, 96\); expected \(100, 96\)"):
        backbone.embed(ids, places, pixels[4:], grid)
    with pytest.raises(InputError, match="input_ids: got 25 image placeholders; expected 15"):
        backbone.embed(ids, places, pixels[:60], grid[:1])
    with pytest.raises(InputError, match="2 rows without position_ids"):
        backbone.embed(np.concatenate([ids, ids]))
    with pytest.raises(InputError, match=r"features: got shape .*; expected \("):
        backbone.embed(ids, places, features=np.zeros((1, 24, 48), np.float32))

    with pytest.raises(InputError, match=r"'which page\?'.*tokenizer.json\); expected token ids"):
        backbone.prepare(["which page?"])
    with pytest.raises(InputError, match="type dict; expected text, token ids or an image"):
        backbone.prepare([[1], {"image": "page.png"}])
