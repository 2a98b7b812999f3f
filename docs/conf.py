"""Configuration with which Sphinx builds the docs for offline reading: ``make site``."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Final

import click

FOLDER: Final = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

import ckptool  # noqa: E402
from ckptool.cli import main  # noqa: E402
from docs import help_text, schemas  # noqa: E402

project = "ckptool"
version = release = ckptool.__version__
html_title = f"ckptool {version}"
project_copyright = "ckptool developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
exclude_patterns = ["notebook.ipynb"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Search must work from the disk, where a browser does not let one page read another for a summary.
html_show_search_summary = False
html_copy_source = False
html_show_sourcelink = False
# Keep "--to" and 'module.' as they are typed: no dashes or curly quotes.
smartquotes = False
myst_heading_anchors = 4
# A type of ckptool in a signature must link to its public name. All other types are not on this site.
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
maximum_signature_line_length = 100
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!ckptool\.\w+$).*")]

#: Pages whose source is a file at the root of the repository.
_ROOT: Final = {"index": "README", "changes": "CHANGELOG", "contributing": "CONTRIBUTING", "security": "SECURITY"}
_COMMENT: Final = re.compile(r"<!-- \[\[\[.*?-->\n", re.DOTALL)
_FOR_THE_SITE: Final = re.compile(r"<!-- site\n(.*?)-->\n", re.DOTALL)
_ENTRY: Final = re.compile(r"(^### [\w-]+)\n\n```text\n(.*?)\n```", re.MULTILINE | re.DOTALL)
#: Names in tables that link to a section of the site. On GitHub the same tables have no links.
_LINKED: Final[dict[str, tuple[str, Any]]] = {
    "commands": (r"^\| `(ckptool [\w -]+)` ", lambda found: _of_command(found[1])),
    "reference": (r"^\| `(?!Scalar|SalvagedState)(\w+)` ", r"| {py:obj}`\1 <ckptool.\1>` "),
    "json": (r"(?<=[|,] )`([A-Z]\w+)`(?=,| \|$)", r"[`\1`](#\1)"),
}
_LIST: Final = re.compile(r"^## (.+)\n\n((?:- .+\n)+)", re.MULTILINE)


def _of_command(words: str) -> str:
    return f'| <a href="#{words.replace(" ", "-")}"><code class="literal">{words}</code></a> '


def _read(_app: Any, page: str, source: list[str]) -> None:
    """Remove the marks of cog and add the parts meant only for the site. Line numbers in warnings stay right."""
    text = source[0]
    if page in _ROOT and page != "index":
        text = (FOLDER.parent / f"{_ROOT[page]}.md").read_text("utf-8").replace("](docs/", "](")
    text = _COMMENT.sub(lambda mark: "\n" * mark[0].count("\n"), text)
    text = _FOR_THE_SITE.sub(r"\n\1\n", text)
    for own, name in _ROOT.items():
        text = re.sub(rf"\]\((?:\.\./)?{name}\.md", f"]({own}.md", text)
    if page == "errors":
        text = _findable(text)
    if page in _LINKED:
        pattern, link = _LINKED[page]
        text = re.sub(pattern, link, text, flags=re.MULTILINE)
    if page == "index":
        text += "".join(_toctree(title, links) for title, links in _LIST.findall(text))
    source[0] = text.replace("<!-- schemas.definitions -->", schemas.definitions() if page == "json" else "")


def _findable(text: str) -> str:
    """Make each error findable in the search and the index by the start of its message, once per start."""
    known = set()
    for heading, messages in _ENTRY.findall(text):
        marks = []
        for line in messages.splitlines():
            message = re.sub(r"^(?:[\w.]+Error: |\.\.\. )", "", line)
            words = textwrap.shorten(re.split(r"[:.(] |\.\.\.|\.$", message)[0].replace(";", ","), 50, placeholder="")
            if words not in known:
                marks.append(f"```{{index}} ! single: {words}\n```\n")
            known.add(words)
        text = text.replace(f"{heading}\n", "\n".join((f"{heading}\n", *marks)), 1)
    return text


def _toctree(title: str, links: str) -> str:
    """Return a hidden table of contents, which lists the linked pages in the sidebar."""
    names = re.findall(r"^- \[.+?\]\((.+?)\.md\)", links, re.MULTILINE)
    return "\n```{{toctree}}\n:hidden:\n:caption: {}\n\n{}\n```\n".format(title, "\n".join(names))


def _signature(_app: Any, _kind: str, _name: str, item: object, *_rest: Any) -> tuple[str, None] | None:
    """Remove the parameters from the signature of a class, except a tuple: users do not call it."""
    return ("", None) if isinstance(item, type) and not issubclass(item, tuple) else None


def _description(_app: Any, _ctx: click.Context, lines: list[str]) -> None:
    lines[:] = [_escaped(line) for line in lines]


def _options(_app: Any, ctx: click.Context, lines: list[str]) -> None:
    """Replace the options of a command by the same options as its help prints them."""
    lines.clear()
    for names, text in help_text.options(ctx):
        if not names.endswith("--help"):
            lines += [f".. option:: {names}", "", f"   {_escaped(text)}", ""]


def _arguments(_app: Any, _ctx: click.Context, lines: list[str]) -> None:
    lines.clear()  # the usage line lists the arguments


def _epilog(_app: Any, ctx: click.Context, lines: list[str]) -> None:
    """Show the examples of a command as a code block, and the rest of its epilog as text."""
    examples, rest = help_text.epilog(ctx.command)
    lines[:] = [".. rubric:: Examples", "", *_block("shell", "\n".join(examples))]
    for part in rest:
        lines += _block("text", part.text) if part.literal else [_escaped(part.text), ""]


def _block(language: str, text: str) -> list[str]:
    return [f".. code-block:: {language}", "", *(f"   {line}" for line in text.splitlines()), ""]


def _escaped(text: str) -> str:
    escaped = re.sub(r"([\\*`|_])", r"\\\1", text)
    return re.sub(r"(?<![\w-])(--[a-z][\w-]*)", r"``\1``", escaped)


def setup(app: Any) -> None:
    """Register the functions that change pages and the help of commands."""
    with main.cli.make_context("ckptool", ["inspect"]) as ctx:
        for name in main.COMMANDS:
            main.cli.get_command(ctx, name)  # adds the options that every command has
    app.connect("source-read", _read)
    app.connect("autodoc-process-signature", _signature)
    app.connect("sphinx-click-process-description", _description)
    app.connect("sphinx-click-process-options", _options)
    app.connect("sphinx-click-process-arguments", _arguments)
    app.connect("sphinx-click-process-epilog", _epilog)
