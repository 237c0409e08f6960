"""The command line: one file a verb, `main` is the console script `dllm-jax`."""

from dllm_jax.cli.entry import main

__all__ = ["main"]
