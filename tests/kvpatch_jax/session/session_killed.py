"""A session that goes on from its file, in processes that are killed while they work. A program of its own.

    python session_killed.py FOLDER KILLS SEED

It imports everything once and forks a process for each attempt, so that an attempt costs no imports; no process that
forks has touched a device.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from window_oracle import tiny  # noqa: E402

import kvpatch_jax as kvp  # noqa: E402

STEPS = 10
QUESTION = [7, 11, 20]


def shot(number: int) -> list[int]:
    return np.random.default_rng(number).integers(3, 40, 9).tolist()


def work(folder: Path, log: Path) -> None:
    """Steps from wherever the session's file stands to the end; each says what it answers once it is saved."""
    backbone, path = tiny("gqa"), folder / "session"
    with kvp.ChunkStore(folder / "store") as store:
        new = kvp.Session(backbone, store, keep=2, rank=0) if not path.exists() else None
        session = new or kvp.Session.restore(path, backbone, store, rank=0)
        done = [int(name.split()[1]) for name in (*session.ids, *session.gone)]
        if done:  # saved, and perhaps killed before it was told
            tell(session, max(done), log)
        for number in range(max(done, default=-1) + 1, STEPS):
            if number % 3 == 2:
                session.recall(session.gone[0]) if session.gone else None
            session.add(shot(number), id=f"shot {number}", kind="chunk")
            session.save(path)
            tell(session, number, log)
        session.close()


def tell(session: kvp.Session, number: int, log: Path) -> None:
    ids = session.ask(QUESTION, steps=3, stop=(), temperature=1.5, seed=number).ids
    with log.open("a") as file:
        file.write(f"{number} {session.ids} {session.gone} {ids}\n")


def forked(folder: Path, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work(folder, log)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def lines(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def main(folder: Path, kills: int, seed: int) -> None:
    rng, log, deaths = random.Random(seed), folder / "log", 0
    folder.mkdir()
    while True:
        before, wanted, begun = lines(log), rng.randint(1, 3), time.monotonic()
        child = forked(folder, log)
        while deaths < kills and lines(log) < before + wanted and time.monotonic() < begun + 300:
            if os.waitpid(child, os.WNOHANG)[0]:
                raise SystemExit("an attempt ended by itself before it was killed")
            time.sleep(0.002)
        if deaths == kills:
            _, status = os.waitpid(child, 0)
            if status:
                raise SystemExit(f"status {status}")
            break
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        deaths += 1
        if lines(log) and len({line.split()[0] for line in log.read_text().splitlines()}) > STEPS - 2:
            kills = deaths
    print(f"{deaths} killed")
    print(log.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
