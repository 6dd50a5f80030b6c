"""Model folders that chat by a template: a byte-level tokenizer with V3's kind of control tokens, and small templates.

The templates are ours, in the manner of V2 (words), V3 with calls, R1 (opens reasoning) and V3.1 (thinking by choice).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTEXT_TOKENS = 8192
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CALLS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
    "<｜tool▁output▁end｜>",
)
SPECIAL = (BOS, EOS, "<｜▁pad▁｜>")
ORDINARY = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *CALLS)
SPELLINGS = (*SPECIAL, *ORDINARY)
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
_PAIRS = [("t", "h"), ("th", "e"), ("Ġ", "a"), ("i", "n"), ("u", "s"), ("Ġ", "h"), ("Ġh", "i"), ("o", "n"), ("Ċ", "Ċ")]

V2 = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ 'User: ' + message['content'] + '\\n\\n' }}{% elif message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% elif message['role'] == 'system' %}"
    "{{ message['content'] + '\\n\\n' }}{% else %}{{ raise_exception('no role ' + message['role']) }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
V3 = """
{%- set ns = namespace(system='', answered=false) -%}
{%- for message in messages if message.role == 'system' -%}
  {%- set ns.system = ns.system ~ message.content -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system | trim }}
{%- if tools %}{{ '\\n\\n## Functions\\n' }}
  {%- for tool in tools %}{{ tool.function.name + ': ' + (tool | tojson) + '\\n' }}{% endfor -%}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}<｜User｜>{{ message['content'] }}
  {%- elif message.role == 'assistant' -%}
    {%- set said = message['content'] or '' -%}
    {%- if '</think>' in said -%}{%- set said = said.split('</think>')[-1] -%}{%- endif -%}
    <｜Assistant｜>{{ said }}
    {%- if message.tool_calls -%}
      <｜tool▁calls▁begin｜>
      {%- for call in message.tool_calls -%}
        {{ '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
        {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
      {%- endfor -%}
      <｜tool▁calls▁end｜>
    {%- endif -%}{{ eos_token }}
  {%- elif message.role == 'tool' -%}
    <｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<｜Assistant｜>"""
R1 = V3 + "{{ '<think>\\n' }}{%- endif -%}"
V31 = V3 + "{{ '<think>' if thinking else '</think>' }}{%- endif -%}"
V3 = V3 + "{%- endif -%}"


@cache
def tokenizer(vocab_size: int | None = None) -> Tokenizer:
    """Every byte, a few longer pieces that cross words, then the control tokens; filled up to `vocab_size`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *("".join(pair) for pair in _PAIRS)]
    fill = () if vocab_size is None else range(vocab_size - len(names) - len(SPELLINGS))
    built = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=_PAIRS))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    ordinary = (*ORDINARY, *(f"<｜place▁holder▁no▁{number}｜>" for number in fill))
    built.add_tokens([AddedToken(text, special=False, normalized=False) for text in ordinary])
    return built


def encode(text: str) -> list[int]:
    """Ids of `text`, control tokens included where they are spelled."""
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def spelled(token_ids: list[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=False))


def dress(folder: Path, template: str | None, vocab_size: int | None = None, in_file: bool = False) -> Path:
    """Writes tokenizer.json and tokenizer_config.json, with the template there or in a file of its own."""
    tokenizer(vocab_size).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"add_bos_token": True, "bos_token": {"content": BOS}, "eos_token": EOS}
    if template is not None and in_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write(folder: Path, template: str | None, in_file: bool = False) -> Path:
    """A folder with everything that concerns text; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": tokenizer().get_vocab_size(),
        "eos_token_id": tokenizer().token_to_id(EOS),
        "model_type": "deepseek_v3",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return dress(folder, template, in_file=in_file)
