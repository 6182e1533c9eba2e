"""A backbone's fingerprint changes with any bit, name or order of its parameters, and not with where they lie."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from kvpatch_jax.models.fingerprint import fingerprint_of


def parameters() -> dict:
    draw = np.random.default_rng(0).standard_normal
    return {
        "layers": {"kernel": draw((3, 5, 4), np.float32), "bias": draw((3, 4), np.float32)},
        "norm": np.ones(4, np.float32),
        "scale": np.full((), 2, np.float32),
        "none": np.zeros((0, 3), np.float32),
    }


def changed(path: tuple[str, ...], change) -> dict:
    values = parameters()
    owner = values
    for part in path[:-1]:
        owner = owner[part]
    owner[path[-1]] = change(owner[path[-1]])
    return values


LARGE = np.repeat(np.arange(5, dtype=np.float32), 1 << 21).reshape(5, 1 << 21)
OTHERS = {
    "one unit in the last place": changed(
        ("norm",), lambda a: a * np.array([1, 1, np.nextafter(np.float32(1), 2), 1], np.float32)
    ),
    "zero's sign": changed(("norm",), lambda a: a * np.array([0, 1, 1, 1], np.float32)),
    "zero's other sign": changed(("norm",), lambda a: a * np.array([-0.0, 1, 1, 1], np.float32)),
    "two rows in each other's place": changed(("layers", "kernel"), lambda a: a[:, [1, 0, 2, 3, 4]]),
    "two layers in each other's place": changed(("layers", "kernel"), lambda a: a[[1, 0, 2]]),
    "the same bytes in another shape": changed(("layers", "kernel"), lambda a: a.reshape(3, 4, 5)),
    "the same bytes in another type": changed(("layers", "kernel"), lambda a: a.view(np.int32)),
    "rounded": changed(("layers", "kernel"), lambda a: a.astype(jnp.bfloat16)),
    "another scalar": changed(("scale",), lambda a: np.full_like(a, 3)),
    "empty in another shape": changed(("none",), lambda a: a.reshape(3, 0)),
    "under another name": {"more": parameters()},
    "one less": {name: value for name, value in parameters().items() if name != "none"},
}


def test_every_other_content_has_another_fingerprint():
    found = {name: fingerprint_of([b"settings"], values) for name, values in OTHERS.items()}
    found["itself"] = fingerprint_of([b"settings"], parameters())
    found["other settings"] = fingerprint_of([b"setting", b"s"], parameters())
    assert len(set(found.values())) == len(found)


def test_large_parameters_have_other_fingerprints_in_another_order():
    """Five rows of 8 MiB, whichever of them share a piece of 16 MiB."""
    orders = ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [2, 3, 0, 1, 4], [0, 1, 2, 4, 3], [0, 1, 2, 3])
    found = {fingerprint_of([], {"large": LARGE[order]}) for order in orders}
    assert len(found) == len(orders)


def test_threads_and_where_it_lies_do_not_change_it(monkeypatch):
    expected = fingerprint_of([], parameters())
    assert fingerprint_of([], jax.tree.map(jnp.asarray, parameters())) == expected
    assert fingerprint_of([], changed(("layers", "kernel"), np.asfortranarray)) == expected
    assert fingerprint_of([], dict(reversed(parameters().items()))) == expected
    values = {"large": jax.device_put(LARGE)}
    expected = fingerprint_of([], {"large": LARGE})
    assert fingerprint_of([], values) == expected
    elsewhere = types.SimpleNamespace(platform="gpu")  # from an accelerator it is fetched by pieces
    monkeypatch.setattr(type(values["large"]), "devices", lambda _: [elsewhere])
    assert fingerprint_of([], values) == expected
