"""A file of finished parts, one JSON line each after a line with what they are parts of; runs resume from it."""

import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch_jax.errors import InputError

from .program import progress_bar

Record = dict[str, Any]
"""What a part yields; JSON holds it."""


class Part(NamedTuple):
    """A part of a run.

    Attributes:
      key: its name in the files of parts.
      measure: yields its records.
      work: what it takes, in any unit that all parts share.
    """

    key: str
    measure: Callable[[], Iterable[Record]]
    work: float = 1.0


class Plan(NamedTuple):
    """What a run measures.

    Attributes:
      config: what its parts depend on, "model" among it, of JSON's types; a folder is of one configuration.
      parts: of all shards.
      data: what the program makes its rows from, or whose files live as long as it does.
      threads: parts measured at once.
    """

    config: dict[str, Any]
    parts: Sequence[Part]
    data: Any = None
    threads: int = 1


class Shard(NamedTuple):
    """Every `count`-th part, from `index` on; each shard writes a file of its own."""

    index: int = 0
    count: int = 1

    @property
    def file(self) -> str:
        """Name of the file in the run's folder."""
        return "parts.jsonl" if self.count == 1 else f"parts-{self.index}-of-{self.count}.jsonl"

    @classmethod
    def of(cls, text: str) -> "Shard":
        """Reads "index/count". Raises InputError for anything else."""
        index, slash, count = text.partition("/")
        if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
            return cls(int(index), int(count))
        raise InputError(f"--shard: got {text!r}; expected index/count with 0 <= index < count")


WHOLE = Shard()


class Cluster(NamedTuple):
    """A Ray cluster whose tasks measure a run's shards.

    Attributes:
      address: as `ray.init` takes it, or "local": a cluster on this machine for the run.
      shards: how many tasks there are.
      resources: what a task occupies, by the names of `ray.remote`'s options.
    """

    address: str
    shards: int
    resources: Mapping[str, Any] = {}


def sharing(flags: Any) -> Shard | Cluster:
    """Reads the flags of `program.define_sharing`. Raises InputError for resources that are no JSON object."""
    if flags.ray is None:
        return Shard.of(flags.shard)
    try:
        return Cluster(flags.ray, flags.shards, dict(json.loads(flags.ray_resources)))
    except (ValueError, TypeError) as error:
        raise InputError(f"--ray_resources: got {flags.ray_resources!r:.80}; expected a JSON object") from error


def stored_records(out: Path, config: Mapping[str, Any]) -> dict[str, list[Record]]:
    """Reads the records of finished parts by their keys, from the files of every shard; nothing is written.

    Raises:
      InputError: the folder is a file, or has parts of another configuration.
    """
    make_out(out)
    config, records = json.loads(json.dumps(config)), {}
    for file in sorted(out.glob("parts*.jsonl")):
        for part in read_parts(file, config):
            records.setdefault(part["part"], part["records"])
    return records


def run_parts(
    out: Path,
    config: Mapping[str, Any],
    parts: Sequence[Part],
    shard: Shard = WHOLE,
    *,
    threads: int = 1,
    patience: float = 0.0,
) -> dict[str, list[Record]]:
    """Measures a shard's parts that no file in the folder has yet, and adds each to the shard's file when it is done.

    A part is measured alike in whichever shard and after whichever kill, and callers read records in the order of the
    plan, so results depend on neither.

    Args:
      out: folder of the run.
      config: what the parts depend on, "model" among it, of JSON's types; a folder is of one configuration.
      parts: of all shards.
      threads: parts measured at once.
      patience: seconds to wait for another process that writes this shard.

    Returns:
      The records of finished parts of all shards, by key.

    Raises:
      InputError: the folder has parts of another configuration, or another process writes this shard.
    """
    make_out(out)
    file = out / shard.file
    with locked(file, patience):
        finished = stored_records(out, config)
        # A new file begins with what its parts depend on; a last line that was cut off by a kill leaves.
        content = file.read_bytes() if file.exists() else b""
        if (whole := _whole_lines(content, config)) != content:
            file.write_bytes(whole)
        shares = itertools.islice(parts, shard.index, None, shard.count)
        missing = [part for part in shares if part.key not in finished]
        writing, bar = threading.Lock(), progress_bar(sum((part.work for part in missing), 0.0))

        def measure(part: Part) -> None:
            started = time.process_time()
            records = list(part.measure())
            line = {"part": part.key, "cpu_seconds": round(time.process_time() - started, 2), "records": records}
            with writing, file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
                bar.set_description_str(part.key, refresh=False)
                bar.update(part.work)

        with bar, ThreadPoolExecutor(threads) as pool:
            # The first failure ends the run; what is finished by then is on disk.
            for done in [pool.submit(measure, part) for part in missing]:
                try:
                    done.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
    return stored_records(out, config)


def run_plan(out: Path, planned: Plan, share: Shard | Cluster, plan: Callable[[], Plan]) -> dict[str, list[Record]]:
    """Measures one shard in this process, as `run_parts` does, or all of them as tasks of a Ray cluster.

    A lost worker's shard resumes from its file.

    Args:
      out: folder of the run. Workers see it, and whatever `plan` reads, under the same paths.
      plan: makes `planned` anew, once in each worker's process.

    Returns, Raises: as `run_parts`; also SessionError for shards that failed more often than they are tried again.
    """
    if isinstance(share, Shard):
        return run_parts(out, planned.config, planned.parts, share, threads=planned.threads)
    from kvpatch_jax.batch import run_shards

    # A folder of another run is refused before there is a cluster.
    stored_records(out, planned.config)
    address = None if share.address == "local" else share.address
    task = functools.partial(_run_shard, out.resolve(), plan)
    run_shards(task, share.shards, address=address, resources=share.resources)
    return stored_records(out, planned.config)


def _run_shard(out: Path, plan: Callable[[], Plan], index: int, count: int) -> None:
    from kvpatch_jax.batch import once_in_this_process

    planned = once_in_this_process(plan)
    # The worker of a run that was killed may still be ending.
    run_parts(out, planned.config, planned.parts, Shard(index, count), threads=planned.threads, patience=60.0)


def make_out(folder: Path) -> None:
    """Makes the folder of --out. Raises InputError for one that is or lies below a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"--out: got {folder}, which is or lies below a file; expected a folder") from error


def read_parts(file: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Reads the finished parts of a file and leaves it as it is: another process may be adding to it.

    Args:
      config: what the parts depend on, "model" among it, of JSON's types.

    Raises:
      InputError: the file holds parts of another configuration, or something else.
    """
    whole = _whole_lines(file.read_bytes() if file.exists() else b"", config)
    try:
        first, *parts = (json.loads(line) for line in whole.splitlines())
        stored = dict(first["config"])
        if not all(isinstance(part, dict) and "part" in part for part in parts):
            raise ValueError("a line is no part")
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--out: got {file}, which is not a file of parts ({error!r}); expected one: delete it, or choose another"
        ) from error

    other = [name for name in {**config, **stored} if name not in stored or stored[name] != config.get(name)]
    if other:
        raise InputError(
            f"--out: got {file}, which holds parts of another {', '.join(other)}; expected {config['model']}'s of this "
            "configuration: choose another folder, or delete the file"
        )
    return parts


def _whole_lines(content: bytes, config: Mapping[str, Any]) -> bytes:
    """Returns the lines that were not cut off, or the first one of a new file."""
    return content[: content.rfind(b"\n") + 1] or (json.dumps({"config": config}) + "\n").encode()


@contextlib.contextmanager
def locked(file: Path, patience: float = 0.0) -> Iterator[None]:
    """Keeps other processes from a file of parts, where the system has such locks; a lock ends with its process.

    Args:
      patience: seconds to wait for another process that has the file.

    Raises:
      InputError: another process still has it.
    """
    deadline = time.monotonic() + patience
    with (file.parent / f".{file.name}.lock").open("w") as lock:
        with contextlib.suppress(ImportError):
            import fcntl

            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() >= deadline:
                        raise InputError(
                            f"--out: got {file}, which another process is writing; expected another --shard, or one "
                            "process"
                        ) from None
                time.sleep(0.5)
        yield
