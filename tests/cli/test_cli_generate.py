"""Proves `dllm-jax generate`: it prints the text `dj.generate` gives, counts what it counts, and
keeps what it has when interrupted.

`dj.generate` is another loop: one jit over a fixed batch instead of the engine.
"""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import dllm_jax as dj
from dllm_jax.cli import main
from dllm_jax.cli.text import shown
from dllm_jax.cli.watch import Frame, Watch
from tests.cli.test_cli_chat import signal_at_step

pytestmark = pytest.mark.usefixtures("no_compile_cache")

CACHE = Path(__file__).parents[2] / ".cache" / "jax"
PROMPTS = ["Ann has 3 pens.", "Carl gets 41 dollars a day, and pays 6.", "How many pages?"]


def rendered(model, prompt):
    return model.tokenizer(f"<|user|>{prompt}<|assistant|>", add_special_tokens=False)["input_ids"]


@pytest.mark.long
def test_text_and_figures_are_those_of_the_library(model, random_folder, capsys):
    assert main(["generate", PROMPTS[0], "--model", str(random_folder), "--max-tokens", "20"]) == 0
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20)
    text, figures = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text == model.tokenizer.decode(out.tokens[0, : out.length[0]], skip_special_tokens=True)
    found = re.match(r"(\d+) tokens, (\d+) forwards, ([\d.]+) tokens per forward, ", figures)
    assert found is not None
    assert [int(found[1]), int(found[2])] == [out.length[0], out.nfe[0]]
    assert float(found[3]) == pytest.approx(int(out.length[0]) / int(out.nfe[0]), abs=0.005)
    reported = (
        r"tok/s with prefill, first block after [\d.]+ s \(compiling, not counted: [\d.]+ s\)"
    )
    assert re.search(reported, figures)


@pytest.mark.slow
def test_json_of_a_prompt_file_is_a_line_a_prompt(model, random_folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--json", "--max-tokens", "20"]
    argv += ["--temperature", "0.8", "--top-k", "50", "--seed", "5"]
    argv += ["--set", "accept_threshold=0.1"]
    assert main(["generate", "--model", str(random_folder), *argv]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    out = dj.generate(
        model,
        [rendered(model, prompt) for prompt in PROMPTS],
        dj.strategies.MultiBD(block_size=8, buffer_size=2, accept_threshold=0.1),
        max_tokens=20,
        temperature=0.8,
        top_k=50,
        key=jax.random.key(5),
    )
    assert [line["prompt"] for line in lines] == PROMPTS
    for i, line in enumerate(lines):
        assert line["token_ids"] == out.tokens[i, : out.length[i]].tolist()
        assert line["finish_reason"] == ("stop" if out.length[i] < 20 else "length")
        assert line["metrics"]["nfe"] == out.nfe[i]
        # A prompt without a whole block has no prefill.
        assert line["metrics"]["prefill_nfe"] == (len(rendered(model, PROMPTS[i])) >= 8)
        assert 0 < line["metrics"]["ttfb_s"] <= line["metrics"]["e2e_s"]


def test_raw_prompt_from_stdin(model, random_folder, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("Zoë has 3 €\n".encode())))
    argv = ["-", "--raw", "--json", "--max-tokens", "20", "--model", str(random_folder)]
    assert main(["generate", *argv]) == 0
    ids = model.tokenizer("Zoë has 3 €")["input_ids"]
    out = dj.generate(model, [ids], max_tokens=20)
    line = json.loads(capsys.readouterr().out)
    assert line["prompt"] == "Zoë has 3 €"
    assert line["token_ids"] == out.tokens[0, : out.length[0]].tolist()


def test_prompt_with_the_mask_token_warns_and_keeps_its_ids(model, random_folder, capsys):
    prompt = "Ann has <|mask|> pens."
    argv = [prompt, "--json", "--max-tokens", "20", "--model", str(random_folder)]
    assert main(["generate", *argv]) == 0
    captured = capsys.readouterr()
    assert captured.err == (
        "warning: the prompt holds the mask token '<|mask|>' (id 1) 1 time; its ids are kept "
        "as they are, as text\n"
    )
    ids = rendered(model, prompt)
    assert 1 in ids
    out = dj.generate(model, [ids], max_tokens=20)
    assert json.loads(captured.out)["token_ids"] == out.tokens[0, : out.length[0]].tolist()


def test_max_nfe_and_stop_ids_end_the_text(model, random_folder, capsys):
    base = ["generate", PROMPTS[0], "--json", "--max-tokens", "20", "--model", str(random_folder)]
    assert main([*base, "--max-nfe", "3"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["finish_reason"], line["metrics"]["nfe"]) == ("nfe", 3)
    assert main(base) == 0
    whole = json.loads(capsys.readouterr().out)["token_ids"]
    stop = whole[6]
    assert main([*base, "--stop-token-ids", str(stop)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["finish_reason"] == "stop"
    assert stop not in line["token_ids"]


def test_stop_string_ends_the_text_before_it(random_folder, capsys):
    base = ["generate", PROMPTS[0], "--json", "--max-tokens", "20", "--model", str(random_folder)]
    assert main(base) == 0
    whole = json.loads(capsys.readouterr().out)["text"]
    stop = whole[9:12]
    assert main([*base, "--stop", "no such text", "--stop", stop]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["text"], line["finish_reason"]) == (whole[: whole.index(stop)], "stop")


def test_flags_reach_the_engine(random_folder, monkeypatch, capsys):
    from dllm_jax.api import llm

    class Spy(llm.LLM):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append((self.engine.layout, kwargs))
            raise ValueError("seen enough")

    made = []
    monkeypatch.setattr(llm, "LLM", Spy)
    base = ["generate", PROMPTS[0], "--model", str(random_folder), "--max-tokens", "4"]
    assert main(base) == 1
    layout, _ = made.pop()
    # One prompt: one slot and its pages, no more positions than a power of two that suffices.
    assert (layout.num_slots, layout.max_model_len, layout.prefix_caching) == (1, 256, True)
    assert layout.num_pages == -(-(256 + 8) // 64)
    sizes = ["--page-size", "16", "--max-model-len", "128", "--no-prefix-caching", "--seed", "3"]
    sizes += ["--max-num-batched-tokens", "64", "--memory-utilization", "0.02"]
    sizes += ["--attention-implementation", "xla"]
    assert main([*base, *sizes]) == 1
    layout, given = made.pop()
    assert (layout.page_size, layout.max_model_len, layout.prefix_caching) == (16, 128, False)
    assert layout.max_num_batched_tokens == 64
    assert (given["config"].memory_utilization, given["seed"]) == (0.02, 3)
    assert given["attention_implementation"] == "xla"


def test_interrupt_shows_the_text_so_far(model, random_folder, capsys, monkeypatch):
    argv = [PROMPTS[0], "--max-tokens", "20", "--model", str(random_folder)]
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    signal_at_step(monkeypatch, signal.SIGINT, 12)
    assert main(["generate", *argv]) == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    captured = capsys.readouterr()
    found = re.search(r"(\d+) tokens, (\d+) forwards", captured.out)
    nfe = int(found[2])
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20, max_nfe=nfe)
    ids = out.tokens[0, : out.length[0]].tolist()
    assert (int(found[1]), nfe >= 5, 2 < len(ids) < 20) == (len(ids), True, True)
    text = captured.out.rsplit("\n\n", 1)[0]
    assert text == model.tokenizer.decode(ids, skip_special_tokens=True)
    assert captured.err == (
        f"error: interrupted after {nfe} forwards; what was generated so far is shown; run it "
        "again to finish\n"
    )


@pytest.mark.slow
def test_termination_reports_finished_and_partial_prompts(
    model, random_folder, capsys, monkeypatch, tmp_path
):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS), encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--json", "--max-tokens", "20"]
    argv += ["--model", str(random_folder)]
    out = dj.generate(model, [rendered(model, prompt) for prompt in PROMPTS], max_tokens=20)
    whole = [out.tokens[i, : out.length[i]].tolist() for i in range(3)]
    assert out.nfe[0] + 3 <= min(
        out.nfe[1], out.nfe[2]
    )  # the first one ends well before the others
    steps = int(out.nfe[0]) + 3  # the first dispatches, the second prefill's, and one more
    signal_at_step(monkeypatch, signal.SIGTERM, steps)
    assert main(["generate", *argv]) == 143
    captured = capsys.readouterr()
    done, *partial = map(json.loads, captured.out.splitlines())
    assert (done["token_ids"], done["finish_reason"]) == (whole[0], "length")
    assert [line["prompt"] for line in partial] == PROMPTS[1:]
    for line, tokens in zip(partial, whole[1:], strict=True):
        assert line["finish_reason"] == "abort"
        assert 0 < len(line["token_ids"]) < len(tokens)
        assert line["token_ids"] == tokens[: len(line["token_ids"])]
        assert line["text"] == model.tokenizer.decode(line["token_ids"])
    assert captured.err.endswith(
        "error: interrupted after 1 of 3 prompts; what was generated so far is shown; run it again "
        "to finish\n"
    )


def start(argv, tmp_path, *how):
    return subprocess.Popen(
        [sys.executable, *(how or ("-m", "dllm_jax.cli")), *map(str, argv)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "JAX_PLATFORMS": "cpu",
            "HOME": str(tmp_path),
            "JAX_COMPILATION_CACHE_DIR": str(CACHE),
            # Another worker may be writing an entry (pyproject says more).
            "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
            "XLA_FLAGS": os.environ["XLA_FLAGS"],
        },
    )


def ended(process, number):
    """Send a signal; what the process wrote since, long before its work is over."""
    try:
        process.send_signal(number)
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    return out, err


@pytest.fixture
def deaf_strategy(tmp_path):
    """Flags for a strategy whose tracing takes minutes in C, deaf to everything."""
    path = tmp_path / "slow.py"
    path.write_text(
        "import hashlib, sys\n"
        "def step(forward, state):\n"
        "    print('tracing', file=sys.stderr, flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)\n"
    )
    return ["--strategy", f"{path}:step", "--block-size", "8", "--buffer-size", "2"]


@pytest.mark.slow
def test_second_interrupt_ends_a_chat_that_compiles(random_folder, tmp_path, deaf_strategy):
    process = start(["chat", "--model", random_folder, *deaf_strategy], tmp_path)
    process.stdin.write(PROMPTS[0] + "\n")
    process.stdin.flush()
    assert process.stderr.readline() == "tracing\n"
    process.send_signal(signal.SIGINT)  # which stops the answer, once compiling is over
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    ended(process, signal.SIGINT)


@pytest.mark.slow
def test_signal_in_the_middle_of_a_chunk(model, random_folder, tmp_path):
    # Waiting for the sixteenth chunk takes minutes in C: the text so far comes from elsewhere.
    code = (
        "import hashlib, sys\n"
        "from dllm_jax.engine import engine\n"
        "from dllm_jax.cli import main\n"
        "from dllm_jax.runner.runner import ModelRunner\n"
        "engine.num_steps = lambda *_, **__: 1\n"
        "fetch, calls = ModelRunner.fetch, []\n"
        "def stuck(device, chunk):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 16:\n"
        "        print('stuck', file=sys.stderr, flush=True)\n"
        "        hashlib.pbkdf2_hmac('sha256', b'', b'', 2 * 10**9)\n"
        "    return fetch(device, chunk)\n"
        "ModelRunner.fetch = stuck\n"
        "sys.exit(main())\n"
    )
    argv = ["generate", PROMPTS[0], "--json", "--max-tokens", "20", "--model", random_folder]
    process = start([code, *argv], tmp_path, "-c")
    assert process.stderr.readline() == "stuck\n"
    out, err = ended(process, signal.SIGTERM)
    line = json.loads(out)
    want = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20, max_nfe=15)
    assert (line["finish_reason"], line["metrics"]["nfe"]) == ("abort", 15)
    assert line["token_ids"] == want.tokens[0, : want.length[0]].tolist()
    assert len(line["token_ids"]) > 5
    assert line["text"] == model.tokenizer.decode(line["token_ids"], skip_special_tokens=True)
    assert err.startswith("error: interrupted after 0 of 1 prompt; what was generated so far")


@pytest.mark.slow
def test_process_that_ends_with_a_forward_in_flight_ends_well(tmp_path):
    code = (
        "import dllm_jax as dj\n"
        "def begin():\n"
        "    llm = dj.LLM(warm_up=False, max_num_seqs=1)\n"
        "    params = dj.SamplingParams(max_tokens=300, ignore_eos=True)\n"
        "    llm.engine.add(dj.Request(prompt_token_ids=list(range(50, 90)), params=params))\n"
        "    for _ in range(6):\n"
        "        llm.engine.step()\n"
        "begin()\n"
    )
    process = start([code], tmp_path, "-c")
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")


def test_watch_without_a_terminal_prints_a_line_a_forward(model, random_folder, capsys):
    argv = [PROMPTS[0], "--max-tokens", "20", "--watch", "--watch-delay", "0"]
    assert main(["generate", *argv, "--model", str(random_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    frames = [line for line in lines if line.startswith("forward ")]
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20)
    assert len(frames) == out.nfe[0] - 1  # the text takes the last one's place
    assert [int(frame[8:11]) for frame in frames] == list(range(1, out.nfe[0]))
    assert any(re.search(r"[^·]·", frame.split("|")[1]) for frame in frames)


def test_control_characters_reach_a_terminal_as_text():
    out = io.StringIO()
    frame = Frame(nfe=1, committed="a\x1b[2J", cells=("\x00", None), num_settled=0)
    Watch(out, tty=True).show(frame)
    assert r"a\x1b[2J" in out.getvalue()
    assert "\x00" not in out.getvalue()
    assert shown("\x1b\u202e\n", tty=True) == "\\x1b\\u202e\n"
    assert shown("\x1b", tty=False) == "\x1b"


def drawn(monkeypatch, *frames, **variables):
    """What a terminal is sent for some frames, and to clear the last one."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    out = io.StringIO()
    watch = Watch(out, tty=True)
    for number, (committed, cells, num_settled) in enumerate(frames, 1):
        watch.show(Frame(number, committed, cells, num_settled))
    watch.clear()
    return out.getvalue()


def test_watch_draws_over_the_last_frame_in_colours(monkeypatch):
    frames = ("ab", (None, "x", None), 0), ("ab", ("w", "x", None), 2)
    first, second, cleared = drawn(monkeypatch, *frames).split("\x1b[2A\r\x1b[J")
    assert first == "forward 1\nab\x1b[90m·\x1b[33mx\x1b[90m·\x1b[0m\n"
    assert second == "forward 2\nab\x1b[32mwx\x1b[90m·\x1b[0m\n"
    assert cleared == ""


def test_watch_leaves_out_what_the_terminal_does_not_take(monkeypatch):
    frames = ("ab", ("\x1b", None), 0), ("ab", ("w", None), 2)
    plain = drawn(monkeypatch, *frames, NO_COLOR="1").split("\x1b[2A\r\x1b[J")
    assert plain == ["forward 1\nab\\x1b·\n", "forward 2\nabw·\n", ""]
    dumb = drawn(monkeypatch, *frames, TERM="dumb")
    assert dumb == "forward   1 |\\x1b·|\nforward   2 |w·|\n"


def test_watch_counts_wrapped_lines(monkeypatch):
    said = drawn(monkeypatch, ("0123456789abcde", (), 0), COLUMNS="10")
    assert said.endswith("\x1b[3A\r\x1b[J")


def test_watch_keeps_to_the_lines_and_columns_of_the_terminal(monkeypatch):
    frame = "abcdefgh日本語", ("w", "xyz", None), 1
    green, yellow, grey = "\x1b[32m", "\x1b[33m", "\x1b[90m"
    # rows: abcd | efgh | 日本 | 語wx | yz·, of which the last three fit under the heading
    rows = ["forward 1", "日本", f"語{green}w{yellow}x", f"{yellow}yz{grey}·\x1b[0m", ""]
    said = drawn(monkeypatch, frame, COLUMNS="4", LINES="5")
    assert said == "\n".join(rows) + "\x1b[4A\r\x1b[J"
