"""Commit: what a finished forward pass means for its sequences. Knows whose logits are whose; frees nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items

from engine.assembly import Rows
from engine.errors import BadLogits
from engine.events import ChunkDone, EntriesReady, Event, Failed, FirstToken, TokensOut
from engine.sampling.logits import Logits
from engine.sampling.logprobs import TokenLogprob, token_logprobs
from engine.sampling.params import SamplingState
from engine.sampling.sampler import Choice
from engine.sealing import Sealer
from engine.sequence import Role, Sequence
from engine.stats import Counters


class Committer:
    """Advances sequences, seals their blocks, draws their tokens and reports it."""

    def __init__(self, eos_token_ids: Items[int], sealer: Sealer, counters: Counters) -> None:
        self._eos, self._sealer, self._counters = eos_token_ids, sealer, counters

    def commit(self, rows: Items[Rows], logits: Logits) -> list[Event]:
        """Events of one step. `logits` in the order of `rows`. A failed sequence is only reported."""
        events: list[Event] = []
        drawn: list[Sequence] = []
        places: list[int] = []
        place = 0
        for row in rows:
            place += self._advance(row, logits, place, events)
            if row.samples:
                drawn.append(row.chunk.sequence)
                places.append(place)
                place += 1
        if drawn:
            choices = logits.choose(places, [sequence.row for sequence in drawn], self._eos)
            events.extend(self._token(sequence, choice) for sequence, choice in zip(drawn, choices, strict=True))
        return events

    def _advance(self, row: Rows, logits: Logits, place: int, events: list[Event]) -> int:
        """Account for one chunk, whose logits begin at `place`; returns how many its prompt log probabilities used."""
        chunk, sequence = row.chunk, row.chunk.sequence
        sequence.computed_tokens = chunk.end
        self._counters.computed_tokens += chunk.count
        self._sealer.seal(sequence, decoding=bool(sequence.output) and chunk.count == 1)
        if sequence.role is Role.PREFILL:
            events.append(ChunkDone(sequence.request_id, chunk.end, sequence.total_tokens))
        if sequence.entries_only and chunk.end == sequence.total_tokens:
            events.append(self._entries_ready(sequence))
        if row.prompt_positions:
            followers = [sequence.tokens[position + 1] for position in row.prompt_positions]
            top = sequence.sampling.prompt_logprobs or 0
            used = logits.array[place : place + len(followers)]
            sequence.prompt_logprobs.extend(token_logprobs(used, followers, [top] * len(followers)))
        return len(row.prompt_positions)

    def _token(self, sequence: Sequence, choice: Choice) -> Event:
        if choice.token is None:
            return Failed(sequence.request_id, BadLogits(sequence.request_id))
        index = len(sequence.output)
        sequence.tokens.append(choice.token)
        sequence.output.append(choice.token)
        sequence.stop = sequence.watch.push(choice.token)
        self._counters.output_tokens += 1
        if sequence.role is not Role.DECODE and not sequence.begun:
            return self._first(sequence, choice)
        logprobs = None if choice.logprob is None else (choice.logprob,)
        return TokensOut(sequence.request_id, index, (choice.token,), logprobs)

    def _begin(self, sequence: Sequence) -> None:
        sequence.begun = True
        self._counters.prompt_tokens += sequence.prompt_tokens
        self._counters.cached_tokens += sequence.cached_tokens or 0

    def _entries_ready(self, sequence: Sequence) -> EntriesReady:
        self._begin(sequence)
        state = SamplingState(sequence.seed, len(sequence.output))
        return EntriesReady(sequence.request_id, state, sequence.cached_tokens or 0)

    def _first(self, sequence: Sequence, choice: Choice) -> FirstToken:
        self._begin(sequence)
        return FirstToken(
            request_id=sequence.request_id,
            token=sequence.output[-1],
            logprob=choice.logprob,
            state=SamplingState(sequence.seed, len(sequence.output)),
            prompt_logprobs=_prompt_logprobs(sequence),
            cached_tokens=sequence.cached_tokens or 0,
            held=sequence.role is Role.PREFILL,
            stop=sequence.stop,
        )


def _prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    return None if sequence.sampling.prompt_logprobs is None else (None, *sequence.prompt_logprobs)
