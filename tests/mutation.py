"""Mutants: copies of our modules with one rule broken, which a named check must notice.

A copied package is traced and compiled anew, so that no cache of JAX returns the right answer. Each
replaced expression must occur exactly once: a mutant that no longer applies is an error.
"""

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Mutant(NamedTuple):
    """A broken rule.

    Attributes:
        killer: The check that must notice.
        changes: (file name, expression, what replaces it).
    """

    name: str
    killer: str
    changes: tuple[tuple[str, str, str], ...]


class Suite(NamedTuple):
    """Mutants of one package, and how they are noticed.

    Attributes:
        load: The modules of a mutant, or of an unbroken copy, written below a folder.
        check: Raises one of `errors` where a killer notices what was loaded.
    """

    mutants: list[Mutant]
    load: Callable[[Mutant, Path], Any]
    check: Callable[[Any, str], None]
    errors: tuple[type[BaseException], ...] = (AssertionError,)


def broken(killer: str, file: str, **changes: tuple[str, str]) -> list[Mutant]:
    """One mutant a keyword: `name=(expression, what replaces it)`."""
    return [Mutant(name, killer, ((file, *change),)) for name, change in changes.items()]


def unbroken(killer: str) -> Mutant:
    """A copy without a change."""
    return Mutant(f"unbroken_{''.join(filter(str.isalnum, killer))}", killer, ())


def copy_package(package: types.ModuleType, mutant: Mutant, folder: Path) -> types.ModuleType:
    """Write a mutated copy of a package into a folder and import all of it."""
    assert package.__file__ is not None
    source = Path(package.__file__).parent
    sources = {
        path.relative_to(source): path.read_text(encoding="utf-8") for path in source.rglob("*.py")
    }
    for file, *change in mutant.changes:
        (place,) = (path for path in sources if path.name == file)
        sources[place] = _replace(sources[place], mutant, file, *change)
    name = f"mutant_{package.__name__.replace('.', '_')}_{mutant.name}"
    for place, text in sources.items():
        target = folder / name / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(f"{package.__name__}.", f"{name}."), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        for place in sources:
            parts = [part for part in place.with_suffix("").parts if part != "__init__"]
            importlib.import_module(".".join((name, *parts)))
    finally:
        sys.path.remove(str(folder))
    return sys.modules[name]


def copy_module(module: types.ModuleType, mutant: Mutant) -> types.ModuleType:
    """A mutated copy of one module among the unbroken rest of its package."""
    assert module.__file__ is not None
    path = Path(module.__file__)
    text = path.read_text(encoding="utf-8")
    for file, *change in mutant.changes:
        if file == path.name:
            text = _replace(text, mutant, file, *change)
    copy = types.ModuleType(f"{module.__name__}_{mutant.name}")
    copy.__package__ = module.__package__
    exec(compile(text, f"{copy.__name__}.py", "exec"), copy.__dict__)
    return copy


def _replace(text: str, mutant: Mutant, file: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ValueError(
            f"{old!r} occurs {text.count(old)} times in {file}, not once; rewrite mutant "
            f"{mutant.name!r} for the new source"
        )
    return text.replace(old, new)
