"""Reports of how finished requests were served: in the log, and in the engine's server by a request's id.

vLLM 0.32 puts a request's report into a complete answer (`kv_transfer_params`) and leaves it out of a streamed one. The
scheduler's side therefore sends it along with the metrics, and the server keeps the last ones. `ReportsPlugin` serves
them: an endpoint plugin of vLLM, which loads it if `VLLM_PLUGINS` names it.
"""

import collections
import logging
import re
import threading
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("vllm.kvpatch")
"""A logger below vLLM's own, whose level and handlers it has: the engine shows no other library's information."""

PATH = "/v1/kvpatch/requests/{id:path}"
"""Below /v1, so that the server's API key guards it."""
MAX_PROMPTS = 1024
"""Number of prompts of one completion request whose reports are looked for."""

_RANDOM = re.compile(r"-[0-9a-f]{8}")
_CHILD = re.compile(r"\d+_")


def answer_id(request_id: str) -> str:
    """Returns the id by which the server knows a request: without the engine's random ending.

    "chatcmpl-7f-0123abcd" → "chatcmpl-7f"; of several answers to one prompt, "1_chatcmpl-7f-0123abcd" too.
    """
    ending = _RANDOM.fullmatch(request_id, max(0, len(request_id) - 9))
    plain = request_id if ending is None else request_id[:-9]
    child = _CHILD.match(plain)
    return plain if child is None else plain[child.end() :]


def log_report(request_id: str, report: Mapping[str, Any]) -> None:
    """Writes one line about a finished request to the engine's log.

    Args:
      report: as a complete answer has it.
    """
    served = ", ".join(f"{point} {rank}" if rank else point for point, rank in report["served"]) or "nothing"
    kl = "unbounded" if report["kl"] is None else f"within {report['kl']:g} nats"
    loss = "exact" if report["exact"] else kl
    ending = f"; {report['why']}" if report["why"] else ""
    failed = "; its load failed" if report["failed"] else ""
    logger.info(
        "kvpatch: request %s: %d tokens from the store (%s), %s%s%s",
        answer_id(request_id), report["matched"], served, loss, failed, ending,
    )  # fmt: skip


class ReportQueue:
    """Reports of finished requests on their way from the engine to its server. Called by the engine's thread alone.

    Args:
      limit: number of reports that may wait; the oldest go first. 0: none are kept.
      logged: whether each is written to the log.
    """

    def __init__(self, limit: int, logged: bool):
        self.limit, self.logged = limit, logged
        self._reports: dict[str, Mapping[str, Any]] = {}

    def add(self, request_id: str, report: Mapping[str, Any]) -> None:
        """Adds the report of a finished request."""
        if self.logged:
            log_report(request_id, report)
        if self.limit:
            self._reports[request_id] = report
            if len(self._reports) > self.limit:  # nobody takes them: the engine's metrics are off
                del self._reports[next(iter(self._reports))]

    def take(self) -> dict[str, Mapping[str, Any]]:
        """Returns the reports since the last call, by the ids of their requests."""
        reports, self._reports = self._reports, {}
        return reports


class ReportShelf:
    """The last reports of a server, by the ids of its answers. Thread-safe.

    Args:
      limit: number of reports; the oldest go first.
    """

    def __init__(self, limit: int = 0):
        self.limit = limit
        self._reports: collections.OrderedDict[str, list[Any]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def add(self, reports: Mapping[str, Any]) -> None:
        """Adds reports by the engine's ids of their requests. Answers to one prompt are kept together."""
        with self._lock:
            for request_id, report in reports.items():
                id = answer_id(request_id)
                self._reports.setdefault(id, []).append(report)
                self._reports.move_to_end(id)
            while len(self._reports) > self.limit:
                self._reports.popitem(last=False)

    def find(self, id: str) -> list[Any]:
        """Returns the reports of an answer: one per prompt and choice; none if it is not finished, or too old."""
        with self._lock:
            if id in self._reports:
                return list(self._reports[id])
            # A completion request has one engine request per prompt, numbered.
            found = []
            for number in range(MAX_PROMPTS):
                if f"{id}-{number}" not in self._reports:
                    break
                found += self._reports[f"{id}-{number}"]
            return found


SHELF = ReportShelf()
"""The reports of this process, a server; `KVPatchConnector` fills it."""


class ReportsPlugin:
    """Endpoint plugin of vLLM: `GET /v1/kvpatch/requests/ID` returns the reports of an answer.

    Loaded if `VLLM_PLUGINS` has the word "kvpatch" (and the words of all other plugins that are to be loaded).

    Attributes:
      name, required_tasks: what vLLM asks of a plugin.
    """

    name = "kvpatch"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Adds the route to the server's application."""
        app.add_api_route(PATH, self.answer, methods=["GET"], response_model=None)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Does nothing: reports arrive with the metrics."""

    async def answer(self, id: str) -> Any:
        """Returns `{"id": …, "reports": […]}`; with status 404 if there are none."""
        from fastapi.responses import JSONResponse  # pyright: ignore[reportMissingImports]  # vllm brings it

        reports = SHELF.find(id)
        return JSONResponse({"id": id, "reports": reports}, status_code=200 if reports else 404)
