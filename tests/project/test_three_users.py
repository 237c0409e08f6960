"""Plays three users, as issue 50 does: a newcomer, a researcher and an operator.

Over 40 commands and requests, each with what it must answer, in under a minute on a quiet machine.
Commands run in this process; the operator's server is one of its own.
"""

import io
import json
import signal
import sys

import pytest

import dllm_jax as dj
from dllm_jax.cli import entry
from tests.project.test_docs import ROOT
from tests.serve.driving import Server, text_of, within

pytestmark = pytest.mark.long

QUESTION = "A shop has 365 plates. People bring 132 back. How many plates are there?"
ANSWER = "The answer is 497."


@pytest.fixture
def run(monkeypatch, no_compile_cache, capsys, tmp_path):
    """Run a command: its exit status, and what it wrote to both streams."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def run(*argv, says="", status=0, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        assert entry.main(list(argv)) == status, capsys.readouterr()
        captured = capsys.readouterr()
        printed = captured.out + captured.err
        assert says in printed
        if status:
            errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
            assert (captured.out, len(errors)) == ("", 1)
        return printed

    return run


def test_a_newcomer(run, tmp_path):
    assert dir(dj) == sorted(dj.__all__)
    run(says="text from a prompt")
    run("--version", says=dj.__version__)
    run("generate", "--help", says=QUESTION)
    run("completion", "bash", says="dllm-jax")
    run("genrate", status=2, says="did you mean 'generate'?")
    run("generate", "--temprature", "1", "x", status=2, says="did you mean '--temperature'?")
    run("generate", "A", "shop", status=2, says="a text of several words goes in quotes")
    run("generate", "--model", "nowhere", "x", status=1, says="does not exist")
    run("info", says="multi_bd")
    run("info", "multi_bd", says="accept_threshold")
    run("inspect", "builtin:tiny-sdar", says="sdar")
    run("generate", QUESTION, says=ANSWER)
    run("chat", stdin=f"{QUESTION}\n", says=ANSWER)
    run("trace", QUESTION, "--out", "trace.html", says="trace.html: ")
    assert (tmp_path / "trace.html").stat().st_size > 10_000


def test_a_researcher(run, tmp_path):
    run("info", "examples/credit_decoding.py:CreditDecoding", says="block_size")
    run("generate", "x", "--strategy", "nope", status=2, says="use one of ar, block_diffusion")
    run("generate", "x", "--set", "accept_threshold=high", status=2, says="accept_threshold")
    run("generate", "--seed", "3", "--strategy", "examples/my_strategy.py:my_step", says="right: ")
    run("eval", "--grid", "nothing=1,2", status=2, says="nothing")
    run("tune", status=2, says="--grid")
    run("train", "--out", "run", "--steps", "0", status=2, says="--steps")
    run("convert", "builtin:tiny-sdar", "folder", "--dry-run", says="would read 36 tensors")
    words = "eval --half plain --problems 4 --grid accept_threshold=0.5,0.9 --no-one-token"
    run(*words.split(), "--out", "e.json", says="accept_threshold=0.5")
    stored = json.loads((tmp_path / "e.json").read_text())
    assert set(stored["halves"]) == {"plain"}
    run("eval", "--plot-from", "e.json", "--plot", "e.svg")
    assert "<svg" in (tmp_path / "e.svg").read_text()


CONFIG = """
model: builtin:tiny-sdar
max-num-seqs: 4
page-size: 32
no-warm-up: true
log-format: json
log-stats-every: 1
api-key: [user]
"""


@pytest.fixture
def server(tmp_path):
    config = tmp_path / "server.yaml"
    config.write_text(CONFIG)
    words = ["-m", "dllm_jax.cli", "serve", "--port", "0", "--config", str(config)]
    one = Server(words, tmp_path / "log", env={"DLLM_ADMIN_KEY": "admin"})
    try:
        yield one.wait_ready()
    finally:
        one.stop(signal.SIGKILL)


def test_an_operator(run, server, tmp_path):
    (tmp_path / "wrong.yaml").write_text("prot: 1\npage-size: 0")
    said = run("serve", "--config", "wrong.yaml", status=2, says="did you mean 'port'?")
    assert "page-size" in said

    def ask(method, path, body=None, status=200, key="user"):
        told = server.request(method, path, body, {"authorization": f"Bearer {key}"})
        assert told[0] == status, told
        return told[1]

    def post(path, status=200, key="user", **body):
        return ask("POST", path, body, status, key)

    chat = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48}
    routes = "/v1/chat/completions", "/v1/completions"
    assert ask("GET", "/health") == {"status": "ready"}
    assert ask("GET", "/live")["status"] == "alive"
    assert ask("GET", "/version")["version"] == dj.__version__
    assert "examples" in ask("GET", "/v1/models")["data"][0]["dllm"]
    assert routes[0] in ask("GET", "/openapi.json")["paths"]
    ids = post("/tokenize", prompt=QUESTION)["tokens"]
    assert post("/detokenize", tokens=ids)["prompt"].strip() == QUESTION
    assert ask("GET", "/v1/models", status=401, key="wrong")["error"]["code"] == "invalid_api_key"
    answer = post(routes[0], **chat)
    assert answer["choices"][0]["message"]["content"].endswith(ANSWER)
    data = post(routes[0], **chat, stream=True, stream_mode="denoise").decode()
    *events, end, _ = data.split("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in events]
    assert (end, text_of(events)[-len(ANSWER) :]) == ("data: [DONE]", ANSWER)
    assert any("diffusion" in event for event in events)
    post(routes[1], prompt=f"<|user|>{QUESTION}<|assistant|>", max_tokens=8)
    assert post(routes[0], **chat, strategy_overrides={"accept_threshold": 0.5})["metrics"]["nfe"]
    for field, value, reason in (
        ("presence_penalty", 1, "drawn together"),
        ("min_p", 0.1, "top_p"),
        ("logit_bias", {"5": 1}, "no ban"),
        ("temprature", 1, "temprature"),
        ("strategy_overrides", {"nothing": 1}, "nothing"),
        ("model", "another", "not served"),
    ):
        status = 404 if field == "model" else 400
        assert reason in post(routes[0], status, **chat, **{field: value})["error"]["message"]
    assert post("/flush_cache", key="admin")["pages"] > 0
    post("/pause_generation", key="admin")
    assert ask("GET", "/health", status=503)["status"] == "paused"
    assert post(routes[0], 503, **chat)["error"]["code"] == "paused"
    post("/continue_generation", key="admin")
    post("/release_memory_occupation", key="admin")
    post("/resume_memory_occupation", key="admin")
    assert post(routes[0], **chat)["choices"] == answer["choices"]
    metrics = ask("GET", "/metrics").decode()
    assert "dllm_generation_tokens_total" in metrics
    assert within(lambda: server.lines("stats"))
    post("/drain", key="admin")
    assert server.ended() == 0
    events = [json.loads(line)["event"] for line in server.log.read_text().splitlines()]
    assert {"listening", "start", "ready", "request", "stats", "draining", "exit"} <= {*events}
