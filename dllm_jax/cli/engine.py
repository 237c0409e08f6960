"""The engine of a command line, and the loop over it that checks for signals between steps.

Sizes follow the prompts, rounded up so that the next command finds its programs in the compile
cache.
"""

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dllm_jax.cli.interrupt import Interrupt
from dllm_jax.engine.layout import EngineConfig, SamplingNumbers
from dllm_jax.engine.requests import Request, RequestOutput, SamplingParams

SLOTS = 8  # texts decoded at once
SHORTEST = 256  # `max_model_len` is a power of two from here on


class Clock:
    """Seconds without compilation, so that an engine's rates measure its work."""

    def __init__(self):
        self._device: Any = None

    def __call__(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter() - self.compile_s

    @property
    def compile_s(self) -> float:
        """Seconds spent compiling."""
        return 0.0 if self._device is None else self._device.compile_s

    def watch(self, llm: Any) -> None:
        """Exclude the compile time of this engine."""
        self._device = llm.engine.runner.device


def slots(args: argparse.Namespace) -> int:
    """Texts decoded at once at most."""
    return getattr(args, "max_num_seqs", None) or SLOTS


def engine_config(args: argparse.Namespace, **sizes: Any) -> EngineConfig:
    """The configuration that the flags of `flags.ENGINE` ask for.

    Args:
        sizes: Further fields, or some in the place of those of the flags.
    """
    of_flags = {
        "max_num_seqs": slots(args),
        "max_model_len": args.max_model_len,
        "page_size": args.page_size,
        "memory_utilization": args.memory_utilization or EngineConfig.memory_utilization,
        "enable_prefix_caching": not args.no_prefix_caching,
        "max_num_batched_tokens": args.max_num_batched_tokens,
    }
    return EngineConfig(**(of_flags | sizes))


def make_llm(
    args: argparse.Namespace,
    model: Any,
    strategy: Any,
    clock: Clock,
    longest: int | None = None,
    count: int = 1,
) -> Any:
    """An `LLM` for `count` prompts; each program is compiled when it is first needed.

    Args:
        longest: Tokens of the longest prompt; None: unknown.

    Raises:
        ValueError: Sizes that do not fit the model, or each other.
    """
    from dllm_jax.api.drafts import bind_draft
    from dllm_jax.api.llm import LLM

    bound = bind_draft(strategy, args.draft, model)  # the drafter sets the size of the window
    strategy = bound.strategy
    length = args.max_model_len
    if length is None and longest is not None:
        length = _enough(longest + args.max_tokens, model.config.max_position)
    num_pages = None
    if count == 1 and length is not None and args.memory_utilization is None:
        window = strategy.block_size * strategy.buffer_size
        num_pages = -(-max(length + strategy.block_size, window) // args.page_size)
    llm = LLM(
        model,
        strategy,
        draft=bound.draft,
        attention_implementation=args.attention_implementation,
        tensor_parallel_size=args.tensor_parallel_size,
        seed=args.seed or 0,
        warm_up=False,
        clock=clock,
        config=engine_config(
            args,
            max_num_seqs=min(count, slots(args)),
            max_model_len=length,
            num_pages=num_pages,
        ),
    )
    clock.watch(llm)
    return llm


def _enough(length: int, most: int) -> int:
    size = SHORTEST
    while size < length:
        size *= 2
    return min(size, most)


def sampling_params(args: argparse.Namespace, model: Any, strategy: Any) -> SamplingParams:
    """Sampling parameters from the flags, with the model's defaults for the rest.

    Request i without a seed of its own draws with `fold_in(key(seed), i)`.
    """
    from dllm_jax.api.strategy import default_params

    given = {name: getattr(args, name) for name in SamplingNumbers._fields}
    return default_params(
        model,
        strategy,
        **{name: value for name, value in given.items() if value is not None},
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        stop_token_ids=args.stop_token_ids,
        max_nfe=args.max_nfe,
    )


def add(engine: Any, requests: Sequence[Request]) -> list[str]:
    """Queue all requests, or none.

    Raises:
        ValueError: One can never run.
    """
    ids: list[str] = []
    try:
        for request in requests:
            ids.append(engine.add(request))
    except ValueError:
        _abort(engine, ids)
        raise
    return ids


def follow(engine: Any, request_ids: Sequence[str], stop: Interrupt) -> Iterator[RequestOutput]:
    """Outputs of queued requests; a signal, or leaving the loop, ends the rest with "abort".

    Raises:
        Interrupted: A signal arrived; `engine.outputs()` has the texts so far.
    """
    left = set(request_ids)
    with stop.held():
        try:
            while left:
                for output in engine.step():
                    if output.request_id in left:
                        if output.finished:
                            left.discard(output.request_id)
                        yield output
                stop.check()
        finally:
            _abort(engine, left)


def _abort(engine: Any, request_ids: Iterable[str]) -> None:
    for request_id in request_ids:
        engine.abort(request_id)
