"""Requests that arrive by chance, at rising rates, at vLLM's own OpenAI server: `python load_program.py WORK`.

It writes WORK/load-128.json. After MPIC, section 5.3: chunks are formed first; then vLLM's own benchmark client sends
questions behind images at a rate, and times what is streamed. A request is served in one of three ways, which take
turns on one server: with a salt of its own, so that nothing is reused; as the engine serves it, with its prefix cache;
and with our chunks and patches. There are two kinds of traffic: "repeated" asks behind the same prompts again and
again, which a prefix cache is made for; in "reordered" every request has the legends in another order, or another page.
A fourth way, "as they come", is a tenant of whom nothing is formed beforehand: it is served what a certificate bounds,
and what it brings is formed meanwhile, in the background too.
"""
# pyright: reportMissingImports=false

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cpu_rig

os.environ.update(cpu_rig.ENVIRONMENT)

import numpy as np
import served_model
import trained_model
from served_model import Server, message_of
from trained_task import FRAME, QUESTION, Drawn
from vllm.benchmarks.datasets import SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark

from evals.small_task import LEGENDS, VOCABULARY

SEED, CONTEXTS, STEPS, RANK = 50117, 8, 8, 16
REPEATS = 2
RATES = (2, 4, 8, 16)
"""Requests in a second."""
COUNTS = {"chain": 4, "aggregate": 2}
ORDERS = tuple(itertools.permutations(range(LEGENDS)))
WAYS = ("reuse off", "prefix cache", "chunks and patches", "as they come")
FORMED = {"leading", "restored", "stored"}
"""Points of chunks that were formed behind the order in which they stand."""
FORMING_RATE = 512
CERTIFICATE = trained_model.SHIPPED / "certificate.json"
KINDS = ("repeated", "reordered")
TENANT = "load"
FLAGS = (
    *("--dtype=float32", "--block-size=16", "--max-model-len=192", "--max-num-seqs=8", "--max-num-batched-tokens=512"),
    *("--num-gpu-blocks-override=200", "--enable-prefix-caching", "--enforce-eager", "--no-async-scheduling"),
    *("--disable-chunked-mm-input", "--skip-mm-profiling", "--generation-config=vllm", "--disable-uvicorn-access-log"),
)


class Prompt(NamedTuple):
    """Images in one order, questions that may be asked behind them, and the names of right answers."""

    images: Sequence[np.ndarray]
    questions: Sequence[tuple[int, int]]
    answers: Sequence[str]


def prompts_of(count: int) -> list[list[Prompt]]:
    """Draws contexts, each with its legends in every order."""
    found: list[list[Prompt]] = [[] for _ in range(count)]
    for order in ORDERS:
        drawn = Drawn(count, SEED, COUNTS, order)
        for index, own in enumerate(found):
            valid = drawn.questions.valid[index]
            questions = [each for each, there in zip(drawn.asked(index), valid, strict=True) if there]
            answers = [VOCABULARY.names[token] for token in drawn.questions.answer[index][valid]]
            own.append(Prompt(drawn.images[index], questions, answers))
    return found


def form(server: Server, contexts: Sequence[Sequence[Prompt]]) -> dict[str, int]:
    """Has the engine form every chunk, and patches behind every order; counts requests that this took."""
    body = {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {"kvpatch": {"tenant": TENANT}}}
    sent = {"alone": 0, "whole": 0}
    for prompts in contexts:
        for image in prompts[0].images:
            server.chat({**body, "messages": message_of([image], QUESTION)})
            sent["alone"] += 1
        for prompt in prompts:
            # It is formed behind the engine's back, and dropped if it waits too long: asked until it is there.
            for _ in range(20):
                served = server.chat({**_chat(prompt, 0), **_extra(WAYS[2], 0)})["kv_transfer_params"]["kvpatch"]
                if len(served["served"]) == 1 + LEGENDS and {point for point, _ in served["served"]} <= FORMED:
                    break
                server.chat({**body, "messages": message_of(prompt.images, QUESTION)})
                sent["whole"] += 1
            else:
                raise RuntimeError(f"not formed: {served}")
    return sent


def _chat(prompt: Prompt, question: int) -> dict[str, Any]:
    return {"messages": message_of(prompt.images, prompt.questions[question]), "max_tokens": STEPS, "temperature": 0}


def _extra(way: str, number: int) -> dict[str, Any]:
    if way == "reuse off":
        return {"cache_salt": f"own {number}"}
    asked = {"tenant": TENANT, "policy": "blind", "save": False}
    if way == "as they come":
        asked = {"tenant": "live", "policy": "approximate"}
    return {} if way == "prefix cache" else {"kv_transfer_params": {"kvpatch": asked}}


def traffic(kind: str, contexts: Sequence[Sequence[Prompt]], rng: np.random.Generator) -> list[tuple[Prompt, int]]:
    """Prompts and questions in the order in which they will come."""
    every = [prompt for prompts in contexts for prompt in prompts]
    if kind == "reordered":
        chosen = [every[index] for index in rng.permutation(len(every))]
    else:
        chosen = [contexts[index][0] for index in rng.integers(0, len(contexts), len(every))]
    return [(prompt, int(rng.integers(len(prompt.questions)))) for prompt in chosen]


COUNTED = {
    "engine's first token": "vllm:time_to_first_token_seconds_sum",
    "engine's queue": "vllm:request_queue_time_seconds_sum",
    "answers": "vllm:time_to_first_token_seconds_count",
    "computed": "vllm:prompt_tokens_by_source_total local_compute",
    "prefix cache": "vllm:prompt_tokens_by_source_total local_cache_hit",
    "connector": "vllm:prompt_tokens_by_source_total external_kv_transfer",
    "preemptions": "vllm:num_preemptions_total",
}


def sent(server: Server, way: str, requests: Sequence[tuple[Prompt, int]], rate: float, seed: int) -> dict[str, Any]:
    """Sends requests as a Poisson process, the same arrivals in every way; what client and engine say of it."""
    samples = [
        SampleRequest(
            prompt="",
            prompt_len=0,
            expected_output_len=STEPS,
            chat_messages=message_of(prompt.images, prompt.questions[question]),
            request_overrides={"temperature": 0, "ignore_eos": True, **_extra(way, 1000 * seed + number)},
        )
        for number, (prompt, question) in enumerate(requests)
    ]
    server.reset()
    before, compiled = server.metrics(), len(server.compilations())
    np.random.seed(seed)
    found = asyncio.run(
        benchmark(
            TaskType.GENERATION,
            "openai-chat",
            f"{server.url}/v1/chat/completions",
            server.url,
            Server.name,
            Server.name,
            None,
            samples,
            logprobs=None,
            request_rate=rate,
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=[],
            selected_percentiles=[],
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=None,
            lora_modules=None,
            extra_headers=None,
            extra_body=None,
            ready_check_timeout_sec=0,
        )
    )
    after = server.metrics()
    right = [
        text.split()[:1] == [prompt.answers[question]]
        for text, (prompt, question) in zip(found["generated_texts"], requests, strict=True)
    ]
    return {
        "failed": found["failed"],
        "first_token_seconds": [round(own, 5) for own in found["ttfts"]],
        "output_tokens_per_second": found["output_throughput"],
        "output_tokens": found["total_output_tokens"],
        "prompt_tokens": found["total_input_tokens"],
        "right": sum(right),
        "counted": {name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in COUNTED.items()},
        "compiled_seconds": server.compilations()[compiled:],
        "load_average": os.getloadavg()[0],
    }


def measured(
    server: Server, contexts: Sequence[Sequence[Prompt]], rates: Sequence[float], repeats: int
) -> Iterator[list[dict[str, Any]]]:
    """Every way at every rate, taking turns; gives the rows after each round.

    A first round, in which programs are compiled, is not kept.
    """
    kept: dict[tuple[str, float, str], list[dict[str, Any]]] = {
        case: [] for case in itertools.product(KINDS, rates, WAYS)
    }
    numbers = itertools.count()
    for repeat in range(-1, repeats):
        for kind, rate in itertools.product(KINDS, sorted({max(rates) / 4, max(rates)}) if repeat < 0 else rates):
            number = next(numbers)
            requests = traffic(kind, contexts, np.random.default_rng(number))
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                found = sent(server, way, requests, rate, number)
                print(f"{repeat} {kind} {rate} {way}: {json.dumps(_short(found))}", flush=True)
                if repeat >= 0:
                    kept[kind, rate, way].append(found)
        if repeat >= 0:
            yield [{"traffic": kind, "rate": rate, "way": way, **_row(own)} for (kind, rate, way), own in kept.items()]


def _short(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is printed of a run: of each list its middle and its length."""
    middle = lambda own: [round(float(np.median(own)), 4) if own else None, len(own)]
    return {name: middle(own) if isinstance(own, list) else own for name, own in found.items()}


def _row(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the repeats of one way at one rate say together."""
    seconds = np.concatenate([own["first_token_seconds"] for own in found])
    total = lambda name: sum(own["counted"][name] for own in found)
    count = len(seconds)
    return {
        "requests": count,
        "failed": sum(own["failed"] for own in found),
        "right": sum(own["right"] for own in found) / count,
        "first_token_ms": {
            "p50": 1000 * float(np.median(seconds)),
            "p95": 1000 * float(np.percentile(seconds, 95)),
            "mean": 1000 * float(seconds.mean()),
            "p50_of_repeats": [1000 * float(np.median(own["first_token_seconds"])) for own in found],
        },
        "engine_first_token_ms": 1000 * total("engine's first token") / total("answers"),
        "engine_queue_ms": 1000 * total("engine's queue") / total("answers"),
        "output_tokens_per_second": float(np.mean([own["output_tokens_per_second"] for own in found])),
        "prompt_tokens": sum(own["prompt_tokens"] for own in found) / count,
        "computed_tokens": total("computed") / count,
        "prefix_cache_tokens": total("prefix cache") / count,
        "connector_tokens": total("connector") / count,
        "preemptions": total("preemptions"),
        "compiled": sum(len(own["compiled_seconds"]) for own in found),
        "compiled_seconds": sum(sum(own["compiled_seconds"]) for own in found),
        "load_average": [round(own["load_average"], 2) for own in found],
    }


def flags_of(store: Path, settings: Mapping[str, Any] | None = None) -> list[str]:
    """Flags of the server, with the connector on a store and other settings of it."""
    extra = {"store": str(store), "backbone": "trained", "rank": RANK, "uncertified": True}
    extra |= {"image_frame": list(FRAME), **(settings or {})}
    transfer = {
        "kv_connector": "TPUOffloadConnector",
        "kv_connector_module_path": "kvpatch_jax.serving.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    flags = [*FLAGS, "--limit-mm-per-prompt", json.dumps({"image": LEGENDS + 1, "video": 0})]
    return [*flags, "--kv-transfer-config", json.dumps(transfer)]


def main(work: str, *choices: str) -> None:
    """Serves, forms, measures, and writes what was found; rates and repeats may be chosen to try it."""
    folder = Path(work)
    rates = [float(rate) for rate in choices[0].split(",")] if choices else RATES
    repeats = int(choices[1]) if choices[1:] else REPEATS
    model = trained_model.write(folder / "model-load")
    fingerprint = json.loads(CERTIFICATE.read_text())["certificate"]["backbone"]
    settings = {"backbone": fingerprint, "certificate": str(CERTIFICATE), "forming_rate": FORMING_RATE}
    flags = flags_of(folder / "store-load", settings)
    contexts = prompts_of(CONTEXTS)
    with served_model.serving(model, folder, flags) as server:
        print(f"serving after {server.seconds:.0f} s", flush=True)
        found: dict[str, Any] = {"server_seconds": round(server.seconds, 1), "formed": form(server, contexts)}
        print(f"formed: {found['formed']}", flush=True)
        found |= {"contexts": CONTEXTS, "orders": len(ORDERS), "steps": STEPS, "seed": SEED}
        found |= {"kinds": list(COUNTS), "cores": os.cpu_count(), "versions": cpu_rig.versions()}
        so_far = folder / "load-unfinished.json"
        for repeat, rows in enumerate(measured(server, contexts, rates, repeats)):
            found |= {"repeats": repeat + 1, "rows": rows}
            so_far.write_text(json.dumps(found, indent=1))
    so_far.rename(folder / "load-128.json")


if __name__ == "__main__":
    main(*sys.argv[1:])
