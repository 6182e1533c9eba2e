"""Ways that choose the page's tokens by the question, over the sheets task: `evals.probes.by_question` says which.

Questions of one length are read together. Axis letters: B contexts, Q questions, N tokens of a question, M of several,
T tokens of the page, n chosen ones, S keys, L layers, V vocabulary.
"""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import kvpatch_jax as kvp
from kvpatch_jax.backbone import Tokens
from kvpatch_jax.repair import SplicedCache, fraction_to_count, repair_everywhere

from ..probes.by_question import best, marks_of, mean_attention, rankings
from ..results.costs import ArmCost
from .reuse import KV, Reuse


def by_question(reuse: Reuse, names: Iterable[str]) -> Iterator[tuple[str, ArmCost, Float[np.ndarray, "B M V"]]]:
    """Yields arms named "way.budget=share": what each costs, and log-probabilities behind every question's tokens.

    The ways are those of `evals.probes.by_question`. Tokens that are run again see the moved canonicals of the sheets.
    """
    groups = _alike(reuse.questions.own)
    blind = reuse.cache()
    ranked = [rankings(_received(reuse, columns, blind)) for columns in groups]
    for name in names:
        way, _, share = name.partition(".budget=")
        count = max(1, fraction_to_count(float(share), reuse.page.tokens))
        said = np.zeros((*reuse.questions.ids.shape, reuse.backbone.config.text.vocabulary), np.float32)
        for columns, of in zip(groups, ranked, strict=True):
            index = best(of[way][0], count)
            answer = _over_entries if way == "prcr" else _recomputed
            said[:, columns.reshape(-1)] = answer(reuse, blind, columns, index)
        yield name, _cost(reuse, way, count, ranked[0][way][1]), said


def _cost(reuse: Reuse, way: str, count: int, layers: int) -> ArmCost:
    """Counts a question of two tokens."""
    costs, page = reuse.costs, reuse.form.page
    choosing = costs.reading(2, page.stop, layers)
    if way == "prcr":
        return ArmCost(serving=costs.rotation, question=choosing, forming=costs.alone)
    again = costs.forward.flops(count, page.start + costs.tokens // 2)
    return ArmCost(inputs=costs.tokens, serving=costs.rotation, question=choosing + again, forming=costs.alone)


def _alike(own: Int[np.ndarray, " M"]) -> list[Int[np.ndarray, "Q N"]]:
    """Columns of the questions' tokens, questions of one length together."""
    spans = [np.flatnonzero(own == number) for number in range(own.max() + 1)]
    sizes = sorted({len(span) for span in spans})
    return [np.stack([span for span in spans if len(span) == size]) for size in sizes]


def _asking(reuse: Reuse, columns: Int[np.ndarray, "Q N"]) -> tuple[Tokens, Bool[np.ndarray, "B 1 M S"]]:
    """Embeds questions, and says whom they see: all of the prefix, and each its own tokens."""
    flat, (count, length) = columns.reshape(-1), columns.shape
    tokens = reuse.backbone.embed(reuse.questions.ids[:, flat], reuse.behind[:, flat])
    own = np.kron(np.eye(count, dtype=bool), np.tri(length, dtype=bool))
    mask = np.concatenate([np.ones((len(flat), reuse.form.prefix_tokens), bool), own], axis=1)
    return tokens, np.array(np.broadcast_to(mask, (len(reuse.contexts), 1, *mask.shape)))


def _received(reuse: Reuse, columns: Int[np.ndarray, "Q N"], cache: KV) -> Float[np.ndarray, "L B Q T"]:
    """Finds the attention that the page's tokens receive from each question, the mean over heads."""
    tokens, mask = _asking(reuse, columns)
    layers = tuple(range(reuse.backbone.layout.layers))
    run = reuse.backbone.prefill(tokens, cache, mask, hidden_at=layers)
    turned = kvp.to_engine(reuse.backbone.layout, dict(run.kv), np.asarray(tokens.positions), 0)
    keys = {name: jnp.concatenate([cache[name], turned[name]], axis=2) for name in turned}
    hidden = tuple(run.hidden[layer] for layer in layers)
    found = mean_attention(reuse.backbone, hidden, jnp.asarray(tokens.positions), keys, jnp.asarray(mask))
    page = np.asarray(found)[..., reuse.form.page]
    return page.reshape(*page.shape[:2], *columns.shape, -1).sum(axis=3)


def _recomputed(
    reuse: Reuse, cache: KV, columns: Int[np.ndarray, "Q N"], index: Int[np.ndarray, "B Q n"]
) -> Float[np.ndarray, "B M V"]:
    """Reads every question over a cache of its own, in which its own tokens are recomputed: one row each."""
    splice = reuse.splice()
    (count, length), rows = columns.shape, len(reuse.contexts)
    by_row = lambda value, axis=0: jnp.repeat(jnp.asarray(value), count, axis=axis)
    given, deepstack = splice.tokens, splice.tokens.deepstack
    own = Tokens(by_row(given.embeddings), by_row(given.positions), None if deepstack is None else by_row(deepstack))
    wide = SplicedCache(own, {name: by_row(value, 1) for name, value in cache.items()}, by_row(splice.slots))
    mended = dict(repair_everywhere(reuse.backbone, wide, jnp.asarray(index.reshape(rows * count, -1))).cache)
    cut = lambda value: value[:, columns].reshape(rows * count, length, *value.shape[2:])
    tokens = reuse.backbone.embed(cut(reuse.questions.ids), cut(reuse.behind))
    return _said(reuse.backbone.prefill(tokens, mended, logits="all").logits).reshape(rows, count * length, -1)


def _over_entries(
    reuse: Reuse, cache: KV, columns: Int[np.ndarray, "Q N"], index: Int[np.ndarray, "B Q n"]
) -> Float[np.ndarray, "B M V"]:
    """Reads every question over the sheets and its own entries of the page alone; nothing is run again."""
    tokens, mask = _asking(reuse, columns)
    mask[:, 0, :, reuse.form.page] = np.repeat(marks_of(index, reuse.page.tokens), columns.shape[1], axis=1)
    return _said(reuse.backbone.prefill(tokens, cache, mask, logits="all").logits)


def _said(logits: Array) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))
