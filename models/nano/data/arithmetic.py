"""Sums and differences of numbers of 1 to 4 digits, worked out column by column. Pure and seeded."""

from __future__ import annotations

import random

from models.nano.data.problem import Problem, user

KIND = "arithmetic"
DIFFICULTY = "sums and differences of two numbers of 1 to 4 digits, written-out columns in the reasoning"
MAX_DIGITS = 4
SUM_FORMS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "Compute {a} + {b}.",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Calculate the sum of {a} and {b}.",
)
DIFFERENCE_FORMS = (
    "What is {a} - {b}?",
    "What is {a} minus {b}?",
    "Compute {a} - {b}.",
    "Subtract {b} from {a}.",
    "{a} - {b} = ?",
    "{a}-{b}",
    "Calculate {a} minus {b}.",
)


def operand(rng: random.Random) -> int:
    digits = rng.randint(1, MAX_DIGITS)
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def sum_columns(a: int, b: int) -> str:
    """Columns of a + b, least significant first, with carries and the growing result."""
    width = max(len(str(a)), len(str(b)))
    top, bottom = str(a).zfill(width), str(b).zfill(width)
    lines, done, carry = [f"{a} + {b}", top, bottom], "", 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        total = int(x) + int(y) + carry
        done = str(total % 10) + done
        lines.append(f"{x}+{y}+{carry}={total}, write {total % 10}, carry {total // 10}: {done}")
        carry = total // 10
    lines.append(f"carry {carry}: {a + b}")
    return "\n".join(lines)


def difference_columns(a: int, b: int) -> str:
    """Columns of a - b with borrows; the larger number goes on top and the sign is settled first."""
    width = max(len(str(a)), len(str(b)))
    lines = [f"{a} - {b}", str(a).zfill(width), str(b).zfill(width)]
    if a < b:
        lines.append(f"first is smaller: minus {b} - {a}")
    large, small = (a, b) if a >= b else (b, a)
    top, bottom = str(large).zfill(width), str(small).zfill(width)
    lines += [top, bottom] if a < b else []
    done, borrow = "", 0
    for x, y in zip(reversed(top), reversed(bottom), strict=True):
        total = int(x) - int(y) - borrow
        borrow = int(total < 0)
        done = str(total + 10 * borrow) + done
        lines.append(f"{x}-{y}-{int(x) - int(y) - total}={total}, write {done[0]}, borrow {borrow}: {done}")
    lines.append(f"result: {a - b}")
    return "\n".join(lines)


def generate(rng: random.Random) -> Problem:
    """One sum or difference; the answer is the bare number."""
    a, b = operand(rng), operand(rng)
    plus = rng.random() < 0.5
    question = rng.choice(SUM_FORMS if plus else DIFFERENCE_FORMS).format(a=a, b=b)
    reasoning = sum_columns(a, b) if plus else difference_columns(a, b)
    key = f"{a}{'+' if plus else '-'}{b}"
    return Problem(KIND, key, (user(question),), reasoning, str(a + b if plus else a - b), thinking=True)
