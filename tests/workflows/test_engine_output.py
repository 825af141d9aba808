"""What a foreign engine may write, and that anything else is one line and no answer."""

import contextlib
import io
import json
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from engine_cases import question
from safetensors.numpy import save, save_file

from kdtr_cli.errors import EngineError, Exit
from kdtr_cli.workflows.engine_answer import check_about, check_sequence, form_of
from kdtr_cli.workflows.engine_output import read_output
from kdtr_cli.workflows.engines import Answer, sequences_of

pytestmark = pytest.mark.quick

LOGITS = np.arange(24, dtype=np.float32).reshape(3, 8) / 7


def right() -> dict[str, np.ndarray]:
    """Two tokens for the first prompt, one (a stop) for the second."""
    return {
        "tokens/ids": np.array([1, 2, 5], np.int32),
        "tokens/offsets": np.array([0, 2, 3], np.int64),
        "finish": np.array([0, 1], np.int32),
        "logits": LOGITS,
    }


def write(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        save_file(arrays, path)
    return path


def read(path: Path, folder: Path, **changes):
    """All of it, through every check: [(tokens, reason, arrays)], and what the engine says of itself."""
    asked = question(folder, **changes)
    answer = read_output(path, asked)
    check_about(answer.about, "exact")
    found = []
    for index, sequence in enumerate(sequences_of("e", answer, len(asked.prompts))):
        result, arrays = check_sequence(asked, index, sequence)
        found.append((result.tokens.tolist(), result.finish_reason, arrays, form_of(sequence)))
    return found, answer.about


def refused(path: Path, folder: Path, *words: str, **changes) -> None:
    with pytest.raises(EngineError) as caught:
        read(path, folder, **changes)
    message = str(caught.value)
    assert caught.value.exit_code is Exit.FAILED
    assert "\n" not in message
    assert str(folder) not in message
    for word in words:
        assert word in message


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "private"


class TestRead:
    @pytest.mark.parametrize("suffix", [".npz", ".safetensors", ""])
    def test_npz_and_safetensors(self, tmp_path, folder, suffix):
        found, about = read(write(tmp_path / f"out{suffix}", right()), folder)
        assert [f[:2] for f in found] == [([1, 2], "length"), ([5], "stop")]
        assert [f[3] for f in found] == ["full", "full"]
        assert found[0][2]["logits/engine"].tobytes() == LOGITS[:2].tobytes()
        assert found[1][2]["logits/engine"].tobytes() == LOGITS[2:].tobytes()
        assert about == {}

    def test_compressed_npz(self, tmp_path, folder):
        np.savez_compressed(tmp_path / "out.npz", **right())
        assert read(tmp_path / "out.npz", folder)[0][1][2]["logits/engine"].tobytes() == LOGITS[2:].tobytes()

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    def test_one_array_a_sequence(self, tmp_path, folder, suffix):
        arrays = right()
        del arrays["logits"]
        arrays |= {"logits/0": LOGITS[:2], "logits/1": LOGITS[2:].copy()}
        found, _ = read(write(tmp_path / f"out{suffix}", arrays), folder)
        assert found[0][2]["logits/engine"].tobytes() == LOGITS[:2].tobytes()
        assert found[1][2]["logits/engine"].tobytes() == LOGITS[2:].tobytes()

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    @pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
    def test_narrow_logits_lose_no_bit(self, tmp_path, folder, suffix, dtype):
        narrow = LOGITS.astype(dtype)
        narrow[0, :3] = np.nan, np.inf, -np.inf
        found, _ = read(write(tmp_path / f"out{suffix}", {**right(), "logits": narrow}), folder)
        for (low, high), sequence in zip(((0, 2), (2, 3)), found, strict=True):
            array = sequence[2]["logits/engine"]
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, narrow[low:high].astype(np.float32))

    def test_top_logits_come_into_the_contract_s_order(self, tmp_path, folder):
        arrays = right()
        del arrays["logits"]
        arrays["top_ids"] = np.array([[3, 1, 2], [7, 6, 5], [0, 4, 2]], np.int64)
        arrays["top_values"] = np.array([[1, 2, 2], [0, 0, 9], [1, np.nan, 3]], np.float32)
        found, _ = read(write(tmp_path / "out.npz", arrays), folder)
        assert found[0][3] == "top:3"
        assert found[0][2]["logits/engine_top_ids"].tolist() == [[1, 2, 3], [5, 6, 7]]
        assert found[0][2]["logits/engine_top_values"].tolist() == [[2, 2, 1], [9, 0, 0]]
        assert found[1][2]["logits/engine_top_ids"].tolist() == [[4, 2, 0]]
        assert found[1][2]["logits/engine_top_ids"].dtype == np.int32

    def test_tokens_alone_and_empty_outputs(self, tmp_path, folder):
        arrays = {
            "tokens/ids": np.zeros(0, np.int32),
            "tokens/offsets": np.zeros(3, np.int32),
            "finish": np.zeros(2, np.int64),
        }
        for suffix in (".npz", ".safetensors"):
            found, _ = read(write(tmp_path / f"out{suffix}", arrays), folder)
            assert found == [([], "length", {}, "none")] * 2
            with_logits = {**arrays, "logits": np.zeros((0, 8), np.float32)}
            found, _ = read(write(tmp_path / f"out2{suffix}", with_logits), folder)
            assert [f[3] for f in found] == ["full"] * 2

    def test_prompt_logits(self, tmp_path, folder):
        prompt = np.arange(32, dtype=np.float32).reshape(4, 8)
        found, _ = read(write(tmp_path / "out.npz", {**right(), "prompt_logits": prompt}), folder)
        assert found[0][2]["prompt_logits/engine"].tobytes() == prompt[:3].tobytes()
        assert found[1][2]["prompt_logits/engine"].tobytes() == prompt[3:].tobytes()

    def test_json(self, tmp_path, folder):
        rows = LOGITS.tolist()
        rows[0][1] = "nan"
        rows[0][2] = "-inf"
        document = {
            "about": {"name": "mine", "version": "2", "weights_used_sha256": "0" * 64},
            "sequences": [
                {"id": "0", "tokens": [1, 2], "finish_reason": "length", "logits": rows[:2]},
                {"tokens": [5], "finish_reason": "stop", "logits": rows[2:]},
            ],
        }
        (tmp_path / "out.json").write_text(json.dumps(document))
        found, about = read(tmp_path / "out.json", folder)
        assert about == document["about"]
        assert [f[:2] for f in found] == [([1, 2], "length"), ([5], "stop")]
        first = found[0][2]["logits/engine"]
        assert np.isnan(first[0, 1])
        assert first[0, 2] == -np.inf
        assert first[1].tobytes() == LOGITS[1].tobytes()

    def test_about_in_every_container(self, tmp_path, folder):
        text = json.dumps({"name": "mine", "choices": {"tie_rule": "largest"}})
        np.savez(tmp_path / "out.npz", about=text, **right())
        save_file(right(), tmp_path / "out.safetensors", {"about": text})
        for name in ("out.npz", "out.safetensors"):
            assert read(tmp_path / name, folder)[1] == json.loads(text)

    def test_tokens_that_were_fed_must_come_back(self, tmp_path, folder):
        path = write(tmp_path / "out.npz", right())
        fed = (np.array([1, 2], np.int32), np.array([5], np.int32))
        assert len(read(path, folder, forced=fed)[0]) == 2
        refused(path, folder, "not the 2 that the engine was fed", forced=(np.array([1, 3], np.int32), fed[1]))


def changed(**arrays) -> dict[str, np.ndarray]:
    """The right answer with other arrays; None takes one away. A dash stands for the slash of a name."""
    made = right() | {name.replace("__", "/"): array for name, array in arrays.items()}
    return {name: array for name, array in made.items() if array is not None}


TOP = {"logits": None, "top_ids": np.zeros((3, 1), np.int32), "top_values": np.zeros((3, 1), np.float32)}

FAULTS = {
    "no tokens": (changed(tokens__ids=None), ["'tokens/ids' is missing"]),
    "no offsets": (changed(tokens__offsets=None), ["'tokens/offsets' is missing"]),
    "no finish": (changed(finish=None), ["'finish' is missing"]),
    "too few tokens": (changed(tokens__ids=np.array([1, 2], np.int32)), ["tokens/ids is int32 [2]", "[3]"]),
    "too many tokens": (changed(tokens__ids=np.arange(4, dtype=np.int32)), ["tokens/ids is int32 [4]"]),
    "a sequence less": (changed(tokens__offsets=np.array([0, 3])), ["tokens/offsets is int64 [2]", "[3]"]),
    "float tokens": (changed(tokens__ids=np.zeros(3, np.float32)), ["tokens/ids is float32"]),
    "tokens in rows": (changed(tokens__ids=np.zeros((3, 1), np.int32)), ["tokens/ids is int32 [3, 1]"]),
    "an id of the vocabulary's size": (changed(tokens__ids=np.array([1, 8, 5])), ["id 8", "0..7", '"0"']),
    "a negative id": (changed(tokens__ids=np.array([1, 2, -1])), ["id -1", "1"]),
    "an id that wraps to a good one": (changed(tokens__ids=np.array([1, 2**32 + 2, 5])), ["id 4294967298"]),
    "offsets that fall": (changed(tokens__offsets=np.array([0, 4, 3])), ["never fall"]),
    "offsets that begin late": (changed(tokens__offsets=np.array([1, 2, 3])), ["begin with 0"]),
    "another reason": (changed(finish=np.array([0, 2], np.int32)), ["finish holds 2"]),
    "a row less": (changed(logits=LOGITS[:2]), ["logits has shape [2, 8]", "3 rows"]),
    "flat logits": (changed(logits=LOGITS.reshape(-1)), ["logits has shape [24]"]),
    "wrong vocabulary": (changed(logits=LOGITS[:, :7].copy()), ["logits is float32 [2, 7]", "[2, 8]"]),
    "whole-number logits": (changed(logits=LOGITS.astype(np.int32)), ["logits is int32"]),
    "a name of no meaning": (changed(logit=LOGITS), ["'logit' is none of the contract"]),
    "rows of one sequence missing": (changed(logits=None, logits__1=LOGITS[2:].copy()), ["logits/0 is missing"]),
    "rows of a third sequence": (
        changed(logits=None, logits__0=LOGITS[:2], logits__1=LOGITS[2:].copy(), logits__2=LOGITS),
        ["'logits/2' is none"],
    ),
    "rows given twice": (changed(logits__0=LOGITS[:2]), ["both logits and logits/0"]),
    "top values alone": (changed(**{**TOP, "top_ids": None}), ["top_values without top_ids"]),
    "top ids alone": (changed(**{**TOP, "top_values": None}), ["top_ids without top_values"]),
    "both kinds": (changed(**{**TOP, "logits": LOGITS}), ["give the one or the others"]),
    "a top id twice": (
        changed(**{**TOP, "top_ids": np.array([[1, 2], [3, 3], [1, 2]]), "top_values": LOGITS[:, :2].copy()}),
        ["twice", "step 1"],
    ),
    "a top id outside": (changed(**{**TOP, "top_ids": np.array([[8], [0], [0]])}), ["top_ids", "id 8"]),
    "no top ids": (
        changed(**{**TOP, "top_ids": np.zeros((3, 0), np.int64), "top_values": np.zeros((3, 0), np.float32)}),
        ["K from 1 to 8"],
    ),
    "prompt rows missing": (changed(prompt_logits=LOGITS), ["prompt_logits has shape [3, 8]", "4 rows"]),
}


class TestRefused:
    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    @pytest.mark.parametrize("fault", FAULTS)
    def test_arrays(self, tmp_path, folder, fault, suffix):
        arrays, words = FAULTS[fault]
        refused(write(tmp_path / f"out{suffix}", arrays), folder, *words)

    @pytest.mark.parametrize(
        ("name", "words"), [("float64", ["float64"]), ("big", ["little-endian"]), ("fortran", ["Fortran order"])]
    )
    def test_logits_of_another_layout(self, tmp_path, folder, name, words):
        made = {"float64": LOGITS.astype(np.float64), "big": LOGITS.astype(">f4"), "fortran": np.asfortranarray(LOGITS)}
        refused(write(tmp_path / "out.npz", changed(logits=made[name])), folder, *words)

    @pytest.mark.parametrize("name", ["out", "out.npz", "out.safetensors", "out.json"])
    @pytest.mark.parametrize("content", [b"", b"\n", b"garbage", b"\x80\x04\x95" + b"x" * 40, b"\0" * 64, b"[1, 2]"])
    def test_garbage(self, tmp_path, folder, name, content):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, folder, name, "neither npz nor safetensors nor JSON")

    def test_a_name_that_says_otherwise(self, tmp_path, folder):
        (tmp_path / "out.npz").write_bytes(save(right()))
        refused(tmp_path / "out.npz", folder, "holds safetensors; its name says otherwise")

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
    def test_a_file_cut_short_anywhere(self, tmp_path, folder, suffix):
        whole = write(tmp_path / f"whole{suffix}", right()).read_bytes()
        path = tmp_path / f"out{suffix}"
        for length in range(0, len(whole), 13):
            path.write_bytes(whole[:length])
            refused(path, folder)

    @pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".json"])
    def test_damage_anywhere_is_an_answer_or_one_line(self, tmp_path, folder, suffix):
        """Random bytes of a good file replaced: it reads as something of the right form, or it is refused."""
        path = tmp_path / f"out{suffix}"
        if suffix == ".json":
            entry = {"tokens": [1, 2], "finish_reason": "length", "logits": [[1.5, "nan"] * 4] * 2}
            path.write_text(json.dumps({"about": {"name": "e"}, "sequences": [entry, entry]}))
        else:
            write(path, right())
        whole, draw = path.read_bytes(), np.random.default_rng(7)
        for _ in range(150):
            data = bytearray(whole)
            for place in draw.integers(0, len(data), draw.integers(1, 4)):
                data[place] = draw.integers(0, 256)
            path.write_bytes(data)
            with contextlib.suppress(EngineError):
                assert len(read(path, folder)[0]) == 2

    def test_a_flipped_bit_in_an_npz(self, tmp_path, folder):
        path = write(tmp_path / "out.npz", right())
        data = bytearray(path.read_bytes())
        data[data.index(LOGITS.tobytes()) + 40] ^= 1
        path.write_bytes(data)
        refused(path, folder, "not a whole npz file", "CRC")

    def test_pickle_is_never_loaded(self, tmp_path, folder):
        touched = tmp_path / "touched"

        class Evil:
            def __reduce__(self):
                return Path.touch, (touched,)

        for name, word in (("logits", "pickle"), ("about", "allow_pickle=False"), ("tokens/ids", "pickle")):
            np.savez(tmp_path / "out.npz", **changed(**{name: np.array([Evil()], object)}))
            refused(tmp_path / "out.npz", folder, word)
        (tmp_path / "out").write_bytes(pickle.dumps(Evil()))
        refused(tmp_path / "out", folder, "neither")
        assert not touched.exists()

    def test_a_header_that_promises_more_than_there_is(self, tmp_path, folder):
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 8)})
        with zipfile.ZipFile(tmp_path / "out.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("logits.npy", head.getvalue())
        refused(tmp_path / "out.npz", folder, "logits holds 0 bytes")

    def test_a_bomb_is_not_inflated(self, tmp_path, folder, monkeypatch):
        monkeypatch.setenv("KDTR_BUNDLE_MAX_BYTES", "1M")
        np.savez_compressed(tmp_path / "out.npz", logits=np.zeros((1 << 18, 8), np.float32))
        refused(tmp_path / "out.npz", folder, "declares 8388608 bytes", "KDTR_BUNDLE_MAX_BYTES")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("{", ["not valid JSON"]),
            ('{"sequences": NaN}', ["NaN is not a JSON number"]),
            ('{"sequences": []}', ["a list of 0", "2, one a prompt"]),
            ('{"tokens": []}', ['key "tokens"']),
            ('{"sequences": 1, "sequences": 2}', ["given twice"]),
            ('{"sequences": [1, 2]}', ["sequences[0] is 1"]),
            ("[" * 5, ["neither"]),
            ('{"a":' * 90000, ["nested too deeply"]),
        ],
    )
    def test_json_documents(self, tmp_path, folder, text, words):
        (tmp_path / "out.json").write_text(text)
        refused(tmp_path / "out.json", folder, *words)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"tokens": [1.5, 2]}, ["sequences[0].tokens"]),
            ({"tokens": [True, 2]}, ["sequences[0].tokens"]),
            ({"tokens": [1, 10**30]}, ["sequences[0].tokens"]),
            ({"tokens": None}, ["sequences[0].tokens is null"]),
            ({"finish_reason": "eos"}, ['"eos"', "length or stop"]),
            ({"finish_reason": ["stop"]}, ['["stop"]', "length or stop"]),
            ({"id": "1"}, ['the id "1"', 'the prompt "0"']),
            ({"logprobs": []}, ['key "logprobs"']),
            ({"logits": [[0.0] * 8]}, ["logits is float32 [1, 8]", "[2, 8]"]),
            ({"logits": [[0.0] * 8, [0.0] * 7]}, ["different lengths"]),
            ({"logits": [[None] * 8] * 2}, ["holds null"]),
            ({"logits": [["1"] * 8] * 2}, ['holds "1"']),
            ({"logits": [[10**400] * 8] * 2}, ["no number"]),
            ({"logits": 3}, ["not a list of rows"]),
        ],
    )
    def test_json_entries(self, tmp_path, folder, change, words):
        first = {"tokens": [1, 2], "finish_reason": "length", **change}
        document = {"sequences": [first, {"tokens": [5], "finish_reason": "stop"}]}
        (tmp_path / "out.json").write_text(json.dumps(document))
        refused(tmp_path / "out.json", folder, *words)

    def test_a_huge_json_is_not_read(self, tmp_path, folder):
        with open(tmp_path / "out.json", "wb") as file:
            file.write(b"{")
            file.truncate((64 << 20) + 1)
        refused(tmp_path / "out.json", folder, "67108865 bytes")
        (tmp_path / "out.json").write_text('{"a": [' + "1," * 4_000_001 + "1]}")
        refused(tmp_path / "out.json", folder, "more than 4000000 values")

    @pytest.mark.parametrize(
        ("about", "words"),
        [
            ({"weights_used_sha256": "x"}, ["about.weights_used_sha256", "64"]),
            ({"weights": "x"}, ['key "weights"']),
            ({"name": "a\nb"}, ["about.name"]),
            ({"name": ""}, ["about.name"]),
            ({"version": 3}, ["about.version is 3"]),
            ({"device": "x" * 201}, ["about.device"]),
            ({"choices": {"tie_rule": 1}}, ["about.choices"]),
            ({"tier": "bf16"}, ["--tier bf16"]),
        ],
    )
    def test_about(self, tmp_path, folder, about, words):
        save_file(right(), tmp_path / "out", {"about": json.dumps(about)})
        refused(tmp_path / "out", folder, *words)

    def test_about_that_is_no_json_object(self, tmp_path, folder):
        save_file(right(), tmp_path / "out", {"about": "mine"})
        refused(tmp_path / "out", folder, "about", "not valid JSON")
        np.savez(tmp_path / "out.npz", about=np.zeros(3), **right())
        refused(tmp_path / "out.npz", folder, "about is float64 [3], not a text")


class TestCount:
    @pytest.mark.parametrize(("given", "said"), [(0, "0 sequences"), (1, "1 sequences"), (3, "more than 2")])
    def test_another_number_of_sequences(self, given, said):
        with pytest.raises(EngineError, match=f"engine e answered {said}"):
            list(sequences_of("e", Answer("", [object()] * given), 2))
