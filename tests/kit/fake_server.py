"""A tiny OpenAI-compatible server on a real socket: says what a test tells it to, streaming or whole, and keeps what it was asked."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Say = Callable[[dict[str, Any]], list[str]]


@dataclass
class FakeServer:
    """`say` gives the pieces of an answer to a request's body; `refusals` are statuses with which the next requests are refused."""

    url: str = ""
    say: Say = lambda body: [" one", " two", " three"]
    refusals: list[int] = field(default_factory=list)
    piece_delay_s: float = 0.0
    break_after: int | None = None  # pieces, after which a stream's connection is dropped
    usage: bool = True
    served: str = "fake"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def fake_server(**options: Any) -> Iterator[FakeServer]:
    """One that listens on a free port of the loopback until the end of the block."""
    state = FakeServer(**options)

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"data": [{"id": self.server_state.served}]})
        elif self.path == "/version":
            self._send(200, {"version": "1.2"})
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        with state.lock:
            state.bodies.append(body)
            state.paths.append(self.path)
            state.keys.append(self.headers["Authorization"])
            refusal = state.refusals.pop(0) if state.refusals else None
        if refusal is not None:
            self._send(refusal, {"error": {"message": "not now"}}, {"Retry-After": "0"})
        elif self.path == "/reset_prefix_cache":
            self._send(200, {})
        elif body.get("stream"):
            self._stream(body)
        else:
            self._whole(body)

    def _whole(self, body: dict[str, Any]) -> None:
        pieces = self._pieces(body)
        text = "".join(pieces)
        spoken = {"message": {"content": text}} if "messages" in body else {"text": text}
        told = {"token_ids": list(range(len(pieces)))} if body.get("return_token_ids") else {}
        self._send(200, {"choices": [{"finish_reason": "stop"} | spoken | told], "usage": self._usage(len(pieces))})

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        pieces = self._pieces(body)
        for number, piece in enumerate(pieces):
            if number == self.server_state.break_after:
                self.close_connection = True
                return
            spoken = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            last = number == len(pieces) - 1
            self._event({"choices": [spoken | {"finish_reason": "length" if last else None}]})
        if body.get("stream_options", {}).get("include_usage") and self.server_state.usage:
            self._event({"choices": [], "usage": self._usage(len(pieces))})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _pieces(self, body: dict[str, Any]) -> list[str]:
        """Open requests are counted here, before a piece leaves: a client that has its answer may ask again before this thread runs on."""
        state = self.server_state
        with state.lock:
            state.at_once += 1
            state.most_at_once = max(state.most_at_once, state.at_once)
        try:
            pieces = state.say(body)
            time.sleep(state.piece_delay_s)
            return pieces
        finally:
            with state.lock:
                state.at_once -= 1

    def _usage(self, num_pieces: int) -> dict[str, Any] | None:
        if not self.server_state.usage:
            return None
        return {"prompt_tokens": 7, "completion_tokens": num_pieces, "prompt_tokens_details": {"cached_tokens": 4}}

    def _event(self, value: object) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
