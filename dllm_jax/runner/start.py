"""From a model and a configuration to a runner that is ready: its pool sized, everything compiled.

Order of things: sizes -> shapes -> pages -> every program compiled -> memory taken -> each program
run once, and timed. Memory is taken as late as that, so that compiling, which tries kernels out on
the device, has room.
"""

import dataclasses
import gc
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from dllm_jax import __version__
from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.loading.model import Model
from dllm_jax.runner import buckets, hosts, memory, warmup
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies.core.protocol import split_knobs

REASONABLE_LEN = 2048  # tokens the pool must hold if max_model_len is not given


def start(
    model: Model,
    strategy: Any,
    aux: Mapping[str, Model],
    config: EngineConfig,
    implementation: str | None = None,
    *,
    warm_up: bool = True,
    calibrate: bool | None = None,
    progress: warmup.Progress | None = None,
    with_constraints: bool | None = False,
) -> ModelRunner:
    """A runner with its state, as large as memory allows.

    Where several processes share the model, process 0 gets the runner. The others replay its calls
    here, until it ends.

    Args:
        strategy: With its numbers and sizes.
        warm_up: Compile every program now, or each when it is first needed.
        calibrate: Time the programs as well; None: on an accelerator.
        progress, with_constraints: As `ModelRunner.warm_up` takes them.

    Raises:
        ValueError: The configuration does not fit the model or the memory.
        DeviceFailure: The device failed otherwise, or process 0 is gone.
        SystemExit: Process 0 has ended, and this one has followed it.
    """
    layout = buckets.make_layout(model, strategy, aux, config)
    bare = split_knobs(strategy)[0]
    device = ModelRunner(model, bare, aux, layout, implementation, allocate=False)
    try:
        device.memory = _planned(device, model, aux, config, warm_up, progress)
        if hosts.spans(model.split):
            _agree(device, model, bare, aux)
            if jax.process_index():
                _follow(device, warm_up)
            device.leader = hosts.Leader()
        if not warm_up:
            device.memory.check()
            device.reset()
            return device
        if calibrate is None:
            calibrate = not buckets.is_on_cpu(model)
        if with_constraints is None:
            with_constraints = not buckets.is_on_cpu(model)
        device.warm_up(progress, calibrate, with_constraints)
    except NotImplementedError as error:
        if not layout.batch_invariant:
            raise
        raise ValueError(f"batch_invariant=True: {error}; leave it out") from error
    except DeviceFailure as failure:
        if memory.is_out_of_memory(str(failure)):
            raise ValueError(str(failure)) from failure
        raise
    return device


def _agree(device: ModelRunner, model: Model, strategy: Any, aux: Mapping[str, Model]) -> None:
    """The same pages on every process, of the same model and settings."""
    assert device.memory is not None
    plain = {
        field.name: getattr(strategy, field.name)
        for field in dataclasses.fields(strategy)
        if isinstance(getattr(strategy, field.name), int | float | str | tuple)
    }
    models = {name: (other.source, other.config) for name, other in aux.items()}
    layout = dataclasses.replace(device.layout, num_pages=0)
    settings = (model.source, model.config, models, type(strategy).__qualname__, plain, layout)
    pages = hosts.agree(device.memory.num_pages, (__version__, jax.__version__, settings))
    device.memory = _resized(device, dataclasses.replace(device.memory, num_pages=pages))


def _follow(device: ModelRunner, warm_up: bool) -> NoReturn:
    """What a process other than the first does: what the first calls."""
    follower = hosts.Follower()
    if warm_up:
        device.prepare()
    hosts.follow(device, follower)
    raise SystemExit(0)


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
        measured: Compile the programs of an accelerator, for what they need.
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
        for device in weights[0].sharding.addressable_devices
    ]
    plan = min(plans, key=lambda plan: plan.limit_bytes - plan.in_use_bytes)  # the tightest device
    if config.num_pages is not None:
        return plan
    elements = max(math.prod(memory.own_shape(leaf)) for leaf in jax.tree.leaves(shapes.pools))
    plan = _resized(device, memory.fill(plan, layout.num_pages, elements))
    if not plan.is_counted or not measured:
        return plan
    # The reserve for temporaries is a guess, which the compiled programs replace.
    room = plan.utilization * plan.limit_bytes - (plan.peak_bytes - plan.temp_bytes)
    work = warmup.every_program(layout, device.num_words)
    temp_bytes = device.compile_ahead(work, progress, most_bytes=room)
    plan = dataclasses.replace(plan, temp_bytes=temp_bytes)
    if temp_bytes <= room:
        return plan
    return _resized(device, memory.fill(plan, layout.num_pages, elements))


def _resized(device: ModelRunner, plan: MemoryPlan) -> MemoryPlan:
    if plan.num_pages != device.layout.num_pages:
        device.compiled.clear()  # the pools' shapes are part of every program
    device.layout = dataclasses.replace(device.layout, num_pages=plan.num_pages)
    return plan
