"""Proves that `--help` tells defaults and examples that parse; and that counts read well."""

import argparse
import shlex
import shutil
import subprocess

import pytest

from dllm_jax.cli import bench, entry
from dllm_jax.cli.results import figures
from dllm_jax.cli.text import count


def children(parser):
    """The parsers of a parser's verbs, by name."""
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


@pytest.mark.parametrize("verb", entry.VERBS)
def test_help_says_every_default(verb):
    parser = children(entry.build_parser(verb))[verb]
    silent = [
        action.option_strings[-1]
        for each in (parser, *children(parser).values())
        for action in each._actions
        if action.option_strings
        and action.nargs != 0
        and not action.required
        and action.help != argparse.SUPPRESS
        and "default" not in (action.help or "")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("flag", "given"),
    [([], None), (["--warm-up-constraints"], True), (["--no-warm-up-constraints"], False)],
)
def test_serve_passes_on_whether_programs_of_constraints_are_compiled(flag, given, monkeypatch):
    """None is the engine's own choice, by the device."""
    from dllm_jax.api import llm
    from dllm_jax.cli import serve

    seen = {}
    monkeypatch.setattr(llm, "LLM", lambda *_, **how: seen.update(how))
    args = entry.parse(["serve", "builtin:tiny-sdar", *flag])
    serve._make_llm(argparse.Namespace(**serve._settings(args)), lambda *_: None)
    assert (seen["warm_up"], seen["warm_up_constraints"]) == (True, given)


def test_help_of_train_says_what_the_recipes_set():
    from dllm_jax.cli.train import DEFAULTS, KINDS, OPTIONS
    from dllm_jax.training import command

    named = {"steps": "num_steps", "layers": "num_layers", "dtype": "compute_dtype"}
    named["problem_family"] = "family"
    others_say = ("--target", "--budget-seconds", "--family")
    compared = 0
    for kind in KINDS:
        recipe = command.KINDS[kind]
        parts = [recipe, *(getattr(recipe, name, None) for name in ("model", "data"))]
        for flag, _, kinds, _ in OPTIONS:
            name = flag.removeprefix("--").replace("-", "_")
            found = [getattr(part, named.get(name, name), None) for part in parts]
            value = next((value for value in found if value is not None), None)
            if name == "row_tokens" and value is None:
                value = recipe.data.lengths[0]
            if kind in kinds and value is not None and flag not in others_say:
                compared += 1
                usual, *others = DEFAULTS[flag].split(", ")
                own = dict(other.split(" ", 1) for other in others).get(kind, usual)
                assert own.split(" ")[0] == str(value), (kind, flag)
    assert compared > 50
    assert DEFAULTS["--final-problems"] == str(command.FINAL_PROBLEMS)


@pytest.mark.parametrize("verb", entry.VERBS)
def test_help_ends_with_two_examples_that_parse(verb, capsys):
    assert entry.main([verb, "--help"]) == 0
    lines = capsys.readouterr().out.partition("\nexamples:\n")[2].splitlines()
    assert len(lines) == 2
    for line in lines:
        command, *argv = shlex.split(line)
        assert (command, argv[0]) == ("dllm-jax", verb)
        assert entry.parse(argv).verb == verb


@pytest.mark.parametrize(
    "words", [["generate", "x"], ["replay", "x"], ["trace"], ["bench", "step"], ["chat"]]
)
def test_every_back_end_of_attention_can_be_named(words):
    """Mosaic is the one that Hopper uses unasked."""
    from typing import get_args

    from dllm_jax.kernels.paged_attention.api import Implementation

    for name in get_args(Implementation):
        args = entry.parse([*words, "--attention-implementation", name])
        assert args.attention_implementation == name


def test_one_of_something_is_no_plural():
    assert (count(1, "token"), count(0, "token")) == ("1 token", "0 tokens")
    assert figures([], None, 0.0).startswith("0 tokens, 0 forwards, ")


def test_a_negative_overhead_is_said_in_words():
    """The bare loop can be slower by chance."""
    assert bench._overhead(0.0123) == "host overhead 1.2%"
    assert "-" not in bench._overhead(-0.993)


def test_the_command_alone_prints_its_help(capsys):
    assert entry.main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n    {verb}" in printed for verb in entry.VERBS)


@pytest.mark.parametrize("verb", entry.VERBS)
def test_an_output_has_one_name_in_every_verb(verb):
    """--output, or --out for short."""
    parser = children(entry.build_parser(verb))[verb]
    for each in (parser, *children(parser).values()):
        for action in each._actions:
            if {"--out", "--output"} & {*action.option_strings}:
                assert action.option_strings == ["--output", "--out"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_shell_completes_verbs_flags_and_choices(capsys):
    """The printed script, run by bash."""
    assert entry.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    asked = {
        ("dllm-jax", "ge"): "generate",
        ("dllm-jax", "generate", "--accept"): "--accept-threshold",
        ("dllm-jax", "serve", "--log-format", "js"): "json",
    }
    for words in asked:
        line = " ".join(shlex.quote(word) for word in words)
        script += f"\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMPREPLY=()\n"
        script += f"_shtab_dllm_jax dllm-jax {words[-1]} {words[-2]}; echo got ${{COMPREPLY[0]}}\n"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"got {expected}" for expected in asked.values()]
