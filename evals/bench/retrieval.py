"""Retrieval over encoder outputs: recall@10 of the approximate retriever against the exact one, and the time of both.

Vectors are a trained small backbone's tower outputs for held-out images of the small task: pooled, one per image, and
as they are, one per image token; and clustered synthetic ones, which are many. Queries are not among what is stored.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from kvpatch_jax.store import ApproximateRetriever, ExactRetriever, Retriever, pooled, recall
from models import ModelBackbone, load

from .. import small_task
from ..results.environment import environment
from ..trained import MAIN, shipped
from .benchmark import Benchmark, Row, measured_row
from .timing import stopwatch

K = 10


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measures over the shipped backbone's encoder outputs and over clustered vectors; `quick`: few of both."""
    return {"environment": environment(), "rows": rows(8, 2_000) if quick else rows()}


def rows(contexts: int = 256, synthetic: int = 20_000) -> list[Row]:
    """Measures recall@10 and seconds of encoder outputs of so many contexts, and of so many clustered vectors."""
    outputs = tower_outputs(load(shipped(MAIN), dtype="float32"), task_images(contexts))
    images = np.stack([pooled(output) for output in outputs])
    tokens = np.concatenate(outputs)
    return [*measure(images, "images"), *measure(tokens, "tokens"), *measure(clustered(synthetic), "clustered")]


def measure(vectors: Float[np.ndarray, "n D"], arm: str, probes: Sequence[float] = (0.05, 0.1, 0.2)) -> list[Row]:
    """Measures recall@10 and seconds per search; a tenth of the vectors, 200 at most, are queries and not stored."""
    order = np.random.default_rng(1).permutation(len(vectors))
    count = min(200, len(vectors) // 10)
    queries, stored = vectors[order[:count]], vectors[order[count:]]
    exact = ExactRetriever(vectors.shape[1])
    _fill(exact, stored)

    rows = [_search_row(exact, queries, f"{arm}.exact", len(stored))]

    for share in probes:
        approximate = ApproximateRetriever(vectors.shape[1], probes=share, exact_below=64)
        _fill(approximate, stored)
        shares = recall(approximate, exact, queries, K).tolist()
        labels = {"arm": f"{arm}.probes={share}", "stored": len(stored)}
        rows.append(measured_row("recall_at_10", shares, statistic=statistics.fmean, **labels))
        rows.append(_search_row(approximate, queries, f"{arm}.probes={share}", len(stored)))

    return rows


def _fill(retriever: Retriever, vectors: np.ndarray) -> None:
    for number, vector in enumerate(vectors):
        retriever.add(f"v{number:07d}", vector)


def _search_row(retriever: Retriever, queries: np.ndarray, arm: str, stored: int) -> Row:
    seconds = [stopwatch(lambda query=query: retriever.search(query, K)) for query in queries]
    return measured_row("search_seconds", seconds, arm=arm, stored=stored)


def tower_outputs(backbone: ModelBackbone, images: Sequence[np.ndarray]) -> list[Float[np.ndarray, "T D"]]:
    """Computes the tower's tokens of each image (uint8 [height, width, 3]), without start and end tokens."""
    outputs = []
    for image in images:
        prompt = backbone.prepare([image])
        placeholders = np.asarray(prompt["input_ids"])[0] == backbone.config.image_token
        outputs.append(np.asarray(backbone.embed(**prompt).embeddings)[0][placeholders])
    return outputs


def task_images(contexts: int, seed: int = 77) -> list[np.ndarray]:
    """Renders held-out legends and pages of the small task, four images per context."""
    drawn = small_task.sample_contexts(np.random.default_rng(seed), contexts)
    legends, pages = small_task.render(drawn)
    images = []
    for index in range(contexts):
        images += [*legends[index], pages[index]]
    return images


def clustered(count: int, width: int = 128, clusters: int = 300, seed: int = 0) -> Float[np.ndarray, "n D"]:
    """Draws vectors around centres of unequal weight."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((clusters, width)).astype(np.float32)
    which = rng.choice(clusters, count, p=rng.dirichlet(np.full(clusters, 0.7)))
    return centres[which] + 0.6 * rng.standard_normal((count, width)).astype(np.float32)


BENCHMARK = Benchmark("retrieval", run, ("arm",))
