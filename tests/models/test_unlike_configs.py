"""Decoders whose layers are of unlike kinds: what their configurations may say, and what Gemma 3's files mean."""
# pyright: reportArgumentType=false

import dataclasses
from typing import Any

import pytest

from kvpatch_jax.core import Rope
from kvpatch_jax.errors import ConfigError, LayoutError
from kvpatch_jax.models.decoder.config import DecoderConfig, LayerKind
from kvpatch_jax.models.decoder.costs import forward_costs
from kvpatch_jax.models.decoder.sharding import cache_specs, partition_specs

FULL, LOCAL = LayerKind("", Rope(1e6, 16), 16, 2), LayerKind("local", Rope(1e4, 16), 16, 2, 6)
SIZES: dict[str, Any] = {
    **{"vocabulary": 300, "width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 96},
    **{"rope": FULL.rope, "kinds": (FULL, LOCAL), "kind_of": (1, 0, 1)},
}


def test_kinds_say_channels_windows_and_edges():
    config = DecoderConfig(**SIZES)
    assert config.window == 6
    assert [config.slides(layer) for layer in range(3)] == [True, False, True]
    assert config.kind_edges == (1, 2)
    assert config.rows == (0, 0, 1)
    assert {c.name: c.layers for c in config.layout.channels} == {
        **{"k": (1,), "v": (1,)},
        **{"k_local": (0, 2), "v_local": (0, 2)},
    }
    assert forward_costs(config).window == (6, 0, 6)
    assert dataclasses.replace(config, dtype="bfloat16").layout == config.layout


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": (FULL, dataclasses.replace(LOCAL, kv_heads=3))}, "got 3 KV heads of width 16; expected a divisor"),
        ({"kinds": (FULL, dataclasses.replace(LOCAL, reads=True))}, "layer 0: got one that reads the KV of no layer"),
    ],
)
def test_kinds_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**SIZES | change)


@pytest.mark.usefixtures("unchecked")
def test_a_mesh_refuses_them_by_name():
    class OneDevice:
        axis_names, shape = ("tensor",), {"tensor": 1}

    config = DecoderConfig(**SIZES)
    for call in (lambda: partition_specs(config, {}, OneDevice()), lambda: cache_specs(config.layout, OneDevice())):
        with pytest.raises(LayoutError, match="mesh: got a layout whose channel 'k' has layers of its own"):
            call()
