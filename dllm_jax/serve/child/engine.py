"""An `LLM` as the engine process serves it, and the facts on it for the front."""

import time
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from dllm_jax.api.calls import Walk, walk_of
from dllm_jax.api.decide import log_probabilities, passes, reading_of
from dllm_jax.api.infill import infill_request
from dllm_jax.api.questions import Read
from dllm_jax.api.snapshot import said
from dllm_jax.api.strategy import short_name
from dllm_jax.engine.layout import DeviceFailure
from dllm_jax.engine.requests import Request
from dllm_jax.loading.model import Model
from dllm_jax.serve.child.served import Served
from dllm_jax.serve.child.side_work import Work
from dllm_jax.serve.pipe import Facts
from dllm_jax.structured import Tools, Turn, mark_ids


def served(llm: Any) -> Served:
    """The parts of an `LLM` that the engine process serves."""

    def request(ids: list[int], suffix: list[int] | None, fields: dict[str, Any]) -> Request:
        made = Request(prompt_token_ids=ids, **fields)
        if suffix is None:
            return made
        return infill_request(llm.model, llm.strategy, made, made.params.max_tokens or 0, suffix)

    def read(texts: list[Read]) -> tuple[list[list[list[float]]], int]:
        found, groups = [], passes(texts)
        try:
            for group in groups:
                began = time.monotonic()
                found += log_probabilities(llm.model, group, llm.engine.runner.read_labels)
                if llm.engine.has_work:  # which gets as much time without these
                    time.sleep(time.monotonic() - began)
            return found, len(groups)
        except (JaxRuntimeError, DeviceFailure) as error:
            raise ValueError(
                f"the device could not read them ({said(error)[:120]}); ask fewer questions"
            ) from error

    def missing(made: Request) -> Work | None:
        found = llm.constraints.missing(made)
        if found is None:
            return None
        key, do = found
        return Work(key, lambda: do()[1].states)

    def walk(made: Request, before: Walk | None) -> Walk | None:
        tools = made.params.constraint
        if not isinstance(tools, Tools):
            return None
        turn = Turn(tools, llm.constraints.spelt, marks) if before is None else before.turn
        return walk_of(llm, made, turn, before)

    tokenizer = llm.model.tokenizer
    marks = {} if tokenizer is None else mark_ids(tokenizer.get_added_vocab())
    if tokenizer is not None:
        llm.constraints.compile_apart()
    facts = facts_of(llm)
    return Served(llm.engine, facts, tokenizer, request, read, missing, _device_bytes, walk=walk)


def _device_bytes() -> list[tuple[int, int]]:
    """Bytes in use and the limit of each device of this process that counts them."""
    every = [device.memory_stats() or {} for device in jax.local_devices()]
    names = ("bytes_in_use", "bytes_limit")
    return [(one[names[0]], one[names[1]]) for one in every if one.keys() >= {*names}]


def facts_of(llm: Any) -> Facts:
    """The facts on an `LLM` for the front."""
    model: Model = llm.model
    strategy, layout, usual = llm.strategy, llm.engine.layout, llm.default_params
    name = short_name(strategy)
    how = reading_of(model)
    folder = None if model.tokenizer_source is None else str(model.tokenizer_source.folder)
    leaves = jax.tree.leaves(model.params)
    return Facts(
        source=model.source,
        family=model.defaults.family,
        strategy=name,
        block_size=layout.block_size,
        window=layout.window,
        thresholds={name: (layout.knob_values[name], rule) for name, rule in layout.knobs.items()},
        max_model_len=min(layout.max_model_len, layout.window)
        if layout.in_window
        else layout.max_model_len,
        vocab_size=layout.vocab_size,
        mask_token_id=model.config.mask_token_id,
        num_slots=layout.num_slots,
        dtype=str(max(leaves, key=lambda leaf: leaf.size).dtype),
        jax=jax.__version__,
        tokenizer_folder=folder,
        infill=strategy.needs.takes_given,
        causal=name == "ar",
        drafts=name == "dflash",
        sampling=usual.sampling._asdict(),
        attention=how.attention,
        shift=how.shift,
        answer_end=how.end_token_id,
        routing_block=how.multiple,
    )
