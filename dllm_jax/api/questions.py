"""Typed questions as texts whose answers are single cells, and probabilities as typed answers.

Data flow: a context and questions -> a conversation that letters each question's options -> token
ids with a cell for each letter (`Read`) -> [log-probabilities of the letters] -> answers. Nothing
here imports JAX, so that the HTTP front can use it; `api.decide` runs the network.
"""

import dataclasses
import math
import string
from collections.abc import Sequence
from typing import Any, Literal

from dllm_jax.loading import chat
from dllm_jax.loading.tokenizer import encode

LETTERS = string.ascii_uppercase
MOST_QUESTIONS = 64
_EACH = "Answer with the letter of one option alone."
_JOINT = "Answer every question on a line of its own: its number, a colon and the letter."


@dataclasses.dataclass(frozen=True)
class Question:
    """A question with options; `Question.predicate`, `.choice` and `.score` make one.

    Attributes:
        options: 2 to 26 texts; levels of a score are in ascending order.
        values: The value of an answer for each option.
    """

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[str, ...] = ("yes", "no")
    values: tuple[Any, ...] = (True, False)
    name: str | None = None

    def __post_init__(self):
        if not 2 <= len(self.options) <= len(LETTERS):
            raise ValueError(
                f"a question has {len(self.options)} options; give 2 to {len(LETTERS)}"
            )
        if len(self.options) != len(self.values):
            raise ValueError(
                f"{len(self.options)} options and {len(self.values)} values; give as many of both"
            )

    @classmethod
    def predicate(cls, instructions: str, name: str | None = None) -> "Question":
        """A yes-or-no question."""
        return cls("predicate", instructions, name=name)

    @classmethod
    def choice(
        cls, instructions: str, values: Sequence[str], name: str | None = None
    ) -> "Question":
        """A question with several named answers."""
        return cls("choice", instructions, tuple(values), tuple(values), name)

    @classmethod
    def score(cls, instructions: str, levels: Sequence[str], name: str | None = None) -> "Question":
        """A rating on a scale of levels in ascending order."""
        return cls("score", instructions, tuple(levels), tuple(range(len(levels))), name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """The facts of a model that decide how its answers are read.

    Attributes:
        attention, shift, mask_token_id: Those of the family; a causal model has no mask (-1).
        end_token_id: The id after the answers, None for none.
        multiple: Texts are padded with masks to a multiple of this many tokens.
    """

    attention: str
    shift: bool
    mask_token_id: int
    end_token_id: int | None
    multiple: int = 1


@dataclasses.dataclass(frozen=True)
class Read:
    """A text and the cells to read in it.

    Attributes:
        ids: Prompt, and for a masked model the cells that hold the answers.
        prompt_len: Tokens of the prompt.
        rows: Rows of the output that predict the answers.
        labels: For each row, the ids of its letters.
    """

    ids: list[int]
    prompt_len: int
    rows: list[int]
    labels: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Answer:
    """Probabilities of a question's options.

    Attributes:
        probabilities: They sum to 1.
        mass: Probability, over the vocabulary, that the token is any of the letters.
    """

    question: Question
    probabilities: tuple[float, ...]
    mass: float

    @property
    def best(self) -> int:
        """Index of the likeliest option."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def value(self) -> Any:
        """Probability of a predicate, value of a choice, expected level of a score."""
        if self.question.kind == "predicate":
            return self.probabilities[0]
        if self.question.kind == "choice":
            return self.question.values[self.best]
        return sum(level * p for level, p in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """Probability of the best option, over the whole vocabulary."""
        return self.probabilities[self.best] * self.mass


def answer(question: Question, log_probabilities: Sequence[float]) -> Answer:
    """An answer from the log-probabilities of a question's letters over the vocabulary."""
    top = max(log_probabilities)
    shares = [math.exp(one - top) for one in log_probabilities]
    total = sum(shares)
    probabilities = tuple(share / total for share in shares)
    return Answer(question, probabilities, min(1.0, total * math.exp(top)))


def reads(
    model: chat.TextModel,
    how: Reading,
    context: str,
    questions: Sequence[Question],
    joint: bool = False,
) -> list[Read]:
    """The texts to read: one a question, or one with all of them.

    Raises:
        ValueError: The model has no tokenizer, the letters are no single tokens, or a causal model
            is asked jointly.
    """
    if not 1 <= len(questions) <= MOST_QUESTIONS:
        raise ValueError(f"{len(questions)} questions; give 1 to {MOST_QUESTIONS}")
    if model.tokenizer is None:
        raise ValueError(f"model {model.source!r} has no tokenizer, so it has no letters to read")
    is_causal = how.attention == "causal"
    if joint and is_causal:
        raise ValueError("a causal model cannot read several answers in one text; leave joint out")
    groups = [list(questions)] if joint else [[one] for one in questions]
    return [_read(model, how, context, group, joint) for group in groups]


def _read(
    model: chat.TextModel, how: Reading, context: str, questions: list[Question], joint: bool
) -> Read:
    lines = [context, ""]
    for number, question in enumerate(questions, 1):
        lines.append(
            f"Question {number}: {question.instructions}"
            if joint
            else f"Question: {question.instructions}"
        )
        lines += [f"{LETTERS[i]}) {option}" for i, option in enumerate(question.options)]
    prompt, special = _prompt(model, "\n".join([*lines, _JOINT if joint else _EACH]))
    ids = encode(model.tokenizer, prompt, special)
    prompt_len, cells, labels = len(ids), [], []
    said = prompt
    for number, question in enumerate(questions, 1):
        if joint:
            lead = f"{number}:"
            ids += encode(model.tokenizer, ("\n" if number > 1 else "") + lead, special=False)
            said = lead
        cells.append(len(ids))
        labels.append(_letters(model, said, len(question.options)))
        if how.attention != "causal":
            ids.append(how.mask_token_id)
    if how.attention != "causal":
        ids += [] if how.end_token_id is None else [how.end_token_id]
        ids += [how.mask_token_id] * (-len(ids) % how.multiple)
    rows = [cell - 1 if how.shift else cell for cell in cells]
    return Read(ids, prompt_len, rows, labels)


def _prompt(model: chat.TextModel, text: str) -> tuple[str, bool]:
    """The prompt of a question, and whether the tokenizer adds its special tokens."""
    template = chat.template_of(model)
    if template is None:
        return f"{text}\nAnswer:", True
    template_fields: dict[str, Any] = (
        {"enable_thinking": False} if "enable_thinking" in template.text else {}
    )
    return chat.render(model, [{"role": "user", "content": text}], **template_fields), False


def _letters(model: chat.TextModel, said: str, count: int) -> list[int]:
    """The token of each letter after a text.

    Raises:
        ValueError: A letter is no token of its own there.
    """
    tail = said[-48:]
    before = encode(model.tokenizer, tail, special=False)
    # After a colon a word begins, which most vocabularies write with its space.
    forms = (" {}", "{}") if tail.endswith(":") else ("{}", " {}")
    for form in forms:
        found = []
        for letter in LETTERS[:count]:
            ids = encode(model.tokenizer, tail + form.format(letter), special=False)
            if ids[:-1] != before:
                break
            found.append(ids[-1])
        if len(set(found)) == count:
            return found
    raise ValueError(
        f"the vocabulary of {model.source!r} does not write the letters A to {LETTERS[count - 1]} "
        "as one token each there; ask with fewer options"
    )
