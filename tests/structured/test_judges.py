"""llguidance and outlines-core judge what our automata accept: `pip install -e '.[judges]'`.

What an automaton writes must be a text of theirs too, and with one character changed both must
judge it alike. Where they differ `re` or `jsonschema` decides, and the reason stands here: a kind
of text that theirs has none of, or a promise of ours to hold to less than the schema.
"""

import importlib.util
import json
import random
import re

import pytest
from jsonschema import Draft202012Validator

from dllm_jax.structured import Budget, JsonSchema, Regex
from dllm_jax.structured.limits import distances
from dllm_jax.structured.regex import accepts, byte_automaton
from tests.structured.test_compile import PATTERNS
from tests.structured.test_schemas import DEFS, drawn, random_schema

NEEDED = ("llguidance", "outlines_core")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs llguidance and outlines-core: pip install -e '.[judges]'",
    ),
]

LETTERS = [*'0123456789aABxyz"\\{}[]:, \n.-+eé€_TZ@/']
SPACE = r"[ \n\r\t]*"


def _llguidance(grammar):
    """The judge of a grammar; None where it refuses it."""
    import llguidance

    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    if matcher.is_error():
        return None

    def judge(text):
        matcher.reset()
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return judge


def _llguidance_schema(schema):
    import llguidance

    said, how = json.dumps(schema), {"whitespace_flexible": True}
    return _llguidance(llguidance.LLMatcher.grammar_from_json_schema(said, overrides=how))


def _outlines(pattern):
    """The judge of an expression.

    Its automata have no way on from where a text may end, but for the end: a byte that is in no
    text ends each.
    """
    from outlines_core import Index, Vocabulary

    words = Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    index = Index(rf"(?:{pattern})\x00", words)

    def judge(text):
        state = index.get_initial_state()
        for byte in text.encode() + b"\0":
            state = index.get_next_state(state, byte)
            if state is None:
                return False
        return index.is_final_state(state)

    return judge


def _changed(draw, text):
    """A text with one character more, less, or another."""
    place = draw.randrange(len(text) + 1)
    kind = draw.choice(["more", "less", "other"]) if place < len(text) else "more"
    behind = text[place if kind == "more" else place + 1 :]
    return text[:place] + ("" if kind == "less" else draw.choice(LETTERS)) + behind


def _texts(draw, automaton):
    """Texts of an automaton, and each six times with one character changed."""
    distance = distances(*automaton, Budget())
    for _ in range(4):
        own = drawn(draw, *automaton, distance)
        yield own
        yield from (_changed(draw, own) for _ in range(6))


# --- expressions -------------------------------------------------------------------------------


def random_pattern(draw, depth=0):
    """An expression of everything that is supported."""
    atoms = ["a", "b", "é", "€", "0", r"\.", ".", r"\d", r"\w", r"\s", "[a-c]", "[^a-bé]", r"[\d_]"]
    kind = draw.randrange(6) if depth < 3 else 0
    if kind < 2:
        return draw.choice(atoms)
    inner = [random_pattern(draw, depth + 1) for _ in range(draw.randrange(1, 4))]
    if kind == 2:
        return f"({'|'.join(inner)})"
    if kind == 3:
        return f"(?:{''.join(inner)}){draw.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}'])}"
    return "".join(inner)


def test_random_expressions_are_judged_alike():
    r"""Theirs have classes as `\d` of all of Unicode, ours of ASCII: so those judge ASCII alone."""
    import llguidance

    draw, num_kept, num_changed = random.Random(0), 0, 0
    patterns = [one for one in PATTERNS if one] + [random_pattern(draw) for _ in range(400)]
    for pattern in patterns:
        budget = Budget()
        automaton = byte_automaton(Regex(pattern).tree(budget), budget)
        judges = [
            _llguidance(llguidance.LLMatcher.grammar_from_regex(pattern)),
            _outlines(pattern),
        ]
        for text in _texts(draw, automaton):
            ours = accepts(automaton, text.encode())
            assert ours == (re.fullmatch(pattern, text, re.ASCII) is not None), (pattern, text)
            if "\0" in text or (re.search(r"\\[dws]", pattern) and not text.isascii()):
                continue
            assert [judge(text) for judge in judges] == [ours] * 2, (pattern, text)
            num_kept, num_changed = num_kept + ours, num_changed + (not ours)
    assert min(num_kept, num_changed) > 1000


# --- schemas -----------------------------------------------------------------------------------

# What no string of theirs has: other escapes, and control characters behind ASCII's.
NO_STRING = re.compile("\\\\u|\\\\/|[\x7f-\x9f]")


def _respelt(judge, text):
    """Whether the same numbers with other zeros at their ends are taken.

    llguidance takes 5.20 below 5.25 and not 5.2, and -0.7 from -0.7 on and not -0.70.
    """
    longer = re.sub(r"(\.\d+)(?!\d)", r"\g<1>0", text)
    return judge(longer) or judge(re.sub(r"(\.\d+?)0+(?!\d)", r"\g<1>", text))


def _without(schema, change):
    """A schema with `change` made to each schema in it."""
    if isinstance(schema, list):
        return [_without(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    said = ("const", "enum")
    inner = {k: v if k in said else _without(v, change) for k, v in schema.items()}
    return change(inner)


def _is_only_narrow(schema, text):
    """Whether an instance is none of ours for a promise of ours.

    No properties but those of the schema, no types but those that its keywords are about, no minus
    zero between bounds, one spelling of an escape, and less than all of a format.
    """
    if re.search(r"-0(\.0+)?(?![\d.])", text):
        return True

    def closed(one):
        if "patternProperties" in one:
            return one | {"type": "object"}
        return one | {"additionalProperties": False} if "properties" in one else one

    if not Draft202012Validator(_without(schema, closed)).is_valid(json.loads(text)):
        return True
    free = _without(schema, lambda one: {k: v for k, v in one.items() if k != "format"})
    budget, plain = Budget(), json.dumps(json.loads(text), ensure_ascii=False)
    automaton = byte_automaton(JsonSchema(free).tree(budget), budget)
    return any(accepts(automaton, one.encode()) for one in (text, plain))


def _is_instance(schema, text):
    checker = Draft202012Validator.FORMAT_CHECKER
    try:
        return Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))
    except ValueError:
        return False


def test_random_schemas_are_judged_alike_by_llguidance():
    """It has neither `propertyNames` nor `uniqueItems` nor all formats; the rest is as ours."""
    draw, num_refused, counts = random.Random(1), 0, {True: 0, False: 0}
    for _ in range(600):
        schema, budget = {"$defs": DEFS} | random_schema(draw), Budget()
        try:
            automaton = byte_automaton(JsonSchema(schema).tree(budget), budget)
        except ValueError as error:
            assert "20000 states" in str(error)  # noqa: PT017
            continue
        judge = _llguidance_schema(schema)
        if judge is None:
            assert re.search('propertyNames|uniqueItems|"format"', json.dumps(schema))
            num_refused += 1
            continue
        for text in _texts(draw, automaton):
            ours = accepts(automaton, text.encode())
            counts[ours] += 1
            if judge(text) != ours:
                if ours:
                    assert NO_STRING.search(text) or _respelt(judge, text), (schema, text)
                else:
                    assert _is_only_narrow(schema, text), (schema, text)
            assert not ours or _is_instance(schema, text), (schema, text)
    assert num_refused < 120
    assert min(counts.values()) > 4000


def test_random_flat_schemas_are_within_those_of_outlines():
    """It ignores bounds of numbers, so that texts of its own may be no instances.

    Its formats are narrower than ours, its exponents have signs, and it reads an anchor where it
    stands, within the quotes.
    """
    from outlines_core.json_schema import build_regex_from_schema

    draw, num_texts = random.Random(2), 0
    no_text = re.compile(NO_STRING.pattern + r"|\d[eE]\d")
    for _ in range(400):
        schema, budget = {"$defs": DEFS} | random_schema(draw, depth=3), Budget()
        if {"format", "pattern"} & schema.keys():
            continue
        automaton = byte_automaton(JsonSchema(schema).tree(budget), budget)
        judge = _outlines(build_regex_from_schema(json.dumps(schema, ensure_ascii=False), SPACE))
        for text in _texts(draw, automaton):
            ours = accepts(automaton, text.encode())
            num_texts += ours
            if ours and not no_text.search(text):
                assert judge(text), (schema, text)
            if not ours and judge(text) and _is_instance(schema, text):
                assert _is_only_narrow(schema, text), (schema, text)
    assert num_texts > 1000
