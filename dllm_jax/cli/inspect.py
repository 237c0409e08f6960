"""`dllm-jax inspect SRC`: what a checkpoint holds and every problem in it, without its weights."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from dllm_jax.cli import flags
from dllm_jax.cli.flags import Group, flag
from dllm_jax.cli.interrupt import Interrupt
from dllm_jax.cli.text import shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the verb."""
    source = flag("src SRC", "a checkpoint folder, a hub id, or builtin:NAME")
    flags.add(parser, Group("", source, *flags.SOURCE, flags.as_json("one JSON object")))


def run(args: argparse.Namespace, stop: Interrupt) -> int:
    """Print the report; a checkpoint that cannot be loaded is a failure."""
    from dllm_jax.cli.sources import family_of, headers_folder
    from dllm_jax.loading.checkpoints import inspect
    from dllm_jax.loading.sources import find_adapter

    adapter = None if args.lora is None else find_adapter(args.lora)
    family = family_of(args)
    with headers_folder(args.src, args.revision) as folder:
        report = inspect(folder, lora=adapter, family=family)
    report = dataclasses.replace(report, source=args.src)
    report = dataclasses.replace(report, notes=(*report.notes, *_notes(report)))
    if args.json:
        facts = {
            "source": args.src,
            "kind": report.kind,
            "family": report.family,
            "dtype": report.dtype,
            "num_tensors": report.num_tensors,
            "num_params": report.num_params,
            "num_bytes": report.num_bytes,
            "config": dataclasses.asdict(report.config) if report.config else None,
            "defaults": dataclasses.asdict(report.defaults) if report.defaults else None,
            "adapter": dataclasses.asdict(report.adapter) if report.adapter else None,
            "shapes": {name: list(shape) for name, shape in report.shapes.items()},
            "problems": list(report.problems),
            "notes": list(report.notes),
        }
        print(json.dumps(facts))
    else:
        print(shown(str(report)))
    if report.problems:
        sys.stdout.flush()
        report.require_ok()
    return 0


def _notes(report: Any) -> list[str]:
    """Lines on how the model is decoded."""
    from dllm_jax.api.strategy import alternatives_note
    from dllm_jax.models.dflash import DFlashConfig

    if report.defaults is None:
        return []
    if isinstance(report.config, DFlashConfig):
        return [_drafter_note(report.config)]
    note = alternatives_note(report)
    return [note] if note else []


def _drafter_note(config: Any) -> str:
    """Whose draft it may be: what its target must have."""
    least = max(config.target_layer_ids) + 1
    vocabulary = f", a vocabulary of {config.vocab_size}" if config.vocab_size else ""
    return (
        f"a drafter of blocks of {config.block_size}, no model by itself: give it as --draft "
        "beside the model that it was trained for, which has a hidden_size of "
        f"{config.hidden_size}, {least} layers or more{vocabulary}"
    )
