"""A hub of the tests' own: an HTTP server with the addresses that `huggingface_hub` asks for, over folders on disk."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name, each a folder whose files are at one commit, `COMMIT`.

    Attributes:
      repositories: name → folder. gated: names whose files are refused. requests: what was asked, "METHOD path".
      url: the address.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.url = ""

    def files(self, name: str) -> list[Path]:
        """Returns a repository's files."""
        return sorted(path for path in self.repositories[name].rglob("*") if path.is_file())


def handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    """Returns what answers requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def refuse(self, status: int, code: str) -> None:
            self.answer(status, b"", X_Error_Code=code, X_Error_Message=code)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self.describe("/".join(parts[2:4]), parts[4:])
            else:
                self.send_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        def describe(self, name: str, rest: list[str]) -> None:
            if name not in hub.repositories:
                return self.refuse(401, "RepoNotFound")
            if len(rest) == 2 and rest[1] not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            root = hub.repositories[name]
            names = {path.relative_to(root).as_posix(): path for path in hub.files(name)}
            if rest[:1] == ["tree"]:
                table: object = [
                    {"type": "file", "path": file, "size": path.stat().st_size, "oid": digest(path)}
                    for file, path in names.items()
                ]
            else:
                siblings = [{"rfilename": file, "size": path.stat().st_size} for file, path in names.items()]
                table = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            self.answer(200, json.dumps(table).encode(), Content_Type="application/json")

        def send_file(self, name: str, revision: str, file: str) -> None:
            if name in hub.gated:
                return self.refuse(403, "GatedRepo")
            path = hub.repositories[name] / file
            if revision not in ("main", COMMIT) or not path.is_file():
                return self.refuse(404, "EntryNotFound")
            body = path.read_bytes()
            self.answer(200, body, ETag=f'"{digest(path)}"', X_Repo_Commit=COMMIT)

    return Handler


def digest(path: Path) -> str:
    """Returns what the hub calls a file's content."""
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def serving() -> Iterator[FakeHub]:
    """Serves a hub on this machine while the block runs."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
