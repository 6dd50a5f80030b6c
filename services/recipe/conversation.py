"""A chat request as templates see it: messages and tools in `transformers`' form. Knows no template and no tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fabric.errors import InvalidArgument
from services.recipe.mask import Mask

_CLOSING = "</think>"
_OF_FUNCTIONS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class Conversation:
    """`thinking` is None where the client left it to the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool | None

    @property
    def variables(self) -> dict[str, Any]:
        """What the template may use of it, as `apply_chat_template` names it."""
        chosen = {} if self.thinking is None else {"thinking": self.thinking, "enable_thinking": self.thinking}
        return {"messages": self.messages, "tools": self.tools or None, "add_generation_prompt": True, **chosen}

    def hidden(self, mask: Mask) -> Conversation:
        """With everything that the client wrote behind `mask`."""
        tools = [{"type": "function", "function": _hide_function(tool["function"], mask)} for tool in self.tools]
        return replace(self, messages=[_hide_message(message, mask) for message in self.messages], tools=tools)

    def without_reasoning(self) -> Conversation | None:
        """With earlier answers cut after the reasoning that they spell out; None where none does."""
        cut = [
            {**message, "content": message["content"].rsplit(_CLOSING, 1)[-1]} if _spells(message) else message
            for message in self.messages
        ]
        return None if cut == self.messages else replace(self, messages=cut)


def read(tree: dict[str, Any]) -> Conversation:
    """The conversation of an OpenAI body whose form was checked.

    Raises:
        InvalidArgument: it asks for what templates do not have; names the field.
    """
    messages = [_message(message, index) for index, message in enumerate(tree["messages"])]
    choice = tree.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise InvalidArgument(
            "a chat template cannot oblige the model to call", field="tool_choice", fix="use 'auto' or 'none'"
        )
    tools = [_tool(tool) for tool in tree.get("tools") or []] if choice == "auto" else []
    asked = (tree.get("thinking") or {}).get("type")
    return Conversation(messages, tools, None if asked is None else asked != "disabled")


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    role, calls = message["role"], message.get("tool_calls")
    if role == "latest_reminder":
        fix = "use system, user, assistant or tool"
        raise InvalidArgument("chat templates have no such role", field=f"messages[{index}].role", fix=fix)
    if message.get("prefix"):
        fix = "leave it out, or use Generate"
        raise InvalidArgument("a chat template cannot continue an answer", field=f"messages[{index}].prefix", fix=fix)
    content = _content(message.get("content"), index)
    # Answers come back with an empty text beside their calls; templates know such answers by having none.
    seen: dict[str, Any] = {"role": role, "content": None if calls and not content else content}
    seen |= {name: message[name] for name in ("reasoning_content", "tool_call_id") if message.get(name)}
    return seen | ({"tool_calls": [_call(call) for call in calls]} if calls else {})


def _content(content: Any, index: int) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    if any(part.get("type") != "text" for part in content):
        fix = "send text"
        raise InvalidArgument("this model takes text only", field=f"messages[{index}].content", fix=fix)
    return "\n\n".join(part["text"] for part in content)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool["function"][name] for name in _OF_FUNCTIONS if tool["function"].get(name) is not None}
    return {"type": "function", "function": function}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _hide_message(message: dict[str, Any], mask: Mask) -> dict[str, Any]:
    texts = {name: mask.hide(text) for name, text in message.items() if name != "role" and isinstance(text, str)}
    if "tool_calls" not in message:
        return message | texts
    calls = [
        {**call, "id": mask.hide(call["id"]), "function": {k: mask.hide(v) for k, v in call["function"].items()}}
        for call in message["tool_calls"]
    ]
    return message | texts | {"tool_calls": calls}


def _hide_function(function: dict[str, Any], mask: Mask) -> dict[str, Any]:
    return {name: mask.hide_schema(value) for name, value in function.items()}


def _spells(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and _CLOSING in (message["content"] or "")
