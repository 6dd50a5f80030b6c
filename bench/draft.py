"""How often a checkpoint's own MTP block guesses the model's next token: greedy drafts of one token.

The model generates greedily; its block then guesses every generated token but the first, from verified tokens alone, as
it would while serving. Random weights accept near 1 / vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.arguments import Parser, existing_file, model_folder, new_file, positive
from bench.single import piece, pool_of
from bench.table import Row, report
from engine.families import Family, open_family
from engine.families.draft import Draft
from kernels import choose


def acceptance(family: Family, draft: Draft, prompt: list[int], count: int, dtype: torch.dtype) -> list[bool]:
    """Generate `count` tokens; whether each but the first was guessed. Raises ValueError if they do not fit."""
    total = len(prompt) + count
    if total > family.max_context_tokens:
        raise ValueError(f"{total} tokens, but the model takes {family.max_context_tokens}")
    main, own = (pool_of(layout, total, dtype) for layout in (family.layout, draft.layout))
    tokens, states, done = list(prompt), [], 0
    while len(tokens) < total:
        followed = draft.follow(piece(family.layout, tokens[done:], done), main)
        states.append(followed.hidden)
        done = len(tokens)
        tokens.append(int(followed.logits[-1].argmax()))
    # The last token was not followed: row t joins state t with token t + 1, and its guess is judged by token t + 2.
    batch = piece(draft.layout, tokens[:-2], 0, range(len(prompt) - 1, total - 2))
    hidden = torch.cat(states)[: total - 2]
    batch = replace(batch, tokens=np.asarray(tokens[1:-1], np.int64))
    guesses = draft.forward(batch, hidden, own).logits.argmax(-1).tolist()
    return [guess == token for guess, token in zip(guesses, tokens[len(prompt) + 1 :], strict=True)]


def prompts_of(options: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Pieces of the text, or seeded random tokens without the first three, which are special."""
    count, length = options.prompts, options.prompt_tokens
    if options.text is None:
        drawn: list[list[int]] = np.random.default_rng(options.seed).integers(3, vocabulary, (count, length)).tolist()
        return drawn
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    if len(ids) < count * length:
        raise SystemExit(f"--text: {len(ids)} tokens, but --prompts {count} of --prompt-tokens {length} need more")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and measure."""
    parser = Parser(description=__doc__)
    parser.add_argument("model", type=model_folder, help="folder of a checkpoint with an MTP block")
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="generated after each prompt")
    parser.add_argument("--text", type=existing_file, help="take prompts from this file instead of random tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=new_file, help="also write the table here")
    options = parser.parse_args(arguments)
    for name in ("prompts", "prompt_tokens", "tokens"):
        if getattr(options, name) < (2 if name == "tokens" else 1):
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} is too small")
    if options.text is not None and not (options.model / "tokenizer.json").is_file():
        parser.error(f"--text needs tokenizer.json, which {options.model} has not")
    dtype = getattr(torch, options.dtype)
    family = open_family(options.model, dtype, False, choose())
    if family.draft is None:
        parser.error(f"{options.model} has no MTP block (num_nextn_predict_layers and its tensors)")
    prompts = prompts_of(options, family.vocab_size)
    taken = [one for prompt in prompts for one in acceptance(family, family.draft, prompt, options.tokens, dtype)]
    rows = [
        Row("guesses", len(taken)),
        Row("accepted", 100 * sum(taken) / len(taken), "%"),
        Row("by chance", 100 / family.vocab_size, "%"),
        Row("tokens per verified step", 1 + sum(taken) / len(taken)),
    ]
    return report(f"{options.model.name}: greedy drafts of its MTP block", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
