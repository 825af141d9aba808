"""An inference server on the loopback: it answers as vLLM, llama.cpp or SGLang with the numbers of the NumPy model, or
as a test wants it to."""

import json
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from kdtr_cli.model.choices import Choices
from kdtr_cli.model.prompts import Decoding, Prompt
from kdtr_cli.model.source import open_model
from kdtr_cli.parity.log_probabilities import log_softmax
from kdtr_cli.reference import exact
from kdtr_cli.reference.generate import generate
from kdtr_cli.reference.transformer import Model

#: From path, JSON body (None: GET) and headers to status and body; or None, after it wrote to the handler itself.
Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any] | None], tuple[int, object] | None]

PATHS = {"vllm": "", "llama.cpp": "/completion", "sglang": "/generate"}


@contextmanager
def serving(reply: Reply):
    """A server that answers with `reply`; gives its URL without a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body):
            with suppress(ConnectionError):
                if (made := reply(self, body)) is not None:
                    status, content = made
                    data = content if isinstance(content, bytes) else json.dumps(content).encode()
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class Engine:
    """The NumPy model behind the protocols of three servers; `bodies` keeps what was asked, `off` is added to the
    log-probabilities."""

    def __init__(self, stop_ids: tuple[int, ...] = (), off: float = 0.0) -> None:
        opened = open_model("tiny")
        self.model = Model(opened.config, opened.weights, Choices(), 64, exact)
        self.stop_ids, self.off = stop_ids, off
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def decode(self, ids: list[int], steps: int) -> tuple[list[int], np.ndarray, str]:
        decoding = Decoding(steps, self.stop_ids, not self.stop_ids)
        (made,) = generate(self.model, [Prompt("0", np.array(ids, np.int32), 0)], decoding)
        return made.tokens.tolist(), log_softmax(made.logits) + self.off, made.finish_reason

    def __call__(self, handler, body):
        self.headers.append(dict(handler.headers))
        if body is None:
            assert handler.path == "/v1/models"
            return 200, {"object": "list", "data": [{"id": "/models/tiny", "object": "model"}]}
        self.bodies.append(body)
        return 200, {"/v1/completions": vllm, "/completion": llama, "/generate": sglang}[handler.path](self, body)


def _top(row: np.ndarray, k: int) -> list[int]:
    return np.argsort(-row, kind="stable")[:k].tolist()


def vllm(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows, finish = engine.decode(body["prompt"], body["max_tokens"])
    assert body["return_tokens_as_token_ids"] is True
    top = [{f"token_id:{i}": float(row[i]) for i in _top(row, body["logprobs"])} for row in rows]
    logprobs = {
        "text_offset": [0] * len(tokens),
        "tokens": [f"token_id:{t}" for t in tokens],
        "token_logprobs": [float(row[t]) for row, t in zip(rows, tokens, strict=True)],
        "top_logprobs": top,
    }
    choice = {"index": 0, "text": "?", "logprobs": logprobs, "finish_reason": finish, "stop_reason": None}
    choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"], "prompt_logprobs": None}
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(tokens), "total_tokens": 0}
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}


def llama(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows, finish = engine.decode(body["prompt"], body["n_predict"])

    def entry(i: int, row: np.ndarray) -> dict[str, Any]:
        return {"id": i, "token": "?", "bytes": [63], "logprob": float(row[i])}

    listed = [
        {**entry(t, row), "top_logprobs": [entry(i, row) for i in _top(row, body["n_probs"])]}
        for t, row in zip(tokens, rows, strict=True)
    ]
    return {
        "content": "?",
        "tokens": tokens if body["return_tokens"] else [],
        "stop": True,
        "model": "/models/tiny.gguf",
        "stop_type": {"stop": "eos", "length": "limit"}[finish],
        "truncated": False,
        "tokens_evaluated": len(body["prompt"]),
        "completion_probabilities": listed,
    }


def sglang(engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows, finish = engine.decode(body["input_ids"], body["sampling_params"]["max_new_tokens"])
    assert body["return_logprob"] is True
    meta = {
        "finish_reason": {"type": finish, "matched" if finish == "stop" else "length": tokens[-1]},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": len(tokens),
        "output_token_logprobs": [[float(row[t]), t, None] for row, t in zip(rows, tokens, strict=True)],
        "output_top_logprobs": [
            [[float(row[i]), i, None] for i in _top(row, body["top_logprobs_num"])] for row in rows
        ],
    }
    return {"text": "?", "output_ids": tokens, "meta_info": meta}
