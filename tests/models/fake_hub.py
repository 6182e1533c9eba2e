"""A hub of the tests' own: an HTTP server with the addresses that `huggingface_hub` asks for, over folders on disk."""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass
class FakeHub:
    """Repositories by name, each a folder whose files are at one commit, `COMMIT`.

    Attributes:
      repositories: name → folder. gated: names whose files are refused. requests: what was asked, "METHOD path".
      url: the address.
    """

    repositories: dict[str, Path] = dataclasses.field(default_factory=dict)
    gated: set[str] = dataclasses.field(default_factory=set)
    requests: list[str] = dataclasses.field(default_factory=list)
    url: str = ""


def digest(path: Path) -> str:
    """Returns what the hub calls a file's content."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content_Length": str(len(body))}).items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.describe("/".join(parts[2:4]), parts[4:])
        else:
            self.send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    do_HEAD = do_GET

    def describe(self, name: str, rest: list[str]) -> None:
        if name not in self.hub.repositories:
            return self.refuse(401, "RepoNotFound")
        if len(rest) == 2 and rest[1] not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        root = self.hub.repositories[name]
        files = [path for path in sorted(root.rglob("*")) if path.is_file()]
        named = [(path.relative_to(root).as_posix(), path.stat().st_size, digest(path)) for path in files]
        siblings = [{"rfilename": file, "size": size} for file, size, _ in named]
        table: object = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
        if rest[:1] == ["tree"]:
            table = [{"type": "file", "path": file, "size": size, "oid": oid} for file, size, oid in named]
        self.answer(200, json.dumps(table).encode(), Content_Type="application/json")

    def send_file(self, name: str, revision: str, file: str) -> None:
        path = self.hub.repositories[name] / file
        if name in self.hub.gated:
            return self.refuse(403, "GatedRepo")
        if revision not in ("main", COMMIT) or not path.is_file():
            return self.refuse(404, "EntryNotFound")
        self.answer(200, path.read_bytes(), ETag=f'"{digest(path)}"', X_Repo_Commit=COMMIT)


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Serves a hub on this machine while the block runs."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
