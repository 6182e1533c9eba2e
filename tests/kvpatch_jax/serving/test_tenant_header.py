"""The middleware that names tenants by a header: plain ASGI calls, whatever a client sends."""
# pyright: reportOptionalMemberAccess=false

import asyncio
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpatch_jax.serving.vllm import ConnectorConfig, tenant_header
from kvpatch_jax.serving.vllm.tenant_header import TenantMiddleware

CHAT = "/v1/chat/completions"
JSON = (b"content-type", b"application/json")
ALICE, BOB = (b"Authorization", b"Bearer alice"), (b"authorization", b"Bearer bob")


class Application:
    """An application that reads its requests as they come."""

    def __init__(self):
        self.scopes, self.bodies, self.last = [], [], None

    async def __call__(self, scope, receive, send):
        self.scopes.append(scope)
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.last = await receive()


def call(body, *headers, path=CHAT, method="POST", pieces=1, kind="http", gone=False):
    """One request through the middleware; returns the application and what was sent by the middleware itself."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    size = -(-len(body) // pieces) or 1
    messages = [
        {"type": "http.request", "body": body[at : at + size], "more_body": True} for at in range(0, len(body), size)
    ]
    messages += [{"type": "http.disconnect"}] if gone else [{"type": "http.request"}, {"type": "http.disconnect"}]
    sent, application = [], Application()

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": list(headers)}
    asyncio.run(TenantMiddleware(application)(scope, receive, send))
    return application, sent


def passed(body, *headers, **more):
    """The body that the application reads."""
    application, sent = call(body, JSON, *headers, **more)
    assert sent == []
    (found,) = application.bodies
    assert dict(application.scopes[0]["headers"])[b"content-length"] == str(len(found)).encode()
    assert application.last == {"type": "http.disconnect"}, "it hears that the client has gone"
    return json.loads(found)


def refused(body, *headers, **more):
    """The status of an answer that the middleware gives itself."""
    application, sent = call(body, JSON, *headers, **more)
    assert application.scopes == []
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert json.loads(sent[1]["body"])["error"]["code"] == sent[0]["status"]
    return sent[0]["status"]


def tenant_in(body):
    return body["kv_transfer_params"]["kvpatch"]["tenant"]


def test_a_tenant_is_who_knows_the_key():
    alice, bob = passed({"messages": []}, ALICE), passed({"messages": []}, BOB)
    assert tenant_in(alice) != tenant_in(bob)
    assert len(tenant_in(alice)) == 32
    assert "alice" not in json.dumps(alice), "names of tenants stand in logs"
    assert alice["messages"] == []
    again = passed({"kv_transfer_params": {"kvpatch": {"tenant": tenant_in(alice), "kl": 0.01}}}, BOB)
    assert again["kv_transfer_params"] == {"kvpatch": {"tenant": tenant_in(bob), "kl": 0.01}}
    assert ConnectorConfig("s", "b").options_of(again["kv_transfer_params"]).tenant == tenant_in(bob)


def test_a_trusted_header_is_the_tenant(monkeypatch):
    monkeypatch.setenv("KVPATCH_TENANT_HEADER", "X-Tenant")
    monkeypatch.setenv("KVPATCH_TENANT_TRUSTED", "1")
    assert tenant_in(passed({}, (b"x-tenant", b" acme "), ALICE)) == "acme"
    assert passed({"prompt": "a"}, ALICE) == {"prompt": "a"}
    assert refused({}, (b"x-tenant", b"acme"), (b"X-Tenant", b"other")) == 400, "which one would a gateway mean?"
    assert refused({}, (b"x-tenant", b" ")) == 400
    assert refused({}, (b"x-tenant", b"a" * 201)) == 400
    monkeypatch.setenv("KVPATCH_TENANT_TRUSTED", "0")
    assert tenant_in(passed({}, (b"x-tenant", b"acme"))) not in ("acme", tenant_in(passed({}, (b"x-tenant", b"other"))))


def test_without_the_header_no_tenant_is_left():
    body = {"kv_transfer_params": {"kvpatch": {"tenant": "acme", "kl": 0.1}}}
    assert passed(body) == {"kv_transfer_params": {"kvpatch": {"kl": 0.1}}}
    assert passed({"prompt": "a", "kv_transfer_params": None}) == {"prompt": "a", "kv_transfer_params": None}
    assert passed([1, "a"], ALICE) == [1, "a"]


def test_no_path_carries_another_tenant():
    """Parameters among the sampling parameters, and endpoints that get no tenant of their own."""
    hidden = {"kvpatch": {"tenant": "acme"}}
    body = {
        "sampling_params": {"extra_args": {"kv_transfer_params": hidden}},
        "vllm_xargs": {"kv_transfer_params": hidden},
    }
    for path in ("/inference/v1/generate", "/v1/responses", "/invocations", CHAT):
        for headers in ((), (ALICE,)):
            found = passed(body, *headers, path=path)
            assert "acme" not in json.dumps(found)
    assert passed({"input": "a"}, ALICE, path="/v1/embeddings") == {"input": "a"}


def test_an_opt_out_stays():
    assert passed({"kv_transfer_params": {"kvpatch": False}}, ALICE)["kv_transfer_params"] == {"kvpatch": False}


def test_no_client_has_the_prefix_cache_of_another_tenant():
    """vLLM's own cache compares tokens and salts only."""
    alice = passed({}, ALICE)["cache_salt"]
    assert passed({}, ALICE)["cache_salt"] == alice
    salts = {alice, passed({}, BOB)["cache_salt"]}
    for headers in ((), (BOB,)):
        for path in (CHAT, "/v1/responses"):
            salts.add(passed({"cache_salt": alice}, *headers, path=path)["cache_salt"])
    assert len(salts) == 4, "two of Bob's, whatever the path, and one of nobody's"
    assert passed({"cache_salt": "own"}, ALICE)["cache_salt"] not in salts


@pytest.mark.parametrize("pieces", [1, 2, 7, 1000])
def test_a_body_in_pieces_is_one(pieces):
    body = {"messages": [{"role": "user", "content": "é\u2028😀" * 50}], "temperature": 0.1, "stream": True}
    found = passed(body, ALICE, (b"Transfer-Encoding", b"chunked"), (b"Content-Length", b"3"), pieces=pieces)
    assert {name: found[name] for name in body} == body
    names = [name.lower() for name, _ in call(body, JSON, (b"Transfer-Encoding", b"chunked"))[0].scopes[0]["headers"]]
    assert sorted(names) == [b"content-length", b"content-type"]


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b'{"a": 1', b"not JSON", b"\xff\xfe{}", b'{"a": "\xff"}', b"{} {}", b'{"a": NaN}', b"[" * 100_000),
        *(b'{"a": 1, "a": 2}', b"[" + b"9" * 5000 + b"]"),
        b'{"kv_transfer_params": {"kvpatch": {"tenant": "a", "tenant": "b"}}}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_parsers_could_read_differently_is_refused(body):
    assert refused(body, ALICE) == 400


def test_a_body_that_is_too_large_is_not_held(monkeypatch):
    monkeypatch.setattr(tenant_header, "MAX_BODY", 100)
    assert refused({"prompt": "a" * 100}, pieces=9) == 413
    assert passed({"prompt": "a" * 50}) == {"prompt": "a" * 50}


def test_a_client_that_goes_while_it_sends_reaches_nothing():
    application, sent = call({"prompt": "a" * 50}, JSON, ALICE, pieces=3, gone=True)
    assert (application.scopes, sent) == ([], [])


def test_what_has_no_json_is_left_alone():
    body = b'{"kv_transfer_params": {"kvpatch": {"tenant": "acme"}}}'
    form = (b"Content-Type", b"multipart/form-data; boundary=x")
    assert call(body, form, ALICE)[0].bodies == [body]
    assert call(body, JSON, ALICE, method="GET", path="/health")[0].bodies == [body]
    assert call(b"", ALICE, path="/reset_prefix_cache")[0].bodies == [b""]
    (scope,) = call(body, kind="websocket", path="/v1/realtime")[0].scopes
    assert scope["type"] == "websocket"
    for headers in ((form, JSON), (JSON, form), (), ((b"content-type", b"text/plain"),)):
        assert b"acme" not in call(body, *headers, BOB)[0].bodies[0], "it may be read as JSON"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["acme", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kv_transfer_params", "kvpatch", "tenant", "other"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def parameters_in(value):
    """Every mapping that may be read as `kv_transfer_params`."""
    if isinstance(value, dict):
        if isinstance(value.get("kv_transfer_params"), dict):
            yield value["kv_transfer_params"]
        value = list(value.values())
    for inner in value if isinstance(value, list) else ():
        yield from parameters_in(inner)


@given(VALUES, st.sampled_from([(), (ALICE,)]))
@settings(max_examples=150, deadline=None)
def test_no_body_keeps_a_tenant_of_its_own(body, headers):
    found = passed(body, *headers)
    own = tenant_in(passed({}, ALICE)) if headers else None
    for params in parameters_in(found):
        if isinstance(params.get("kvpatch"), dict):
            assert params["kvpatch"].get("tenant") == own


def test_importing_it_takes_no_device():
    """It runs in the API server's process, beside the engine's, which needs the accelerator for itself."""
    code = "import kvpatch_jax.serving.vllm.tenant_header, jax; assert not jax._src.xla_bridge._backends"
    subprocess.run([sys.executable, "-c", code], check=True)
