"""Proves that a user's problems are read, judged by their scorer, and refused by name (item 8)."""

import pytest

from dllm_jax.tasks.own_problems import read_problems, scorer
from dllm_jax.tasks.problems import Problem


@pytest.mark.parametrize(
    ("name", "text", "answer", "right"),
    [
        ("exact", " Paris\n", "Paris", True),
        ("exact", "In Paris", "Paris", False),
        ("numeric", "3 and 4 are 1,007.0.", "1007", True),
        ("numeric", "so x=-2, not 2", "-2", False),
        ("numeric", "no number", "1", False),
        (r"regex:answer is (\w+)", "The answer is no; the answer is yes.", "yes", True),
        (r"regex:\w+$", "The answer is yes.", "yes", False),
    ],
)
def test_scorer_judges_the_last_answer(name, text, answer, right):
    assert scorer(name)(text, Problem("", "", answer, "", "")) == right


def test_problems_of_a_file_are_read_or_the_line_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "q", "answer": 2}\n\n{"question": "r", "answer": "s"}\n')
    assert [(one.question, one.answer) for one in read_problems(str(path))] == [
        ("q", "2"),
        ("r", "s"),
    ]
    for line in ("[1]", '{"question": "q"}', '{"question": 1, "answer": "2"}', "{"):
        path.write_text(f'{{"question": "q", "answer": 2}}\n{line}\n')
        with pytest.raises(ValueError, match=r"line 2.*has no question and answer"):
            read_problems(str(path))


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (["--data", "/no/such"], "--data '/no/such' is not a file"),
        (["--scorer", "exact"], "--scorer judges the answers of --data"),
        (["--scorer", "best"], "'best' is no scorer; use one of exact, numeric, regex:PATTERN"),
        (["--scorer", "regex:("], "mend the pattern"),
        (["--sweep", "accept_threshold=1:2"], "write e.g. accept_threshold=0.5:0.99:8"),
        (["--plot", "x.txt"], "must end in .svg, .png or .pdf"),
    ],
)
def test_wrong_flags_of_own_problems_are_named(argv, reported, fails):
    assert reported in fails(2, "eval", *argv)
