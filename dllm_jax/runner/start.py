"""From a model and a configuration to a runner that is ready: its pool sized, everything compiled.

Order of things: sizes -> shapes -> (an accelerator: the largest programs compiled, for what they
need) -> pages -> what serves every request compiled -> memory taken -> each of these run once, and
timed -> the rest compiled behind the requests. Memory is taken as late as that, so that compiling,
which tries kernels out on the device, has room.
"""

import dataclasses
import gc
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax

from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.loading.model import Model
from dllm_jax.runner import buckets, memory, warmup
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies.core.protocol import split_knobs

WarmUp = Literal[True, False, "all"]
REASONABLE_LEN = 2048  # tokens the pool must hold if max_model_len is not given


def start(
    model: Model,
    strategy: Any,
    aux: Mapping[str, Model],
    config: EngineConfig,
    implementation: str | None = None,
    *,
    warm_up: WarmUp = True,
    calibrate: bool | None = None,
    progress: warmup.Progress | None = None,
    told: warmup.Progress | None = None,
) -> ModelRunner:
    """A runner with its state, as large as memory allows.

    Args:
        strategy: With its numbers and sizes.
        warm_up: True: compile the largest programs now, the others behind the requests. "all":
            everything now. False: each size when it is first met.
        calibrate: Time the programs as well; None: on an accelerator.
        progress, told: As `ModelRunner.warm_up` takes them.

    Raises:
        ValueError: The configuration does not fit the model or the memory.
        DeviceFailure: The device failed otherwise.
    """
    layout = buckets.make_layout(model, strategy, aux, config)
    bare = split_knobs(strategy)[0]
    device = ModelRunner(model, bare, aux, layout, implementation, allocate=False)
    try:
        device.memory = _planned(device, model, aux, config, bool(warm_up), progress)
        if not warm_up:
            device.memory.check()
            device.reset()
            return device
        if calibrate is None:
            calibrate = not buckets.is_on_cpu(model)
        device.warm_up(progress, calibrate, behind=warm_up != "all", told=told)
    except DeviceFailure as failure:
        if memory.is_out_of_memory(str(failure)):
            raise ValueError(str(failure)) from failure
        raise
    return device


def _planned(
    device: ModelRunner,
    model: Model,
    aux: Mapping[str, Model],
    config: EngineConfig,
    measured: bool,
    progress: warmup.Progress | None,
) -> MemoryPlan:
    """Plan the device's memory; set the number of pages if the configuration does not.

    Args:
        measured: Compile the largest programs of an accelerator, for what they need.
    """
    gc.collect()  # a dropped engine may still hold its pools
    layout, shapes = device.layout, device.shapes(num_pages=1)
    leaves = jax.tree.leaves((model.params, [other.params for other in aux.values()]))
    weights = list({id(leaf): leaf for leaf in leaves}.values())  # a drafter shares its target's
    text = layout.max_model_len
    if config.max_model_len is None:
        text = min(text, REASONABLE_LEN)
    plans = [
        memory.measure(
            device,
            weights,
            shapes.replace(pools=None),
            shapes.pools,
            config.memory_utilization,
            num_slots=layout.num_slots,
            num_pages=layout.num_pages,
            page_size=layout.page_size,
            needed_tokens=text + layout.block_size,
        )
        for device in weights[0].devices()
    ]
    plan = min(plans, key=lambda plan: plan.limit_bytes - plan.in_use_bytes)  # the tightest device
    if config.num_pages is not None:
        return plan
    elements = max(math.prod(memory.own_shape(leaf)) for leaf in jax.tree.leaves(shapes.pools))
    plan = _resized(device, memory.fill(plan, layout.num_pages, elements))
    if not plan.is_counted or not measured:
        return plan
    # The reserve for temporaries is a guess; compile the largest programs to measure them.
    temp_bytes = device.compile_ahead(warmup.largest_programs(layout), progress)
    plan = dataclasses.replace(plan, temp_bytes=temp_bytes)
    if plan.peak_bytes <= plan.utilization * plan.limit_bytes:
        return plan
    return _resized(device, memory.fill(plan, layout.num_pages, elements))


def _resized(device: ModelRunner, plan: MemoryPlan) -> MemoryPlan:
    device.layout = dataclasses.replace(device.layout, num_pages=plan.num_pages)
    return plan
