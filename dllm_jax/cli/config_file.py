"""`--config FILE`: flags of a verb from a YAML or TOML file, as words of its command line.

Keys are names of flags, with dashes or underscores. All that is wrong in a file is one error;
words of the command line come later, so that they win.
"""

import argparse
import difflib
from collections.abc import Iterator
from typing import Any

from dllm_jax.cli.errors import UsageError, one_line


def words_of(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """The flags that a file holds, as words.

    Raises:
        UsageError: It cannot be read, or holds what is no flag or no value of one.
    """
    known = {
        name.removeprefix("--"): action
        for action in parser._actions
        for name in action.option_strings
        if name.startswith("--") and action.dest not in ("help", "config")
    }
    words, wrong = [], []
    for key, value in _read(path).items():
        name = str(key).replace("_", "-")
        if (action := known.get(name)) is None:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            wrong.append(f"{str(key)[:60]!r} is no flag{hint}")
            continue
        try:
            words += _words(f"--{name}", action, value)
        except (argparse.ArgumentTypeError, ValueError) as error:
            wrong.append(f"{name}: {str(error)[:200]}")
    if wrong:
        raise UsageError(f"--config {path!r}: {'; '.join(wrong)}")
    return words


def _words(flag: str, action: argparse.Action, value: Any) -> Iterator[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{str(value)[:60]!r} must be true or false")
        if value:
            yield flag
        elif isinstance(action, argparse.BooleanOptionalAction):
            yield f"--no-{flag.removeprefix('--')}"
        return
    is_list = isinstance(action, argparse._AppendAction)
    for one in value if is_list and isinstance(value, list) else [value]:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            kind = "a text, a number or a list of them" if is_list else "a text or a number"
            raise ValueError(f"{str(one)[:60]!r} must be {kind}")
        if action.choices is not None and one not in action.choices:
            raise ValueError(f"{one!r} must be one of {', '.join(map(str, action.choices))}")
        if callable(action.type):
            action.type(str(one))
        yield f"{flag}={one}"


def _read(path: str) -> dict[Any, Any]:
    from dllm_jax.cli.prompts import read_file

    text = read_file("config", path)
    kind = "TOML" if path.endswith(".toml") else "YAML"
    try:
        if kind == "TOML":
            import tomllib

            found = tomllib.loads(text)
        elif path.endswith((".yaml", ".yml")):
            import yaml

            found = yaml.safe_load(text) or {}
        else:
            raise UsageError(f"--config {path!r} must end in .yaml, .yml or .toml; rename it")
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"--config {path!r} needs the package pyyaml; use .toml") from error
    except Exception as error:  # pyyaml raises KeyError for `!!bool x`
        raise UsageError(f"--config {path!r} is no {kind}: {one_line(error)[:200]}") from None
    if not isinstance(found, dict):
        raise UsageError(f"--config {path!r} must hold flags and their values; write e.g. port: 80")
    return found
