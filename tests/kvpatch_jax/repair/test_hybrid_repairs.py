"""Repairs work token by token, which a state of linear attention does not: every one refuses hybrid models by name."""
# pyright: reportArgumentType=false

from types import SimpleNamespace

import numpy as np
import pytest
from transition_cases import LAYOUT

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.errors import LayoutError
from kvpatch_jax.repair import REPAIRS, SplicedCache


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", ["cacheblend", "vlcache", "mpic", "shadowkv", "anchored"])
def test_a_hybrid_model_is_refused(name: str):
    tokens = Tokens(np.zeros((1, 2, 4), np.float32), np.arange(2, dtype=np.int32)[None])
    splice = SplicedCache(tokens, {}, np.arange(2)[None])
    with pytest.raises(LayoutError, match=r"repair: got a hybrid model, with linear attention on layers \[\d"):
        REPAIRS[name](SimpleNamespace(layout=LAYOUT), splice, 0.5)
