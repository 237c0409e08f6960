"""The engine's programs compiled for an H200 on a machine without one: launches, memory, texts.

    JAX_PLATFORMS=cpu python benchmarks/compile_h200.py --shapes 1x1x32,8x4x32 --out programs

It needs XLA's compiler for NVIDIA GPUs, of the installed version of JAX, and its `ptxas`:

    pip install --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
    pip install --no-deps "nvidia-cuda-nvcc<14" "nvidia-nvvm<14"
    export PATH=$PATH:SITE_PACKAGES/nvidia/cu13/bin

Nothing runs and nothing is timed. Fusions, copies, launches and their order are those of a GPU,
and so are the loops that become part of a command buffer, except for products that XLA's autotuner
would choose and sorts, which take another algorithm here: compare the texts from before and after a
change. The JAX programs are written as `.mlir`, XLA's as `.hlo`.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, Sharding, SingleDeviceSharding

from dllm_jax.bench.step import PAGE, Shape, step_strategy
from dllm_jax.cli.bench_step import shapes
from dllm_jax.compile import warmup
from dllm_jax.engine.layout import EngineConfig
from dllm_jax.loading.model import Model
from dllm_jax.models import quantization as quantize
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import parse_config
from dllm_jax.models.published import PUBLISHED
from dllm_jax.models.sharding import Split
from dllm_jax.models.split_axes import fitted
from dllm_jax.runner import buckets
from dllm_jax.runner.runner import ModelRunner
from dllm_jax.strategies.core.protocol import split_knobs

# XLA's description of the device: what it reckons with when it fuses.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
LAUNCHES = ("fusion", "custom-call", "copy", "conditional", "while", "scatter", "sort", "gather")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", re.MULTILINE)
_THUNK = re.compile(r"^( *)\d+: (k\w+)", re.MULTILINE)
REDUCTION = re.compile(r" all-reduce(?:-start)?\(")
# A slice that a kernel reads in place: it may begin anywhere, and Mosaic refuses the launch.
VIEW = re.compile(r"^%dynamic-slice-fusion(?:(?!^}).)*?mosaic_gpu", re.MULTILINE | re.DOTALL)

# What Pallas asks for where no device is, and what the choice of a kernel asks a device for.
ABSTRACT = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")


class Hopper:
    compute_capability = "9.0"


def shaped_device(
    name: str,
    shape: Shape,
    context: int,
    prefill: int,
    place: Sharding | Split,
    quantization: quantize.Quantization = "none",
) -> ModelRunner:
    """An engine's device for one bucket each of decoding and prefill, without any arrays.

    Args:
        place: A device, or those that share the model.
    """
    parsed = parse_config(PUBLISHED[name], name=name)
    arch = arch_of(parsed.config)
    params = arch.param_shapes(parsed.config, jnp.bfloat16)
    if quantization == "fp8":

        def rounded(path: Any, leaf: Any) -> Any:
            return jax.eval_shape(functools.partial(quantize.quantized, path), leaf)

        params = jax.tree_util.tree_map_with_path(rounded, params)
    split = place if isinstance(place, Split) else None
    if split is not None:
        params = jax.eval_shape(lambda tree: fitted(tree, parsed.config, split.num_parts), params)
        params = split.laid(params, split.specs(params))
    else:
        params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), params
        )
    model = Model(
        params=params, config=parsed.config, arch=arch, defaults=parsed.defaults, split=split
    )
    strategy = step_strategy(model, shape)
    columns = -(-(context + 4 * strategy.block_size * strategy.buffer_size) // PAGE)
    config = EngineConfig(
        max_num_seqs=shape.slots,
        max_model_len=columns * PAGE - strategy.block_size,
        slot_buckets=(shape.slots,),
        page_buckets=(columns,),
        prefill_buckets=(prefill,),
        num_pages=shape.slots * columns + 1,
    )
    # The layout asks where that is.
    placed = model.replace(params={"embed": jnp.zeros((1,), jnp.bfloat16)}, split=None)
    layout = buckets.make_layout(placed, strategy, {}, config)
    layout = dataclasses.replace(layout, many_rows=buckets.MANY_ROWS)  # as on any accelerator
    return ModelRunner(model, split_knobs(strategy)[0], {}, layout, allocate=False)


def launches(text: str) -> list[tuple[str, dict[str, int]]]:
    """What the computations of a compiled program launch, those that launch most first.

    What a fusion consists of is among them, and is one launch.
    """
    found = []
    for part in re.split(r"\n(?=%|ENTRY)", text):
        count = collections.Counter(_OPERATION.findall(part))
        name = "ENTRY" if part.startswith("ENTRY") else part.split(" ", 1)[0]
        found.append((name, {kind: count[kind] for kind in LAUNCHES if count[kind]}))
    return sorted(found, key=lambda one: -sum(one[1].values()))


def loops(thunks: str) -> tuple[int, int]:
    """Loops of a program, and how many of them are in command buffers, by XLA's list of thunks.

    Where XLA does not record a loop, because of something within, it does not say so.
    """
    count, recorded, above = 0, 0, list[tuple[int, str]]()
    for indent, kind in _THUNK.findall(thunks):
        above = [one for one in above if one[0] < len(indent)]
        if kind == "kWhile":
            count += 1
            recorded += any(name == "kCommandBuffer" for _, name in above)
        above.append((len(indent), kind))
    return count, recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="JetLM/SDAR-1.7B-Chat", choices=sorted(PUBLISHED))
    parser.add_argument("--shapes", type=shapes, default="1x1x32", help="as of `bench step`")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--prefill", type=int, default=64, help="tokens of a pass")
    parser.add_argument("--tp", type=int, default=1, help="devices that share the model")
    parser.add_argument("--quantization", choices=quantize.QUANTIZATIONS, default="none")
    parser.add_argument("--only", help="programs whose name begins so, e.g. decode")
    parser.add_argument("--out", type=Path, required=True, help="folder for the texts")
    args = parser.parse_args()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200, topology=f"1x1x{args.tp}"
        )
    except (NotImplementedError, RuntimeError) as error:
        parser.error(f"{error}: install what XLA compiles with, see the head of {__file__}")
    place = SingleDeviceSharding(topology.devices[0])
    if args.tp > 1:
        place = Split(Mesh(np.array(topology.devices), ("tp",)))
    devices = [
        (
            shape,
            shaped_device(args.model, shape, args.context, args.prefill, place, args.quantization),
        )
        for shape in args.shapes
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    jax.default_backend = lambda: "gpu"
    jax.devices = lambda *_: [Hopper()]
    for shape, device in devices:
        for work in warmup.every_program(device.layout, device.num_words):
            if not work.name.startswith(args.only or ""):
                continue
            began, call = time.perf_counter(), work.call(device)
            # A mesh of devices says what they are.
            one = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=ABSTRACT))
            with one if args.tp == 1 else contextlib.nullcontext():
                lowered = device.device.lower(call)
            lowered_s, began = time.perf_counter() - began, time.perf_counter()
            options = {"xla_gpu_autotune_level": 0, "xla_dump_hlo_as_text": True}
            options |= call.options
            with tempfile.TemporaryDirectory() as folder:
                compiled = lowered.compile(options | {"xla_dump_to": folder})
                # The list after XLA's passes over it, where they changed something.
                thunks = max(Path(folder).glob("*.thunk_sequence*.txt"))
                count, recorded = loops(thunks.read_text("utf-8"))
            compiled_s = time.perf_counter() - began
            text, place = compiled.as_text() or "", args.out / f"{shape}-{work.name.split()[0]}"
            place.with_suffix(".mlir").write_text(lowered.as_text(), encoding="utf-8")
            place.with_suffix(".hlo").write_text(text, encoding="utf-8")
            memory: Any = compiled.memory_analysis()
            temp, given = memory.temp_size_in_bytes / 1e6, memory.argument_size_in_bytes / 1e9
            print(f"{shape} {work.name}: lowered in {lowered_s:.1f} s, compiled in", end=" ")
            print(
                f"{compiled_s:.1f}; {temp:.1f} MB of temporaries, {given:.3f} GB of arguments",
                end="; ",
            )
            print(f"{len(REDUCTION.findall(text))} all-reduces;", end=" ")
            print(f"{recorded} of {count} loops recorded", flush=True)
            if views := len(VIEW.findall(text)):
                parser.error(f"{views} Mosaic kernels read slices in place; see `hopper.kernel`")
            for name, count in launches(text)[:3]:
                print(f"    {name}: {count}", flush=True)


if __name__ == "__main__":
    main()
