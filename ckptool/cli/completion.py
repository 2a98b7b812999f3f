"""Shell completion: click completes commands and options, the shell files, and the typed file gives the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Final

import click
from click.shell_completion import CompletionItem, get_completion_class

import ckptool

from ..base.errors import CkptoolError
from ..checkpoint.checkpoint import Checkpoint
from .help import GroupedCommand
from .render import clean, emit

#: The environment variable with which a shell asks. https://click.palletsprojects.com/en/stable/shell-completion/
VARIABLE: Final = "_CKPTOOL_COMPLETE"
SHELLS: Final = ("bash", "zsh", "fish")
#: The devices that most files go to.
_DEVICES: Final = ("cpu", "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "meta", "mps", "xpu:0")
#: The most keys offered; a longer list does not help anyone in a shell.
_MOST: Final = 1000


@click.command(cls=GroupedCommand)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script that completes commands, options, files and keys in a shell.

    Keys come from the file named before them: behind --key, and for get, extract, drop, and options of edit. Devices,
    dtypes, families of names and the words of --ignore are completed too.
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    emit(found(root, {}, "ckptool", VARIABLE).source().rstrip("\n"))


def values(kind: str, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the values that begin with ``incomplete``: keys of the typed file, its state dicts, or fixed words."""
    if kind == "words":
        return words(param.metavar or "", incomplete)
    if kind == "keys":
        return _beginning(incomplete, _file(ctx, 0), _keys)
    path = _file(ctx, int(param.name == "other_key"))
    return _beginning(incomplete, path, lambda checkpoint: (item.path or "." for item in checkpoint.state_dicts))


def words(metavar: str, incomplete: str) -> list[CompletionItem]:
    """Return the values of an option with this metavar that begin with ``incomplete``.

    After a comma, the next value is completed.
    """
    from ..base.dtypes import DTYPES
    from ..edits.recipes import families
    from ..reports.comparing.diff import IGNORABLE

    known = {
        "DEVICE": _DEVICES,
        "DTYPE": [dtype.name for dtype in DTYPES if dtype.floating],
        "FAMILY": families(),
        "WORDS": list(IGNORABLE),
    }
    before, comma, begun = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{word}") for word in known[metavar] if word.startswith(begun)]


def _file(ctx: click.Context, number: int) -> str:
    """Return the typed file with this number, counted from 0, or "" if there are fewer."""
    given = [ctx.params.get(name) for name in ("path", "a", "b", "other", "target")]
    # While the value of an option is being typed, click has not assigned the arguments to parameters yet.
    files = [*filter(None, given), *(ctx.params.get("paths") or ()), *ctx.args]
    return str(files[number]) if number < len(files) else ""


def _beginning(incomplete: str, path: str, names: Callable[[Checkpoint], Iterator[str]]) -> list[CompletionItem]:
    found: dict[str, None] = {}
    with suppress(CkptoolError, OSError), ckptool.open(path) as checkpoint:
        wanted = (name for name in names(checkpoint) if name.startswith(incomplete) and clean(name) == name)
        found = dict.fromkeys(islice(wanted, _MOST))
    return [CompletionItem(name) for name in found]


def _keys(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the top-level entries, then the tensors in the form ``get`` accepts: path of the state dict, then key."""
    survey = checkpoint.survey
    yield from (entry.key for entry in survey.entries)
    for entry in survey.tensors:
        where = survey.state_dicts[entry.state_dict].path if entry.state_dict >= 0 else ""
        yield f"{where}.{entry.key}" if where else entry.path if entry.state_dict < 0 else entry.key
