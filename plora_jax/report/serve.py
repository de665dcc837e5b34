"""Serve a run's report while it runs: the page, and a JSON endpoint by which it asks for news. Read-only."""

import json
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from plora_jax.errors import UserError
from plora_jax.report.runfiles import RunFiles
from plora_jax.report.runview import read_view
from plora_jax.report.write import render

RESTS = 9  # times as long as making a page took, before the next is made: a tenth of a core at most
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the rest is in the page itself
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Answer for one run; the page is made again only when a file of the run has changed."""

    daemon_threads = True

    def __init__(self, run: Path, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.files, self.guard = RunFiles(run), threading.Lock()
        self.made, self.due = ("", ""), 0.0
        self.local = host in LOOPBACK
        super().__init__((host, port), Handler)

    def page(self) -> tuple[str, str]:
        """Return the version of the run's files that is shown, and the page; a slow page is made less often."""
        with self.guard:
            began = time.monotonic()
            if began >= self.due:
                version = self.files.version()  # before the files are read: what comes later is news
                if version != self.made[0]:
                    self.made = version, render(self.files, live=version)
                    self.due = began + (1 + RESTS) * (time.monotonic() - began)
            return self.made


class Handler(BaseHTTPRequestHandler):
    """Answer / and /state.json; nothing else of the machine can be asked for."""

    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer a request; one under a foreign name is refused, so that no other site can read the run by DNS."""
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if self.server.local and host not in LOOPBACK:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this page is served to its own machine only\n")
            return
        url = urlsplit(self.path)
        try:
            version, page = self.server.page()
        except UserError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n")
            return
        if url.path == "/":
            self._send(HTTPStatus.OK, "text/html", page)
        elif url.path == "/state.json":
            seen = parse_qs(url.query).get("seen", [""])[0]
            news = {"version": version, "page": None if seen == version else page}
            self._send(HTTPStatus.OK, "application/json", json.dumps(news))
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there are / and /state.json\n")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": f"{kind}; charset=utf-8"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet: a page asks every two seconds."""


def serve(run: Path, host: str, port: int) -> int:
    """Serve the report of `run` until interrupted; port 0 takes a free one.

    Raises:
      UserError: `run` is no run directory, or the address cannot be had.
    """
    read_view(RunFiles(run))
    try:
        server = Server(run, host, port)
    except (OSError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"--host {host} --port {port}: {what}; give another (--port 0 takes a free one)"
        ) from None
    with server:
        if not server.local:
            print(
                f"plora report: warning: --host {host} lets everyone who reaches this port read the run; "
                "there is no password",
                file=sys.stderr,
            )
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {run} at http://{shown}:{server.server_address[1]}/ (Ctrl-C stops)", flush=True)
        server.serve_forever()
    return 0
