"""Layouts as JSON, in the bodies of objects: channels, ropes and their scaling."""

import dataclasses
import functools
import itertools
import marshal
from collections.abc import Iterator, Mapping
from typing import Any

from ...core import Channel, KVLayout, Rope, Scaling
from ...errors import StoreCorruptError
from .known_words import expect_fields

_OWN, _SHARE = ("rope", "layers", "rows"), ("share",)
"""Fields of a channel, and of a rope's scaling, that are written where these have them."""


@functools.lru_cache(maxsize=64)
def layout_body(layout: KVLayout) -> Mapping[str, Any]:
    """Returns a layout as JSON. Cached, because all objects of a model share it: do not modify it.

    A channel's own rope and layers, and the rows of a transition's part, are written where it has some: layouts without
    them are as earlier versions wrote them, and readers that do not know the fields refuse those with them.
    """
    body = dataclasses.asdict(layout)
    body["channels"] = [_said(channel, _OWN) for channel in body["channels"]]
    for rope in (body["rope"], *(channel["rope"] for channel in body["channels"] if "rope" in channel)):
        if rope["scaling"] is not None:
            rope["scaling"] = _said(rope["scaling"], _SHARE)
    return body


def _said(table: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in fields or value is not None}


def layout_of(body: Mapping[str, Any]) -> KVLayout:
    """Decodes a layout that `layout_body` encoded.

    Raises:
      StoreCorruptError, ValueError, TypeError, LookupError: it is malformed.
    """
    # Decoded once per content: building and checking a layout takes longer than reading a small object.
    return _layout_of_bytes(content_of_values(body))


def content_of_values(*values: Any) -> bytes:
    """Returns values from JSON as bytes, equal only for equal values of equal types: 1, 1.0 and true differ."""
    return marshal.dumps(values, 2)


@functools.lru_cache(maxsize=64)
def _layout_of_bytes(content: bytes) -> KVLayout:
    [body] = marshal.loads(content)
    expect_fields("layout", body, KVLayout)
    rope = _rope_of(body["rope"])
    channels: list[Channel] = []
    for found in body["channels"]:
        expect_fields("channel", found, Channel)
        own = dict(found)
        # These fields are there only where they say something.
        if any(name in own and own[name] is None for name in _OWN):
            raise StoreCorruptError(
                "object: got a channel with an empty rope, layers or rows; expected none of the field"
            )
        if "rope" in own:
            own["rope"] = _rope_of(own["rope"])
        if "layers" in own:
            if type(own["layers"]) is not list or any(type(layer) is not int for layer in own["layers"]):
                raise StoreCorruptError(f"object: got layers {str(own['layers'])[:40]}; expected numbers")
            own["layers"] = tuple(own["layers"])
        channels.append(Channel(**own))
    if type(body["layers"]) is not int:  # `isinstance` would accept true
        raise StoreCorruptError(f"object: got {str(body['layers'])[:40]} layers; expected a number")
    return KVLayout(body["kind"], body["layers"], tuple(channels), rope)


def _rope_of(body: Mapping[str, Any]) -> Rope:
    expect_fields("rope", body, Rope)
    expect_fields("scaling", body["scaling"], Scaling)
    rope = dict(body)
    if rope["scaling"] is not None:
        if "share" in rope["scaling"] and rope["scaling"]["share"] is None:
            raise StoreCorruptError("object: got a scaling with an empty share; expected none of the field")
        scaling: dict[str, Any] = {}
        for name, value in rope["scaling"].items():
            scaling[name] = tuple(value) if isinstance(value, list) else value
        rope["scaling"] = Scaling(**scaling)

    rope["sections"] = None if rope["sections"] is None else tuple(rope["sections"])
    return Rope(**rope)


def kept_by_layer(layout: KVLayout) -> Iterator[tuple[int, str, int]]:
    """Yields, layer by layer, each channel that the layer keeps, and the layer's place among those that keep it."""
    places = {name: dict(zip(layout.layers_of(name), itertools.count())) for name in layout.names}
    for layer in range(layout.layers):
        for name, own in places.items():
            if layer in own:
                yield layer, name, own[layer]
