"""A file from elsewhere becomes a run that is judged like any other, or one line that says why not."""

import copy
import functools
import io
import json
import os
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import STEPS, VOCAB, golden_of, right_answer, saved
from llm_server import Engine, llama, sglang, vllm

from kdtr_cli.bundle.reader import open_bundle
from kdtr_cli.errors import Exit, InputError
from kdtr_cli.model.presets import write_model
from kdtr_cli.parity.log_probabilities import log_softmax
from kdtr_cli.parity.tolerances import JudgeOptions
from kdtr_cli.parity.verdicts import Verdict
from kdtr_cli.workflows.diff import diff
from kdtr_cli.workflows.engine_run import EngineRunOptions
from kdtr_cli.workflows.golden import GoldenOptions, make_golden
from kdtr_cli.workflows.import_file import import_file
from kdtr_cli.workflows.inspect import describe
from kdtr_cli.workflows.prompts import PromptOptions
from kdtr_cli.workflows.verify import verify_bundle

WITHIN = JudgeOptions(atol=1e-5, allow_partial=True)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    return golden_of(tmp_path_factory.mktemp("import") / "golden.h5", embed_weights=False)


def made(golden: Path, file: Path, values: str | None = None, **options):
    return import_file(EngineRunOptions(golden, file.parent / "r.h5", "", force=True, **options), file, values)


def judged(golden: Path, file: Path, options: JudgeOptions | None = None, values: str | None = None, **asked):
    made(golden, file, values, **asked)
    path = file.parent / "r.h5"
    assert verify_bundle(path).problems == ()
    return diff(golden, path, options)


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


class TestArrays:
    @pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a"])
    def test_what_a_command_would_write(self, golden, tmp_path, name):
        file = tmp_path / name
        if name.endswith("npz"):
            np.savez(file, **right_answer(golden))
        else:
            saved(file, right_answer(golden))
        assert judged(golden, file).verdict is Verdict.IDENTICAL
        with open_bundle(tmp_path / "r.h5") as bundle:
            assert bundle.manifest["run"]["engine"] == f"import:{'npz' if name.endswith('npz') else 'safetensors'}"
            assert str(tmp_path) not in json.dumps(bundle.manifest)

    def test_kdtr_s_own_json(self, golden, tmp_path):
        right = right_answer(golden)
        logits = right["logits"].reshape(2, STEPS, VOCAB).tolist()
        tokens = right["tokens/ids"].reshape(2, STEPS).tolist()
        entries = [{"tokens": t, "finish_reason": "length", "logits": x} for t, x in zip(tokens, logits, strict=True)]
        assert judged(golden, written(tmp_path / "a.json", {"sequences": entries})).verdict is Verdict.IDENTICAL

    @pytest.mark.parametrize("forced", [False, True])
    def test_logits_in_one_array(self, golden, tmp_path, forced):
        np.save(tmp_path / "a.npy", right_answer(golden)["logits"])
        assert judged(golden, tmp_path / "a.npy", teacher_force=forced).verdict is Verdict.IDENTICAL

    def test_of_fewer_steps(self, golden, tmp_path):
        logits = right_answer(golden)["logits"].reshape(2, STEPS, VOCAB)[:, :2].reshape(4, VOCAB)
        np.save(tmp_path / "a.npy", logits)
        assert judged(golden, tmp_path / "a.npy", JudgeOptions(steps=2), steps=2).verdict is Verdict.IDENTICAL

    def test_an_argmax_is_the_smaller_id_s(self, golden, tmp_path):
        logits = right_answer(golden)["logits"].copy()
        logits[0] = 0
        np.save(tmp_path / "a.npy", logits)
        made(golden, tmp_path / "a.npy")
        with open_bundle(tmp_path / "r.h5") as bundle:
            assert bundle.sequences[0].tokens[0] == 0

    def test_in_bfloat16(self, golden, tmp_path):
        np.save(tmp_path / "a.npy", right_answer(golden)["logits"].astype(ml_dtypes.bfloat16).view("V2"))
        report = judged(golden, tmp_path / "a.npy", JudgeOptions(atol=0.05), tier="bf16", teacher_force=True)
        assert report.verdict is Verdict.PASS

    def test_tokens_in_one_array_are_inconclusive(self, golden, tmp_path):
        np.save(tmp_path / "a.npy", right_answer(golden)["tokens/ids"])
        report = judged(golden, tmp_path / "a.npy")
        assert (report.verdict, report.totals.exact) == (Verdict.INCONCLUSIVE, True)

    def test_a_sequence_in_one_array_ends_with_its_stop_id(self, tmp_path, golden):
        with open_bundle(golden) as bundle:
            token = int(bundle.sequences[0].tokens[1])
            config = json.loads(bundle.config_text) | {"eos_token_id": token}
        write_model(tmp_path / "model", "tiny")
        written(tmp_path / "model" / "generation_config.json", {"eos_token_id": token})
        written(tmp_path / "model" / "config.json", config)
        stopping = tmp_path / "stopping.h5"
        make_golden(GoldenOptions(str(tmp_path / "model"), stopping, PromptOptions(ids=("1 2 3", "7")), STEPS))
        right = right_answer(stopping)
        assert right["tokens/offsets"].tolist()[1] == 2
        for array in (right["logits"], right["tokens/ids"]):
            np.save(tmp_path / "a.npy", array)
            report = judged(stopping, tmp_path / "a.npy")
            assert report.verdict is (Verdict.IDENTICAL if array.ndim == 2 else Verdict.INCONCLUSIVE)
            assert report.totals.exact

    def test_log_probabilities_in_an_array(self, golden, tmp_path):
        np.save(tmp_path / "a.npy", log_softmax(right_answer(golden)["logits"]).astype(np.float32))
        report = judged(golden, tmp_path / "a.npy", JudgeOptions(atol=1e-5), "logprobs")
        assert (report.verdict, report.values) == (Verdict.PASS, "logprobs")
        assert judged(golden, tmp_path / "a.npy", JudgeOptions(atol=1e-5)).verdict is Verdict.DIVERGED
        np.save(tmp_path / "a.npy", right_answer(golden)["logits"])
        with pytest.raises(InputError, match="no log-probability"):
            made(golden, tmp_path / "a.npy", "logprobs")


def answers(form: str) -> list[dict]:
    """Of the NumPy model to the golden's two prompts, 20 log-probabilities a step."""
    return copy.deepcopy(_answers(form))


@functools.cache
def _answers(form: str) -> list[dict]:
    engine = Engine()
    ask = {"vllm": vllm, "llama.cpp": llama, "sglang": sglang, "offline": vllm}[form]
    found = []
    for ids in ([1, 2, 3], [7]):
        body = {"prompt": ids, "input_ids": ids, "model": "m", "max_tokens": STEPS, "n_predict": STEPS, "logprobs": 20}
        body |= {"n_probs": 20, "top_logprobs_num": 20, "return_tokens": True, "return_logprob": True}
        body |= {"return_tokens_as_token_ids": True, "sampling_params": {"max_new_tokens": STEPS}}
        found.append(ask(engine, body))
    if form != "offline":
        return found
    return [
        {
            "request_id": str(i),
            "prompt_token_ids": document["choices"][0]["prompt_token_ids"],
            "outputs": [
                {
                    "index": 0,
                    "token_ids": document["choices"][0]["token_ids"],
                    "finish_reason": "length",
                    "logprobs": [
                        {k.removeprefix("token_id:"): {"logprob": v, "rank": 1} for k, v in row.items()}
                        for row in document["choices"][0]["logprobs"]["top_logprobs"]
                    ],
                }
            ],
        }
        for i, document in enumerate(found)
    ]


class TestLogprobs:
    @pytest.mark.parametrize("form", ["vllm", "llama.cpp", "sglang", "offline"])
    @pytest.mark.parametrize("lines", [False, True])
    def test_every_form_passes_as_a_list_and_as_lines(self, golden, tmp_path, form, lines):
        found = answers(form)
        text = "\n".join(map(json.dumps, found)) + "\n" if lines else json.dumps(found, indent=1)
        report = judged(golden, written(tmp_path / ("a.jsonl" if lines else "a.json"), text), WITHIN)
        assert (report.verdict, report.totals.exact, report.totals.logits) == (Verdict.PASS, True, "top20")
        assert report.values == "logprobs"

    def test_several_choices_are_several_prompts(self, golden, tmp_path):
        one, two = answers("vllm")
        both = {"choices": [{**two["choices"][0], "index": 1}, one["choices"][0]]}
        assert judged(golden, written(tmp_path / "a.json", both), WITHIN).verdict is Verdict.PASS

    @pytest.mark.parametrize("value", [-9999.0, None, "-inf", float("-inf")])
    def test_a_filler_is_not_compared_and_a_miss_is_found(self, golden, tmp_path, value):
        """An id far down without a value is nothing; the second best without one is a fault, whatever it is called."""
        found = answers("offline")
        row = found[0]["outputs"][0]["logprobs"][1]
        row[list(row)[-1]]["logprob"] = value
        free = next(i for i in range(VOCAB) if str(i) not in row)
        row[str(free)] = {"logprob": value, "rank": 21}
        assert judged(golden, written(tmp_path / "a.json", found), WITHIN).verdict is Verdict.PASS
        row[list(row)[1]]["logprob"] = value
        report = judged(golden, written(tmp_path / "a.json", found), WITHIN)
        assert report.verdict is Verdict.DIVERGED
        assert report.totals.first_logit_failure == (0, 1)

    def test_a_row_of_nulls_is_inconclusive(self, golden, tmp_path):
        for spoil in (lambda row: None, lambda row: dict.fromkeys(row)):
            found = answers("vllm")
            logprobs = found[1]["choices"][0]["logprobs"]
            logprobs["top_logprobs"][2] = spoil(logprobs["top_logprobs"][2])
            logprobs["token_logprobs"][2] = None
            report = judged(golden, written(tmp_path / "a.json", found), WITHIN)
            assert report.verdict is Verdict.INCONCLUSIVE
            assert "1 rows of logits can't be measured" in report.reason

    def test_inspect_shows_what_is_there(self, golden, tmp_path):
        found = answers("offline")
        rows = found[0]["outputs"][0]["logprobs"]
        rows[1] = dict(list(rows[1].items())[:3])
        rows[2] = None
        made(golden, written(tmp_path / "a.json", found))
        shown = describe(tmp_path / "r.h5", "0")["sequence"]["top_logits"]["engine"]
        assert [len(step) for step in shown] == [5, 3, 0]
        assert [entry["id"] for entry in shown[1]] == [int(name) for name in rows[1]]

    def test_a_nan_diverges(self, golden, tmp_path):
        found = answers("offline")
        row = found[0]["outputs"][0]["logprobs"][0]
        row[next(iter(row))]["logprob"] = float("nan")
        assert judged(golden, written(tmp_path / "a.json", found), WITHIN).verdict is Verdict.DIVERGED

    def test_another_token_diverges(self, golden, tmp_path):
        found = answers("sglang")
        own = found[0]["meta_info"]["output_token_logprobs"][0]
        own[1] = (own[1] + 1) % VOCAB
        assert judged(golden, written(tmp_path / "a.json", found), WITHIN).verdict is Verdict.DIVERGED

    def test_fewer_answers_another_prompt_another_order(self, golden, tmp_path):
        found = answers("offline")
        for wrong, word in ((found[:1], "1 answers for"), (found[::-1], "is another than the golden's")):
            with pytest.raises(InputError, match=word):
                made(golden, written(tmp_path / "a.json", wrong))
        llama_like = answers("llama.cpp")
        with pytest.raises(InputError, match="is another than the golden's"):
            made(golden, written(tmp_path / "a.json", llama_like[::-1]))

    def test_what_it_says_it_is(self, golden, tmp_path):
        file = written(tmp_path / "a.json", answers("vllm"))
        with pytest.raises(InputError, match="holds logprobs"):
            made(golden, file, "logits")
        made(golden, file, "logprobs")


def npy(array: np.ndarray) -> bytes:
    held = io.BytesIO()
    np.save(held, array)
    return held.getvalue()


HEAD = b"\x93NUMPY\x01\x00"
LIES = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 512), }"
HOSTILE = {
    "nothing": (b"", "neither npz"),
    "garbage": (os.urandom(100) + b"\0", "neither npz|not a"),
    "a bundle": (b"\x89HDF\r\n\x1a\n" + bytes(100), "is an HDF5 file.*a run bundle goes to 'kdtr diff' as it is"),
    "a pickle": (pickle.dumps([1]), "neither npz"),
    "objects": (npy(np.array([1, 2], object)), "never reads"),
    "an npy of lies": (HEAD + len(LIES).to_bytes(2, "little") + LIES, "its shape needs"),
    "half an npy": (npy(np.zeros((6, VOCAB), np.float32))[:-4], "its shape needs"),
    "an npy and more": (npy(np.zeros((6, VOCAB), np.float32)) + b"\0", "its shape needs"),
    "half a header": (npy(np.zeros(6, np.int32))[:20], "not a whole npy"),
    "a header of code": (HEAD + b"\x0a\x00__import__", "not a whole npy"),
    "big-endian": (npy(np.zeros((6, VOCAB), ">f4")), "little-endian"),
    "columns first": (npy(np.asfortranarray(np.ones((6, VOCAB), np.float32))), "Fortran order"),
    "another vocabulary": (npy(np.zeros((6, VOCAB + 1), np.float32)), "not float32"),
    "a row too few": (npy(np.zeros((3, VOCAB), np.float32)), "3 rows are not those"),
    "a row too many": (npy(np.zeros((7, VOCAB), np.float32)), "7 rows are not those"),
    "three dimensions": (npy(np.zeros((2, 3, VOCAB), np.float32)), "neither logits"),
    "rows of nothing": (npy(np.zeros((6, 0), np.float32)), "neither logits"),
    "bytes without a type": (npy(np.zeros((6, VOCAB), "V4")), "neither logits"),
    "sizes below zero": (
        npy(np.zeros((6, VOCAB), np.float32))
        .replace(f"(6, {VOCAB})".encode(), f"(-6, -{VOCAB})".encode())
        .replace(b"  \n", b"\n"),
        "no list of sizes",
    ),
    "brackets without end": (HEAD + b"\x00\x04" + b"(" * 1024, "not a whole npy"),
    "a scalar": (npy(np.float32(1)), "neither logits"),
    "floats for tokens": (npy(np.zeros(6, np.float32)), "neither logits"),
    "double logits": (npy(np.zeros((6, VOCAB))), "cast it to float32"),
    "tokens outside": (npy(np.full(6, VOCAB, np.int32)), "outside the vocabulary"),
    "half a zip": (b"PK\x03\x04" + b"\0" * 40, "not a whole npz"),
    "half of JSON": (b'[{"choices": [', "not valid JSON"),
    "a list that goes on": (b'[], "x": []', "not valid JSON"),
    "a list of numbers": (b"[1, 2]", "stands where an answer"),
    "a key twice": (b'{"choices": [], "choices": []}', "given twice"),
    "deep": (b"[" * 100000, "nested too deeply|not valid JSON"),
    "no answer": (b"{}", "sequences is null"),
    "no text": (b'{"a": "\xff"}', "not UTF-8"),
}


class TestHostile:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_it_is_one_line_and_exit_2(self, golden, tmp_path, case):
        data, word = HOSTILE[case]
        (tmp_path / "a").write_bytes(data)
        with pytest.raises(InputError, match=word) as caught:
            made(golden, tmp_path / "a")
        assert caught.value.exit_code is Exit.UNJUDGED
        assert "\n" not in str(caught.value)
        assert [p.name for p in tmp_path.iterdir()] == ["a"]

    @pytest.mark.parametrize("change", ["name", "cut", "nan", "twice", "huge"])
    def test_an_npz_that_breaks_the_contract(self, golden, tmp_path, change):
        right = right_answer(golden)
        ids = np.tile(np.arange(5, dtype=np.int32), (6, 1))
        top = {k: v for k, v in right.items() if k != "logits"} | {
            "top_ids": ids,
            "top_values": -ids.astype(np.float32),
        }
        if change == "name":
            right["logit"] = right.pop("logits")
        elif change == "twice":
            ids[3, 1] = ids[3, 0]
            right = top
        np.savez(tmp_path / "a.npz", **right)
        if change == "cut":
            data = (tmp_path / "a.npz").read_bytes()
            (tmp_path / "a.npz").write_bytes(data[: len(data) // 2])
        if change == "nan":
            right["logits"][2, 2] = np.nan
            np.savez(tmp_path / "a.npz", **right)
            assert judged(golden, tmp_path / "a.npz").verdict is Verdict.DIVERGED
            return
        if change == "huge":
            os.environ["KDTR_BUNDLE_MAX_BYTES"] = "1K"
        try:
            with pytest.raises(InputError):
                made(golden, tmp_path / "a.npz")
        finally:
            os.environ.pop("KDTR_BUNDLE_MAX_BYTES", None)
        assert not (tmp_path / "r.h5").exists()

    def test_what_is_no_file(self, golden, tmp_path):
        os.mkfifo(tmp_path / "fifo")
        for name in ("fifo", "none", "."):
            with pytest.raises(InputError):
                import_file(EngineRunOptions(golden, tmp_path / "r.h5", ""), tmp_path / name)
        file = saved(tmp_path / "r.h5", right_answer(golden))
        with pytest.raises(InputError, match="another name"):
            import_file(EngineRunOptions(golden, file, "", force=True), file)

    def test_a_golden_that_samples_needs_tokens(self, tmp_path):
        golden = golden_of(tmp_path / "g.h5", temperature=1.0, embed_weights=False)
        np.save(tmp_path / "a.npy", right_answer(golden)["logits"])
        with pytest.raises(InputError, match="the golden samples"):
            made(golden, tmp_path / "a.npy")
        assert judged(golden, tmp_path / "a.npy", teacher_force=True).verdict is Verdict.IDENTICAL
