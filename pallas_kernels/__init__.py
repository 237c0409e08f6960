"""Kernels behind functional interfaces: what is computed here, fast ways beside it."""

if __name__ == "pallas_kernels":  # the same modules under the folder's name
    from dllm_jax import share_modules

    share_modules(__name__, "dllm_jax.kernels")
