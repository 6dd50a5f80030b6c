"""Stop conditions and incremental text."""

from itertools import combinations, pairwise

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from engine.detokenize import Detokenizer, open_tokenizer
from engine.errors import InvalidParameter
from engine.sampling.params import SamplingParams
from engine.stops import FinishReason, StopMatch, StopWatch


def bytes_to_unicode() -> dict[int, str]:
    """The byte alphabet of byte-level BPE: printable bytes are themselves, the others move above 255."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + place) for place, byte in enumerate(moved)}


ALPHABET = bytes_to_unicode()


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    """One token per byte, with a byte-level decoder like the model's."""
    tokenizer = Tokenizer(BPE(vocab={ALPHABET[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pieces_at(text: str, cuts: tuple[int, ...]) -> list[str]:
    edges = (0, *cuts, len(text))
    return [text[start:end] for start, end in pairwise(edges)]


def watch_pieces(pieces: list[str], params: SamplingParams) -> tuple[int, StopMatch | None] | None:
    """Feed one token per piece; (index of the stopping token, match)."""
    watch = StopWatch(params, (), lambda tokens: "".join(pieces[token] for token in tokens))
    for token in range(len(pieces)):
        stop = watch.push(token)
        if stop is not None:
            return token, stop.match
    return None


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_stop_string_is_found_at_the_token_that_completes_it_however_tokens_split(count: int) -> None:
    text, params = "say ENDE now", SamplingParams(stop=("END",), max_tokens=99)
    complete = text.index("END") + len("END")
    for cuts in combinations(range(1, len(text)), count):
        pieces = pieces_at(text, cuts)
        found = watch_pieces(pieces, params)
        ends = [sum(map(len, pieces[: index + 1])) for index in range(len(pieces))]
        completing = next(index for index, end in enumerate(ends) if end >= complete)
        assert found == (completing, StopMatch(None, "END", text.index("END")))


def test_the_earliest_of_several_stop_strings_is_reported() -> None:
    params = SamplingParams(stop=("now", "E", "ay"), max_tokens=99)
    assert watch_pieces(["say ENDE now"], params) == (0, StopMatch(None, "ay", 1))


def test_a_near_miss_does_not_stop() -> None:
    assert watch_pieces(["EN", "EN", "ND", "EN"], SamplingParams(stop=("END",), max_tokens=99)) is None


def test_bytes_of_one_character_stop_at_its_last_byte(byte_tokenizer: Tokenizer) -> None:
    watch = StopWatch(SamplingParams(stop=("é€",), max_tokens=99), (), byte_tokenizer.decode)
    encoded = "aé€b".encode()
    stops = [watch.push(byte) for byte in encoded]
    first = next(index for index, stop in enumerate(stops) if stop is not None)
    assert encoded[: first + 1].decode() == "aé€"
    assert stops[first] is not None and stops[first].match == StopMatch(None, "é€", 1)


@pytest.mark.parametrize("text", ["plain", "naïve — 😀 done", "日本語" * 30, "a" * 200, "\ufffd x \ufffd\ufffd y"])
def test_text_by_bytes_is_the_whole_text(byte_tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(byte_tokenizer.decode)
    pieces = [detokenizer.push(byte) for byte in (text + ".").encode()]
    assert "".join(pieces) == text + "."


def test_bytes_that_never_form_a_character_do_not_hold_text_back_for_ever(byte_tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_tokenizer.decode)
    assert any(detokenizer.push(0xFF) for _ in range(64))


def test_end_and_stop_tokens_and_length() -> None:
    params = SamplingParams(stop_token_ids=(7,), max_tokens=3)
    assert StopWatch(params, (1,), None).push(1) is not None
    assert StopWatch(SamplingParams(ignore_eos=True), (1,), None).push(1) is None
    stop = StopWatch(SamplingParams(ignore_eos=True, stop_token_ids=(1,)), (1,), None).push(1)
    assert stop is not None and stop.match == StopMatch(1, None, None)
    watch = StopWatch(params, (1,), None)
    assert [watch.push(token) for token in (4, 5)] == [None, None]
    last = watch.push(6)
    assert last is not None and (last.reason, last.match) == (FinishReason.LENGTH, None)


def test_stop_strings_wait_for_min_tokens() -> None:
    params = SamplingParams(stop=("ab",), min_tokens=3, max_tokens=99)
    assert watch_pieces(["ab", "ab", "x", "a", "b"], params) == (4, StopMatch(None, "ab", 5))
    assert watch_pieces(["x", "a", "b"], params) == (2, StopMatch(None, "ab", 1))


def test_a_stop_string_passed_before_min_tokens_is_not_found_again_later() -> None:
    params = SamplingParams(stop=("ab", "a long one"), min_tokens=2, max_tokens=99)
    assert watch_pieces(["ab", "x", "y"], params) is None


def test_a_missing_or_broken_tokenizer_is_named(tmp_path) -> None:
    with pytest.raises(InvalidParameter, match=r"tokenizer\.json is missing"):
        open_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidParameter, match=r"tokenizer\.json cannot be read"):
        open_tokenizer(tmp_path / "tokenizer.json")
