"""The page, served to this machine alone, and to nobody else on it."""

import hmac
import html
import http.server
import json
import secrets
import threading
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import parse_qs

from .._files import resource
from .._interrupt import check_interrupt
from ._answers import Explored, answer


_HOST = "127.0.0.1"
# A question is a short list of settings.
_MOST_BYTES = 2**16
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{title}: explore</title>
<style>body {{ margin: 0 auto; padding: 1rem; max-width: 75rem; }} {css}</style></head>
<body><h1>{title}</h1><main></main><script>{script}
explore(document.querySelector("main"), (question) => fetch("answer", {{
  method: "POST", headers: {{ "X-Token": {token} }}, body: JSON.stringify(question),
}}).then((response) => response.json()));
</script></body></html>
"""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(http.server.ThreadingHTTPServer):
    """Serves the page of a job on a port of the loopback interface, any free one for 0.

    A request without the token, which `address` has, or to another host, as a page elsewhere whose
    name was made to lead here would send it, is forbidden. Answers are computed one after the
    other, laws beside steps.
    """

    daemon_threads = True
    timeout: float | None = 0.1

    def __init__(self, of: Explored, port: int = 0):
        super().__init__((_HOST, port), _Handler)
        self.of: Explored = of
        self.token: str = secrets.token_urlsafe(24)
        self.hosts: set[str] = {f"{name}:{self.server_port}" for name in (_HOST, "localhost")}
        self.address: str = f"http://{_HOST}:{self.server_port}/?token={self.token}"
        self.computing: dict[bool, threading.Lock] = {
            law: threading.Lock() for law in (False, True)
        }

    def page(self) -> str:
        css, script = resource("explorer/_explore.css"), resource("explorer/_explore.js")
        title = html.escape(self.of.job.name)
        return _PAGE.format(title=title, css=css, script=script, token=json.dumps(self.token))

    def answer(self, question: Any) -> dict[str, Any]:
        with self.computing[isinstance(question, dict) and question.get("what") == "law"]:
            return answer(self.of, question)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who is gone is no error; of others, the page hears by itself."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """The page, by GET; answers, by POST."""

    server: Server
    server_version = "prism-jax"
    sys_version = ""
    timeout = 30  # Seconds without a word; a browser opens another connection.

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self._allowed(*parse_qs(query).get("token", ())):
            if path == "/":
                self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page())
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is no such page.")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not self._allowed(self.headers.get("X-Token", "")):
            return
        if self.path != "/answer":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "Questions go to /answer.")
            return
        if not length.isdecimal() or len(length) > 9 or int(length) > _MOST_BYTES:
            self._send(HTTPStatus.BAD_REQUEST, "text/plain", "A question has at most 64 KiB.")
            return
        try:
            question = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            question = None  # Which is refused in a sentence.
        self._send(HTTPStatus.OK, "application/json", json.dumps(self.server.answer(question)))

    def _allowed(self, *tokens: str) -> bool:
        host = self.headers.get("Host", "").lower() in self.server.hosts
        expected = self.server.token.encode()
        if host and len(tokens) == 1 and hmac.compare_digest(tokens[0].encode(), expected):
            return True
        self._send(HTTPStatus.FORBIDDEN, "text/plain", "Open the address that was printed.")
        return False

    def _send(self, status: HTTPStatus, content_type: str, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Addresses have the token, so nothing is logged."""


def serve(server: Server) -> NoReturn:
    """Serves until Ctrl-C, which is raised."""
    with server:
        while True:
            server.handle_request()
            check_interrupt()
