"""What requests without options are served: the operator's default, what overrides it, and how to have none of it."""
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

import dataclasses

import pytest
from serving_sides import matched_of, output_of, request_of, served, sides_of

from kvpatch_jax.errors import ConfigError, InputError
from kvpatch_jax.serving.vllm import ChunkingOptions, ConnectorConfig, RequestOptions

SEPARATOR = 999
TOKENS = [*range(100, 120), SEPARATOR, *range(200, 216), SEPARATOR, *range(300, 304)]
"""Two documents and a question."""
CHUNKING = ChunkingOptions(separators=((SEPARATOR,),), least=16)
BLOCKS = tuple(range(3, 14))
DEFAULT = {"policy": "approximate", "kl": 0.02, "tenant": "shared", "promise": "remember"}


def config_of(**more):
    return ConnectorConfig.read({"store": "s", "backbone": "b", **more})


def report_of(sides, params, tokens=TOKENS):
    """Serves a request and returns its report; None if it has none."""
    request = request_of("asked", params, tokens)
    sides.scheduler.add_request(request)
    count = matched_of(sides.scheduler, request)
    sides.scheduler.order_load(request, BLOCKS, count)
    sides.scheduler.build_commands(output_of({}, {}, {}))
    report = sides.scheduler.finish(request)
    return report and report["kvpatch"]


def test_a_request_without_options_is_served_by_default(tmp_path):
    """From plain text, in an engine that never sees `kv_transfer_params`; the report says what was promised."""
    default = RequestOptions(policy="blind", promise="remember")
    with sides_of(tmp_path, default=default, chunking=CHUNKING) as sides:
        served(sides, "first", {}, TOKENS, BLOCKS)
        assert sides.worker.former.counts == {"canonicals": 1, "prefills": 1, "survivors": 1}
        report = report_of(sides, None)
        assert (report["matched"], report["promise"]) == (38, "remember")
        assert report["served"] == [["leading", 0], ["restored", 0]]
        assert report_of(sides, {"kvpatch": {"segments": [21, 30]}})["matched"] == 21
        assert report_of(sides, {"kvpatch": {"tenant": "other"}})["matched"] == 0


def test_a_request_can_ask_for_nothing(tmp_path):
    """False and not another policy: it asks for no plan, so that nothing of it is looked up, formed or reported."""
    with sides_of(tmp_path, default=RequestOptions(), chunking=CHUNKING) as sides:
        served(sides, "first", {}, TOKENS, BLOCKS)
        assert report_of(sides, {"kvpatch": False}) is None
        assert report_of(sides, None)["matched"] == 38


def test_a_prompt_without_chunks_is_not_planned(tmp_path):
    with sides_of(tmp_path, default=RequestOptions()) as sides:
        request = request_of("chat", None, TOKENS)
        sides.scheduler.add_request(request)
        assert sides.scheduler.match(request, 0) == 0, "the engine need not ask again"
        assert sides.scheduler.finish(request) is None


def test_own_options_override_the_default_field_by_field():
    config = config_of(default=DEFAULT)
    default = RequestOptions(policy="approximate", kl=0.02, tenant="shared", promise="remember")
    assert config.default == default
    for params in (None, {}, {"kvpatch": None}, {"do_remote_prefill": True}, {"kvpatch": {}}):
        assert config.options_of(params) == default
    assert config.options_of({"kvpatch": {"kl": 0.01, "segments": [3]}}) == dataclasses.replace(
        default, kl=0.01, segments=(3,)
    )
    assert config.options_of({"kvpatch": {"policy": "exact"}}).policy == "exact"
    assert config.options_of({"kvpatch": {"kl": None, "promise": "forget"}}) == dataclasses.replace(
        default, kl=None, promise="forget"
    )
    assert config.options_of({"kvpatch": False}) is None
    assert config_of().options_of(None) is None
    assert config_of().options_of({"kvpatch": False}) is None
    assert config_of().options_of({"kvpatch": {}}) == RequestOptions()


def test_no_request_goes_beyond_the_operators_limits():
    with pytest.raises(InputError, match="do not allow 'uncertified'"):
        config_of(default=DEFAULT).options_of({"kvpatch": {"policy": "blind"}})
    blind = config_of(default=DEFAULT, uncertified=True).options_of({"kvpatch": {"policy": "blind"}})
    assert (blind.policy, blind.kl, blind.tenant) == ("blind", None, "shared"), "its bound is of another policy"
    with pytest.raises(ConfigError, match=r"connector\.default\.policy: got 'blind'"):
        config_of(default={"policy": "blind"})
    assert config_of(default={"policy": "blind"}, uncertified=True).options_of(None).policy == "blind"
    with pytest.raises(ConfigError, match=r"connector\.default\.kl: got 0\.1; expected at most most_kl, 0\.05"):
        config_of(default={"policy": "approximate", "kl": 0.1})


def test_a_tenant_can_be_required():
    """Whoever comes without one, past a gateway, is served none that others share."""
    config = config_of(default={"policy": "exact"}, require_tenant=True)
    for params in (None, {}, {"kvpatch": None}, {"kvpatch": {}}, {"kvpatch": {"policy": "exact"}}, {"kvpatch": False}):
        assert config.options_of(params) is None
    assert config.options_of({"kvpatch": {"tenant": "acme"}}).tenant == "acme"


@pytest.mark.parametrize(
    ("value", "named"),
    [
        *((value, r"connector\.default: got") for value in ([], "exact", {"segments": [3]}, {"rank": 1})),
        ({"policy": "fast"}, r"connector\.default\.policy: got 'fast'; expected one of"),
        ({"kl": "0.1"}, r"connector\.default\.kl: got '0\.1'; expected a finite number"),
        ({"tenant": ""}, r"connector\.default\.tenant: got ''; expected 1 to 200 characters"),
    ],
)
def test_invalid_defaults_are_refused_at_the_start(unchecked, value, named):
    with pytest.raises(ConfigError, match=named):
        config_of(default=value)


def test_invalid_settings_are_refused_by_name(unchecked):
    for name, value in (("require_tenant", 1), ("chunking", 3), ("chunking", {"least": 1}), ("default", 3)):
        with pytest.raises(ConfigError, match=rf"connector\.{name}"):
            config_of(**{name: value})
    with pytest.raises(ConfigError, match=r"connector\.default: got .* without segments"):
        ConnectorConfig(store="s", backbone="b", default=RequestOptions(segments=(3,)))
    with pytest.raises(ConfigError, match=r"connector\.chunking: got"):
        ConnectorConfig(store="s", backbone="b", chunking={"least": 128})
    assert config_of(chunking=None, default=None) == config_of()
    for promise in ("remember", "forget"):
        assert RequestOptions.read({"kvpatch": {"promise": promise}}).promise == promise
    with pytest.raises(InputError, match=r"kv_transfer_params\.kvpatch\.promise: got 'keep'"):
        RequestOptions.read({"kvpatch": {"promise": "keep"}})
