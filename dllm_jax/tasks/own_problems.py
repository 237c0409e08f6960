"""Problems from a file of the user's, and the scorers that judge texts by their answers."""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

from dllm_jax.convert.small_files import read_text
from dllm_jax.tasks.problems import Problem

SCORERS = ("exact", "numeric", "regex:PATTERN")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def read_problems(path: str) -> list[Problem]:
    """The problems of a .jsonl file: an object with `question` and `answer` on each line.

    Raises:
        ValueError: A line is something else, or there is none.
        OSError: The file cannot be read.
    """
    found = []
    for number, line in enumerate(read_text(Path(path)).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        question, answer = (row.get("question"), row.get("answer")) if type(row) is dict else (0, 0)
        if not isinstance(question, str) or isinstance(answer, bool):
            answer = None
        if not isinstance(answer, str | int | float):
            raise ValueError(
                f"{path} line {number}: {line[:80]!r} has no question and answer; "
                'write e.g. {"question": "1 + 1 = ?", "answer": "2"}'
            )
        found.append(Problem(str(question), "", str(answer), "own", Path(path).name))
    if not found:
        raise ValueError(f"{path} holds no problem; write one JSON object a line")
    return found


def scorer(name: str) -> Callable[[str, Problem], bool]:
    """Whether a text answers a problem, by one of `SCORERS`.

    `exact` compares the whole text, `numeric` its last number by value. `regex:PATTERN` compares
    the last match, or its first group.

    Raises:
        ValueError: The scorer is unknown, or its pattern is not valid.
    """
    kind, _, pattern = name.partition(":")
    if kind == "regex" and pattern:
        try:
            return functools.partial(_regex, re.compile(pattern))
        except re.error as error:
            raise ValueError(f"{name!r}: {error}; mend the pattern") from None
    if name not in ("exact", "numeric"):
        raise ValueError(f"{name!r} is no scorer; use one of {', '.join(SCORERS)}")
    return _exact if name == "exact" else _numeric


def _exact(text: str, of: Problem) -> bool:
    return text.strip() == of.answer.strip()


def _numeric(text: str, of: Problem) -> bool:
    found, wanted = _NUMBER.findall(text), _NUMBER.findall(of.answer)
    return bool(found and wanted) and _value(found[-1]) == _value(wanted[-1])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _regex(pattern: re.Pattern[str], text: str, of: Problem) -> bool:
    *_, last = (None, *pattern.finditer(text))
    if last is None:
        return False
    return (last[1] if pattern.groups else last[0] or "").strip() == of.answer.strip()
