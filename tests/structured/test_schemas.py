"""Random schemas: whatever text their automata allow, `jsonschema` takes."""

import json
import random

import numpy as np
from jsonschema import Draft202012Validator

from dllm_jax.structured import Budget, JsonSchema
from dllm_jax.structured.formats import FORMATS
from dllm_jax.structured.limits import UNREACHABLE, distances
from dllm_jax.structured.regex import byte_automaton

# Those that `jsonschema` checks without further packages.
CHECKED = [name for name in FORMATS if name in Draft202012Validator.FORMAT_CHECKER.checkers]
PATTERNS = ["^[a-z]+$", "^[A-Z]{2}-[0-9]{3}$", "ab", "^a", "z$", '^(x|"y"|\\\\)$', "^[^a]{1,3}$"]
NAMES = ["a", "b", "name", "é x", 'q"q']
VALUES = ["a", 1, None, 2.5, True, 'é"\\', [1, {"x": 2}], {"k": "v"}, "zz\n"]


def _number(draw, kind, low, high):
    schema = {"type": kind}
    if draw.random() < 0.6:
        schema[draw.choice(["minimum", "exclusiveMinimum"])] = low
    if draw.random() < 0.6:
        schema[draw.choice(["maximum", "exclusiveMaximum"])] = high
    return schema


def _bounded(draw, schema, low, high):
    least = draw.randrange(3)
    some = {low: least, high: draw.randrange(least, 5)}
    return schema | {name: count for name, count in some.items() if draw.random() < 0.5}


def _object(draw, inner):
    names = draw.sample(NAMES, draw.randrange(1, 5))
    schema = {"type": "object", "properties": {name: inner() for name in names}}
    if draw.random() < 0.7:
        schema["required"] = draw.sample(names, draw.randrange(len(names) + 1))
    if draw.random() < 0.6:
        schema["additionalProperties"] = draw.choice([False, True, {"type": "integer"}])
    return schema


def _map(draw, inner):
    if draw.random() < 0.3:
        return {"patternProperties": {"^x_": inner()}, "additionalProperties": False}
    schema = {"type": "object", "additionalProperties": inner()}
    if draw.random() < 0.3:
        schema["propertyNames"] = {"pattern": "^[a-z]{1,3}$"}
    return schema | draw.choice([{}, {"minProperties": 1}, {"maxProperties": 2}])


def _tuple(draw, inner):
    schema = {"type": "array", "prefixItems": [inner() for _ in range(draw.randrange(1, 3))]}
    if draw.random() < 0.7:
        schema["items"] = draw.choice([False, {"type": "boolean"}])
    return schema | draw.choice([{}, {"minItems": 1}, {"maxItems": 3}])


def _told_apart(inner):
    def one(kind):
        own = {"kind": {"const": kind}, "value": inner()}
        return {"type": "object", "properties": own, "required": ["kind"]}

    return {"oneOf": [one("x"), one("y")]}


def random_schema(draw, depth=0):
    """A schema of everything that is supported."""

    def inner():
        return random_schema(draw, depth + 1)

    flat = [
        lambda: _number(draw, "integer", draw.randrange(-50, 50), draw.randrange(50, 400)),
        lambda: _number(draw, "number", round(draw.uniform(-5, 5), 1), draw.choice([5.25, 7, 9.9])),
        lambda: _bounded(draw, {"type": "string"}, "minLength", "maxLength"),
        lambda: {"type": draw.sample(["string", "integer", "null", "boolean"], 2)},
        lambda: {"enum": draw.sample(VALUES, draw.randrange(1, 5))},
        lambda: {"const": draw.choice(VALUES)},
        lambda: {"type": "string", "format": draw.choice(CHECKED)},
        lambda: {"type": "string", "pattern": draw.choice(PATTERNS)},
        lambda: {"$ref": "#/$defs/" + draw.choice("AB")},
    ]
    deep = [
        lambda: _object(draw, inner),
        lambda: _map(draw, inner),
        lambda: _tuple(draw, inner),
        lambda: _bounded(draw, {"type": "array", "items": inner()}, "minItems", "maxItems"),
        lambda: {"type": "array", "items": inner(), "uniqueItems": True},
        lambda: {"anyOf": [inner() for _ in range(draw.randrange(1, 3))]},
        lambda: _told_apart(inner),
    ]
    return draw.choice(flat if depth > 2 else [*flat, *deep])()


DEFS = {"A": {"type": "integer", "minimum": 3}, "B": {"type": "string", "maxLength": 4}}


def drawn(draw, table, accepting, distance):
    """A text of an automaton: anything for a while, then the shortest way out."""
    state, said, length = 1, b"", draw.randrange(60)
    while not (accepting[state] and (len(said) >= length or draw.random() < 0.2)):
        row = table[state]
        onto = [target for target in np.unique(row) if distance[target] < UNREACHABLE]
        if not onto:
            break
        if len(said) >= length:
            onto = [min(onto, key=lambda target: distance[target])]
        state = draw.choice(onto)
        said += bytes([draw.choice(np.flatnonzero(row == state).tolist())])
    return said.decode()


def test_texts_of_random_schemas_are_instances():
    draw, num_refused = random.Random(0), 0
    for _ in range(40):
        schema = {"$defs": DEFS} | random_schema(draw)
        budget = Budget()
        try:
            table, accepting = byte_automaton(JsonSchema(schema).tree(budget), budget)
        except ValueError as error:
            if "20000 states" not in str(error) and "to compile" not in str(error):
                raise
            num_refused += 1
            continue
        distance = distances(table, accepting, budget)
        judge = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        for _ in range(4):
            judge.validate(json.loads(drawn(draw, table, accepting, distance)))
    assert num_refused < 2
