"""Options of XLA for the programs of an accelerator, by how many rows they have."""

from typing import Any

from dllm_jax.engine.layout import EngineLayout

WIDE = 256  # cells of a block from which on a step of one slot has many rows

# For products of many rows XLA's autotuner sometimes takes its own Triton kernels, by times that
# other work on the host disturbs: 8 slots of SDAR-1.7B took 6.5 to 7.2 ms a step by what it
# chose (benchmarks/notes/many_row_products.md; prefill of fewer than 1,024 rows: not timed).
MANY_ROWS = {"xla_gpu_enable_triton_gemm": False}
# One command buffer, loop and all. By XLA's default the host looks after each step whether there is
# another, and then hands the launches over: 20 us, and with the 700 of a canvas 0.2 to 1.4 ms, in
# which nothing runs, and 13 ms before the first pass that stores. XLA silently does not record a
# loop that contains a CUB sort or a slice.
_RECORDED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION"
RECORDED_LOOP = {
    "xla_gpu_enable_command_buffer": f"{_RECORDED},CONDITIONAL,WHILE",
    "xla_gpu_graph_min_graph_size": 1,
}
# XLA records a step's launches in command buffers and updates them at each call of a program, in 2
# to 4 ms. Steps of few slots gain more (17 % each on an H200); steps of many slots do not, nor does
# a prompt of a canvas model: launching takes a fraction of its 14 to 25 ms.
NOTHING_RECORDED = {"xla_gpu_enable_command_buffer": "", "xla_gpu_graph_min_graph_size": 10**6}


def of_prefill(layout: EngineLayout) -> dict[str, Any]:
    """Options of a prefill program."""
    return MANY_ROWS | (NOTHING_RECORDED if _is_wide(layout) else {})


def of_decode(
    layout: EngineLayout, count: int, is_bound: bool, is_split: bool, is_profiled: bool
) -> dict[str, Any]:
    """Options of a decode program.

    Args:
        count: Slots.
        is_bound: Some of them have a grammar.
        is_split: Several devices share the model.
        is_profiled: A profile is to hold its launches, one by one.
    """
    if layout.many_rows is None:
        return {}
    if count >= layout.many_rows:
        return MANY_ROWS | NOTHING_RECORDED
    is_wide = _is_wide(layout)
    options = MANY_ROWS if is_wide else {}
    # A profile holds no launch of a recorded loop. With several slots, grammars or devices a
    # recorded loop is not faster, or XLA does not record it.
    is_one = count == 1 and not is_bound and not is_split
    if (is_wide or is_one) and not (is_profiled and not is_bound):
        options = options | RECORDED_LOOP
    return options


def _is_wide(layout: EngineLayout) -> bool:
    """Whether a step of one slot has many rows, and runs on an accelerator."""
    return layout.many_rows is not None and layout.block_size >= WIDE
