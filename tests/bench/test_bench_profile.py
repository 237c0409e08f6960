"""Proves that a profile's shares are of the right things: the kind of an operation is read from the
program that ran, on real HLO of this JAX and on a hand-made program of a GPU; kernels are joined to
it by name; library kernels are known by theirs; times, launches and shares are those of the events.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dllm_jax.bench import profile
from dllm_jax.bench.profile import Event, Trace
from dllm_jax.kernels.kv_write import write_rows
from dllm_jax.kernels.paged_attention import WindowMask, paged_attention
from dllm_jax.runner.chunks import in_chunks

pytestmark = pytest.mark.long

VOCAB = 97

# As XLA prints them for a GPU, cut down: names, opcodes, tables of where they were traced.
GPU_PROGRAM = """HloModule jit__decode, is_scheduled=true

FileNames
1 "/src/dllm_jax/models/dense.py"
2 "/src/dllm_jax/runner/forward.py"
3 "/src/pallas_kernels/paged_attention/mosaic.py"
4 "/src/dllm_jax/runner/readout.py"
5 "/src/pallas_kernels/kv_write/api.py"

FunctionNames
1 "trunk"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=30 end_line=30 column=1 end_column=2}
4 {file_name_id=4 function_name_id=1 line=40 end_line=40 column=1 end_column=2}
5 {file_name_id=5 function_name_id=1 line=50 end_line=50 column=1 end_column=2}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=4 parent_frame_id=2}
5 {file_location_id=5 parent_frame_id=2}

%fused.1 (p.1: bf16[8,4]) -> bf16[8,4] {
  %p.1 = bf16[8,4] parameter(0)
  ROOT %multiply.1 = bf16[8,4] multiply(%p.1), metadata={stack_frame_id=2}
}

%dot_computation (p.2: bf16[8,4]) -> bf16[8,4] {
  %p.2 = bf16[8,4] parameter(0)
  ROOT %dot.3 = bf16[8,4] dot(%p.2, %p.2), metadata={stack_frame_id=2}
}

%max.1 (p.3: f32[]) -> f32[] {
  %p.3 = f32[] parameter(0)
  ROOT %maximum.9 = f32[] maximum(%p.3, %p.3)
}

%body.1 (p.4: bf16[8,4]) -> bf16[8,4] {
  %p.4 = bf16[8,4] parameter(0)
  %loop_multiply_fusion.27 = bf16[8,4] fusion(%p.4), calls=%fused.1, metadata={stack_frame_id=2}
  %gemm_fusion_dot.3 = bf16[8,4] fusion(%p.4), calls=%dot_computation, metadata={stack_frame_id=2}
  %_attend.5 = (bf16[8,4]) custom-call(%p.4), custom_call_target="t", metadata={stack_frame_id=3}
  %loop_convert_fusion.2 = bf16[8,4] fusion(%p.4), calls=%fused.1, metadata={stack_frame_id=3}
  %custom-call.9 = (f32[8,97], s8[4]) custom-call(%p.4), metadata={stack_frame_id=2}
  %input_reduce_fusion.1 = f32[8] reduce(%p.4), to_apply=%max.1, metadata={stack_frame_id=4}
  %input_scatter_fusion.9 = bf16[8,4] scatter(%p.4), to_apply=%max.1, metadata={stack_frame_id=5}
  %_split_matmul.3 = f32[2,8,4] custom-call(%p.4), custom_call_target="t"
  %cublas-gemm.4 = f32[8,4] custom-call(%p.4), custom_call_target="__cublas$gemm"
  %_add_rms_norm.6 = bf16[8,4] custom-call(%_split_matmul.3, %p.4), custom_call_target="t"
  ROOT %copy.4 = bf16[8,4] copy(%p.4)
}

ENTRY %main.1 (a: bf16[8,4]) -> bf16[8,4] {
  %a = bf16[8,4] parameter(0)
  ROOT %while.1 = bf16[8,4] while(%a), condition=%cond.1, body=%body.1
}
"""


def test_the_kinds_of_a_gpu_program_are_read_from_where_it_was_traced():
    assert profile.origins(GPU_PROGRAM, VOCAB) == {
        "loop_multiply_fusion.27": "glue",
        "gemm_fusion_dot.3": "gemm",
        "_attend.5": "attention",
        "loop_convert_fusion.2": "attention",  # the merge of the splits: no kernel name tells
        "custom-call.9": "readout",  # a column a word of the vocabulary
        "input_reduce_fusion.1": "readout",
        "input_scatter_fusion.9": "cache",
        "_split_matmul.3": "gemm",
        "cublas-gemm.4": "gemm",
        "_add_rms_norm.6": "glue",  # which takes products and is none
        "copy.4": "copies",
    }


def test_where_parents_are_printed_as_they_are_the_kinds_are_the_same():
    plain = GPU_PROGRAM
    for frame, parent in ((1, 0), (2, 1), (3, 2), (4, 1), (5, 1)):
        printed = 1 if frame == 1 else parent + 1
        plain = plain.replace(
            f"{{file_location_id={(2, 1, 3, 4, 5)[frame - 1]} parent_frame_id={printed}}}",
            f"{{file_location_id={(2, 1, 3, 4, 5)[frame - 1]} parent_frame_id={parent}}}",
        )
    assert plain != GPU_PROGRAM
    assert profile.origins(plain, VOCAB) == profile.origins(GPU_PROGRAM, VOCAB)


def test_kernels_are_joined_to_the_program_and_added_up():
    kinds = profile.origins(GPU_PROGRAM, VOCAB)
    layers, steps = 28, 2
    events = []

    def ran(name, times, us, operation=None):
        for _ in range(times * steps):
            events.append(Event(name, operation, 1e6 + 1e3 * len(events), 1e3 * us))

    ran("loop_multiply_fusion_27", layers, 2)
    ran("gemm_fusion_dot_3", layers, 10)
    ran("nvjet_sm90_tst_192x64_64x6_1x2_h_bz_NNT", layers, 18)  # a layer's product
    ran("nvjet_sm90_tss_168x128_64x5_2x1_v_bz_TNN", 1, 170)  # the head: once a step
    ran("nvjet_known_to_the_profiler", 1, 30, "custom-call.9")
    # Kernels of the Mosaic kind say what they are, whatever the call that holds them.
    ran("token_readout_mosaic_gpu_kernel", 1, 90, "_attend.5")
    ran("_attend", layers, 10, "command_buffer.1")
    ran("loop_convert_fusion_2", layers, 3)
    ran("input_scatter_fusion_9", layers, 1)
    ran("paged_attention_mosaic_gpu_kernel", layers, 7, "command_buffer.1")
    ran("matmul_mosaic_gpu_kernel", layers, 4, "_attend.5")
    ran("add_rms_norm_mosaic_gpu_kernel", layers, 2, "_attend.5")
    ran("MemcpyD2H", 1, 5)
    ran("fusion_of_another_program", 1, 1)
    reported = profile.shares(Trace(events, True), kinds, steps, layers, top=3)
    us = {name: round(kind["ms"] * 1e3) for name, kind in reported["kinds"].items()}
    wanted = {"gemm": 32 * 28, "attention": 20 * 28, "readout": 290, "cache": 28}
    assert us == {**wanted, "glue": 4 * 28 + 1, "copies": 5}
    assert reported["kinds"]["gemm"]["launches"] == 3 * layers
    assert reported["launches"] == 9 * layers + 5
    assert reported["busy_ms"] * 1e3 == pytest.approx(sum(us.values()))
    assert sum(kind["share"] for kind in reported["kinds"].values()) == pytest.approx(1)
    assert reported["span_ms"] == pytest.approx((len(events) - 1 + 1) / 1e3 / steps, rel=0.01)
    names = [(kernel["name"][:5], kernel["kind"]) for kernel in reported["kernels"]]
    assert names == [("nvjet", "gemm"), ("gemm_", "gemm"), ("_atte", "attention")]


def test_a_pallas_kernel_is_found_without_the_number_of_its_call():
    def kinds_of(*calls):
        events = [Event("_down_kernel", "command_buffer.1", 0.0, 5.0)]
        reported = profile.shares(Trace(events, True), dict(calls), 1, 1)
        return list(reported["kinds"])

    assert kinds_of(("_down_kernel.7", "experts"), ("_down_kernel.9", "experts")) == ["experts"]
    # Where calls of one name are of two kinds, nothing tells which one ran.
    assert kinds_of(("_down_kernel.7", "experts"), ("_down_kernel.9", "readout")) == ["glue"]


def test_a_profile_without_the_program_is_refused():
    events = [Event("wait", None, 0.0, 5.0)]
    with pytest.raises(ValueError, match="no operation of the program"):
        profile.shares(Trace(events, False), {}, 1, 1)


def test_planes_of_a_gpu_come_before_those_of_its_host():
    def plane(name, *lines):
        return SimpleNamespace(name=name, lines=lines)

    def line(name, *events):
        stats = [("hlo_op", "dot.1")]
        made = [
            SimpleNamespace(name=one, stats=stats, start_ns=0.0, duration_ns=1.0) for one in events
        ]
        return SimpleNamespace(name=name, events=made)

    host = plane("/host:CPU", line("python", "a"))
    gpu = plane("/device:GPU:0", line("Stream #1", "b", "c"), line("XLA Ops", "again"))
    trace = profile.read_trace(SimpleNamespace(planes=[host, gpu]))
    assert (trace.on_gpu, [event.name for event in trace.events]) == (True, ["b", "c"])
    trace = profile.read_trace(SimpleNamespace(planes=[host]))
    assert (trace.on_gpu, [event.name for event in trace.events]) == (False, ["a"])


def test_real_operations_are_found_by_their_source():
    B, T, G, H, Z = 1, 4, 1, 8, 8

    def step(q, w, head, k_pages, v_pages, table):
        mask = WindowMask(
            cell=jnp.arange(T, dtype=jnp.int32)[None],
            start=jnp.full((B,), Z, jnp.int32),
            live=jnp.asarray([[0, T]], jnp.int32),
            context_len=jnp.full((B,), Z, jnp.int32),
            visible=None,
            causal=jnp.zeros((B,), bool),
            block_size=T,
        )
        rows = paged_attention(q, q, q, k_pages, v_pages, table, mask, implementation="xla")
        rows = rows.reshape(T, H) @ w
        slots = jnp.full((T,), 2, jnp.int32), jnp.arange(T, dtype=jnp.int32)
        pool = write_rows(((k_pages, v_pages),), ((rows.reshape(B, T, G, H), q),), *slots)
        return in_chunks(lambda x: jnp.argmax(x @ head, axis=-1), rows), pool

    f32 = jnp.float32
    shapes = [(B, T, G, H), (H, H), (H, VOCAB), (4, G, Z, H), (4, G, Z, H)]
    args = [jax.ShapeDtypeStruct(shape, f32) for shape in shapes]
    args.append(jax.ShapeDtypeStruct((B, 2), jnp.int32))
    text = jax.jit(step).lower(*args).compile().as_text()
    kinds = set(profile.origins(text, VOCAB).values())
    assert {"attention", "gemm", "readout", "cache"} <= kinds
