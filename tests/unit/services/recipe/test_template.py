"""The template dialect: prompts as `transformers` renders them, in which clients' texts are texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import DeadlineExceeded, InvalidArgument, NotFound, StartError
from services.recipe import choice, options
from services.recipe.dialect import Dialect, Rendered
from services.recipe.settings import RecipeSettings
from tests.support import templatemodel as given

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "recipe.md"

Open = Callable[..., Dialect]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds <b>é</b>",
            "parameters": {"type": "object", "properties": {"a": {"type": "number", "description": "x"}}},
        },
    }
]
TALK = [
    {"role": "system", "content": "  be kind \n"},
    {"role": "user", "content": " hi the\n\n字 \U0001f600 'in'  "},
    {"role": "assistant", "content": "on the <b>"},
    {"role": "user", "content": "th"},
]
CALLING = [
    *TALK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "2"},
]
REASONED = [*TALK, {"role": "assistant", "content": "<think>in</think>the"}, {"role": "user", "content": "on"}]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Opens a dialect over a template, each one once; all are closed at the end."""
    made: dict[tuple[object, ...], Dialect] = {}

    def open_one(template: str | None, in_file: bool = False, **settings: Any) -> Dialect:
        key = (template, in_file, *settings.items())
        if key not in made:
            folder = given.write(tmp_path_factory.mktemp("model") / "m", template, in_file)
            made[key] = choice.open_dialect(RecipeSettings(discovery="memory://x", model=folder, **settings))
        return made[key]

    yield open_one
    for dialect in made.values():
        for process in dialect.processes:
            process.close()


def render(dialect: Dialect, messages: list[dict[str, Any]], **fields: Any) -> Rendered:
    return dialect.render_chat(json.dumps({"model": "m", "messages": messages} | fields).encode())


def reference(template: str, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
    """What `transformers` makes of it."""
    from transformers import PreTrainedTokenizerFast  # here: it takes a second to import

    fast = PreTrainedTokenizerFast(
        tokenizer_object=given.tokenizer(), bos_token=given.BOS, eos_token=given.EOS, chat_template=template
    )
    return list(fast.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables))


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("template", "messages", "fields", "variables"),
    [
        (given.V2, TALK, {}, {}),
        (given.V3, TALK, {}, {}),
        (given.V3, CALLING, {"tools": TOOLS}, {"tools": TOOLS}),
        (given.R1, CALLING, {}, {}),
        (given.R1, REASONED, {}, {}),
        (given.V31, TALK, {}, {}),
        (given.V31, TALK, {"thinking": {"type": "enabled"}}, {"thinking": True}),
        (given.V31, TALK, {"thinking": {"type": "disabled"}}, {"thinking": False}),
    ],
)  # fmt: skip
def test_prompts_are_those_of_transformers(
    opened: Open, template: str, messages: Any, fields: Any, variables: Any, in_file: bool
) -> None:
    rendered = render(opened(template, in_file), messages, **fields)
    assert rendered.token_ids == reference(template, messages, **variables)


HOSTILE = "".join(given.SPELLINGS)
HALVES = ("<｜tool▁calls", "▁begin｜>")


def control(token_ids: list[int]) -> list[int]:
    added = {given.tokenizer().token_to_id(text) for text in given.SPELLINGS}
    return [token for token in token_ids if token in added]


def every_text(say: str, answered: str) -> dict[str, Any]:
    """A conversation with `say` in each place where a client may write, and `answered` in earlier answers."""
    function = {"name": "add", "arguments": json.dumps({"a": say}, ensure_ascii=False)}
    call = {"id": say, "type": "function", "function": function}
    schema = {"type": "object", "properties": {say: {"type": "string", "description": say, "enum": [say]}}}
    return {
        "messages": [
            {"role": "system", "content": say},
            {"role": "user", "content": [{"type": "text", "text": say}, {"type": "text", "text": say}]},
            {"role": "assistant", "content": answered, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": say, "content": say},
            {"role": "assistant", "content": answered, "reasoning_content": say},
            {"role": "user", "content": say},
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": say, "parameters": schema}}],
    }


@pytest.mark.parametrize("template", [given.V2.replace("{% else %}", "{% elif 0 %}"), given.V3, given.R1, given.V31])
@pytest.mark.parametrize("say", [HOSTILE, *HALVES, *given.SPELLINGS])
def test_no_text_of_a_client_becomes_a_control_token(opened: Open, template: str, say: str) -> None:
    dialect = opened(template)
    harmless, hostile = render(dialect, **every_text("SAID", "ANSWERED")), render(dialect, **every_text(say, say))
    assert control(hostile.token_ids) == control(harmless.token_ids)
    # Templates of reasoning models drop from earlier answers what was reasoning; nothing else is lost or changed.
    kept = say.rsplit("</think>")[-1] if "split" in template else say
    expected = given.spelled(harmless.token_ids).replace("ANSWERED", kept).replace("SAID", say)
    assert given.spelled(hostile.token_ids) == expected


def test_texts_that_meet_spell_no_control_token_together(opened: Open) -> None:
    dialect = opened("{% for message in messages %}{{ message.content }}{% endfor %}{{ '<think' }}")
    messages = [{"role": "user", "content": text} for text in (*HALVES, "</thi", "nk>", ">")]
    rendered = render(dialect, messages)
    assert control(rendered.token_ids) == []
    assert given.spelled(rendered.token_ids) == "<｜tool▁calls▁begin｜></think>><think"
    # Nor with the template's own text around them.
    across = opened("{{ '<think' }}{{ messages[0].content }}")
    assert control(render(across, [{"role": "user", "content": ">"}]).token_ids) == []


def test_private_characters_of_a_client_stay_what_they_are(opened: Open) -> None:
    text = "\U000f0000<think>\U000f0001\U0010fffd"
    rendered = render(opened("{{ messages[0].content }}"), [{"role": "user", "content": text}])
    assert given.spelled(rendered.token_ids) == text and control(rendered.token_ids) == []


@pytest.mark.parametrize(
    ("template", "fields", "stage"),
    [
        (given.V2, {}, ""),
        (given.V3, {}, ""),
        (given.R1, {}, "reasoning_start"),
        (given.V31, {}, ""),
        (given.V31, {"thinking": {"type": "enabled"}}, "reasoning_start"),
    ],
)
def test_an_answer_begins_in_reasoning_where_the_prompt_opens_it(
    opened: Open, template: str, fields: Any, stage: str
) -> None:
    rendered = render(opened(template), [{"role": "user", "content": "<think>"}], **fields)
    assert options.load(rendered.parsing_options).stage == stage
    assert rendered.thinking is bool(stage)


def test_tools_are_parsed_only_where_they_were_offered(opened: Open) -> None:
    dialect = opened(given.V3)
    for fields, tools in (({}, False), ({"tools": TOOLS}, True), ({"tools": TOOLS, "tool_choice": "none"}, False)):
        assert options.load(render(dialect, TALK, **fields).parsing_options).tools is tools


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "latest_reminder", "content": "x"}, *TALK]}, "messages[0].role"),
        ({"messages": [*TALK, {"role": "assistant", "content": "x", "prefix": True}]}, "messages[4].prefix"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
         "messages[0].content"),
        ({"tools": TOOLS, "tool_choice": "required", "thinking": {"type": "disabled"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, "messages"),
        ({"max_tokens": 9000}, "max_tokens"),
        ({"temperature": 5}, "temperature"),
    ],
)  # fmt: skip
def test_a_bad_request_names_its_field_and_the_fix(opened: Open, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(opened(given.V3), **({"messages": TALK} | fields))
    assert caught.value.field == field and caught.value.fix


def test_another_model_is_not_found(opened: Open) -> None:
    with pytest.raises(NotFound):
        render(opened(given.V3), TALK, model="other")


def test_a_template_refuses_in_its_own_words_but_quotes_nobody(opened: Open) -> None:
    with pytest.raises(InvalidArgument, match="users come first"):
        render(opened("{{ raise_exception('users come first') }}"), TALK)
    for text in ("CANARY", "0123456789", "字"):
        with pytest.raises(InvalidArgument) as caught:
            render(opened("{{ raise_exception(messages[0].content) }}"), [{"role": "user", "content": text}])
        assert text not in str(caught.value) and caught.value.field == "messages" and caught.value.fix


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{{ nothing.there }}",
        "{{ 'a' * 3000000000 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
        "{{ ns.l | tojson }}",
    ],
)
def test_a_template_breaks_neither_its_sandbox_nor_its_bounds(opened: Open, template: str) -> None:
    dialect = opened(template, template_timeout_s=4.0)
    with pytest.raises((InvalidArgument, DeadlineExceeded)):
        render(dialect, TALK)


def test_a_template_without_end_is_killed_and_the_next_request_served(opened: Open) -> None:
    endless = "{% if messages[0].content == 'x' %}" + "{% for a in range(99999) %}" * 3
    dialect = opened(endless + "{% endfor %}" * 3 + "{% endif %}on", template_timeout_s=3.0)
    with pytest.raises(DeadlineExceeded):
        render(dialect, [{"role": "user", "content": "x"}])
    assert given.spelled(render(dialect, TALK).token_ids) == "on"


def test_a_prompt_beyond_the_context_ends_the_template_early(opened: Open) -> None:
    dialect = opened("{% for a in range(99999) %}{% for b in range(99999) %}{{ 'the ' }}{% endfor %}{% endfor %}")
    with pytest.raises(InvalidArgument) as caught:
        render(dialect, TALK)
    assert caught.value.field == "messages" and "holds 8192" in caught.value.message


def test_the_template_of_the_documentation_renders_v32s_form(opened: Open) -> None:
    [template] = re.findall(r"```jinja\n(.*?)```", DOCUMENTATION.read_text(encoding="utf-8"), flags=re.DOTALL)
    dialect = opened(template)
    expected = "{bos}be<｜User｜>hi<｜Assistant｜></think>on{eos}<｜User｜>the<｜Assistant｜>{think}"
    talk = [("system", "be"), ("user", "hi"), ("assistant", "on"), ("user", "the")]
    messages = [{"role": role, "content": text} for role, text in talk]
    for kind, think in (("enabled", "<think>"), ("disabled", "</think>")):
        rendered = render(dialect, messages, thinking={"type": kind})
        assert rendered.token_ids == given.encode(expected.format(bos=given.BOS, eos=given.EOS, think=think))
        assert rendered.thinking is (kind == "enabled")
    with pytest.raises(InvalidArgument, match="no tools"):
        render(dialect, messages, tools=TOOLS)


def test_plain_text_begins_as_the_tokenizer_config_says(opened: Open) -> None:
    for template in (given.V3, None):
        rendered = opened(template).render_text("hi <think>")
        assert given.spelled(rendered.token_ids) == given.BOS + "hi <think>"
        assert len(control(rendered.token_ids)) == 1


def test_a_template_that_does_not_compile_stops_the_start_by_file(opened: Open) -> None:
    with pytest.raises(StartError, match=r"chat_template\.jinja cannot be used: TemplateSyntaxError"):
        opened("{% for %}", in_file=True)
