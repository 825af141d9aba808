"""A server as an engine: its log-probabilities are judged as what they are, and whatever it does wrong is one line."""

import contextlib
import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_cases import STEPS, golden_of
from llm_server import PATHS, Engine, serving

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import EngineError, InputError
from kdtr_cli.parity.log_probabilities import log_softmax
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.report.line import verdict_line
from kdtr_cli.report.text import report_text
from kdtr_cli.workflows import engine_http
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.engine_run import EngineRunOptions, make_engine_run
from kdtr_cli.workflows.verify import verify_bundle

KEY = "sk-not-to-be-seen"
WITHIN = JudgeOptions(atol=1e-5, allow_partial=True)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_of(tmp_path_factory.mktemp("openai") / "golden.h5", embed_weights=False)


def run(golden: Path, output: Path, url: str, **options):
    return make_engine_run(EngineRunOptions(golden, output, f"openai:{url}", **options))


class TestBundle:
    @pytest.mark.parametrize("protocol", PATHS)
    def test_the_right_numbers_pass_as_log_probabilities(self, golden, tmp_path, protocol):
        engine = Engine()
        with serving(engine) as url:
            made = run(golden, tmp_path / "r.h5", url + PATHS[protocol])
        assert (made.logits, made.values, len(engine.bodies)) == ("top:20", "logprobs", 2)
        assert verify_bundle(tmp_path / "r.h5").problems == ()
        report = diff(golden, tmp_path / "r.h5", WITHIN)
        assert report.verdict is Verdict.PASS
        assert (report.totals.tokens_equal, report.totals.exact) == (2 * STEPS, True)
        assert report.totals.max_abs < 1e-6
        assert " logits=top20 values=logprobs weights=unverified " in verdict_line(report)
        assert ", against the log-softmax of the golden's exact logits: the run holds log-prob" in report_text(report)

    def test_they_are_the_golden_s_own(self, golden, tmp_path):
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", f"{url}/v1?logprobs=7")
        with open_bundle(golden) as wanted, open_bundle(tmp_path / "r.h5") as got:
            assert (got.manifest["values"], got.manifest["logits"]) == ("logprobs", "top:7")
            for a, b in zip(got.sequences, wanted.sequences, strict=True):
                rows = log_softmax(b.array("logits/exact"))
                ids = a.array("logits/engine_top_ids")
                assert ids.tolist() == np.argsort(-rows, axis=1, kind="stable")[:, :7].tolist()
                values = np.take_along_axis(rows, ids.astype(int), 1).astype(np.float32)
                assert a.array("logits/engine_top_values").tobytes() == values.tobytes()
                assert a.array("logits/engine_top_counts").tolist() == [7] * STEPS

    def test_a_constant_shift_of_log_probabilities_is_a_difference(self, golden, tmp_path):
        """Of logits a constant is nothing; a log-probability that is off by one is wrong."""
        with serving(Engine(off=-1e-3)) as url:
            run(golden, tmp_path / "r.h5", url)
        assert diff(golden, tmp_path / "r.h5", WITHIN).verdict is Verdict.DIVERGED
        wide = JudgeOptions(atol=2e-3, allow_partial=True)
        assert diff(golden, tmp_path / "r.h5", wide).verdict is Verdict.PASS

    def test_it_takes_a_bound_and_leave_to_be_partial(self, golden, tmp_path):
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", url)
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(allow_partial=True))
        assert report.verdict is Verdict.INVALID
        assert "log-probabilities, whose bits no golden has" in report.reason
        assert diff(golden, tmp_path / "r.h5", JudgeOptions(atol=1e-5)).verdict is Verdict.INCONCLUSIVE

    def test_a_bound_that_equal_probabilities_keep_too_is_too_loose(self, golden, tmp_path):
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", url)
        report = diff(golden, tmp_path / "r.h5", JudgeOptions(atol=3.0, allow_partial=True))
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "too loose" in report.reason
        assert "zeros" in report.reason

    def test_teacher_forcing_asks_step_by_step(self, golden, tmp_path):
        engine = Engine()
        with serving(engine) as url:
            run(golden, tmp_path / "r.h5", url, teacher_force=True)
        with open_bundle(golden) as bundle:
            wanted = [s.prompt.tolist() + s.tokens[:t].tolist() for s in bundle.sequences for t in range(STEPS)]
        assert [body["prompt"] for body in engine.bodies] == wanted
        report = diff(golden, tmp_path / "r.h5", WITHIN)
        assert (report.verdict, report.teacher_forced) == (Verdict.PASS, True)

    def test_a_golden_without_full_rows_has_no_log_probabilities(self, tmp_path):
        less = golden_of(tmp_path / "less.h5", logits="top:30", embed_weights=False)
        with serving(Engine()) as url:
            run(less, tmp_path / "r.h5", url)
        report = diff(less, tmp_path / "r.h5", WITHIN)
        assert report.verdict is Verdict.INCONCLUSIVE
        assert "can't be measured" in report.reason

    def test_it_stops_where_the_golden_s_stop_id_stands(self, golden, tmp_path):
        with open_bundle(golden) as bundle:
            token = int(bundle.sequences[0].tokens[1])
        engine = Engine(stop_ids=(token,))
        with serving(engine) as url:
            made = run(golden, tmp_path / "r.h5", url)
        first = made.sequences[0][1]
        assert (len(first.tokens), first.finish_reason) == (2, "stop")
        assert diff(golden, tmp_path / "r.h5", WITHIN).verdict is Verdict.DIVERGED

    def test_the_same_answers_are_the_same_file_and_no_address_is_in_it(self, golden, tmp_path):
        for name in ("a.h5", "b.h5"):
            with serving(Engine()) as url:
                run(golden, tmp_path / name, url)
        assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
        with open_bundle(tmp_path / "a.h5") as bundle:
            assert bundle.manifest["run"]["engine"] == "openai:completions"
            assert bundle.manifest["run"]["engine_name"] == "tiny"
            assert "127.0.0.1" not in json.dumps(bundle.manifest)


class TestKey:
    def test_it_is_sent_and_kept_nowhere(self, golden, tmp_path, monkeypatch):
        monkeypatch.setenv(engine_http.KEY_VARIABLE, KEY)
        engine = Engine()
        with serving(engine) as url:
            run(golden, tmp_path / "r.h5", url)
        assert {h["Authorization"] for h in engine.headers} == {f"Bearer {KEY}"}
        assert KEY.encode() not in (tmp_path / "r.h5").read_bytes()

    def test_another_s_key_is_not_sent(self, golden, tmp_path, monkeypatch):
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        engine = Engine()
        with serving(engine) as url:
            run(golden, tmp_path / "r.h5", url)
        assert not any("Authorization" in h for h in engine.headers)

    @pytest.mark.parametrize("body", [{"error": {"message": f"wrong key:\n{KEY}"}}, {"detail": KEY}, KEY.encode()])
    def test_a_server_that_repeats_it_is_not_repeated(self, golden, tmp_path, monkeypatch, body):
        monkeypatch.setenv(engine_http.KEY_VARIABLE, KEY)
        with serving(lambda handler, _: (401, body)) as url, pytest.raises(EngineError, match="status 401") as caught:
            run(golden, tmp_path / "r.h5", url)
        assert KEY not in repr(caught.getrepr(style="long"))
        assert engine_http.KEY_VARIABLE in str(caught.value)

    @pytest.mark.parametrize("key", [KEY, 'sk-"quoted"\\', "sk-" + "long" * 40])
    @pytest.mark.parametrize(
        "where",
        [
            lambda d, key: d.update(choices=key),
            lambda d, key: choice(d).update(finish_reason=f"no {key}"),
            lambda d, key: choice(d)["logprobs"].update(tokens=[key] * 3),
        ],
    )
    def test_an_answer_that_repeats_it_is_not_repeated(self, golden, tmp_path, monkeypatch, where, key):
        monkeypatch.setenv(engine_http.KEY_VARIABLE, key)
        engine = Engine()

        def repeats(handler, body):
            status, document = engine(handler, body)
            if body is not None:
                where(document, key)
            return status, document

        with serving(repeats) as url, pytest.raises(EngineError) as caught:
            run(golden, tmp_path / "r.h5", url)
        shown = repr(caught.getrepr(style="native")) + str(caught.value)
        assert not any(part in shown for part in (key[:12], json.dumps(key)[1:13]))

    def test_models_that_are_called_so_are_not_named(self, golden, tmp_path, monkeypatch):
        monkeypatch.setenv(engine_http.KEY_VARIABLE, KEY)
        engine = Engine()

        def two(handler, body):
            return (200, {"data": [{"id": KEY}, {"id": "b"}]}) if body is None else engine(handler, body)

        with serving(two) as url, pytest.raises(InputError, match=r'"\*\*\*", "b"'):
            run(golden, tmp_path / "r.h5", url)

        def named(handler, body):
            status, document = engine(handler, body)
            return status, {**document, "model": f"models/{KEY}"} if body is not None else document

        with serving(named) as url:
            run(golden, tmp_path / "r.h5", url)
        assert KEY.encode() not in (tmp_path / "r.h5").read_bytes()

    @pytest.mark.parametrize("key", ["two words", "line\r\nX-Other: 1", "é"])
    def test_one_that_is_no_header_is_refused_unseen(self, golden, tmp_path, monkeypatch, key):
        monkeypatch.setenv(engine_http.KEY_VARIABLE, key)
        with pytest.raises(InputError) as caught:
            run(golden, tmp_path / "r.h5", "http://127.0.0.1:1")
        assert key not in str(caught.value)


class TestUrl:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "127.0.0.1:8000",
            "ftp://127.0.0.1/",
            "file:///etc/passwd",
            "http://",
            "http://user:secret@127.0.0.1:1",
            "http://127.0.0.1:99999",
            "http://[::1",
            "http://a..b:80",
            f"http://{'a' * 64}:80",
            "http://127.0.0.1:1/#x",
            "http://127.0.0.1:1/a b",
            "http://127.0.0.1:1/?top=3",
            "http://127.0.0.1:1/?logprobs=0",
            "http://127.0.0.1:1/?logprobs=x",
            "http://127.0.0.1:1/?logprobs=%0A",
            "http://127.0.0.1:1/?%0A=2",
            "http://user:secret",
            "http://127.0.0.1:1/?logprobs=2&logprobs=3",
            "http://127.0.0.1:1/generate?model=m",
        ],
    )
    def test_one_that_won_t_do(self, golden, tmp_path, url):
        with pytest.raises(InputError, match="--engine openai") as caught:
            run(golden, tmp_path / "r.h5", url)
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []

    def test_a_proxy_of_the_environment_is_not_asked(self, golden, tmp_path, monkeypatch):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", url)

    def test_of_several_models_one_is_named(self, golden, tmp_path):
        engine = Engine()

        def two(handler, body):
            return (200, {"data": [{"id": "a"}, {"id": "b"}]}) if body is None else engine(handler, body)

        with serving(two) as url:
            with pytest.raises(InputError, match="model=NAME"):
                run(golden, tmp_path / "r.h5", url)
            run(golden, tmp_path / "r.h5", f"{url}/v1/completions?model=b%20c")
        assert engine.bodies[0]["model"] == "b c"

    @pytest.mark.parametrize("listed", [{}, {"data": None}, {"data": []}, {"data": [1, {"name": "m"}]}])
    def test_a_server_that_names_no_model(self, golden, tmp_path, listed):
        with serving(lambda *_: (200, listed)) as url, pytest.raises(EngineError, match="names no model"):
            run(golden, tmp_path / "r.h5", url)

    def test_a_golden_that_samples_can_t_be_asked(self, tmp_path):
        golden = golden_of(tmp_path / "g.h5", temperature=1.0, embed_weights=False)
        with pytest.raises(InputError, match="--teacher-force"):
            run(golden, tmp_path / "r.h5", "http://127.0.0.1:1")
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", url, teacher_force=True)
        assert diff(golden, tmp_path / "r.h5", WITHIN).verdict is Verdict.PASS


def raw(data: bytes):
    """Answers with these bytes and closes the connection."""

    def reply(handler, body):
        handler.wfile.write(data)
        handler.close_connection = True

    return reply


def drip(handler, body):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    with contextlib.suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b" ")
            time.sleep(0.05)


def drip_headers(handler, body):
    with contextlib.suppress(OSError):
        for _ in range(200):
            handler.wfile.write(b"H")
            time.sleep(0.05)


def hang(handler, body):
    handler.connection.settimeout(10)
    with contextlib.suppress(OSError):
        handler.connection.recv(1)  # until the client leaves


def reset(handler, body):
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    handler.server.shutdown_request = lambda request: request.close()
    handler.close_connection = True


GARBAGE = {
    "dies in the body": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"), "before its answer was whole"),
    "dies in a chunk": (
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{"), "before its answer was whole",
    ),
    "a chunk of less than nothing": (
        raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n{}"), "does not speak HTTP|before its answer",
    ),
    "dies in the headers": (raw(b"HTTP/1.1 200 OK\r\nConte"), "not valid JSON|before its answer"),
    "says nothing": (raw(b""), "before its answer was whole"),
    "resets": (reset, "before its answer was whole"),
    "no HTTP": (raw(b"SSH-2.0-OpenSSH_9.6\r\n"), "does not speak HTTP"),
    "endless header": (raw(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70000), "does not speak HTTP"),
    "no JSON": (lambda *_: (200, b"<html>"), "not valid JSON"),
    "no text": (lambda *_: (200, b"\xff\xfe\xff"), "not valid JSON"),
    "nothing in it": (lambda *_: (200, b""), "not valid JSON"),
    "a list": (lambda *_: (200, []), "where a JSON object is expected"),
    "deep": (lambda *_: (200, b'{"a":' * 50000), "nested too deeply"),
    "a failure": (lambda *_: (500, {"error": {"message": "out\nof memory"}}), 'status 500: "out of memory"'),
    "a failure in no words": (lambda *_: (503, b"\x00"), "status 503$"),
    "a redirect": (raw(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n"), "redirect"),
    "no answer": (lambda *_: (200, {"object": "error"}), "none of choices"),
}  # fmt: skip


def choice(document):
    return document["choices"][0]


WRONG = {
    "another prompt": (lambda d: choice(d)["prompt_token_ids"].append(1), "did not read the 3 ids"),
    "a longer prompt": (lambda d: d["usage"].update(prompt_tokens=4), "did not read the 3 ids"),
    "two answers": (lambda d: d["choices"].append({**choice(d), "index": 1}), "2 answers to one prompt"),
    "an id beyond the vocabulary": (
        lambda d: choice(d)["logprobs"]["top_logprobs"][1].update({"token_id:512": -1.0}), "holds the id 512",
    ),
    "logits": (lambda d: choice(d)["logprobs"]["top_logprobs"][1].update({"token_id:1": 2.5}), "no log-probability"),
    "texts": (lambda d: choice(d)["logprobs"].update(tokens=["a", "b", "c"]), "SGLang has them in /generate"),
    "a list for text": (lambda d: choice(d).update(finish_reason=[]), "it ended by"),
}  # fmt: skip


class TestAnswer:
    @pytest.mark.parametrize("case", WRONG)
    def test_one_that_can_t_be_used(self, golden, tmp_path, case):
        change, word = WRONG[case]
        engine = Engine()

        def changed(handler, body):
            status, document = engine(handler, body)
            if body is not None:
                change(document)
            return status, document

        with serving(changed) as url, pytest.raises(EngineError, match=word):
            run(golden, tmp_path / "r.h5", url)
        assert list(tmp_path.iterdir()) == []


class TestFailure:
    """What fails is one line, and what stood there before stays."""

    @pytest.mark.parametrize("case", GARBAGE)
    @pytest.mark.parametrize("when", ["at once", "later"])
    def test_a_server_that_breaks(self, golden, tmp_path, case, when):
        reply, word = GARBAGE[case]
        engine = Engine()

        def breaks(handler, body):
            return engine(handler, body) if when == "later" and len(engine.bodies) < 1 else reply(handler, body)

        (tmp_path / "r.h5").write_bytes(b"an old bundle")
        with serving(breaks) as url, pytest.raises(EngineError, match=word) as caught:
            run(golden, tmp_path / "r.h5", f"{url}/v1?model=m", force=True, timeout=20)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("server 127.0.0.1:")
        assert (tmp_path / "r.h5").read_bytes() == b"an old bundle"
        assert len(list(tmp_path.iterdir())) == 1

    @pytest.mark.parametrize("reply", [hang, drip, drip_headers])
    def test_one_that_takes_too_long(self, golden, tmp_path, reply):
        begin = time.monotonic()
        with serving(reply) as url, pytest.raises(EngineError, match="in time"):
            run(golden, tmp_path / "r.h5", f"{url}/completion", timeout=0.3)
        assert time.monotonic() - begin < 5
        assert list(tmp_path.iterdir()) == []

    def test_nobody_there(self, golden, tmp_path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            with pytest.raises(EngineError, match="refuses the connection"):
                run(golden, tmp_path / "r.h5", f"http://127.0.0.1:{taken.getsockname()[1]}")

    def test_no_tls_where_tls_is_asked_for(self, golden, tmp_path):
        with serving(Engine()) as url, pytest.raises(EngineError, match="speaks no TLS"):
            run(golden, tmp_path / "r.h5", url.replace("http", "https"), timeout=20)

    def test_too_much(self, golden, tmp_path, monkeypatch):
        monkeypatch.setattr(engine_http, "MAX_BYTES", 1 << 20)
        with serving(lambda *_: (200, b" " * (2 << 20))) as url, pytest.raises(EngineError, match="more than 1 MiB"):
            run(golden, tmp_path / "r.h5", url)

    def test_no_thread_stays(self, golden, tmp_path):
        before = threading.active_count()
        with serving(Engine()) as url:
            run(golden, tmp_path / "r.h5", url, timeout=60)
        time.sleep(0.05)
        assert threading.active_count() == before
