"""Kernels with functional interfaces: a plain XLA reference of each operation, and fast forms."""

import os

__path__ = [os.path.realpath(folder) for folder in __path__]  # no link: ADR 0016

if __name__ == "pallas_kernels":  # the same modules under the folder's name
    from dllm_jax.short_names import share_modules

    share_modules(__name__, "dllm_jax.kernels")
