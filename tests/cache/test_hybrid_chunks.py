"""Chunks of hybrid models: what their transition takes part in, and what is refused of it."""
# pyright: reportArgumentType=false

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvpatch_jax import joined
from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.cache import Chunk, decode_chunk, encode_chunk, examine
from kvpatch_jax.core import KVEncoding, KVLayout, PackedArray, Rope, to_engine
from kvpatch_jax.errors import InputError, LayoutError, NotFiniteError, ShapeError
from kvpatch_jax.patching import apply_patch, conditioned, make_chunk
from tests.shared.transition_cases import LAYOUT, LAYOUTS, LINEAR, PLAIN, TOKENS, chunk_of, close, composed, drawn

PARTS = {"map", "state", "tail"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tokens_and_batch_are_those_of_the_rows(name: str):
    layout = LAYOUTS[name]
    chunk = chunk_of(layout, length=5)
    assert (chunk.tokens, chunk.batch, chunk.length) == (TOKENS, None, 5)
    assert chunk.nbytes == layout.bytes_per_token(np.float32) * TOKENS + layout.transition_bytes()
    assert all(f"{channel} [" in repr(chunk) for channel in layout.names)
    batch = chunk_of(layout, batch=(2,))
    assert (batch.tokens, batch.batch) == (TOKENS, 2)


def test_padding_leaves_the_transition_and_the_content():
    chunk = chunk_of(length=2, rows=jnp.bfloat16)
    padded = chunk.pad(11)
    assert padded.tokens == 11
    assert padded.content == chunk.content
    for name in PARTS:
        assert padded.kv[name] is chunk.kv[name]
    # As computed from the arrays again, not only as carried over.
    again = dataclasses.replace(padded, kv=dict(padded.kv))
    assert again.content == chunk.content
    assert (again.kv["k"][:, 2:] == chunk.pad(11).kv["k"][:, 2:]).all()


def test_content_is_of_every_number_of_the_transition():
    # Two tokens: fewer than any part has rows, so that a part that was masked by the length would go unseen.
    kv, content = drawn(), chunk_of(length=2).content
    for name, place in (("map", -1), ("state", -1), ("tail", -1), ("map", 0), ("tail", 0)):
        other = {key: value.copy() for key, value in kv.items()}
        other[name].reshape(-1)[place] += 1e-3
        changed = dataclasses.replace(chunk_of(length=2), kv=other, content=None)
        assert changed.content != content, (name, place)
    other = {key: value.copy() for key, value in kv.items()}
    other["k"][:, 2:] += 1
    assert dataclasses.replace(chunk_of(length=2), kv=other, content=None).content == content
    assert examine(kv, 2)[1]
    assert not examine(kv | {"tail": kv["tail"] * np.nan}, 2)[1]


def test_what_is_no_chunk_of_the_layout_is_refused(unchecked):
    kv, local = drawn(), np.arange(TOKENS, dtype=np.float32)

    def made(kv, layout=LAYOUT, **fields):
        return Chunk(kv, local, TOKENS, TOKENS, "page", layout, "backbone", **fields)

    with pytest.raises(LayoutError, match="got channels"):
        made({name: value for name, value in kv.items() if name != "tail"})
    with pytest.raises(LayoutError, match="got channels"):
        made(kv, PLAIN)
    with pytest.raises(LayoutError, match="got channels"):
        made({"k": kv["k"], "v": kv["v"]})
    # A transition where rows are expected, rows where a transition is, a state of other heads, one row too few.
    for name, value in (
        ("k", kv["state"]),
        ("state", kv["k"]),
        ("state", kv["state"][:, :, :2]),
        ("tail", kv["tail"][:, 1:]),
        ("map", kv["map"][None]),
    ):
        with pytest.raises(ShapeError, match=f"\\['{name}'\\]: got shape"):
            made(kv | {name: value})
    for name in PARTS:
        broken = kv[name].copy()
        broken[-1, -1, -1, -1] = np.inf
        with pytest.raises(NotFiniteError, match=f"\\['{name}'\\]: got 1"):
            made(kv | {name: broken})
    packed = encode_chunk(chunk_of(), "k4v4").kv
    with pytest.raises(InputError, match="expected \\['k', 'v'\\] packed"):
        made({**packed, "v": kv["v"]}, encoding="k4v4g32")
    with pytest.raises(LayoutError, match="with a transition to cut to tokens 1 to 3"):
        LAYOUT.between(kv, 1, 3)
    assert LAYOUT.of_layers(kv, (0, 2))["map"].shape[0] == 1


@pytest.mark.nightly
def test_few_bits_pack_the_rows_and_round_the_transition():
    chunk = chunk_of(length=5)
    few = encode_chunk(chunk, "k4v4")
    assert few.content == chunk.content
    assert few.nbytes == KVEncoding.of("k4v4").nbytes(LAYOUT, TOKENS)
    for name, value in few.kv.items():
        assert isinstance(value, PackedArray) == (name not in PARTS)
        own = np.asarray(jnp.asarray(value), np.float32)
        if name in PARTS:
            assert (np.abs(own - chunk.kv[name]) <= 2**-8 * np.abs(chunk.kv[name])).all()
            assert value.dtype == jnp.bfloat16
    plain = Chunk(
        {n: chunk.kv[n][:2] for n in "kv"}, chunk.local, 7, 5, "page", KVLayout.gqa(2, 2, 8, Rope(1e4, 8)), "b"
    )
    for name in "kv":
        assert (np.asarray(few.kv[name]) == np.asarray(encode_chunk(plain, "k4v4").kv[name])).all()
    padded = few.pad(9)
    assert padded.tokens == 9
    assert padded.kv["state"] is few.kv["state"]
    placed = apply_patch(few, start=3)
    for name in PARTS:
        assert (np.asarray(placed[name]) == np.asarray(few.kv[name])).all()
    for name, value in apply_patch(decode_chunk(few), start=3).items():
        assert (np.asarray(value) == np.asarray(placed[name])).all()


# ------------------------------------------------------------------------------------------------------- contexts


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_context_has_rows_side_by_side_and_transitions_composed(name: str):
    layout, counts = LAYOUTS[name], (2, 1, 5)
    pieces = [drawn(layout, seed, tokens) for seed, tokens in enumerate(counts)]
    placed = [to_engine(layout, kv, np.arange(n, dtype=np.float32), 9) for kv, n in zip(pieces, counts, strict=True)]
    context = joined(*placed)
    layout.check(context)
    wanted = composed(pieces, list(counts))
    close({part: np.asarray(context[part])[:, 0] for part in wanted}, wanted)
    for row in "kv":
        assert (np.asarray(context[row])[:, 0] == np.concatenate([np.asarray(kv[row]) for kv in placed], axis=1)).all()
    # With the true lengths of padded pieces.
    short = joined(*placed, lengths=[2, 1, 1])
    wanted = composed(pieces, [2, 1, 1])
    close({part: np.asarray(short[part])[:, 0] for part in wanted}, wanted)


def test_rows_of_a_batch_have_lengths_of_their_own():
    pieces = [drawn(seed=seed, batch=(2,)) for seed in range(2)]
    local = np.arange(TOKENS, dtype=np.float32)
    context = joined(*(to_engine(LAYOUT, kv, local, 0) for kv in pieces), lengths=[7, np.array([1, 3])])
    for row, length in enumerate((1, 3)):
        wanted = composed([{name: kv[name][:, row] for name in PARTS} for kv in pieces], [7, length])
        close({part: np.asarray(context[part])[:, row] for part in wanted}, wanted)


def test_parts_that_make_no_context_are_refused(unchecked):
    kv = apply_patch(chunk_of())
    other = apply_patch(chunk_of(PLAIN.with_transitions(LINEAR, 3, 5, 4, tail=(3, 10))))
    for parts, error in (
        ((kv, other), ShapeError),
        ((kv, {name: value for name, value in kv.items() if name != "tail"}), LayoutError),
        (({name: value for name, value in kv.items() if name != "state"},), LayoutError),
        (({name: kv[name] for name in ("map", "state")},), LayoutError),
    ):
        with pytest.raises(error, match="joined"):
            joined(*parts)
    with pytest.raises(InputError, match="joined: got 1 lengths of 2 parts"):
        joined(kv, kv, lengths=[3])


class RunningMean:
    """A hybrid model of one linear layer and one attention layer, in NumPy: S ← .9·S + x xᵀ, read by the next layer."""

    layout = KVLayout.gqa(2, 1, 4, Rope(1e4, 4)).with_transitions((0,), 1, 4, 4, tail=(2, 4))
    fingerprint, forward_costs = "running mean", None
    encode = property(lambda self: None)

    def prepare(self, items):
        return {"items": items}

    recompute = attention = decode = generate = prepare

    def embed(self, items, features=None):
        numbers = np.concatenate([np.random.default_rng(len(str(item))).normal(size=(3, 4)) for item in items])
        return Tokens(jnp.asarray(numbers[None], jnp.float32), np.arange(len(numbers), dtype=np.int32)[None])

    def prefill(self, tokens: Tokens, context=None, **_):
        x = np.asarray(tokens.embeddings, np.float32)
        rows, count = x.shape[:2]
        state = np.zeros((rows, 4, 4)) if context is None else np.asarray(context["state"][0, :, :, 0])
        before = np.zeros((rows, 2, 4)) if context is None else np.asarray(context["tail"][0, :, :, 0])
        inputs, own, values = np.concatenate([before, x], axis=1), np.zeros((rows, 4, 4)), []
        for t in range(count):
            mixed = inputs[:, t] + 2 * inputs[:, t + 1] + x[:, t]
            outer = mixed[:, :, None] * mixed[:, None, :]
            state, own = 0.9 * state + outer, 0.9 * own + outer
            seen = 0 if context is None else np.asarray(context["v"]).sum((0, 2, 3))
            values.append(np.einsum("bij,bj->bi", state, x[:, t]) + seen)
        decays = np.broadcast_to(0.9**count * np.eye(4)[:, None], (1, rows, 4, 1, 4))
        parts = {"map": decays, "state": own[None, :, :, None]}
        parts["tail"] = np.concatenate([np.zeros((rows, 2, 4)), x], axis=1)[None, :, -2:, None]
        kv = {"k": x[None, :, :, None], "v": np.stack(values, axis=1)[None, :, :, None], **parts}
        return Output(
            jnp.zeros((rows, 1, 2)), {name: jnp.asarray(value, jnp.float32) for name, value in kv.items()}, {}
        )


@pytest.mark.nightly
def test_conditioned_units_have_the_transition_of_their_own_tokens():
    model = RunningMean()
    units = [["a"], ["bb", "ccc"], ["dddd"]]
    found = conditioned(model, units, lead=["a lead"])
    everything = model.embed([*["a lead"], "a", "bb", "ccc", "dddd"])
    x = np.asarray(everything.embeddings[0])
    edges = np.cumsum([3, 3, 6, 3])
    for kv, begin, end in zip(found, edges[:-1], edges[1:], strict=True):
        model.layout.check(kv)
        assert kv["k"].shape == (1, end - begin, 1, 4)
        own = np.zeros((4, 4))
        for t in range(begin, end):
            mixed = x[t - 2] + 2 * x[t - 1] + x[t]
            own = 0.9 * own + np.outer(mixed, mixed)
        assert np.abs(np.asarray(kv["state"][0, :, 0]) - own).max() <= 1e-5 * np.abs(own).max()
        assert np.allclose(kv["map"][0, :, 0], 0.9 ** (end - begin) * np.eye(4))
        assert np.allclose(kv["tail"][0, :, 0], x[end - 2 : end])
    # Rows of the batch, as they came; the chunk of the first unit alone differs from the unit behind the lead.
    both = Tokens(jnp.concatenate([model.embed(["a"]).embeddings] * 2), np.zeros((2, 3), np.int32) + np.arange(3))
    assert conditioned(model, [both, both])[1]["state"].shape == (1, 2, 4, 1, 4)
    alone, behind = make_chunk(model, ["a"]), make_chunk(model, ["a"], lead=["a lead"])
    assert (np.asarray(behind.kv["state"]) == np.asarray(found[0]["state"])).all()
    assert not np.allclose(alone.kv["state"], behind.kv["state"])
