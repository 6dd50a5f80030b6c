"""What rounding its KV costs nano, which was trained without: held-out problems and logits, exact and rounded.

A problem counts as right if every argmax along its target is the target's: greedy decoding would then repeat it whole.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.arguments import Parser, new_file, positive
from bench.single import logits_from
from bench.table import Row, report
from engine.families import Family, open_family
from kernels import choose
from models.nano.config import HERE
from models.nano.data.mixture import classes, evaluation_problems
from models.nano.data.render import Renderer, Sample
from models.nano.tokenizer import load

SWITCH = "fake_quantize"


@contextmanager
def opened(dtype: torch.dtype, rounded: bool) -> Iterator[Family]:
    """nano with the switch of its config as asked; its files are linked, not copied."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in HERE.iterdir():
            if path.suffix in (".safetensors", ".json") and path.name != "config.json":
                (folder / path.name).symlink_to(path)
        config = json.loads((HERE / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"serving": {SWITCH: rounded}}), encoding="utf-8")
        yield open_family(folder, dtype, False, choose())


def problems(number: int, seed: int) -> list[Sample]:
    """`number` held-out problems of every class."""
    renderer = Renderer(load())
    return [
        renderer.sample(problem)
        for each in classes(renderer.count)
        for problem in evaluation_problems(each, number, seed)
    ]


def answers(family: Family, samples: list[Sample], dtype: torch.dtype) -> list[torch.Tensor]:
    """Logits along each sample's target."""
    return [logits_from(family, one.ids[:-1], one.prompt_length - 1, dtype) for one in samples]


def right(sample: Sample, logits: torch.Tensor) -> bool:
    """Whether greedy decoding repeats the whole target."""
    return bool((logits.argmax(-1) == torch.tensor(sample.ids[sample.prompt_length :])).all())


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    parser = Parser(description=__doc__)
    parser.add_argument("--n", type=positive, default=6, help="held-out problems of each class")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=new_file, help="also write the table here")
    options = parser.parse_args(arguments)
    if options.n < 1:
        parser.error(f"--n {options.n} is not positive")
    dtype, samples, found = getattr(torch, options.dtype), problems(options.n, options.seed), []
    for rounded in (False, True):
        with opened(dtype, rounded) as family:
            found.append(answers(family, samples, dtype))
    exact, rounded_logits = (torch.cat(logits) for logits in found)
    agree = (exact.argmax(-1) == rounded_logits.argmax(-1)).double().mean()
    rows = [Row("problems", len(samples)), Row("tokens of their targets", len(exact))]
    for name, logits in zip(("exact", "rounded"), found, strict=True):
        share = sum(map(right, samples, logits)) / len(samples)
        rows.append(Row(f"right with {name} KV", 100 * share, "%"))
    rows.append(Row("tokens on which both agree", 100 * float(agree), "%"))
    rows.append(Row("logit difference, root mean square", float((exact - rounded_logits).square().mean().sqrt())))
    rows.append(Row("logits, standard deviation", float(exact.std())))
    return report(f"nano, {options.dtype}: KV as it is and as V4's published records hold it", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
