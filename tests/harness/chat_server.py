"""An OpenAI Chat endpoint with chosen answers, for harnesses to talk to; a thread of the test's process.

The n-th call of a conversation (by its number of assistant turns) gets the n-th answer, the last one for ever.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer:
    def __init__(self, answers: Sequence[str], failures: int = 0) -> None:
        """The first `failures` calls are answered with a 503."""
        self.answers = answers
        self.failures = failures
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.base_url = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.paths.append(path)
        self.bodies.append(body)
        if self.failures > 0:
            self.failures -= 1
            return 503, {"error": {"message": "not now", "type": "server_error"}}
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        message = {"role": "assistant", "content": self.answers[min(turn, len(self.answers) - 1)]}
        return 200, {
            "id": f"chatcmpl-{len(self.bodies)}",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }


@contextmanager
def chat_server(answers: Sequence[str], failures: int = 0) -> Iterator[ChatServer]:
    chat = ChatServer(answers, failures)

    class Endpoint(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = chat.answer(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.daemon_threads = True
    chat.base_url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield chat
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
