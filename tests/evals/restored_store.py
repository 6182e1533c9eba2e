"""Run as a program: a snapshot of the store is restored, and its chunks answer the questions of a scene.

Arguments: snapshot, new root, array file to write the logits to, folder for the scene's pictures.
"""

import sys
from pathlib import Path

import numpy as np

from evals import small_task
from evals.scene_jobs import QUESTIONS
from evals.small_task import scenes
from evals.trained import MAIN, shipped
from kvpatch_jax import Chunk, Patch, Placed, apply_patch
from kvpatch_jax.store import ChunkStore, PatchKey, load_snapshot
from models import ModelBackbone, load

TENANT, ANTECEDENT, SEED = "main", ("legends",), 5


def make_scene(backbone: ModelBackbone, folder: Path) -> tuple[scenes.Scene, small_task.Questions]:
    """One context of the small task, and its questions."""
    rng = np.random.default_rng(SEED)
    scene = scenes.load_scene(backbone, small_task.sample_contexts(rng, 1), folder)
    return scene, small_task.ask(scene.contexts, rng, QUESTIONS)


def answers(scene: scenes.Scene, questions: small_task.Questions, page: Chunk, patch: Patch) -> np.ndarray:
    """Log-probabilities [2, 1, Q, V] that the page gives behind the legends: without and with its patch."""
    prefix = scene.prefix()
    whole = scenes.engine(scene, scene.backbone.prefill(prefix).kv, prefix)
    start = (np.asarray(prefix.positions)[0, scene.page.start] - np.asarray(page.local)[0]).astype(np.int32)
    front, found = scenes.cut(whole, slice(scene.page.start)), []
    for own in (None, patch):
        kv = apply_patch(Placed(page, own, start, antecedent=ANTECEDENT))
        cache = scenes.joined([front, {name: value[:, None] for name, value in kv.items()}])
        found.append(scenes.read(scene, cache, questions, sees_legends=True).log_probabilities)
    return np.stack(found)


def main(snapshot: str, root: str, output: str, folder: str) -> None:
    load_snapshot(snapshot, root, tenant=TENANT)
    backbone = load(shipped(MAIN))
    scene, questions = make_scene(backbone, Path(folder))
    with ChunkStore(root, tenant=TENANT) as store:
        page = store.get("page", backbone.fingerprint)
        (patch,) = store.get_patches(PatchKey("page", backbone.fingerprint, ANTECEDENT))
        assert page is not None
        np.save(output, answers(scene, questions, page, patch))


if __name__ == "__main__":
    main(*sys.argv[1:])
