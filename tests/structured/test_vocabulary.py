"""Plans over a real vocabulary of 151,643 ids: texts are instances, whatever the model prefers.

The vocabulary is `qwen.tiktoken` of the package `dashscope`; without it nothing runs.
"""

import base64
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dllm_jax import structured
from dllm_jax.runner import grammars
from dllm_jax.strategies.core import grammar_plan
from dllm_jax.strategies.core.constraint import HOLE, KNOWN, SKIP, View
from dllm_jax.structured import Choice, JsonSchema, Regex
from tests.structured.test_constrained_llm import fits
from tests.structured.toys import stacked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("dashscope") is None, reason="needs dashscope"),
]

NUM_IDS, STOP = 151_936, 151_643
W, SLOTS, ROUNDS = 48, 16, 10
PERSON = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}
TOOL = {
    "name": {"enum": ["get_weather", "search"]},
    "arguments": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 14}},
        "required": ["city"],
    },
}


def _object(properties):
    required = list(properties)
    return JsonSchema({"type": "object", "properties": properties, "required": required})


CONSTRAINTS = {
    "choice": Choice(["yes", "no", "maybe so", "größer"]),
    "phone": Regex(r"\(\d{3}\) \d{3}-\d{4}"),
    "time": Regex(r"([01]\d|2[0-3]):[0-5]\d(:[0-5]\d)?Z"),
    "number": Regex(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
    "accepting": Regex("(ab)+"),
    "unicode": Regex("[äöü€日本😀]{2,6}x?"),
    "words": Regex(r"([A-Z][a-z]+ ){2}(has|had) \d{1,3} (pens|books)\."),
    "person": _object(PERSON),
    "tool": _object(TOOL),
    "date": JsonSchema({"type": "string", "format": "date-time"}),
    "array": JsonSchema({"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 4}),
    "bounds": JsonSchema({"type": "number", "minimum": -3.5, "exclusiveMaximum": 120}),
    "map": JsonSchema({"type": "object", "additionalProperties": {"type": "boolean"}}),
}


@pytest.fixture(scope="module")
def words():
    spec = importlib.util.find_spec("dashscope")
    path = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    spelt: list[bytes | None] = [None] * NUM_IDS
    for line in path.read_bytes().splitlines():
        text, number = line.split()
        spelt[int(number)] = base64.b64decode(text)
    return spelt, structured.spellings(spelt)


class _Members:
    """Ids by class, to draw one of each."""

    def __init__(self, class_of, count):
        order = np.argsort(class_of, kind="stable")
        self.ids, self.first = order, np.searchsorted(class_of[order], np.arange(count + 1))

    def drawn(self, rng, shape):
        sizes = np.diff(self.first)
        places = (rng.random((*shape, len(sizes))) * sizes).astype(np.int64)
        return self.ids[np.minimum(self.first[:-1] + places, len(self.ids) - 1)].astype(np.int32)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_texts_of_random_models_are_instances(name, words):
    spelt, tree = words
    one = CONSTRAINTS[name]
    rng = np.random.default_rng(sum(name.encode()))
    automaton = structured.compile(one, tree, [STOP], np.arange(STOP + 1, NUM_IDS), 1024)
    ready = grammars.ready(automaton, NUM_IDS)
    bucket = grammars.bucket_of(ready, None)
    rows = stacked([grammars.padded(ready, bucket)] * SLOTS)
    members = _Members(ready.class_of, bucket.classes)
    shortest = int(automaton.distance[automaton.start])
    plan = jax.jit(grammar_plan.plan)
    for _ in range(ROUNDS):
        room = rng.integers(0, W - shortest + 1, SLOTS) * (rng.random(SLOTS) < 0.7)
        limit = (shortest + room)[:, None]
        tokens = np.full((SLOTS, W), -1, np.int64)
        taste = rng.choice([1.0, 5.0, 30.0])  # of flat laws and of sharp ones
        while (open_ := (tokens < 0) & (np.arange(W) < limit)).any():
            kind = np.where(np.arange(W) >= limit, SKIP, np.where(open_, HOLE, KNOWN))
            known = ready.class_of[np.maximum(tokens, 0)]
            view = View(
                rows,
                jnp.full((SLOTS,), automaton.start, jnp.int32),
                jnp.ones((SLOTS,), bool),
                jnp.asarray(kind, jnp.int32),
                jnp.asarray(known, jnp.int32),
                jnp.zeros((SLOTS,), jnp.int32),
            )
            score = -taste * rng.exponential(size=(SLOTS, W, bucket.classes)).astype(np.float32)
            drawn = jnp.asarray(members.drawn(rng, (SLOTS, W)))
            stats = grammar_plan.ClassStats(drawn, *[jnp.asarray(score)] * 4)
            found = np.asarray(plan(view, stats, jnp.ones((SLOTS, W), bool)).token)
            written = open_ & (rng.random((SLOTS, W)) < rng.choice([0.1, 0.3, 1.0]))
            anything = rng.integers(0, STOP, (SLOTS, W))  # behind the end
            tokens = np.where(written, np.where(found < 0, anything, found), tokens)
        for row, most in zip(tokens, limit[:, 0], strict=True):
            said = row[:most].tolist()
            said = said[: said.index(STOP)] if STOP in said else said
            assert fits(b"".join(spelt[i] for i in said).decode(), one)
