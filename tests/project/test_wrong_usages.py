"""Proves that hundreds of wrong usages of the command are one short line each, and soon.

They are generated: every flag that checks its value gets each value that is not one, and every path
each thing that is no such file. Calls are made in this process. Those of the API are in
tests/api/test_hostile_values.py.
"""

import argparse
import os
import time

import pytest

import dllm_jax as dj
from dllm_jax.cli import entry, main

pytestmark = pytest.mark.long

MOST_SECONDS, MOST_BYTES = 2.0, 1000  # of the processor, so that a busy machine fails nothing
WORDS = (
    "",
    "x",
    "-1",
    "0",
    "1.5",
    "nan",
    "-inf",
    "1e999",
    "9" * 5000,
    "a=",
    "=1",
    "\x1b[2J",
    "é" * 999,
)
PROMPT = "Ann has 3 pens and 4 books. How many things has she?"


@pytest.fixture(scope="module")
def model():
    return dj.load("builtin:tiny-sdar")


@pytest.fixture
def once(model, monkeypatch, no_compile_cache):
    """The built-in model is loaded once, as the default of each command."""
    load = dj.load

    def loaded(src, dtype="auto", revision=None, lora=None, progress=None, quantization=None):
        if (src, dtype, revision, lora, quantization) == (
            *("builtin:tiny-sdar", "auto", None, None, None),
        ):
            return model
        return load(src, dtype, revision, lora, progress, quantization)

    monkeypatch.setattr(dj, "load", loaded)


def wrong(argv, capsys):
    """What is wrong with how a command is refused; None for nothing."""
    began = time.process_time()
    status = main(argv)
    seconds = time.process_time() - began
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    if status not in (1, 2) or len(lines) != 1 or not lines[0].startswith("error: "):
        return status, err[:300], out[:100]
    if len(lines[0].encode()) >= MOST_BYTES or seconds >= MOST_SECONDS:
        return len(lines[0]), seconds, lines[0][:100]
    return None


def reported(argv):
    return " ".join(word[:40] for word in argv)


def all_wrong(usages, capsys):
    found = {
        reported(argv): reason for argv in usages if (reason := wrong(argv, capsys)) is not None
    }
    assert found == {}
    return len(usages)


# --- the command ------------------------------------------------------------------------------

NEEDED = {
    "convert": ["src", "dst"],
    "inspect": ["src"],
    "replay": ["path"],
    "train": ["--out", "run"],
    "bench": ["throughput"],
    "completion": ["bash"],
}


def parser_of(verb):
    """The parser of a verb; of `bench`, that of `throughput`."""
    parser = entry.build_parser(verb)
    for name in (verb, "throughput"):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and name in action.choices:
                parser = action.choices[name]
    return parser


def refused_words(action):
    """Words that are no value of a flag."""
    if action.choices is not None:
        return [word for word in WORDS if word not in action.choices]
    found = []
    for word in WORDS:
        try:
            action.type(word)
        except (argparse.ArgumentTypeError, ValueError):
            found.append(word)
    return found


def flags_of(verb):
    """The flags of a verb that check their values, with the words that each refuses."""
    return {
        (action.option_strings[0], tuple(refused_words(action)))
        for action in parser_of(verb)._actions
        if action.option_strings and (action.choices or action.type not in (None, str))
    }


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", entry.VERBS)
def test_every_flag_refuses_what_is_no_value_of_it(verb, every, capsys):
    """Those which an earlier verb has too, only where there is time."""
    verbs = list(entry.VERBS)
    earlier = [] if every else verbs[: verbs.index(verb)]
    usages = [
        [verb, *NEEDED.get(verb, []), f"{flag}={word}"]
        for flag, words in sorted(flags_of(verb).difference(*map(flags_of, earlier)))
        for word in words
    ]
    usages += [
        [verb, *NEEDED.get(verb, []), "--" + "x" * 5000],
        [verb, *NEEDED.get(verb, []), "--no-such-flag=1"],
        [verb, *["word"] * 9],
    ]
    least = {"inspect": 3, "info": 3, "completion": 3, "convert": 10, "replay": 20}.get(verb, 40)
    assert all_wrong(usages, capsys) >= (least if every else 3)


def hostile_paths(folder):
    """Paths that are no file of any kind that a command reads."""
    os.mkfifo(folder / "pipe")
    (folder / "latin").write_bytes(b"caf\xe9 = \xff\n")
    (folder / "deep.json").write_text("[" * 20_000 + "]" * 20_000)
    (folder / "folder").mkdir()
    with (folder / "sparse").open("wb") as file:
        file.truncate(4 << 30)
    names = ("pipe", "latin", "deep.json", "folder", "sparse", "none/below")
    return [str(folder / name) for name in names] + [
        "/dev/zero",
        "",
        "y" * 5000,
        "a\0b",
        "org/none",
    ]


PATHS = (
    ["generate", "hi", "--model={}"],
    ["generate", "hi", "--lora={}"],
    ["generate", "hi", "--draft={}"],
    ["generate", "hi", "--strategy={}"],
    ["generate", "hi", "--strategy={}:step"],
    ["generate", "hi", "--strategy={}.py:step"],
    ["generate", "--prompt-file={}"],
    ["chat", "--chat-template={}"],
    ["eval", "--data={}"],
    ["eval", "--output={}/below/x"],
    ["eval", "--plot={}/below/x.svg"],
    ["trace", "--out={}/below/x.html"],
    ["bench", "latency", "--prompt-file={}"],
    ["bench", "step", "--output={}/below/x"],
    ["replay", "{}"],
    ["replay", "{}", "--model={}"],
    ["serve", "--config={}"],
    ["inspect", "{}"],
    ["inspect", "{}", "--lora={}"],
    ["convert", "{}", "dst"],
    ["convert", "builtin:tiny-sdar", "{}/below", "--lora={}"],
    ["info", "{}:x"],
    ["info", "{}.py:x"],
)


@pytest.mark.parametrize("words", PATHS, ids=lambda words: reported(words))
def test_every_path_refuses_what_is_no_such_file(words, once, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    usages = [[word.replace("{}", path) for word in words] for path in hostile_paths(tmp_path)]
    assert all_wrong(usages, capsys) >= 10


TOGETHER = """
--strategy none | --strategy dflash | --draft builtin:tiny-sdar | --suffix x | --set none=1
--set accept_threshold=high | --set needs=3 | --set block_size=0 | --set block_size=1e9
--page-size 100000 | --buffer-size 100000 | --block-size 100000 | --max-model-len 4
--watch --json | --watch-delay 1 | --half plain | --raw --prompt-file x
--accept-threshold -1 | --strategy block_diffusion --set remasking=x | --tp 2 | --revision main
--strategy multi_bd:x | --strategy json:x | --strategy os:getcwd | --max-num-batched-tokens 0
--strategy full_sequence --set cache=x
--attention-implementation mosaic | --attention-implementation cudnn | --stop-token-ids -3
--tokenizer x | --top-p 0 | --suffix= | --dtype float64 | --quantization int8
"""


def test_flags_that_do_not_go_together_are_refused(once, capsys):
    usages = [
        ["generate", PROMPT, *words.split()]
        for words in TOGETHER.replace("\n", "|").split("|")
        if words.strip()
    ]
    usages += [["none"], ["tune"], ["generat"], ["generate", ""], ["bench"], ["bench", "none"]]
    assert all_wrong(usages, capsys) >= 40
