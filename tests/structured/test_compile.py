"""Automata accept what `re` matches as a whole, by bytes and by any spelling in tokens."""

import json
import random
import re

import numpy as np
import pytest

from dllm_jax.structured.automaton import closed
from dllm_jax.structured.regex import byte_automaton
from dllm_jax.structured.schema import schema_pattern

PATTERNS = [
    "(ab)+",
    "a{2,4}b?",
    "[^a-c]x|yy*",
    "-?(0|[1-9][0-9]*)(\\.[0-9]+)?",
    "[äöü€]{1,2}[^a]",
    "(yes|no|maybe)!*",
    "\\w+\\s\\d",
    "(a|b)*abb",
    ".{2}",
    "",
]


def _texts(rng, pattern, count=300):
    letters = [*"abcxyy01-.! \n_", "ä", "€", "😀", *re.sub(r"[^\w]", "", pattern)]
    return ["".join(rng.choices(letters, k=rng.randrange(6))) for _ in range(count)]


def _accepts(table, accepting, data):
    state = 1
    for byte in data:
        state = table[state, byte]
    return bool(accepting[state])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_accepts_what_re_matches(pattern):
    rng = random.Random(0)
    table, accepting = byte_automaton(pattern)
    for text in [*_texts(rng, pattern), "abab", "yes!", "0.5", "üé", "abb", "a 1"]:
        wanted = re.fullmatch(pattern, text, re.ASCII) is not None
        assert _accepts(table, accepting, text.encode()) == wanted, text


@pytest.mark.parametrize("pattern", PATTERNS[:8])
def test_every_spelling_in_tokens_is_walked_alike(pattern):
    """Also by tokens that end within a character, and that run through an accepting state."""
    rng = random.Random(1)
    table, accepting = byte_automaton(pattern)
    texts = _texts(rng, pattern, 60)
    pieces = {bytes([byte]) for text in texts for byte in text.encode()} | {b"q"}
    for text in texts:
        data = text.encode()
        first = rng.randrange(len(data) + 1)
        pieces.add(data[first : first + rng.randrange(1, 5)])
    pieces.discard(b"")
    spelt = [None, None, *sorted(pieces)]
    number = {piece: i for i, piece in enumerate(spelt)}
    made = closed(table, accepting, spelt, stop_ids=[1], never=np.array([0]))
    assert made.class_of[0] == 0
    for text in texts:
        data, state, place = text.encode(), made.start, 0
        while place < len(data):
            fitting = [n for n in range(1, 5) if data[place : place + n] in number]
            size = min(rng.choice(fitting), len(data) - place)
            size = size if data[place : place + size] in number else 1
            state = made.delta[state, made.class_of[number[data[place : place + size]]]]
            place += size
        assert (made.distance[state] == 0) == _accepts(table, accepting, data), text
        ended = made.delta[state, made.class_of[1]]
        assert (ended == made.end) == _accepts(table, accepting, data)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "Ann", "age": 3, "tags": ["a", None]}, True),
        ({"age": -3, "tags": []}, True),
        ({"age": 0}, True),
        ({"name": "Anne", "age": 3}, False),
        ({"name": "Ann"}, False),
        ({"age": 3.5}, False),
        ({"age": 3, "x": 1}, False),
        ({"age": 3, "tags": ["a", "a", "a"]}, False),
        ([], False),
    ],
)
def test_a_schema_takes_its_instances(value, fits):
    table, accepting = byte_automaton(schema_pattern(SCHEMA))
    for text in (
        json.dumps(value),
        json.dumps(value, indent=2),
        json.dumps(value, separators=",:"),
    ):
        assert _accepts(table, accepting, text.encode()) == fits


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "integer", "minimum": 1}, "$.minimum"),
        ({"properties": {"a": {"pattern": "x"}}}, "$.properties.a.pattern"),
        ({"items": {"oneOf": []}}, "$.items.oneOf"),
        ({"$ref": "http://example.org"}, "$.$ref"),
        ({"$ref": "#"}, "$.$ref"),
        ({"type": "number", "multipleOf": 2}, "$.multipleOf"),
        ({"not": {}}, "$.not"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "$.required"),
        ({"type": "word"}, "$.type"),
    ],
)
def test_what_a_schema_cannot_say_is_refused_by_its_path(schema, path):
    with pytest.raises(ValueError, match=re.escape(path)):
        schema_pattern(schema)
