"""The table of one GPU, section by section, into one JSON file and one log.

    python benchmarks/run_gpu.py --out run.json --compare benchmarks/results/strategies_h200.json

Each section is a program in a process group of its own, with a hard limit below eight minutes. At
the limit the group is killed, and its rows so far are kept. The file is written whenever a section
has written a row, so no measurement is lost. A section that is complete in the file is skipped;
`--again` measures it again. Results of another commit are marked. With `--compare`, figures more
than 10 % slower than stored ones end it with a table and status 1 (`compare.py`). `--smoke` runs
every section small on a CPU.

This process never touches the device, whose memory the first process to do so takes.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from compare import report_slower

HERE = Path(__file__).resolve().parent
SMALL, LARGE = "random:JetLM/SDAR-1.7B-Chat", "random:JetLM/SDAR-8B-Chat"
POLL_S = 0.5
GRACE_S = 5.0  # between the request to end and the end


@dataclasses.dataclass(frozen=True)
class Section:
    """A program that writes its rows as JSON.

    Attributes:
        words: Of its command; `{out}` stands for the file it writes.
        smoke: The same, small enough for a CPU.
        limit_s: It is killed then.
    """

    words: tuple[str, ...]
    smoke: tuple[str, ...]
    limit_s: float = 300.0


def _step(model, shapes, context, limit_s):
    words = (sys.executable, "-m", "dllm_jax.cli", "bench", "step", "--profile", "--out", "{out}")
    tiny = "--model builtin:tiny-sdar --shapes 1x1x8 --context 64 --steps 8 --repeats 1"
    return Section(
        (*words, "--model", model, "--shapes", shapes, "--context", str(context)),
        (*words, *tiny.split()),
        limit_s,
    )


def _script(name, words="", smoke="--smoke --model builtin:tiny-sdar", limit_s=300.0):
    start = (sys.executable, str(HERE / name), "--out", "{out}")
    return Section((*start, *words.split()), (*start, *smoke.split()), limit_s)


def _families(models):
    """Models at full size, about 100 s each."""
    smoke = "--models builtin:tiny-sdar --folder none --context 64 --shapes 1x1 --repeats 1"
    return _script("families_gpu.py", f"--folder none --models random:{models}", smoke, 470)


def _dflash(sections, limit_s):
    words = f"--sections {sections}"
    return _script("dflash_gpu.py", words, f"{words} --smoke --target made:tiny", limit_s)


# By what they are worth: a lease that ends early has the first ones.
SECTIONS = {
    "step_1.7b": _step(SMALL, "1x1x32,1x4x32,8x4x32,32x4x32", 512, 420),
    "step_8b": _step(LARGE, "1x4x32", 512, 240),
    "step_8k": _step(SMALL, "1x1x32", 8192, 240),
    "strategies": _script(
        "strategies_gpu.py",
        smoke="--smoke --model builtin:tiny-sdar --shape 1x2x8 --only d2f;ar",
        limit_s=240,
    ),
    "attention": _script("paged_attention_gpu.py", smoke="--tiny", limit_s=420),
    "engine": _script("engine_gpu.py", "--sections memory,overhead", limit_s=420),
    "start": _script(
        "start_gpu.py",
        smoke="--model builtin:tiny-sdar --prompt 256 --pass-tokens 128",
        limit_s=300,
    ),
    "dflash_8b": _dflash("qwen3_8b,ar", 150),
    "dflash_pair": _dflash("pair", 240),
    "experts": _script("expert_ffn_gpu.py", smoke="--tiny", limit_s=420),
    "experts_families": _families("inclusionAI/LLaDA2.0-mini,random:JetLM/SDAR-30B-A3B-Chat"),
    "dense_families": _families(
        "JetLM/SDAR-8B-Chat,random:GSAI-ML/LLaDA-8B-Instruct,random:Dream-org/Dream-v0-Instruct-7B"
    ),
}


class Run:
    """The one file: read where there is one, written after every change."""

    def __init__(self, path, commit, log):
        self.path, self.commit, self.log = Path(path), commit, log
        self.report = {"command": "benchmarks/run_gpu.py", "sections": {}}
        if self.path.exists():
            self.report = json.loads(self.path.read_text(encoding="utf-8"))
        self.report |= {"python": platform.python_version(), "jax": metadata.version("jax")}
        self.report |= {"gpu": gpu(), "commit": commit}

    def is_done(self, name):
        return self.report["sections"].get(name, {}).get("status") == "done"

    def keep(self, name, **entry):
        self.report["sections"][name] = {"commit": self.commit, **entry}
        half = self.path.with_suffix(".part")
        half.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
        half.replace(self.path)

    def say(self, line):
        print(line, flush=True)
        print(line, file=self.log, flush=True)


def run_section(run, name, words, limit_s):
    """Run one program to its end or its limit; whether it ended well."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [word.replace("{out}", str(out)) for word in words]
        shown = " ".join([Path(command[0]).name, *command[1:]])
        run.say(f"[{name}] {shown}, at most {limit_s:.0f} s")
        with subprocess.Popen(
            command,
            stdout=run.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            status, seen = "running", None
            try:
                while status == "running":
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        code = process.wait(POLL_S)
                        status = "done" if code == 0 else f"failed: status {code}"
                    if status == "running" and time.monotonic() - began > limit_s:
                        status = f"failed: killed after {limit_s:.0f} s"
                    result = read_json(out, seen)
                    if result != seen or status != "running":
                        seen = result
                        wall_s = time.monotonic() - began
                        measured = {"status": status, "wall_s": wall_s, "limit_s": limit_s}
                        run.keep(name, command=shown, **measured, result=seen)
            finally:
                end_group(process)
    run.say(f"[{name}] {status} after {time.monotonic() - began:.0f} s")
    return status == "done"


def read_json(path, before):
    """What the file holds, or what it held before where it is being written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return before


def end_group(process):
    """End a process and all that it started: asked first, then killed."""
    for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def gpu():
    """What the driver says of the first GPU, without taking it; None where there is none."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.splitlines()[0] if said.stdout.strip() else None


def commit():
    """Of this checkout, "+" behind it where files differ; None without git."""
    asked = ["git", "-C", str(HERE), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip() or None


def main(argv=None, sections=SECTIONS):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the one JSON file; read first, if it exists")
    parser.add_argument("--log", help="what the sections print (default: OUT with .log)")
    parser.add_argument("--sections", default=",".join(sections), help="comma-separated, in order")
    parser.add_argument("--again", action="store_true", help="measure what is done already")
    parser.add_argument("--within", type=float, help="seconds; nothing begins or goes on later")
    parser.add_argument("--compare", action="append", default=[], help="stored results")
    parser.add_argument("--commit", help="where the checkout has no git")
    parser.add_argument("--smoke", action="store_true", help="every section small, on a CPU")
    args = parser.parse_args(argv)
    names = args.sections.split(",")
    if unknown := set(names) - set(sections):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    began, failed = time.monotonic(), []
    with open(args.log or Path(args.out).with_suffix(".log"), "a", encoding="utf-8") as log:
        run = Run(args.out, args.commit or commit(), log)
        for name in names:
            section = sections[name]
            if run.is_done(name) and not args.again:
                run.say(
                    f"[{name}] there already, of commit {run.report['sections'][name]['commit']}"
                )
                continue
            if args.within and time.monotonic() - began > args.within:
                run.say(f"[{name}] not begun: {args.within:.0f} s are over")
                failed.append(name)
                continue
            words = section.smoke if args.smoke else section.words
            limit_s = section.limit_s
            if args.within:
                limit_s = min(limit_s, args.within - (time.monotonic() - began))
            if not run_section(run, name, words, limit_s):
                failed.append(name)
        if failed:
            run.say(f"not done: {', '.join(failed)}")
        slower = report_slower(run.report, args.compare, run.say) if args.compare else False
    return 1 if failed or slower else 0


if __name__ == "__main__":
    # Sections stand in groups of their own: whoever ends this program must not leave one behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
