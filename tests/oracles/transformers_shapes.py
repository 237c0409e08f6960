"""Parameters of a model of transformers, read from its source: torch is not installed here.

The `__init__` methods of a modeling file run with stand-ins for torch's modules, which keep shapes
alone. What it cannot say: whether values, masks and rotation agree.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Shape(tuple[int, ...]):
    """A parameter."""


class _Module:
    def __init__(self, config: Any = None, *_: Any, **__: Any):
        self.config = config

    def __getattr__(self, name: str) -> Any:
        return _Module

    def __class_getitem__(cls, key: Any) -> Any:
        return _Module

    def shapes(self, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, value in vars(self).items():
            if isinstance(value, _Shape):
                yield prefix + name, tuple(value)
            elif isinstance(value, _Module):
                yield from value.shapes(f"{prefix}{name}.")


class _Linear(_Module):
    def __init__(self, num_in: int, num_out: int, bias: bool = True):
        self.weight = _Shape((num_out, num_in))
        if bias:
            self.bias = _Shape((num_out,))


class _Embedding(_Module):
    def __init__(self, num: int, size: int, *_: Any):
        self.weight = _Shape((num, size))


class _List(_Module):
    def __init__(self, items: list[_Module]):
        vars(self).update({str(i): item for i, item in enumerate(items)})


class _Nn(_Module):
    Linear, Embedding, ModuleList, Parameter = _Linear, _Embedding, _List, _Shape


class _Torch(_Module):
    nn = _Nn()

    def ones(self, *sizes: int) -> tuple[int, ...]:
        return sizes


def parameter_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the class that a configuration of transformers names."""
    kind = config.model_type
    spec = importlib.util.find_spec(f"transformers.models.{kind}")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    source = Path(spec.submodule_search_locations[0]) / f"modeling_{kind}.py"
    names: dict[str, Any] = {"torch": _Torch(), "nn": _Nn(), "Stand": _Module}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            names = {one.name: _Module for one in node.names} | names
        elif isinstance(node, ast.ClassDef) and "Rotary" in node.name:
            names[node.name] = _Module  # it has no parameters
        elif isinstance(node, ast.ClassDef):
            made = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            made = [one for one in made if one.name == "__init__"]
            for one in (argument for method in made for argument in method.args.args):
                one.annotation = None
            parents = [one for one in node.bases if isinstance(one, ast.Name)]
            node.bases = list[ast.expr](parents[:1]) or [ast.Name("Stand", ast.Load())]
            node.decorator_list, node.body = [], list[ast.stmt](made) or [ast.Pass()]
            code = ast.fix_missing_locations(ast.Module([node], []))
            exec(compile(code, str(source), "exec"), names)
    return dict(names[config.architectures[0]](config).shapes())
