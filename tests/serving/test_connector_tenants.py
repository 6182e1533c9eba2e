"""A chunk serves its tenant alone, engines of its weights alone, and within the limits that the operator has set.

Keys, secrets and credentials never appear in settings or errors.
"""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from serving_sides import report_of, served, sides_of

import kvpatch_jax as kvp
from kvpatch_jax.errors import ConfigError, InputError, StoreError, WeightsError
from kvpatch_jax.serving.vllm import ChunkingOptions, ConnectorConfig, RequestOptions, StoreOptions, stores
from kvpatch_jax.serving.vllm.config import tenant_of
from kvpatch_jax.serving.vllm.engine import SAMPLE, weights_digest
from kvpatch_jax.serving.vllm.plan import Survivor, SurvivorKey
from kvpatch_jax.serving.vllm.stores import MIN_KEY_BYTES, WEIGHTS_RECORD, Stores, Survivors, expect_weights
from kvpatch_jax.store import ChunkStore

SECRET = "correct horse battery staple, thirty-two bytes"
DIGEST, OTHER = "11" * 32, "22" * 32


def chunk_of(tokens=4) -> kvp.Chunk:
    layout = kvp.KVLayout.gqa(1, 1, 8, kvp.Rope(1e4, 8))
    kv = {name: np.zeros((1, tokens, 1, 8), np.float32) for name in "kv"}
    return kvp.Chunk(kv, np.arange(tokens), tokens, tokens, "chunk", layout, "tiny")


@pytest.fixture
def opened(tmp_path):
    """Opens one side's stores in a folder, and closes them after the test."""
    sides = []

    def opens(weights=None, folder="store", **options) -> Stores:
        store = {"root": str(tmp_path / folder), **options}
        sides.append(Stores(ConnectorConfig.read({"store": store, "backbone": "tiny"}), weights))
        return sides[-1]

    yield opens
    for side in sides:
        side.close()


# ------------------------------------------------------------------------------------------------------------- tenants


def test_tenants_are_isolated_by_the_engines_own_salt():
    assert [tenant_of(salt) for salt in (None, "", "acme")] == ["default", "default", "acme"]
    for salt in ("default", "s" * 201):
        with pytest.raises(InputError, match=r"^cache_salt: got") as raised:
            tenant_of(salt)
        assert "sss" not in str(raised.value), "who knows a salt is its tenant"


def test_stores_are_shared_by_both_sides_until_the_last_one_closes(opened):
    first, second = opened(), opened()
    store = first.of("acme")
    assert second.of("acme") is store
    assert first.survivors is second.survivors
    assert first.close()
    assert first.close(), "closing again is none of the other's business"
    with pytest.raises(StoreError, match="after close"):
        first.of("acme")
    assert second.of("acme") is store
    assert second.close()
    assert store.objects.closed
    assert opened().of("acme") is not store


def test_open_stores_and_survivors_are_limited_to_the_latest_used_ones(opened, monkeypatch, wait_until):
    """Tenants are salts, which any client may send: the files of their stores are not left open."""
    monkeypatch.setattr(stores, "MAX_TENANTS", 2)
    side = opened()
    first, *_, last = [side.of(f"tenant {number}") for number in range(4)]
    wait_until(lambda: first.objects.closed)
    assert (side.tenants, last.objects.closed) == (2, False)
    assert not side.of("tenant 0").objects.closed, "it is opened again"

    chunk = chunk_of()
    survivors = Survivors(2 * chunk.nbytes)
    keys = [SurvivorKey("default", "", str(number)) for number in range(3)]
    for key in keys[:2]:
        survivors.put(key, Survivor(chunk, "i", ()))
    assert survivors.get(keys[0]) is not None
    survivors.put(keys[2], Survivor(chunk, "i", ()))
    assert [survivors.get(key) is None for key in keys] == [False, True, False]
    assert survivors.nbytes == 2 * chunk.nbytes
    survivors.put(keys[0], Survivor(chunk_of(tokens=64), "i", ()))
    assert (survivors.get(keys[0]), len(survivors)) == (None, 1), "too large, and the earlier version is outdated"


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_of_another_checkpoint_are_never_served(opened, tmp_path):
    """The first engine's count; a deleted record is written again by whoever uses the store next."""
    first, other = opened(DIGEST), opened(OTHER)
    first.of("default").put(chunk_of())
    for call in (other.of, lambda tenant: other.canonical(tenant, "chunk")):
        with pytest.raises(WeightsError, match="111111111111…; expected the engine's, 222222222222…: give each"):
            call("default")
    first.of("default").delete_tenant()
    first.of("default")
    with pytest.raises(WeightsError):
        other.of("default")
    assert opened().of("default").get_encoder(WEIGHTS_RECORD, "tiny").tobytes().hex() == DIGEST

    with sides_of(tmp_path / "engine", weights=DIGEST) as sides:
        served(sides, "first", {"segments": [8]})
        assert served(sides, "again", {"segments": [8]}).count == 8
    with sides_of(tmp_path / "engine", weights=OTHER) as sides:
        answer = served(sides, "other", {"segments": [9]})
        assert (answer.count, answer.orders.saves) == (0, ()), "it forms nothing either"
        assert report_of(sides, answer)["why"] == "its chunks are of other weights"


def test_only_one_of_several_concurrent_engines_claims_a_store(tmp_path):
    def claims(digest):
        with ChunkStore(tmp_path) as store:
            try:
                expect_weights(store, "tiny", digest)
            except WeightsError:
                return False
            return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(claims, [f"{place:02d}" * 32 for place in range(6)])) == 1


def checkpoint_of(folder, *shards):
    from safetensors.numpy import save_file

    folder.mkdir()
    for place, tensors in enumerate(shards):
        save_file(tensors, folder / f"model-{place}.safetensors", metadata={"format": "pt"})
    return folder


def digest_of(model, load_format="auto", quantization=None, folder=None, **more):
    return weights_digest(
        SimpleNamespace(
            model_config=SimpleNamespace(model=str(model), quantization=quantization),
            load_config=SimpleNamespace(load_format=load_format, download_dir=str(folder)),
            **more,
        )
    )


def test_the_digest_depends_on_the_tensors_alone(tmp_path):
    """Not on the path, or on files; any tensor's name, shape or values, and quantisation, make it another one."""
    sizes = {"embed": (64, 80), "layer.0.k": (80, 16), "layer.0.norm": (16,), "empty": (0,)}
    rng = np.random.default_rng(1)
    tensors = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    first, second = dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])
    digest = digest_of(checkpoint_of(tmp_path / "joined", tensors))
    assert digest_of(checkpoint_of(tmp_path / "split", second, first)) == digest
    cached = tmp_path / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    checkpoint_of(cached / "snapshots" / ("0" * 40), tensors)
    assert digest_of("some/model", folder=tmp_path) == digest, "from the hub's cache"

    last, middle = tensors["embed"].copy(), tensors["embed"].copy()
    assert last.nbytes > 2 * SAMPLE, "a tensor of which only samples are read"
    last[-1, -1] += 1
    middle[32, 0] += 1
    others = [first, {**first, **{f"{name}.": value for name, value in second.items()}}]
    others += [tensors | {"embed": values} for values in (last, middle)]
    others += [tensors | {"layer.0.norm": -tensors["layer.0.norm"], "empty": np.zeros((0, 2), np.float32)}]
    others += [tensors | {"layer.0.k": tensors["layer.0.k"].reshape(16, 80)}]
    digests = [digest_of(checkpoint_of(tmp_path / str(number), other)) for number, other in enumerate(others)]
    digests += [digest_of(tmp_path / "joined", quantization="fp8")]
    digests += [digest_of(tmp_path / "joined", additional_config={"quantization": {"qwix": {}}})]
    assert len({digest, *digests}) == len(digests) + 1
    assert digest_of(tmp_path / "joined", "dummy") is None


# ------------------------------------------------------------------------------------------------------------ settings


def config_of(**settings) -> ConnectorConfig:
    return ConnectorConfig.read({"store": "s", "backbone": "b", **settings})


def test_settings_are_read_from_json_and_invalid_ones_are_refused_by_name(unchecked):
    store = {"root": "s", "memory": "8 GiB", "root_budget": "500 GB", "ttl": 3600, "key": "env:KEY"}
    chunking = {"separators": [[7, 8]], "openers": [[1, 2]], "image_frame": [5, 6]}
    config = config_of(store=store, chunking=chunking, survivors="1 MiB", default={})
    assert config.store == StoreOptions("s", 500 * 10**9, 8 << 30, 3600, "env:KEY")
    assert config.chunking == ChunkingOptions(((7, 8),), ((1, 2),), image_frame=(5, 6))
    assert (config.survivors, config.default) == (1 << 20, RequestOptions())
    for name, value, settings in (
        *(("backbone", "", {}), ("kl", float("inf"), {}), ("rank", True, {}), ("survivors", "many", {})),
        *(("allow", ["certified"], {}), ("chunking", {"mean": 512}, {}), ("store", {"memory": 1}, {})),
        ("default.reuse", "blind", {"default": {"reuse": "blind"}}),
        ("store.ttl", 0, {"store": {"root": "s", "ttl": 0}}),
        ("chunking.openers", [[1] * 65], {"chunking": {"openers": [[1] * 65]}}),
    ):
        with pytest.raises(ConfigError, match=rf"^connector\.{name}: got .*; expected "):
            config_of(**settings or {name: value})


def test_a_request_overrides_the_default_within_the_operators_limits(unchecked):
    def options_of(part, **settings):
        return config_of(**settings).options_of({"kvpatch": part})

    default = {"reuse": "certified", "kl": 0.02, "promise": "remember"}
    config, expected = config_of(default=default), RequestOptions("certified", 0.02, "remember")
    for params in (None, {"kvpatch": None}, {"do_remote_prefill": True}, {"kvpatch": {}}):
        assert config.options_of(params) == expected
    part = {"kl": 0.01, "segments": [3], "agent": "a"}
    assert options_of(part, default=default) == dataclasses.replace(expected, kl=0.01, segments=(3,), agent="a")
    assert options_of({"kl": None, "promise": "forget"}, default=default) == RequestOptions("certified")
    assert options_of({"reuse": "exact"}, default=default).kl is None, "a bound is of certified reuse alone"
    assert (config_of().options_of(None), options_of({}), options_of(False)) == (None, RequestOptions(), None)

    assert options_of({"reuse": "blind"}, allow=["exact", "blind"]).reuse == "blind"
    for name, values in (
        *(("reuse", ([], "blind", "patched")), ("kl", (0.1,)), ("promise", ("keep",)), ("agent", ("a" * 201,))),
        *(("save", (1,)), ("segments", (3, [0], [3, 3], list(range(1, 4098))))),
    ):
        for value in values:
            with pytest.raises(InputError, match=rf"^kv_transfer_params\.kvpatch\.{name}: got .*; expected |not allow"):
                options_of({name: value})
    for params in (7, {"kvpatch": True}, {"kvpatch": {"tenant": "acme"}}):
        with pytest.raises(InputError, match=r"^kv_transfer_params"):
            config_of().options_of(params)


def test_engines_of_one_key_or_secret_share_a_store_and_an_unreachable_one_is_a_miss(tmp_path, opened, monkeypatch):
    """By the content of a private file or of a variable."""
    file = tmp_path / "key"
    file.write_text(SECRET)
    file.chmod(0o600)
    monkeypatch.setenv("KVPATCH_KEY", SECRET)
    monkeypatch.setenv("KVPATCH_OTHER", SECRET[::-1])
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@127.0.0.1:1/0")
    shared = {"remote": f"file://{tmp_path}/remote", "secret": f"file:{file}", "key": f"file:{file}"}
    first = opened(**shared).of("default")
    first.put(chunk_of())
    first.flush()
    assert opened(**shared | {"key": "env:KVPATCH_KEY"}).canonical("default", "chunk") is not None
    with pytest.raises(StoreError, match="another key"):
        opened(**shared | {"key": "env:KVPATCH_OTHER"}).canonical("default", "chunk")
    assert opened(folder="two", **shared | {"secret": "env:KVPATCH_KEY"}).canonical("default", "chunk") is not None
    assert opened(folder="three", **shared | {"secret": "env:KVPATCH_OTHER"}).canonical("default", "chunk") is None
    assert opened(folder="four", remote="env:KVPATCH_REMOTE").canonical("default", "absent") is None


def test_invalid_keys_secrets_and_remotes_are_refused_and_not_repeated(tmp_path, opened, monkeypatch, unchecked):
    """Written out, missing, short, or open to others."""
    file = tmp_path / "key"
    for setting, place, content, mode, why in (
        *(("key", f"{kind}{SECRET}", "", 0o600, "never the key itself|env:NAME") for kind in ("", "env:", "file:")),
        ("key", f"file:{file}", SECRET, 0o640, "mode 640"),
        ("secret", f"file:{file}", SECRET[: MIN_KEY_BYTES - 1], 0o600, f"{MIN_KEY_BYTES - 1} bytes"),
        ("secret", "env:KVPATCH_ABSENT", "", 0o600, "no environment variable KVPATCH_ABSENT"),
        ("remote", f"valkey://h/0?Password={SECRET}", "", 0o600, "env:NAME|password"),
        ("remote", "nothing://host/0", "", 0o600, "expected a URL"),
    ):
        file.write_text(content)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=rf"(?s)^connector\.store\.{setting}: .*({why})") as raised:
            opened(**{setting: place})
        assert SECRET[:16] not in f"{raised.value} {raised.value.__cause__!r}"

    def fails(url, **_):
        raise StoreError("hunter2")

    monkeypatch.setattr(stores, "open_remote", fails)
    monkeypatch.setenv("KVPATCH_REMOTE", "valkey://:hunter2@host/0")
    with pytest.raises(ConfigError, match="StoreError") as raised:
        opened(remote="env:KVPATCH_REMOTE")
    assert "hunter2" not in f"{raised.value} {raised.value.__cause__!r}"
