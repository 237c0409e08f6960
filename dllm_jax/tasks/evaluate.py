"""Accuracy and tokens per forward of strategies on the same problems.

Data flow: problems -> prompts -> batches through the decode loop, greedy by
default -> `Outcome` (one row a problem) -> `summary`.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dllm_jax.api import generate
from dllm_jax.engine.layout import SamplingNumbers
from dllm_jax.engine.record import Record, record_of_last
from dllm_jax.engine.requests import DraftMetrics
from dllm_jax.loading import chat
from dllm_jax.loading.model import Model
from dllm_jax.loading.tokenizer import encode as encode_text
from dllm_jax.runner import decode
from dllm_jax.runner.buckets import law_of, no_record
from dllm_jax.runner.forward import ModelForward
from dllm_jax.runner.packing import tail_of, writes_at
from dllm_jax.strategies import BlockDiffusion
from dllm_jax.strategies.core import driver
from dllm_jax.strategies.core.protocol import Strategy
from dllm_jax.strategies.core.recording import nothing_written
from dllm_jax.strategies.core.state import DUMMY, FINISH_REASONS, DecodeState, slot_part
from dllm_jax.strategies.dflash import drafting
from dllm_jax.tasks.problems import Problem, is_correct, problem

MAX_TOKENS = 224  # more than the longest worked solution of both halves


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of one strategy on each problem, in order.

    Attributes:
        right: Whether the text states the right answer last.
        tokens: Visible tokens.
        forwards: Forwards after prefill, commit passes included.
        denoise: The forwards in which a block was open; the others only commit.
        blocks: Blocks that hold a visible token or the end mark; None for strategies that commit
            token by token.
        seconds: Wall time of all batches, without compilation.
        drafted: Acceptance of all drafts; None without a drafter.
    """

    right: np.ndarray
    tokens: np.ndarray
    forwards: np.ndarray
    denoise: np.ndarray
    blocks: np.ndarray | None
    texts: tuple[str, ...]
    finish: tuple[str | None, ...]
    seconds: float
    drafted: DraftMetrics | None = None


@dataclasses.dataclass(frozen=True)
class ProblemSet:
    """Problems, how long their texts may be, and how these are judged.

    Attributes:
        is_right: Judges a text of a problem.
        prompts: Token ids of the prompts; None: the questions as chats.
        tokenizer: Decodes the texts; None: the model's.
        longest: Prompts are padded to at least this many tokens, so that other problems of the same
            set take the same program.
        max_tokens: Most tokens of a text.
    """

    problems: list[Problem]
    is_right: Callable[[str, Problem], bool] = is_correct
    prompts: list[list[int]] | None = None
    tokenizer: Any = None
    longest: int = 0
    max_tokens: int = MAX_TOKENS


def held_out(half: str, count: int, seed: int, family: str | None = None) -> list[Problem]:
    """The first `count` held-out problems of a stream, of one family or all."""
    return [problem(half, seed, index, heldout=True, family=family) for index in range(count)]


def one_token(block_size: int) -> BlockDiffusion:
    """One block at a time, one token a forward: the most confident one."""
    return BlockDiffusion(remasking="static", denoising_steps=block_size, block_size=block_size)


def solve(
    model: Model, strategy: Any, problems: Sequence[Problem] | ProblemSet, **how: Any
) -> Outcome:
    """Solve problems in batches of one shape; `how` is `sweep`'s keywords.

    Args:
        strategy: A strategy value; its sizes must be set.
    """
    (outcome,) = sweep(model, strategy, [{}], problems, **how)
    return outcome


def sweep(
    model: Model,
    strategy: Any,
    settings: Sequence[Mapping[str, float]],
    problems: Sequence[Problem] | ProblemSet,
    *,
    draft: Model | None = None,
    temperature: float = 0.0,
    batch_size: int = 32,
    progress: Callable[[int, list[Outcome]], object] = lambda done, outcomes: None,
    recorded: Callable[[int, int, Record], object] | None = None,
) -> list[Outcome]:
    """Solve the same problems under several settings of a strategy's knobs, as one program.

    Thresholds are values of a request, so requests of several settings share batches. The time of
    a batch is divided equally among its rows; before it, one step of the first batch compiles.

    Args:
        settings: Values of knobs by name, in place of the strategy's; all name the same knobs.
        draft: The model that the strategy drafts with.
        batch_size: Most rows decoded together; the last of several batches is padded with rows
            that are dropped.
        progress: Called after each batch with the number of rows done, and the outcomes of the
            settings whose rows are all done.
        recorded: Called with the numbers of a setting and of a problem, and the record of the text.

    Raises:
        ValueError: Records of a strategy that has none here (`buckets.no_record`).
    """
    if recorded is not None and (reason := no_record(strategy)):
        raise ValueError(reason)
    of = problems if isinstance(problems, ProblemSet) else ProblemSet(list(problems))
    ids = encode(model, of.problems) if of.prompts is None else of.prompts
    lengths = np.array([len(row) for row in ids])
    width = max(of.longest, *map(len, ids))
    padded = np.array([[*row, *[0] * (width - len(row))] for row in ids], np.int32)
    total = len(settings) * len(ids)
    batch_size = min(batch_size, total)
    values = {k: np.repeat([one[k] for one in settings], len(ids)) for k in settings[0]}
    decode_text = (of.tokenizer or model.tokenizer).decode

    @functools.cache  # most settings end in the same text
    def text_of(tokens: tuple[int, ...]) -> str:
        return decode_text(list(tokens), skip_special_tokens=True)

    parts, outcomes = list[Any](), list[Outcome]()
    for first in range(0, total, batch_size):
        rows = np.minimum(np.arange(first, first + batch_size), total - 1)
        session = functools.partial(
            generate.start,
            model,
            jnp.asarray(padded[rows % len(ids)]),
            strategy.replace(**{k: jnp.asarray(v[rows], jnp.float32) for k, v in values.items()}),
            max_tokens=of.max_tokens,
            temperature=temperature,
            prompt_len=jnp.asarray(lengths[rows % len(ids)]),
            draft=draft,
        )
        keeps = 0 if recorded is None else padded.shape[1] + of.max_tokens
        if first == 0:
            _finish(model, _keeping(session(max_nfe=1), keeps))
        began = time.perf_counter()
        part, state = _finish(model, _keeping(session(), keeps))
        count = min(batch_size, total - first)
        spent = np.full(count, (time.perf_counter() - began) / count)
        parts.append([*(leaf[:count] for leaf in part), spent])
        if recorded is not None:
            for b in range(count):
                setting, number = divmod(first + b, len(ids))
                own = strategy.replace(**settings[setting])
                law = law_of(model, own) | SamplingNumbers(temperature)._asdict()
                recorded(setting, number, _record(state, b, ids[number], law))
        while (begin := len(outcomes) * len(ids)) + len(ids) <= first + count and begin < total:
            rows = slice(begin, begin + len(ids))
            part = [np.concatenate(leaf)[rows] for leaf in zip(*parts, strict=True)]
            outcomes.append(_outcome(text_of, of, block_of(strategy), lengths, part))
        progress(first + count, outcomes)
    return outcomes


def block_of(strategy: Any) -> int | None:
    """Tokens of a block; None for strategies that commit token by token."""
    return None if strategy.needs.prompt.is_token_causal else strategy.block_size


def _keeping(session: generate.Session, num_tokens: int) -> generate.Session:
    """A session that keeps the log-probabilities of all its positions; of 0 tokens, as it is."""
    num_slots, num_blocks, size = session.state.buffer.tokens.shape
    num_positions = num_tokens and num_tokens + num_blocks * size
    written = nothing_written(num_slots, num_positions)
    return session.replace(state=session.state.replace(written=written))


def _record(state: DecodeState, b: int, prompt: Sequence[int], law: Mapping[str, Any]) -> Record:
    """The record of row `b` of a final state on the host."""
    length = int(state.output_len[b])
    buffer, held = jax.tree.map(lambda leaf: leaf[b], (state.buffer, state.written))
    return record_of_last(
        prompt,
        state.output[b, :length].tolist(),
        writes_at(held, len(prompt), length),
        tail_of(buffer, held, length),
        FINISH_REASONS[int(state.finish[b])],
        int(buffer.limit),
        law,
    )


def _finish(model: Model, session: generate.Session) -> Any:
    """Output, its length, forwards, those with an open block, finish and drafts of each row.

    Beside them what a record is made of, where the state keeps it.
    """
    state, denoise = _run(model, session.strategy, session.aux, session.state)
    nfe, nothing = state.buffer.nfe, jnp.zeros((len(state.finish), 0), jnp.int32)
    names = (drafting.ROUNDS, drafting.PROPOSED, drafting.ACCEPTED)
    drafts = [state.carry.slot.get(name, nothing) for name in names]
    part = state.output, state.output_len, nfe, denoise, state.finish, *drafts
    kept = None if state.written is None else slot_part(state).replace(carry=None, keys=None)
    return jax.device_get((part, kept))


def _outcome(
    text_of: Callable[[tuple[int, ...]], str],
    of: ProblemSet,
    block_size: int | None,
    prompt_len: np.ndarray,
    part: Sequence[np.ndarray],
) -> Outcome:
    output, length, forwards, denoise, finish, *drafts, seconds = part
    texts = tuple(text_of(tuple(row[:n].tolist())) for row, n in zip(output, length, strict=True))
    reasons = tuple(FINISH_REASONS[int(code)] for code in finish)
    has_end = np.array([reason == "stop" for reason in reasons])
    counts = [tuple(of_rows.sum(axis=0).tolist()) for of_rows in drafts]
    blocks = None
    if block_size is not None:
        last = prompt_len + length + has_end - 1
        blocks = np.maximum(last // block_size - prompt_len // block_size + 1, 1)
    return Outcome(
        right=np.array([of.is_right(t, one) for t, one in zip(texts, of.problems, strict=True)]),
        tokens=length,
        forwards=forwards,
        denoise=denoise,
        blocks=blocks,
        texts=texts,
        finish=reasons,
        seconds=float(seconds.sum()),
        drafted=DraftMetrics(*counts) if all(counts) else None,
    )


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON values."""
    held = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    held["drafted"] = outcome.drafted and dataclasses.asdict(outcome.drafted)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in held.items()}


def outcome_from_json(held: Mapping[str, Any]) -> Outcome:
    """The inverse of `outcome_json`."""
    counts = {k: tuple(v) for k, v in (held["drafted"] or {}).items()}
    arrays = {k: v for k, v in held.items() if k in ("right", "tokens", "forwards", "denoise")}
    return Outcome(
        **{k: np.array(v) for k, v in arrays.items()},
        blocks=None if held["blocks"] is None else np.array(held["blocks"]),
        texts=tuple(held["texts"]),
        finish=tuple(held["finish"]),
        seconds=held["seconds"],
        drafted=DraftMetrics(**counts) if counts else None,
    )


def encode(model: Model, problems: Sequence[Problem]) -> list[list[int]]:
    """The prompts of problems, as a chat."""
    texts = [chat.render(model, [{"role": "user", "content": one.question}]) for one in problems]
    return [encode_text(model.tokenizer, text, special=False) for text in texts]


@functools.partial(jax.jit, donate_argnames=("state",))
def _run(
    model: Model, strategy: Strategy, aux: dict[str, Model], state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Decode to the end, counting the forwards of each row in which a block was open."""
    return decode.per_device(
        _counted,
        model,
        strategy,
        aux,
        (state,),
        lambda split: (decode.state_specs(split), decode.row_specs(split)),
    )


def _counted(
    model: Model, strategy: Strategy, aux: dict[str, Model], state: DecodeState
) -> tuple[DecodeState, Int[Array, " B"]]:
    """`_run` on one device."""
    forward = ModelForward(model, aux=aux)
    spec = decode.slot_spec(strategy, model, state.finish.shape[0])

    def one(carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, denoise = carry
        state, info = driver.decode_step(strategy, forward, state, spec)
        # A committed block leaves the window in the forward that commits it; the others were open.
        was_open = jnp.any(state.buffer.status != DUMMY, axis=1)
        return state, denoise + jnp.where(was_open, info.nfe, 0)

    return jax.lax.while_loop(
        lambda carry: driver.any_running(carry[0]), one, (state, jnp.zeros_like(state.finish))
    )


def each_problem(
    problems: Sequence[Problem], outcomes: Mapping[str, Outcome]
) -> list[dict[str, Any]]:
    """Each problem with the text, verdict and counts of each label."""
    return [
        {
            "question": one.question,
            "answer": one.answer,
            "outputs": {
                label: {
                    "text": outcome.texts[i],
                    "right": bool(outcome.right[i]),
                    "tokens": int(outcome.tokens[i]),
                    "forwards": int(outcome.forwards[i]),
                    "finish_reason": outcome.finish[i],
                }
                for label, outcome in outcomes.items()
            },
        }
        for i, one in enumerate(problems)
    ]
