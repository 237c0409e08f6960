"""Proves how `dllm-jax` fails: exit status, exactly one line `error: ...`, and what it names.

Every case runs the real command in this process. A traceback may appear with --debug only, and
help and bad flags must be answered without importing JAX.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

import dllm_jax as dj
from dllm_jax.cli import main

pytestmark = pytest.mark.usefixtures("no_compile_cache")

PROMPT = "Ann has 3 pens."


WHOLE = "must be a whole number"
LIST = "is not a list of whole numbers (e.g. 1,8) or none; give one"
# Status, words, and what the line has; M is a model's folder, T one with some files.
REFUSED = [
    (2, ["genrate"], "verb 'genrate' is unknown; did you mean 'generate'?"),
    (2, ["xyz"], "use one of generate, chat"),
    (2, ["info", "--draft", "x"], "unknown argument '--draft'; see"),
    (2, ["convert", "--model", "M", "T"], "unknown argument '--model'; see"),  # not "--help"
    (2, ["bench", "throughput", "--num-prompt", "3"], "did you mean '--num-prompts'?"),
    (  # of another verb
        2,
        ["bench", "step", "--num-prompts", "3"],
        "unknown argument '--num-prompts'; see `dllm-jax bench --help`",
    ),
    (1, ["convert", "M", "T"], "exists already"),
    (1, ["bench", "step", "--model", "M", "--json", "--batch-invariant"], "needs an NVIDIA Hopper"),
    (2, ["inspect", ""], "SRC is empty; give a folder"),
    (2, ["inspect", "random:JetLM/SDAR-1.7B-Chat"], "has no files: its weights are drawn when"),
    (2, ["eval", "--strategy", "multi_bd", "--strategy", "multi_bd"], "given twice"),
    (2, ["eval", "--strategy", "multi_bd,x"], "'x' is not KEY=VALUE"),
    (
        2,
        ["eval", "--set", "nosuch=3"],
        "nosuch=3: none of block_diffusion, multi_bd takes nosuch; leave it out",
    ),
    (
        2,
        ["eval", "--strategy", "block_diffusion", "--buffer-size", "2"],
        "none of block_diffusion takes buffer_size",
    ),
    (2, ["train", "--out", "x", "--steps", "0"], f"--steps: value=0 {WHOLE}"),
    (2, ["train"], "required: --output"),
    (
        2,
        ["train", "ar", "--out", "x", "--anchors", "4"],
        "--anchors is not of `train ar`; leave it out, or train dflash",
    ),
    (2, ["train", "dflash", "--out", "x"], "needs a --target"),
    (2, ["train", "sdrr", "--out", "x"], "'sdrr'"),
    *(
        (
            2,
            ["train", "dflash", "--out", "x", "--target-layer-ids", ids],
            f"--target-layer-ids: {ids!r} is no list of layers, counted from 0; write",
        )
        for ids in ("1,x", "", "1,,2", "-1")
    ),
    (2, ["serve", "--nnodes", "2"], "--nnodes 2 needs --coordinator HOST:PORT"),
    (2, ["serve", "--coordinator", "a:1"], "--coordinator is for several hosts; give --nnodes"),
    (
        2,
        ["serve", "--nnodes", "2", "--node-rank", "2", "--coordinator", "a:1"],
        "--node-rank 2 is not in [0, 1]",
    ),
]
# The same of `generate` with a prompt, where none is given.
GENERATE = [
    (1, ["--tokenizer=x"], "tokenizer='x' is no folder; give the folder of a fast tokenizer, or"),
    (1, ["--tokenizer", "T"], "holds no tokenizer.json; give the folder of a fast tokenizer, or"),
    *((2, [flag, "0"], f"{WHOLE} in [1,") for flag in ("--tensor-parallel-size", "--tp")),
    (1, ["--tp", "9"], "tensor_parallel_size=9 needs 9 devices, this process sees 8 (cpu)"),
    (
        2,
        ["--max-token", "3"],
        "unknown argument '--max-token'; did you mean '--max-tokens'? see `dllm-jax generate ",
    ),
    (2, ["many"], "unknown argument 'many'; a text of several words goes in quotes; see"),
    (2, ["--max-tokens", "0"], f"--max-tokens: value=0 {WHOLE} in [1, 2147"),
    (2, ["--max-tokens", "many"], f"--max-tokens: value='many' {WHOLE} in [1, 2"),
    (2, ["--temperature", "-1"], "--temperature: value=-1.0 must be a number in [0, 1000000.0]"),
    (2, ["--temperature", "nan"], "--temperature: value=nan must be a number in [0, "),
    (2, ["--top-p", "0"], "--top-p: value=0.0 must be above 0; choose a larger one"),
    (2, ["--top-k", "-2"], f"--top-k: value=-2 {WHOLE} in [-1, "),
    (2, ["--stop-token-ids", "3,99999999999"], f"value=99999999999 {WHOLE}"),
    (2, ["--stop-token-ids", "a,b"], f"value='a' {WHOLE} in [0, 2147483647]"),
    (2, ["--dtype", "int8"], "invalid choice: 'int8'"),
    (2, ["--strategy", "fancy", "--model", "M"], "strategy='fancy' is unknown"),
    (2, ["--strategy", "fancy", "--model", "M"], "ar, block_diffusion, d2f"),
    (2, ["--half", "plain"], "--half is about problems drawn by --seed"),
    (2, ["--watch-delay", "1"], "--watch-delay goes with --watch"),
    (2, ["--watch", "--json"], "--watch shows one prompt"),
    (2, ["--prompt-file", "T"], "give one of them"),
    (1, ["--model", "builtin:huge"], "'builtin:huge' is no built-in model; known are"),
    (1, ["--model", ""], "model '' is empty; give a folder"),
    (1, ["--model", "T/nowhere"], "nowhere' does not exist; give a folder"),
    (1, ["--model", "T"], "no config.json in the folder"),
    (1, ["--max-model-len", "9999"], "max_model_len=9999 is more than the model's 512 positions"),
]
FIELDS = [  # of --set
    ("", "remasking", "'remasking' is not KEY=VALUE"),
    ("", "speed=3", "speed=3: MultiBD has no such field; its fields are accept_"),
    ("", "accept_threshold=high", "accept_threshold='high' is not a number"),
    ("", "accept_threshold=none", "accept_threshold=none is not a number"),
    ("", "buffer_size=2.5", "buffer_size=2.5 is not a whole number in [1, "),
    ("", "buffer_size=true", "buffer_size=true is not a whole number"),
    ("", "block_size=0", "block_size=0 is not a whole number in [1, "),
    ("", "needs=3", "needs is not settable; its fields are accept_threshold, "),
    ("--block-size=8", "block_size=4", "block_size is already 8"),
    *(
        ("--strategy=block_diffusion", pair, words)
        for pair, words in (
            ("remasking=none", "remasking=none is not one of sequential, static, dynamic, entropy"),
            ("remasking=zzz", "remasking='zzz' is not one of sequential, static"),
            ("denoising_steps=1.5", "denoising_steps=1.5 is not a whole number or none"),
            ("denoising_steps=99999999999", "=99999999999 is not a whole number in [-2"),
        )
    ),
    *(
        ("--strategy=dflash", pair, "{}={!r} ".format(*pair.split("=")) + words)
        for pair, words in (
            ("target_layer_ids=wide", LIST),
            ("target_layer_ids=1,8.5", LIST),
            ("target_layer_ids=[1,true]", LIST),
            ("target_layer_ids=1,,8", LIST),
            ("target_layer_ids=[]", LIST),
            ("target_layer_ids=1,99999999999", LIST),
            ("width=1,8", "is not a whole number or none; give one"),
        )
    ),
]
PROMPTS = [
    (2, "", "the prompt is empty; give at least one word"),
    (2, "   ", "the prompt is empty; give at least one word"),
    (2, None, "no prompt given; give PROMPT"),
    (1, "7" * 300, "the prompt has 302 tokens but"),
    (1, "7" * 300, "takes 256"),
    (1, "7" * 300, "shorten the prompt"),
    (1, "caf\udce9", "is half a character; give the text as UTF-8"),  # what Python makes of 0xe9
]
SHOWS_NOTHING = [  # without a prompt a problem is drawn
    (2, ["--prompt-file", "T/blank"], "holds no prompt"),
    (1, ["--prompt-file", "T/latin"], "is not UTF-8: byte 0xe9 at offset 3; save it as UTF-8"),
    (1, ["--prompt-file", "T/none"], "cannot be read: No such file"),
    (1, ["--block-size", "9999"], f"block_size=9999 {WHOLE} in [1, 512]; choose a value there"),
    (1, ["--max-model-len", "32"], "tokens; the engine takes 32, prompt and text together"),
]


@pytest.mark.parametrize(
    ("status", "argv", "reported"),
    [
        *REFUSED,
        *((status, ["generate", PROMPT, *argv], words) for status, argv, words in GENERATE),
        *(
            (2, ["generate", PROMPT, "--model", "M", *filter(None, [flag]), "--set", pair], words)
            for flag, pair, words in FIELDS
        ),
        *(
            (status, ["generate", *([] if text is None else [text]), "--model", "M"], words)
            for status, text, words in PROMPTS
        ),
        *((status, ["generate", *argv], words) for status, argv, words in SHOWS_NOTHING),
    ],
)
def test_what_cannot_be_meant_is_one_line(fails, random_folder, tmp_path, status, argv, reported):
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9 for 3 dollars\n")
    places = {"M": str(random_folder), "T": str(tmp_path)}
    argv = [places.get(word, word.replace("T/", f"{tmp_path}/")) for word in argv]
    assert reported in fails(status, *argv)


def test_strategy_file_and_name_must_exist(fails, tmp_path):
    missing = tmp_path / "no.py"
    assert "does not exist" in fails(2, "generate", PROMPT, "--strategy", f"{missing}:step")
    missing.write_text("x = 1\n")
    assert "has no 'step'" in fails(2, "generate", PROMPT, "--strategy", f"{missing}:step")
    assert "cannot import no_such" in fails(2, "generate", PROMPT, "--strategy", "no_such:step")


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("target_layer_ids=[1,8,16]", (1, 8, 16)),
        ("target_layer_ids=1, 8,16", (1, 8, 16)),
        ("target_layer_ids=8", (8,)),
        ("target_layer_ids=none", None),
        ("target_layer_ids=(1,2)", (1, 2)),
    ],
)
def test_list_field_is_read(pair, value):
    from dllm_jax.cli import flags, strategy

    name, given = flags.key_value(pair)
    read = strategy.check_fields(strategy.load("dflash"), {name: given})
    assert read == {name: value}
    if value is not None:
        assert {type(one) for one in read[name]} == {int}


def test_field_set_to_none_is_set(random_folder):
    from dllm_jax.cli import strategy

    model = dj.load(random_folder)
    value = strategy.load("block_diffusion").replace(denoising_steps=4)
    chosen = strategy.resolve(model, "my.module:Thing", value, {"denoising_steps": None})
    assert (chosen.denoising_steps, chosen.block_size) == (None, 32)


def test_strategy_file_that_ends_the_program(fails, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import sys\nsys.exit('bye')\n")
    message = fails(2, "generate", PROMPT, "--strategy", f"{path}:step")
    assert "ends the program while it is loaded (bye)" in message
    path.write_text("import sys\nsys.exit(0)\n")
    assert "(0)" in fails(2, "eval", "--strategy", f"{path}:step")


def test_strategy_file_that_is_broken(fails, tmp_path):
    path = tmp_path / "mine.py"
    argv = ["--strategy", f"{path}:Mine"]
    path.write_text("def step(:\n")
    assert "cannot be run (SyntaxError: " in fails(2, "generate", *argv)
    path.write_text("1 / 0\n")
    assert "cannot be run (ZeroDivisionError: " in fails(2, "generate", *argv)
    path.write_text("class Mine:\n    def __init__(self, size): pass\n    step = None\n")
    message = fails(2, "generate", *argv)
    assert f"strategy='{path}:Mine' cannot be used (TypeError: " in message
    path.write_text("class Mine:\n    def step(self, forward, state): pass\n")
    assert f"strategy='{path}:Mine' " in fails(2, "generate", *argv)


@pytest.mark.long
def test_strategy_file_is_executed_once(random_folder, tmp_path, capsys):
    path, count = tmp_path / "mine.py", tmp_path / "count"
    path.write_text(
        f"with open({str(count)!r}, 'a') as f:\n    f.write('x')\n"
        "from dllm_jax.strategies.multi_bd import MultiBD as Mine\n"
    )
    argv = ["--strategy", f"{path}:Mine", "--model", str(random_folder), "--max-tokens", "4"]
    argv += ["--set", "block_size=8", "--set", "buffer_size=2", "--max-nfe", "1"]
    assert main(["generate", PROMPT, *argv]) == 0
    assert count.read_text() == "x"


def test_exit_with_words_is_one_line(fails, monkeypatch):
    def leave(args, stop):
        raise SystemExit("bye")

    monkeypatch.setattr("dllm_jax.cli.info.run", leave)
    assert re.fullmatch(r"SystemExit: bye \(.*test_cli_errors\.py:\d+\)", fails(1, "info"))


def test_stdin_that_is_not_read_is_noted(tmp_path):
    code = "from dllm_jax.cli.prompts import stdin_waits; print(stdin_waits())"

    def reported(**stdin):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, check=True, **stdin
        )
        return done.stdout.decode().strip()

    assert reported(stdin=subprocess.DEVNULL) == "False"
    read, write = os.pipe()  # open and silent: must not be waited for
    assert reported(stdin=read, timeout=300) == "False"
    os.write(write, b"Ann has 3 pens.")
    assert reported(stdin=read) == "True"
    os.read(read, 99)
    os.close(write)
    assert reported(stdin=read) == "False"
    os.close(read)
    (tmp_path / "p").write_text("x")
    with (tmp_path / "p").open() as file:
        assert reported(stdin=file) == "True"


def test_stdin_that_is_closed(fails, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    message = fails(1, "generate", "-")
    assert message == "stdin cannot be read: it is closed; give a text or a file"


@pytest.mark.parametrize("verb", ["generate", "trace"])
def test_a_random_model_reads_no_text(fails, monkeypatch, verb):
    monkeypatch.setattr("dllm_jax.cli.sources.load_model", lambda _: pytest.fail("it was made"))
    message = fails(2, verb, PROMPT, "--model", "random:JetLM/SDAR-1.7B-Chat")
    assert (
        "has no tokenizer to read text with; give one of its family (--tokenizer), use" in message
    )


@pytest.mark.slow
def test_device_that_fails_is_one_line(random_folder, monkeypatch, capsys, tmp_path):
    from dllm_jax.engine.layout import DeviceFailure
    from dllm_jax.runner.runner import ModelRunner

    def full(*_):
        raise DeviceFailure("RESOURCE_EXHAUSTED: Out of memory\nallocation 1\nallocation 2")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "fetch", full)
        argv = ["generate", PROMPT, "--model", str(random_folder), "--max-tokens", "4"]
        assert main(argv) == 1
    reported = capsys.readouterr().err
    (path,) = (tmp_path / "dllm-jax" / "snapshots").iterdir()
    assert reported == (
        "error: the device failed twice (RESOURCE_EXHAUSTED: Out of memory); saved: "
        f"`dllm-jax replay {path}` runs it again\n"
    )
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.endswith("\n4 tokens, length\n")


def test_model_without_tokenizer(fails, random_folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(random_folder, bare, ignore=shutil.ignore_patterns("token*", "special*"))
    message = fails(1, "generate", PROMPT, "--model", str(bare))
    assert "has no tokenizer to read text with; " in message


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("nowhere/x.json", "there is no folder '"),
        ("", "it is a folder"),
        ("sub/missing/x.json", "there is no folder '"),
    ],
)
def test_eval_checks_where_it_will_write_before_it_works(
    fails, tmp_path, monkeypatch, name, reported
):
    monkeypatch.setattr("dllm_jax.cli.sources.load_model", lambda args: pytest.fail("worked first"))
    message = fails(2, "eval", "--output", str(tmp_path / name))
    assert "cannot be written: " in message
    assert reported in message


def test_inspect_of_a_bad_folder_reports_and_fails(capsys, tmp_path):
    assert main(["inspect", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "problem: no config.json" in captured.out
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_unexpected_failure_is_one_line_with_its_type(fails, monkeypatch):
    def explode(args, stop):
        raise KeyError("page\n7")

    monkeypatch.setattr("dllm_jax.cli.info.run", explode)
    message = fails(1, "info")
    assert re.fullmatch(r"KeyError: 'page\\n7' \(.*test_cli_errors\.py:\d+\)", message)
    monkeypatch.setattr("dllm_jax.cli.info.run", None)  # no line of a user's
    assert fails(1, "info") == "TypeError: 'NoneType' object is not callable (--debug shows where)"


def test_output_that_the_terminal_cannot_show_has_a_remedy(fails, monkeypatch):
    monkeypatch.setattr("dllm_jax.cli.info.run", lambda *_: "caf\u00e9".encode("ascii"))
    message = fails(1, "info")
    assert message.startswith("'\u00e9' cannot be written as ascii; set PYTHONIOENCODING=utf-8")


@pytest.mark.parametrize("place", [0, 2])
def test_debug_shows_where_before_the_verb_and_after_it(capsys, tmp_path, place):
    argv = ["generate", PROMPT, "--model", str(tmp_path)]
    assert main([*argv[:place], "--debug", *argv[place:]]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert re.match("error: .*no config.json", err.splitlines()[-1])


def test_help_and_bad_flags_import_no_jax():
    code = (
        "import sys\n"
        "from dllm_jax.cli import main\n"
        "assert main(['generate', '--help']) == 0\n"
        "assert main(['eval', '--help']) == 0\n"
        "assert main(['chat', '--help']) == 0\n"
        "assert main(['replay', '--help']) == 0\n"
        "assert main(['generate', 'x', '--max-tokens', '0']) == 2\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--accept-threshold" in done.stdout


@pytest.mark.parametrize("missing", ["httptools", "uvicorn", "uvloop"])
def test_a_server_without_its_packages_says_how_to_install_them(fails, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    assert fails(2, "serve") == (
        f"serve needs the package {missing}; in the clone, pip install -e '.[server]'"
    )
