"""The device time of a program, by operation and by kind of work.

Data flow: `traced` runs a function under JAX's profiler -> events; `origins` finds the kind of each
operation in the compiled program -> `shares` joins both. The kind follows from the source lines
that XLA keeps for an operation, so no list of kernel names is needed. Library kernels have no
source lines and are recognised by name.
"""

import dataclasses
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

KINDS = ("gemm", "attention", "experts", "readout", "cache", "glue", "copies")
# Source -> kind, the first that matches; kernels are imported under either of two paths.
SOURCES = (
    ("kernels/paged_attention/", "attention"),
    ("kernels/expert_ffn/", "experts"),
    ("kernels/token_readout/", "readout"),
    ("dllm_jax/runner/readout.py", "readout"),
    ("dllm_jax/runner/grammar_readout.py", "readout"),
    ("dllm_jax/runner/chunks.py", "readout"),
    ("kernels/kv_write/", "cache"),
)
LIBRARY_GEMM = re.compile(r"nvjet|gemm|cutlass|cublas|xmma|splitk|gemv|matmul", re.IGNORECASE)
LIBRARY_ATTENTION = re.compile(r"fmha|sdpa|flash|attend|attention", re.IGNORECASE)
READOUT = re.compile("token_readout")
_OF_MOSAIC = "_mosaic_gpu"  # suffix of a kernel's name that its call does not have
COPY = re.compile(r"mem(cpy|set)|^copy|wrapped_copy|copy_fusion", re.IGNORECASE)
_HOLDERS = ("while", "call", "conditional", "async-start", "async-done", "async-update")
_NO_WORK = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", *_HOLDERS)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation that ran.

    Attributes:
        name: Name of the kernel.
        operation: Name in the program, if the profiler knows it.
    """

    name: str
    operation: str | None
    start_ns: float
    duration_ns: float


@dataclasses.dataclass(frozen=True)
class Trace:
    """The events of a profile.

    Attributes:
        on_gpu: Events are kernels and copies of a GPU; otherwise operations of XLA's CPU back end,
            with the times of the thread that ran them.
    """

    events: list[Event]
    on_gpu: bool


def traced(run: Callable[[], Any]) -> Trace:
    """Call `run`, which waits for its work, under the profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call would be an event
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        paths = sorted(Path(folder).rglob("*.xplane.pb"))
        if not paths:
            raise ValueError("the profiler wrote nothing; another profile may be going on")
        return read_trace(jax.profiler.ProfileData.from_file(str(paths[-1])))


def read_trace(data: Any) -> Trace:
    """The device's events in a profile (`jax.profiler.ProfileData`)."""
    planes = list(data.planes)
    gpus = [plane for plane in planes if "GPU" in plane.name]
    with warnings.catch_warnings():
        # Of the type of `event.stats`, on its first use (jax 0.11, Python 3.12).
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        if gpus:
            lines = [line for plane in gpus for line in plane.lines if "Stream" in line.name]
            return Trace([_event(event) for line in lines for event in line.events], True)
        lines = [line for plane in planes if "CPU" in plane.name for line in plane.lines]
        found = [_event(event) for line in lines for event in line.events]
    return Trace([event for event in found if event.operation is not None], False)


def _event(event: Any) -> Event:
    operation = next((value for name, value in event.stats if name == "hlo_op"), None)
    return Event(event.name, operation, event.start_ns, event.duration_ns)


# --- what the program says of its operations ----------------------------------------------------


def origins(hlo: str, vocab_size: int) -> dict[str, str]:
    """Kind of each operation of an optimised program, by its name.

    Args:
        hlo: `compiled.as_text()`.
        vocab_size: Arrays with an axis of this size belong to the readout, whatever their source.
    """
    frames = _frames(hlo)
    bodies, fused = computations(hlo)
    kinds = {}
    for name, body in bodies.items():
        if name in fused:
            continue
        for operation, shape, opcode, rest in body:
            if opcode in _NO_WORK:
                continue
            inner = [
                line
                for called in re.findall(r"calls=%?([\w.\-]+)", rest)
                for line in bodies[called]
            ]
            lines = [(operation, shape, opcode, rest), *inner]
            kinds[operation] = _kind(lines, frames, vocab_size)
    return kinds


def _kind(lines: list[tuple[str, str, str, str]], frames: Any, vocab_size: int) -> str:
    name, _, opcode, rest = lines[0]
    if opcode.startswith("copy"):
        return "copies"
    sources = frames(rest) or next((s for s in map(frames, (x[3] for x in lines)) if s), "")
    for part, kind in SOURCES:
        if part in sources:
            return kind
    if any(re.search(rf"[\[,]{vocab_size}[\],]", line[1]) for line in lines):
        return "readout"
    work = {line[2] for line in lines} - set(_NO_WORK) - {"fusion"}
    # Skip the operands: an operation that reads a product is none itself.
    called = name + next(iter(re.findall(r'custom_call_target="([^"]*)"', rest)), "")
    if "dot" in work or (opcode == "custom-call" and LIBRARY_GEMM.search(called)):
        return "gemm"
    return "copies" if work and work <= {"copy", "transpose"} else "glue"


def computations(hlo: str) -> tuple[dict[str, list[tuple[str, str, str, str]]], set[str]]:
    """Instructions (name, shape, opcode, rest) of each computation, and names of fused ones."""
    bodies: dict[str, list[tuple[str, str, str, str]]] = {}
    fused: set[str] = set()
    body: list[tuple[str, str, str, str]] = []
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            body.append((found[1], found[2], found[3], found[4]))
            if found[3] not in _HOLDERS:
                fused.update(re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", found[4]))
        elif found := _COMPUTATION.match(line):
            body = bodies.setdefault(found[1], [])
    return bodies, fused


def _frames(hlo: str) -> Callable[[str], str]:
    """A function from an instruction to the files that it was traced through, innermost first."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in hlo.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif found := re.match(r"(\d+) (.+)$", line):
            table[int(found[1])] = found[2]
        elif tables and line.startswith(("%", "ENTRY")):
            break
    stacks = {key: _numbers(text) for key, text in tables.get("StackFrames", {}).items()}
    # The parent is printed one up, so that 1 says none (jax 0.11); a frame is not its own parent.
    offset = 1 if stacks and stacks[min(stacks)].get("parent_frame_id") == min(stacks) else 0
    texts: dict[int, str] = {}

    def walk(frame: int) -> str:
        if frame not in stacks:
            return ""
        if frame not in texts:
            where = stacks[frame].get("file_location_id", 0)
            file = _numbers(tables["FileLocations"].get(where, "")).get("file_name_id", 0)
            parent = stacks[frame].get("parent_frame_id", offset) - offset
            outer = walk(parent) if parent != frame else ""
            texts[frame] = f"{tables['FileNames'].get(file, '')}\n{outer}"
        return texts[frame]

    def files(rest: str) -> str:
        if found := re.search(r"stack_frame_id=(\d+)", rest):
            return walk(int(found[1]))
        found = re.search(r'source_file="([^"]*)"', rest)
        return found[1] if found else ""

    return files


def _numbers(text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}


# --- shares -------------------------------------------------------------------------------------


def shares(
    trace: Trace, kinds: dict[str, str], steps: int, num_layers: int, top: int = 40
) -> dict[str, Any]:
    """Time of each kind and of the longest operations, a step.

    Args:
        kinds: `origins` of the program that ran.
        num_layers: A library product that runs less often than this in a step belongs to the
            readout.

    Returns:
        `busy_ms` summed over operations, `span_ms` from the first one's start to the last one's
        end, `launches`, `kinds` and `kernels` with ms, launches and share of `busy_ms`; all a step.

    Raises:
        ValueError: Nothing ran.
    """
    by_name = {_plain(name): kind for name, kind in kinds.items()}
    # A Pallas kernel runs under its own name, without the number that XLA gave its call.
    stems: dict[str, set[str]] = {}
    for name, kind in kinds.items():
        stems.setdefault(_plain(re.sub(r"\.\d+$", "", name)), set()).add(kind)
    by_stem = {stem: min(found) for stem, found in stems.items() if len(found) == 1}
    time_ns: Counter[str] = Counter()
    count: Counter[str] = Counter()
    kind_of: dict[str, str] = {}
    for event in trace.events:
        # The name first: in a captured graph the operation may be that of the whole graph.
        name, operation = _plain(event.name), _plain(event.operation or "")
        kind = by_name.get(name) or by_name.get(operation) or by_stem.get(name)
        if _OF_MOSAIC in name:
            kind = _kind_by_name(name, num_layers, num_layers)
        if kind is None and not trace.on_gpu:
            continue  # contains other operations, or is not of this program
        kind_of.setdefault(event.name, kind or "")
        time_ns[event.name] += round(event.duration_ns)
        count[event.name] += 1
    if not time_ns:
        raise ValueError("the profile holds no operation of the program")
    for name, kind in kind_of.items():
        kind_of[name] = kind or _kind_by_name(name, count[name] / steps, num_layers)
    busy, per = sum(time_ns.values()), steps * 1e6
    start = min(event.start_ns for event in trace.events)
    end = max(event.start_ns + event.duration_ns for event in trace.events)

    def row(names: Iterable[str]) -> dict[str, float]:
        spent = sum(time_ns[name] for name in names)
        launches = sum(count[name] for name in names) / steps
        return {"ms": spent / per, "launches": launches, "share": spent / busy}

    return {
        "what": "kernels and copies of the GPU"
        if trace.on_gpu
        else "XLA's operations on the CPU: thread time, several may run at once",
        "steps": steps,
        "busy_ms": busy / per,
        "span_ms": (end - start) / per,
        "launches": sum(count.values()) / steps,
        "kinds": {
            kind: row(names)
            for kind in KINDS
            if (names := [name for name in kind_of if kind_of[name] == kind])
        },
        "kernels": [
            {"name": name, "kind": kind_of[name], **row([name])}
            for name, _ in time_ns.most_common(top)
        ],
    }


def _kind_by_name(name: str, launches: float, num_layers: int) -> str:
    if COPY.search(name):
        return "copies"
    if LIBRARY_ATTENTION.search(name):
        return "attention"
    if READOUT.search(name):
        return "readout"
    if LIBRARY_GEMM.search(name):
        return "gemm" if launches >= num_layers else "readout"
    return "glue"


def _plain(name: str) -> str:
    """The kernel name of an operation: `loop_add_fusion.53` runs as `loop_add_fusion_53`."""
    return re.sub(r"\W", "_", name)
