"""Sizing: what a store needs for so many engines, before any is bought: disk, memory, network, remote requests.

Every tier is LRU. One engine that is asked by a log has exact stack distances; else, the working set of the curve of
revisits decides how long a tier keeps a chunk after its last use. See `reuse` for both.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from ..errors import InputError
from ..utils.kinds import is_whole
from .object_bytes import ObjectBytes
from .reuse import DAY, RequestLog, RevisitCurve, stack_distances


@dataclasses.dataclass(frozen=True)
class RequestCosts:
    """Requests that a remote store gets for one object, by the adapters' protocol.

    Attributes:
      puts: conditional writes for an object that is put.
      put_gets: reads for it: of the chunk's tombstone.
      read_gets: reads for an object that is loaded: of its header, of the chunk's tombstone, and of its leaves.
      absent_gets: reads that find nothing, for a chunk that nobody has.
      lists: listings for a chunk with patches, whenever its patches are asked for.
      long_header_gets: further reads for a header that is longer than a page.
      deletes: deletions for each object of a chunk that is deleted.
      delete_puts, delete_lists: further writes, of the tombstone, and listings for such a chunk.
    """

    puts: int = 1
    put_gets: int = 1
    read_gets: int = 3
    absent_gets: int = 1
    lists: int = 1
    long_header_gets: int = 1
    deletes: int = 1
    delete_puts: int = 1
    delete_lists: int = 1


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one engine asks its store for.

    Attributes:
      rate: requests for chunks a second.
      revisits: how soon chunks are asked for again.
      log: the very requests, if they are known.
      stay: share of revisits that come to the engine that was asked last, if there are several.
      deleted: chunks that are deleted over chunks that are put. Their bytes are counted as if they stayed.

    Raises:
      InputError: the rate is not above 0, or a share not from 0 to 1.
    """

    rate: float | int
    revisits: RevisitCurve
    log: RequestLog | None = None
    stay: float | int = 1.0
    deleted: float | int = 0.0

    def __post_init__(self) -> None:
        shares = (self.stay, self.deleted)
        if not (math.isfinite(self.rate) and self.rate > 0 and min(shares) >= 0 and max(shares) <= 1):
            raise InputError(
                f"sizing: got rate {self.rate}, stay {self.stay}, deleted {self.deleted}; expected chunks a second "
                "above 0, shares from 0 to 1"
            )

    @classmethod
    def of_log(cls, log: RequestLog, stay: float | int = 1.0, deleted: float | int = 0.0) -> "Workload":
        """Returns the workload of a log."""
        return cls(log.rate, log.revisits(), log, stay, deleted)


@dataclasses.dataclass(frozen=True)
class TierSettings:
    """Settings of every engine's store.

    Attributes:
      host: bytes of the host tier. disk: bytes of the disk; None: no limit.
      low_water: share of the disk's budget down to which an eviction goes.
      remote: whether there is a remote store, which all engines share.
      retention: seconds after the last use for which the remote store keeps an object; None: for good. Times to live
        count from the put, so with them there are fewer hits.

    Raises:
      InputError: a value is negative, or `low_water` not from 0 to 1.
    """

    host: int = 1 << 30
    disk: int | None = None
    low_water: float | int = 0.95
    remote: bool = True
    retention: float | int | None = None

    def __post_init__(self) -> None:
        if self.host < 0 or (self.disk or 0) < 0 or not 0 < self.low_water <= 1 or (self.retention or 0) < 0:
            raise InputError(f"sizing: got {self}; expected sizes and seconds of 0 or more, low_water from 0 to 1")

    @property
    def usual_disk(self) -> float:
        """Bytes that the disk holds on average between two evictions; infinite without a budget."""
        return math.inf if self.disk is None else self.disk * (1 + self.low_water) / 2


class HitShares(NamedTuple):
    """Shares of requests that each tier answers; they and `missed` sum to 1."""

    host: float
    disk: float
    remote: float
    missed: float


@dataclasses.dataclass(frozen=True)
class FleetSize:
    """What a number of engines need. All rates are per second; bytes and rates are of the whole fleet.

    Attributes:
      engines: the number of engines.
      rate: requests for chunks.
      hits: shares of requests by tier.
      host_bytes: memory of the host tiers.
      disk_bytes: of the disks, once they are full; without a budget, after the log or a day.
      disk_growth: bytes that the disks grow a day, without a budget.
      residence: seconds after its last use at which a disk evicts a chunk; infinite: never.
      disk_writes: bytes written to the disks, puts and copies of remote objects.
      remote_bytes: of the remote store, with a retention or of a log; None: it grows.
      remote_growth: bytes that it grows a day; 0 with a retention.
      sent, received: bytes to and from the remote store.
      remote_puts, remote_gets, remote_lists, remote_deletes: its requests.
    """

    engines: int
    rate: float | int
    hits: HitShares
    host_bytes: float
    disk_bytes: float
    disk_growth: float
    residence: float
    disk_writes: float
    remote_bytes: float | None
    remote_growth: float
    sent: float
    received: float
    remote_puts: float
    remote_gets: float
    remote_lists: float
    remote_deletes: float


class _EngineSize(NamedTuple):
    """Hits and bytes of one engine; `new` is the share of requests whose chunk nobody had, as far as that grows."""

    hits: HitShares
    host_bytes: float
    disk_bytes: float
    disk_growth: float
    residence: float
    new: float


def size_fleet(
    workload: Workload,
    parts: tuple[ObjectBytes, ...] | ObjectBytes,
    settings: TierSettings | None = None,
    engines: int = 1,
    costs: RequestCosts | None = None,
) -> FleetSize:
    """Returns what a number of engines with equal workloads need, each with its own chunks.

    Args:
      workload: of one engine.
      parts: objects that are put and read together for each chunk: its canonical, then its patches.
      settings: of every engine's store.
      engines: the number of engines.
      costs: requests of the remote store.

    Raises:
      InputError: `engines` is no whole number above 0.
    """
    if not is_whole(engines, 1):
        raise InputError(f"sizing: engines: got {engines!r:.80}; expected a whole number above 0")
    parts = (parts,) if isinstance(parts, ObjectBytes) else parts
    settings, costs = settings or TierSettings(), costs or RequestCosts()
    file, objects = float(sum(part.file for part in parts)), sum(part.objects for part in parts)
    memory = float(sum(part.memory for part in parts))

    # Among few engines a revisit comes to the same one by chance.
    stay = 1.0 if engines == 1 else max(float(workload.stay), 1 / engines)
    one = _exact(workload.log, file, memory, settings) if workload.log is not None and stay == 1 else None
    one = one or _expected(workload, file, memory, settings, stay)

    rate, hits = workload.rate * engines, one.hits
    loaded, written = rate * hits.remote, rate * hits.missed
    deleted = written * workload.deleted
    remote = int(settings.remote)
    gets = written * (costs.absent_gets + objects * costs.put_gets)
    gets += loaded * sum(_gets_of(part, costs) for part in parts)
    growth = rate * one.new * file * DAY * remote
    kept = _remote_bytes(workload, file, settings, engines)
    return FleetSize(
        engines=engines,
        rate=rate,
        hits=hits,
        host_bytes=one.host_bytes * engines,
        disk_bytes=one.disk_bytes * engines,
        disk_growth=one.disk_growth * engines,
        residence=one.residence,
        disk_writes=(written + loaded) * file,
        remote_bytes=kept,
        remote_growth=0.0 if settings.retention is not None else growth,
        sent=remote * written * file,
        received=loaded * file,
        remote_puts=remote * (written * objects * costs.puts + deleted * costs.delete_puts),
        remote_gets=remote * gets,
        remote_lists=remote * (rate * costs.lists * float(len(parts) > 1) + deleted * costs.delete_lists),
        remote_deletes=remote * deleted * objects * costs.deletes,
    )


def _gets_of(part: ObjectBytes, costs: RequestCosts) -> int:
    """Returns the reads for the objects of a part, whose headers may be longer than a page."""
    return part.objects * (costs.read_gets + costs.long_header_gets * part.long_header)


def _remote_bytes(workload: Workload, file: float, settings: TierSettings, engines: int) -> float | None:
    """Returns the bytes of the remote store: of what a retention keeps, or of a whole log; None: it grows."""
    if not settings.remote:
        return 0.0
    if settings.retention is not None:
        return engines * workload.rate * workload.revisits.fresh(settings.retention) * file
    if workload.log is not None:
        return engines * len(np.unique(workload.log.keys)) * file
    return None


def _exact(log: RequestLog, file: float, memory: float, settings: TierSettings) -> _EngineSize:
    """Returns hits and bytes of an engine that gets a log's requests, in their order, beginning with nothing.

    Lengths of chunks scale `file` and `memory`, which are those of their mean.
    """
    scale = log.tokens / log.tokens.mean()
    files, distances = file * scale, stack_distances(log.keys, file * scale)
    known = log.previous >= 0
    on_disk = known & (distances <= settings.usual_disk)
    kept = math.inf if settings.retention is None else settings.retention
    found = on_disk | (known & settings.remote & (log.gaps <= kept))

    # The host tier gets what was read, not what was put.
    in_host = np.zeros(len(log.keys), bool)
    reads = np.flatnonzero(found)
    if len(reads):
        copies = (memory * scale)[reads]
        in_host[reads] = (stack_distances(log.keys[reads], copies) <= settings.host) & (copies <= settings.host)
    in_host &= on_disk  # memory never answers for what the disk has no more

    count = len(log.keys)
    host, disk, hit = (float(np.mean(rows)) for rows in (in_host, on_disk & ~in_host, found))
    hits = HitShares(host, disk, hit - host - disk, 1 - hit)
    distinct, host_distinct = _distinct(log, np.arange(count), files), _distinct(log, reads, memory * scale)
    held, seconds = min(settings.usual_disk, distinct), log.seconds[-1] - log.seconds[0]
    growth = distinct / max(float(seconds), 1e-9) * DAY if settings.disk is None else 0.0
    residence = math.inf
    if distinct > settings.usual_disk:
        residence = float(np.max(log.gaps[on_disk], initial=0.0))
    return _EngineSize(
        hits, float(min(settings.host, host_distinct)), held, growth, residence, len(np.unique(log.keys)) / count
    )


def _distinct(log: RequestLog, places: np.ndarray, nbytes: np.ndarray) -> float:
    """Returns the bytes of the distinct chunks of some requests."""
    return float(nbytes[places[np.unique(log.keys[places], return_index=True)[1]]].sum())


def _expected(workload: Workload, file: float, memory: float, settings: TierSettings, stay: float) -> _EngineSize:
    """Returns hits and bytes of an engine that has run for long, by its working set."""
    curve, rate = workload.revisits, workload.rate
    residence = curve.residence(settings.usual_disk / file / rate, stay)
    kept = math.inf if settings.retention is None else float(settings.retention)
    local = stay * curve.share(residence)
    found = max(local, curve.share(kept)) if settings.remote else local

    # The host tier gets what was read, not what was put: of chunks that were asked for, the share that was found.
    chunks = math.inf if not found else settings.host / memory / (rate * found)
    host_time = min(curve.residence(chunks, stay), residence)
    host = found * stay * curve.share(host_time) if settings.host >= memory else 0.0
    host_held = float(min(settings.host, rate * found * memory * curve.fresh(host_time, stay))) if host else 0.0

    hits = HitShares(host, local - host, found - local, 1 - found)
    growth = rate * (1 - local) * file * DAY if settings.disk is None else 0.0
    held = settings.usual_disk if math.isfinite(residence) else rate * curve.fresh(DAY, stay) * file
    new = 1 - curve.share(math.inf)
    return _EngineSize(hits, host_held, held, growth, residence, new)
