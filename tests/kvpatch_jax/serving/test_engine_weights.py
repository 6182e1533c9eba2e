"""Chunks are served to engines of the weights that they were made by, whatever name those are given."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving_hooks import BLOCKS, ask, engine_of, imported_connector
from serving_sides import TOKENS, let_plan, output_of, request_of, served, sides_of

from kvpatch_jax.errors import StoreReadOnlyError, WeightsError
from kvpatch_jax.serving.vllm.weights import RECORD, SAMPLE, expect_weights, weights_digest
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.objects import Objects

DIGEST, OTHER = "11" * 32, "22" * 32
LEADING = {"segments": [8]}


def tensors_of(seed):
    rng = np.random.default_rng(seed)
    sizes = {"embed": (64, 80), "layer.0.k": (80, 16), "layer.0.norm": (16,), "empty": (0,)}
    return {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}


def checkpoint_of(folder, *shards):
    folder.mkdir()
    for place, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{place}.safetensors", metadata={"format": "pt"})
    return folder


def config_of(model, load_format="auto", quantization=None, **more):
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), quantization=quantization),
        load_config=SimpleNamespace(load_format=load_format, download_dir=str(model)),
        **more,
    )


@pytest.fixture(scope="module")
def connector():
    with imported_connector() as module:
        yield module


def test_an_engine_with_other_weights_is_served_nothing(connector, tmp_path, caplog):
    """A fine-tune has the same shapes; what it would be served as exact is not what it computes."""
    own, other = (checkpoint_of(tmp_path / name, tensors_of(seed)) for name, seed in (("own", 1), ("other", 2)))
    plan = {"kvpatch": LEADING}
    with engine_of(connector, tmp_path, own) as engine:
        assert ask(engine, request_of("own", plan)).count == 8
    with engine_of(connector, tmp_path, other) as engine:
        found = ask(engine, request_of("other", plan))
        assert (found.count, found.invalid, found.salt) == (0, set(), None)
        assert found.told["kvpatch"]["why"] == "its chunks are of other weights"
        assert ask(engine, request_of("new", plan, TOKENS[16:])).count == 0
        assert engine.scheduler.scheduler_side.counts["unfit: WeightsError"] == 4, "two that fill the store, and these"
        assert not engine.worker.worker_side.former.counts, "what it forms would be the other engine's"
        assert not engine.scheduler.failures + engine.worker.failures
        assert ask(engine, request_of("apart", {"kvpatch": {**LEADING, "tenant": "its own"}})).count == 0
        assert ask(engine, request_of("again", {"kvpatch": {**LEADING, "tenant": "its own"}})).count == 8
    assert caplog.text.count("chunks of weights") == 1
    with engine_of(connector, tmp_path, own) as engine:
        assert ask(engine, request_of("back", plan)).count == 8
        assert ask(engine, request_of("new", plan, TOKENS[16:])).count == 0, "the other engine formed nothing of it"


def test_a_request_that_reads_no_cache_forms_nothing_with_other_weights(tmp_path):
    with sides_of(tmp_path, weights=DIGEST) as sides:
        served(sides, "first", LEADING)
    with sides_of(tmp_path, weights=OTHER) as sides:
        request = request_of("own", {"kvpatch": LEADING}, TOKENS[16:], skip_reading_prefix_cache=True)
        sides.scheduler.add_request(request)
        sides.scheduler.order_load(request, BLOCKS, 0)
        let_plan(sides.scheduler)
        output = output_of({"own": len(TOKENS[16:])}, {"own": 0}, {"own": BLOCKS})
        assert not sides.scheduler.build_commands(output).saves
        assert sides.scheduler.finish(request)["kvpatch"]["why"] == "its chunks are of other weights"


def test_engines_with_unknown_weights_share_by_name(tmp_path):
    with sides_of(tmp_path, weights=DIGEST) as sides:
        served(sides, "first", LEADING)
    with sides_of(tmp_path) as sides:
        assert served(sides, "again", LEADING).count == 8


def test_a_store_without_a_record_belongs_to_the_first_engine(tmp_path):
    with sides_of(tmp_path) as sides:
        served(sides, "first", LEADING)
    for weights, count in ((DIGEST, 8), (OTHER, 0), (DIGEST, 8)):
        with sides_of(tmp_path, weights=weights) as sides:
            assert served(sides, "again", {**LEADING, "save": False}).count == count


def test_a_deleted_record_is_written_again_on_use(tmp_path):
    """Evicted, or deleted with the tenant, while an engine lives."""
    with sides_of(tmp_path, weights=DIGEST) as sides:
        served(sides, "first", LEADING)
        with ChunkStore(tmp_path / "store") as store:
            assert store.get_encoder(RECORD, "tiny").tobytes().hex() == DIGEST
            store.delete_tenant()
            assert store.get_encoder(RECORD, "tiny") is None
        served(sides, "second", LEADING)
    with ChunkStore(tmp_path / "store") as store, pytest.raises(WeightsError, match="222222222222…: give"):
        expect_weights(store, "tiny", OTHER)


def test_only_one_of_several_concurrent_engines_claims_a_store(tmp_path):
    digests = [f"{place:02d}" * 32 for place in range(6)]

    def claims(digest):
        with ChunkStore(tmp_path) as store:
            try:
                expect_weights(store, "tiny", digest)
            except WeightsError:
                return False
            return True

    with ThreadPoolExecutor(len(digests)) as pool:
        assert sum(pool.map(claims, digests)) == 1


def test_a_read_only_store_is_used_unchecked(tmp_path, monkeypatch):
    def refuses(self, *_, **__):
        raise StoreReadOnlyError("store: read-only")

    with ChunkStore(tmp_path) as store:
        monkeypatch.setattr(Objects, "amend", refuses)
        expect_weights(store, "tiny", DIGEST)
        assert store.get_encoder(RECORD, "tiny") is None


def test_the_digest_depends_on_the_tensors_alone(tmp_path):
    """Not by its path, or by how it lies in files; any tensor's name, shape or values make it another one."""
    own = tensors_of(1)
    first, second = dict(list(own.items())[:2]), dict(list(own.items())[2:])
    digest = weights_digest(config_of(checkpoint_of(tmp_path / "whole", own)))
    assert len(digest) == 64
    assert weights_digest(config_of(checkpoint_of(tmp_path / "split", second, first))) == digest
    assert weights_digest(config_of(checkpoint_of(tmp_path / "twice", own, first))) == digest
    last, middle = own["embed"].copy(), own["embed"].copy()
    assert last.nbytes > 2 * SAMPLE, "what is sampled, not read whole"
    last[-1, -1] += 1
    middle[32, 0] += 1
    changed = [
        {**own, "embed": last},
        {**own, "embed": middle},
        {**own, "layer.0.norm": -own["layer.0.norm"]},
        {**own, "empty": np.zeros((0, 2), np.float32)},
        {**own, "layer.0.k": own["layer.0.k"].reshape(16, 80)},
        {**first, **{f"{name}.": value for name, value in second.items()}},
        first,
    ]
    found = [weights_digest(config_of(checkpoint_of(tmp_path / f"{n}", own))) for n, own in enumerate(changed)]
    found += [weights_digest(config_of(tmp_path / "whole", quantization="fp8"))]
    found += [weights_digest(config_of(tmp_path / "whole", additional_config={"quantization": {"qwix": {}}}))]
    assert len({digest, *found}) == len(found) + 1


def test_a_checkpoint_of_the_hub_is_found_in_its_cache(tmp_path):
    pytest.importorskip("huggingface_hub")
    own = checkpoint_of(tmp_path / "own", tensors_of(1))
    cached = tmp_path / "cache" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    checkpoint_of(cached / "snapshots" / ("0" * 40), tensors_of(1))
    config = config_of("some/model")
    config.load_config.download_dir = str(tmp_path / "cache")
    assert weights_digest(config) == weights_digest(config_of(own))


@pytest.mark.parametrize("fault", ["dummy", "no file", "damaged", "cut"])
def test_unknown_weights_cause_one_warning(tmp_path, fault, caplog):
    caplog.set_level(logging.WARNING)
    own = checkpoint_of(tmp_path / "own", tensors_of(1))
    file = own / "model-0.safetensors"
    config = config_of(own, "dummy" if fault == "dummy" else "auto")
    if fault == "no file":
        file.rename(own / "model.bin")
    elif fault == "damaged":
        file.write_bytes(file.read_bytes().replace(b"data_offsets", b"other_things"))
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    assert weights_digest(config) is None
    assert caplog.text.count("could not be identified") == 1
