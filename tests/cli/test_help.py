"""Proves that `--help` tells defaults and examples that parse; and that counts read well."""

import argparse
import shlex

import pytest

from dllm_jax.cli import bench, entry
from dllm_jax.cli.results import figures
from dllm_jax.cli.text import count

# `train`'s flags take their recipe's defaults; `serve` names its own.
OWN_WORDS = ("train", "serve")


def children(parser):
    """The parsers of a parser's verbs, by name."""
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


@pytest.mark.parametrize("verb", [verb for verb in entry.VERBS if verb not in OWN_WORDS])
def test_help_says_every_default(verb):
    """Item 10."""
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


@pytest.mark.parametrize("verb", entry.VERBS)
def test_help_ends_with_two_examples_that_parse(verb, capsys):
    """Item 10."""
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
    """Item 10: mosaic is the one that Hopper uses by itself."""
    from typing import get_args

    from dllm_jax.kernels.paged_attention.api import Implementation

    for name in get_args(Implementation):
        args = entry.parse([*words, "--attention-implementation", name])
        assert args.attention_implementation == name


def test_one_of_something_is_no_plural():
    """Item 10."""
    assert (count(1, "token"), count(0, "token")) == ("1 token", "0 tokens")
    assert figures([], None, 0.0).startswith("0 tokens, 0 forwards, ")


def test_a_negative_overhead_is_said_in_words():
    """Item 10: the bare loop can be slower by chance."""
    assert bench._overhead(0.0123) == "host overhead 1.2%"
    assert "-" not in bench._overhead(-0.993)
