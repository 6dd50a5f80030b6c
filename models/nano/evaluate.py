"""Exact match of nano on held-out generated problems, through the running stack: `python -m models.nano.evaluate`.

Without --url it starts the stack and drains it; with --offline it asks the training modules instead of the stack."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from bench.arguments import Parser, model_folder, new_file, positive
from models.nano.ask import Ask, Endpoint, Message, answers, started_stack
from models.nano.config import HERE
from models.nano.course import Course, bars
from models.nano.data.check import correct
from models.nano.data.mixture import ProblemClass, classes, evaluation_problems
from models.nano.data.problem import HELD_OUT_SHARE, Problem
from models.nano.data.render import Renderer
from models.nano.tokenizer import load

BAR = 0.95


@dataclass(frozen=True, slots=True)
class Score:
    """One row of the report. `errors` are requests that failed rather than answered wrongly."""

    kind: str
    difficulty: str
    n: int
    right: int
    errors: int = 0

    @property
    def share(self) -> float:
        return self.right / self.n


def options() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("--url", help="OpenAI endpoint, e.g. http://127.0.0.1:8000/v1; without it a stack is started")
    parser.add_argument("--offline", action="store_true", help="use the training modules, no stack")
    parser.add_argument("--checkpoint", type=model_folder, default=HERE, help="checkpoint folder for --offline")
    parser.add_argument("--n", type=positive, default=200, help="held-out problems a class")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=None, help="only these classes")
    parser.add_argument("--concurrency", type=positive, default=8, help="requests in flight")
    parser.add_argument("--temperature", type=float, default=0.01)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    parser.add_argument("--json", type=new_file, default=None, help="write the figures there")
    parser.add_argument("--show-wrong", type=int, default=0, help="print that many wrong answers a class")
    return parser.parse_args()


def chosen_classes(kinds: list[str] | None, renderer: Renderer) -> list[ProblemClass]:
    """The classes to measure. Raises SystemExit naming an unknown class and the known ones."""
    known = {each.kind: each for each in classes(renderer.count)}
    unknown = set(kinds or ()) - set(known)
    if unknown:
        raise SystemExit(f"--kinds: unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    return [known[kind] for kind in kinds or known]


def online(asked: list[ProblemClass], arguments: argparse.Namespace, ask: Ask, console: Console) -> list[Score]:
    """Ask the endpoint, and say how far it is."""
    scores = []
    with bars(console) as progress:
        course = Course(progress, len(asked), arguments.n, time.monotonic)
        for each in asked:
            problems = evaluation_problems(each, arguments.n, arguments.seed)
            right = errors = 0
            wrong: list[tuple[Problem, Message | str]] = []
            with course.of(each.kind) as advance:
                for problem, message in answers(problems, ask, arguments.concurrency):
                    errors += isinstance(message, str)
                    good = isinstance(message, dict) and correct(problem, message)
                    right += good
                    wrong += [] if good else [(problem, message)]
                    advance(right)
            scores.append(Score(each.kind, each.difficulty, arguments.n, right, errors))
            console.print(f"{each.kind}: {right} of {arguments.n} right ({each.difficulty})", markup=False)
            for problem, message in wrong[: arguments.show_wrong]:
                console.print(f"{each.kind}: wanted {problem.answer or problem.calls!r}, got {message!r}", markup=False)
    return scores


def offline(asked: list[ProblemClass], arguments: argparse.Namespace, renderer: Renderer) -> list[Score]:
    """Greedy, whole target: stricter than `online`, where only the final answer counts."""
    from models.nano.judge import accuracy, make_exam
    from models.nano.offline import Offline

    model, scores = Offline(arguments.checkpoint), []
    for each in asked:
        exam = make_exam(renderer, arguments.n, arguments.seed, 2, 36, {each.kind})
        share = accuracy(model.predict, exam, model.device)[each.kind]
        scores.append(Score(each.kind, each.difficulty, arguments.n, round(share * arguments.n)))
    return scores


def table_of(scores: list[Score]) -> Table:
    table = Table(title=f"nano, exact match on held-out problems (one key in {HELD_OUT_SHARE} is never trained on)")
    for heading in ("class", "right", "n", "failed requests", "share", "bar", "", "difficulty"):
        table.add_column(heading)
    for score in scores:
        verdict = "ok" if score.share >= BAR else "MISSED"
        cells = (
            score.kind,
            score.right,
            score.n,
            score.errors,
            f"{score.share:.1%}",
            f"{BAR:.0%}",
            verdict,
            score.difficulty,
        )
        table.add_row(*map(str, cells))
    return table


def measured(arguments: argparse.Namespace, console: Console) -> list[Score]:
    renderer = Renderer(load())
    asked = chosen_classes(arguments.kinds, renderer)
    if arguments.offline:
        return offline(asked, arguments, renderer)
    if arguments.url:
        return online(asked, arguments, Endpoint(arguments.url, arguments.temperature, arguments.timeout), console)
    with started_stack() as url:
        return online(asked, arguments, Endpoint(url, arguments.temperature, arguments.timeout), console)


def main() -> int:
    arguments, console = options(), Console(width=150)
    scores = measured(arguments, console)
    console.print(table_of(scores))
    if arguments.json:
        how = "offline" if arguments.offline else "stack"
        rows = [asdict(score) | {"share": round(score.share, 4)} for score in scores]
        figures = {
            "how": how,
            "seed": arguments.seed,
            "temperature": arguments.temperature,
            "bar": BAR,
            "classes": rows,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(score.share < BAR for score in scores))


if __name__ == "__main__":
    sys.exit(main())
