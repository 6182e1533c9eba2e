"""ASGI middleware that names a request's tenant by an HTTP header, for vLLM's OpenAI server.

    vllm serve … --middleware kvpatch_jax.serving.vllm.tenant_header.TenantMiddleware

Headers do not reach a connector, `kv_transfer_params` of the body do. What a client says there about its tenant is
replaced. Settings are environment variables, since vLLM makes a middleware without arguments:

    KVPATCH_TENANT_HEADER     the header's name; "authorization" by default
    KVPATCH_TENANT_TRUSTED    "1": the header's value is the tenant, because a gateway sets it and drops clients' own.
                              Otherwise the tenant is a digest of the value, so that only who knows it is served by it.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ...cache import digest_of
from ...errors import InputError
from ...utils.strict_json import loads
from .settings import MAX_TENANT

MAX_BODY = 256 << 20
"""Bytes of a request's body. It is read before vLLM looks at the API key, and held in memory."""
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_FRAMING = (b"content-length", b"transfer-encoding")
_FORMS = (b"multipart/", b"application/x-www-form-urlencoded")


class TenantMiddleware:
    """Middleware that sets the tenant, and per tenant a salt of the engine's prefix cache, by a header.

    A request without the header has no tenant: what its body says of one is removed on every path.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]):
        self.app = app
        self.header = (os.environ.get("KVPATCH_TENANT_HEADER") or "authorization").lower().encode()
        self.trusted = os.environ.get("KVPATCH_TENANT_TRUSTED") == "1"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles a connection. Answers 400 or 413 itself to a body or header that it cannot read."""
        kinds = [value.lower() for name, value in scope.get("headers", ()) if name.lower() == b"content-type"]
        # One header of several decides for vLLM, so that a form has to be called nothing else.
        is_form = bool(kinds) and all(kind.startswith(_FORMS) for kind in kinds)
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS") or is_form:
            return await self.app(scope, receive, send)

        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BODY:
                return await _refuse(send, 413, f"body: got more than {MAX_BODY} bytes; expected fewer")

        try:
            changed = self._with_tenant(bytes(body), scope) if body else b""
        except (ValueError, RecursionError) as error:
            return await _refuse(send, 400, str(error))

        headers = [(b"content-length", str(len(changed)).encode())]
        headers += [(name, value) for name, value in scope["headers"] if name.lower() not in _FRAMING]
        unread = [{"type": "http.request", "body": changed, "more_body": False}]

        async def replay() -> Message:
            # After the body, whether the client has gone.
            return unread.pop() if unread else await receive()

        return await self.app({**scope, "headers": headers}, replay, send)

    def _with_tenant(self, body: bytes, scope: Message) -> bytes:
        """Returns a body with the tenant of its header.

        Raises:
          ValueError: the header names no tenant, or the body is no JSON or repeats a name: parsers read it differently.
        """
        tenant, content = self._tenant(scope), loads(body)
        # Some endpoints take parameters elsewhere too, such as among the sampling parameters.
        unread = [content]
        while unread:
            value = unread.pop()
            unread += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            params = value.get("kv_transfer_params") if isinstance(value, dict) else None
            options = params.get("kvpatch") if isinstance(params, dict) else None
            if isinstance(options, dict):
                options.pop("tenant", None)
                if tenant is not None:
                    options["tenant"] = tenant

        if isinstance(content, dict):
            is_completion = tenant is not None and scope["path"].endswith("/completions")
            if is_completion:
                params = content["kv_transfer_params"] = content.get("kv_transfer_params") or {}
                if isinstance(params, dict) and params.get("kvpatch") is None:
                    params["kvpatch"] = {"tenant": tenant}
            # No client can choose the salt of another tenant, on any path.
            if is_completion or "cache_salt" in content:
                content["cache_salt"] = json.dumps([tenant, content.get("cache_salt")])
        return json.dumps(content).encode()

    def _tenant(self, scope: Message) -> str | None:
        values = [value.strip() for name, value in scope["headers"] if name.lower() == self.header]
        if not values:
            return None
        if len(values) > 1 or not 1 <= len(values[0]) <= (MAX_TENANT if self.trusted else MAX_BODY):
            # Without the values, which may be keys.
            raise InputError(f"{self.header.decode()}: got {len(values)} values; expected the name of one tenant")
        return values[0].decode("latin-1") if self.trusted else digest_of([b"tenant", values[0]], size=16)


async def _refuse(send: Send, status: int, reason: str) -> None:  # as OpenAI's servers do
    body = json.dumps({"error": {"message": reason[:500], "type": "BadRequestError", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
