"""Servers with OpenAI's protocol that answer in chosen ways, for clients to be tested with."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Events = list[dict[str, Any] | float]
"""Events to send, and seconds to wait between them."""


Respond = Callable[[dict[str, Any]], Events | int]
"""From a request's body to what is answered: events, or an error status."""


class Server:
    """An HTTP server on a free port that gives what `respond` makes of a request's body: events, or a status."""

    def __init__(self, respond: Respond) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._start(200, "application/json")
                self.wfile.write(json.dumps({"data": [{"id": "the-model"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    server.bodies.append(body | {"path": self.path, "key": self.headers.get("authorization")})
                    server.in_flight += 1
                    server.most_in_flight = max(server.most_in_flight, server.in_flight)
                self._answer(respond(body))
                with lock:
                    server.in_flight -= 1

            def _answer(self, events: Events | int) -> None:
                if isinstance(events, int):
                    self._start(events, "application/json")
                    self.wfile.write(b'{"error": {"message": "no room"}}')
                    return
                self._start(200, "text/event-stream")
                for event in events:
                    if isinstance(event, float):
                        time.sleep(event)
                    else:
                        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def _start(self, status: int, kind: str) -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


Serve = Callable[[Respond], Server]
