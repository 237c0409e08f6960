"""From a model and a configuration to a runner that is ready: its pool sized, everything compiled.

Order of things: sizes -> shapes -> pages -> every program compiled -> memory taken -> each program
run once, and timed. Memory is taken as late as that, so that compiling, which tries kernels out on
the device, has room.
"""

import dataclasses
import gc
import math
from collections.abc import Mapping
from importlib import metadata
from typing import Any, NoReturn

import jax

from dllm_jax.cluster import acts, hosts, peer_memory
from dllm_jax.compile import warmup
from dllm_jax.engine.layout import DeviceFailure, EngineConfig
from dllm_jax.loading.model import Model
from dllm_jax.runner import buckets, memory
from dllm_jax.runner.memory import MemoryPlan
from dllm_jax.runner.runner import ModelRunner

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
        progress, with_constraints: As `warm_up` takes them.

    Raises:
        ValueError: The configuration does not fit the model or the memory.
        DeviceFailure: The device failed otherwise, or process 0 is gone.
        SystemExit: Process 0 has ended, and this one has followed it.
    """
    layout = buckets.make_layout(model, strategy, aux, config)
    inboxes = peer_memory.made(model.split)
    model = model.replace(exchange=inboxes)
    aux = {name: one.replace(exchange=inboxes) for name, one in aux.items()}
    runner = ModelRunner(model, strategy, aux, layout, implementation, allocate=False)
    try:
        runner.memory = _planned(runner, config, warm_up, progress)
        if model.split is not None and model.split.spans_processes:
            _agree(runner)
            if jax.process_index():
                _follow(runner, warm_up)
            runner.device = acts.LeadingDevice(runner.device, hosts.Leader())
        if not warm_up:
            runner.memory.check()
            runner.reset()
            return runner
        if calibrate is None:
            calibrate = not buckets.is_on_cpu(model)
        if with_constraints is None:
            with_constraints = not buckets.is_on_cpu(model)
        warmup.warm_up(runner, progress, calibrate, with_constraints)
    except NotImplementedError as error:
        if not layout.batch_invariant:
            raise
        raise ValueError(f"batch_invariant=True: {error}; leave it out") from error
    except DeviceFailure as failure:
        if memory.is_out_of_memory(str(failure)):
            raise ValueError(str(failure)) from failure
        raise
    return runner


def _agree(runner: ModelRunner) -> None:
    """The same pages on every process, of the same model and settings."""
    assert runner.memory is not None
    model, strategy = runner.programs.model, runner.programs.strategy
    fields = vars(strategy).items()
    plain = {name: value for name, value in fields if isinstance(value, int | float | str | tuple)}
    models = {name: (other.source, other.config) for name, other in runner.programs.aux.items()}
    layout = dataclasses.replace(runner.layout, num_pages=0)
    versions = metadata.version("dllm-jax"), jax.__version__
    settings = (model.source, model.config, models, type(strategy).__qualname__, plain, layout)
    pages = hosts.agree(runner.memory.num_pages, (*versions, settings))
    runner.memory = _resized(runner, dataclasses.replace(runner.memory, num_pages=pages))


def _follow(runner: ModelRunner, warm_up: bool) -> NoReturn:
    """Run a process other than the first: repeat the calls of the first."""
    follower = hosts.Follower()
    if warm_up:
        runner.submit(runner.device.compile_reset)
        warmup.compile_ahead(runner, warmup.every_program(runner.layout, runner.num_words))
    acts.follow(runner, follower)
    raise SystemExit(0)


def _planned(
    runner: ModelRunner, config: EngineConfig, measured: bool, progress: warmup.Progress | None
) -> MemoryPlan:
    """Plan the device's memory; set the number of pages if the configuration does not.

    Args:
        measured: Compile the programs of an accelerator, for what they need.
    """
    gc.collect()  # a dropped engine may still hold its pools
    layout, shapes = runner.layout, runner.device.shapes(num_pages=1)
    models = [runner.programs.model, *runner.programs.aux.values()]
    leaves = jax.tree.leaves([one.params for one in models])
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
    plan = _resized(runner, memory.fill(plan, layout.num_pages, elements))
    if not plan.is_counted or not measured:
        return plan
    # The reserve for temporaries is a guess, which the compiled programs replace.
    room = plan.utilization * plan.limit_bytes - (plan.peak_bytes - plan.temp_bytes)
    work = warmup.every_program(layout, runner.num_words)
    temp_bytes = warmup.compile_ahead(runner, work, progress, most_bytes=room)
    plan = dataclasses.replace(plan, temp_bytes=temp_bytes)
    if temp_bytes <= room:
        return plan
    return _resized(runner, memory.fill(plan, layout.num_pages, elements))


def _resized(runner: ModelRunner, plan: MemoryPlan) -> MemoryPlan:
    runner.resize(plan.num_pages)
    return plan
