"""Proves that comments, docstrings and subjects of commits are plain, in what a program can see.

Files that still use the words below are in `test_prose.txt`, which may only become shorter.
"""

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".txt")
FOLDERS = ("dllm_jax", "strategies", "pallas_kernels", "checkpoints_convert", "tests", "benchmarks")
WORDS = "behind|beside|whoever|so many|as many|told|what of|is there|in turns|by itself"
DIALECT = re.compile(rf"\b(?:{WORDS})\b", re.IGNORECASE)
BEGINNING = "85b202f"  # the last commit that may have a longer subject
SKIPPED = {tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def prose(text):
    """The comments and docstrings of a source, as one line."""
    found, is_first = [], True  # whether a statement begins here, which a docstring is
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (is_first and token.type == tokenize.STRING):
            found += token.string.lstrip("#").split()
        is_first = token.type == tokenize.NEWLINE or (is_first and token.type in SKIPPED)
    return " ".join(found)


def test_no_further_file_uses_the_words_that_a_reader_stumbles_over():
    """Say what, where and which in full: "after", "next to", "as many rows as slots"."""
    found = {}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = path.read_text("utf-8")
        if DIALECT.search(text) and (words := DIALECT.findall(prose(text))):
            found[path.relative_to(ROOT).as_posix()] = words
    listed = set(LIST.read_text("utf-8").split())
    new = {path: words for path, words in found.items() if path not in listed}
    assert not new, f"write these in plain words: {new}"
    assert listed <= {*found}, f"clean, so remove from {LIST.name}: {sorted(listed - {*found})}"


def test_words_are_found_in_comments_and_docstrings_alone():
    text = 'def f():\n    """Told what\n    of."""\n    x = "behind"  # beside, by\n    # itself\n'
    assert DIALECT.findall(prose(text)) == ["Told", "what of", "beside", "by itself"]


def test_subjects_of_commits_have_70_characters_at_most():
    command = ["git", "log", "--no-merges", "--format=%s", f"{BEGINNING}..HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the history does not go back that far")
    assert not [subject for subject in done.stdout.splitlines() if len(subject) > 70]
