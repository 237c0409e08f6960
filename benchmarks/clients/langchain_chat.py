"""LangChain's wrappers of the openai client: URL -> one JSON line."""

import importlib.metadata
import json
import sys

from langchain_openai import ChatOpenAI
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

measured = {"version": importlib.metadata.version("langchain-openai")}
for name, extra in (("plain", {}), ("denoise", {"extra_body": {"stream_mode": "denoise"}})):
    model = ChatOpenAI(
        model=sys.argv[2],
        base_url=sys.argv[1] + "/v1",
        api_key="none",
        max_retries=0,
        temperature=0,
        max_tokens=48,
    )
    streamed = "".join(
        chunk.content for chunk in model.stream("How many days has a week?", **extra)
    )
    answer = model.invoke("How many days has a week?")
    measured[f"{name}_stream_equals_answer"] = streamed == answer.content != ""
    measured[f"{name}_usage"] = answer.usage_metadata["output_tokens"] > 0
decisions = OpenAIDecisions(
    model=sys.argv[2], base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0
)
answers = decisions.invoke(
    {
        "input": "I was charged twice. Help at once!",
        "questions": {
            "dup": Predicate(instructions="Was there a double charge?"),
            "team": Choice(instructions="Which?", choices={"billing": "Payments.", "tech": None}),
            "urgency": Score(instructions="How urgent?", levels=["low", "high"]),
        },
    }
)
measured["decisions_are_read"] = (
    0 < answers.predicates["dup"].probability < 1
    and answers.choices["team"].choice in ("billing", "tech")
    and 0 < answers.scores["urgency"].score < 1
)
print(json.dumps(measured))
