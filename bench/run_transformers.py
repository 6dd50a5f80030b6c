"""transformers as a contender (see bench/job.py): bf16, `generate` with its cache."""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.job import Generate, Job, Prompts, run


def open_generate(job: Job) -> Generate:
    """The checkpoint as transformers loads it."""
    torch.set_num_threads(job.threads)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16).eval()

    def made(given: Prompts, new: int) -> Prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(given), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [row[job.prompt :].tolist() for row in output]

    return made


if __name__ == "__main__":
    sys.exit(run(open_generate))
