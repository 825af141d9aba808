"""One exchange with an HTTP server: a JSON object out, a JSON object back, or one line that says why not.

No redirect is followed, no proxy is used and no cookie kept: what is asked goes to the host that the user named, and
nowhere else. A time limit holds for connecting, sending and receiving together, however slowly a server drips.
"""

import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.model.fields import parse_json, shown

__all__ = ["KEY_VARIABLE", "Server", "exchange", "parse_server", "without_key"]

#: The environment variable with the API key. Its own name: a key that is meant for somebody else is not to be sent.
KEY_VARIABLE = "KDTR_OPENAI_API_KEY"

MAX_BYTES = 64 << 20
MAX_VALUES = 4_000_000

_SAID = 200  # characters of a server's own words in a message
_LEAST_KEY = 8  # so much of a key that a message cut short is not shown either


@dataclass(frozen=True)
class Server:
    """Where to ask. ``path`` without a slash at its end; ``options`` are those behind the URL's question mark. The key
    stands in no text of this object."""

    secure: bool
    host: str
    port: int
    path: str
    options: Mapping[str, str]
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"server [{self.host}]:{self.port}" if ":" in self.host else f"server {self.host}:{self.port}"


def parse_server(url: str, known: tuple[str, ...]) -> Server:
    """The server of a URL with no other options than the ``known`` ones. InputError: anything else."""
    example = "openai:http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as connecting will
    except ValueError:
        raise InputError(f"--engine openai: no URL, or no port in it; write {example}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"--engine openai: it takes the http or https URL of a server; write {example}")
    if "@" in parts.netloc:
        raise InputError(f"--engine openai: no name or password in the URL; a key goes into {KEY_VARIABLE}")
    if parts.fragment or not url.isascii() or any(c <= " " or c == "\x7f" for c in url):
        raise InputError(f"--engine openai: a URL of printable ASCII without # is expected; write {example}")
    options: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known or name in options:
            raise InputError(f"--engine openai: the option {shown(name)} is there twice, or none of {', '.join(known)}")
        options[name] = value
    key = os.environ.get(KEY_VARIABLE) or None
    if key is not None and (not key.isascii() or any(c <= " " or c == "\x7f" for c in key)):
        raise InputError(f"{KEY_VARIABLE} holds something else than printable ASCII without spaces")
    secure = parts.scheme == "https"
    default = 443 if secure else 80
    return Server(secure, parts.hostname, default if port is None else port, parts.path.rstrip("/"), options, key)


def exchange(server: Server, path: str, body: Mapping[str, Any] | None, end: float | None) -> dict[str, Any]:
    """POST ``body`` as JSON (None: GET) and return the JSON object that comes back.

    end: time.monotonic() at which to give up. EngineError for everything that can go wrong.
    """
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        raise EngineError(f"{server.name} has not answered in time (--timeout)")
    kind = http.client.HTTPSConnection if server.secure else http.client.HTTPConnection
    connection = kind(server.host, server.port, timeout=left)
    expired = threading.Event()
    watch: threading.Timer | None = None
    try:
        connection.connect()
        if left is not None:
            watch = threading.Timer(max(0.0, end - time.monotonic()), _give_up, (connection.sock, expired))
            watch.daemon = True
            watch.start()
        status, data = _send(connection, server, path, body)
        if not expired.is_set():
            return _document(server, status, data)
    except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: a chunk of less than no bytes
        if not expired.is_set() and not isinstance(error, TimeoutError):
            raise EngineError(f"{server.name} {_fault(error)}") from error
    finally:
        if watch is not None:
            watch.cancel()
        connection.close()
    raise EngineError(f"{server.name} has not answered in time (--timeout)")


def _give_up(sock: socket.socket, expired: threading.Event) -> None:
    expired.set()
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _send(
    connection: http.client.HTTPConnection, server: Server, path: str, body: Mapping[str, Any] | None
) -> tuple[int, bytes]:
    headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
    if server.key is not None:
        headers["Authorization"] = f"Bearer {server.key}"
    if body is None:
        connection.request("GET", path, headers=headers)
    else:
        headers["Content-Type"] = "application/json"
        connection.request("POST", path, json.dumps(body).encode(), headers)
    with connection.getresponse() as response:
        if 300 <= response.status < 400:
            raise EngineError(f"{server.name} answers by a redirect, which is not followed; give the URL it leads to")
        data = response.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise EngineError(f"{server.name} answers with more than {MAX_BYTES >> 20} MiB")
        if response.length:  # read() with a number does not complain of an end that comes too early
            raise http.client.IncompleteRead(data, response.length)
        return response.status, data


def _document(server: Server, status: int, data: bytes) -> dict[str, Any]:
    if status != 200:
        hint = f"; a key goes into {KEY_VARIABLE}" if status in (401, 403) else ""
        raise EngineError(f"{server.name} answers with HTTP status {status}{_said(server, data)}{hint}")
    try:
        return parse_json(data, f"{server.name}: its answer", MAX_VALUES)
    except InputError as error:
        raise EngineError(without_key(server, str(error))) from None


def _said(server: Server, data: bytes) -> str:
    """The server's own words for what is wrong, where it has any, cut short and on one line."""
    try:
        found: Any = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    if not isinstance(found, str) or not found.strip():
        return ""
    words = " ".join(without_key(server, found).split())
    return ": " + json.dumps(words if len(words) <= _SAID else words[:_SAID] + "...")


def without_key(server: Server, text: str) -> str:
    """`text` without the key: servers repeat what they were sent, and a message may quote it, escaped or cut short."""
    if server.key is None:
        return text
    for key in {server.key, json.dumps(server.key)[1:-1]}:
        text = text.replace(key, "***")
        for length in range(len(key) - 1, _LEAST_KEY - 1, -1):
            text = text.replace(key[:length], "***")
    return text


def _fault(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refuses the connection; is the server running?"
    if isinstance(error, socket.gaierror):
        return f"is not known: {error.strerror}"
    if isinstance(error, ssl.SSLError):
        return f"can't be trusted, or speaks no TLS: {error.reason or type(error).__name__}"
    if isinstance(error, http.client.IncompleteRead | http.client.RemoteDisconnected | ConnectionError):
        return "ended the connection before its answer was whole"
    if isinstance(error, http.client.HTTPException | ValueError):
        return f"does not speak HTTP ({type(error).__name__})"
    return f"can't be reached: {error.strerror or type(error).__name__}"
