"""The functions of the model families that conversion needs, passed as arguments."""

import dataclasses
from collections.abc import Callable
from typing import Any

from .tensor_names import Table


@dataclasses.dataclass(frozen=True)
class Networks:
    """Functions of the model families; `dllm_jax.loading.checkpoints` defines the value.

    Attributes:
        parse_config: `(config.json, generation_config.json or None, TokenizerFacts, name=...)` ->
            a record with `family`, `config`, `defaults` and `notes`.
        param_shapes: `(config, dtype)` -> tree of shapes.
        config_from_json: `(family, fields)` -> config.
        defaults_from_json: `fields` -> defaults.
        table_of: `family` -> the names of its tensors.
        with_d2f_adapter: `defaults` -> the defaults after a D2F adapter is merged.
        loads_small: `(config, key path, whether it is e4m3 with a scale for each output)` ->
            whether loading holds a leaf of few bits in 8 bits.
    """

    parse_config: Callable[..., Any]
    param_shapes: Callable[[Any, Any], Any]
    config_from_json: Callable[[str, Any], Any]
    defaults_from_json: Callable[[Any], Any]
    table_of: Callable[[str], Table]
    with_d2f_adapter: Callable[[Any], Any]
    loads_small: Callable[[Any, tuple[str | int, ...], bool], bool]
