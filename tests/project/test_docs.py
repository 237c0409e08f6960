"""Proves that the documentation is true: every python block runs, every command line is one that
the command or the script takes, every relative link and its anchor lead somewhere.

The blocks of a file run in order in one namespace, as a reader would type them.
"""

import contextlib
import inspect
import itertools
import json
import pkgutil
import re
import shlex
from pathlib import Path

import pytest

import dllm_jax
from dllm_jax import training
from dllm_jax.cli.entry import main, parse

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "docs", ROOT / "benchmarks"]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "bash", "text", "json", "py"}  # "py": a piece of a file, not run


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
    assert len(list((ROOT / "docs" / "adr").glob("000[13-6]-*.md"))) == 5


@pytest.mark.long
@pytest.mark.slow(r"^(?!.*(README\.md|docs/convert\.md|docs/write_a_strategy\.md))")
@named([page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page, "python"):
        # The block keeps its place in the file, so that a traceback names the page's own line.
        program = compile("\n" * line + code, str(page), "exec")
        exec(program, namespace)


@named(PAGES)
def test_every_block_says_what_it_is(page):
    """What says nothing would be looked at by no test."""
    found = {match[1] for match in BLOCK.finditer(page.read_text(encoding="utf-8"))}
    assert found <= LANGUAGES


def commands(code):
    """The commands of a block, as words; a quoted word may go on in the next line."""
    found, held = [], ""
    for line in code.replace("\\\n", " ").splitlines():
        held += f"{line}\n"
        with contextlib.suppress(ValueError):  # a quotation is open
            found.append(shlex.split(held, comments=True))
            held = ""
    assert not held, held
    return [words for words in found if words]


@named([page for page in PAGES if blocks(page, "bash")])
def test_commands_are_accepted(page):
    seen = 0
    for line, code in blocks(page, "bash"):
        for words in commands(code):
            if words[0] == "dllm-jax":
                args = parse(words[1:])
                assert args.verb == words[1], f"{page}:{line}"
                seen += 1
            else:
                known = ("make", "git", "cd", "pip", "echo", "python", "source", ".ci/run", "curl")
                assert words[0] in known, words
    assert seen or "make" in page.read_text(encoding="utf-8")


def scripts(page):
    """Calls of benchmarks, in blocks and in lines, as words."""
    text = page.read_text(encoding="utf-8")
    called = [words for _, code in blocks(page, "bash") for words in commands(code)]
    called += [shlex.split(line) for line in re.findall(r"`(python benchmarks/[^`]*)`", text)]
    return [words[1:] for words in called if words[0] == "python"]


@named([page for page in PAGES if scripts(page)])
def test_scripts_take_what_the_pages_give_them(page):
    for script, *words in scripts(page):
        source = (ROOT / script).read_text(encoding="utf-8")
        given = dict(itertools.pairwise([*words, ""]))
        for flag in given:
            assert not re.fullmatch(r"--[\w-]+", flag) or f'"{flag}"' in source, flag
        for flag, kind in (("--target-args", "ar"), ("--draft-args", "dflash")):
            if flag in given:  # words of `dllm-jax train`, handed on
                assert parse(["train", kind, "--out", "x", *given[flag].split()]).kind == kind
        if script.endswith("run_gpu.py") and "--sections" in given:
            for name in given["--sections"].split(","):
                assert f'"{name}": ' in source, name


def anchors(page):
    """What links to a page's headings say."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).strip().lower() for head in heads]
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@named(PAGES)
def test_relative_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+://", target):
            continue
        found = page.parent / target if target else page
        assert found.exists(), link
        assert not anchor or anchor in anchors(found), link


def linked_pages(page):
    """The pages that a page links to."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in re.findall(r"\]\(([\w./-]+\.md)", text)}


def test_every_page_is_two_clicks_from_the_index():
    index = ROOT / "docs" / "README.md"
    first = linked_pages(index)
    second = {page for one in first for page in linked_pages(one)}
    assert set(PAGES) - {index} <= first | second


def public_names(module):
    """The public names of a module and of the modules among them, with their paths."""
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{module.__name__}.{name}"
        if inspect.ismodule(value) and hasattr(value, "__all__"):
            yield from public_names(value)


def test_every_public_name_has_an_entry_in_the_api_reference():
    """On the site an entry is the docstring (docs/conf.py); on GitHub it leads to the source."""
    entries = {}
    for page in (ROOT / "docs").glob("api*.md"):
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"^- \[`([\w.]+)`\]\((.*)\)$", text, re.MULTILINE)
        assert len(found) == text.count("\n- "), f"{page}: a line of a list is no entry"
        entries |= {name: page.parent / path for name, path in found}
    modules = {
        name for _, name, _ in pkgutil.iter_modules(training.__path__, f"{training.__name__}.")
    }
    assert entries.keys() == {*public_names(dllm_jax), *modules}
    for name in entries.keys() - modules - {"dllm_jax.strategies.Knob"}:  # which is `Any`
        source = inspect.getsourcefile(pkgutil.resolve_name(name))
        assert Path(source).resolve() == entries[name].resolve(), name


@named([page for page in PAGES if re.match(r"\d{4}-", page.name)])
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


@pytest.mark.slow
def test_the_commands_of_the_drafting_page_give_its_figures(capsys, no_compile_cache):
    page = ROOT / "docs" / "dflash.md"
    text = page.read_text(encoding="utf-8")
    generate, evaluate = commands(blocks(page, "bash")[0][1])
    assert main(generate[1:]) == 0
    reported = blocks(page, "text")[0][1].split(", ...")[0]
    assert reported in capsys.readouterr().out
    assert main([*evaluate[1:], "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    said = re.search(r"mean accepted length ([\d.]+) and ([\d.]+) of 16", text)
    assert said is not None
    for half, length in zip(("plain", "hard"), said.groups(), strict=True):
        plain, drafted = facts["halves"][half]["results"].values()
        assert plain["mean_tokens"] == drafted["mean_tokens"]
        assert f"{drafted['draft']['mean_accepted_length']:.1f}" == length
