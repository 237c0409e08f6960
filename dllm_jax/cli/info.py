"""`dllm-jax info`: what is installed, what it runs on, which models and strategies there are."""

import argparse
import importlib.metadata
import json
import platform

PACKAGES = ("dllm-jax", "jax", "jaxlib", "flax", "transformers", "orbax-checkpoint", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    facts = collect()
    if args.json:
        print(json.dumps(facts))
        return 0
    for title, entries in facts.items():
        lines = [f"{name}  {told}" if told else name for name, told in entries.items()]
        for i, line in enumerate(lines or ["none"]):
            print(f"{title if i == 0 else '':<12}{line}")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """The facts, by title: name -> what there is to say of it."""
    from dllm_jax.compile_cache import cache_folder, enable_compile_cache
    from dllm_jax.models.families import FAMILIES
    from dllm_jax.models.published import PUBLISHED
    from strategies import strategy_names

    enable_compile_cache()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": _devices(),
        "kernels": _kernels(),
        "models": _models(),
        "random": {f"random:{name}": "" for name in sorted(PUBLISHED)},
        "families": {
            row.name: f"{row.strategy}, blocks of {row.block_size}, class {row.architecture}"
            for row in FAMILIES
        },
        "strategies": dict.fromkeys(strategy_names(), ""),
        "cache": {str(cache_folder()): _size_of_cache()},
    }


def _devices() -> dict[str, str]:
    import jax

    from dllm_jax.memory import host_bytes_available

    found = {}
    for device in jax.devices():
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        memory = f", {host_bytes_available() / 2**30:.1f} GiB of the host's memory free"
        if limit:
            memory = f", {used / 2**30:.1f} of {limit / 2**30:.1f} GiB in use"
        found[str(device)] = f"{device.device_kind} ({device.platform}){memory}"
    return found


def _kernels() -> dict[str, str]:
    import jax.numpy as jnp

    from pallas_kernels.paged_attention import api, cudnn

    missing = cudnn.unsupported(jnp.zeros((1, 1, 1, 128), jnp.bfloat16))
    told = f"xla here (cudnn {missing})"
    if missing is None:
        told = (
            f"xla or cudnn here: cudnn for 16-bit models in passes of {api.XLA_SCORES:,} scores "
            "(sequences x rows x heads x keys) and more, else xla"
        )
    return {"paged_attention": told}


def _models() -> dict[str, str]:
    from checkpoints_convert import inspect
    from dllm_jax.cli.folders import BUILTIN, builtin_names

    found = {}
    for name in builtin_names():
        report = inspect(BUILTIN / name)
        d = report.defaults
        how = f"{d.strategy}, block {d.block_size}, buffer {d.buffer_size}" if d else "unreadable"
        found[f"builtin:{name}"] = f"{report.num_params / 1e6:.1f} M parameters, {how}"
    return found


def _size_of_cache() -> str:
    from dllm_jax.compile_cache import cache_folder

    size = sum(f.stat().st_size for f in cache_folder().rglob("*") if f.is_file())
    return f"{size / 1e6:.1f} MB of compiled programs"
