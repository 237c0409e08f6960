"""`/v1/decisions`: typed questions about an input, answered by probabilities from one forward."""

from typing import Any

from dllm_jax.api.questions import Answer, Question, Reading, answer, reads
from dllm_jax.serve import wire
from dllm_jax.serve.exchange import Call, Json
from dllm_jax.serve.pipe import Facts
from dllm_jax.serve.refusals import Refusal, unsupported
from dllm_jax.serve.service import Service
from dllm_jax.serve.text import MOST_CHARS, TextSide


async def decide(service: Service, call: Call) -> Any:
    """`/v1/decisions`."""
    service.check_state()
    body = await service.read(call, wire.Decisions)
    facts, text = service.ready()
    service.check_model(body.model)
    questions = [_question(one) for one in body.questions]
    context = _context(body.input)
    size = sum(len(option) for one in questions for option in (one.instructions, *one.options))
    size += len(context) * (1 if body.joint else len(questions))
    if size > MOST_CHARS:
        raise Refusal(
            f"input and questions have {size} characters in all, {MOST_CHARS} are the most: ask "
            "fewer questions, or with joint: true",
            param="input",
            code="context_length_exceeded",
        )
    texts = await text.run(size, _reads, text, facts, context, questions, bool(body.joint))
    for one in texts:
        if len(one.ids) > facts.max_model_len:
            raise Refusal(
                f"input and questions have {len(one.ids)} tokens; the context takes "
                f"{facts.max_model_len}: shorten them",
                param="input",
                code="context_length_exceeded",
            )
    has_open = service.engine.num_open_of(call.client) > 0
    service.admission.check(service.engine.num_open, facts.num_slots, 1, False, has_open)
    read_out = await service.engine.ask(texts, call.client)
    rows = [row for read in read_out.log_probabilities for row in read]
    answers = [answer(*pair) for pair in zip(questions, rows, strict=True)]
    service.metrics.count("dllm_decisions_total", len(questions))
    service.metrics.count("dllm_decision_forwards_total", read_out.nfe)
    call.prompt_tokens = sum(one.prompt_len for one in texts)
    usage = _usage(call.prompt_tokens, len(questions))
    return Json(
        {
            "model": service.config.model,
            "answers": list(map(_answer_object, body.questions, answers)),
            "usage": usage,
        }
    )


def _reads(text: TextSide, facts: Facts, context: str, questions: list[Question], joint: bool):
    how = Reading(
        attention=facts.attention,
        shift=facts.shift,
        mask_token_id=facts.mask_token_id,
        end_token_id=facts.answer_end,
        multiple=facts.routing_block,
    )
    try:
        return reads(text, how, context, questions, joint)
    except ValueError as error:
        param = "joint" if joint and facts.attention == "causal" else "questions"
        raise Refusal(str(error), param=param, code="decisions_unsupported") from None


def _context(given: str | list[wire.Turn]) -> str:
    """The input as one text."""
    if isinstance(given, str):
        return given
    for i, turn in enumerate(given):
        if turn.role != "user":
            param = f"input[{i}].role"
            raise unsupported(
                param,
                f"{param}={turn.role!r}: an input has messages of the user alone; give the "
                "conversation as a text",
            )
    return "\n\n".join(wire.text_of(turn.content) for turn in given)


def _question(asked: wire.Predicate | wire.ChoiceOf | wire.Score) -> Question:
    said = wire.text_of(asked.instructions)
    if isinstance(asked, wire.Predicate):
        return Question.predicate(said, asked.name)
    if isinstance(asked, wire.Score):
        levels = [_described(one.label, one.description) for one in asked.levels]
        return Question.score(said, levels, asked.name)
    values = tuple(one.value for one in asked.choices)
    options = tuple(_described(str(one.value), one.description) for one in asked.choices)
    return Question("choice", said, options, values, asked.name)


def _described(name: str, description: str | None) -> str:
    return name if description is None else f"{name}: {description}"


def _answer_object(
    asked: wire.Predicate | wire.ChoiceOf | wire.Score, one: Answer
) -> dict[str, Any]:
    question = one.question
    head: dict[str, Any] = {"type": question.kind, "name": question.name}
    if isinstance(asked, wire.Predicate):
        return head | {"probability": one.value}
    shares: list[dict[str, Any]] = [
        {"value": value, "probability": share}
        for value, share in zip(question.values, one.probabilities, strict=True)
    ]
    if isinstance(asked, wire.Score):
        shares = [
            {"label": level.label} | share
            for level, share in zip(asked.levels, shares, strict=True)
        ]
    name = "score" if isinstance(asked, wire.Score) else "choice"
    return head | {name: one.value, "probabilities": shares, "confidence": one.confidence}


def _usage(num_input: int, num_output: int) -> dict[str, Any]:
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }
