"""Tools on an accelerator: a step that is held to them, and 24 of them that nobody has asked for.

    python benchmarks/tools_gpu.py --model random:JetLM/SDAR-8B-Chat --out tools.json
    python benchmarks/tools_gpu.py --smoke

`steps`: bare device loops of one process, one slot: no grammar, one tool, the two kinds of stages
of 24 tools. `logprobs`: the step without a grammar in an engine that keeps log-probabilities.
`cold`: the loop of a server's engine process, in a thread. A stream runs, and a request with 24
tools comes: the time to its first token, and the longest one between two pieces of the stream.
A model without a tokenizer gets random words, with bytes, JSON's marks and the tokens of calls.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
from grammar_gpu import Bound, spread, vocabulary

from dllm_jax.structured import Tool, Tools

PARTS = ("steps", "cold", "logprobs")
TOKENS_PER_STEP, PAGE = 4, 64  # of the served streams
MOST_S = 60.0  # for an answer
CALL_MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


class Sizes(NamedTuple):
    """Tokens of prompts and of the stream that runs, and pieces of it in each wait."""

    context: int
    stream: int
    pieces: int


SIZES, SMOKE = Sizes(512, 12_288, 60), Sizes(64, 300, 6)


def tools(seed: int, count: int = 24) -> tuple[Tool, ...]:
    """Tools like those of an agent that writes code, with their descriptions."""
    draw = random.Random(seed)
    kinds = (
        {"type": "string"},
        {"type": "string", "maxLength": 40},
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 600_000},
        {"enum": ["content", "files_with_matches", "count"]},
        {"type": "array", "items": {"type": "string"}},
        {"type": "number"},
    )
    said = "What the caller has to know of it before it says anything here. " * 2

    def one(number: int) -> Tool:
        names = [f"{draw.choice(('path', 'limit', 'mode', 'query'))}_{i}" for i in range(4)]
        fields = {name: {"description": said, **draw.choice(kinds)} for name in names}
        schema = {"type": "object", "properties": fields, "required": names[:2]}
        name = draw.choice(("Read", "Write", "Search", "Run")) + f"_{seed}_{number}"
        return Tool(name, json.dumps(schema))

    return tuple(one(number) for number in range(count))


def loaded(name: str, folder: Path) -> Any:
    """A model; one without a tokenizer gets a byte-level one."""
    from dllm_jax.loading.load import load
    from dllm_jax.loading.model import TokenizerSource
    from dllm_jax.structured.tokens import _bytes_of_chars

    model = load(name)
    if model.tokenizer_source is not None:
        return model
    chars = {byte: chr(byte) for byte in range(256)}
    chars |= {byte: chr(char) for char, byte in _bytes_of_chars().items() if byte < 256}
    words, mask = vocabulary(model.config.vocab_size), model.config.mask_token_id
    words[mask] = None
    names = ["".join(chars[byte] for byte in one) for one in words if one is not None]
    plain = [i for i, one in enumerate(words) if one is not None]
    others = [i for i, one in enumerate(words) if one is None]
    texts = dict(zip(others, CALL_MARKS, strict=False)) | {mask: "<|MASK|>"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": texts.get(i, f"<|{i}|>"), "special": texts.get(i) not in CALL_MARKS}
        for i in others
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [one | flags for one in added],
        "pre_tokenizer": byte_level | {"use_regex": False},
        "decoder": byte_level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": dict(zip(names, plain, strict=True)), "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "mask_token": "<|MASK|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model.replace(tokenizer_source=TokenizerSource("words", folder))


# --- bare steps -----------------------------------------------------------------------------------


def bare(model: Any, args: argparse.Namespace, logprobs: bool, grammars: bool, say: Any) -> None:
    """A step of one slot in a loop of the device, with and without tools."""
    import dllm_jax as dj
    from dllm_jax.bench import measure, step

    shape = step.Shape.parse(args.shape)
    strategy = step.step_strategy(model, shape)
    context = step.context_len(model, strategy, args.sizes.context, args.steps)
    text = step.text_len(strategy, args.steps)
    columns = -(-(context + text + strategy.block_size) // PAGE)
    config = dj.EngineConfig(
        max_num_seqs=shape.slots,
        max_model_len=context + text,
        page_size=PAGE,
        num_pages=shape.slots * (columns + 1),
        slot_buckets=(shape.slots,),
        page_buckets=(columns,),
        prefill_buckets=(context,),
        logprobs=logprobs,
    )
    with dj.LLM(model, strategy, config=config, progress=False, calibrate=False) as llm:
        runner, loop = llm.engine.runner, (llm.engine, shape.slots, columns, context, args.steps)
        ways = {"log-probabilities" if logprobs else "no grammar": runner}
        if grammars:
            ways |= {name: Bound(runner, ready) for name, ready in held(llm, say)}
        for llm.engine.runner in ways.values():
            measure.decode_step_samples(*loop, 1, text)  # compiles
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, llm.engine.runner in ways.items():
                found[name] += measure.decode_step_samples(*loop, args.repeats, text)
        llm.engine.runner = runner
        for name, samples in found.items():
            ms = statistics.median(samples)
            args.plain_ms = args.plain_ms or ms
            more = (ms / args.plain_ms - 1) * 100
            say("step", name, ms, "ms", f"{spread(samples)}; {more:+.1f} % of the first")


def held(llm: Any, say: Any) -> list[tuple[str, Any]]:
    """The automata of one tool and of the stages of many, with names."""
    many = Tools(tools(0))
    stages = {
        "one tool": Tools(tools(0, 1)),
        "24 tools: prose and names": many,
        "24 tools: arguments": dataclasses.replace(many, choice="required", stage=0),
    }
    found = []
    for name, constraint in stages.items():
        began = time.perf_counter()
        ready = llm.constraints.whole(asked(constraint))
        took = (time.perf_counter() - began) * 1e3
        say("compile", name, took, "ms", f"{len(ready.delta)} states; {bucket(ready)}")
        found.append((name, ready))
    return found


def asked(constraint: Tools) -> Any:
    """A request for a turn."""
    import dllm_jax as dj

    params = dj.SamplingParams(max_tokens=256, constraint=constraint)
    return dj.Request(prompt_token_ids=[5], params=params)


def bucket(ready: Any) -> str:
    """The least sizes for which programs are compiled that hold it."""
    from dllm_jax.runner import grammars

    return f"programs of {grammars.bucket_of(ready, None).states} states"


# --- from cold ------------------------------------------------------------------------------------


class Front:
    """The other end of a server's engine loop, which runs in a thread."""

    def __init__(self, served: Any):
        from dllm_jax.engine.faults import Faults
        from dllm_jax.serve import framing, pipe
        from dllm_jax.serve.child.loop import Loop
        from dllm_jax.serve.child.outbox import Outbox

        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(MOST_S)
        faults = Faults(lambda line: print(line, file=sys.stderr))
        loop = Loop(served, theirs, Outbox(theirs, faults), faults)
        self._pipe, self._frame = pipe, framing.frame
        self._reader = framing.Reader(pipe.FromEngine)
        self._number, self._waiting = 0, []
        self._thread = threading.Thread(target=loop.run, daemon=True)
        self._thread.start()

    def add(self, ids: list[int], **params: Any) -> int:
        """Ask for a streamed text; its number."""
        self._number += 1
        prompt, client = self._pipe.Prompt(ids), str(self._number)
        add = self._pipe.Add(self._number, [prompt], params, True, False, None, 0, client, True)
        self._sock.sendall(self._frame(add))
        return self._number

    def abort(self, number: int) -> None:
        """End a text."""
        self._sock.sendall(self._frame(self._pipe.Abort(number)))

    def deltas(self) -> list[tuple[float, Any]]:
        """What came next, and when."""
        messages = self._reader.feed(self._sock.recv(1 << 20))
        now = time.perf_counter()
        for message in messages:
            if isinstance(message, self._pipe.Refused):
                raise RuntimeError(message.message)
        moved = [one for one in messages if isinstance(one, self._pipe.Moved)]
        return [(now, delta) for one in moved for delta in one.deltas]

    def close(self) -> None:
        """End the loop."""
        self._sock.shutdown(socket.SHUT_WR)
        self._thread.join(MOST_S)
        self._sock.close()


def cold(model: Any, args: argparse.Namespace, say: Any) -> None:
    """A stream alone, and with requests for tools that are new."""
    import dllm_jax as dj
    from dllm_jax.bench.fixed import FixedWork
    from dllm_jax.serve.child.engine import served
    from dllm_jax.serve.child.process import SWITCH_S

    slots, size = 2, args.sizes
    longest = min(size.context + size.stream, model.config.max_position)
    strategy = FixedWork(TOKENS_PER_STEP)
    columns = -(-(longest + 32) // PAGE)
    config = dj.EngineConfig(
        max_num_seqs=slots,
        max_model_len=longest,
        page_size=PAGE,
        num_pages=slots * (columns + 1),
        slot_buckets=(slots,),
        page_buckets=(columns,),
        prefill_buckets=(size.context,),
        enable_prefix_caching=False,
    )
    llm = dj.LLM(model, strategy, config=config, progress=False, warm_up_constraints=True)
    before, _ = sys.getswitchinterval(), sys.setswitchinterval(SWITCH_S)
    front, prompt = Front(served(llm)), [5] * (size.context // 2)
    gc.collect()
    gc.freeze()  # as the process does
    try:
        number = front.add(prompt, max_tokens=64, ignore_eos=True)
        while not any(delta.id == number and delta.finish for _, delta in front.deltas()):
            pass
        requests = {
            "no other request": None,
            "a request without tools": {"ignore_eos": True},
            "24 tools, the first ever": with_tools(1),
            "the same tools again": with_tools(1),
            "24 other tools": with_tools(2),
        }
        if size == SIZES:  # else the stream is over first
            long = {"constraint": {"regex": "[a-z]{300}"}, "temperature": 1.0, "seed": 3}
            requests["300 letters, whose programs a thread compiles"] = long
        for name, params in requests.items():
            first, whole, gaps = beside(front, prompt, params, size)
            if first is not None:
                say("first token", name, first, "ms", f"whole answer after {whole:.0f} ms")
            gaps.sort()
            p99 = gaps[int(0.99 * (len(gaps) - 1))]
            text = f"p99 {p99:.1f}, median {statistics.median(gaps):.1f} of {len(gaps)}"
            say("longest gap", name, gaps[-1], "ms", text)
        say(
            "programs",
            "compiled while requests waited",
            llm.engine.runner.num_late_compiles,
            "",
            "",
        )
    finally:
        front.close()
        llm.close()
        gc.unfreeze()
        sys.setswitchinterval(before)


def with_tools(seed: int) -> dict[str, Any]:
    """Parameters of a turn that has to call one of 24 tools."""
    turn = Tools(tools(seed), "required", several=False)
    return {"constraint": {"tools": turn.fields}, "temperature": 1.0, "seed": seed}


def beside(
    front: Front, prompt: list[int], params: dict[str, Any] | None, size: Sizes
) -> tuple[float | None, float | None, list[float]]:
    """Milliseconds to a request's first token and to its end, and between pieces of a stream.

    The stream runs before and as long as the request, and for some pieces more.
    """
    stream = front.add(prompt, max_tokens=size.stream, ignore_eos=True)
    times: list[float] = []
    number = began = first = ended = None
    until = size.pieces
    try:
        while len(times) < until or (number is not None and ended is None):
            for now, delta in front.deltas():
                if delta.id == stream:
                    times.append(now)
                    if delta.finish:
                        raise RuntimeError("the stream was too short for the wait")
                elif delta.id == number:
                    first = now if first is None and delta.num_tokens else first
                    ended = now if delta.finish else ended
            if params is not None and number is None and len(times) >= size.pieces // 2:
                number, began = front.add(prompt, max_tokens=128, **params), time.perf_counter()
                until = len(times) + size.pieces
    finally:
        front.abort(stream)
    after = times if began is None else [one for one in times if one >= began]
    gaps = [(b - a) * 1e3 for a, b in itertools.pairwise(after)]
    if began is None or first is None or ended is None:
        return None, None, gaps
    return (first - began) * 1e3, (ended - began) * 1e3, gaps


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="builtin:tiny-sdar")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--shape", default="1x4", help="slots x blocks, of bare steps")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of all ways by turns")
    parser.add_argument("--smoke", action="store_true", help="small, for a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.sizes, args.plain_ms = SMOKE if args.smoke else SIZES, None
    if args.smoke:
        args.steps, args.repeats, args.rounds = 8, 1, 1
    facts: dict[str, Any] = {
        "device": str(jax.devices()[0].device_kind),
        "jax": jax.__version__,
        "model": args.model,
    }
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()

    def say(part: str, name: str, value: float, unit: str, more: str) -> None:
        rows.append({"part": part, "name": name, "value": value, "unit": unit, "more": more})
        print(f"{part:12s} {name:32s} {value:10.3f} {unit:3s} {more}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")

    def passed(name: str) -> None:
        say("wall", name, time.perf_counter() - began, "s", "since the start")

    with tempfile.TemporaryDirectory() as folder:
        model = loaded(args.model, Path(folder))
        passed("loaded")
        parts = args.parts.split(",")
        if "steps" in parts:
            bare(model, args, False, True, say)
            passed("steps")
        if "logprobs" in parts:
            bare(model, args, True, False, say)
            passed("logprobs")
        if "cold" in parts:
            cold(model, args, say)
            passed("cold")


if __name__ == "__main__":
    main()
