"""Stop strings: held back while they may still end the answer, let out when they did not."""

from __future__ import annotations

import pytest

from services.recipe.deltas import Delta, Kind
from services.recipe.trim import StopTrim


def content(text: str) -> list[Delta]:
    return [Delta(Kind.CONTENT, text)]


def said(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_that_may_begin_a_stop_string_waits() -> None:
    trim = StopTrim(["STOP"])
    assert said(trim.push(content("abcST"))) == "abc"
    assert said(trim.push(content("xy"))) == "STxy"


def test_the_stop_string_that_ended_the_answer_is_dropped_with_what_follows() -> None:
    trim = StopTrim(["STOP"])
    assert said(trim.push(content("abc STOP and"))) == "abc "
    assert said(trim.finish([], "STOP")) == ""


def test_a_stop_string_the_engine_passed_over_comes_out() -> None:
    trim = StopTrim(["STOP"])
    assert said(trim.push(content("a STOP"))) == "a "
    assert said(trim.push(content(" b"))) == "STOP b"
    assert said(trim.finish([], "")) == ""


def test_an_unfinished_stop_string_comes_out_at_the_end() -> None:
    trim = StopTrim(["STOP"])
    trim.push(content("a STO"))
    assert said(trim.finish(content("!"), "")) == "STO!"


def test_a_stop_string_does_not_reach_from_reasoning_into_content() -> None:
    trim = StopTrim(["ab"])
    assert trim.push([Delta(Kind.REASONING, "xa")]) == [Delta(Kind.REASONING, "x")]
    assert trim.push(content("b")) == [Delta(Kind.REASONING, "a"), Delta(Kind.CONTENT, "b")]


def test_tool_calls_pass_untouched() -> None:
    trim = StopTrim(["ab"])
    call = Delta(Kind.TOOL_CALL, "ab", call_id="c", name="f")
    assert trim.push([call]) == [call]


def test_overlapping_beginnings_hold_the_longest() -> None:
    trim = StopTrim(["aab", "ab"])
    assert said(trim.push(content("aaa"))) == "a"
    assert said(trim.push(content("b"))) == ""
    assert said(trim.finish([], "aab")) == ""


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_text_without_a_stop_string_is_not_delayed(stops: list[str]) -> None:
    assert said(StopTrim(stops).push(content("hello"))) == "hello"


def spelled(*tokens: str) -> Delta:
    """Content that came as these tokens, with an entry for each."""
    entries = tuple({"token": token, "bytes": list(token.encode())} for token in tokens)
    return Delta(Kind.CONTENT, "".join(tokens), entries)


def shown(deltas: list[Delta]) -> list[object]:
    return [entry["token"] for delta in deltas for entry in delta.logprobs]


@pytest.mark.parametrize("cuts", [[], [1], [2], [3], [4], [1, 2, 3, 4]])
def test_log_probabilities_of_a_stop_string_go_with_it_wherever_batches_were_cut(cuts: list[int]) -> None:
    tokens, trim, told = ["é", "xS", "T", "O", "P"], StopTrim(["STOP"]), list[Delta]()
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        told += trim.push([spelled(*tokens[start:stop])])
    told += trim.finish([], "STOP")
    assert (said(told), shown(told)) == ("éx", ["é", "xS"])


def test_log_probabilities_that_were_held_back_come_out_with_their_text() -> None:
    trim = StopTrim(["STOP"])
    assert shown(trim.push([spelled("a", "S", "T")])) == ["a"]
    assert shown(trim.push([spelled("b")])) == ["S", "T", "b"]


def test_tokens_that_do_not_spell_the_text_stay_with_its_first_part() -> None:
    delta = Delta(Kind.CONTENT, "aST", ({"token": "?", "bytes": [1]}, {"token": "!", "bytes": None}))
    assert shown(StopTrim(["STOP"]).push([delta])) == ["?", "!"]
