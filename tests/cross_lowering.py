"""What tests of kernels for a GPU need on a machine that has none."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic forms need jax 0.11.2"
)

H200 = AbstractMesh(
    (),
    (),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu"),
)


def triton_grids(operation):
    """Grid of each Triton call, its module parsed and verified as XLA does when it compiles."""
    from jaxlib.mlir import ir
    from jaxlib.triton import dialect

    found = []
    for inner in (o.operation for region in operation.regions for block in region for o in block):
        found += triton_grids(inner)
        if "__gpu$xla.gpu.triton" not in str(inner.attributes.get("call_target_name", "")):
            continue
        settings = ir.DictAttr(inner.attributes["mhlo.backend_config"])
        context = ir.Context()
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True  # of barriers
        with context:
            module = ir.Module.parse(ir.StringAttr(settings["ir"]).value_bytes)
            assert module.operation.verify()
        found.append(tuple(ir.IntegerAttr(settings[f"grid_{axis}"]).value for axis in "xyz"))
    return found


def shared_arrays(scratch_types):
    """Arrays of shared memory of a Mosaic kernel and their bytes, barriers left out."""
    arrays = [s for s in scratch_types if hasattr(s, "dtype") and hasattr(s, "shape")]
    return arrays, sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for s in arrays)
