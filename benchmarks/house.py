"""The table of the house: lines, what a `generate` runs through, and the structure of the imports.

    JAX_PLATFORMS=cpu PYTHONPATH=$PWD python benchmarks/house.py

Lines are those of files, symbolic links not counted; lines of code are those that hold a token
other than a comment or a docstring. A cold `generate` is the first one of an `LLM` without warm-up,
a warm one the second. A switch is a call or a return in another file of ours than the one before.
"""

import ast
import collections
import itertools
import re
import sys
import threading
import tokenize
from pathlib import Path

from tests.project import test_layering as layering

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert"
CORE = "engine", "runner", "compile", "models", "api"  # and the strategies
PATH = {
    "strategies": ("multi_bd", "core/state", "core/blocks", "core/driver"),
    "dllm_jax/engine": ("requests", "sequence", "scheduler", "engine", "texts"),
    "dllm_jax/runner": (
        "runner",
        "dispatch",
        "state",
        "calls",
        "programs",
        "decode",
        "forward",
        "window_output",
    ),
}
MOSAIC = "experimental.mosaic", "fragmented_array", "mma_utils", "inline_mgpu", "jax._src"
IDLE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def files(*folders: str) -> list[Path]:
    """Source files of folders, each by its one real path."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path.resolve() == path)


def core() -> list[Path]:
    """What decodes, without snapshots and without the stand-ins for a model."""
    ours = [path for path in files("strategies") if "testing" not in path.parts]
    mine = [path for room in CORE for path in files(f"dllm_jax/{room}")]
    return ours + [path for path in mine if path.name != "snapshot.py"]


def num_code(path: Path) -> int:
    """Lines with code."""
    code, is_first = set(), True
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type in IDLE:
                is_first = True
            elif token.type not in (tokenize.COMMENT, tokenize.ENDMARKER):
                if token.type != tokenize.STRING or not is_first:
                    code.update(range(token.start[0], token.end[0] + 1))
                is_first = False
    return len(code)


def total(paths: list[Path]) -> str:
    """Lines, code and number of some files."""
    lines = sum(path.read_text("utf-8").count("\n") for path in paths)
    return f"{lines:,} / {sum(map(num_code, paths)):,} ({len(paths)} files)"


def functions(path: Path) -> list[tuple[str, int, int]]:
    """Name, lines and parameters of each function of a file, `self` and `cls` not counted."""
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    given = [node.args.posonlyargs + node.args.args + node.args.kwonlyargs for node in found]
    counts = [sum(arg.arg not in ("self", "cls") for arg in args) for args in given]
    sizes = [(node.end_lineno or 0) - node.lineno + 1 for node in found]
    names = [f"{path.relative_to(ROOT)}:{node.name}" for node in found]
    return [*zip(names, sizes, counts, strict=True)]


def structure() -> str:
    """Rooms, floors, arrows between rooms, and circles of files."""
    edges, arrows = layering.project(), collections.defaultdict(set)
    reached = {module: set(targets) for module, targets in edges.items()}
    for middle in edges:
        for found in reached.values():
            found |= reached[middle] if middle in found else set()
    for module, targets in edges.items():
        room = layering.room_of(module)
        arrows[room] |= {layering.room_of(target) for target in targets} - {room, None}

    def floor(room: str | None) -> int:
        return 1 + max(map(floor, arrows[room]), default=0)

    rooms = layering.FLOORS
    circles = {frozenset(other for other in reached[n] if n in reached[other]) for n in edges}
    num_arrows = sum(len(arrows[room]) for room in rooms)
    return f"{len(rooms)}, {max(map(floor, rooms))}, {num_arrows}, {len(circles - {frozenset()})}"


def generates() -> dict[str, str]:
    """What a cold and a warm `generate` run through, and an engine step with several texts."""
    import dllm_jax as dj

    ours, seen, rows = tuple(str(ROOT / name) for name in PACKAGES), [], {}

    def see(frame, event, _):
        path = frame.f_code.co_filename
        if event in ("call", "return") and path.startswith(ours):
            seen.append((path, frame.f_code.co_firstlineno, frame.f_code.co_name, event))

    threading.setprofile(see)
    sys.setprofile(see)
    config, params = dj.EngineConfig(max_num_seqs=4), dj.SamplingParams(max_tokens=16)
    text = "What is {} + 34? Answer with a number, please, and with nothing else at all."
    llm = dj.LLM(dj.load("builtin:tiny-sdar"), config=config, warm_up=False)
    for what, count in (("cold", 1), ("warm", 1), ("", 8), ("8 texts in 4 slots", 8)):
        seen.clear()
        llm.generate([text.format(i) for i in range(count)], params, use_tqdm=False)
        calls = [one for one in seen if one[-1] == "call"]
        switches = sum(one[0] != last[0] for one, last in itertools.pairwise(seen))
        steps = sum(name == "_take_step" for _, _, name, _ in calls)
        whole = f"{len({path for path, *_ in calls})} / {len({*calls})} / {switches}"
        rows[what] = f"{whole}; {len(calls) / steps:.0f} / {switches / steps:.0f}"
    sys.setprofile(None)
    llm.close()
    title = "generate: files / functions / switches; calls / switches an engine step"
    return {f"{what} {title}": row for what, row in rows.items() if what}


def main() -> None:
    """Print the table, and with `--list` each function and file that is too large."""
    every = files(*PACKAGES)
    texts = {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in every}
    each = [one for path in every for one in functions(path)]
    long = [(name, size) for name, size, _ in each if size > 80]
    wide = [(name, count) for name, _, count in each if count > 9]
    large = [(name, n) for name, text in texts.items() if (n := text.count("\n")) > 400]
    in_kernels = sum(name.startswith("pallas_kernels") for name, _ in long)
    inside = [name for name, text in texts.items() if any(word in text for word in MOSAIC)]
    for name, value in long + wide + large if "--list" in sys.argv else ():
        print(f"{value:5} {name}")
    path = [ROOT / folder / f"{name}.py" for folder, names in PATH.items() for name in names]
    rows = {
        "core, lines / code": total(core()),
        "cluster and scoring, lines / code": total(files("dllm_jax/cluster", "dllm_jax/scoring")),
        "four packages, lines / code": total(every),
        "tests, lines / code": total(files("tests")),
        "reading path, lines / code": total(path),
        "functions over 80 lines": f"{len(long)} ({in_kernels} in kernels)",
        "files over 400 lines": len(large),
        "functions of more than 9 parameters": len(wide),
        "rooms, floors, arrows, circles of dllm_jax": structure(),
        "files with Mosaic internals outside hopper": sum("/hopper" not in n for n in inside),
        "files with `top_p`": sum(bool(re.search(r"\btop_p\b", text)) for text in texts.values()),
    }
    for name, value in (rows | generates()).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
