"""What tests of training share."""

import jax
import pytest


@pytest.fixture(scope="module")
def promotion():
    """JAX's usual promotion: optax mixes dtypes, dllm_jax.models ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
