"""Proves `dllm-jax generate`: it prints the text `dj.generate` gives, counts what it counts, and
keeps what it has when interrupted.

The library call is the oracle: other loop (one jit to the end instead of steps), same tokens. The
terminal drawing and the growing text are tested on their own, on hand-written input.
"""

import io
import json
import re
import signal
import subprocess
import sys

import jax
import pytest

import dllm_jax as dj
from dllm_jax.cli import main
from dllm_jax.cli.text import TextStream
from dllm_jax.cli.watch import Frame, Watch

PROMPTS = ["Ann has 3 pens.", "Carl gets 41 dollars a day, and pays 6.", "How many pages?"]


@pytest.fixture(autouse=True)
def _no_compile_cache(monkeypatch):
    monkeypatch.setattr("dllm_jax.compile_cache.enable_compile_cache", lambda: None)


@pytest.fixture(scope="module")
def model(random_folder):
    return dj.load(random_folder)


def rendered(model, prompt):
    return model.tokenizer(f"<|user|>{prompt}<|assistant|>", add_special_tokens=False)["input_ids"]


def test_text_and_figures_are_those_of_the_library(model, random_folder, capsys):
    assert main(["generate", PROMPTS[0], "--model", str(random_folder), "--max-tokens", "20"]) == 0
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20)
    text, figures = capsys.readouterr().out.rsplit("\n\n", 1)
    assert text == model.tokenizer.decode(out.tokens[0, : out.length[0]], skip_special_tokens=True)
    found = re.match(r"(\d+) tokens, (\d+) forwards, ([\d.]+) tokens per forward, ", figures)
    assert found is not None
    assert [int(found[1]), int(found[2])] == [out.length[0], out.nfe[0]]
    assert float(found[3]) == pytest.approx(int(out.length[0]) / int(out.nfe[0]), abs=0.005)
    assert "tok/s decoding" in figures
    assert "compiled and warmed up before that" in figures


def test_json_of_a_prompt_file_is_a_line_a_prompt(model, random_folder, capsys, tmp_path):
    (tmp_path / "prompts").write_text("\n".join(PROMPTS) + "\n\n", encoding="utf-8")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--json", "--max-tokens", "12"]
    argv += ["--temperature", "0.8", "--top-k", "50", "--seed", "5", "--set", "buffer_size=1"]
    assert main(["generate", "--model", str(random_folder), *argv]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    out = dj.generate(
        model,
        [rendered(model, prompt) for prompt in PROMPTS],
        dj.strategies.MultiBD(block_size=8, buffer_size=1),
        max_tokens=12,
        temperature=0.8,
        top_k=50,
        key=jax.random.key(5),
    )
    assert [line["prompt"] for line in lines] == PROMPTS
    for i, line in enumerate(lines):
        assert line["token_ids"] == out.tokens[i, : out.length[i]].tolist()
        assert line["finish_reason"] == ("stop" if out.length[i] < 12 else "length")
        assert line["metrics"]["nfe"] == out.nfe[i]
        assert line["metrics"]["prefill_nfe"] == 1
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
        "warning: the prompt holds the mask token '<|mask|>' (id 1) 1 time(s); its ids are kept "
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


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_reports_what_there_is(model, random_folder, capsys, monkeypatch, as_json):
    from dllm_jax import generation

    advance, calls = generation.advance, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 12:  # the first is the warm-up
            raise KeyboardInterrupt
        return advance(*args, **kwargs)

    monkeypatch.setattr(generation, "advance", interrupted)
    argv = [PROMPTS[0], "--max-tokens", "20", "--model", str(random_folder)]
    assert main(["generate", *argv, *(["--json"] if as_json else [])]) == 130
    captured = capsys.readouterr()
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20, max_nfe=10)
    ids = out.tokens[0, : out.length[0]].tolist()
    assert len(ids) > 2
    if as_json:
        line = json.loads(captured.out)
        assert (line["token_ids"], line["finish_reason"]) == (ids, "abort")
        assert captured.err.startswith("error: interrupted in prompt 1 of 1;")
    else:
        assert captured.out.startswith(model.tokenizer.decode(ids, skip_special_tokens=True))
        assert f"{len(ids)} tokens, 10 forwards" in captured.out
        assert captured.err.startswith("error: interrupted after 10 forwards;")
    assert captured.err.count("\n") == 1


def test_real_interrupt_ends_with_130(random_folder, tmp_path):
    argv = ["generate", PROMPTS[0], "--watch", "--watch-delay", "60", "--model", random_folder]
    with subprocess.Popen(
        [sys.executable, "-m", "dllm_jax.cli", *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
    ) as process:
        try:
            line = process.stdout.readline()  # the first frame: now it sleeps for a minute
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert line.startswith("forward   0 |")
    assert "0 tokens, 0 forwards" in out
    assert err == (
        "error: interrupted after 0 forwards; what was generated so far is shown; "
        "run it again to finish\n"
    )


def test_watch_without_a_terminal_prints_a_line_a_forward(model, random_folder, capsys):
    argv = [PROMPTS[0], "--max-tokens", "20", "--watch", "--watch-delay", "0"]
    assert main(["generate", *argv, "--model", str(random_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    frames = [line for line in lines if line.startswith("forward ")]
    out = dj.generate(model, [rendered(model, PROMPTS[0])], max_tokens=20)
    assert len(frames) == out.nfe[0]  # one before each forward; the text takes the last one's place
    assert re.fullmatch(r"forward   0 \|·+\|", frames[0])
    assert any(re.search(r"[^·]·", frame.split("|")[1]) for frame in frames)


def test_watch_draws_over_the_last_frame_in_colours():
    out = io.StringIO()
    watch = Watch(out, tty=True)
    watch.show(Frame(nfe=1, committed="ab", cells=(None, "x", None), num_settled=0))
    watch.show(Frame(nfe=2, committed="ab", cells=("w", "x", None), num_settled=2))
    watch.clear()
    first, second, cleared = out.getvalue().split("\x1b[2A\r\x1b[J")
    assert first == "forward 1\nab\x1b[90m·\x1b[33mx\x1b[90m·\x1b[0m\n"
    assert second == "forward 2\nab\x1b[32mwx\x1b[90m·\x1b[0m\n"
    assert cleared == ""


def test_watch_counts_wrapped_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    out = io.StringIO()
    watch = Watch(out, tty=True)
    watch.show(Frame(nfe=1, committed="0123456789abcde", cells=(), num_settled=0))
    watch.clear()
    assert out.getvalue().endswith("\x1b[3A\r\x1b[J")


def test_watch_keeps_to_the_lines_and_columns_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "4")
    monkeypatch.setenv("LINES", "5")
    out = io.StringIO()
    watch = Watch(out, tty=True)
    watch.show(Frame(nfe=1, committed="abcdefgh日本語", cells=("w", "xyz", None), num_settled=1))
    watch.clear()
    green, yellow, grey = "\x1b[32m", "\x1b[33m", "\x1b[90m"
    # rows: abcd | efgh | 日本 | 語wx | yz·, of which the last three fit under the heading
    rows = ["forward 1", "日本", f"語{green}w{yellow}x", f"{yellow}yz{grey}·\x1b[0m", ""]
    assert out.getvalue() == "\n".join(rows) + "\x1b[4A\r\x1b[J"


def test_one_warm_up_serves_batches_of_one_shape(random_folder, capsys, monkeypatch, tmp_path):
    from dllm_jax import generation
    from dllm_jax.cli import generate

    start, calls = generation.start, []
    monkeypatch.setattr(generation, "start", lambda *a, **k: calls.append(1) or start(*a, **k))
    monkeypatch.setattr(generate, "BATCH_SIZE", 2)
    (tmp_path / "prompts").write_text("\n".join([*PROMPTS, *PROMPTS[:2]]) + "\n")
    argv = ["--prompt-file", str(tmp_path / "prompts"), "--json", "--max-tokens", "4"]
    assert main(["generate", "--model", str(random_folder), *argv]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(calls) == 3 + 2  # batches of 2, 2 and 1: two shapes
    warmed = [line["metrics"]["compile_s"] > 0 for line in lines]
    assert warmed == [True, True, False, False, True]


def test_text_stream_waits_for_whole_characters(model):
    text = "Zoë pays 3 € now"
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = TextStream(model.tokenizer)
    pieces = [stream.feed(ids[: i + 1]) for i in range(len(ids))]
    assert "".join(pieces) == text == stream.text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some token ends inside a character
    assert stream.feed(ids, last=True) == ""


def test_text_stream_shows_what_is_broken_at_the_end(model):
    ids = model.tokenizer("3 €", add_special_tokens=False)["input_ids"][:-1]
    stream = TextStream(model.tokenizer)
    assert stream.feed(ids) == "3 "
    assert stream.feed(ids, last=True) == "\ufffd"
