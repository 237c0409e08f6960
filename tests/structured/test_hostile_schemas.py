"""Whatever stands in a schema or an expression: it compiles, or is refused in one line."""

import json

import pytest

from dllm_jax.structured import Budget, Choice, JsonSchema, Regex, limits
from dllm_jax.structured.limits import Extent
from dllm_jax.structured.regex import byte_automaton
from dllm_jax.structured.tools import Tool, Tools
from dllm_jax.structured.turn_grammar import turn_tree

KEYWORDS = [
    *("$schema", "$id", "id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor"),
    *("$recursiveRef", "$recursiveAnchor", "$vocabulary", "$comment", "$defs", "definitions"),
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("type", "enum", "const", "multipleOf", "divisibleBy", "maximum", "exclusiveMaximum"),
    *("minimum", "exclusiveMinimum", "maxLength", "minLength", "pattern", "format"),
    *("contentEncoding", "contentMediaType", "contentSchema", "maxItems", "minItems"),
    *("uniqueItems", "items", "prefixItems", "additionalItems", "contains", "maxContains"),
    *("minContains", "unevaluatedItems", "maxProperties", "minProperties", "required"),
    *("properties", "patternProperties", "additionalProperties", "propertyNames"),
    *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "disallow", "extends"),
    *("nullable", "discriminator", "example", "x-order"),
]
VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**64 - 1, 2**64, 10**30, -(10**30), 10**5),
    *(1.5, 1.0, -0.0, 1e-300, 1e308, float("nan"), float("inf")),
    *("", "a", "#", "#/", "#/%", "#/%25", "#/%ff", "#/x/0", "#x", "x#/y", "date", "string", "é"),
    *(
        "\ud800",
        "(",
        "(?=a)",
        "a{99999999}",
        "[[a]",
        "[]",
        "[a--b]",
        "\\",
        "a\nb",
        "(?i)a",
        "\\p{L}",
    ),
    *(
        [],
        [None],
        [[]],
        [{}],
        [1],
        [-1],
        ["a"],
        ["a", "a"],
        ["string"],
        ["\ud800"],
        [True],
        [False],
    ),
    *([{"$ref": "#"}], [1, 1.0, True], [{"type": "integer"}, {"type": "string"}], [[[[[[]]]]]]),
    *({}, {"a": None}, {"a": []}, {"a": {}}, {"a": 1}, {"a": True}, {"a": "b"}, {"a": ["b"]}),
    *({"\ud800": {}}, {"a\nb": {"type": 7}}, {"type": None}, {"(": {}}, {"$ref": "#"}),
    *({"type": "string"}, {"enum": []}, {"a": {"b": [{"c": 0}]}}, {"not": {}}, {"minItems": None}),
]


def _nested(value, depth):
    for _ in range(depth):
        value = {"items": [value]}
    return value


@pytest.fixture
def compiled(monkeypatch):
    """Compile, or give the refusal; automata of equal trees are made once, in one budget."""
    monkeypatch.setattr(limits, "MOST_S", 60)
    made, budget = set(), Budget()
    budget.extent = Extent(0)

    def one(make):
        try:
            held = make()
            is_turn = isinstance(held, Tools)
            tree = turn_tree(held, budget) if is_turn else held.tree(budget)
            if str(tree) not in made:
                made.add(str(tree))
                byte_automaton(tree, budget)
        except ValueError as error:
            said = str(error)
            assert said.isprintable(), said
            assert not isinstance(error, UnicodeError)  # noqa: PT017
            assert len(said) < 400
            return said
        return None

    return one


def test_c45_a1_any_keyword_with_any_value_compiles_or_is_refused(compiled):
    num_compiled, count = 0, 0
    for name in KEYWORDS:
        for value in VALUES:
            count += 1
            num_compiled += compiled(lambda: JsonSchema({name: value})) is None  # noqa: B023
    assert count > 5000
    assert num_compiled > 1000


@pytest.mark.parametrize("value", VALUES[:8] + VALUES[-14:])
def test_c45_a1_a_tool_with_any_value_compiles_or_is_refused(value, compiled):
    for name in ("type", "required", "properties", "$ref", "items", "anyOf", "enum", "minItems"):
        schema = json.dumps({"maxItems": "#", "properties": {"a": {}}, name: value})
        compiled(lambda: Tools((Tool("f", schema),)))  # noqa: B023


@pytest.mark.parametrize("said", [str(2**64), str(-(2**63) - 1), "1" + 30 * "0", 5000 * "1"])
def test_c45_a3_integers_over_64_bits_are_refused_by_name(said, compiled):
    for text in (f'{{"minimum": {said}}}', f'{{"default": [{said}]}}'):
        assert "has more than 64 bits" in compiled(lambda: JsonSchema(text))  # noqa: B023
    assert compiled(lambda: JsonSchema({"maximum": 2**64 - 1, "minimum": -(2**63)})) is None


def test_c45_a1_texts_that_no_bytes_spell_are_refused(compiled):
    half = "\ud83d"
    schemas = [{"const": half}, {"enum": [{half: 1}]}, {"properties": {half: {}}}, {"title": half}]
    for make in (
        *(lambda pattern=pattern: Regex(pattern) for pattern in (half, f"{half}a", f"a[{half}b]")),
        lambda: Choice(["a", half]),
        *(lambda escaped=escaped: Regex(escaped) for escaped in (r"\ud83d", r"[\ud800-\udfff]+a")),
        *(lambda one=one: JsonSchema(one) for one in schemas),
        *(lambda one=one: JsonSchema(json.dumps(one)) for one in schemas),
    ):
        assert compiled(make) is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: JsonSchema(_nested({}, 5000)),
        lambda: JsonSchema(_nested({}, 300)),
        lambda: JsonSchema({"enum": [_nested(1, 300)]}),
        lambda: JsonSchema("[" * 100_000),
        lambda: Regex("(?:" * 90 + "a" + ")?" * 90),
        lambda: Regex("(" * 5000 + ")" * 5000),
        lambda: Regex("a{99999999999999999999}"),
        lambda: Regex("(a{20001})"),
        lambda: JsonSchema({"minLength": 2**64 - 1}),
        lambda: JsonSchema({"minItems": 10**9}),
        lambda: JsonSchema({"multipleOf": 1e-300}),
    ],
)
def test_c45_a1_what_is_too_deep_or_too_often_is_refused(make, compiled):
    assert compiled(make) is not None


@pytest.mark.parametrize("pattern", ["[[a]", "[a&&b]", "[a||b]", "[a~~b]", "[+--]", "[--a]"])
def test_c45_a1_a_class_of_odd_signs_warns_of_nothing(pattern, compiled):
    assert compiled(lambda: Regex(pattern)) is None
