"""The names `strategies`, `pallas_kernels` and `checkpoints_convert` for modules of `dllm_jax`."""

import importlib
import pkgutil
import sys


def share_modules(name: str, target: str) -> None:
    """Make `name` the package `target` with all its modules, so that each module exists once.

    Called by the `__init__` of a top-level folder where that is imported under its own name. All
    modules are imported: Python would load a second copy of one that comes later.
    """
    package = importlib.import_module(target)
    for module in pkgutil.walk_packages(package.__path__, f"{target}."):
        if not module.name.endswith(".__main__"):
            short = name + module.name.removeprefix(target)
            sys.modules[short] = importlib.import_module(module.name)
    sys.modules[name] = package
