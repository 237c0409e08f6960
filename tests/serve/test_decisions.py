"""Proves `/v1/decisions`: answers in OpenAI's form, one forward a request, refusals by name.

The scripted engine gives the letters log-probabilities -1, -2, ...; the built-in model's answers
are in test_server.py.
"""

import math

import pytest

from tests.serve.driving import scripted, within

pytestmark = pytest.mark.long

PATH = "/v1/decisions"
QUESTIONS = [
    {"type": "predicate", "name": "dup", "instructions": "Was there a double charge?"},
    {
        "type": "choice",
        "instructions": "Which team?",
        "choices": [{"value": "billing"}, {"value": "tech", "description": "outages"}],
    },
    {
        "type": "score",
        "name": "urgency",
        "instructions": "How urgent?",
        "levels": [{"label": "low"}, {"label": "high", "description": "now"}],
    },
]
BODY = {"input": "I was charged twice.", "questions": QUESTIONS}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with scripted(tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.mark.parametrize("joint", [None, False, True])
def test_answers_have_openais_form(server, joint):
    before = server.metric("dllm_decision_forwards_total")
    status, reported, _ = server.post(PATH, {**BODY, "joint": joint})
    assert status == 200
    first = 1 / (1 + math.exp(-1))
    dup, team, urgency = reported["answers"]
    assert dup == {"type": "predicate", "name": "dup", "probability": pytest.approx(first)}
    assert (team["type"], team["name"], team["choice"]) == ("choice", None, "billing")
    assert [one["value"] for one in team["probabilities"]] == ["billing", "tech"]
    assert team["confidence"] == pytest.approx(math.exp(-1))
    assert urgency["score"] == pytest.approx(1 - first)
    assert [one["value"] for one in urgency["probabilities"]] == [0, 1]
    assert [one["label"] for one in urgency["probabilities"]] == ["low", "high"]
    usage = reported["usage"]
    assert usage["output_tokens"] == 3
    assert usage["total_tokens"] == usage["input_tokens"] + 3
    assert within(lambda: server.metric("dllm_decision_forwards_total") == before + 1)


def test_messages_are_an_input(server):
    part = {"type": "input_text", "text": "I was charged twice."}
    items = [{"type": "message", "role": "user", "content": [part]}]
    said = {"type": "input_text", "text": QUESTIONS[0]["instructions"]}
    questions = [{**QUESTIONS[0], "instructions": [said]}, *QUESTIONS[1:]]
    fields = {"input": items, "questions": questions, "prompt_cache_options": {"ttl": "30m"}}
    assert server.post(PATH, fields)[1] == server.post(PATH, BODY)[1]


CHOICE = {"type": "choice", "instructions": "x"}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": 3}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input[0].role"),
        ({"questions": []}, "questions"),
        ({"questions": QUESTIONS[:1] * 65}, "questions"),
        ({"questions": [{"type": "other", "instructions": "x"}]}, "questions[*].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[*].instructions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[*].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 27}]}, "questions[*].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": 1}] * 2}]}, None),
        ({"model": "other"}, "model"),
        ({"temperature": 1}, "temperature"),
        ({"input": "word " * 4000}, "input"),
        ({"input": "word " * 500}, "questions"),
    ],
)
def test_what_is_not_asked_well_is_named(server, change, param):
    status, reported, _ = server.post(PATH, {**BODY, **change})
    assert status in (400, 404)
    error = reported["error"]
    if param is not None:
        assert error["param"].replace("[0]", "[*]") == param.replace("[0]", "[*]")
    assert server.post(PATH, BODY)[0] == 200
