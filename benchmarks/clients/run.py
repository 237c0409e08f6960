"""Real clients against `dllm-jax serve builtin:tiny-sdar`, each unmodified; one JSON for all.

    python benchmarks/clients/run.py --envs DIR --out benchmarks/results/clients_cpu.json

DIR holds what docs/clients.md installs: virtual environments `main`, `evalscope`, `aiperf` and
`routers`, the folder `node`, and `vllm` with `vllm/benchmarks` of its wheel. What is not there is
named under `not_installed`. `--only vllm,smg` runs some. Exit status 1 where a client failed.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from dllm_jax.bench.numbers import environment  # noqa: E402
from dllm_jax.tasks.problems import problem  # noqa: E402

MODEL = "builtin:tiny-sdar"
FOLDER = ROOT / "dllm_jax" / "builtin" / "tiny-sdar"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT_S = 420  # of one client
SAME = 0.01  # vLLM's figures against ours
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
CHECKS += ("response_schema_conformance", "negative_data_rejection", "unsupported_method")


class Failed(Exception):
    """A client did not do what it should."""


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def counter(base, name):
    """A metric of the server, summed over labels."""
    lines = get(f"{base}/metrics").splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


@contextlib.contextmanager
def process(command, url, log, seconds=180):
    """A process whose `url` is answered with 200."""
    with open(log, "w") as out:
        running = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError):
                get(url)
                break
            if running.poll() is not None or time.monotonic() > until:
                raise Failed(f"{command[0]} does not start: {Path(log).read_text()[-400:]}")
            time.sleep(0.3)
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGTERM)
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)


class Bench:
    """The clients; each method is one, and returns what it saw."""

    def __init__(self, base, envs, work):
        self.base, self.envs, self.work = base, envs, work
        self.prompts = work / "prompts.jsonl"
        self.problems = [problem(("plain", "hard")[i % 2], 11, i, True) for i in range(8)]
        rows = [{"prompt": one.question, "output_tokens": 160} for one in self.problems]
        self.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.lines = work / "prompts.txt"
        self.lines.write_text("".join(one.question + "\n" for one in self.problems))

    def binary(self, env, name="python"):
        path = self.envs / env / "bin" / name
        if not path.exists():
            raise FileNotFoundError(f"{env}/bin/{name}")
        return str(path)

    def run(self, command, cwd=None, **env):
        done = subprocess.run(
            command,
            cwd=cwd or self.work,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env={**os.environ, "OPENAI_API_KEY": "none", **env},
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip()[-500:]
            raise Failed(f"status {done.returncode}: {said}")
        return done.stdout

    def version(self, env, package):
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        return self.run([self.binary(env), "-c", code]).strip()

    def checked(self, output):
        """The last line, an object of checks."""
        measured = json.loads(output.strip().splitlines()[-1])
        wrong = [name for name, value in measured.items() if value is False]
        if wrong:
            raise Failed(f"{wrong} of {measured}")
        return measured

    def openai_python(self):
        return self.checked(
            self.run([self.binary("main"), str(HERE / "openai_python.py"), self.base])
        )

    def langchain(self):
        script = str(HERE / "langchain_chat.py")
        return self.checked(self.run([self.binary("main"), script, self.base, MODEL]))

    def _node(self, name):
        folder = self.envs / "node"
        if not (folder / "node_modules").is_dir():
            raise FileNotFoundError("node/node_modules")
        shutil.copy(HERE / name, folder / name)
        return self.checked(self.run(["node", name, self.base, MODEL], cwd=folder))

    def openai_node(self):
        return self._node("openai_node.mjs")

    def ai_sdk(self):
        return self._node("ai_sdk.mjs")

    def ours(self, base=None, *more):
        """`bench serve` over the same prompts."""
        out = self.work / "ours.json"
        command = [sys.executable, "-m", "dllm_jax.cli", "bench", "serve"]
        command += ["--base-url", base or self.base, "--dataset-path", str(self.prompts)]
        command += ["--num-prompts", "8", "--max-concurrency", "2", "--output", str(out), *more]
        self.run(command, cwd=ROOT)
        found = json.loads(out.read_text())
        if found["failed"]:
            raise Failed(f"bench serve: {found['problems']}")
        return found

    def bench_serve(self):
        return {"version": None, **self.ours()}

    def vllm(self):
        measured = {"version": "0.33.0, benchmarks/ unmodified"}
        if not (self.envs / "vllm" / "vllm" / "benchmarks").is_dir():
            raise FileNotFoundError("vllm/vllm/benchmarks")
        for backend, endpoint in (("openai-chat", CHAT), ("openai", TEXT)):
            names = ("dllm_generation_tokens_total", "dllm_nfe_total")
            before = [counter(self.base, name) for name in names]
            command = [self.binary("main"), str(HERE / "vllm_bench.py"), "--backend", backend]
            command += ["--base-url", self.base, "--endpoint", endpoint, "--model", MODEL]
            command += ["--tokenizer", str(FOLDER), "--dataset-name", "custom"]
            command += ["--dataset-path", str(self.prompts), "--skip-chat-template"]
            command += ["--custom-output-len", "160", "--num-prompts", "8", "--temperature", "0"]
            command += ["--max-concurrency", "2", "--save-result", "--disable-tqdm"]
            command += ["--result-dir", str(self.work), "--result-filename", "vllm.json"]
            output = self.run(command, VLLM=str(self.envs / "vllm"))
            tokens, nfe = (counter(self.base, n) - b for n, b in zip(names, before, strict=True))
            found = json.loads((self.work / "vllm.json").read_text())
            ours = self.ours(None, "--backend", backend)
            keep = ("completed", "failed", "total_input_tokens", "total_output_tokens")
            keep += ("output_throughput", "mean_ttft_ms", "mean_itl_ms", "mean_tpot_ms")
            row = {name: found[name] for name in keep}
            row |= {name: found[name] for name in found if name.startswith("diffusion")}
            row["printed"] = re.findall(r"^(?:Committed|Denoising|Canvas).*$", output, re.M)
            row["same_time_dllm"] = {
                "tokens": tokens,
                "nfe": nfe,
                "tokens_per_forward": tokens / nfe,
            }
            row["bench_serve"] = {
                name: ours[name]
                for name in ("visible_tokens", "nfe", "tokens_per_forward", "tok_s", "ttfb_s")
            } | {"vllm_diffusion": ours["server"]["vllm_diffusion"]}
            measured[backend] = row
            if found["failed"] or found["completed"] != 8:
                raise Failed(f"{backend}: {row}")
            if found["total_output_tokens"] != ours["visible_tokens"]:
                raise Failed(f"{backend}: other tokens than bench serve: {row}")
            theirs = found["diffusion_committed_per_step"]
            for mine in (tokens / nfe, ours["tokens_per_forward"]):
                if abs(theirs / mine - 1) > SAME:
                    raise Failed(f"{backend}: {theirs} tokens a step, ours {mine}")
        return measured

    def lm_eval(self):
        """The harness four ways; its tokenizer comes from the server or is left out.

        With a tokenizer of the server it sends a templated chat to /tokenize as a list of messages,
        which is its own mistake: so texts go raw there, and only the chat way is a fair score.
        """
        folder = self.work / "lm"
        folder.mkdir()
        rows = [{"question": one.question, "answer": one.answer} for one in self.problems[::2]]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "task.yaml").write_text(
            f"task: word_problems\ndataset_path: json\ndataset_kwargs:\n  data_files: "
            f"{folder}/rows.jsonl\noutput_type: generate_until\ntest_split: train\n"
            'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\ngeneration_kwargs:\n'
            '  until: ["\\n\\n"]\n  max_gen_toks: 160\nmetric_list:\n  - metric: exact_match\n'
            "    aggregation: mean\n    higher_is_better: true\n    regexes_to_ignore: "
            '["^[\\\\s\\\\S]*The answer is ", "\\\\.$"]\n'
        )
        measured = {"version": self.version("main", "lm-eval")}
        ways = {
            "completions_auto": ("local-completions", TEXT, "", False),
            "completions_remote": ("local-completions", TEXT, ",tokenizer_backend=remote", False),
            "completions_none": (
                "local-completions",
                TEXT,
                ",tokenizer_backend=None,tokenized_requests=False",
                False,
            ),
            "chat": ("local-chat-completions", CHAT, "", True),
        }
        for name, (kind, path, more, template) in ways.items():
            out = folder / name
            command = [self.binary("main", "lm_eval"), "--model", kind, "--model_args"]
            command += [f"model={MODEL},base_url={self.base}{path},max_retries=1{more}"]
            command += ["--include_path", str(folder), "--tasks", "word_problems"]
            command += ["--output_path", str(out)] + ["--apply_chat_template"] * template
            self.run(command)
            (found,) = out.rglob("results_*.json")
            measured[name] = json.loads(found.read_text())["results"]["word_problems"]
            measured[name].pop("alias", None)
        if measured.get("chat", {}).get("exact_match,none", 1) < 0.5:
            raise Failed(f"the answers do not reach the harness: {measured}")
        return measured

    def evalscope(self):
        out = self.work / "evalscope"
        command = [self.binary("evalscope", "evalscope"), "perf", "--url", self.base + CHAT]
        command += ["--model", MODEL, "--api", "openai", "--dataset", "line_by_line"]
        command += ["--dataset-path", str(self.lines), "--number", "6", "--parallel", "2"]
        command += ["--max-tokens", "160", "--temperature", "0", "--outputs-dir", str(out)]
        self.run(command)
        measured = {"version": self.version("evalscope", "evalscope")}
        found = next(iter(out.rglob("benchmark_summary.json")), None)
        if found is None:
            raise Failed(f"no summary among {[str(p.name) for p in out.rglob('*.json')]}")
        measured["summary"] = json.loads(found.read_text())
        failed = [v for k, v in measured["summary"].items() if "ailed" in k and "equest" in k]
        if any(failed):
            raise Failed(str(measured))
        return measured

    def aiperf(self):
        out = self.work / "aiperf"
        command = [self.binary("aiperf", "aiperf"), "profile", "--model", MODEL]
        command += ["--url", self.base, "--endpoint-type", "chat", "--streaming"]
        command += ["--tokenizer", str(FOLDER), "--request-count", "6", "--concurrency", "2"]
        command += ["--isl", "40", "--osl", "32", "--artifact-dir", str(out), "--ui", "none"]
        self.run(command)
        found = next(out.rglob("profile_export_aiperf.json"))
        measured = json.loads(found.read_text())
        keep = ("request_count", "error_request_count", "output_sequence_length")
        keep += ("time_to_first_token", "inter_token_latency", "output_token_throughput")
        row = {name: measured[name] for name in keep if measured.get(name) is not None}
        if row["request_count"]["avg"] != 6 or row.get("error_request_count"):
            raise Failed(str(row))
        return {"version": self.version("aiperf", "aiperf"), **row}

    def schemathesis(self):
        """Cases of /openapi.json against the scripted engine, so that only HTTP is asked."""
        from tests.serve.driving import scripted

        report = self.work / "cases.json"
        fields = {"settings": {"max_model_len": 64}, "limits": {"max_waiting": 4096}}
        with scripted(self.work, **fields) as server:
            command = [self.binary("main", "schemathesis"), "run", "--checks", ",".join(CHECKS)]
            command += ["--continue-on-failure", "--max-examples", "60", "--seed", "1"]
            command += ["--report", "json", "--report-json-path", str(report), "--no-color"]
            command += [f"http://127.0.0.1:{server.port}/openapi.json"]
            self.run(command)
        found = json.loads(report.read_text())
        measured = {"version": found["schemathesis_version"], "checks": CHECKS}
        measured |= {"operations": found["operations"]["tested"], **found["test_cases"]}
        if measured["generated"] < 2000 or measured["with_failures"] or measured["errored"]:
            raise Failed(f"{measured} {found['failures']}")
        return measured

    def _router(self, name, command, more=()):
        """A router in front: the load, denoise frames, thresholds, and a client that leaves."""
        port = free_port()
        front = f"http://127.0.0.1:{port}"
        command = [*command, "--port", str(port), "--worker-urls", self.base, *more]
        log = self.work / f"{name}.log"
        with process(command, f"{front}/v1/models", log):
            found = self.ours(front, "--backend", "openai-chat")
            measured = {"version": self.version("routers", name)}
            measured |= {
                n: found[n] for n in ("requests", "failed", "visible_tokens", "nfe", "ttfb_s")
            }
            command = [self.binary("main"), str(HERE / "openai_python.py"), front]
            measured["openai_python"] = json.loads(self.run(command).strip().splitlines()[-1])
            measured["abort_reaches_the_server"] = self._leaves(port, True)
            measured["abort_of_a_whole_answer_reaches_it"] = self._leaves(port, False)
        wrong = [n for n, v in measured["openai_python"].items() if v is False]
        measured["refused_by_the_router"] = wrong
        is_wrong = any(value is False for value in measured.values())  # not 0, which equals it
        if is_wrong or set(wrong) - {"ids_are_counted", "decisions_are_read"}:
            raise Failed(str(measured))
        return measured

    def _leaves(self, port, stream):
        """Whether the server ends a request whose client left the router."""
        name = "dllm_disconnects_total"
        before = counter(self.base, name)
        body = {"model": MODEL, "stream": stream, "max_tokens": 400, "ignore_eos": True}
        data = json.dumps(body | {"messages": [{"role": "user", "content": "hi"}]}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost:{port}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(head.encode() + data)
            while not counter(self.base, "dllm_num_requests_running"):
                time.sleep(0.01)
        until = time.monotonic() + 5
        while counter(self.base, name) <= before and time.monotonic() < until:
            time.sleep(0.1)
        return counter(self.base, name) > before

    def smg(self):
        command = [self.binary("routers", "smg"), "launch", "--backend", "vllm"]
        command += ["--host", "127.0.0.1", "--policy", "consistent_hashing"]
        return self._router("smg", command, ["--prometheus-port", str(free_port())])

    def vllm_router(self):
        command = [self.binary("routers", "vllm-router"), "--policy", "consistent_hash"]
        return self._router(
            "vllm-router",
            [*command, "--host", "127.0.0.1"],
            ["--prometheus-port", str(free_port())],
        )


CLIENTS = ("bench_serve", "vllm", "openai_python", "langchain", "openai_node", "ai_sdk", "lm_eval")
CLIENTS += ("schemathesis", "evalscope", "aiperf", "smg", "vllm_router")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CLIENTS))
    args = parser.parse_args()
    measured = json.loads(args.out.read_text()) if args.out.exists() else {}
    here = {"model": MODEL, **environment()}
    measured = here | measured  # rows of other runs stay: each says its commit
    for name in ("clients", "failed", "not_installed"):
        measured.setdefault(name, {})
    port = free_port()
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, "-m", "dllm_jax.cli", "serve", MODEL, "--port", str(port)]
        base = f"http://127.0.0.1:{port}"
        with process(command, f"{base}/health", f"{work}/server.log"):
            for name in args.only.split(","):
                for each in ("clients", "failed", "not_installed"):
                    measured[each].pop(name, None)
                (folder := Path(work) / name).mkdir()
                began = time.monotonic()
                try:
                    row = getattr(Bench(base, args.envs.resolve(), folder), name)()
                    row |= {"wall_s": round(time.monotonic() - began, 1), "commit": here["commit"]}
                    measured["clients"][name] = row
                except FileNotFoundError as error:
                    measured["not_installed"][name] = str(error)
                except (Failed, subprocess.TimeoutExpired) as error:
                    measured["failed"][name] = str(error)[-1500:]
                is_well = name in measured["clients"]
                print(
                    name,
                    "passed" if is_well else measured["failed"].get(name, "missing"),
                    flush=True,
                )
                args.out.write_text(json.dumps(measured, indent=1) + "\n")
    return 1 if measured["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
