"""The loop of `agent.py` by Anthropic's client, streamed, with thoughts where the model has them.

dllm-jax serve builtin:tiny-sdar --tool-format hermes
python examples/agent_anthropic.py    # or the address of another server, without /v1
"""

import sys
from collections.abc import Callable

CITY = {"type": "string", "enum": ["Oslo", "Bergen"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}]
RUN: dict[str, Callable[..., str]] = {"weather": lambda city: f"21 degrees in {city}"}


def main(
    url: str = "http://127.0.0.1:8000",
    question: str = "Weather in Oslo?",
    most_turns: int = 3,
):
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    for turn in range(most_turns):
        kind = "auto" if turn else "any"
        with client.messages.stream(
            model=model,
            max_tokens=100,
            messages=messages,
            tools=TOOLS,
            tool_choice={"type": kind, "disable_parallel_tool_use": True},
        ) as stream:
            for event in stream:
                if event.type in ("text", "thinking"):
                    print(getattr(event, event.type), end="", flush=True)
            answer = stream.get_final_message()
        if answer.stop_reason != "tool_use":  # a call that a limit cut is not to be run
            return
        results = []
        for call in answer.content:
            if call.type == "tool_use":
                result = RUN[call.name](**call.input)
                print(f"\n{call.name}({call.input}): {result}")
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main(*sys.argv[1:])
