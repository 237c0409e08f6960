"""Writes `packed.npz`: matrices as folders store them, and what the packages make of them.

    python -m venv /tmp/ct && /tmp/ct/bin/pip install compressed-tensors==0.20.0 torch transformers
    /tmp/ct/bin/python tests/golden/make_packed_golden.py

compressed-tensors packs and unpacks its own formats, and unpacks AWQ, block FP8 and NVFP4 of
ModelOpt by its converters. GPTQ and FP8 of ModelOpt have no package here: their formulas are those
of AutoGPTQ's and ModelOpt's reference code. A case is `NAME/tensor` for each stored tensor (raw
bytes, with `NAME/tensor:dtype` in safetensors' words), `NAME/config` and `NAME/want` in bfloat16 or
float16, as unsigned integers.
"""

import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import (
    NaiveQuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.entrypoints.convert import AutoAWQConverter, ModelOptNvfp4Converter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import (
    FP8BlockDequantizer,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

OUT, IN = 24, 128
NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
FP8 = torch.float8_e4m3fn
CASES = {}


def case(name, config, tensors, want):
    CASES[f"{name}/config"] = np.array(json.dumps(config))
    for key, tensor in tensors.items():
        tensor = tensor.contiguous()
        CASES[f"{name}/{key}"] = np.frombuffer(
            tensor.reshape(-1).view(torch.uint8).numpy().tobytes(), np.uint8
        ).reshape(*tensor.shape, tensor.element_size())
        CASES[f"{name}/{key}:dtype"] = np.array(NAMES[tensor.dtype])
    CASES[f"{name}/want"] = want.contiguous().view(torch.uint16).numpy()
    CASES[f"{name}/want:dtype"] = np.array(NAMES[want.dtype])


def weight(seed):
    torch.manual_seed(seed)
    w = torch.randn(OUT, IN) * torch.exp(torch.randn(OUT, 1))
    return w.to(torch.bfloat16)


def scheme(**weights):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compressed(name, compressor, format, scale_dtype, seed, **weights):
    """A case of compressed-tensors; scales are found as its observers do, by the largest number."""
    args = scheme(**weights)
    w = weight(seed)
    state = {"weight": w}
    strategy, group = weights["strategy"], weights.get("group_size")
    if strategy == "tensor":
        parts = w.reshape(1, -1)
    elif strategy == "block":
        height, width = weights["block_structure"]
        padded = torch.zeros(-(-OUT // height) * height, -(-IN // width) * width, dtype=w.dtype)
        padded[:OUT, :IN] = w
        parts = padded.reshape(-(-OUT // height), height, -(-IN // width), width)
        parts = parts.transpose(1, 2).flatten(-2)
    elif strategy == "channel":
        parts = w[:, None]
    else:
        parts = w.reshape(OUT, -1, group)
    largest = parts.float().abs().amax(-1)
    least, most = parts.float().amin(-1), parts.float().amax(-1)
    if weights["type"] == "float" and weights["num_bits"] == 8:
        scale = largest / 448
    elif weights["type"] == "float":
        state["weight_global_scale"] = torch.tensor([448 * 6 / float(w.abs().max())])
        scale = (largest / 6 * state["weight_global_scale"]).to(FP8).float()
    elif weights["symmetric"]:
        scale = largest / (2 ** (weights["num_bits"] - 1) - 0.5)
    else:
        levels, half = 2 ** weights["num_bits"] - 1, 2 ** (weights["num_bits"] - 1)
        least, most = least.clamp(max=0), most.clamp(min=0)
        scale = (most - least) / levels
        zero = torch.round(-half - least / scale).clamp(-half, half - 1)
        state["weight_zero_point"] = zero.to(torch.int8)
    scale = scale.reshape(1) if strategy == "tensor" else scale
    state["weight_scale"] = scale.to(scale_dtype)
    stored = compressor.compress(state, args)
    want = compressor.decompress(stored, args)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    case(name, config, stored, want.to(torch.bfloat16))


def fp8_cases():
    naive = {"num_bits": 8, "type": "float", "symmetric": True}
    for name, seed, dtype, more in (
        ("fp8 channel", 0, torch.bfloat16, {"strategy": "channel"}),
        ("fp8 channel f32", 1, torch.float32, {"strategy": "channel"}),
        ("fp8 tensor", 2, torch.bfloat16, {"strategy": "tensor"}),
        ("fp8 block ct", 3, torch.bfloat16, {"strategy": "block", "block_structure": [16, 48]}),
    ):
        own = NaiveQuantizationCompressor
        compressed(name, own, "float-quantized", dtype, seed, **naive, **more)
    # Block FP8 as DeepSeek and Qwen publish it.
    w = torch.randn(200, 300)
    rows, columns = 2, 3
    padded = torch.zeros(rows * 128, columns * 128)
    padded[:200, :300] = w
    blocks = padded.reshape(rows, 128, columns, 128)
    scale = blocks.abs().amax((1, 3)) / 448
    small = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:200, :300].to(FP8)
    tensors = {"weight": small, "weight_scale_inv": scale}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    made = FP8BlockDequantizer(targets=["re:.*"], weight_block_size=(128, 128))
    made = made.process({f"m.{key}": value for key, value in tensors.items()})
    case("fp8 block", config, tensors, made["m.weight"].to(torch.bfloat16))
    w = weight(4).float()
    scale = w.abs().max() / 448
    tensors = {
        "weight": (w / scale).to(FP8),
        "weight_scale": scale,
        "input_scale": torch.tensor(0.25),
    }
    want = (tensors["weight"].float() * scale).to(torch.bfloat16)
    case("fp8 modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}, tensors, want)


def int_cases():
    own, format = PackedQuantizationCompressor, "pack-quantized"
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    compressed("w4a16", own, format, torch.bfloat16, 5, **four, symmetric=True)
    compressed("w4a16 zeros", own, format, torch.bfloat16, 6, **four, symmetric=False)
    eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    compressed("w8a16", own, format, torch.float16, 7, **eight)


def fp4_cases():
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "tensor_group",
        "group_size": 16,
    }
    own, format = NVFP4PackedCompressor, "nvfp4-pack-quantized"
    compressed("nvfp4", own, format, torch.float32, 8, **weights)
    largest = weight(9).reshape(OUT, -1, 16).float().abs().amax(-1)
    state = {
        "weight": weight(9),
        "weight_scale": (largest / 6 * 64).to(FP8).float(),
        "weight_global_scale": torch.tensor([64.0]),
    }
    stored = own.compress(state, scheme(**weights))
    tensors = {
        "weight": stored["weight_packed"],
        "weight_scale": stored["weight_scale"],
        "weight_scale_2": torch.tensor(1 / 64),
        "input_scale": torch.tensor(0.5),
    }
    made = ModelOptNvfp4Converter(targets=["re:.*"]).process(
        {f"m.{key}": value for key, value in tensors.items()}
    )
    made = {key.removeprefix("m."): value for key, value in made.items()}
    want = own.decompress(made, scheme(**weights))["weight"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    case("nvfp4 modelopt", config, tensors, want.to(torch.bfloat16))


def packed_words(values, bits, axis):
    """Unsigned numbers into 32-bit words along an axis, the lowest bits first."""
    values = np.moveaxis(np.asarray(values, np.uint32), axis, -1)
    values = values.reshape(*values.shape[:-1], -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words = np.bitwise_or.reduce(values << shifts, axis=-1).view(np.int32)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)))


def gptq_and_awq():
    rng = np.random.default_rng(10)
    for bits, form, ordered in ((4, "gptq", False), (4, "gptq_v2", True), (8, "gptq", True)):
        groups = IN // 32
        values = rng.integers(0, 2**bits, (IN, OUT))
        zeros = rng.integers(1, 2**bits - 1, (groups, OUT))
        scales = torch.from_numpy(rng.uniform(0.01, 0.1, (groups, OUT))).to(torch.float16)
        order = np.arange(IN) // 32
        order = rng.permutation(order) if ordered else order
        # AutoGPTQ, QuantLinear.forward: scales[g] * (weight - zeros[g]), in float16.
        want = scales[order] * torch.from_numpy((values - zeros[order]).astype(np.float16))
        tensors = {
            "qweight": packed_words(values, bits, 0),
            "qzeros": packed_words(zeros - (form == "gptq"), bits, 1),
            "scales": scales,
            "g_idx": torch.from_numpy(order.astype(np.int32)),
        }
        config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": form}
        case(f"{form} {bits} bits", config, tensors, want.T)
    reverse = [0, 4, 1, 5, 2, 6, 3, 7]
    groups = IN // 64
    values, zeros = rng.integers(0, 16, (IN, OUT)), rng.integers(0, 16, (groups, OUT))

    def shuffled(x):
        order = np.argsort(reverse)
        return x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1)

    tensors = {
        "qweight": packed_words(shuffled(values), 4, 1),
        "qzeros": packed_words(shuffled(zeros), 4, 1),
        "scales": torch.from_numpy(rng.uniform(0.01, 0.1, (groups, OUT))).to(torch.float16),
    }
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "version": "gemm",
        "zero_point": True,
    }
    made = AutoAWQConverter(group_size=64, ignore=[], targets=["re:.*"]).process(
        {f"m.{key}": value for key, value in tensors.items()}
    )
    made = {key.removeprefix("m."): value for key, value in made.items()}
    args = scheme(num_bits=4, type="int", strategy="group", group_size=64, symmetric=False)
    want = PackedQuantizationCompressor.decompress(made, args)["weight"]
    case("awq", config, tensors, want.to(torch.float16))


if __name__ == "__main__":
    fp8_cases()
    int_cases()
    fp4_cases()
    gptq_and_awq()
    np.savez_compressed(Path(__file__).with_name("packed.npz"), **CASES)
    print(sorted({key.split("/")[0] for key in CASES}))
