"""A canonical behind a lead is what one prompt of both holds, and its id says which lead that was."""
# pyright: reportArgumentType=false

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Output, Tokens
from kvpatch_jax.core import KVLayout, Rope
from kvpatch_jax.errors import ShapeError

LEAD, OTHER, UNIT = [[5, 6, 7, 8]], [[5, 6, 7, 9]], [[11, 12, 13]]


def near(found, wanted) -> bool:
    return all(np.allclose(found[name], wanted[name], atol=2e-5) for name in wanted)


def repeated(tokens: Tokens) -> Tokens:
    """Two equal rows of tokens."""
    return Tokens(*(None if part is None else np.repeat(part, 2, axis=0) for part in tokens))


def test_a_canonical_behind_a_lead_is_what_one_prompt_of_both_holds(backbone):
    """And so is conditioned KV, in rows of a batch too; its positions count from its own start."""
    middle = [21, 22]
    prompts = [backbone.embed(**backbone.prepare([ids])) for ids in (LEAD[0] + UNIT[0], LEAD[0] + middle + UNIT[0])]
    both, all_three = (backbone.prefill(tokens).kv for tokens in prompts)
    chunk, alone = kvp.make_chunk(backbone, UNIT, lead=LEAD), kvp.make_chunk(backbone, UNIT)
    assert near(chunk.kv, {name: value[:, 0, 4:] for name, value in both.items()})
    assert not near(chunk.kv, alone.kv)
    assert (np.asarray(chunk.local) == np.asarray(alone.local)).all()
    assert (chunk.span, chunk.length, alone.lead) == (alone.span, alone.length, None)

    wanted = {name: value[:, 0, 6:] for name, value in all_three.items()}
    tokens = [backbone.embed(**backbone.prepare([ids])) for ids in (LEAD[0], middle, UNIT[0])]
    found = kvp.conditioned(backbone, [[middle], UNIT], lead=LEAD)
    assert len(found) == 2
    assert near(found[1], wanted)
    rows = kvp.conditioned(backbone, [repeated(own) for own in tokens[1:]], lead=tokens[0])[1]
    for row in range(2):
        assert near({name: value[:, row] for name, value in rows.items()}, wanted)


def test_the_lead_is_part_of_a_chunks_identity(backbone):
    alone, behind, other = (kvp.make_chunk(backbone, UNIT, lead=lead) for lead in (None, LEAD, OTHER))
    for word in ("id", "content", "lead"):
        assert len({getattr(chunk, word) for chunk in (alone, behind, other)}) == 3
    tokens = backbone.embed(**backbone.prepare(LEAD))
    again = kvp.make_chunk(backbone, UNIT, lead=tokens)
    assert (again.id, again.lead) == (behind.id, behind.lead)
    assert behind.pad(9).lead == behind.lead
    with pytest.raises(ShapeError, match="lead: got 2 rows; expected one"):
        kvp.make_chunk(backbone, UNIT, lead=repeated(tokens))


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
        inputs, alone, values = np.concatenate([before, x], axis=1), np.zeros((rows, 4, 4)), []
        for t in range(count):
            mixed = inputs[:, t] + 2 * inputs[:, t + 1] + x[:, t]
            outer = mixed[:, :, None] * mixed[:, None, :]
            state, alone = 0.9 * state + outer, 0.9 * alone + outer
            seen = 0 if context is None else np.asarray(context["v"]).sum((0, 2, 3))
            values.append(np.einsum("bij,bj->bi", state, x[:, t]) + seen)
        decays = np.broadcast_to(0.9**count * np.eye(4)[:, None], (1, rows, 4, 1, 4))
        parts = {"map": decays, "state": alone[None, :, :, None]}
        parts["tail"] = np.concatenate([np.zeros((rows, 2, 4)), x], axis=1)[None, :, -2:, None]
        kv = {"k": x[None, :, :, None], "v": np.stack(values, axis=1)[None, :, :, None], **parts}
        return Output(
            jnp.zeros((rows, 1, 2)), {name: jnp.asarray(value, jnp.float32) for name, value in kv.items()}, {}
        )


def test_conditioned_units_of_a_hybrid_have_the_transition_of_their_own_tokens():
    model = RunningMean()
    found = kvp.conditioned(model, [["a"], ["bb", "ccc"], ["dddd"]], lead=["a lead"])
    x = np.asarray(model.embed(["a lead", "a", "bb", "ccc", "dddd"]).embeddings[0])
    for kv, begin, end in zip(found, (3, 6, 12), (6, 12, 15), strict=True):
        model.layout.check(kv)
        assert kv["k"].shape == (1, end - begin, 1, 4)
        state = np.zeros((4, 4))
        for t in range(begin, end):
            mixed = x[t - 2] + 2 * x[t - 1] + x[t]
            state = 0.9 * state + np.outer(mixed, mixed)
        assert np.abs(np.asarray(kv["state"][0, :, 0]) - state).max() <= 1e-5 * np.abs(state).max()
        assert np.allclose(kv["map"][0, :, 0], 0.9 ** (end - begin) * np.eye(4))
        assert np.allclose(kv["tail"][0, :, 0], x[end - 2 : end])
    alone, behind = kvp.make_chunk(model, ["a"]), kvp.make_chunk(model, ["a"], lead=["a lead"])
    assert (np.asarray(behind.kv["state"]) == np.asarray(found[0]["state"])).all()
    assert not np.allclose(alone.kv["state"], behind.kv["state"])
