"""The operator's settings and a request's options: what they accept, the limits of a request, and secrets."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import dataclasses
import re

import pytest

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.serving.vllm import ChunkingOptions, ConnectorConfig, RequestOptions, StoreOptions
from kvpatch_jax.serving.vllm.config import tenant_of

pytestmark = pytest.mark.usefixtures("unchecked")
SECRET = "correct horse battery staple, thirty-two bytes"
DEFAULT = {"reuse": "certified", "kl": 0.02, "promise": "remember"}


def config_of(**settings) -> ConnectorConfig:
    return ConnectorConfig.read({"store": "s", "backbone": "b", **settings})


def options_of(part, **settings) -> RequestOptions | None:
    return config_of(**settings).options_of({"kvpatch": part})


# ------------------------------------------------------------------------------------------------------------ settings


def test_settings_are_read_from_json():
    store = {
        "root": "s",
        "memory": "8 GiB",
        "root_budget": "500 GB",
        "ttl": 3600,
        "key": "env:KEY",
        "secret": "file:/s",
    }
    chunking = {"separators": [[7, 8]], "openers": [[1, 2]], "image_frame": [5, 6]}
    config = config_of(store=store, chunking=chunking, allow=["exact", "blind"], survivors="1 MiB", default={})
    assert config.store == StoreOptions("s", 500 * 10**9, 8 << 30, 3600, "env:KEY", "file:/s")
    assert config.chunking == ChunkingOptions(((7, 8),), ((1, 2),), image_frame=(5, 6))
    assert (config.allow, config.survivors, config.default) == (("exact", "blind"), 1 << 20, RequestOptions())
    assert config_of().store == StoreOptions("s")
    assert hash(config) != hash(config_of()), "the stores of a process are kept by their configuration"


INVALID = {
    **{"backbone": ("", 7), "certificate": (7,), "kl": (-1, float("inf"), "0.1", True), "rank": (0, True, 1.5)},
    **{"allow": ([], ["certified"], ["exact", "often"], "exact"), "store_after": (-1, "2"), "survivors": (-1, "many")},
    **{"chunking": (3, {"mean": 512}), "default": (3, {"segments": [3]}, {"agent": "a"}, {"rank": 1})},
    **{"default.reuse": ("fast", "blind"), "default.kl": ("0.1", 0.1), "store": (None, 7, {}, {"memory": 1})},
    **{"store.root": ("", 7), "store.memory": (-1, True, "many", 2**70), "store.root_budget": (0, "lots")},
    **{"store.ttl": (0, float("nan")), "store.key": ("key", "file:relative", "env:lower", 7), "store.secret": ("x",)},
    **{"chunking.separators": (3, [3], [[]], [["#"]], [[-1]]), "chunking.openers": ([[2**31]], [[1] * 65], [[1]] * 65)},
    **{"chunking.least": (0, "32", 1 << 15), "chunking.image_frame": ([1], [1, -2], 7)},
    "store.remote": ("host:6379", "env:lower", "valkey://[::1/0", 7),
}


@pytest.mark.parametrize(("name", "values"), INVALID.items(), ids=list(INVALID))
def test_invalid_settings_are_refused_by_name(name, values):
    setting, _, part = name.partition(".")
    for value in values:
        more = {"root": "s"} if setting == "store" and part != "root" else {}
        more |= {"reuse": "certified"} if part == "kl" else {}
        with pytest.raises(ConfigError, match=rf"^connector\.{re.escape(name)}: got .*; expected "):
            config_of(**{setting: {part: value, **more} if part else value})
    with pytest.raises(ConfigError, match=r"connector: got .*'patience'.*; expected .*'store_after'"):
        config_of(patience=1)


SECRETS = [{setting: f"{kind}{SECRET}"} for setting in ("key", "secret") for kind in ("", "env:", "file:")]
SECRETS += [{"password": SECRET}, *({"remote": url} for url in (f"valkey://a%40{SECRET}@h/0", SECRET))]
SECRETS += [{"remote": f"valkey://h/0?Password={SECRET}"}]


@pytest.mark.parametrize("setting", SECRETS)
def test_a_secret_that_is_written_out_is_refused_and_not_repeated(setting):
    with pytest.raises(ConfigError, match=r"never the \w+ itself|env:NAME|password") as raised:
        config_of(store={"root": "s", **setting})
    assert SECRET not in str(raised.value)


# ------------------------------------------------------------------------------------------------------------- requests


def test_a_requests_options_override_the_default_field_by_field():
    config = config_of(default=DEFAULT)
    default = RequestOptions("certified", 0.02, "remember")
    for params in (None, {}, {"kvpatch": None}, {"do_remote_prefill": True}, {"kvpatch": {}}):
        assert config.options_of(params) == default
    part = {"kl": 0.01, "segments": [3], "agent": "a"}
    assert options_of(part, default=DEFAULT) == dataclasses.replace(default, kl=0.01, segments=(3,), agent="a")
    assert options_of({"kl": None, "promise": "forget"}, default=DEFAULT) == RequestOptions("certified")
    exact = options_of({"reuse": "exact"}, default=DEFAULT)
    assert (exact.reuse, exact.kl) == ("exact", None), "a bound is of certified reuse alone"


def test_without_a_default_a_request_has_to_ask_and_it_can_ask_for_nothing():
    assert config_of().options_of(None) is None
    assert options_of({}) == RequestOptions()
    for settings in ({}, {"default": DEFAULT}):
        assert options_of(False, **settings) is None


@pytest.mark.parametrize("reuse", ["patched", "blind"])
def test_no_request_goes_beyond_the_operators_limits(reuse):
    with pytest.raises(InputError, match=f"got '{reuse}', which the operator does not allow"):
        options_of({"reuse": reuse})
    assert options_of({"reuse": reuse}, allow=["exact", reuse]).reuse == reuse


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reuse", ("approximate", None, [])),
        *(("kl", (0.1, -1)), ("promise", ("keep",)), ("agent", (7, "a" * 201)), ("save", (1,))),
        ("segments", (3, "3", [0], [3, 3], [4, 3], [True], [2**31], list(range(1, 4098)))),
    ],
)
def test_invalid_options_are_refused_by_name(name, values):
    for value in values:
        with pytest.raises(InputError, match=rf"^kv_transfer_params\.kvpatch\.{name}: got .*; expected "):
            options_of({name: value})


@pytest.mark.parametrize("params", [7, [], {"kvpatch": True}, {"kvpatch": {"tenant": "acme"}}, {"kvpatch": "exact"}])
def test_parameters_of_other_kinds_and_unknown_options_are_refused(params):
    with pytest.raises(InputError, match=r"^kv_transfer_params"):
        config_of().options_of(params)


def test_tenants_are_isolated_by_the_engines_own_salt():
    assert [tenant_of(salt) for salt in (None, "", "acme")] == ["default", "default", "acme"]
    for salt in ("default", "s" * 201):
        with pytest.raises(InputError, match=r"^cache_salt: got") as raised:
            tenant_of(salt)
        assert "sss" not in str(raised.value), "who knows a salt is its tenant"
