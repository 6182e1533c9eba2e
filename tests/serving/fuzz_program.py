"""Bodies that no honest client sends, at vLLM's own OpenAI server: `python fuzz_program.py WORK`.

It writes WORK/fuzzed-128.json: how each of 500 bodies was answered, eight at a time, and what a plain request is
answered before and behind them. vLLM checks that `kv_transfer_params` is a mapping; `vllm_xargs` lets through more.
"""
# pyright: reportMissingImports=false

import collections
import concurrent.futures
import json
import os
import random
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import cpu_rig

os.environ.update(cpu_rig.ENVIRONMENT)

import load_program
import numpy as np
import served_model
import trained_model
from served_model import Server, message_of
from trained_task import QUESTION

BODIES, AT_ONCE, SEED = 500, 8, 11
DEEP = "lists in lists"
"""In whose place so many are written that json itself would not."""
SURROGATE = r"\ud800"
FIELDS = ("policy", "tenant", "kl", "flips", "segments", "save", "other", "")
SCALARS = (
    "",
    "x",
    "\ud800",
    "exact",
    "approximate",
    "blind",
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
        return rng.choice(([], "", 0, "x", [1], {}, {"kvpatch": []}, {"do_remote_prefill": True}, {"kvpatch": {}}))
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
    """

    path: str
    text: str
    for_the_frontend: bool


def body_of(rng: random.Random, image: np.ndarray) -> Body:
    """Draws one; where vLLM takes mappings alone, nothing else is put, as a rule."""
    params, common = params_of(rng), {"model": Server.name, "max_tokens": 2, "temperature": 0}
    checked = isinstance(params, dict) or rng.random() < 0.1
    where = {"kv_transfer_params": params} if checked else {"vllm_xargs": {"kv_transfer_params": params}}
    path, asked = "/v1/completions", {"prompt": list(range(1, 20))}
    if rng.random() < 0.5:
        path, asked = "/v1/chat/completions", {"messages": message_of([image], QUESTION)}
    text = dumps(rng, {**common, **where, **asked})
    return Body(path, text, (not checked and bool(params)) or SURROGATE in text)


def dumps(rng: random.Random, body: Any) -> str:
    """JSON of whatever depth, with numbers of whatever length."""
    depth = rng.choice((1, 200, 900, 100_000))
    return json.dumps(body).replace(json.dumps(DEEP), "[" * depth + "]" * depth)


def answered(server: Server, body: Body) -> tuple[int, str]:
    """Status and text of an answer; status 0 where there is none."""
    asked = urllib.request.Request(server.url + body.path, body.text.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def main(work: str) -> None:
    """Serves, asks, and writes what was found."""
    folder = Path(work)
    image, *_ = load_program.prompts_of(1)[0][0].images
    plain = {"messages": message_of([image], QUESTION), "max_tokens": 8, "temperature": 0}
    plain |= {"ignore_eos": True, "return_token_ids": True}
    reuse = {**plain, "kv_transfer_params": {"kvpatch": {}}}
    bodies = [body_of(random.Random(f"{SEED} {number}"), image) for number in range(BODIES)]
    said = lambda answer: answer["choices"][0]["token_ids"]
    with served_model.serving(
        trained_model.write(folder / "model-fuzzed"), folder, load_program.flags_of(folder / "store-fuzzed")
    ) as server:
        print(f"serving after {server.seconds:.0f} s", flush=True)
        before = said(server.chat(plain))
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda body: answered(server, body), bodies))
        server.reset()
        found: dict[str, Any] = {
            "bodies": len(bodies),
            "statuses": collections.Counter(str(status) for status, _ in answers),
            "frontend_500": sum(
                status == 500 and body.for_the_frontend for body, (status, _) in zip(bodies, answers, strict=True)
            ),
            "neither_200_nor_4xx": [
                {"path": body.path, "body": body.text[:300], "status": status, "answer": text[:300]}
                for body, (status, text) in zip(bodies, answers, strict=True)
                if not (status == 200 or 400 <= status < 500 or (status == 500 and body.for_the_frontend))
            ],
            "plain": [before, said(server.chat(plain))],
            "reuse": said(server.chat(reuse)),
            "seconds_to_start": round(server.seconds, 1),
        }
    found["versions"] = cpu_rig.versions()
    (folder / "fuzzed-128.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
