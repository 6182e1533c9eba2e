"""Retrieval over a trained backbone's encoder outputs: recall, and a chunk retrieved and spliced while decoding."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import kvpatch_jax as kvp
from evals.bench.retrieval import measure, task_images, tower_outputs
from evals.trained import MAIN, shipped
from kvpatch_jax.store import ChunkStore, DynamicLibrary, ExactRetriever, Linker, StaticLibrary, chunk_id, fetch, pooled
from models import load

pytestmark = pytest.mark.slow
PROMPT = [5, 9, 12]
STEPS = 6
RETRIEVE_AT = 3


@pytest.fixture(scope="module")
def backbone():
    return load(shipped(MAIN), dtype="float32")


def test_recall_over_encoder_outputs(backbone):
    """At the default share of the files: nineteen of twenty nearest images and image tokens; more files, no fewer."""
    outputs = tower_outputs(backbone, task_images(256))
    for arm, vectors in (("images", np.stack([pooled(o) for o in outputs])), ("tokens", np.concatenate(outputs[:192]))):
        shares = {row["arm"]: row["value"] for row in measure(vectors, arm) if row["metric"] == "recall_at_10"}
        print(shares)
        values = list(shares.values())
        assert values == sorted(values)
        assert shares[f"{arm}.probes=0.2"] >= 0.95


class Decoding:
    """A greedy decode over one linear cache, into which chunks can be spliced between two steps."""

    def __init__(self, backbone, room: int):
        self.backbone, self.room = backbone, room
        tokens = self._tokens(PROMPT, 0)
        out = backbone.prefill(tokens)
        engine = kvp.to_engine(backbone.layout, out.kv, tokens.positions, 0)
        grow = lambda value: jnp.pad(value, ((0, 0), (0, 0), (0, room - len(PROMPT)), (0, 0), (0, 0)))
        self.cache = {name: grow(value) for name, value in engine.items()}
        self.slot = self.place = len(PROMPT)
        self.logits = [np.asarray(out.logits[0, -1])]

    def _tokens(self, ids, place):
        places = np.broadcast_to((place + np.arange(len(ids)))[None, :, None], (1, len(ids), 3))
        return self.backbone.embed(np.array([ids]), places)

    def step(self) -> None:
        token = int(self.logits[-1].argmax())
        out = self.backbone.decode(self._tokens([token], self.place), self.cache, np.array([[self.slot]]))
        self.cache = out.cache
        self.logits.append(np.asarray(out.logits[0, -1]))
        self.slot, self.place = self.slot + 1, self.place + 1

    def splice(self, chunk: kvp.Chunk) -> None:
        placed = kvp.to_engine(chunk.layout, chunk.kv, chunk.local, self.place)
        end = self.slot + chunk.length
        self.cache = {
            name: value.at[:, 0, self.slot : end].set(placed[name][:, : chunk.length])
            for name, value in self.cache.items()
        }
        self.slot, self.place = end, self.place + chunk.span


def test_a_step_of_decoding_retrieves_and_splices(backbone, tmp_path: Path):
    """What is asked for by a blurred view is found, loaded and read: bit for bit as with the chunk at hand."""
    images = task_images(3)
    outputs = tower_outputs(backbone, images)
    ids = [chunk_id(backbone.fingerprint, image) for image in images]
    chunks = [kvp.make_chunk(backbone, [image], id) for image, id in zip(images, ids, strict=True)]
    with ChunkStore(tmp_path, tenant="acme") as own, ChunkStore(tmp_path, tenant="operator") as operator:
        library, mine = DynamicLibrary(operator), StaticLibrary(own, quota=1 << 20)
        retriever = ExactRetriever(outputs[0].shape[1])
        for number in range(8):
            kept = chunks[number] if number != 7 else None  # one whose chunk is not there yet
            library.publish(f"PIC{number}", images[number], chunk=kept, vector=pooled(outputs[number]))
        mine.put("MINE", images[8], chunk=chunks[8], vector=pooled(outputs[8]))
        for reference, vector in (*library.vectors(), *mine.vectors()):
            retriever.add(reference, vector)
        linker = Linker(backbone.fingerprint, mine, library)
        compute = lambda misses: [kvp.make_chunk(backbone, [miss.item], miss.request.id) for miss in misses]

        def decoded(seen: np.ndarray | None, chunk: kvp.Chunk | None = None):
            decoding, source = Decoding(backbone, 160), None
            for step in range(STEPS):
                if step == RETRIEVE_AT and seen is not None:
                    (output,) = tower_outputs(backbone, [seen])
                    (reference,), _ = retriever.search(pooled(output), 1)
                    with linker.resolve(reference) as linked:
                        ((found, source, _),) = fetch(own, linked.requests, compute)
                    decoding.splice(found)
                elif step == RETRIEVE_AT and chunk is not None:
                    decoding.splice(chunk)
                decoding.step()
            return np.stack(decoding.logits), source

        alone, _ = decoded(None)
        for number, expected in ((2, "shared"), (7, "computed"), (8, "store")):
            noise = np.random.default_rng(number).integers(-6, 7, images[number].shape)
            seen = np.clip(images[number] + noise, 0, 255).astype(np.uint8)
            logits, source = decoded(seen)
            by_hand, _ = decoded(None, chunks[number])
            assert source == expected
            assert logits.tobytes() == by_hand.tobytes()
            assert np.array_equal(logits[: RETRIEVE_AT + 1], alone[: RETRIEVE_AT + 1])
            assert np.abs(logits[RETRIEVE_AT + 1 :] - alone[RETRIEVE_AT + 1 :]).max() > 0.1
