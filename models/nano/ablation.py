"""What the trained indexer is worth: exact match with its choice, and with the same number of entries chosen otherwise.

`python -m models.nano.ablation --json PATH` reads the exported checkpoint. Runs on a GPU where there is one."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from bench.arguments import Parser, model_folder, new_file, positive
from models.nano.config import HERE
from models.nano.data import recall, toolcalls
from models.nano.data.render import Renderer
from models.nano.judge import Exam, accuracy, make_exam
from models.nano.offline import Offline
from models.nano.tokenizer import load

ROWS, ROW_BLOCKS = 2, 36
KINDS = {recall.KIND, toolcalls.CALL_KIND}


def most_recent(scores: Tensor) -> Tensor:
    return torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype).expand_as(scores)


def at_random(scores: Tensor) -> Tensor:
    return torch.rand_like(scores)


CHOICES: dict[str, Callable[[Tensor], Tensor] | None] = {
    "trained indexer": None,
    "most recent entries": most_recent,
    "random entries": at_random,
}


def compare(model: Offline, exam: Exam) -> dict[str, dict[str, float]]:
    """Accuracy by class under each choice of `index_topk` entries, and with all entries attended."""
    torch.manual_seed(0)
    results = {}
    for name, rank in CHOICES.items():
        for layer in model.model.blocks():
            if layer.attn.indexer is not None:
                layer.attn.indexer.rank = rank
        results[name] = accuracy(model.predict, exam, model.device)
    results["all entries"] = accuracy(model.predict, exam, model.device, dense=True)
    return results


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--checkpoint", type=model_folder, default=HERE)
    parser.add_argument("--n", type=positive, default=200, help="held-out problems a class")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--json", type=new_file, default=None)
    arguments = parser.parse_args()
    exam = make_exam(Renderer(load()), arguments.n, arguments.seed, ROWS, ROW_BLOCKS, KINDS)
    results = compare(Offline(arguments.checkpoint), exam)
    for name, by_class in results.items():
        print(f"{name:22}", {kind: round(value, 4) for kind, value in by_class.items()})
    if arguments.json:
        arguments.json.write_text(json.dumps({"n": arguments.n, "exact_match": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
