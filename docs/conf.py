"""The docs site (`make docs`): the pages as they stand on GitHub, and an API reference.

The source is the whole repository, so that a link leads to the same place on GitHub and on the
site. Added here is what GitHub has no use for: the links of an index become the site's menu, a name
in the lists of api*.md becomes its docstring, and a linked Python file becomes a page.
"""

import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
# An index, and which of its links are in the menu.
ALL, BELOW = re.compile(r"\]\((?!adr/\d)([\w./-]+\.md)"), re.compile(r"\]\((\w[\w./-]+\.md)")
INDEXES = {"docs/README": ALL, "docs/adr/README": BELOW, "benchmarks/LOG": BELOW}
ENTRY = re.compile(r"^- \[`([\w.]+)`\]\(.*\)$", re.MULTILINE)
MADE = re.compile(r"= \w+\((?:[^()]|\([^()]*\))*\)")  # a default that is an object
CODE = re.compile(r"\]\(([\w./-]+\.py)")
sys.path.insert(0, str(ROOT))

project = html_title = "dllm_jax"
root_doc = "docs/README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md"]
exclude_patterns = [".*", "build", "dist", "dllm_jax", "tests"]  # not walked
myst_heading_anchors = 4  # links to headings are GitHub's
napoleon_use_ivar = True  # attributes as a list
default_role = "code"  # docstrings write `name` as Markdown does
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
autodoc_default_options = {"members": True, "member-order": "bysource"}
html_theme = "furo"
html_copy_source = html_show_sphinx = html_show_copyright = False
suppress_warnings = [
    "misc.highlighting_failure",  # a piece of JSON, or a form of an answer
    "ref.python",  # a field of two classes, such as `block_size`
]


def add_menu(text, pages):
    """The text of an index with the site's menu: its links under each heading, each page once."""
    first, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    seen, menu = set(), []
    for section in sections or [first]:
        found = [page for page in dict.fromkeys(pages.findall(section)) if page not in seen]
        seen.update(found)
        if found:
            caption = section.splitlines()[0].removeprefix("# ")
            menu += [
                "```{toctree}",
                ":hidden:",
                ":titlesonly:",
                f":caption: {caption}",
                "",
                *found,
                "```",
            ]
    return "\n".join([text, *menu])


def add_docstring(entry):
    """The entry of a public name; the names in a module's `__all__` have entries of their own."""
    value = pkgutil.resolve_name(entry[1])
    kinds = {"class": inspect.isclass, "function": inspect.isfunction, "module": inspect.ismodule}
    kind = next((kind for kind, holds in kinds.items() if holds(value)), "data")
    kind = "data" if value is Any else kind
    more = "   :no-members:\n" if hasattr(value, "__all__") else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {entry[1]}\n{more}```\n"


def add_what_github_lacks(_, page, source):
    """Change the text of a page before it is parsed."""
    if page in INDEXES:
        source[0] = add_menu(source[0], INDEXES[page])
    elif page.startswith("docs/api"):
        source[0] = ENTRY.sub(add_docstring, source[0])


def shorten_defaults(_, kind, name, value, options, signature, returned):
    """Show `...` for a default that is an object with fields of its own."""
    return (MADE.sub("= ...", signature), returned) if signature else None


def keep_colons(_, kind, name, value, options, lines):
    """Give a property its docstring back: napoleon takes the words before a colon for a type."""
    if kind == "property":
        lines[:] = [*(inspect.getdoc(value) or "").splitlines(), ""]


def link_code(app, tree):
    """Make links to Python files, which would be downloads, lead to pages of the site."""
    page = app.env.docname
    for link in tree.findall(addnodes.download_reference):
        path = (ROOT / page).parent.joinpath(link["reftarget"]).resolve().relative_to(ROOT)
        if path.suffix == ".py":
            target = "../" * page.count("/") + f"code/{path}.html"
            link.replace_self(nodes.reference("", "", *link.children, refuri=target))


def write_code(app):
    """The pages of the linked files."""
    form = HtmlFormatter(linenos="inline", anchorlinenos=True, lineanchors="line")
    linked = set()
    for page in app.env.found_docs:
        if not page.startswith("docs/api"):  # its links are docstrings here
            path = ROOT / app.env.doc2path(page, base=False)
            linked.update(path.parent / link for link in CODE.findall(path.read_text("utf-8")))
    for name in sorted({str(path.resolve().relative_to(ROOT)) for path in linked}):
        code = highlight((ROOT / name).read_text("utf-8"), PythonLexer(), form)
        yield f"code/{name}", {"title": name, "body": f"<h1>{name}</h1>{code}"}, "page.html"


def setup(app):
    """Sphinx calls this."""
    app.connect("source-read", add_what_github_lacks)
    app.connect("autodoc-process-signature", shorten_defaults)
    app.connect("autodoc-process-docstring", keep_colons, priority=600)  # after napoleon
    app.connect("doctree-read", link_code, priority=100)  # before files to download are collected
    app.connect("html-collect-pages", write_code)
