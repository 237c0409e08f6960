"""The official openai client for Python, through all the server has: URL -> one JSON line."""

import asyncio
import json
import sys

import openai
from openai.types import Decision
from openai.types.chat import ChatCompletion, ChatCompletionChunk

URL = sys.argv[1] + "/v1"
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
MODEL = client.models.list().data[0].id
MESSAGES = [{"role": "user", "content": "How many days has a week?"}]
measured = {"version": openai.__version__, "model": MODEL}


def ask(**fields):
    return client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=48, temperature=0, **fields
    )


def streamed(**fields):
    """Text, usage and denoise frames of a stream, each chunk read strictly."""
    text, usage, frames = "", None, 0
    for chunk in ask(stream=True, stream_options={"include_usage": True}, **fields):
        ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
        usage = chunk.usage or usage
        frames += "diffusion" in (chunk.model_extra or {})
        for choice in chunk.choices:
            text += choice.delta.content or ""
    return text, usage, frames


def refused(**fields):
    try:
        ask(**fields)
    except openai.BadRequestError as error:
        return error.param
    return None


whole = ask()
raw = client.chat.completions.with_raw_response.create(
    model=MODEL, messages=MESSAGES, max_tokens=48, temperature=0
)
ChatCompletion.model_validate_json(raw.content, strict=True)
text, usage, _ = streamed()
measured["stream_equals_answer"] = text == whole.choices[0].message.content
measured["usage_equals_answer"] = usage.completion_tokens == whole.usage.completion_tokens > 0
denoised, _, frames = streamed(extra_body={"stream_mode": "denoise"})
measured["denoise_text_equals"] = denoised == text
measured["has_frames"] = frames > 0
with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=48) as stream:
    measured["helper_done"] = any(event.type == "content.done" for event in stream)
several = client.completions.create(model=MODEL, prompt=["hi", "ho"], max_tokens=8, n=2)
measured["batch_choices_in_order"] = [one.index for one in several.choices] == [0, 1, 2, 3]
try:
    ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=8)
    measured["ids_are_counted"] = ids.usage.prompt_tokens == 3
except openai.BadRequestError:  # smg takes texts alone
    measured["ids_are_counted"] = False
tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
measured["tools_refused_by_name"] = refused(tools=tools) == "tools"
measured["logprobs_refused_by_name"] = refused(logprobs=True) == "logprobs"
try:
    client.chat.completions.create(model="nope", messages=MESSAGES)
except openai.NotFoundError as error:
    measured["unknown_model_is_404"] = error.code == "model_not_found"


def decides():
    """Whether answers of /v1/decisions are read as they are meant."""
    decided = client.decisions.create(
        model=MODEL,
        input=[
            {"type": "message", "role": "user", "content": "I was charged twice. Help at once!"}
        ],
        questions=[
            {"type": "predicate", "name": "dup", "instructions": "Was there a double charge?"},
            {
                "type": "choice",
                "instructions": [{"type": "input_text", "text": "Which team?"}],
                "choices": [{"value": "billing"}, {"value": True, "description": "outages"}],
            },
            {
                "type": "score",
                "name": "urgency",
                "instructions": "How urgent?",
                "levels": [{"label": "low"}, {"label": "high", "description": "today"}],
            },
        ],
    )
    Decision.model_validate_json(decided.model_dump_json(), strict=True)
    dup, team, urgency = decided.answers
    return (
        0 < dup.probability < 1
        and team.choice in ("billing", True)
        and abs(sum(one.probability for one in team.probabilities) - 1) < 1e-6
        and [one.label for one in urgency.probabilities] == ["low", "high"]
        and 0 < urgency.score < 1
        and decided.usage.output_tokens == 3
    )


try:
    measured["decisions_are_read"] = decides()
except openai.BadRequestError:  # a router that reads them in a form of its own
    measured["decisions_are_read"] = False


async def many():
    async with openai.AsyncOpenAI(base_url=URL, api_key="none", max_retries=0) as other:

        async def one():
            stream = await other.chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=16, stream=True
            )
            return [chunk async for chunk in stream][-1].choices[0].finish_reason

        return await asyncio.gather(*[one() for _ in range(6)])


measured["six_at_once"] = set(asyncio.run(many())) <= {"stop", "length"}
print(json.dumps(measured))
