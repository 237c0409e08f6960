"""`dllm-jax info [STRATEGY]`: what is installed and what it runs on, or one strategy's fields."""

import argparse
import dataclasses
import importlib.metadata
import inspect
import json
import platform
import re
import sys
import textwrap
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli import strategy as strategies
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import Interrupt

PACKAGES = ("dllm-jax", "jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    strategy = flag(
        "strategy STRATEGY",
        "describe this strategy instead: a name, pkg.module:Name or path/to/file.py:name",
        nargs="?",
    )
    flags.add(parser, Group("", strategy, flags.as_json("one JSON object")))


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Print the report."""
    if args.strategy is not None:
        described = describe(args.strategy)
        print(json.dumps(described) if args.json else _page(described))
        return 0
    facts = collect()
    if args.json:
        print(json.dumps(facts))
        return 0
    for title, entries in facts.items():
        lines = [f"{name}  {about}" if about else name for name, about in entries.items()]
        for i, line in enumerate(lines or ["none"]):
            print(f"{title if i == 0 else '':<12}{line}")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """The facts, by title: name -> description."""
    from dllm_jax.loading.jax_settings import cache_folder, enable_compile_cache
    from dllm_jax.strategies import strategy_names

    enable_compile_cache()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": _devices(),
        "sharing": _sharing(),
        "kernels": _kernels(),
        "models": _models(),
        "random": _random(),
        "families": _families(),
        "strategies": dict.fromkeys(strategy_names(), ""),
        "cache": {str(cache_folder()): _size_of_cache()},
    }


def describe(spec: str) -> dict[str, Any]:
    """A strategy: what it does, its source, and each field with range, default and meaning.

    Raises:
        UsageError: It names no strategy, or its file cannot be run.
    """
    strategy = strategies.load(spec)
    made = getattr(strategy, "made_of", type(strategy))
    module = sys.modules[made.__module__]
    own = inspect.getdoc(made) if "__doc__" in vars(made) or inspect.isfunction(made) else None
    of_module = inspect.getdoc(module)
    # A shipped module is one algorithm, so that its docstring tells more than its class's.
    text = (of_module if ":" not in spec else own) or own or of_module or "no docstring"
    does, _, source = text.partition("Source: ")
    return {
        "strategy": spec,
        "does": does.partition("\nAttributes:")[0].strip(),
        "source": " ".join(source.split("\n\n")[0].split()) or None,
        "file": inspect.getsourcefile(made),
        "fields": strategies.describe_fields(strategy, _attributes(own or "")),
    }


def _attributes(docstring: str) -> dict[str, str]:
    """The entries of a docstring's `Attributes:`."""
    entries = docstring.partition("Attributes:\n")[2].split("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", entries, re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _page(facts: dict[str, Any]) -> str:
    source = facts["source"] or "none is named"
    lines = [
        facts["strategy"],
        "",
        facts["does"],
        "",
        f"Source: {source}",
        f"File:   {facts['file']}",
    ]
    for name, field in facts["fields"].items():
        default = strategies.shown(field["default"])
        lines += ["", f"{name} = {default}  ({field['range']})"]
        if field["about"]:
            lines += textwrap.wrap(
                field["about"], 92, initial_indent="    ", subsequent_indent="    "
            )
    return "\n".join(lines)


def _devices() -> dict[str, str]:
    import jax

    from dllm_jax.runner.memory import host_bytes_available

    found = {}
    for device in jax.devices():
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        memory = f", {host_bytes_available() / 2**30:.1f} GiB of the host's memory free"
        if limit:
            memory = f", {used / 2**30:.1f} of {limit / 2**30:.1f} GiB in use"
        found[str(device)] = f"{device.device_kind} ({device.platform}){memory}"
    return found


def _sharing() -> dict[str, str]:
    """How many of the devices can share a model."""
    import jax

    count = jax.device_count()
    if count == 1:
        return {"--tp 1": "one device: nothing to share"}
    links = "XLA's collectives" if jax.default_backend() == "cpu" else "NCCL"
    return {f"--tp 1 to {count}": f"heads, experts and ids by device; sums by {links}"}


def _kernels() -> dict[str, str]:
    return {
        "paged_attention": _attention(),
        "expert_ffn": _experts(),
        "layer": _layer(),
        "token_readout": _readout(),
    }


def _attention() -> str:
    import jax.numpy as jnp

    from dllm_jax.kernels.paged_attention import api, cudnn

    missing = cudnn.unsupported(jnp.zeros((1, 1, 1, 128), jnp.bfloat16))
    if missing:
        return f"xla here (cudnn and mosaic: {missing})"
    return (
        "mosaic, cudnn or xla here: on Hopper in bfloat16 mosaic up to "
        f"{api.MOSAIC_ROWS} rows a sequence; in 16 bits cudnn from {api.XLA_SCORES:,} scores "
        "(sequences x rows x heads x keys) on; else xla"
    )


def _experts() -> str:
    import jax.numpy as jnp

    from dllm_jax.kernels.expert_ffn import api, mosaic

    rows, w_down = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((1, 64, 128), jnp.bfloat16)
    missing = mosaic.unsupported(rows, w_down)
    if not missing:
        return "mosaic here for 16-bit models, else grouped"
    return (
        f"dense or grouped here: dense on a CPU up to {api.DENSE_WORK:,} (rows x experts x widths) "
        f"or {api.DENSE_ROWS} rows that each go to 1 in {api.DENSE_SHARE} experts or more, else "
        f"grouped (mosaic {missing})"
    )


def _layer() -> str:
    import jax.numpy as jnp

    from dllm_jax.kernels.layer import api_products, mosaic

    missing = mosaic.unsupported(jnp.zeros((1, 16), jnp.bfloat16))
    if missing:
        return f"xla here (mosaic: {missing})"
    return (
        f"mosaic here for 16-bit models: products of up to {api_products.MOSAIC_PRODUCT_ROWS:,} "
        "rows, gate and up of more that fill the chip, norms, rotations; else xla"
    )


def _readout() -> str:
    import jax.numpy as jnp

    from dllm_jax.kernels.token_readout import api, mosaic

    rows, head = jnp.zeros((1, 64), jnp.bfloat16), jnp.zeros((256, 64), jnp.bfloat16)
    if missing := mosaic.unsupported(rows, head, 0):
        return f"xla here, rows in chunks (mosaic: {missing})"
    return (
        "mosaic or xla here: for 16-bit models where nothing is sampled mosaic, "
        f"{api.MOSAIC_ROWS:,} rows at a time, else xla, rows in chunks"
    )


def _models() -> dict[str, str]:
    from dllm_jax.loading.checkpoints import inspect
    from dllm_jax.loading.sources import BUILTIN, builtin_names
    from dllm_jax.models.family_table import DRAFTS

    found = {}
    for name in builtin_names():
        report = inspect(BUILTIN / name)
        d = report.defaults
        how = "unreadable"
        if d is not None:
            how = f"{d.strategy}, block {d.block_size}, buffer {d.buffer_size}"
            if d.family in {row.name for row in DRAFTS}:
                how = f"a drafter (--draft) of blocks of {d.block_size}"
        found[f"builtin:{name}"] = f"{report.num_params / 1e6:.1f} M parameters, {how}"
    return found


def _random() -> dict[str, str]:
    import jax

    from dllm_jax.models.architecture import arch_of
    from dllm_jax.models.families import parse_config
    from dllm_jax.models.published import PUBLISHED

    found = {}
    for name in sorted(PUBLISHED):
        family, config, *_ = parse_config(PUBLISHED[name], name=name)
        size = sum(leaf.size for leaf in jax.tree.leaves(arch_of(config).param_shapes(config)))
        found[f"random:{name}"] = f"{size / 1e9:.1f} B parameters, {family}"
    return found


def _families() -> dict[str, str]:
    """A line a family: the strategy it was made for, its numbers, its tokens, its class."""
    from dllm_jax.models.family_table import BLOCK_ROUTED, DRAFTS, FAMILIES

    def line(row: Any) -> str:
        return ", ".join(
            (
                f"{row.strategy}, block {row.block_size}, buffer {row.buffer_size}",
                f"accept {row.accept_threshold:g}",
                *([] if row.edit_threshold is None else [f"edit {row.edit_threshold:g}"]),
                *([] if row.remasking is None else [f"remasking {row.remasking}"]),
                *([] if row.block_length is None else [f"text in blocks of {row.block_length}"]),
                *(["appended"] if row.append else []),
                f"temperature {row.temperature:g}",
                *([] if row.top_p is None else [f"top-p {row.top_p:g}"]),
                f"trained {row.attention}{', shifted' if row.shift else ''}",
                *([] if row.mask_token_id is None else [f"mask {row.mask_token_id}"]),
                f"stops {' '.join(map(str, dict(row.stop_tokens)))}",
                *([f"or {' or '.join(row.alternatives)}"] if row.alternatives else []),
                f"class {row.architecture}",
            )
        )

    found = {row.name: line(row) for row in FAMILIES}
    found |= {
        row.name: f"drafters (--draft), class {' or '.join((row.architecture, *row.also))}"
        for row in DRAFTS
    }
    row = next(row for row in FAMILIES if row.name == "llada2")
    return found | {"llada2, 2.2": line(dataclasses.replace(row, **BLOCK_ROUTED))}


def _size_of_cache() -> str:
    from dllm_jax.loading.jax_settings import cache_folder

    size = sum(f.stat().st_size for f in cache_folder().rglob("*") if f.is_file())
    return f"{size / 1e6:.1f} MB of compiled programs"
