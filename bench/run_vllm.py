"""vLLM's CPU build as a contender (see bench/job.py): bf16, no prefix cache, one core per thread."""

from __future__ import annotations

import os
import sys

from bench.job import Generate, Job, Prompts, run


def open_generate(job: Job) -> Generate:
    """vLLM reads its settings from the environment as it is imported."""
    cores = sorted(os.sched_getaffinity(0))[: job.threads]
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    model = LLM(
        job.model,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=job.prompt + job.new,
        max_num_seqs=max(job.batches),
    )

    def made(given: Prompts, new: int) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in given], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return made


if __name__ == "__main__":
    sys.exit(run(open_generate))
