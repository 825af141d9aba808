"""The JSON of servers as tokens and log-probabilities: every form, every hole in it, and nothing that is guessed."""

import math

import numpy as np
import pytest

from kdtr_cli.errors import EngineError
from kdtr_cli.workflows.engine_logprobs import Listed, as_sequences, read_answers

pytestmark = pytest.mark.quick

TOP = [{5: -0.1, 7: -2.5, 1: -4.0}, {7: -0.2, 5: -1.5, 0: -3.0}]
TOKENS = [5, 7]


def completions(**changes):
    """vLLM's /v1/completions with return_tokens_as_token_ids."""
    logprobs = {
        "text_offset": [0, 1],
        "tokens": [f"token_id:{t}" for t in TOKENS],
        "token_logprobs": [-0.1, -0.2],
        "top_logprobs": [{f"token_id:{i}": v for i, v in row.items()} for row in TOP],
    }
    choice = {"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs, **changes}
    return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": 3}}


def content(i, row):
    top = [{"id": t, "token": "x", "bytes": [120], "logprob": v} for t, v in row.items()]
    return {"id": TOKENS[i], "token": "x", "bytes": [120], "logprob": row[TOKENS[i]], "top_logprobs": top}


def llama(**changes):
    listed = [content(i, row) for i, row in enumerate(TOP)]
    document = {"content": "ab", "tokens": TOKENS, "stop_type": "limit", "tokens_evaluated": 3}
    return {**document, "completion_probabilities": listed, **changes}


def llama_completions():
    """llama.cpp's /v1/completions."""
    logprobs = {"content": [content(i, row) for i, row in enumerate(TOP)]}
    return {"choices": [{"index": 0, "text": "ab", "finish_reason": "length", "logprobs": logprobs}]}


def sglang(**changes):
    meta = {
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 7, "b"]],
        "output_top_logprobs": [[[v, t, None] for t, v in row.items()] for row in TOP],
        **changes,
    }
    return {"text": "ab", "output_ids": TOKENS, "meta_info": meta}


def request_output(**changes):
    """vLLM's RequestOutput, by its own fields."""
    logprobs = [
        {str(t): {"logprob": v, "rank": rank, "decoded_token": "x"} for rank, (t, v) in enumerate(row.items(), 1)}
        for row in TOP
    ]
    output = {"index": 0, "text": "ab", "token_ids": TOKENS, "logprobs": logprobs, "finish_reason": "length", **changes}
    return {"request_id": "0", "prompt_token_ids": [1, 2, 3], "outputs": [output]}


def plain_request_output():
    """As people dump it: a number an id."""
    return request_output(logprobs=[{str(t): v for t, v in row.items()} for row in TOP])


FORMS = [completions, llama, llama_completions, sglang, request_output, plain_request_output]


def one(document) -> Listed:
    (listed,) = read_answers(document, "answer")
    return listed


class TestForms:
    @pytest.mark.parametrize("form", FORMS)
    def test_they_say_the_same(self, form):
        listed = one(form())
        assert (listed.tokens, listed.finish, listed.rows) == (TOKENS, "length", TOP)

    @pytest.mark.parametrize("form", FORMS)
    def test_what_they_say_of_the_prompt(self, form):
        listed = one(form())
        assert listed.prompt == ([1, 2, 3] if "request_output" in form.__name__ else None)
        assert listed.prompt_length in (None, 3)

    def test_choices_come_in_the_order_of_their_index(self):
        first, second = completions(index=1)["choices"][0], completions(index=0, finish_reason="stop")["choices"][0]
        answers = read_answers({"choices": [first, second], "usage": {"prompt_tokens": 6}}, "answer")
        assert [(a.finish, a.prompt_length) for a in answers] == [("stop", None), ("length", None)]

    def test_chat_names_ids_as_well(self):
        entry = {"token": "token_id:5", "logprob": -0.1, "bytes": None}
        logprobs = {"content": [{**entry, "top_logprobs": [entry, {**entry, "token": "token_id:7", "logprob": -2}]}]}
        choice = {"index": 0, "message": {}, "finish_reason": "stop", "logprobs": logprobs}
        assert one({"choices": [choice]}).rows == [{5: -0.1, 7: -2.0}]

    def test_without_a_top_the_token_s_own_value_is_what_there_is(self):
        document = completions()
        document["choices"][0]["logprobs"]["top_logprobs"] = None
        assert one(document).rows == [{5: -0.1}, {7: -0.2}]
        assert one(sglang(output_top_logprobs=None)).rows == [{5: -0.1}, {7: -0.2}]

    def test_tokens_alone_are_tokens_alone(self):
        assert one(request_output(logprobs=None)).rows is None


NOTHING = [None, -9999.0, -9999, -1e30, -3.4028234663852886e38, "-inf", "-Infinity", -math.inf]


class TestNoValue:
    @pytest.mark.parametrize("value", NOTHING)
    def test_an_id_without_a_value_is_not_there(self, value):
        document = request_output()
        document["outputs"][0]["logprobs"][0]["7"]["logprob"] = value
        assert one(document).rows == [{5: -0.1, 1: -4.0}, TOP[1]]
        document = completions()
        document["choices"][0]["logprobs"]["top_logprobs"][0]["token_id:7"] = value
        assert one(document).rows == [{5: -0.1, 1: -4.0}, TOP[1]]
        document = llama()
        document["completion_probabilities"][0]["top_logprobs"][1]["logprob"] = value
        assert one(document).rows == [{5: -0.1, 1: -4.0}, TOP[1]]

    def test_just_above_it_is_a_value(self):
        document = request_output()
        document["outputs"][0]["logprobs"][0]["7"]["logprob"] = -9998.5
        assert one(document).rows[0][7] == -9998.5

    @pytest.mark.parametrize("value", ["nan", "NaN", math.nan])
    def test_a_nan_stays(self, value):
        document = request_output()
        document["outputs"][0]["logprobs"][0]["7"]["logprob"] = value
        assert math.isnan(one(document).rows[0][7])

    def test_a_row_may_be_null(self):
        document = request_output()
        document["outputs"][0]["logprobs"][1] = None
        rows = as_sequences([one(document)], True)[0]
        assert rows.top_counts.tolist() == [3, 0]


def spoiled(form, change):
    document = form()
    change(document)
    return document


def logprobs_of(document):
    return document["choices"][0]["logprobs"]


REFUSED = {
    "text of a token": (completions, lambda d: logprobs_of(d).update(tokens=[" a", "b"]), "by its text"),
    "text in the top": (completions, lambda d: logprobs_of(d)["top_logprobs"][1].update({" a": -1.0}), "by its text"),
    "an id that is a text": (llama, lambda d: d["completion_probabilities"][0].pop("id"), "by its text"),
    "old llama.cpp": (
        llama, lambda d: d.update(completion_probabilities=[{"content": "a", "probs": []}]), "after sampling",
    ),
    "after sampling": (llama, lambda d: d["completion_probabilities"][0].update(top_probs=[]), "after sampling"),
    "other ids": (completions, lambda d: d["choices"][0].update(token_ids=[5, 8]), "name other tokens"),
    "a token without probabilities": (llama, lambda d: d.update(tokens=[5, 7, 9]), "3 ids"),
    "a row short": (completions, lambda d: logprobs_of(d)["top_logprobs"].pop(), "2 tokens, but"),
    "a row too many": (sglang, lambda d: d["meta_info"]["output_top_logprobs"].append([]), "2 tokens, but"),
    "an id twice": (
        llama, lambda d: d["completion_probabilities"][0]["top_logprobs"].append({"id": 7, "logprob": -3}), "7 twice",
    ),
    "one id in two spellings": (
        request_output, lambda d: d["outputs"][0]["logprobs"][0].update({"07": -3.0}), "7 twice",
    ),
    "a number that is a text": (
        sglang, lambda d: d["meta_info"]["output_top_logprobs"][0].append(["x", 9, None]), "no number",
    ),
    "a value that is a list": (
        request_output, lambda d: d["outputs"][0]["logprobs"][0].update({"7": [1]}), "no number",
    ),
    "a huge integer": (
        request_output, lambda d: d["outputs"][0]["logprobs"][0].update({"7": 10**400}), "no number",
    ),
    "a boolean id": (sglang, lambda d: d["meta_info"]["output_token_logprobs"][0].__setitem__(1, True), "no token id"),
    "a negative id": (request_output, lambda d: d["outputs"][0].update(token_ids=[5, -7]), "no token id"),
    "an id of text": (request_output, lambda d: d["outputs"][0]["logprobs"][0].update({"²": -1.0}), "no token id"),
    "another end": (completions, lambda d: d["choices"][0].update(finish_reason="content_filter"), "content_filter"),
    "no end": (sglang, lambda d: d["meta_info"].pop("finish_reason"), "ended by null"),
    "no logprobs": (completions, lambda d: d["choices"][0].update(logprobs=None), "not an object"),
    "two outputs": (request_output, lambda d: d["outputs"].append(d["outputs"][0]), "n=1"),
    "an index twice": (completions, lambda d: d["choices"].append(d["choices"][0]), "its index is"),
    "cut short": (llama, lambda d: d.update(truncated=True), "cut the prompt short"),
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_it_is_one_line(self, case):
        form, change, word = REFUSED[case]
        with pytest.raises(EngineError, match=word) as caught:
            read_answers(spoiled(form, change), "answer")
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("answer")

    @pytest.mark.parametrize("document", [{}, {"choices": 1}, {"choices": [1]}, {"outputs": {}}, {"meta_info": None}])
    def test_what_is_no_answer(self, document):
        with pytest.raises(EngineError):
            read_answers(document, "answer")


class TestSequences:
    def test_rows_of_other_lengths_get_counts(self):
        listed = [Listed([1], "stop", [{1: -0.1, 2: -3.0}]), Listed([4], "length", [{4: -0.5}])]
        first, second = as_sequences(listed, True)
        assert first.top_ids.shape == second.top_ids.shape == (1, 2)
        assert (first.top_counts.tolist(), second.top_counts.tolist()) == ([2], [1])
        assert second.top_ids[0, 0] == 4
        assert second.top_values[0, 0] == np.float32(-0.5)

    def test_a_token_that_is_there_only_because_it_was_chosen_is_left_out(self):
        """vLLM lists the top 2 and the token: of what lies between -1.6 and -7 nothing is known."""
        row = {3: -0.5, 2: -1.6, 9: -7.0}
        (sequence,) = as_sequences([Listed([9], "length", [row])], False)
        assert sequence.top_ids.tolist() == [[3, 2]]
        (sequence,) = as_sequences([Listed([2], "length", [row])], False)
        assert sequence.top_counts.tolist() == [3]

    def test_a_sampled_token_s_value_by_itself_bounds_nothing(self):
        listed = [Listed([9], "length", [{9: -7.0}])]
        assert as_sequences(listed, False)[0].top_counts.tolist() == [0]
        assert as_sequences(listed, True)[0].top_counts.tolist() == [1]
