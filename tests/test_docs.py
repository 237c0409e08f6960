"""Proves that the documentation is true: every python block runs, every command line is one the
command takes, every relative link leads somewhere.

The blocks of a file run in order in one namespace, as a reader would type them.
"""

import re
import shlex
from pathlib import Path

import pytest

from dllm_jax.cli.entry import parse

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 1, found[2])
        for found in BLOCK.finditer(text)
        if found[1] == language
    ]


def named(pages):
    return pytest.mark.parametrize("page", pages, ids=[str(p.relative_to(ROOT)) for p in pages])


def test_pages_are_found():
    names = {page.name for page in PAGES}
    assert {"README.md", "quickstart.md", "write_a_strategy.md", "glossary.md"} <= names
    assert len(blocks(ROOT / "README.md", "python")) >= 1
    assert len(list((ROOT / "docs" / "adr").glob("000[1-6]-*.md"))) == 6


@named([page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        # The block keeps its place in the file, so that a traceback names the page's own line.
        program = compile("\n" * line + code, str(page), "exec")
        exec(program, namespace)


@named([page for page in PAGES if blocks(page, "bash")])
def test_commands_are_accepted(page):
    seen = 0
    for line, code in blocks(page, "bash"):
        for command in code.splitlines():
            words = shlex.split(command, comments=True)
            if words[:1] == ["dllm-jax"]:
                args = parse(words[1:])
                assert args.verb == words[1], f"{page}:{line}"
                seen += 1
            elif words:
                assert words[0] in ("make", "git", "cd", "pip", "echo", "python"), command
    assert seen or "make" in page.read_text(encoding="utf-8")


@named(PAGES)
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not re.match(r"\w+://", target):
            assert (page.parent / target).exists(), target


@named([page for page in PAGES if page.parent.name == "adr"])
def test_decision_records_are_short_and_whole(page):
    text = page.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    for heading in ("## Context", "## Decision", "## Consequences"):
        assert heading in text


def test_make_targets_of_the_documents_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        for _, code in [*blocks(page, "bash"), *blocks(page, "text")]:
            for target in re.findall(r"^(?:\$ )?make ([a-z-]+)", code, re.MULTILINE):
                assert target in targets, f"{page}: make {target}"
