"""The entry point: import only the module of the command, and turn errors into exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

import click

from .. import __version__
from ..base import lazy
from ..base.addresses import conceal
from ..base.errors import CkptoolError
from ..base.limits import ANNOUNCED
from ..base.text import BREVITY, Brevity
from .help import HELP_ALL, Helpful, eager, explained, variable
from .render import StdoutError, emit, flush, say, say_error, tell


def _edits(*names: str) -> dict[str, tuple[str, str, str]]:
    return {name: ("edits", variable(name), "") for name in names}


#: The words that begin commands of two words, with one line of help.
FIRST_WORDS: Final = {"lora": "Merge adapters, and convert, extract and resize LoRAs."}
#: Groups of commands. Each command has its module, its function and one line of help, which is "" if the table of edits
#: has it.
GROUPS: Final = {
    "Look": {
        "inspect": ("show", "inspect", "Show what a checkpoint contains and what to do about it."),
        "keys": ("show", "keys", "List the keys: name, dtype, shape, device, bytes."),
        "stats": ("stats", "stats", "Show min, max, mean, norm, NaN and Inf of every tensor."),
        "report": ("compare", "report", "Write a page of HTML: findings, bytes, every tensor."),
        "get": ("show", "get", "Print one entry or tensor, or save it as .npy."),
        "explain": ("explain", "explain", "Explain an error message, and name the command that helps."),
    },
    "Check": {
        "scan": ("scan", "scan", "Show what code a file could run when it is loaded."),
        "validate": ("validate", "validate", "Check that checkpoints are whole and loadable, for CI."),
        "diff": ("compare", "diff", "Show what differs between two checkpoints."),
        "match": ("match", "match", "Show what would load into a model, and the edit that helps."),
        "hash": ("locks", "hash_command", "Print a fingerprint of names, shapes, dtypes and values."),
        "lock": ("locks", "lock", "Record what a checkpoint holds, for validate --lock."),
    },
    "Edit": {
        **_edits("strip-module", "add-module", "rename", "remap", "extract", "drop", "set", "slim", "resize"),
        "edit": ("edits", "edit", "Apply several edits in one pass."),
    },
    "Combine and convert": {
        **_edits("merge", "average", "cast", "dequantize"),
        "convert": ("edits", "convert", "Write the same checkpoint in another format."),
    },
    "LoRA": _edits("lora merge", "lora convert", "lora extract", "lora resize"),
    "Repair and publish": {
        **_edits("sanitize"),
        "redact": ("edits", "redact", "Find and remove what a published file should not reveal."),
        "salvage": ("salvage", "salvage", "Recover what is intact in a damaged checkpoint."),
        "undo": ("versions", "undo", "Undo the last edit in place, or list all of them."),
    },
    "Shell": {"completion": ("completion", "completion", "Print the script that completes commands and keys.")},
}
COMMANDS: Final = {name: command for group in GROUPS.values() for name, command in group.items()}
#: The commands of every day. The help of the program has a line for each of them, and only names the others.
DAILY: Final = (
    *("inspect", "keys", "explain", "scan", "validate", "diff", "match"),
    *("strip-module", "remap", "edit", "convert", "lora merge"),
)


def help_line(name: str) -> str:
    """Return the line of help of a command, or of the first word of several commands."""
    line = FIRST_WORDS.get(name) or COMMANDS[name][2]
    return line or str(lazy.module("edits.table").EDITS[name].title)


EXIT_CODES: Final = (
    ("0", "done, also when there was nothing to do"),
    ("1", "the answer is no: not valid, no match, it differs, not loaded, something lost"),
    ("2", "usage: an unknown option, a missing -o, a device that torch could not restore"),
    ("3", "the input cannot be read, or is something else"),
    ("4", "refused: it would lose or overwrite something"),
    ("5", "the output could not be written"),
    ("70", "a bug in ckptool"),
    ("128+N", "ended by signal N"),
)

EPILOG: Final = """\b
Examples:
  ckptool inspect model.pth
  ckptool strip-module model.pth -o plain.pth
  ckptool remap model.pth --to cpu -o model.cpu.pth
  ckptool keys s3://bucket/run/step1000.pth
  ckptool help remap

\b
Exit codes:
""" + "\n".join(f"  {code:<6} {text}" for code, text in EXIT_CODES)


def _no_color(_ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    """Set NO_COLOR for this process and the processes that it starts."""
    if given:
        os.environ["NO_COLOR"] = "1"


#: An option of the program and of every command.
_NO_COLOR: Final = eager("--no-color", callback=_no_color, help="Print without colour.")


def _for_remote(ctx: click.Context, param: click.Parameter, given: Any) -> None:
    """Set the variable of a remote option for this process and the processes that it starts."""
    if param.name == "max_download" and given is not None:
        from ..base.text import parse_bytes

        given = str(parse_bytes(given))
    if given:
        os.environ[f"CKPTOOL_{str(param.name).upper()}"] = "1" if given is True else given


def _remote(option: str, metavar: str, text: str) -> click.Option:
    how: dict[str, Any] = {"metavar": metavar} if metavar else {"is_flag": True}
    return click.Option([option], expose_value=False, callback=_for_remote, help=text, **how)


#: Options of every command that reads files: how remote ones are reached.
_REMOTE: Final = (
    _remote(
        "--endpoint-url",
        "URL",
        "Ask this server in place of the one that an address s3://, gs://, az:// or hf:// means.",
    ),
    _remote("--anonymous", "", "Read remote files without credentials."),
    _remote("--profile", "PROFILE", "Use S3 with this profile of the AWS command line."),
    _remote("--max-download", "SIZE", "Read at most this much of remote files; by default 1 GiB."),
    _remote("--allow-unversioned", "", "Read from servers that do not say whether a file was replaced meanwhile."),
)


def _version(ctx: click.Context, _param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        emit(f"ckptool {__version__}")
        ctx.exit()


_VERSION: Final = eager("-V", "--version", callback=_version, help="Show the version and exit.")


def _verbose(_ctx: click.Context, _param: click.Parameter, given: bool) -> bool:
    if given:
        BREVITY.set(Brevity())
    return given


#: An option of the program and of every command; some have one that shows even more.
_VERBOSE: Final = eager("-v", "--verbose", callback=_verbose, help="Shorten no message, and list every name.")


class _Commands(Helpful, click.Group):
    """Imports the module of a command only when that command is called.

    ``first`` is the first word of all its commands, with a space, or "": ``ckptool lora`` is a group, too.
    """

    first = ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name.removeprefix(self.first) for name in COMMANDS if name.startswith(self.first)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.first + cmd_name
        if name in FIRST_WORDS:
            group = _Commands(name, help=FIRST_WORDS[name])
            group.first = f"{name} "
            return group
        if name not in COMMANDS:
            return None
        module, function, _ = COMMANDS[name]
        command = getattr(lazy.module(f"cli.{module}"), function)
        assert isinstance(command, click.Command)
        if _NO_COLOR not in command.params:
            own = next((param for param in command.params if param.name == _VERBOSE.name), None)
            if own is not None:
                own.callback = _verbose
            command.params += [_NO_COLOR, HELP_ALL, *([] if own else [_VERBOSE])]
            reads = any(getattr(param.type, "reads", False) for param in command.params)
            if reads and module != "versions":  # remote files have no edits in place
                command.params += _REMOTE
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete the names of commands without importing them."""
        from click.shell_completion import CompletionItem

        words = dict.fromkeys(name.split()[0] for name in self.list_commands(ctx) if name.startswith(incomplete))
        found = [CompletionItem(word, help=help_line(self.first + word)) for word in words]
        return found or super().shell_complete(ctx, incomplete)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read ``help [COMMAND]`` as ``[COMMAND] --help``, and ``version`` as ``--version``."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args[:1] == ["version"]:
            args = ["--version"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command of every day, then the names of the others by group."""
        if self.first:
            with formatter.section("Commands"):
                formatter.write_dl([(name, help_line(self.first + name)) for name in self.list_commands(ctx)])
            return
        with formatter.section("Every day"):
            formatter.write_dl([(name, help_line(name)) for name in DAILY])
        others = {title: [name for name in group if name not in DAILY] for title, group in GROUPS.items()}
        with formatter.section("Others"):
            formatter.write_dl([(title, ", ".join(names)) for title, names in others.items()])


@click.group(cls=_Commands, epilog=EPILOG)
def cli() -> None:
    """Inspect and edit PyTorch checkpoints, without running them."""


cli.params += [_VERSION, _NO_COLOR, _VERBOSE]


class _Ended(BaseException):
    """A signal that ends the program, raised as an exception so that temporary files are removed."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, _frame: FrameType | None) -> None:
    raise _Ended(number)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    for name in ("SIGTERM", "SIGHUP"):
        # nohup ignores SIGHUP, and that must stay so.
        if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) is not signal.SIG_IGN:
            signal.signal(getattr(signal, name), _end)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        if asked := os.environ.get("_CKPTOOL_COMPLETE"):  # a shell asks for completions
            from click.shell_completion import shell_complete

            code: int = shell_complete(cli, {}, "ckptool", "_CKPTOOL_COMPLETE", asked)
        else:
            code = run(arguments)
    except BrokenPipeError:
        # The reader of the pipe has ended, as in ``| head``.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + getattr(signal, "SIGPIPE", 13)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. ``main`` handles a closed pipe."""
    words = sys.argv[1:] if arguments is None else arguments
    brevity, announced = BREVITY.set(Brevity(lists=True, lines=True)), ANNOUNCED.set(0)
    try:
        return _run(words)
    finally:
        ANNOUNCED.reset(announced)
        BREVITY.reset(brevity)


def _without_secrets(word: str) -> str:
    """Return a word, an address in it without its secrets; it may be the value of an option."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    return option + equals + conceal(value)


def _run(words: Sequence[str]) -> int:
    try:
        # cli.main() would turn a closed pipe into exit 1, which means "the answer is no".
        # Click removes words from the list it parses, and they are needed later: pass a copy.
        with cli.make_context("ckptool", list(words)) as ctx:
            result = cli.invoke(ctx)
        flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        if isinstance(error, click.UsageError):
            error = explained(cli, words, error)
        for word in (word for word in words if "://" in word):
            error.message = error.message.replace(word, _without_secrets(word))  # type: ignore[misc]
        with suppress(OSError):  # stderr may be full or closed; the exit code still counts
            error.show()
        return error.exit_code
    except CkptoolError as error:
        say_error(error)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except _Ended as ended:
        return 128 + ended.number
    except BrokenPipeError:
        raise
    except StdoutError as error:
        say(f"writing to stdout failed: {error.strerror or error}")
        return 5
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        say(f"{name}the system refused: {error.strerror or error}")
        return 5
    except MemoryError:
        say("there is not enough memory for the metadata of this file")
        return 3
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            return 128 + signal.SIGINT  # Python 3.11 wraps exceptions from ``__set_name__`` while a class is made
        if os.environ.get("CKPTOOL_DEBUG"):
            raise
        say(f"a bug in ckptool: {type(error).__name__}: {error}")
        tell("  please report it; CKPTOOL_DEBUG=1 shows where")
        return 70
