"""Source of docs/man/: a manual page for ckptool and one per command, made from their help.

``python -m docs.manual`` writes the pages; with ``--check`` it only reports whether they are up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

import click

from ckptool import __version__
from ckptool.cli import main

FOLDER: Final = Path(__file__).resolve().with_name("man")

#: Environment variables that affect every command.
_ENVIRONMENT: Final = (
    ("NO_COLOR", "If it is set, output has no colour."),
    ("COLUMNS", "The width of tables on a terminal."),
    ("SOURCE_DATE_EPOCH", "The time that is recorded with an edit in place, in seconds since 1970."),
    ("CKPTOOL_DEBUG", "If it is set, a bug in ckptool ends with a traceback."),
)


class Part(NamedTuple):
    """A paragraph, or literal lines, whose line breaks are kept."""

    text: str
    literal: bool


def parts(text: str) -> list[Part]:
    """Return the paragraphs of a help text. Indented lines become literal parts, without their common indent."""
    found = []
    for block in re.split(r"\n\s*\n", cleandoc(text.replace("\b", ""))):
        for literal, lines in groupby(block.splitlines(), key=lambda line: line.startswith("  ")):
            own = list(lines)
            found.append(Part(cleandoc("\n".join(["", *own])) if literal else " ".join(own), literal))
    return found


def epilog(command: click.Command) -> tuple[list[str], list[Part]]:
    """Return the example lines of a command, and the other parts of its epilog."""
    rest = parts(command.epilog or "")
    headings = [number for number, part in enumerate(rest) if part.text == "Examples:"]
    examples = [line for number in headings for line in rest[number + 1].text.splitlines()]
    return examples, [part for number, part in enumerate(rest) if not {number, number - 1} & {*headings}]


def options(ctx: click.Context) -> list[tuple[str, str]]:
    """Return (names, help) for each option of a command, as ``--help`` prints them."""
    given = (param for param in ctx.command.get_params(ctx) if isinstance(param, click.Option))
    return [record for param in given if (record := param.get_help_record(ctx)) is not None]


def pages() -> dict[str, str]:
    """Map file names to the text of the manual pages."""
    with main.cli.make_context("ckptool", ["inspect"]) as ctx:
        found = {"ckptool.1": _main_page(ctx)}
        for name in main.COMMANDS:
            command = main.cli.get_command(ctx, name)
            assert command is not None
            found[f"ckptool-{name}.1"] = _page(
                command, click.Context(command, ctx, info_name=name), main.help_line(name)
            )
    return found


def _main_page(ctx: click.Context) -> str:
    lines = [*_head("ckptool", main.cli.get_short_help_str(limit=100)), ".SH SYNOPSIS"]
    lines += [".B ckptool", _usage(["[OPTIONS]", "COMMAND", "[ARGUMENTS]..."])]
    lines += [".SH DESCRIPTION", *_parts(parts(main.cli.help or "")), ".SH COMMANDS"]
    for title, group in main.GROUPS.items():
        lines.append(f".SS {title}")
        for name in group:
            lines += [".TP", rf"\fBckptool\-{_escaped(name)}\fR(1)", _escaped(main.help_line(name))]
    lines += [".SH OPTIONS", *_options(ctx), ".SH ENVIRONMENT"]
    for name, text in _ENVIRONMENT:
        lines += [".TP", f".B {name}", _escaped(text)]
    lines += [*_examples(epilog(main.cli)[0]), *_exit_status([]), ".SH SEE ALSO", *_see_also(list(main.COMMANDS))]
    return "\n".join([*lines, ""])


def _page(command: click.Command, ctx: click.Context, text: str) -> str:
    name = str(ctx.info_name)
    examples, rest = epilog(command)
    codes = [part for part in rest if part.text.startswith("Exit codes:")]
    notes = [part for part in rest if part not in codes]
    lines = [*_head(f"ckptool-{name}", text), ".SH SYNOPSIS", f".B ckptool {_escaped(name)}"]
    lines += [_usage(command.collect_usage_pieces(ctx))]
    lines += [".SH DESCRIPTION", *_parts(parts(command.help or "")), ".SH OPTIONS", *_options(ctx)]
    if notes:
        lines += [".SH NOTES", *_parts(notes)]
    lines += [*_examples(examples), *_exit_status(codes), ".SH SEE ALSO"]
    group = next(group for group in main.GROUPS.values() if name in group)
    return "\n".join([*lines, *_see_also(["", *(other for other in group if other != name)]), ""])


def _head(name: str, text: str) -> list[str]:
    head = f'.TH {_escaped(name.upper())} 1 "" "ckptool {__version__}" "ckptool"'
    # Align left and never hyphenate names, so that commands can be copied.
    return [head, ".hw ckptool", ".ad l", ".SH NAME", rf"{_escaped(name)} \- {_escaped(text.rstrip('.'))}"]


def _usage(pieces: list[str]) -> str:
    """Return the usage text after a command name, with placeholders in italics."""
    words = " ".join(pieces).replace("[OPTIONS]", "[options]")
    return re.sub(r"[A-Za-z]+", lambda word: rf"\fI{word[0]}\fR", _escaped(words))


def _options(ctx: click.Context) -> Iterator[str]:
    for names, text in options(ctx):
        # Words that begin with a dash are typed literally, so they are bold.
        words = re.split(r"((?<![\w-])--?[\w-]+)", names)
        shown = [rf"\fB{_escaped(word)}\fR" if word.startswith("-") else _metavar(word) for word in words]
        yield from (".TP", "".join(shown), _escaped(text))


def _metavar(text: str) -> str:
    return text if not text.strip(", /") else re.sub(r"^(\s*)(\S.*?)(\s*,?\s*)$", r"\1\\fI\2\\fR\3", _escaped(text))


def _parts(given: list[Part]) -> Iterator[str]:
    for number, part in enumerate(given):
        if part.literal:
            yield from (".PP", ".RS 4", ".EX", *map(_escaped, part.text.splitlines()), ".EE", ".RE")
        else:
            yield from ([".PP"] if number else [])
            yield _escaped(part.text)


def _examples(lines: list[str]) -> Iterator[str]:
    return iter([".SH EXAMPLES", *list(_parts([Part("\n".join(lines), True)]))[1:]])


def _exit_status(own: list[Part]) -> Iterator[str]:
    yield ".SH EXIT STATUS"
    yield from _parts(own)
    for code, text in main.EXIT_CODES:
        yield from (".TP", f".B {code}", _escaped(text[0].upper() + text[1:]) + ".")


def _see_also(names: list[str]) -> list[str]:
    titles = ["-".join(filter(None, ("ckptool", name))) for name in names]
    return [rf".BR \%{_escaped(title)} (1){',' * (title != titles[-1])}" for title in titles]


def _escaped(text: str) -> str:
    """Escape a text for roff, so that quotes, dashes and similar characters appear as typed."""
    for plain, code in (("\\", "\\e"), ("-", "\\-"), ("'", "\\(aq"), ("`", "\\(ga"), ("^", "\\(ha"), ("~", "\\(ti")):
        text = text.replace(plain, code)
    return rf"\&{text}" if text.startswith(".") else text


def stored() -> dict[str, str]:
    """Map file names to the manual pages now in the folder."""
    return {path.name: path.read_text("utf-8") for path in FOLDER.glob("*")}


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit("docs/man is not up to date: make docs" if stored() != pages() else 0)
    FOLDER.mkdir(exist_ok=True)
    for name in stored().keys() - pages().keys():
        (FOLDER / name).unlink()
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")
