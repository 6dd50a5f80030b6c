"""The official OpenAI client against a running gateway: a streamed answer, then a tool call and its result.

Usage: python examples/openai_sdk.py [--base-url http://127.0.0.1:8000/v1] [--model nano]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from openai import OpenAI


def tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    """A tool as the API takes it. parameters: name and JSON type of each."""
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


# nano has learnt to choose among three to six tools.
TOOLS: Any = [
    tool("get_weather", "Get the current weather of a city.", city="string"),
    tool("get_time", "Get the local time of a city.", city="string"),
    tool("set_timer", "Start a countdown timer.", minutes="integer"),
]


def stream(client: OpenAI, model: str) -> None:
    """Prints reasoning, then the answer, as they come."""
    messages: Any = [{"role": "user", "content": "What is 12 + 30?"}]
    chunks = client.chat.completions.create(
        model=model, messages=messages, stream=True, stream_options={"include_usage": True}, max_tokens=512
    )
    answering = False
    for chunk in chunks:
        for choice in chunk.choices:
            print(getattr(choice.delta, "reasoning_content", None) or "", end="", flush=True)
            if choice.delta.content:
                print("" if answering else "\nanswer: ", choice.delta.content, sep="", end="", flush=True)
                answering = True
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out]")


def use_tool(client: OpenAI, model: str) -> None:
    """Lets the model call a tool, plays the tool, and sends the result back."""
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked: Any = {"model": model, "tools": TOOLS, "max_tokens": 512, "temperature": 0}
    message = client.chat.completions.create(messages=messages, **asked).choices[0].message
    for call in message.tool_calls or []:
        if call.type == "function":
            print(f"[{call.function.name}({call.function.arguments})]")
            result = json.dumps({"temperature": 21, "sky": "sunny"})
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
            print(client.chat.completions.create(messages=messages, **asked).choices[0].message.content)
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
