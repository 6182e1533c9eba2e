"""A snapshot of the store, restored in another process, serves the main job's chunks with equal answers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from restored_store import ANTECEDENT, TENANT, answers, make_scene

from evals.small_task import scenes
from evals.trained import MAIN, shipped
from kvpatch_jax import form_patch
from kvpatch_jax.patching import make_chunk
from kvpatch_jax.store import ChunkStore, save_snapshot
from models import load

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_restored_store_answers_as_the_original(tmp_path: Path):
    backbone = load(shipped(MAIN))
    scene, questions = make_scene(backbone, tmp_path / "pictures")
    (paths,) = scenes.write_images(scene.contexts, tmp_path / "pictures", canvas=scene.form.legend_shape)
    page = make_chunk(backbone, [paths[-1]], "page")
    conditioned = {name: value[:, 0, scene.page] for name, value in backbone.prefill(scene.prefix()).kv.items()}
    patch = form_patch(page, conditioned, rank=16, antecedent=ANTECEDENT)
    with ChunkStore(tmp_path / "store", tenant=TENANT) as store:
        store.put(page)
        store.put_patches([patch])
    save_snapshot(tmp_path / "store", tmp_path / "snapshot", tenant=TENANT)
    before = answers(scene, questions, page, patch)

    program = [sys.executable, str(Path(__file__).parent / "restored_store.py")]
    folders = [tmp_path / name for name in ("snapshot", "restored", "answers.npy", "pictures")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*program, *map(str, folders)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    after = np.load(tmp_path / "answers.npy")
    assert after.shape == before.shape
    assert after.tobytes() == before.tobytes()
    assert before[0].tobytes() != before[1].tobytes()  # the patch does something
