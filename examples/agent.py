"""A loop with tools against `dllm-jax serve`, by OpenAI's client.

    dllm-jax serve builtin:tiny-sdar --tool-format hermes
    python examples/agent.py http://127.0.0.1:8000/v1

The built-in model was never trained on tools: its calls are valid, and make no sense.
"""

import json
import sys
from collections.abc import Callable

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["a", "b"],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
RUN: dict[str, Callable[..., object]] = {"add": lambda a, b: a + b}


def main(url: str, question: str = "How much is 3 and 4?", most_turns: int = 3):
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
            max_tokens=60,
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
