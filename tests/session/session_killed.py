"""A session that goes on from its file, in processes that are killed while they work. A program of its own.

python session_killed.py FOLDER KILLS     # prints what was answered at each step
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import kvpatch_jax as kvp
from tests.shared.window_oracle import tiny


def work(folder: Path) -> None:
    """Steps from wherever the session's file stands to the end; each logs its answer once it is saved."""
    backbone, path = tiny("gqa"), folder / "session"
    with kvp.ChunkStore(folder / "store") as store:
        resumed = path.exists()
        session = kvp.Session.restore(path, backbone, store) if resumed else kvp.Session(backbone, store, keep=2)
        first = 1 + max((int(name.split()[1]) for name in (*session.ids, *session.gone)), default=-1)
        # It may have been killed between saving and answering.
        for number in range(max(first - 1, 0), 10):
            if number >= first:
                if number % 3 == 2 and session.gone:
                    session.recall(session.gone[0])
                tokens = np.random.default_rng(number).integers(3, 40, 9).tolist()
                session.add(tokens, id=f"shot {number}", kind="chunk")
                session.save(path)
            ids = session.ask([7, 11, 20], steps=3, stop=(), temperature=1.5, seed=number).ids
            with (folder / "log").open("a") as file:
                file.write(f"{number} {session.ids} {session.gone} {ids}\n")
        session.close()


def attempt(folder: Path) -> int:
    """Forks a process that works; no process that forks has touched a device."""
    if child := os.fork():
        return child
    try:
        work(folder)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def main(folder: Path, kills: int) -> None:
    rng, log = random.Random(kills), folder / "log"
    folder.mkdir()
    log.touch()
    for _ in range(kills):
        size, end, child = log.stat().st_size, time.monotonic() + 120, attempt(folder)
        while log.stat().st_size == size and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if os.waitpid(attempt(folder), 0)[1]:
        raise SystemExit("an attempt ended with an error")
    print(log.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
