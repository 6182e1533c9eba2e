"""Ways that choose tokens by the question: its own attention over the blind cache says which tokens are run again.

What is chosen is chosen for one question, so that every question pays for its own. Chosen tokens and question are one
prefill: a chosen token stands at its place in the page, sees the true legends, the page's tokens in front of it and
the other chosen ones afresh, and the question sees the fresh ones in place of the blind. That is recomputing them in
the cache, without a copy of the cache for every question. Axis letters: B contexts, Q questions, G questions of one
prefill, T tokens of the page, S keys of the prefix, N chosen tokens, L layers.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kvpatch_jax.backbone import Tokens
from kvpatch_jax.core import rope_tables, rotate
from kvpatch_jax.repair import fraction_to_count

from ..results.costs import ArmCost
from ..rules import RULES
from ..small_task import Questions, scenes
from ..small_task.scenes import KV, Answers
from ..small_task.sequences import QUESTION_TOKENS
from .repair import PageReuse

ROOM = 102
"""Tokens of one prefill, about: with more questions at once the mask between them would be most of the work."""


class Asked(NamedTuple):
    """A way that answers each question from a cache of its own: what it costs, and what it answers."""

    cost: ArmCost
    answers: Answers


def question_arms() -> list[str]:
    """Lists the ways by name, in the order of tables."""
    arms = RULES.arms
    names = [f"query_attention.budget={share:g}" for share in arms.query_budgets]
    names += [f"prophetkv.budget={share:g}" for share in arms.query_budgets]
    return [*names, f"prcr.budget={max(arms.query_budgets):g}"]


def by_question(reuse: PageReuse, questions: Questions, wanted: Any = lambda name: True) -> Iterator[tuple[str, Asked]]:
    """Yields every way that is wanted, with the legends in view.

    * `query_attention`: InfoFlow KV (arXiv 2603.05353, section 4.2): the tokens that receive most attention from the
      question, summed over its tokens and over heads, with context and question at the places they have in the whole
      sequence (its GLOBAL geometry). It takes layers 22 to 25 of 40; here `RULES.arms.query_layers` of the depth.
      Recomputed at all layers (its appendix B).
    * `prophetkv`: ProphetKV (arXiv 2602.02579). What is public describes tokens ranked by their relevance to the user's
      query and "a dual-stage recomputation pipeline to fuse layer-wise attention metrics into a high-utility set", at a
      ratio of 20 %. Our reading: first stage, the question's pass over the blind cache through all layers; each
      layer's attention over the page is divided by its sum, so that layers weigh alike, and the mean over layers ranks
      the tokens; second stage, these are recomputed.
    * `prcr`: Position Rebinding Cache Reuse (arXiv 2606.26631). What is public describes raw visual KV kept with its
      spatial coordinates, of which selected entries are given places that suit the text that is being decoded, their
      keys rebound to these, and put into the decoder's cache; nothing is run again. Our reading: of the page's
      canonical, turned to its new place, the question reads the entries that its own attention selects, and no others.

    With the legends evicted there is nothing left to recompute behind when the question comes: these ways are left out.
    """
    names = [name for name in question_arms() if wanted(name)]
    if not names:
        return
    blind = reuse.cache()
    attended = attention_of_questions(reuse, questions, blind)  # [L, B, Q, T]
    depth, ranked = len(attended), rankings(attended)

    for name in names:
        way, _, share = name.partition(".budget=")
        count = max(1, fraction_to_count(float(share), reuse.page.tokens))
        by_token, layers = ranked[way]
        index = best(by_token, count)
        choosing = reuse.costs.reading(QUESTION_TOKENS, reuse.costs.behind + reuse.costs.tokens, layers)
        if way == "prcr":
            cost = ArmCost(serving=reuse.costs.rotation, question=choosing, forming=reuse.costs.alone)
            yield name, Asked(cost, read_entries(reuse, questions, blind, index))
            continue
        chosen = marks_of(index, reuse.page.tokens).reshape(-1, reuse.page.tokens)
        slots = np.broadcast_to(np.arange(reuse.scene.page.start, reuse.scene.page.stop), chosen.shape)
        again = reuse.costs.rerun(np.broadcast_to(chosen, (depth, *chosen.shape)), slots)
        cost = ArmCost(
            inputs=reuse.costs.tokens,
            serving=reuse.costs.rotation,
            question=choosing + again,
            forming=reuse.costs.alone,
        )
        yield name, Asked(cost, read_recomputed(reuse, questions, blind, index))


def rankings(attended: Float[np.ndarray, "L B Q T"]) -> dict[str, tuple[Float[np.ndarray, "B Q T"], int]]:
    """Ranks tokens by the attention that they receive of a question, by way; and how many layers the pass runs through.

    The ways are those of `by_question`.
    """
    depth = len(attended)
    first, last = (round(share * depth) for share in RULES.arms.query_layers)
    band = slice(min(first, depth - 1), max(last, first) + 1)
    middle = attended[band].sum(axis=0), min(band.stop, depth)
    alike = (attended / attended.sum(axis=-1, keepdims=True)).mean(axis=0), depth
    return {"query_attention": middle, "prophetkv": alike, "prcr": middle}


def best(ranked: Float[np.ndarray, "B Q T"], count: int) -> Int[np.ndarray, "B Q N"]:
    """Finds the `count` tokens that are ranked highest, in their order on the page."""
    return np.sort(np.argsort(-ranked, axis=-1, kind="stable")[..., :count], axis=-1)


def marks_of(index: Int[np.ndarray, "B Q N"], tokens: int) -> Bool[np.ndarray, "B Q T"]:
    """Marks, among so many tokens, those that an index names."""
    marks = np.zeros((*index.shape[:2], tokens), bool)
    np.put_along_axis(marks, index, True, axis=-1)
    return marks


# --------------------------------------------------------------------------------------------------- choosing


def _as_attended(reuse: PageReuse, asked: Int[np.ndarray, " Q"]) -> dict[str, Any]:
    """What a prefill of all questions gives back: their logits and every layer's residual, by one program for all."""
    depth = reuse.scene.backbone.layout.layers
    return {"hidden_at": tuple(range(depth)), "logits": np.broadcast_to(asked, (len(reuse.scene), len(asked)))}


def attention_of_questions(reuse: PageReuse, questions: Questions, cache: KV) -> Float[np.ndarray, "L B Q T"]:
    """Measures what attention the page's tokens receive from each question at each layer.

    Probabilities over all that the question sees, the mean over heads, summed over the question's tokens.
    """
    scene = reuse.scene
    ids, positions, mask, asked = scenes.question_arrays(scene, questions, True, None)
    tokens = scene.backbone.embed(ids, positions)
    depth = scene.backbone.layout.layers
    run = scene.backbone.prefill(tokens, cache, mask, **_as_attended(reuse, asked))
    own = scenes.engine(scene, dict(run.kv), tokens)
    keys = {name: jnp.concatenate([cache[name], own[name]], axis=2) for name in own}
    page = scene.page
    found = mean_attention(
        scene.backbone,
        tuple(run.hidden[layer] for layer in range(depth)),
        jnp.asarray(positions),
        keys,
        jnp.asarray(mask),
    )
    by_token = np.asarray(found)[..., page.start : page.stop]  # [L, B, 2Q, T]
    return by_token.reshape(*by_token.shape[:2], -1, QUESTION_TOKENS, by_token.shape[-1]).sum(axis=3)


def mean_attention(backbone: Any, hidden: tuple[Array, ...], positions: Array, keys: KV, mask: Array) -> Array:
    """Computes every layer's attention from its entering residual, the mean over heads, [L, B, T, S]."""
    programs = backbone.programs
    run = _jitted_attention(programs.graph)
    return run(programs.state, hidden, positions, keys, mask)


@functools.lru_cache(maxsize=8)
def _jitted_attention(graph: Any) -> Any:
    @jax.jit
    def run(state: Any, hidden: tuple[Array, ...], positions: Array, keys: KV, mask: Array) -> Array:
        decoder = nnx.merge(graph, state).decoder
        tables = rope_tables(decoder.config.rope, positions)
        return jnp.stack([_of_layer(decoder, number, x, tables, keys, mask) for number, x in enumerate(hidden)])

    return run


def _of_layer(
    decoder: Any, number: int, hidden: Array, tables: tuple[Array, Array], keys: Mapping[str, Array], mask: Array
) -> Array:
    """One layer's attention from its entering residual [B,T,D] and all its keys, the mean over heads, [B,T,S]."""
    config, below = decoder.config, decoder.config.dense_layers
    stack, at = (decoder.layers, number - below) if number >= below else (decoder.dense_layers, number)
    graph, state = nnx.split(stack)
    layer = nnx.merge(graph, jax.tree.map(lambda leaf: leaf[at], state))
    query, _ = layer.attention.project(layer.input_norm(hidden))
    turned = rotate(query["turning"], *tables, config.rope.cached, config.rope.attention_scaling)
    if config.latent is None:
        key, scale = keys["k"][number], config.head_dim**-0.5
    else:
        turned = jnp.concatenate([query["latent"], turned], axis=-1)
        key, scale = jnp.concatenate([keys["ckv"][number], keys["kpe"][number]], axis=-1), config.latent.scale
    B, T, N, H = turned.shape
    grouped = turned.reshape(B, T, key.shape[2], N // key.shape[2], H)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(mask[:, :, None], scores, -jnp.inf), axis=-1).mean(axis=(1, 2))


# ---------------------------------------------------------------------------------------------------- reading


def read_entries(reuse: PageReuse, questions: Questions, cache: KV, index: Int[np.ndarray, "B Q N"]) -> Answers:
    """Asks every question over the legends and its own entries of the page alone."""
    scene = reuse.scene
    ids, positions, mask, asked = scenes.question_arrays(scene, questions, True, None)
    mask = np.array(mask)
    marks = np.repeat(marks_of(index, reuse.page.tokens), QUESTION_TOKENS, axis=1)
    mask[:, 0, :, scene.page.start : scene.page.stop] &= marks
    how = _as_attended(reuse, asked)
    logits = scene.backbone.prefill(scene.backbone.embed(ids, positions), cache, mask, **how).logits
    return Answers(np.asarray(jax.nn.log_softmax(logits, axis=-1)))


def read_recomputed(reuse: PageReuse, questions: Questions, cache: KV, index: Int[np.ndarray, "B Q N"]) -> Answers:
    """Asks every question over the cache with its own chosen tokens run again in context."""
    scene, page = reuse.scene, reuse.scene.page
    ids, positions, _, _ = scenes.question_arrays(scene, questions, True, None)
    asking, own = scene.backbone.embed(ids, positions), reuse.tokens.take(page.start, page.stop)
    count, each = index.shape[1], index.shape[2] + QUESTION_TOKENS
    size = max(1, ROOM // each)
    size = -(-count // -(-count // size))
    said = []
    for first in range(0, count, size):
        # The last group repeats questions, so that all are of one shape.
        group = np.minimum(np.arange(first, first + size), count - 1)
        part = index[:, group]
        tokens = _joined(own, asking, part, group)
        mask = _group_mask(part, page, each)
        wanted = np.broadcast_to(each * (np.arange(size) + 1) - 1, (len(ids), size))
        logits = scene.backbone.prefill(tokens, cache, mask, logits=wanted).logits
        said.append(np.asarray(jax.nn.log_softmax(logits, axis=-1))[:, : count - first])
    return Answers(np.concatenate(said, axis=1))


def _joined(own: Tokens, asking: Tokens, part: Int[np.ndarray, "B G N"], group: Int[np.ndarray, " G"]) -> Tokens:
    """Each question's chosen tokens, then the question itself: [B, G·(N + 2), …]."""
    rows = np.arange(len(part))[:, None, None]
    places = group[:, None] * QUESTION_TOKENS + np.arange(QUESTION_TOKENS)

    def join(chosen: Array, asked: Array) -> Array:
        both = jnp.concatenate([jnp.asarray(chosen)[rows, part], jnp.asarray(asked)[:, places]], axis=2)
        return both.reshape(both.shape[0], -1, *both.shape[3:])

    positions = np.concatenate([np.asarray(own.positions)[rows, part], np.asarray(asking.positions)[:, places]], axis=2)
    deepstack = None
    if own.deepstack is not None:
        none = jnp.zeros((*asking.embeddings.shape[:2], *own.deepstack.shape[2:]), own.deepstack.dtype)
        deepstack = join(own.deepstack, none if asking.deepstack is None else asking.deepstack)
    flat = positions.reshape(len(part), -1, *positions.shape[3:])
    return Tokens(join(own.embeddings, asking.embeddings), flat, deepstack)


def _group_mask(part: Int[np.ndarray, "B G N"], page: slice, each: int) -> Bool[np.ndarray, "B 1 T S"]:
    """Who sees whom in one prefill, over [prefix, chosen tokens, questions]: nobody sees another question's tokens."""
    B, G, N = part.shape
    tokens = page.stop - page.start
    kept = np.broadcast_to(~marks_of(part, tokens)[:, :, None], (B, G, each, tokens)).copy()
    # A chosen token sees the page's tokens in front of it; the question sees all of the page.
    kept[:, :, :N] &= np.arange(tokens) <= part[..., None]
    prefix = np.concatenate([np.ones((B, G, each, page.start), bool), kept], axis=3).reshape(B, G * each, page.stop)
    among = np.kron(np.eye(G, dtype=bool), np.tri(each, dtype=bool))
    return np.concatenate([prefix, np.broadcast_to(among, (B, *among.shape))], axis=2)[:, None]
