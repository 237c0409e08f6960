"""Automata over the built-in model's tokens, spelt out, for engines that need no compiler."""

import numpy as np

from tests.structured.toys import Toy, closed


def digits(llm, shape: str = "ddd+dddd") -> Toy:
    """Texts of one-digit tokens, d, and other one-character tokens as they stand."""
    return of_shapes(llm, [shape])


def of_shapes(llm, shapes) -> Toy:
    """One of several shapes, each of one-character tokens; d is any digit."""
    tokenizer, vocab = llm.tokenizer, llm.model.config.vocab_size
    words = [tokenizer.decode([i]) for i in range(len(tokenizer))]
    others = sorted({c for shape in shapes for c in shape if c != "d"})
    class_of = np.zeros(vocab, np.int32)
    for i, word in enumerate(words):
        if word in others:
            class_of[i] = 2 + others.index(word)
        elif len(word) == 1 and word.isdigit():
            class_of[i] = 1
    last = 2 + len(others)
    for stop in llm.engine.layout.stop_token_ids:
        class_of[stop] = last
    rows, accepting = [np.zeros(last + 1), np.zeros(last + 1)], [False, False]
    for shape in shapes:
        state = 1
        for c in shape:
            number = 1 if c == "d" else 2 + others.index(c)
            if not rows[state][number]:
                rows.append(np.zeros(last + 1)), accepting.append(False)
                rows[state][number] = len(rows) - 1
            state = int(rows[state][number])
        accepting[state] = True
    return closed(class_of, np.stack(rows).astype(np.int32), np.array(accepting), 1)


def many_tools():
    """24 tools that one automaton does not hold; a schema has few states and many bytes."""
    kinds = [f"one_of_the_kinds_of_this_tool_that_begin_alike_{i}" for i in range(9)]
    fields = {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": kinds}}
    schema = {"type": "object", "properties": fields, "required": ["n"]}
    named = [{"name": f"tool_{i:02}", "parameters": schema} for i in range(24)]
    return [{"type": "function", "function": one} for one in named]
