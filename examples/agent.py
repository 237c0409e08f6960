"""A loop with tools against `dllm-jax serve`, by OpenAI's client.

    dllm-jax serve builtin:tiny-sdar --tool-format hermes
    python examples/agent.py    # or the address of another server, with /v1

The built-in model was never trained on tools: its calls are valid, and make no sense. It has room
for 512 tokens, offer and answers together.
"""

import json
import sys
from collections.abc import Callable

CITY = {"type": "string", "enum": ["Oslo", "Bergen"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
RUN: dict[str, Callable[..., object]] = {"weather": lambda city: f"21 degrees in {city}"}


def main(
    url: str = "http://127.0.0.1:8000/v1",
    question: str = "Weather in Oslo?",
    most_turns: int = 3,
):
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    for turn in range(most_turns):
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="auto" if turn else "required",
            parallel_tool_calls=False,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        print(message.content or [call.function for call in message.tool_calls or ()])
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            result = RUN[call.function.name](**json.loads(call.function.arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
