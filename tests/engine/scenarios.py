"""One engine process on the small Llama: `python scenarios.py SCENARIO WORK KIND`; it writes WORK/SCENARIO-KIND.json.

`SCENARIOS` says what each does and with which options of the engine. Tenants are vLLM's cache salts.
"""
# pyright: reportMissingImports=false, reportArgumentType=false

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tiny_model

from evals.bench import cpu_engine, engine_weights, serving
from evals.bench.cpu_engine import Answer, Engine, difference, equal_tokens
from evals.task.contexts import sample
from evals.task.drawing import images_of
from kvpatch_jax.serving.vllm import plan, segments_of, stores
from kvpatch_jax.serving.vllm.config import RequestOptions
from kvpatch_jax.store import ChunkStore
from kvpatch_jax.store.remote import Remote, open_remote

FIRST = [(7 * place + 3) % 250 + 2 for place in range(48)]
SECOND = [(11 * place + 5) % 250 + 2 for place in range(40)]  # ends in the middle of a block
QUESTION = [(13 * place + 1) % 250 + 2 for place in range(9)]
PROMPT, ENDS = FIRST + SECOND + QUESTION, [len(FIRST), len(FIRST) + len(SECOND)]
STEPS, SLOW = 24, 0.5
"""Tokens of an answer where requests compete for blocks; seconds in which a slow store reads a chunk."""
LEADING = {"segments": ENDS, "reuse": "exact", "save": False, "salt": "patched"}
PATCHED = LEADING | {"reuse": "patched"}
BARE = LEADING | {"reuse": "blind", "salt": "bare"}
JOINED = LEADING | {"segments": ENDS[1:], "salt": "joined"}
"""Both chunks as one, which is then the leading chunk."""


def compared(answer: Answer, reference: Answer) -> dict[str, Any]:
    """Puts an answer beside that of the engine alone."""
    return {
        "equal": equal_tokens(answer, reference),
        "of": len(reference["tokens"]),
        "difference": difference(answer, reference),
        "cached": answer["cached"],
        "kvpatch": answer["kvpatch"],
    }


def form(engine: Engine) -> None:
    """Has the engine store both chunks alone, under two salts, a patch under one of them, and both as one chunk."""
    for salt in ("patched", "bare"):
        engine.answer(FIRST + QUESTION, segments=ENDS[:1], salt=salt, steps=1)
        engine.answer(SECOND + QUESTION, segments=[len(SECOND)], salt=salt, steps=1)
    engine.answer(PROMPT, segments=ENDS, salt="patched", steps=1)
    engine.answer(PROMPT, segments=ENDS[1:], salt="joined", steps=1)


def forms(engine: Engine) -> dict[str, Any]:
    """Forms chunks from the engine's own traffic, and serves them in every way."""
    reference = engine.answer(PROMPT)
    answers = {"again": engine.answer(PROMPT)}
    form(engine)
    formed = dict(engine.worker.former.counts)
    for name, options in {"joined": JOINED, "leading": LEADING, "patched": PATCHED, "bare": BARE}.items():
        answers[name] = engine.answer(PROMPT, **options)
    # Before the engine has the same prompt in its own blocks: then it needs no chunks.
    answers["bare again"] = engine.answer(PROMPT, fresh=False, **BARE)
    answers["plain after bare"] = engine.answer(PROMPT, fresh=False, salt="bare")

    salt = plan.RequestPlan.salt
    plan.RequestPlan.salt = lambda self, backbone, own_salt: own_salt
    engine.answer(PROMPT, **BARE)
    answers["plain without the plan's salt"] = engine.answer(PROMPT, fresh=False, salt="bare")
    plan.RequestPlan.salt = salt
    return {"formed": formed, **{name: compared(answer, reference) for name, answer in answers.items()}}


def waits(engine: Engine) -> dict[str, Any]:
    """Reads a slow store: a plain request that comes behind one of chunks is answered before it."""
    form(engine)
    other = PROMPT[::-1]  # or the engine would have the prompt in its own cache before the chunks are read
    references = {"chunks": engine.answer(PROMPT), "plain": engine.answer(other)}
    engine.llm.reset_prefix_cache()
    read = ChunkStore.get

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLOW)
        return read(*arguments, **options)

    ChunkStore.get = slow
    before = engine.scheduler.counts["asked_again"]
    answers = engine.serve({"chunks": (PROMPT, PATCHED), "plain": (other, {})})
    asked_again = engine.scheduler.counts["asked_again"] - before
    engine.serve({"abandoned": (PROMPT, PATCHED)}, aborted={"abandoned": 1})
    ChunkStore.get = read
    return {
        "seconds": {name: answer["seconds"] for name, answer in answers.items()},
        "asked_again": asked_again,
        "tracked": engine.tracked(),
        **{name: compared(answers[name], reference) for name, reference in references.items()},
        "behind an abandoned one": compared(engine.answer(PROMPT, **PATCHED), answers["chunks"]),
    }


def damage(engine: Engine, salt: str, segment: Any) -> None:
    """Turns the bits of one byte of a stored canonical, on the disk."""
    store = ChunkStore(engine.store, tenant=salt)
    name = store.names.canonical(engine.backbone, segment.id)
    ((file,),) = store.objects.index.rows("SELECT file FROM objects WHERE name = ?", name)
    path = engine.store / "data" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))
    store.close()


def serves(engine: Engine) -> dict[str, Any]:
    """Serves what another process formed; computes what was damaged since, and what cannot be placed or planned."""
    damage(engine, "joined", segments_of(engine.backbone, PROMPT, ends=ENDS[1:])[0])
    reference = engine.answer(PROMPT)
    answers = {
        "leading": engine.answer(PROMPT, **LEADING),
        "patched": engine.answer(PROMPT, **PATCHED),
        "bare": engine.answer(PROMPT, **BARE),
        "damaged": engine.answer(PROMPT, **JOINED),
        "plain after damaged": engine.answer(PROMPT, fresh=False, salt="joined"),
        "refused": engine.answer(PROMPT, segments=[9, 5], salt="patched"),
    }
    write = engine.worker._write

    def fails(load: Any, place: int) -> None:
        if place == 1:
            raise RuntimeError("on purpose")
        write(load, place)

    engine.worker._write = fails
    answers["not placed"] = engine.answer(PROMPT, **PATCHED)
    engine.worker._write = write
    answers["plain after not placed"] = engine.answer(PROMPT, fresh=False, salt="patched")
    results = {name: compared(answer, reference) for name, answer in answers.items()}
    return results | {"failed": engine.scheduler.counts["failed"], "free": engine.free_blocks()}


def wider(engine: Engine) -> dict[str, Any]:
    """Serves on two devices, with a KV head on each, what one device formed."""
    reference = engine.answer(PROMPT)
    ways = {"leading": LEADING, "patched": PATCHED, "bare": BARE, "plain after bare": {"salt": "bare"}}
    answers = {name: engine.answer(PROMPT, fresh=not name.startswith("plain"), **part) for name, part in ways.items()}
    return {name: compared(answer, reference) for name, answer in answers.items()}


def many(engine: Engine, count: int = 500) -> dict[str, Any]:
    """Answers mixed requests that arrive together, a tenth of whose clients hang up, in a pool that preempts.

    Each is compared with its answer when it is asked alone, or with the plain one where it says that it is exact.
    """
    form(engine)
    for chunk in (FIRST, SECOND):
        engine.answer(chunk + QUESTION, segments=[len(chunk)], salt="apart", steps=1)
    engine.answer(PROMPT, segments=ENDS[1:], salt="hurt", steps=1)
    damage(engine, "hurt", segments_of(engine.backbone, PROMPT, ends=ENDS[1:])[0])
    # Exact blocks under the salts "patched" and "bare" let the engine do without chunks; "apart" has none.
    kinds = {"plain": {"salt": "bare"}, "leading": LEADING, "patched": PATCHED, "bare": BARE}
    kinds |= {"apart": BARE | {"salt": "apart"}, "damaged": JOINED | {"salt": "hurt"}}
    prompts = [FIRST + SECOND + QUESTION[place:] + QUESTION[:place] for place in range(5)]
    alone = {
        (name, place): engine.answer(prompt, steps=STEPS, **options)
        for name, options in kinds.items()
        for place, prompt in enumerate(prompts)
    }
    random, free, preempted = np.random.default_rng(0), engine.free_blocks(), engine.record_preemptions()
    drawn = {f"request {number}": _draw(random, kinds, len(prompts)) for number in range(count)}
    ended = {id: int(random.integers(0, count)) for id in drawn if random.random() < 0.1}
    requests = {id: (prompts[place], kinds[name]) for id, (name, place) in drawn.items()}
    engine.llm.reset_prefix_cache()
    answers = engine.serve(requests, steps=STEPS, aborted=ended)

    answered, equal, exact = ({name: 0 for name in kinds} for _ in range(3))
    for id, answer in answers.items():
        name, place = drawn[id]
        is_exact = name in ("patched", "bare", "apart") and answer["kvpatch"]["exact"]
        answered[name], exact[name] = answered[name] + 1, exact[name] + is_exact
        equal[name] += equal_tokens(answer, alone["plain" if is_exact else name, place]) == STEPS
    return {
        "answered": answered,
        "equal": equal,
        "left to the engine": exact,
        "ended": len(ended),
        "plain is bare": alone["plain", 0]["tokens"] == alone["bare", 0]["tokens"],
        "damaged matched": alone["damaged", 0]["cached"],
        "preempted": len(preempted),
        "free": [free, engine.free_blocks()],
        "tracked": engine.tracked(),
    }


def _draw(random: np.random.Generator, kinds: Mapping[str, Any], places: int) -> tuple[str, int]:
    return str(random.choice(list(kinds))), int(random.integers(places))


def mended(engine: Engine) -> dict[str, Any]:
    """Does as `many` under async scheduling, with the engine mended."""
    cpu_engine.mend_resumed_requests()
    return many(engine, 100)


def preempted(engine: Engine) -> dict[str, Any]:
    """Answers plain requests without a connector in a pool that preempts, before and after the engine is mended."""
    requests = {str(last): ([*FIRST, *SECOND, *QUESTION[:-1], last], {}) for last in range(10, 18)}
    alone = {id: engine.answer(prompt, steps=40) for id, (prompt, _) in requests.items()}
    preemptions, results = engine.record_preemptions(), {}
    for state in ("as it is", "mended"):
        before = len(preemptions)
        engine.llm.reset_prefix_cache()
        answers = engine.serve({f"{state} {id}": request for id, request in requests.items()}, steps=40)
        wrong = [id for id in requests if answers[f"{state} {id}"]["tokens"] != alone[id]["tokens"]]
        results[state] = {"wrong": len(wrong), "preempted": len(preemptions) - before}
        cpu_engine.mend_resumed_requests()
    return results


def neighbours(engine: Engine, work: Path, kind: str) -> dict[str, Any]:
    """Serves from a store that another engine shares, which is killed while it saves a chunk there."""
    reference, free = engine.answer(PROMPT), engine.free_blocks()
    options = {"segments": ENDS, "salt": "shared"}
    engine.answer(FIRST + QUESTION, segments=ENDS[:1], salt="shared", steps=1)
    command = [sys.executable, __file__, "killed", str(work), kind]
    status = subprocess.run(command, check=False, capture_output=True).returncode
    left = engine.answer(PROMPT, reuse="blind", save=False, **options)
    engine.answer(SECOND + QUESTION, segments=[len(SECOND)], salt="shared", steps=1)
    engine.answer(PROMPT, steps=1, **options)
    again = engine.answer(PROMPT, reuse="patched", save=False, **options)
    answers = {"left": left, "again": again, "plain": engine.answer(PROMPT)}
    results = {name: compared(answer, reference) for name, answer in answers.items()}
    return results | {"status": status, "free": [free, engine.free_blocks()]}


def killed(engine: Engine) -> dict[str, Any]:
    """Serves the neighbour's chunk, and dies while it saves another, whose bytes are written and not yet synced."""
    assert engine.answer(PROMPT, segments=ENDS, salt="shared", save=False)["kvpatch"]["served"] == [["leading", 0]]
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    engine.answer(SECOND + QUESTION, segments=[len(SECOND)], salt="shared", steps=1)
    raise AssertionError("the process lives; expected it to be killed")


class Hanging:
    """Client of a store in memory. While it `hangs`, each call takes two seconds and fails."""

    def __init__(self) -> None:
        self.client: Any = open_remote("memory://")._client
        self.errors = self.temporary = (*self.client.errors, TimeoutError)
        self.hangs, self.hung = False, 0

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            if self.hangs:
                self.hung += 1
                time.sleep(2)
                raise TimeoutError("on purpose")
            return getattr(self.client, call)(*arguments)

        return ask


CLIENT = Hanging()


def fails(engine: Engine) -> dict[str, Any]:
    """Answers exact requests while the disk is full, the remote store hangs, and the store's directory is gone."""
    random, free, sync = np.random.default_rng(1), engine.free_blocks(), os.fsync
    chunks = [random.integers(2, 250, 40).tolist() for _ in range(6)]
    alone = dict[tuple[int, ...], Answer]()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "on purpose")

    def phase(name: str) -> dict[str, int]:
        requests = {}
        for number in range(40):
            first, second = random.permutation(6)[:2]
            prompt = [*chunks[first], *chunks[second], *QUESTION]
            options = {"segments": [40, 80], "reuse": "exact", "salt": f"tenant {random.integers(4)}"}
            requests[f"{name} {number}"] = prompt, options
            if tuple(prompt) not in alone:
                alone[tuple(prompt)] = engine.answer(prompt, steps=STEPS)
        engine.llm.reset_prefix_cache()
        answers = engine.serve(requests, steps=STEPS)
        equal = [answer["tokens"] == alone[tuple(requests[id][0])]["tokens"] for id, answer in answers.items()]
        matched = [answer["kvpatch"].get("matched", 0) > 0 for answer in answers.values()]
        return {"equal": sum(equal), "matched": sum(matched)}

    results = {"working": phase("working"), "again": phase("again")}
    os.fsync = full
    results["disk full"] = phase("disk full")
    os.fsync = sync
    results["room again"] = phase("room again")
    CLIENT.hangs = True
    results["remote hangs"], hung = phase("remote hangs"), CLIENT.hung
    CLIENT.hangs = False
    results["remote answers"] = phase("remote answers")
    shutil.rmtree(engine.store)
    results["directory gone"] = phase("directory gone")
    return {"phases": results, "hung": hung, "free": [free, engine.free_blocks()], "tracked": engine.tracked()}


VALUES: list[Any] = [None, True, -1, 0, 3, 10**30, 1e308, float("nan"), "", "exact", "x" * 10_000, "\x00../..", [], {}]
VALUES += [[[]], [9, 5], [16, 48, 88], [-1], [10**9], {"kvpatch": {}}, "blind", "certified", "remember", [True] * 9_999]
SALTS = [None, "a", "../../etc", "\x00", "ä" * 5_000, "kvpatch-0", " ", "default", "x" * 100_000]


def hostile(engine: Engine) -> dict[str, Any]:
    """Answers 500 requests that no honest client sends, eight at a time, some of which hang up.

    The operator allows nothing approximate, so every answer is to be the engine's own.
    """
    random, free = np.random.default_rng(2), engine.free_blocks()
    fields = [*(field.name for field in dataclasses.fields(RequestOptions)), "tenant", "policy", ""]
    prompts = [PROMPT, FIRST + QUESTION, SECOND + QUESTION, QUESTION[:1]]
    alone = [engine.answer(prompt) for prompt in prompts]

    def drawn(values: list[Any]) -> Any:
        return values[int(random.integers(len(values)))]

    refused = answered = wrong = 0
    for batch in range(63):
        places, ended = dict[str, int](), dict[str, int]()
        for number in range(8):
            options = {drawn(fields): drawn(VALUES) for _ in range(random.integers(1, 4))}
            transfer = drawn([{"kvpatch": options}, {"kvpatch": options}, {"kvpatch": drawn(VALUES)}, drawn(VALUES)])
            id, place, salt = f"{batch} {number}", int(random.integers(len(prompts))), drawn(SALTS)
            try:
                engine.add(id, (prompts[place], {"transfer": transfer, "salt": salt}))
            except Exception:  # vLLM itself refuses it
                refused += 1
                continue
            places[id] = place
            if random.random() < 0.2:
                ended[id] = int(random.integers(0, 6))
        for id, answer in engine.finish(ended).items():
            answered += 1
            wrong += answer["tokens"] != alone[places[id]]["tokens"]
    last = [engine.answer(prompt) for prompt in prompts]
    equal = [answer["tokens"] == before["tokens"] for answer, before in zip(last, alone, strict=True)]
    form(engine)
    served = compared(engine.answer(PROMPT, **LEADING), alone[0])
    counts = {"refused": refused, "answered": answered, "wrong": wrong, "equal after": equal}
    return counts | {"served after": served, "free": [free, engine.free_blocks()], "tracked": engine.tracked()}


def uuids(engine: Engine) -> dict[str, Any]:
    """Serves images that requests name by uuid alone, once the engine has seen them, also behind other images."""
    pages = [*map(serving.Image.fromarray, images_of(sample(np.random.default_rng(0), 1))[:3])]
    question = [serving.WORDS["value"], serving.WORDS["A1"]]

    def prompt(*places: int, sent: bool) -> dict[str, Any]:
        fields = serving.image_prompt([pages[place] for place in places], question)
        names = {"multi_modal_uuids": {"image": [f"page {place}" for place in places]}}
        images = {} if sent else {"multi_modal_data": {"image": [None] * len(places)}}
        return fields | names | images

    options, results = {"salt": "pages", "save": False}, {}
    for place in range(3):
        engine.answer(prompt(place, sent=True), steps=1, salt="pages", reuse="exact")
    engine.answer(prompt(0, 1, sent=True), steps=1, salt="pages", reuse="exact")
    for name, places, reuse in (("before", (0, 1), "exact"), ("behind another", (2, 0, 1), "blind")):
        reference = engine.answer(prompt(*places, sent=True), reuse=reuse, **options)
        results[name] = compared(engine.answer(prompt(*places, sent=False), reuse=reuse, **options), reference)
        results[f"{name}, alone"] = compared(reference, engine.answer(prompt(*places, sent=True)))
    return results


class Scenario(NamedTuple):
    """What runs, the store that it shares with others, options of the engine, and settings of the connector."""

    run: Callable[..., dict[str, Any]]
    store: str = "store"
    options: Mapping[str, Any] = {}
    settings: Mapping[str, Any] | None = {}


SMALL = {"num_gpu_blocks_override": 26, "max_num_seqs": 8, "async_scheduling": False}
EXACT = {"allow": ["exact"]}
SCENARIOS = {
    "forms": Scenario(forms),
    "waits": Scenario(waits, "waits"),
    "serves": Scenario(serves, options={"load_failure": "recompute", "async_scheduling": False}),
    "wider": Scenario(wider, options={"tensor_parallel_size": 2}),
    "many": Scenario(many, "many", SMALL),
    "mended": Scenario(mended, "mended", {**SMALL, "async_scheduling": True}),
    "preempted": Scenario(preempted, options={**SMALL, "async_scheduling": True}, settings=None),
    "neighbours": Scenario(neighbours, "neighbours"),
    "killed": Scenario(killed, "neighbours"),
    "fails": Scenario(fails, "fails", SMALL, EXACT),
    "hostile": Scenario(hostile, "hostile", SMALL, EXACT),
    "uuids": Scenario(uuids, "uuids"),
}


def start(name: str, work: Path, kind: str) -> Engine:
    """Starts the scenario's engine, on the small Llama or, for images, on the trained model."""
    _, store, options, settings = SCENARIOS[name]
    common = {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 2, "num_gpu_blocks_override": 64}
    common |= {"async_scheduling": True, **options}
    cpu_engine.use_devices(common.get("tensor_parallel_size", 1))
    if settings is not None:
        settings = {"backbone": f"tiny {kind}", **settings}
    if name == "fails":
        stores.open_remote = lambda *_, **__: Remote(CLIENT)
        root = {
            "root": str(work / f"{store}-{kind}"),
            "root_budget": "16 MiB",
            "memory": "1 MiB",
            "remote": "memory://rig",
        }
        settings = {**(settings or {}), "store": root}
    if name == "uuids":
        model = engine_weights.write(work / "model-trained")
        settings = {**(settings or {}), "chunking": {"image_frame": serving.FRAME}}
        return Engine(model, work / store, settings, **common | serving.IMAGES)
    model, form = work / f"model-{kind}", tiny_model.KINDS[kind]
    tiny_model.write(model, form)
    common |= {"skip_tokenizer_init": True, "dtype": form.dtype}
    return Engine(model, work / f"{store}-{kind}", settings, **common)


def main(name: str, work: str, kind: str) -> None:
    """Runs a scenario and writes what it results."""
    engine = start(name, Path(work), kind)
    run = SCENARIOS[name].run
    results = run(engine, Path(work), kind) if run is neighbours else run(engine)
    (Path(work) / f"{name}-{kind}.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
