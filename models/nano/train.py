"""Trains nano on one GPU (or, tiny, on a CPU): `python -m models.nano.train --help`. Resumes from its state file."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.arguments import Parser, existing_file, new_file
from models.nano.attention import attend_chunked
from models.nano.config import load_config
from models.nano.data.render import Renderer
from models.nano.export import export, storage_of
from models.nano.initial import initialise
from models.nano.judge import Exam, accuracy, make_exam
from models.nano.loader import Loader, LoaderPlan
from models.nano.model import Nano, Rows
from models.nano.optimizer import Optimizer, Rates
from models.nano.schedule import Phase, phase_at
from models.nano.tokenizer import load

BALANCE_RATE = 1e-3


@dataclass(slots=True)
class History:
    """The loss curve and the accuracies so far; what the model card shows."""

    points: list[dict[str, float]] = field(default_factory=list)
    exams: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the curve and accuracies")
    parser.add_argument("--state", type=new_file, required=True, help="file to resume from, written at the end")
    parser.add_argument("--corpus", type=existing_file, default=None, help="archive written by models.nano.corpus")
    parser.add_argument("--total-steps", type=int, required=True, help="length of the whole schedule")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds of this process, then save and end")
    parser.add_argument("--rows", type=int, default=14)
    parser.add_argument("--row-blocks", type=int, default=36, help="row length in blocks of 128 tokens")
    parser.add_argument("--workers", type=int, default=13)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--data-seed", type=int, default=1, help="of the problems; give each resumed run its own")
    parser.add_argument("--exam-every", type=int, default=500)
    parser.add_argument("--exam-problems", type=int, default=96, help="held-out problems a class in each exam")
    parser.add_argument("--log-every", type=int, default=20)
    return parser.parse_args()


def token_loss(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean cross-entropy; weights are 0..255."""
    logits = F.linear(hidden, head).flatten(0, 1).float()
    losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
    share = weights.flatten().float() / 255
    return (losses * share).sum() / share.sum()


class Trainer:
    """Owns model, optimizer and history on one device."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self.number, self.history = device, 0, History()
        cuda = device.type == "cuda"
        self.model = Nano(load_config(), attend_chunked)
        initialise(self.model, seed)
        self.model.to(device)
        self.optimizer = Optimizer(self.model, Rates())
        if cuda:
            self._narrow()
            for layer in self.model.layers:
                layer.compile(dynamic=False)
        self._loss = torch.compile(token_loss, dynamic=False) if cuda else token_loss
        self.optimizer.publish(False)

    def _narrow(self) -> None:
        """Matrices become bfloat16, which holds every stored value exactly; the embedding keeps float32 gradients."""
        for name, parameter in self.model.named_parameters():
            if parameter.dim() >= 2 and storage_of(name) != "float32" and not name.startswith("embed"):
                parameter.data = parameter.data.bfloat16()

    def step(self, batch: tuple[Any, ...], phase: Phase) -> tuple[Tensor, Tensor]:
        """One update; returns (token loss, index loss) without waiting for the device."""
        ids, targets, weights, documents, probes = (self._sent(part) for part in batch)
        rows = Rows(ids.long(), documents, probes, self._flag(not phase.sparse))
        hidden, index_loss, loads = self.model(rows)
        loss = self._loss(hidden, self.model.head.weight, targets.long(), weights)
        (loss + index_loss).backward()
        self.optimizer.step(phase.factor, phase.quantize)
        self._balance(loads, phase.factor)
        self.number += 1
        self.history.tokens += ids.numel()
        return loss.detach(), index_loss.detach()

    def _flag(self, value: bool) -> Tensor:
        return torch.full((), value, device=self.device)

    def _sent(self, part: Any) -> Tensor:
        """To the device without waiting for it: unpinned copies would stall the launch queue."""
        tensor = torch.from_numpy(part)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    @torch.no_grad()
    def _balance(self, loads: list[Tensor], factor: float) -> None:
        for layer, share in zip(self.model.blocks(), loads, strict=True):
            if not layer.ffn.gate.hashed:
                layer.ffn.gate.bias += BALANCE_RATE * factor * torch.sign(share.mean() - share)

    def predict(self, rows: Rows) -> Tensor:
        """Argmax tokens, with the very graph that training uses."""
        with torch.enable_grad():
            hidden = self.model(rows)[0].detach()
        return torch.cat([F.linear(row, self.model.head.weight).argmax(-1)[None] for row in hidden])

    def examine(self, exam: Exam, sparse: bool) -> dict[str, float]:
        result = accuracy(self.predict, exam, self.device, dense=not sparse)
        self.history.exams.append({"step": self.number, "sparse": sparse, **result})
        return result

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        buffers = dict(self.model.named_buffers())
        history = (self.history.points, self.history.exams, self.history.tokens, self.history.seconds)
        state = {"optimizer": self.optimizer.state(), "buffers": buffers, "number": self.number, "history": history}
        torch.save(state, path)

    def restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.optimizer.restore(state["optimizer"])
        self.model.load_state_dict(state["buffers"], strict=False)
        self.number, self.history = state["number"], History(*state["history"])

    def write(self, out: Path, quantize: bool) -> None:
        """Export the checkpoint and the history."""
        self.optimizer.publish(quantize)
        export(self.model.state_dict(), out)
        curve: dict[str, Any] = {"points": self.history.points, "exams": self.history.exams}
        curve |= {"tokens": self.history.tokens, "seconds": round(self.history.seconds, 1)}
        (out / "curve.json").write_text(json.dumps(curve) + "\n")


def report(trainer: Trainer, phase: Phase, loss: Tensor, index_loss: Tensor, rate: float) -> None:
    point = {"step": trainer.number, "loss": round(loss.item(), 4), "index_loss": round(index_loss.item(), 4)}
    trainer.history.points.append(point | {"rate": round(phase.factor, 4)})
    print(point, f"{rate / 1e3:.0f}k tokens/s", phase, flush=True)


def run(trainer: Trainer, loader: Loader, exam: Exam, arguments: argparse.Namespace, started: float) -> None:
    """Train until the schedule or the time is over."""
    begun, mark = time.monotonic(), (time.monotonic(), trainer.history.tokens)
    while trainer.number < arguments.total_steps and time.monotonic() - started < arguments.stop_after:
        phase = phase_at(trainer.number, arguments.total_steps)
        loader.set_distance(phase.distance)
        loss, index_loss = trainer.step(loader.next(), phase)
        if trainer.number % arguments.log_every == 0:
            loss.item()
            now = (time.monotonic(), trainer.history.tokens)
            report(trainer, phase, loss, index_loss, (now[1] - mark[1]) / (now[0] - mark[0]))
            mark = now
        if trainer.number % arguments.exam_every == 0:
            print("exam", trainer.number, trainer.examine(exam, phase.sparse), flush=True)
    trainer.history.seconds += time.monotonic() - begun


def main() -> None:
    started, arguments = time.monotonic(), options()
    plan = LoaderPlan(arguments.rows, arguments.row_blocks, arguments.data_seed, arguments.workers, arguments.corpus)
    resumed = arguments.state.exists()
    loader = Loader(plan)
    torch._dynamo.config.recompile_limit = 32
    torch.set_float32_matmul_precision("high")
    exam = make_exam(Renderer(load()), arguments.exam_problems, 0, arguments.rows, arguments.row_blocks)
    trainer = Trainer(torch.device("cuda" if torch.cuda.is_available() else "cpu"), arguments.seed)
    if resumed:
        trainer.restore(arguments.state)
    phase = phase_at(trainer.number, arguments.total_steps)
    trainer.optimizer.publish(phase.quantize)
    print(f"ready after {time.monotonic() - started:.1f} s at step {trainer.number}", flush=True)
    run(trainer, loader, exam, arguments, started)
    loader.close()
    print("exam", trainer.number, trainer.examine(exam, phase_at(trainer.number - 1, arguments.total_steps).sparse))
    trainer.save(arguments.state)
    trainer.write(arguments.out, quantize=True)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(f"done after {time.monotonic() - started:.1f} s, {peak:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
