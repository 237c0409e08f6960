"""Measurements of the engine: the work, the runs, the numbers; `dllm-jax bench` prints them."""
