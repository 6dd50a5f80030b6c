"""Tokens drawn where logits are: those of the host's sampler, row by row, whatever else is asked for beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.sampling import logits as module
from engine.sampling.drawing import drawn, flat, following, named, parameters
from engine.sampling.logits import Logits
from engine.sampling.params import SamplingParams
from engine.sampling.sampler import Choice, Row, choose
from kernels.likeliest import likeliest
from kernels.reference.sampling import SamplingRows, sample
from kernels.sampler import sampler_of

VOCAB, CPU = 640, torch.device("cpu")
ASKED = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(top_k=20),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.6, top_k=50, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1e-30),
)
OTHERS = (
    SamplingParams(temperature=0.8, logprobs=2),
    SamplingParams(temperature=0.8, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(11,)),
)


def rows_of(asked: Sequence[SamplingParams], count: int) -> list[Row]:
    return [Row(asked[index % len(asked)], 3 + 7919 * index, (1, 2), [4] * (index % 5)) for index in range(count)]


def random(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(rows)) * 3


def on_device(logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Logits:
    """Logits as if they were elsewhere, with the definition as what draws there."""
    monkeypatch.setattr(module, "sampler_of", lambda _device: sample)
    made = Logits(logits)
    made._best = likeliest(logits).numpy()
    return made


def test_drawn_tokens_are_the_hosts() -> None:
    rows, logits = rows_of(ASKED, 70), random(70)
    expected = [choice.token for choice in choose(logits.numpy(), rows, ())]
    assert drawn(sample, logits, rows).tolist() == expected
    assert len(set(expected)) > 20


def test_parameters_are_those_of_the_rows() -> None:
    rows = [
        Row(SamplingParams(temperature=0.5, top_k=2**31 - 1, top_p=0.25, min_p=0.125), 2**64 - 1, (), [0] * 3),
        Row(SamplingParams(temperature=2.0, top_k=0), 5, (), []),
    ]
    found = parameters(rows, CPU)
    expected = SamplingRows(
        torch.tensor([0.5, 2.0]), torch.tensor([2**31 - 1, 0], dtype=torch.int32), torch.tensor([0.25, 1.0]),
        torch.tensor([0.125, 0.0]), torch.tensor([-1, 5]), torch.tensor([3, 0]),
    )  # fmt: skip
    for name in SamplingRows.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_rows_of_which_more_is_wanted_and_rows_that_are_nobodys_draw_nothing() -> None:
    rows = rows_of((*OTHERS, *ASKED[:2]), 5)
    found = named(torch.from_numpy(flat(rows, 8)))
    assert found.temperature.tolist() == pytest.approx([0, 0, 0, 0.7, 1.3, 0, 0, 0])
    assert found.draws.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


def test_the_next_step_draws_one_further() -> None:
    rows = rows_of(ASKED, 5)
    longer = [Row(row.params, row.seed, row.prompt, [*row.output, 7]) for row in rows]
    assert np.array_equal(following(flat(rows, 8), 5), flat(longer, 8))


def test_tokens_that_were_drawn_with_the_step_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which more is wanted are the host's all the same."""
    rows, logits = rows_of((*ASKED, *OTHERS), 20), random(20)
    expected = choose(logits.numpy(), rows, (1,))
    monkeypatch.setattr(module, "sampler_of", lambda _device: pytest.fail)
    made = Logits(logits, drawn=True)
    tokens = [0 if choice.token is None else choice.token for choice in expected]
    made._best = np.array([tokens, [1] * 20])
    assert made.choose(list(range(20)), rows, (1,)) == expected


def test_a_mixed_batch_has_the_choices_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rows there, others here, rows that are not finite nowhere; places in no order."""
    rows, logits = rows_of((*ASKED, *OTHERS), 40), random(60)
    places = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:40].tolist()
    for place, value in ((places[3], torch.nan), (places[7], torch.inf), (places[17], -torch.inf)):
        logits[place, 5] = value
    found = on_device(logits, monkeypatch).choose(places, rows, (1,))
    assert found == choose(logits.numpy()[places], rows, (1,))
    assert sum(choice == Choice(None, None) for choice in found) == 3


def test_only_rows_that_need_the_host_come_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def here(logits: np.ndarray, rows: Sequence[Row], eos: Sequence[int]) -> list[Choice]:
        seen.append(len(rows))
        return choose(logits, rows, eos)

    monkeypatch.setattr(module, "choose", here)
    logits = on_device(random(20), monkeypatch)
    logits.choose(list(range(20)), rows_of(ASKED, 20), ())
    assert not seen
    logits.choose(list(range(20)), [*rows_of(ASKED, 17), *rows_of(OTHERS, 3)], ())
    assert seen == [3]


def test_nothing_draws_on_a_cpu() -> None:
    assert sampler_of(CPU) is None
