"""The trained model behind vLLM's own OpenAI server: a process that is started, asked over HTTP, and stopped."""
# pyright: reportMissingImports=false

import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.small_task import VOCABULARY

HERE = Path(__file__).parent
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
"""The task's prompts have no roles: images, and a question behind them."""
STARTING_SECONDS = 600


class Server:
    """A server that answers.

    Attributes:
      url: of its root. compiled: the file that grows by a line with every compilation. seconds: that starting took.
    """

    name = "trained"

    def __init__(self, url: str, compiled: Path, seconds: float):
        """Takes where it is."""
        self.url, self.compiled, self.seconds = url, compiled, seconds

    def _open(self, path: str, body: Mapping[str, Any] | None = None, post: bool = False) -> bytes:
        data = json.dumps(body).encode() if body is not None else (b"" if post else None)
        asked = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return answer.read()

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One answer, not streamed."""
        return json.loads(self._open("/v1/chat/completions", {"model": self.name, **body}))

    def reset(self) -> None:
        """Forgets the engine's own prefix cache.

        Raises:
          RuntimeError: it did not, for somebody is being served.
        """
        if not json.loads(self._open("/reset_prefix_cache", post=True))["success"]:
            raise RuntimeError("the prefix cache was not reset; expected nobody to be served")

    def metrics(self) -> dict[str, float]:
        """The engine's own counters: name, and source where there is one, to value."""
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self._open("/metrics").decode()):
            for sample in family.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    key = " ".join([sample.name, *filter(None, [sample.labels.get("source")])])
                    found[key] = found.get(key, 0.0) + sample.value
        return found

    def compilations(self) -> list[float]:
        """Seconds that each program took to compile, or to be read from the engine's cache, since the start."""
        return [float(line) for line in self.compiled.read_text().split()]


@contextlib.contextmanager
def serving(model: Path, work: Path, flags: Sequence[str]) -> Iterator[Server]:
    """Starts a server and waits until it answers; stops it behind the caller.

    Raises:
      RuntimeError: it ended, or did not answer in time; the end of its log is told.
    """
    template, compiled, log = work / "chat.jinja", work / "compiled", work / "server.log"
    template.write_text(TEMPLATE)
    compiled.write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", Server.name]
    own += ["--chat-template", str(template), "--chat-template-content-format", "openai"]
    command = [sys.executable, "server_program.py", "serve", str(model), *own, *flags]
    environment = {**os.environ, "KVPATCH_COMPILED": str(compiled)}
    server = Server(f"http://127.0.0.1:{port}", compiled, 0.0)
    began = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while not _answers(server):
            if process.poll() is not None or time.perf_counter() - began > STARTING_SECONDS:
                raise RuntimeError(f"no server: {process.poll()}\n{log.read_text()[-4000:]}")
            time.sleep(1)
        server.seconds = time.perf_counter() - began
        yield server
    finally:
        _stop(process)


def _answers(server: Server) -> bool:
    try:
        server._open("/health")
    except (urllib.error.URLError, ConnectionError):
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and what it forked, which share a session of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def message_of(images: Sequence[np.ndarray], question: tuple[int, int]) -> list[dict[str, Any]]:
    """Images in order as PNG, and a question of two tokens behind them, as the messages of a chat."""
    from PIL import Image

    parts: list[dict[str, Any]] = []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    text = " ".join(VOCABULARY.names[token] for token in question)
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
