"""Inspect, load, convert and export checkpoints of the model families of this package.

`checkpoints_convert` takes what it needs of the families as arguments; here they are filled in.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dllm_jax.convert import converted, export, inspection
from dllm_jax.convert.copying import Cut, Keep, KeyPath, Progress
from dllm_jax.convert.dtypes import as_dtype
from dllm_jax.convert.networks import Networks
from dllm_jax.convert.placing import placed, require_place
from dllm_jax.convert.report import Plan, Report
from dllm_jax.convert.report import plan as sizes
from dllm_jax.convert.rules import ConversionError as ConversionError
from dllm_jax.convert.rules import Placement, find, placements
from dllm_jax.convert.scaled import Form, Scaled
from dllm_jax.convert.tokenizer_files import read_json
from dllm_jax.convert.weights import read_weights
from dllm_jax.models.architecture import arch_of
from dllm_jax.models.families import (
    Parsed,
    config_from_json,
    config_json,
    defaults_from_json,
    parse_config,
)
from dllm_jax.models.family import Family, with_d2f_adapter
from dllm_jax.models.family_table import family_named
from dllm_jax.models.quantization import (
    HEAD,
    STORED,
    input_axes,
    quantized,
    quantized_head,
    stays_small,
    unsupported,
)
from dllm_jax.strategies.diffusion_gemma import DiffusionGemma

_DTYPE_KEYS = ("dtype", "torch_dtype")


def _param_shapes(cfg: Any, dtype: Any) -> Any:
    return arch_of(cfg).param_shapes(cfg, dtype)


def _loads_small(cfg: Any, path: KeyPath, is_by_output: bool) -> bool:
    return unsupported(cfg) is None and stays_small(path, is_by_output)


def _parse_config(*files: Any, name: str, family: Family | None = None) -> Parsed:
    """As `parse_config`; numbers of decoding must be those that the strategy takes."""
    parsed = parse_config(*files, name=name, family=family)
    numbers: dict[str, Any] = dict(parsed.defaults.numbers)
    try:
        DiffusionGemma(**numbers)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return parsed


def _networks(family: Family | None) -> Networks:
    """The families of ours, or the one from outside."""
    return Networks(
        parse_config=partial(_parse_config, family=family),
        param_shapes=_param_shapes,
        config_from_json=lambda name, fields: config_from_json(family or name, fields),
        defaults_from_json=partial(defaults_from_json, family=family),
        table_of=lambda name: (family or family_named(name)).table,
        with_d2f_adapter=with_d2f_adapter,
        loads_small=_loads_small,
    )


def inspect(
    src: str | os.PathLike[str],
    *,
    lora: str | os.PathLike[str] | None = None,
    allow_extra: bool = False,
    family: Family | None = None,
) -> Report:
    """Describe a checkpoint folder and list every problem, without reading weights.

    Args:
        src: A Hugging Face folder or a converted one.
        lora: The folder of a LoRA adapter for it.
        allow_extra: Tensors of unknown name become a note instead of a problem.
        family: One from outside; None: the one of ours that the config names.
    """
    return inspection.inspect(src, _networks(family), lora, allow_extra)


def load_params(
    src: str | os.PathLike[str],
    dtype: str = "auto",
    progress: Progress | None = None,
    *,
    lora: str | os.PathLike[str] | None = None,
    allow_extra: bool = False,
    keep: Keep | None = None,
    cut: Cut | None = None,
    passes: Callable[[KeyPath], bool] | None = None,
    as_stored: bool = False,
    family: Family | None = None,
) -> tuple[Any, Report]:
    """Read a checkpoint's weights into host memory.

    Args:
        src: A Hugging Face folder or a converted one.
        dtype: "auto" (the checkpoint's own), "bfloat16", "float32" or "float16".
        progress: Called with bytes read so far and in all, after each piece of a few megabytes.
        lora: The folder of a LoRA adapter to merge into a Hugging Face folder's weights.
        allow_extra: Leave tensors of unknown name out instead of refusing them.
        keep: Called with each leaf's key path and the leaf; what it returns is in the tree, and one
            leaf at a time is in memory.
        cut: Of a leaf's key path and shape, the rows [first, end) in which it is read; `keep` then
            gets an iterator over them, if they are stored row by row. None: the whole leaf.
        passes: Whether the leaf at a key path, if it is stored in e4m3 with a scale for each
            output, comes as a `Scaled` of the stored numbers.
        as_stored: `keep` gets the leaves of a Hugging Face folder with their axes in memory as in
            the file, which is read faster; not in rows, and not a `Scaled`.
        family: As of `inspect`.

    Returns:
        The parameter tree, and the report on the checkpoint.

    Raises:
        ConversionError: With every problem found.
    """
    report = inspect(src, lora=lora, allow_extra=allow_extra, family=family)
    report.require_ok()
    return read_params(report, dtype, progress, keep, cut, passes, as_stored), report


def read_params(
    report: Report,
    dtype: str = "auto",
    progress: Progress | None = None,
    keep: Keep | None = None,
    cut: Cut | None = None,
    passes: Callable[[KeyPath], bool] | None = None,
    as_stored: bool = False,
) -> Any:
    """As `load_params`, of an inspected checkpoint without problems."""
    if report.kind == "converted":
        return converted.restore(report, dtype, progress, keep, cut)
    forms = _forms(report, passes)
    return read_weights(report, dtype, progress, keep, cut, forms, as_stored)


def _forms(report: Report, passes: Callable[[KeyPath], bool] | None) -> dict[KeyPath, Form]:
    """The leaves that are taken as they are stored."""
    if passes is None or not report.packed:
        return {}
    paths = [path for path in report.by_output if stays_small(path, True) and passes(path)]
    shapes = report.shapes_in(np.float32)
    return {path: _form(path, find(shapes, path).shape) for path in paths}


def _form(path: KeyPath, shape: tuple[int, ...]) -> Form:
    return Form(shape=tuple(shape), inputs=input_axes(str(path[-1])))


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    lora: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    allow_extra: bool = False,
    progress: Progress | None = None,
    dry_run: bool = False,
    quantize: Literal["fp8"] | None = None,
    quantize_head: bool = False,
    family: Family | None = None,
) -> Path:
    """Write a checkpoint as a converted folder: parameters in Orbax form, `meta.json`, tokenizer.

    With `quantize="fp8"` it is a Hugging Face folder instead, which other programs read: the
    matrices of its layers are in FP8-dynamic of compressed-tensors. The folder appears whole or
    not at all: it is written next to its place and renamed.

    Args:
        src: A Hugging Face folder.
        dst: Folder to make.
        dtype: Type of the leaves; "auto" is the checkpoint's own.
        lora: The folder of a LoRA adapter to merge into the weights.
        force: Replace an existing converted folder; anything else in its place is refused.
        allow_extra: Leave tensors of unknown name out instead of refusing them.
        progress: Called with bytes read and bytes in all.
        dry_run: Make every check that needs no weights, and write nothing; `plan` gives sizes.
        quantize: "fp8": round the matrices of layers and experts; embedding, head, norms and
            routers stay.
        quantize_head: Round the head too, a scale for each id, if it is not the embedding.
        family: As of `inspect`.

    Returns:
        The folder.

    Raises:
        ConversionError: With every problem found; nothing is written then.
        FileExistsError: If the folder exists and may not be replaced.
        OSError: If the folder cannot be written or does not fit; checked before weights are read.
        ValueError: If `dst` is `src` or holds it.
    """
    report = inspect(src, lora=lora, allow_extra=allow_extra, family=family)
    report.require_ok()
    target = Path(dst)
    require_place(target, Path(src), force=force)
    _require_space(target, plan(report, dtype, quantize, quantize_head).result_bytes)
    if dry_run:
        return target.absolute()
    with placed(target, Path(src), force=force) as folder:
        if quantize is None:
            converted.save(read_params(report, dtype, progress), report, folder)
        else:
            _save_fp8(report, folder, _eight(report, dtype, quantize_head), progress)
    return target.absolute()


def _require_writable(report: Report, quantize: str | None, quantize_head: bool) -> None:
    """Refuse a folder in 8 bits, or a head, that cannot be written."""
    if quantize not in (None, "fp8"):
        raise ValueError(f"{quantize=} is not supported; use fp8, or leave it out")
    if quantize and report.kind != "hf":
        what = "converted folders have no tensors of the names that other programs read"
        raise ValueError(f"{quantize=} of {report.source!r}: {what}; give the Hugging Face folder")
    if not quantize_head:
        return
    if quantize is None:
        raise ValueError(
            "quantize_head=True is for a folder in 8 bits; give quantize='fp8' (--quantize fp8) too"
        )
    config, _ = report.require_ok()
    if reason := unsupported(config):
        raise ValueError(f"quantize_head=True of {report.source!r}: {reason}; leave it out")
    if HEAD not in report.shapes_in(np.float32):
        raise ValueError(
            f"quantize_head=True of {report.source!r}: its head is its embedding, which a folder "
            "holds once, in 16 bits; leave it out here and give quantize_head=True "
            "(--quantize-head) when the folder is loaded"
        )


def plan(
    report: Report,
    dtype: str = "auto",
    quantize: Literal["fp8"] | None = None,
    quantize_head: bool = False,
) -> Plan:
    """The size of a conversion, without the few bytes of headers and tokenizer.

    Args:
        report: On a Hugging Face folder or a converted one, free of problems.
        dtype, quantize, quantize_head: As of `convert`.

    Raises:
        ConversionError: With every problem of the checkpoint.
        ValueError: What is asked for cannot be written.
    """
    report.require_ok()
    _require_writable(report, quantize, quantize_head)
    if quantize is None:
        return sizes(report, dtype)
    eight = _eight(report, dtype, quantize_head)
    return sizes(report, dtype, export.tensors_of(eight.places, eight.shapes, eight.small))


class _Eight(NamedTuple):
    """The content of a folder in 8 bits.

    Attributes:
        dtype: Type of the leaves that are not in 8 bits.
        shapes: Shapes and types of the tree in 16 bits.
        places: The tensors that are written.
        small: Leaves in 8 bits.
    """

    dtype: str
    shapes: Any
    places: tuple[Placement, ...]
    small: set[KeyPath]


def _eight(report: Report, dtype: str, with_head: bool) -> _Eight:
    name = report.dtype or "float32" if dtype == "auto" else dtype
    shapes = report.shapes_in(as_dtype(name))
    rules = report.tensors().rules_for(report.stored, single=True)
    places = placements(rules, shapes)
    small = {place.path for place in places if place.path[-1] in STORED}
    small |= set(_forms(report, lambda _: True)) | ({(HEAD,)} if with_head else set())
    return _Eight(name, shapes, places, small)


def _save_fp8(report: Report, folder: Path, eight: _Eight, progress: Progress | None) -> None:
    """Matrices are rounded as by `load`, one leaf after another, and so are the same there."""
    name, shapes, places, small = eight
    config = _typed(read_json(report.folder / "config.json"), name)
    with export.fp8_folder(folder, places, shapes, small, report.tensors(), config) as write:

        def keep(path: KeyPath, leaf: Any) -> None:
            write(path, _rounded(path, leaf) if path in small else leaf)

        read_params(report, name, progress, keep, passes=lambda _: True)
    for file in report.tokenizer_files:
        shutil.copyfile(report.folder / file, folder / file)


def _typed(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A `config.json` that states the type of its weights once.

    transformers writes `dtype` or, before 4.56, `torch_dtype`, also under `text_config`; every
    version reads `torch_dtype` if it is alone.
    """
    said = {key: value for key, value in config.items() if key not in _DTYPE_KEYS}
    if isinstance(text := said.get("text_config"), dict):
        said["text_config"] = {key: text[key] for key in text if key not in _DTYPE_KEYS}
    return {**said, "torch_dtype": dtype}


def _rounded(path: KeyPath, leaf: Any) -> Scaled:
    """A leaf in 8 bits, which is as it is stored or is rounded."""
    if isinstance(leaf, Scaled):
        return leaf
    form = _form(path, leaf.shape)
    whole = jax.device_put(leaf)
    held: Any = quantized_head(whole) if path == (HEAD,) else quantized(path, whole)
    values = np.ascontiguousarray(np.asarray(held.values)[..., : form.depth])
    return Scaled(values=values, scales=np.asarray(held.scales), form=form)


def _require_space(target: Path, size: int) -> None:
    """Refuse a disk without room for the result; a replaced folder is deleted only afterwards."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < size:
        raise OSError(
            f"{str(target)!r} needs {size / 1e9:.2f} GB but {str(there)!r} has {free / 1e9:.2f} GB "
            "free; choose another destination"
        )


def export_hf(
    params: Any,
    cfg: Any,
    dst: str | os.PathLike[str],
    dtype: str = "bfloat16",
    *,
    family: str = "sdar",
    extra_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Hugging Face folder: `model.safetensors` and `config.json`; other files stay.

    Args:
        params: The network's tree, on any device.
        cfg: The network's `DenseConfig` or `MoEConfig`.
        dst: Folder, made where it is missing.
        dtype: Type of every stored tensor but those that stay float32.
        family: Whose tensor names and `config.json` to write.
        extra_config: Further entries of `config.json`: `eos_token_id`, `pad_token_id`,
            `block_size`, and under `dllm_jax` the default strategy and its settings.

    Returns:
        The folder.
    """
    folder, shapes = Path(dst), _param_shapes(cfg, as_dtype(dtype))
    entries = {**config_json(family, cfg, dtype), **(extra_config or {})}
    export.write_folder(params, shapes, folder, family_named(family).table, entries)
    return folder
