"""Ids and names: what makes them equal, what keeps them apart."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import chunk_of, patch_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import InputError
from kvpatch_jax.store import PatchKey, chunk_id, encoder_id
from kvpatch_jax.store.format.naming import ObjectNames

NAMES = ObjectNames("one", b"s" * 32)
PIXELS = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)


def test_an_id_is_the_content_and_the_reader():
    first = chunk_id("model", PIXELS)
    assert len(first) == 64
    assert first == chunk_id("model", PIXELS.copy(order="F")) == chunk_id("model", jnp.asarray(PIXELS))
    others = [
        chunk_id("other", PIXELS),
        chunk_id("model", PIXELS + 1),
        chunk_id("model", PIXELS.reshape(4, 2, 3)),
        chunk_id("model", PIXELS.astype(np.int16)),
        chunk_id("model", PIXELS, PIXELS),
        chunk_id("model", PIXELS.tobytes()),
        encoder_id("model", {"pixel_values": PIXELS}),
        encoder_id("model", {"other": PIXELS}),
    ]
    assert len({first, *others}) == len(others) + 1
    assert chunk_id("model", [1, 2]) == chunk_id("model", np.asarray([1, 2], np.int64))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_no_two_lists_of_parts_run_together(first: list[bytes], second: list[bytes]):
    ids = [chunk_id("model", b"", *parts) for parts in (first, second)]
    assert (ids[0] == ids[1]) == (first == second)


def test_bad_content_is_refused(unchecked: None):
    for call in (
        lambda: chunk_id("", PIXELS),
        lambda: chunk_id("model"),
        lambda: chunk_id("model", np.asarray(["a"])),
        lambda: encoder_id("model", {}),
        lambda: ObjectNames("", b"s" * 32),
        lambda: ObjectNames("one", b"short"),
        lambda: NAMES.canonical("model", "B", "int3"),
    ):
        with pytest.raises(InputError, match="expected"):
            call()


def test_names_are_keyed_by_tenant_and_secret():
    others = [ObjectNames("two", b"s" * 32), ObjectNames("one", b"t" * 32), ObjectNames("one", b"s" * 64)]
    places = [names.canonical("model", "B") for names in (NAMES, *others)]
    assert len({place.path for place in places}) == len({place.chunk for place in places}) == 4
    assert NAMES.canonical("model", "B") == places[0]
    assert b"s" * 8 not in repr(NAMES).encode()


def test_a_patch_is_named_by_its_key_and_form():
    chunk = chunk_of()
    patch = patch_of(chunk, ("A1", "A2"))
    orbit = dataclasses.replace(patch, metadata=dataclasses.replace(patch.metadata, orbit=True))
    turned = dataclasses.replace(patch, metadata=dataclasses.replace(patch.metadata, antecedent=("A2", "A1")))
    turned_orbit = dataclasses.replace(turned, metadata=dataclasses.replace(turned.metadata, orbit=True))
    fewer = kvp.keep_layers(patch, (1, 2))
    smaller = patch_of(chunk, ("A1", "A2"), rank=1)
    removal = dataclasses.replace(patch, metadata=dataclasses.replace(patch.metadata, base="conditioned"))
    assert NAMES.patch(orbit) == NAMES.patch(turned_orbit)
    different = [patch, orbit, turned, fewer, smaller, removal]
    assert len({NAMES.patch(each).file for each in different}) == len(different)
    served = NAMES.patches(PatchKey("B", "tiny", ("A1", "A2")))
    begins = [NAMES.patch(each).file.startswith(served.file) for each in different]
    assert begins == [True, False, False, True, True, False]
    assert all(NAMES.patch(each).chunk == NAMES.canonical("tiny", "B").chunk for each in different)
