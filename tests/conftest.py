"""Settings every test runs under: strict dtypes and ranks, the CPU unless `-m gpu` is asked for.

Nothing here is a fixture of one test file only; oracles live in tests/oracles/.
"""

import os

import hypothesis
import pytest

# The reproducible profile of `make test`; `--hypothesis-profile=explore` draws anew each time.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("explore", deadline=None, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Set JAX up before any test module imports it."""
    marks = config.getoption("-m") or ""
    if "gpu" not in marks or "not gpu" in marks:
        os.environ["JAX_PLATFORMS"] = "cpu"

    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
