"""Pieces of training: packing, schedule, optimizer, and the judge that needs no decoding."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from models.nano.config import NanoConfig
from models.nano.data.mixture import TrainingMixture
from models.nano.data.packing import batch_of, blocks_of, rows_of
from models.nano.data.render import Renderer, Sample
from models.nano.initial import hash_routes, initialise
from models.nano.judge import accuracy, make_exam
from models.nano.model import Nano, Rows
from models.nano.optimizer import Optimizer, Rates, orthogonalised, rounded
from models.nano.schedule import phase_at


def samples(renderer: Renderer, number: int) -> list[Sample]:
    mixture = TrainingMixture(renderer.count, random.Random(5))
    return [renderer.sample(mixture.next(max_distance=300)) for _ in range(number)]


def test_packing_keeps_every_sample_whole_on_a_block_of_its_own(renderer: Renderer) -> None:
    wanted = samples(renderer, 60)
    rows = list(rows_of(wanted, 8))
    batch = batch_of(rows, 8)
    placed = [sample for row in rows for sample in row]
    assert sorted(map(id, placed)) == sorted(id(sample) for sample in wanted if blocks_of(sample) <= 8)
    number = 0
    for row, members in enumerate(rows):
        start = 0
        for place, sample in enumerate(members):
            number += 1
            end = start + len(sample.ids)
            assert batch.ids[row, start:end].tolist() == sample.ids
            assert batch.targets[row, start : end - 1].tolist() == sample.ids[1:]
            assert (batch.documents[row, start // 128 : start // 128 + blocks_of(sample)] == place).all()
            assert (batch.marks[row] == number).sum() == len(sample.ids) - sample.prompt_length
            start += 128 * blocks_of(sample)
    assert (batch.weights[batch.ids == 2] == 0).all()


def test_probes_prefer_blocks_far_into_a_document_with_answers() -> None:
    sample = Sample([5] * 1000, [12] * 960 + [255] * 40, 960)
    batch = batch_of([[sample]] * 200, 8)
    probes = batch.probes(np.random.default_rng(0), 1)
    assert (probes == 7).mean() > 0.5
    assert (probes == 0).mean() < 0.02


def test_schedule_warms_up_reaches_full_distance_then_sparse_then_quantized_then_cools() -> None:
    phases = [phase_at(step, 8600) for step in range(0, 8600, 100)]
    assert phases[0].factor < 0.01
    assert [p.distance for p in phases] == sorted(p.distance for p in phases)
    assert phases[-1].distance == 4000
    assert not phases[20].sparse
    assert phases[-1].sparse
    assert phases[-1].quantize
    assert all(p.sparse for p in phases if p.quantize)
    assert phases[-1].factor < 0.1
    assert max(p.factor for p in phases) == 1.0


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 64, 16), (2, 16, 64)])
def test_orthogonalised_updates_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(update, steps=8))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_a_step_publishes_values_that_storage_reproduces(tiny: NanoConfig) -> None:
    model = Nano(tiny)
    initialise(model, 0)
    optimizer = Optimizer(model, Rates())
    optimizer.publish(True)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rows = Rows(torch.randint(3, 256, (1, 128)), torch.zeros(1, 1, dtype=torch.int32))
    model.logits(rows).square().mean().backward()
    optimizer.step(1.0, quantize=True)
    from models.nano.export import storage_of

    assert any(not torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    for name, weight in model.named_parameters():
        assert torch.equal(rounded(weight.detach(), storage_of(name), True), weight), name


def test_optimizer_state_resumes_exactly(tiny: NanoConfig) -> None:
    def stepped(model: Nano, optimizer: Optimizer) -> None:
        for seed, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        optimizer.step(1.0, quantize=True)

    models = [Nano(tiny), Nano(tiny)]
    optimizers = []
    for model in models:
        initialise(model, 0)
        optimizers.append(Optimizer(model, Rates()))
    stepped(models[0], optimizers[0])
    optimizers[1].restore(copy.deepcopy(optimizers[0].state()))  # as a file would: nothing shared
    for model, optimizer in zip(models, optimizers, strict=True):
        stepped(model, optimizer)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_hash_routes_are_distinct_and_balanced(tiny: NanoConfig) -> None:
    routes = hash_routes(tiny, torch.Generator().manual_seed(0))
    assert (routes[:, 0] != routes[:, 1]).all()
    assert torch.bincount(routes[:, 0], minlength=4).tolist() == [64] * 4


def test_judge_counts_a_problem_right_only_when_every_target_token_is(renderer: Renderer) -> None:
    exam = make_exam(renderer, 6, 0, 2, 36, {"arithmetic", "json"})
    device = torch.device("cpu")
    perfect = iter([torch.from_numpy(batch.targets) for batch, _ in exam.batches])
    assert accuracy(lambda rows: next(perfect), exam, device) == {"arithmetic": 1.0, "json": 1.0}

    def flawed() -> list[torch.Tensor]:
        guesses = [torch.from_numpy(batch.targets.copy()) for batch, _ in exam.batches]
        marks = torch.from_numpy(exam.batches[0][0].marks)
        guesses[0][(marks == 1).nonzero()[0].tolist()[0], (marks == 1).nonzero()[0].tolist()[1]] += 1
        return guesses

    wrong = iter(flawed())
    assert sum(accuracy(lambda rows: next(wrong), exam, device).values()) == pytest.approx(2 - 1 / 6)
