"""Mutants: copies of our modules with one rule broken, which a named check must notice.

A copied package is traced and compiled anew, so that no cache of JAX returns the right answer. Each
replaced expression must occur exactly once: a mutant that no longer applies is an error.
"""

import functools
import importlib
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_numbers = itertools.count()


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
        check: Path of a function of what was loaded and a killer. It is imported when it is used,
            because it imports many tests.
        errors: What `check` raises if it notices.
        load: The modules of a mutant, given a folder to write to; None: a copy of the package.
    """

    package: types.ModuleType
    mutants: list[Mutant]
    check: str
    errors: tuple[type[BaseException], ...] = (AssertionError,)
    load: Callable[[Mutant, Path], Any] | None = None

    def prepare(self, mutant: Mutant, folder: Path) -> Callable[[], None]:
        """Load a mutant; what is returned runs its killer."""
        module, _, function = self.check.rpartition(".")
        check = getattr(importlib.import_module(module), function)
        load = self.load or functools.partial(copy_package, self.package)
        return functools.partial(check, load(mutant, folder), mutant.killer)


def broken(killer: str, file: str, **changes: tuple[str, str]) -> list[Mutant]:
    """One mutant a keyword: `name=(expression, what replaces it)`."""
    return [Mutant(name, killer, ((file, *change),)) for name, change in changes.items()]


def unbroken(killer: str) -> Mutant:
    """A copy without a change."""
    return Mutant(f"unbroken_{''.join(filter(str.isalnum, killer))}", killer, ())


def sources(package: types.ModuleType) -> dict[Path, str]:
    """The text of each module of a package, by path."""
    assert package.__file__ is not None
    folder = Path(package.__file__).parent
    return {
        path.relative_to(folder): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")
    }


def mutate(texts: dict[Path, str], mutant: Mutant) -> dict[Path, str]:
    """The modules with the changes of a mutant.

    Raises:
        ValueError: An expression does not occur exactly once in its file.
    """
    texts = dict(texts)
    for file, old, new in mutant.changes:
        (path,) = (path for path in texts if path.name == file)
        if (count := texts[path].count(old)) != 1:
            raise ValueError(
                f"{old!r} occurs {count} times in {path}, not once; rewrite mutant "
                f"{mutant.name!r} for the new source"
            )
        texts[path] = texts[path].replace(old, new)
    return texts


def copy_package(package: types.ModuleType, mutant: Mutant, folder: Path) -> types.ModuleType:
    """Write a mutated copy of a package into a folder and import all of it."""
    texts = mutate(sources(package), mutant)
    name = f"mutant_{next(_numbers)}_{mutant.name}"  # a name of its own in `sys.modules`
    for place, text in texts.items():
        target = folder / name / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace(f"{package.__name__}.", f"{name}."), encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        for place in texts:
            parts = [part for part in place.with_suffix("").parts if part != "__init__"]
            importlib.import_module(".".join((name, *parts)))
    finally:
        sys.path.remove(str(folder))
    return sys.modules[name]


def copy_module(module: types.ModuleType, mutant: Mutant) -> types.ModuleType:
    """A mutated copy of one module among the unbroken rest of its package."""
    assert module.__file__ is not None
    path = Path(module.__file__)
    own = tuple(change for change in mutant.changes if change[0] == path.name)
    text = mutate({path: path.read_text(encoding="utf-8")}, mutant._replace(changes=own))[path]
    copy = types.ModuleType(f"{module.__name__}_{mutant.name}")
    copy.__package__ = module.__package__
    exec(compile(text, f"{copy.__name__}.py", "exec"), copy.__dict__)
    return copy
