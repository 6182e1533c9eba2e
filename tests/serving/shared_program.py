"""Two engines with disks of their own and one remote store between them: `python shared_program.py WORK KIND`.

KIND is "file", a folder, or "valkey", a server that is started here (`redis-server` or `valkey-server` on the path). An
agent's tasks, whose images all stay, are asked with the policy "exact", each answer beside the engine's own prefill:

in turn   one task, a turn of it at one engine, the next at the other.
at once   another task, each turn at both engines at the same time.
killed    one engine is killed while it saves what it formed; the other goes on, then the first starts again.
silent    ("valkey") the server is stopped by SIGSTOP: it takes connections and never answers. Then it goes on.

WORK/shared-KIND.json is written. An engine is a process of this program, `shared_program.py engine WORK KIND NAME URL`.
"""
# pyright: reportMissingImports=false

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

SEED, TASK, NAMES = 70117, 8, ("one", "two")
SECRET, KEY = "KVPATCH_SECRET", b"rig"
KILLED, SILENT = 2 * TASK, 3 * TASK
"""The first turns of these scenarios."""
STEPS = 4
MODEL = "model-shared"
"""Of both engines: vLLM's name of an image, which is its chunk's, contains the model's name."""
PATIENT = 90.0
"""Seconds that a stopped server's outbox is waited for: the circuit breaker rests for 30."""


# ------------------------------------------------------------------------------------------------------- an engine


def serve(work: str, kind: str, name: str, url: str) -> None:
    """Answers what the other end of WORK/KIND-NAME.socket asks, until it is told to close."""
    import loops_program
    import rig_engine

    from kvpatch_jax.store import ChunkStore
    from kvpatch_jax.store.remotes.retrying_adapter import RetryingAdapter

    folder = Path(work)
    rng = np.random.default_rng(SEED)
    scene = loops_program.Scene(4 * TASK, rng)
    turns = [scene.turn(range(own - own % TASK, own + 1), rng) for own in range(4 * TASK)]

    stored, calls = list[tuple[str, str | None]](), {"read": 0, "write": 0, "delete": 0, "paths": 0}
    put = ChunkStore.put

    def noting_put(self: ChunkStore, chunk: Any, **options: Any) -> None:
        put(self, chunk, **options)
        stored.append((chunk.id, chunk.lead))

    ChunkStore.put = noting_put
    for method in calls:
        own = getattr(RetryingAdapter, method)

        def counting(self: Any, *given: Any, own: Any = own, method: str = method, **more: Any) -> Any:
            calls[method] += 1
            return own(self, *given, **more)

        setattr(RetryingAdapter, method, counting)

    settings = {"backbone": "shared", "remote": url, "secret": f"env:{SECRET}", "patch_after": 2 * TASK}
    settings |= {"image_frame": list(loops_program.FRAME), "patience": 20.0}
    options = {**loops_program.OPTIONS, "num_gpu_blocks_override": 400, "max_model_len": 512}
    options["limit_mm_per_prompt"] = {"image": TASK, "video": 0}
    engine = rig_engine.Engine(folder / MODEL, folder / f"store-shared-{kind}-{name}", settings, **options)
    scheduler, worker = engine.scheduler, engine.worker
    assert scheduler is not None
    assert worker is not None
    store = worker.stores.of("shared")

    def ask(number: int) -> dict[str, Any]:
        turn, before = turns[number], dict(calls)
        prompt = scene.prompt(turn.images, turn.question)
        common = {"steps": STEPS, "likely": len(loops_program.VOCABULARY)}
        began = time.perf_counter()
        answer = engine.one(prompt, policy="exact", tenant="shared", **common)
        seconds = time.perf_counter() - began
        asked = {method: count - before[method] for method, count in calls.items()}
        truth = engine.one(prompt, **common)
        likeness = rig_engine.compared(answer, truth)
        return {**likeness, "turn": number, "prompt": answer["prompt"], "seconds": seconds, "calls": asked}

    def flush() -> bool:
        with contextlib.suppress(Exception):
            store.flush()
            return True
        return False

    def die(number: int, after: int) -> None:
        """Is killed by the sync of a write, the one with this number, that a turn leaves behind."""
        syncs, sync = itertools.count(1), os.fsync
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL) if next(syncs) == after else sync(fd)
        ask(number)

    def told() -> dict[str, Any]:
        return {
            "formed": dict(worker.former.counts),
            "scheduled": dict(scheduler.counts),
            "stored": list(stored),
            "outbox": store.statistics().gauges["outbox_objects"],
        }

    works = {"ask": ask, "flush": flush, "die": die, "told": told}
    with Client(str(folder / f"{kind}-{name}.socket"), "AF_UNIX", authkey=KEY) as other:
        other.send(round(engine.seconds, 1))
        while True:
            word, *given = other.recv()
            if word == "close":
                break
            other.send(works[word](*given))
    worker.stores.close()
    os._exit(0)  # vLLM's own threads need not end


class Served:
    """An engine in a process of its own, as it is asked from here."""

    def __init__(self, work: Path, kind: str, name: str, url: str):
        self.path = work / f"{kind}-{name}.socket"
        self.path.unlink(missing_ok=True)
        with open(work / f"{kind}-{name}.log", "ab") as log:
            command = [sys.executable, __file__, "engine", str(work), kind, name, url]
            environment = {**os.environ, SECRET: "the same secret of names for both engines"}
            self.listener = Listener(str(self.path), "AF_UNIX", authkey=KEY)
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.other: Connection | None = None

    def started(self) -> float:
        """Waits until it serves. Returns the seconds that its engine took."""
        self.other = self.listener.accept()
        return self.other.recv()

    def send(self, *words: Any) -> None:
        """Has it do something."""
        assert self.other is not None
        self.other.send(words)

    def received(self) -> Any:
        """Waits for what it says of that."""
        assert self.other is not None
        if not self.other.poll(600):
            raise TimeoutError("got no answer of an engine within 600 s; expected one")
        return self.other.recv()

    def done(self, *words: Any) -> Any:
        """Has it do something, and waits."""
        self.send(*words)
        return self.received()

    def close(self) -> int:
        """Ends it. Returns its exit status."""
        with contextlib.suppress(OSError):
            self.send("close")
        with contextlib.suppress(FileNotFoundError):  # the name may be that of an engine before it
            self.listener.close()
        return self.process.wait(120)


# --------------------------------------------------------------------------------------------------- the remote store


@contextlib.contextmanager
def remote(work: Path, kind: str) -> Iterator[tuple[str, int]]:
    """A remote store: its URL, and the process of its server; 0: it has none."""
    if kind == "file":
        yield f"file://{work}/remote-shared", 0
        return
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise FileNotFoundError("got neither valkey-server nor redis-server on the path; expected one")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(work)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"valkey://127.0.0.1:{port}/0", server.pid
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.kill()
        server.wait()


# -------------------------------------------------------------------------------------------------------- scenarios


def summed(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several answers in a few numbers."""
    calls = [sum(answer["calls"].values()) for answer in answers]
    return {
        "answers": len(answers),
        "equal": sum(answer["tokens_equal_in_front"] == answer["of"] for answer in answers),
        "exact": sum(bool(answer["told"].get("exact")) for answer in answers),
        "largest_difference": max(answer["largest_difference_of_log_probabilities"] for answer in answers),
        "prompt_tokens": sum(answer["prompt"] for answer in answers),
        "served_tokens": sum(answer["cached"] for answer in answers),
        "chunks": sum(len(answer["told"].get("served", [])) for answer in answers),
        "seconds": [round(answer["seconds"], 2) for answer in answers],
        "calls": calls,
    }


def counted(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """What both engines have stored so far."""
    own, other = (set(map(tuple, each["stored"])) for each in (one, two))
    return {
        "formed": [one["formed"], two["formed"]],
        "stored": [len(one["stored"]), len(two["stored"])],
        "distinct": len(own | other),
        "by_both": len(own & other),
    }


def in_turn(engines: dict[str, Served]) -> dict[str, Any]:
    """Each turn at the other engine, after what the one before has formed was sent."""
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    for number, name in zip(range(TASK), itertools.cycle(engines), strict=False):
        answers[name].append(engines[name].done("ask", number))
        engines[name].done("flush")
    found = {name: summed(own) for name, own in answers.items()}
    return {**found, **counted(*(engine.done("told") for engine in engines.values()))}


def at_once(engines: dict[str, Served]) -> dict[str, Any]:
    """Each turn at both engines at one time."""
    before = counted(*(engine.done("told") for engine in engines.values()))
    answers: dict[str, list[Any]] = {name: [] for name in engines}
    for number in range(TASK, 2 * TASK):
        for engine in engines.values():
            engine.send("ask", number)
        for name, engine in engines.items():
            answers[name].append(engine.received())
        for engine in engines.values():
            engine.done("flush")
    found = {name: summed(own) for name, own in answers.items()}
    after = counted(*(engine.done("told") for engine in engines.values()))
    for word in ("distinct", "by_both"):
        after[word] -= before[word]
    return {**found, **after}


def killed(engines: dict[str, Served], restart: Any) -> dict[str, Any]:
    """One is killed in the second sync of what it saves; the other goes on with the same and later turns."""
    begun = [engines[name].done("ask", KILLED + place) for place, name in enumerate(engines)]
    for engine in engines.values():
        engine.done("flush")
    victim = engines["two"]
    victim.send("die", KILLED + 2, 2)
    status = victim.process.wait(600)
    left = [engines["one"].done("ask", KILLED + place) for place in (2, 3)]
    engines["one"].done("flush")
    engines["two"] = restart()
    revived = [engines["two"].done("ask", KILLED + place) for place in (3, 4, 2)]
    engines["two"].done("flush")
    after = engines["one"].done("ask", KILLED + 4)
    return {
        "status": status,
        "before": summed(begun),
        "other": summed([*left, after]),
        "revived": summed(revived),
        "hooks_failed": [engine.done("told")["scheduled"].get("failed", 0) for engine in engines.values()],
    }


def silent(engines: dict[str, Served], server: int) -> dict[str, Any]:
    """The server is stopped; both engines are asked, then it goes on and has everything."""
    os.kill(server, signal.SIGSTOP)
    during: dict[str, list[Any]] = {name: [] for name in engines}
    for number in range(SILENT, SILENT + 3):
        for engine in engines.values():
            engine.send("ask", number)
        for name, engine in engines.items():
            during[name].append(engine.received())
    waiting = [engine.done("told")["outbox"] for engine in engines.values()]
    os.kill(server, signal.SIGCONT)
    began = time.monotonic()
    while not all([engine.done("flush") for engine in engines.values()]) and time.monotonic() - began < PATIENT:
        time.sleep(1.0)
    left = [engine.done("told")["outbox"] for engine in engines.values()]
    after = []
    for number, name in zip(range(SILENT + 3, SILENT + 5), engines, strict=True):
        after.append(engines[name].done("ask", number))
        engines[name].done("flush")
    return {
        "during": {name: summed(own) for name, own in during.items()},
        "outbox": {"stopped": waiting, "after": left, "seconds": round(time.monotonic() - began, 1)},
        "after": summed(after),
    }


def main(work: str, kind: str) -> None:
    """Runs the scenarios and writes what was found."""
    import cpu_rig
    import trained_model

    from evals.trained import MAIN, SHEETS

    folder = Path(work).absolute()
    trained_model.write(folder / MODEL, SHEETS / MAIN)
    with remote(folder, kind) as (url, server):
        engines = {name: Served(folder, kind, name, url) for name in NAMES}

        def restart() -> Served:
            again = Served(folder, kind, "two", url)
            again.started()
            return again

        try:
            found: dict[str, Any] = {"kind": kind, "engine_seconds": [own.started() for own in engines.values()]}
            found["in turn"] = in_turn(engines)
            found["at once"] = at_once(engines)
            found["killed"] = killed(engines, restart)
            if server:
                found["silent"] = silent(engines, server)
            found["ended"] = [engine.close() for engine in engines.values()]
        finally:
            for engine in engines.values():
                engine.process.kill()
    found["versions"] = cpu_rig.versions()
    (folder / f"shared-{kind}.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        serve(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
