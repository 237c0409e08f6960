"""Entries of a quantisation section, or of an adapter's config, that nothing here reads.

Most describe calibration or the settings of another engine. Some state that the model needs more
than its matrices at run time; ignoring those would change its output, so they are refused.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from .tokenizer_files import json_object

# Entries that `schemes` reads, and entries that do not affect the weights: statistics of the
# calibration, precision of activations and of the cache, and settings of kernels.
_QUANTISATION = frozenset(
    " ".join(
        (
            # compressed-tensors
            "quant_method format quantization_status config_groups ignore version targets weights",
            "input_activations output_activations num_bits type symmetric strategy group_size",
            "block_structure dynamic actorder observer observer_kwargs scale_dtype zp_dtype",
            "global_compression_ratio kv_cache_scheme",
            # GPTQ
            "bits sym desc_act static_groups damp_percent damp_auto_increment true_sequential mse",
            "lm_head checkpoint_format quantizer meta model_name_or_path model_file_base_name",
            "model_seqlen dataset tokenizer batch_size block_name_to_quantize backend pad_token_id",
            "module_name_preceding_first_block modules_in_block_to_quantize use_cuda_fp16",
            "use_exllama disable_exllama exllama_config max_input_length cache_block_outputs",
            "act_group_aware",
            # AWQ
            "zero_point w_bit q_group_size modules_to_not_convert do_fuse modules_to_fuse",
            "fuse_max_seq_len",
            # FP8
            "fmt scale_fmt activation_scheme weight_block_size ignored_layers dequantize",
            # ModelOpt
            "quant_algo kv_cache_quant_algo exclude_modules producer has_zero_point",
            "quantized_layers",
        )
    ).split()
)
_ROTATES = "its inputs or outputs are transformed at run time, which is not done here"
# Entries that change the output of the model, unless null, false or empty.
_MORE = {
    "transform_config": _ROTATES,
    "sparsity_config": "its matrices are stored without their zeros",
    "pre_quant_scale": "its inputs are scaled at run time",
    "adapter": "an adapter corrects its matrices at run time",
    "is_marlin_format": "its matrices are stored in the order of a kernel",
}
_SUSPECT = re.compile(
    r"transform|rotat|hadamard|spin|quarot|online|smooth|pre_?quant|adapter|lora|codebook|"
    r"sparsi|permut|outlier|residual|marlin",
    re.IGNORECASE,
)


def refused(section: Mapping[str, Any]) -> Iterator[str]:
    """Entries of a quantisation section that change the output, with the reason to refuse them."""
    for name, value in _unknown(section):
        key = name.rpartition(".")[2]
        if key in _MORE and _says_more(key, value):
            yield f"{name} is not supported: {_MORE[key]}; use a folder without it"
        elif key not in _MORE and _SUSPECT.search(key) and _is_set(value):
            yield f"{name}={value!r:.80} is not known and may change the numbers; leave it out"
    if section.get("pack_dtype") not in (None, "int32", "torch.int32"):
        yield f"pack_dtype={section['pack_dtype']!r} is not supported; only int32 is"


def notes(section: Mapping[str, Any]) -> Iterator[str]:
    """Entries that are assumed to have no effect, in one line."""
    names = [name for name, value in _unknown(section) if _is_set(value)]
    if names := sorted({*names} - {"pack_dtype"}):
        yield f"entries of the quantisation section that are not read: {', '.join(names)}"


def _unknown(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Unknown entries, also inside groups, with their paths."""
    for key, value in section.items():
        if key == "config_groups":
            for group, inner in json_object(value).items():
                yield from _unknown(json_object(inner), f"{path}{key}.{group}.")
        elif key in ("weights", "input_activations", "output_activations"):
            yield from _unknown(json_object(value), f"{path}{key}.")
        elif key not in _QUANTISATION:
            yield path + key, value


def _is_set(value: Any) -> bool:
    """Whether an entry is set: not null, false, zero or empty, nor only made of such values."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value)
        return any(map(_is_set, entries.values()))
    return bool(value)


def _says_more(key: str, value: Any) -> bool:
    if key == "sparsity_config" and json_object(value).get("format") == "dense":
        return False
    return _is_set(value)
