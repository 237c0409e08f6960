"""Schemas as tools and people write them, of any draft: what is taken, what is not, and why."""

import contextlib
import json
import random
import re

import pytest
from jsonschema import validators
from jsonschema.validators import Draft202012Validator

from dllm_jax.structured import Budget, JsonSchema, fitting
from dllm_jax.structured.limits import distances
from dllm_jax.structured.regex import accepts, byte_automaton
from tests.structured.test_schemas import drawn

DRAFT_3, DRAFT_4, DRAFT_7 = (
    {"$schema": f"http://json-schema.org/draft-0{number}/schema#"} for number in (3, 4, 7)
)
WORD = {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3}
ONLY_A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
ONLY_B = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
LIST = {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}, "v": {"enum": [1]}}}}}
V1 = {"v": 1}

# A name, a schema, instances that can be written, and texts that cannot.
TAKEN = [
    # drafts
    ("draft 4's id", DRAFT_4 | {"id": "http://x.org/s", "type": "null"}, [None], ["1"]),
    (
        "draft 4's outer bounds",
        DRAFT_4 | {"minimum": 0, "exclusiveMinimum": True},
        [1, 0.5],
        ["0", "-1"],
    ),
    ("bounds that are not outer", DRAFT_4 | {"maximum": 2, "exclusiveMaximum": False}, [2], ["3"]),
    (
        "draft 3",
        DRAFT_3 | {"properties": {"a": {"type": "any", "required": True, "divisibleBy": 5}}},
        [{"a": 10}],
        ["{}", '{"a":7}'],
    ),
    ("draft 3's extends", DRAFT_3 | {"extends": {"type": "integer"}, "minimum": 3}, [3], ["2"]),
    (
        "a tuple",
        DRAFT_7
        | {"items": [{"const": 1}, {"const": "x"}], "additionalItems": False, "minItems": 1},
        [[1], [1, "x"]],
        ["[]", '[1,"x",2]'],
    ),
    (
        "a tuple that goes on",
        DRAFT_7 | {"items": [{"const": 1}], "additionalItems": WORD},
        [[1, "a"]],
        ["[2]"],
    ),
    (
        "more items of no tuple",
        {"items": {"const": 1}, "additionalItems": False},
        [[1, 1]],
        ["[2]"],
    ),
    ("dependencies", {"properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}}, [{}], []),
    # references
    (
        "what stands beside a reference",
        {"$defs": {"x": {"properties": {"a": WORD}}}, "$ref": "#/$defs/x", "required": ["a"]},
        [{"a": "b"}],
        ["{}"],
    ),
    (
        "which says nothing before 2019",
        DRAFT_7
        | {"definitions": {"x": {"enum": [1, "a"]}}, "$ref": "#/definitions/x", "type": "null"},
        [1, "a"],
        ["null"],
    ),
    (
        "a sibling of a reference, in a draft by a name that no judge knows",
        {"$schema": "https://json-schema.org/draft-07/schema"}
        | {"definitions": {"x": WORD}, "$ref": "#/definitions/x", "maxLength": 1},
        ["a"],
        ['"ab"'],
    ),
    ("percent signs", {"$defs": {"a b/%": WORD}, "$ref": "#/$defs/a%20b~1%25"}, ["ab"], ["1"]),
    ("an anchor", {"$defs": {"x": {"$anchor": "here"} | WORD}, "$ref": "#here"}, ["ab"], ["1"]),
    (
        "draft 4's name",
        DRAFT_4 | {"definitions": {"x": {"id": "#here"} | WORD}, "$ref": "#here"},
        ["a"],
        ["1"],
    ),
    (
        "an address within",
        {"$id": "http://x.org/a/s", "$defs": {"x": {"$id": "w"} | WORD}, "$ref": "/a/w"},
        ["a"],
        ["1"],
    ),
    (
        "its own address",
        {"$id": "http://x.org/s", "$defs": {"x": WORD}, "$ref": "http://x.org/s#/$defs/x"},
        ["a"],
        ["1"],
    ),
    # recursion, three levels deep
    (
        "a list within itself",
        LIST | {"$ref": "#/$defs/n"},
        [{}, {"next": {"next": V1}}],
        [json.dumps({"next": {"next": {"next": V1}}})],
    ),
    ("a tree", {"items": {"$ref": "#"}, "type": "array"}, [[], [[], [[]]]], ["[[[[]]]]"]),
    (
        "another alternative",
        {"anyOf": [{"const": 1}, {"prefixItems": [{"$ref": "#"}], "minItems": 1, "items": False}]},
        [1, [1], [[1]]],
        ["[[[[1]]]]", "[]"],
    ),
    # together
    ("parts", {"allOf": [ONLY_A, ONLY_B]}, [{"a": 1, "b": 2}], ['{"a":1}']),
    (
        "a type narrowed",
        {"type": ["integer", "string"], "allOf": [{"type": ["number", "null"]}]},
        [1],
        ["null", '"a"', "1.5"],
    ),
    (
        "bounds of several",
        {"allOf": [{"minimum": 2}, {"maximum": 3}], "type": "integer"},
        [2],
        ["1"],
    ),
    ("alternatives beside", {"minimum": 2, "anyOf": [{"const": 1}, {"const": 5}]}, [5], ["1"]),
    (
        "one of two names",
        {"properties": {"a": WORD, "b": WORD}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}, {"b": "x"}],
        ["{}", '{"a":"x","b":"x"}'],
    ),
    (
        "kinds with defaults",
        {"oneOf": [{"properties": {"kind": {"const": one}, one: WORD}} for one in "xy"]},
        [{"kind": "x", "x": "a"}, {"kind": "y", "y": "a"}],
        ['{"x":"a"}', '{"kind":"z"}'],
    ),
    (
        "a condition on a kind",
        {
            "properties": {"kind": {"enum": ["x", "y"]}, "a": WORD},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
            "then": {"required": ["a"]},
            "else": {"properties": {"a": False}},
        },
        [{"kind": "x", "a": "b"}, {"kind": "y"}],
        ['{"kind":"x"}', '{"kind":"y","a":"b"}'],
    ),
    ("a condition that always holds", {"if": {}, "then": {"type": "null"}}, [None], ["1"]),
    (
        "a condition on a free text",
        {
            "properties": {"type": {"type": "string"}, "a": WORD},
            "allOf": [
                {"if": {"properties": {"type": {"const": "x"}}}, "then": {"required": ["a"]}}
            ],
        },
        [{"type": "x", "a": "b"}, {"type": "y"}, {"a": "b"}],
        ['{"type":"x"}', "{}"],
    ),
    (
        "not two names",
        {
            "type": ["object", "null"],
            "properties": {"a": WORD, "b": WORD},
            "not": {"required": ["a", "b"]},
        },
        [{"b": "x"}, {}],
        ['{"a":"b","b":"x"}', "null"],
    ),
    (
        "not listed texts",
        {"type": "string", "not": {"enum": ["a", "b."]}},
        ["", "c", "bx"],
        ['"a"', '"b."'],
    ),
    (
        "not a version",
        {"properties": {"v": {"type": "integer"}}, "not": {"properties": {"v": {"const": 1}}}},
        [{"v": 2}],
        ['{"v":1}', "{}"],
    ),
    (
        "arrays of two kinds",
        {"oneOf": [{"type": "array", "items": WORD}, {"type": "array", "items": {"const": 1}}]},
        [["a"], [1, 1]],
        ["[]", '["a",1]'],
    ),
    (
        "alternatives of optional names",
        {"oneOf": [{"properties": {n: WORD}, "additionalProperties": False} for n in "ab"]},
        [{"a": "x"}, {"b": "x"}],
        ["{}", '{"a":"x","b":"x"}'],
    ),
    ("the end of a text", {"pattern": r"^[0-9]{2}$(?![\s\S])"}, ["12"], ['"12\\n"', '"1"']),
    ("not a name", {"properties": {"a": {}, "b": {}}, "not": {"required": ["a"]}}, [{"b": 1}], []),
    ("not a type", {"not": {"type": ["null", "array"]}}, [1, {}, "a"], ["null", "[]"]),
    (
        "nothing unevaluated",
        {"allOf": [ONLY_A], "properties": {"b": WORD}, "unevaluatedProperties": False},
        [{"a": 1}, {"b": "x", "a": 1}],
        ['{"a":1,"c":1}'],
    ),
    # strings
    (
        "a format and a pattern",
        {"format": "uuid", "pattern": "^[0-9a-f-]*$", "type": "string"},
        ["12345678-1234-1234-1234-123456789abc"],
        ['"12345678-1234-1234-1234-123456789ABC"', '"a"'],
    ),
    (
        "zod's address",
        {
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
            r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        ["a.b@c.org"],
        ['"a..b@c.org"', '"a@c"', '"a@c.1"'],
    ),
    (
        "pydantic's decimal",
        {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ["1.5", "-00.1", "7."],
        ['""', '"-."', '"1e5"'],
    ),
    (
        "a name without a value",
        {"properties": {"a": {"pattern": "^.{2}$", "maxLength": 1, "type": "string"}, "b": WORD}},
        [{}, {"b": "x"}],
        ['{"a":"xy"}', '{"a":"x"}'],
    ),
    ("lengths and a pattern", WORD, ["a", "abc"], ['"abcd"', '""', '"A"']),
    (
        "an address of any length",
        {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
        ["http://a.example/", "https://a.b.c:80/d/e"],
        ['"a"'],
    ),
    ("a named group", {"pattern": "^(?<y>\\d{4})$"}, ["2024"], ['"24"']),
    ("anchors of alternatives", {"pattern": "^a$|^(b|c)$"}, ["a", "b"], ['"ab"', '"d"']),
    ("any character", {"pattern": "^[^]$"}, ["a", "\n"], ['"ab"']),
    ("a code point", {"pattern": "^\\u{1F600}\\u0041$"}, ["😀A"], ['"A"']),
    # numbers, arrays and objects
    ("multiples", {"type": "integer", "multipleOf": 3, "minimum": 0}, [0, 9, 12], ["1", "10"]),
    ("32 bits", {"type": "integer", "format": "int32"}, [1, -(2**31)], [str(2**31)]),
    ("a far bound", {"type": "number", "minimum": 0, "maximum": 1e308}, [1e5], ["-1"]),
    ("a set", {"items": {"enum": ["a", "b"]}, "uniqueItems": True}, [["b", "a"]], ['["a","a"]']),
    (
        "a larger set",
        {"items": {"enum": [*"abcdef"]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
        [["a", "c"], ["a", "b", "f"]],
        ['["a"]', '["a","a"]', '["a","b","c","d"]'],
    ),
    (
        "a set of texts",
        {"items": {"type": "string"}, "uniqueItems": True, "minItems": 1},
        [["x", "a", "m"], ["beta"], ["9", "old", "alpha", "key"]],
        ["[]", '["a","a"]', '["a","z","\\u0061"]'],
    ),
    (
        "a larger set of texts",
        {"items": WORD, "uniqueItems": True, "minItems": 6},
        [["a", "e", "j", "n", "r", "w"]],
        ['["a","a","j","n","r","w"]'],
    ),
    (
        "a set of addresses",
        {"items": {"type": "string", "format": "uri"}, "uniqueItems": True, "minItems": 2},
        [["https://x.org/a", "https://x.org/z"]],
        ['["http://x.org/","http://x.org/"]'],
    ),
    (
        "a set of numbers",
        {"items": {"type": "number"}, "uniqueItems": True},
        [[443, 80, 8080], [-1]],
        ["[1,1.0]", "[0,-0]", "[443,443]"],
    ),
    (
        "a set of days",
        {
            "items": {"type": "integer", "minimum": 1, "maximum": 7},
            "uniqueItems": True,
            "minItems": 7,
        },
        [[1, 2, 3, 4, 5, 6, 7]],
        ["[1,1,2,3,4,5,6]"],
    ),
    (
        "a set of objects",
        {
            "items": {
                "properties": {"on": {"type": "boolean"}, "name": WORD},
                "required": ["name"],
            },
            "uniqueItems": True,
        },
        [[{"name": "x"}, {"on": True, "name": "b"}]],
        ['[{"name":"x"},{"name":"x"}]', '[{"name":"x"},{"on":true,"name":"x"}]'],
    ),
    (
        "a set of pairs",
        {
            "items": {"prefixItems": [WORD, {"const": 1}], "items": False},
            "uniqueItems": True,
            "type": "array",
        },
        [[["a"], ["x", 1]]],
        ['[["a"],["a"]]', "[[],[]]"],
    ),
    ("a set of anything", {"uniqueItems": True}, [["a", 1, False]], ["[1,1]"]),
    ("one item at most", {"items": WORD, "uniqueItems": True, "maxItems": 1}, [["a"]], []),
    ("a name twice", {"required": ["a", "a"], "properties": {"b": False}}, [{"a": 1}], ["{}"]),
    (
        "counted names",
        {"properties": {"a": WORD, "b": WORD, "c": WORD}, "minProperties": 1, "maxProperties": 2},
        [{"a": "x"}, {"b": "x", "c": "x"}],
        ["{}", '{"a":"x","b":"x","c":"x"}'],
    ),
    (
        "patterns of names",
        {"patternProperties": {"^a": {"type": "integer"}, "b$": {"minimum": 2}}},
        [{"a": 1}, {"ab": 2}, {"xb": 3}],
        ['{"ab":1}', '{"xb":1}'],
    ),
    (
        "names that no pattern has, by any standard",
        {"patternProperties": {"b$": {"const": 1}}, "additionalProperties": {"const": 2}},
        [{"ab": 1}, {"ba": 2}],
        ['{"ab":2}', '{"b\\n":2}', '{"b\\n":1}'],
    ),
    (
        "a look-ahead, by any standard",
        {"pattern": r"^(?!a$)\w+\s?$"},
        ["b", "ab"],
        ['"a"', '"a\\n"'],
    ),
    # listed values
    ("1.0 is whole", {"type": "integer", "enum": [1.0, 2.5]}, [1.0], ["2.5"]),
    ("small and large", {"minimum": 0, "enum": [1e-05, 1e22, -1]}, [1e-05, 1e22], ["-1"]),
    ("controls", {"maxLength": 3, "enum": ["a\u0001b", "abcd"]}, ["a\u0001b"], ['"abcd"']),
    (
        "their own order",
        {"properties": {"a": {}, "b": {}}, "const": {"b": 1, "a": 2}},
        [{"b": 1, "a": 2}],
        [],
    ),
    ("true is not 1", {"enum": [True, 1, "1"], "type": "number"}, [1], ["true"]),
]


def _automaton(schema):
    budget = Budget()
    return byte_automaton(JsonSchema(schema).tree(budget), budget)


@pytest.mark.parametrize(
    ("schema", "fitting", "others"), [one[1:] for one in TAKEN], ids=[one[0] for one in TAKEN]
)
def test_c45_13_a_real_schema_takes_its_instances(schema, fitting, others):
    """Whatever is drawn is an instance too."""
    automaton = _automaton(schema)
    for value in fitting:
        assert accepts(automaton, json.dumps(value, ensure_ascii=False).encode()), value
    for text in others:
        assert not accepts(automaton, text.encode()), text
    made = validators.validator_for(schema, default=Draft202012Validator)
    judge = made(schema, format_checker=made.FORMAT_CHECKER)
    draw, distance = random.Random(0), distances(*automaton, Budget())
    for _ in range(6):
        with contextlib.suppress(re.error):  # a pattern that Python does not read
            judge.validate(json.loads(drawn(draw, *automaton, distance)))


def test_c45_13_unknown_keywords_are_annotations_and_noted():
    budget = Budget()
    schema = {
        "items": {"minLenght": 3, "type": "string", "format": "phone"},
        "x-order": 1,
        "title": "known",
        "nullable": False,
        "$async": True,
    }
    byte_automaton(JsonSchema(schema).tree(budget), budget)
    assert [*budget.notes] == [
        *("$.x-order", "$.nullable", "$.$async"),
        *("$.items.minLenght", "$.items.format 'phone'"),
    ]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"contains": {}}, "$.contains is not supported"),
        ({"$dynamicRef": "#x"}, "$.$dynamicRef is not supported"),
        ({"disallow": "string"}, "$.disallow is not supported"),
        ({"prefixItems": [{}], "items": {"enum": [1]}, "uniqueItems": True}, "$.uniqueItems"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "shares instances"),
        ({"multipleOf": 0.01}, "$.multipleOf"),
        ({"multipleOf": 0}, "$.multipleOf must be above 0"),
        ({"pattern": "\\bx"}, "$.pattern"),
        ({"$ref": "other.json#/x"}, "no place within the schema"),
        ({"type": ["string", "date"]}, "'date' is no type"),
    ],
)
def test_c45_13_what_cannot_be_held_is_refused_by_name(schema, said):
    with pytest.raises(ValueError, match="JSON schema: ") as raised:
        _automaton(schema)
    assert said in str(raised.value)


def test_c45_13_less_is_written_where_all_would_be_too_large():
    """What less is written is said, and a schema that fits is held to in full."""
    long = {"type": "string", "maxLength": 5000}
    inner = {"type": "object", "properties": {"a": long, "b": long}, "required": ["b"]}
    budget = Budget()
    schema = {"properties": {"c": inner, "d": long, "e": {"type": "array", "items": inner}}}
    automaton = fitting(JsonSchema(schema), budget, 1024)
    assert len(automaton[0]) < 1024
    assert accepts(automaton, b'{"c":{"b":"' + 10 * b"x" + b'"},"d":""}')
    assert not accepts(automaton, b'{"c":{"b":"' + 5001 * b"x" + b'"}}')
    assert any("$.properties.d.maxLength 5000: at most" in note for note in budget.notes)
    budget = Budget()
    small = {"type": "string", "maxLength": 100}
    automaton = fitting(JsonSchema(small), budget, 1024)
    assert accepts(automaton, b'"' + 100 * b"x" + b'"')
    assert not budget.notes


SPACES = "\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\ufeff"


@pytest.mark.parametrize(
    ("pattern", "without", "kept"),
    [
        (r"^\S$", SPACES + " \t\n\r\x85", "aé😀"),
        (r"^[^\s]$", SPACES + " \t\n\r\x85", "aé😀"),
        (r"^[^\S]$", "a\x85\ufeff", " \u00a0\u3000"),
        (r"^.$", "\n\r\u2028\u2029", "a é\x85"),
        (r"^\D$", "1\u0661", "aé"),
        (r"^[^\w]$", "a_1é", " -€"),
        (r"^\w$", "é-", "a_1"),
    ],
)
def test_c45_13_classes_of_a_pattern_are_those_of_ecma_262(pattern, without, kept):
    automaton = _automaton({"type": "string", "pattern": pattern})
    for char in without:
        assert not accepts(automaton, json.dumps(char, ensure_ascii=False).encode()), ascii(char)
    for char in kept:
        assert accepts(automaton, json.dumps(char, ensure_ascii=False).encode()), ascii(char)


@pytest.mark.parametrize(
    ("name", "fitting", "others"),
    [
        ("duration", "P1D P1DT2H3M4S PT5M P2W P1Y2M3D PT1H2M", "PT1H2S P1Y2D P1W1D P PT 1D P1H"),
        ("hostname", "a a-b a.b1.example", "xn--a ab--cd -a a- a..b a_b"),
        ("uuid4", "12345678-1234-4234-8234-123456789abc", "12345678-1234-1234-8234-123456789abc"),
        ("json-pointer", "/a/b~0~1 /", "a /~2"),
        ("base64", "YWI= YQ== YWJj", "YWI YR== a"),
        ("uri-reference", "/a/b http://a.b/", "\\ <a>"),
        ("idn-email", "a@b.org", "a"),
    ],
)
def test_c45_13_formats_are_those_of_their_standards(name, fitting, others):
    automaton = _automaton({"type": "string", "format": name})
    for text in fitting.split():
        assert accepts(automaton, json.dumps(text).encode()), text
    for text in others.split():
        assert not accepts(automaton, json.dumps(text).encode()), text
