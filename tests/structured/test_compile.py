"""Automata accept what `re` matches as a whole, by bytes and by any spelling in tokens."""

import itertools
import json
import random
import re
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from dllm_jax import structured
from dllm_jax.structured import (
    Budget,
    Choice,
    JsonSchema,
    Regex,
    first_bytes,
    fitting,
    limits,
    spellings,
    token_bytes,
)
from dllm_jax.structured import automaton as automata
from dllm_jax.structured.automaton import behind_marker, closed
from dllm_jax.structured.logic import NoInstance
from dllm_jax.structured.regex import accepts, byte_automaton

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


def _automaton(constraint):
    budget = Budget()
    return byte_automaton(constraint.tree(budget), budget)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_automaton_accepts_what_re_matches(pattern):
    rng = random.Random(0)
    automaton = _automaton(Regex(pattern))
    for text in [*_texts(rng, pattern), "abab", "yes!", "0.5", "üé", "abb", "a 1"]:
        wanted = re.fullmatch(pattern, text, re.ASCII) is not None
        assert accepts(automaton, text.encode()) == wanted, text


def check_spellings(module, pattern):
    """What a module `automaton` walks by tokens is what the automaton over bytes walks.

    Also by tokens that end within a character, and that run through an accepting state.
    """
    rng = random.Random(1)
    automaton = _automaton(Regex(pattern))
    texts = _texts(rng, pattern, 60)
    pieces = {bytes([byte]) for text in texts for byte in text.encode()} | {b"q"}
    for text in texts:
        data = text.encode()
        first = rng.randrange(len(data) + 1)
        pieces.add(data[first : first + rng.randrange(1, 5)])
    pieces.discard(b"")
    spelt = [b"a", None, *sorted(pieces)]  # the first one may not be written
    number = {piece: i for i, piece in enumerate(spelt)}
    made = module.closed(*automaton, module.spellings(spelt), [1], np.array([0]), Budget())
    assert made.class_of[0] == 0
    assert (made.distance[made.delta[made.delta > 0]] < limits.UNREACHABLE).all()
    assert (made.delta[made.end] == made.end).all()
    for text in texts:
        data, state, place = text.encode(), made.start, 0
        while place < len(data):
            fitting = [n for n in range(1, 5) if data[place : place + n] in number]
            size = min(rng.choice(fitting), len(data) - place)
            size = size if data[place : place + size] in number else 1
            state = made.delta[state, made.class_of[number[data[place : place + size]]]]
            place += size
        assert (made.distance[state] == 0) == accepts(automaton, data), text
        ended = made.delta[state, made.class_of[1]]
        assert (ended == made.end) == accepts(automaton, data)


def check_dead_ways(module):
    """No token leads to where the vocabulary cannot spell the rest."""
    words = module.spellings([None, None, b"a", b"b", b"c"])
    made = module.closed(*_automaton(Regex("a(b|cd)")), words, [1], np.array([0]), Budget())
    behind = made.delta[made.start, made.class_of[2]]
    assert made.delta[behind, made.class_of[3]] != 0
    assert made.delta[behind, made.class_of[4]] == 0
    assert made.distance[made.start] == 2


def test_no_token_leads_to_where_the_rest_cannot_be_spelt():
    check_dead_ways(automata)


@pytest.mark.parametrize("pattern", PATTERNS[:8])
def test_every_spelling_in_tokens_is_walked_alike(pattern):
    check_spellings(automata, pattern)


def _strip():
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )


@pytest.mark.parametrize(
    ("decoder", "num_first"),
    [
        (_strip(), 6),
        (decoders.Metaspace(), 5),
        (decoders.Metaspace(prepend_scheme="never"), 0),
    ],
    ids=["strip", "metaspace", "never"],
)
@pytest.mark.parametrize("pattern", ["ab?", " ab?", "[ab ]{2}b", "(a| )*b?", "(?:.|\n)*"])
def test_b10_texts_match_as_they_are_decoded(decoder, num_first, pattern):
    """All texts of up to three tokens; some decoders drop the first space, or all of a token."""
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "▁", "▁a", "a", "b", "ab", "▁ab", "▁▁", "▁▁b"]
    words += ["<0x20>"] if num_first == 6 else []
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    spelt = token_bytes(tokenizer)
    first = first_bytes(tokenizer, spelt)
    assert len(first) == num_first
    tree = spellings(spelt, first)
    made = closed(*_automaton(Regex(pattern)), tree, [0], np.array([], int), Budget())
    found = 0
    for count in range(4):
        for ids in itertools.product(range(1, len(words)), repeat=count):
            state = made.start
            for token in ids:
                state = made.delta[state, made.class_of[token]]
            fits = re.fullmatch(pattern, tokenizer.decode(ids)) is not None
            assert (made.distance[state] == 0) == fits, ids
            found += fits
    assert found
    # In one automaton for texts that begin elsewhere, the first token is like the others.
    assert made.start == (1 if not first else made.end - 1)


def test_a_constraint_behind_a_marker_begins_with_its_first_place():
    """Ids: 0 never, 1 stop, 2 special, 3 the marker, then text; `distance` is by trying all."""
    spelt = [None, None, None, None, b"a", b"b", b"ab", b"q"]
    inner = closed(*_automaton(Regex("(ab)+")), spellings(spelt), [1], np.array([0]), Budget())
    made = behind_marker(inner, 3, [1], np.array([0]))
    taken = {
        (3, 6): True,
        (2, 7, 5, 3, 4, 5): True,
        (4, 3, 6, 6): True,
        (6,): False,  # no marker yet
        (3, 3, 6): False,
        (3, 7): False,
        (0, 3, 6): False,
        (3, 6, 2): False,
    }
    for ids, is_taken in taken.items():
        state = made.start
        for i in ids:
            state = made.delta[state, made.class_of[i]]
        assert (made.distance[state] == 0) == is_taken, ids
        assert (made.delta[state, made.class_of[1]] == made.end) == is_taken, ids
    assert made.distance[made.start] == 2
    assert made.delta[made.start, made.class_of[1]] == 0  # no end before the marker
    text_marker = behind_marker(inner, 4, [1], np.array([0]))
    state = text_marker.start
    for i in (7, 4, 4, 5):  # a marker, then the text that it is part of
        state = text_marker.delta[state, text_marker.class_of[i]]
    assert text_marker.distance[state] == 0


def test_a_choice_is_one_of_its_texts():
    automaton = _automaton(Choice(["a.b", "é|c"]))
    for text, fits in (("a.b", True), ("axb", False), ("é|c", True), ("c", False)):
        assert accepts(automaton, text.encode()) == fits


NAMED = {"type": "object", "properties": {"kind": {"const": "n"}}, "required": ["kind"]}
COUNTED = {
    "type": "object",
    "properties": {"kind": {"const": "c"}, "of": {"type": "integer"}},
    "required": ["kind", "of"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}
# A schema, instances that it takes, and values that it does not.
TAKEN = [
    (
        PERSON,
        [{"name": "Ann", "age": 3, "tags": ["a", None]}, {"age": -3, "tags": []}, {"age": 0}],
        [{"name": "Anne", "age": 3}, {"name": "Ann"}, {"age": 3.5}, {"age": 3, "x": 1}, []],
    ),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é€😀"], ["a", "abcd"]),
    ({"pattern": "^[A-Z]{2}-\\d+$"}, ["AB-1"], ["AB-", "xAB-1"]),
    ({"pattern": 'b"|^\\\\'}, ['ab"c', "\\x"], ["b", "x\\"]),
    ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 2}, ["ab"], ["abc", ""]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01"]),
    ({"type": "string", "format": "date-time"}, ["2024-01-31T23:59:59Z"], ["2024-01-31"]),
    ({"format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567"]),
    ({"format": "email"}, ["a.b@c.org"], ["a.b"]),
    ({"type": "integer", "minimum": -3, "exclusiveMaximum": 120}, [-3, 0, 119], [-4, 120, 1.5]),
    ({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2}, [0.51, 1, 2, 2.0], [0.5, 2.01, 3]),
    ({"minimum": 0}, [0, 0.25, 7], [-1]),
    ({"enum": ["a", 1, {"b": [2]}]}, ["a", 1, {"b": [2]}], ["b", 2]),
    ({"type": "integer", "enum": ["a", 1, True, 2.5]}, [1], ["a", True, 2.5]),
    ({"type": "string", "maxLength": 1, "enum": ["a", "bc"]}, ["a"], ["bc"]),
    ({"type": ["null", "boolean"]}, [None, True], [0]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, [3, None], ["3"]),
    ({"oneOf": [NAMED, COUNTED]}, [{"kind": "n"}, {"kind": "c", "of": 1}], [{"kind": "c"}]),
    ({"allOf": [{"type": "null"}], "title": "x"}, [None], [1]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 2}, [[None] * 2, [None] * 4], [[]]),
    (
        {"type": "array", "prefixItems": [{"type": "null"}, {"const": 1}], "items": False},
        [[], [None], [None, 1]],
        [[1], [None, 1, 1]],
    ),
    (
        {"prefixItems": [{"const": 0}], "items": {"const": 1}, "minItems": 2, "maxItems": 3},
        [[0, 1], [0, 1, 1]],
        [[0], [0, 0], [0, 1, 1, 1]],
    ),
    ({"additionalProperties": {"type": "integer"}}, [{}, {"a": 1, "b": 2}], [{"a": "b"}]),
    (
        {"patternProperties": {"^x-": {"type": "null"}}, "additionalProperties": False},
        [{"x-a": None}],
        [{"y": None}],
    ),
    ({"type": "object", "propertyNames": {"maxLength": 1}, "minProperties": 1}, [{"a": 0}], [{}]),
    ({"type": "object", "required": ["b"]}, [{"b": [1]}], [{}]),
    ({"type": "object"}, [{}, {"a": {"b": 1}}], [[]]),
    ({"type": "object", "properties": {}, "additionalProperties": False}, [{}], [{"a": 1}]),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": {"const": 1}}},
        [[], [1]],
        [[2]],
    ),
    ({}, [1, "a", None, [True, {"a": 1e5}]], []),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), TAKEN)
def test_a_schema_takes_its_instances(schema, fitting, others):
    automaton = _automaton(JsonSchema(schema))
    compact = _automaton(JsonSchema(schema, whitespace="compact"))
    for value, fits in (*((one, True) for one in fitting), *((one, False) for one in others)):
        for layout in ({}, {"indent": 2}, {"separators": (",", ":")}):
            text = json.dumps(value, ensure_ascii=False, **layout)
            assert accepts(automaton, text.encode()) == fits, text
        assert accepts(compact, text.encode()) == fits
    assert not accepts(compact, b" 1")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "number", "multipleOf": 0.5}, "$.multipleOf"),
        ({"properties": {"a": {"contains": {}}}}, "$.properties.a.contains"),
        ({"items": {"oneOf": []}}, "$.items.oneOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[0] shares"),
        ({"allOf": [{"type": "null"}, {"type": "string"}]}, "$ has no instance"),
        ({"$ref": "http://example.org"}, "$.$ref"),
        ({"$ref": "#"}, "$.$ref"),
        ({"$ref": "#b", "$defs": {"a": {"$anchor": "a"}}}, "$.$ref"),
        ({"$ref": "#/$defs/b", "$defs": {}}, "$.$ref"),
        ({"not": {}}, "$.not"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "$.required"),
        ({"type": "word"}, "$.type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "$.maxLength"),
        ({"contains": {"type": "null"}}, "$.contains"),
        ({"pattern": "a(?=a)"}, "not supported"),
        ({"pattern": "("}, "$.pattern"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "no number between"),
        ({"type": "integer", "minimum": "3"}, "$.minimum"),
        ({"items": {"type": "null"}, "uniqueItems": True, "minItems": 2}, "$.minItems"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "$.maxItems"),
        ({"minProperties": 2}, "$.minProperties"),
        ({"enum": []}, "$.enum"),
        ({"type": "null", "const": 1}, "$ lists no value"),
        ({"items": False, "minItems": 1}, "$.minItems"),
        ({"properties": {"a": False}, "required": ["a"]}, "$.required"),
        ({"properties": {"a": 3}}, "$.properties.a"),
        (False, "$"),
    ],
)
def test_what_a_schema_cannot_say_is_refused_by_its_path(schema, path):
    with pytest.raises(ValueError, match=re.escape(path)) as raised:
        _automaton(JsonSchema(schema))
    assert "\n" not in str(raised.value)


def _nested(depth, of="items"):
    schema = {}
    for _ in range(depth):
        schema = {of: schema}
    return schema


def _doubling(count):
    """Each definition refers twice to the next one."""
    refs = [{"$ref": f"#/$defs/{i + 1}"} for i in range(count)]
    defs = {str(i): {"prefixItems": [ref, ref]} for i, ref in enumerate(refs)}
    return {"$ref": "#/$defs/0", "$defs": defs | {str(count): {"type": "null"}}}


HOSTILE = [
    lambda: Regex("(.{0,400}a){40}"),
    lambda: Regex("(a|b)*a(a|b){30}"),
    lambda: Regex("(?:){4000000000}"),
    lambda: Regex("((((a{99}){99}){99}){99}){99}"),
    lambda: Regex("[ab]{0,100000000}"),
    lambda: Regex("(" * 200_000),
    lambda: Regex("(" * 5000 + ")" * 5000),
    lambda: Regex("a|" * 300_000),
    lambda: Regex("(.*a.*b.*c.*d.*e.*f.*g.*h.*i.*j){3}.{20}"),
    lambda: Choice([f"{i:07d}" for i in range(300_000)]),
    lambda: JsonSchema(_nested(40)),
    lambda: JsonSchema('{"items":' * 120_000 + "{}" + "}" * 120_000),
    lambda: JsonSchema(_doubling(30)),
    lambda: JsonSchema({"enum": list(range(10**5, 4 * 10**5))}),
    lambda: JsonSchema({"type": "string", "maxLength": 10**9}),
    lambda: JsonSchema({"type": "array", "items": {}, "minItems": 10**9}),
    lambda: JsonSchema({"type": "integer", "minimum": 10**300}),
    lambda: JsonSchema({"pattern": "(x+x+)+y" * 3000}),
    lambda: JsonSchema({"properties": {f"p{i}": {} for i in range(3000)}}),
    lambda: JsonSchema({"oneOf": [{"pattern": f"{i}.*"} for i in range(200)]}),
]


def _timed(make):
    constraint = make()
    began = time.thread_time()
    try:
        _automaton(constraint)
    finally:
        assert time.thread_time() - began < 15


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_what_explodes_is_refused_in_one_line(number, monkeypatch):
    monkeypatch.setattr(limits, "MOST_S", 0.2)
    with pytest.raises((ValueError, RecursionError)) as raised:
        _timed(HOSTILE[number])
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("first", range(len(limits.EXTENTS) + 1))
@pytest.mark.parametrize("empty", [0, 2, 99])
def test_the_largest_extent_that_fits_is_taken_in_few_attempts(monkeypatch, first, empty):
    """Extents before `first` are too large; from `first` + `empty` on there is no instance."""
    tried, table = [], np.zeros((5, 1), int)

    def made(tree, budget, num_letters):
        at = limits.EXTENTS.index(budget.extent)
        tried.append(at)
        budget.notes[str(at)] = None
        if at >= max(first + empty, 1):
            raise NoInstance("none")
        return (np.zeros((9, 1), int) if at < first else table), np.ones(5, bool)

    monkeypatch.setattr(structured, "byte_automaton", made)
    budget, schema = Budget(), JsonSchema({"type": "boolean"})
    last = min(first + empty, len(limits.EXTENTS)) if first or empty else 1
    if first < last:
        assert fitting(schema, budget, 8)[0] is table
        assert (budget.extent, [*budget.notes]) == (limits.EXTENTS[first], [str(first)])
    else:
        with pytest.raises(ValueError, match="has 10 states, and at most 8 fit"):
            fitting(schema, budget, 8)
    assert len(tried) <= 4
