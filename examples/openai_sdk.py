"""The official OpenAI client against a running gateway: a streamed answer, then a tool call and its result.

Usage: python examples/openai_sdk.py [--base-url http://127.0.0.1:8000/v1] [--model nano]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    }
]


def stream(client: OpenAI, model: str) -> None:
    """Prints reasoning and answer as they come."""
    messages: Any = [{"role": "user", "content": "What is 12 + 30?"}]
    chunks = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=512
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(getattr(choice.delta, "reasoning_content", None) or choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


def use_tool(client: OpenAI, model: str) -> None:
    """Lets the model call `add`, runs it, and sends the result back."""
    messages: Any = [{"role": "user", "content": "Use the tool to add 12 and 30."}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=512)
    message = answer.choices[0].message
    for call in message.tool_calls or []:
        if call.type == "function":
            numbers = json.loads(call.function.arguments or "{}")
            print(f"[{call.function.name}({call.function.arguments})]")
            result = str(sum(value for value in numbers.values() if isinstance(value, int | float)))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
            final = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=512)
            print(final.choices[0].message.content)
            return
    print(message.content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="nano")
    asked = parser.parse_args()
    with OpenAI(base_url=asked.base_url, api_key=os.environ.get("DEEPINFER_API_KEY", "none")) as client:
        stream(client, asked.model)
        use_tool(client, asked.model)


if __name__ == "__main__":
    main()
