"""Requests that no honest client sends, at vLLM's own OpenAI server: `python fuzz_program.py WORK`.

It writes WORK/fuzzed-128.json: how two servers answered 400 bodies each, eight at a time, and what a plain request is
answered before and behind them. vLLM checks that `kv_transfer_params` is a mapping; `vllm_xargs` lets through more.
The servers divide text, have options by default and small budgets, and preempt; the second one takes tenants from a
header, and some headers are none. Some clients hang up before they are answered.
"""
# pyright: reportMissingImports=false

import collections
import concurrent.futures
import http.client
import json
import os
import random
import sys
import urllib.parse
from pathlib import Path
from typing import Any, NamedTuple

import cpu_rig

os.environ.update(cpu_rig.ENVIRONMENT)

import load_program
import numpy as np
import served_model
import trained_model
from served_model import Server, message_of
from trained_task import FRAME, QUESTION

from evals.small_task import VOCABULARY

BODIES, AT_ONCE, SEED = 400, 8, 11
BLOCKS = 26
"""Of the engine's pool; eight long prompts need more."""
SERVERS = {
    "direct": [],
    "tenant-header": ["--middleware=kvpatch_jax.serving.vllm.tenant_header.TenantMiddleware"],
}
"""Flags of the servers: of the second one the middleware reads, and refuses what it cannot."""
DEEP = "lists in lists"
"""In whose place so many are written that json itself would not."""
SURROGATE = r"\ud800"
HEADER = "x-tenant"
TENANTS = ("a", "b", "", " ", "\xe9", "a" * 300, "a, b", "../..", "%00", "{}")
"""Values of the tenant's header; some bodies come without it, or with it twice."""
SETTINGS = {
    "chunking": {"separators": [[2], [3, 4]], "openers": [[5]], "mean": 64, "least": 16, "most": 128},
    "default": {"policy": "approximate", "kl": 0.02, "promise": "remember"},
    "survivor_bytes": 1 << 20,
    "pending_bytes": 1 << 20,
    "host": 1 << 20,
    "disk": 16 << 20,
}
FIELDS = ("policy", "tenant", "kl", "flips", "segments", "save", "promise", "agent", "other", "")
SCALARS = (
    "",
    "x",
    "\ud800",
    "exact",
    "approximate",
    "blind",
    "forget",
    "remember",
    0,
    1,
    -1,
    2**31,
    2**63,
    10**30,
    10**400,
    True,
    False,
    None,
)
TOKENS = sorted(set(range(1, 20)) - {*FRAME, VOCABULARY.image})
"""Of text: one that stands for an image where there is none ends tpu-inference 0.32, with a connector or without."""
WHOLE = ([], "", 0, "x", [1], {}, *({"kvpatch": own} for own in ([], {}, False, True)), {"do_remote_prefill": True})
NUMBERS = (0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf"))


def value_of(rng: random.Random, depth: int = 3) -> Any:
    """Anything that JSON holds, and the numbers that Python's JSON holds besides."""
    kind = rng.randrange(6 if depth else 4)
    if kind < 3:
        return rng.choice(SCALARS)
    if kind == 3:
        return rng.choice(NUMBERS)
    if kind == 4:
        return [value_of(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice((*FIELDS, "kvpatch")): value_of(rng, depth - 1) for _ in range(rng.randrange(4))}


def params_of(rng: random.Random) -> Any:
    """What stands in place of `kv_transfer_params`: half of them our own part, of whatever fields."""
    kind = rng.randrange(8)
    if kind < 2:
        return value_of(rng)
    if kind == 2:
        return rng.choice(
            ([], "", 0, "x", [1], {}, {"kvpatch": []}, {"do_remote_prefill": True}, {"kvpatch": {}}, {"kvpatch": False})
        )
    if kind == 3:
        nested: Any = DEEP
        for _ in range(rng.choice((0, 10, 100))):
            nested = rng.choice(([nested], {"kvpatch": nested}))
        return {"kvpatch": nested}
    own = {rng.choice(FIELDS): value_of(rng, 2) for _ in range(rng.randrange(4))}
    if kind < 6:  # a plan, if the rest makes sense
        own |= {"segments": sorted(rng.sample(range(1, 12), rng.randrange(4))), "save": rng.random() < 0.5}
    return {"kvpatch": own}


class Body(NamedTuple):
    """A request that is sent as it stands.

    Attributes:
      for_the_frontend: whether vLLM 0.32's frontend itself answers 500, with a connector or without, and the engine
        does not hear of it: what it takes for a mapping is none, or its messages cannot hold a lone surrogate.
      headers: besides those that every request has. hangs_up: whether the client is gone before it is answered.
    """

    path: str
    text: str
    for_the_frontend: bool
    headers: tuple[tuple[str, str], ...]
    hangs_up: bool


def body_of(rng: random.Random, image: np.ndarray) -> Body:
    """Draws one; where vLLM takes mappings alone, nothing else is put, as a rule."""
    params, common = params_of(rng), {"model": Server.name, "max_tokens": 2, "temperature": 0}
    checked = isinstance(params, dict) or rng.random() < 0.1
    where = {"kv_transfer_params": params} if checked else {"vllm_xargs": {"kv_transfer_params": params}}
    # Of separators, openings, and what content divides.
    prompt = [rng.choice(TOKENS) for _ in range(rng.choice((1, 19, 150)))]
    path, asked = "/v1/completions", {"prompt": prompt}
    if rng.random() < 0.5:
        path, asked = "/v1/chat/completions", {"messages": message_of([image], QUESTION)}
    common["max_tokens"] = rng.choice((2, 2, 30))
    text = dumps(rng, {**common, **where, **asked})
    headers = tuple((HEADER, rng.choice(TENANTS)) for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 2))))
    return Body(path, text, (not checked and bool(params)) or SURROGATE in text, headers, rng.random() < 0.1)


def dumps(rng: random.Random, body: Any) -> str:
    """JSON of whatever depth, with numbers of whatever length."""
    depth = rng.choice((1, 200, 900, 100_000))
    return json.dumps(body).replace(json.dumps(DEEP), "[" * depth + "]" * depth)


def answered(server: Server, body: Body) -> tuple[int, str]:
    """Status and text of an answer; status 0 where there is none, -1 where the client did not wait for one."""
    asked = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=300)
    data = body.text.encode()
    try:
        asked.putrequest("POST", body.path)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data))), *body.headers):
            asked.putheader(name, value)
        asked.endheaders(data)
        if body.hangs_up:
            return -1, ""
        answer = asked.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        asked.close()


def asked_of(server: Server, bodies: list[Body], image: np.ndarray) -> dict[str, Any]:
    """How a server answers them, and plain requests before and behind them."""
    plain = {"messages": message_of([image], QUESTION), "max_tokens": 8, "temperature": 0}
    plain |= {"ignore_eos": True, "return_token_ids": True}
    reuse = {**plain, "kv_transfer_params": {"kvpatch": {}}}
    said = lambda answer: answer["choices"][0]["token_ids"]
    before = said(server.chat(plain))
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda body: answered(server, body), bodies))
    server.reset()
    return {
        "bodies": len(bodies),
        "statuses": collections.Counter(str(status) for status, _ in answers),
        "frontend_500": sum(
            status == 500 and body.for_the_frontend for body, (status, _) in zip(bodies, answers, strict=True)
        ),
        "neither_200_nor_4xx": [
            {"path": body.path, "body": body.text[:300], "status": status, "answer": text[:300]}
            for body, (status, text) in zip(bodies, answers, strict=True)
            if not (status in (200, -1) or 400 <= status < 500 or (status == 500 and body.for_the_frontend))
        ],
        "preemptions": server.metrics()["vllm:num_preemptions_total"],
        "plain": [before, said(server.chat(plain))],
        "reuse": said(server.chat(reuse)),
        "seconds_to_start": round(server.seconds, 1),
    }


def main(work: str) -> None:
    """Serves twice, asks, and writes what was found."""
    folder, found = Path(work), dict[str, Any]()
    image, *_ = load_program.prompts_of(1)[0][0].images
    model = trained_model.write(folder / "model-fuzzed")
    os.environ |= {"KVPATCH_TENANT_HEADER": HEADER, "KVPATCH_TENANT_TRUSTED": "1"}
    for name, middleware in SERVERS.items():
        flags = load_program.flags_of(folder / f"store-{name}", SETTINGS)
        flags += [f"--num-gpu-blocks-override={BLOCKS}", *middleware]
        bodies = [body_of(random.Random(f"{SEED} {name} {number}"), image) for number in range(BODIES)]
        with served_model.serving(model, folder, flags) as server:
            print(f"{name}: serving after {server.seconds:.0f} s", flush=True)
            found[name] = asked_of(server, bodies, image)
    (folder / "fuzzed-128.json").write_text(json.dumps({"servers": found, "versions": cpu_rig.versions()}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
