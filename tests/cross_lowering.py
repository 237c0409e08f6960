"""Kernels of the Triton kind lowered for a GPU on a machine that has none."""

from jax.sharding import AbstractDevice, AbstractMesh

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
