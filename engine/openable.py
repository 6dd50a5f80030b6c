"""Whether an engine could open, told from settings, config and headers: no weight is read and nothing compiled."""

from __future__ import annotations

from functools import partial

from engine.checkpoint.folder import Folder
from engine.config import EngineConfig
from engine.detokenize import open_tokenizer
from engine.families.check import TOKENIZER, check
from engine.families.inventory import read_model
from engine.families.whole import check_whole
from engine.windows import served
from kernels import choose


def check_openable(config: EngineConfig) -> None:
    """Raises what `Engine.open` would: InvalidParameter, CheckpointError or KernelError; each says what to do."""
    choose(config.kernels, config.device, config.batch_invariant, config.keeps_stored, config.keeps_records)
    folder = Folder(config.model_dir)
    check(folder)
    check_whole(folder)
    if (config.model_dir / TOKENIZER).exists():
        open_tokenizer(config.model_dir / TOKENIZER)
    facts = read_model(folder.config, frozenset(folder.names)).facts
    held = facts.record_layout if config.keeps_records else partial(facts.layout, config.dtype)
    config.memory(served(held(config.block_tokens), config.window_state, facts.config.max_context_tokens))
