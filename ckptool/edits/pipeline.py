"""Edits as steps, each an option and its text, which ``ckptool edit`` applies in one pass over the file.

The single commands are the same steps, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from ..base.errors import TargetError, UnreadableError
from ..base.globs import SYNTAX, Globs, Patterns, split_globs
from ..base.steps import command
from ..checkpoint.checkpoint import Checkpoint
from ..files.archives import read_bytes
from ..formats.opening import CheckpointOrPath, as_checkpoint, open_checkpoint, takes_path
from .cast import cast
from .devices import device_pairs, remap
from .entries import as_scalar, drop, extract, keep, set_entry, unset, wrap
from .keys import (
    add_prefix,
    by_glob,
    by_regex,
    by_table,
    parse_glob,
    parse_regex,
    parse_repeat,
    parse_table,
    strip_prefix,
    strip_wrappers,
)
from .like.search import FROM_TARGET, WHOLE, FixStep
from .like.targets import MatchTarget, match_target, rename_like, target_in_checkpoint
from .megatron_names import HELP
from .merge import merge
from .redact import KINDS, redact
from .sanitize.sanitizer import sanitize
from .slim import drop_for, merged_doubles, repack, slim

#: An option without its dashes, and its text (True for a flag).
Step: TypeAlias = "tuple[str, str | bool]"

#: Maximum bytes of a name table; a larger file cannot be one.
_TABLE: Final = 64 << 20


class Scope(NamedTuple):
    """The earlier options that apply to a step: which state dict, which keys, and how."""

    key: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    repeat: int | Literal["all"] = 1

    @property
    def only(self) -> Globs:
        """The choice of keys."""
        return Globs(self.include, self.exclude)

    @property
    def names(self) -> dict[str, Any]:
        """The arguments of an edit that takes a state dict and a choice of keys."""
        return {"key": self.key, **self.only.patterns}


class StepKind(NamedTuple):
    """A kind of step: the ``metavar`` of its text ("" for a flag), its help line, and its function."""

    metavar: str
    help: str
    run: Callable[[Checkpoint, str, Scope], Checkpoint]


@takes_path
def edit(checkpoint: Checkpoint, steps: Iterable[Step]) -> Checkpoint:
    """Apply several edits in order: ``[("extract", "state_dict"), ("wrappers", True), ("to", "cpu")]``.

    A step is an option of ``ckptool edit`` without its dashes, and its text. ``key``, ``include`` and ``exclude`` apply
    to the steps after them; new patterns after a step replace the earlier ones. Raise TargetError for an unknown step,
    and the errors of the edits.

    >>> steps = [("extract", "state_dict"), ("strip-module", True), ("to", "cpu")]
    >>> list(ckptool.edit("training.pth", steps))[0]
    'stem.0.weight'
    """
    scope, used = Scope(), False
    for name, value in steps:
        text = value if isinstance(value, str) else ""
        if name == "key":
            scope = scope._replace(key=None if text == "*" else text)
        elif name in ("include", "exclude"):
            if used:
                # Patterns after a step apply to the next steps only.
                scope, used = scope._replace(include=(), exclude=()), False
            if name == "include":
                scope = scope._replace(include=(*scope.include, text))
            else:
                scope = scope._replace(exclude=(*scope.exclude, text))
        elif name == "repeat":
            scope = scope._replace(repeat=parse_repeat(text))
        elif name in MODIFIERS:
            scope = scope._replace(flags=scope.flags | {name})
        elif name in STEPS:
            checkpoint, used = STEPS[name].run(checkpoint, text, scope), True
        else:
            raise TargetError(f"there is no edit {name!r}", next=command("edit", options=("--help",)))
    return checkpoint


@takes_path
def rename(
    checkpoint: Checkpoint,
    table: Mapping[str, str] | None = None,
    *,
    glob: tuple[str, str] | None = None,
    regex: tuple[str, str] | None = None,
    like: CheckpointOrPath | None = None,
    by_order: bool = False,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Rename keys of state dicts in exactly one way.

    The ways are: a ``table`` of names; ``glob`` (old, new); ``regex`` (expression, replacement); or the names in the
    checkpoint ``like``, paired by name or ``by_order``. ``_metadata`` and parameter names in optimizers follow. Raise
    RefusedError if nothing matches or two keys would become one, TargetError for invalid patterns.

    >>> list(ckptool.rename("model.pth", glob=("conv1.*", "stem.*")))[0]
    'stem.weight'
    >>> list(ckptool.rename("model.pth", regex=("^fc[.]", "head.")))[-1]
    'head.bias'
    """
    if sum(way is not None for way in (table, glob, regex, like)) != 1:
        raise TargetError("one way to rename is needed", next="table, glob=, regex= or like=")
    only = Globs(include, exclude)
    if glob is not None:
        return by_glob(checkpoint, *glob, key=key, only=only)
    if regex is not None:
        return by_regex(checkpoint, *regex, key=key, only=only)
    if like is not None:
        like = as_checkpoint(like)
        target = target_in_checkpoint(like, preferred=key)
        return rename_like(checkpoint, target, by_order=by_order, key=key, only=only)
    return by_table(checkpoint, table or {}, key=key, only=only)


def apply_fix(
    checkpoint: Checkpoint, steps: Sequence[FixStep], target: MatchTarget, *, key: str | None = None
) -> Checkpoint:
    """Return the checkpoint after the steps of ``match``; ``key`` is the state dict whose names they change.

    ``target`` has the names for "like" and "by-order"; it may be a model, which no option can name. Raise the errors of
    the edits.
    """
    for step in steps:
        if step.option in FROM_TARGET:
            checkpoint = rename_like(checkpoint, target, by_order=step.option == "by-order", key=key)
            continue
        if step.option in MODIFIERS:
            continue  # its edit reads it
        scope: list[Step] = [] if key is None or step.option in WHOLE else [("key", key)]
        scope += [(other.option, True) for other in steps if other.option in MODIFIERS]
        checkpoint = edit(checkpoint, [*scope, (step.option, step.value)])
        if step.option == "extract":
            key = None  # the extracted entry is now the whole checkpoint
    return checkpoint


def _to_names(checkpoint: Checkpoint, family: str, scope: Scope) -> Checkpoint:
    from .megatron_names import named_as  # imported late: only Megatron-LM models need it

    return named_as(checkpoint, family, key=scope.key)


def _strip(checkpoint: Checkpoint, prefix: str, scope: Scope) -> Checkpoint:
    return strip_prefix(checkpoint, prefix or "module.", repeat=scope.repeat, **scope.names)


def _rename_regex(checkpoint: Checkpoint, text: str, scope: Scope) -> Checkpoint:
    pattern, new, count = parse_regex(text)
    return by_regex(checkpoint, pattern, new, count=count, key=scope.key, only=scope.only)


def _rename_table(checkpoint: Checkpoint, path: str, scope: Scope) -> Checkpoint:
    return by_table(checkpoint, read_table(path), label=f"renamed by {path}", key=scope.key, only=scope.only)


def _like(checkpoint: Checkpoint, path: str, scope: Scope) -> Checkpoint:
    # A state dict at the same path in the other file is preferred.
    target = match_target(path, preferred=scope.key)
    return rename_like(checkpoint, target, by_order="by-order" in scope.flags, key=scope.key, only=scope.only)


def _drop(checkpoint: Checkpoint, glob: str, scope: Scope) -> Checkpoint:
    return drop(checkpoint, [glob], prune_optimizer="prune-optimizer" in scope.flags, **scope.names)


def _keep(checkpoint: Checkpoint, globs: str, scope: Scope) -> Checkpoint:
    return keep(checkpoint, split_globs(globs), prune_optimizer="prune-optimizer" in scope.flags, **scope.names)


def _set(checkpoint: Checkpoint, text: str, _scope: Scope) -> Checkpoint:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TargetError(f"{text!r} is not KEY=VALUE", next="write epoch=0")
    return set_entry(checkpoint, key.strip(), as_scalar(value))


def _cast(checkpoint: Checkpoint, dtype: str, scope: Scope) -> Checkpoint:
    no_overflow, optimizer = "no-overflow" in scope.flags, "optimizer" in scope.flags
    return cast(checkpoint, dtype, no_overflow=no_overflow, optimizer=optimizer, **scope.names)


def _merge(checkpoint: Checkpoint, path: str, scope: Scope) -> Checkpoint:
    # The other checkpoint stays open, because its bytes are copied when the output is written.
    return merge(checkpoint, open_checkpoint(path), **scope.names)


def _merge_entry(checkpoint: Checkpoint, text: str, _scope: Scope) -> Checkpoint:
    path, _, entry = text.rpartition(":")
    if not path or not entry:
        raise TargetError(f"{text!r} is not FILE:ENTRY", next="write other.pth:ema=state_dict")
    origin, _, target = entry.partition("=")
    return merge(checkpoint, open_checkpoint(path), entry=[(origin, target or origin)])


def _redact(checkpoint: Checkpoint, kinds: str, scope: Scope) -> Checkpoint:
    chosen: Any = [kind.strip() for kind in kinds.split(",")] if kinds != "all" else KINDS
    return redact(checkpoint, chosen, **scope.only.patterns)


def _sanitize(checkpoint: Checkpoint, _text: str, scope: Scope) -> Checkpoint:
    return sanitize(
        checkpoint,
        as_state_dict="as-state-dict" in scope.flags,
        drop_unknown="drop-unknown" in scope.flags,
        local_parts="local-parts" in scope.flags,
    )


STEPS: Final[Mapping[str, StepKind]] = {
    "to-names": StepKind("FAMILY", HELP, _to_names),
    "extract": StepKind("KEY", "Make one entry the whole checkpoint.", lambda c, v, _: extract(c, v)),
    "wrap": StepKind("KEY", "Nest everything under a key.", lambda c, v, _: wrap(c, v)),
    "drop": StepKind("GLOB", f"Remove entries and keys ({SYNTAX}).", _drop),
    "keep": StepKind("GLOB", f"Keep only matching entries and keys ({SYNTAX}); separate several by commas.", _keep),
    "set": StepKind("KEY=VALUE", "Set a scalar entry.", _set),
    "unset": StepKind("KEY", "Remove an entry.", lambda c, v, _: unset(c, v)),
    "strip-module": StepKind("", "Remove 'module.' from keys.", _strip),
    "strip-prefix": StepKind("TEXT", "Remove another prefix from keys.", _strip),
    "wrappers": StepKind(
        "",
        "Remove the segments of all known wrappers: _orig_mod, _fsdp_wrapped_module, ...",
        lambda c, _, s: strip_wrappers(c, **s.names),
    ),
    "add-module": StepKind("", "Add 'module.' to keys.", lambda c, _, s: add_prefix(c, **s.names)),
    "add-prefix": StepKind("TEXT", "Add another prefix to keys.", lambda c, v, s: add_prefix(c, v, **s.names)),
    "rename": StepKind(
        "OLD=NEW",
        "Rename keys by a pattern: 'backbone.*=encoder.*'.",
        lambda c, v, s: by_glob(c, *parse_glob(v), key=s.key, only=s.only),
    ),
    "rename-regex": StepKind("s/OLD/NEW/", "Rename keys by a regular expression.", _rename_regex),
    "rename-table": StepKind("FILE", "Rename keys by a table: JSON, or two columns.", _rename_table),
    "like": StepKind("OTHER", "By the names of another checkpoint.", _like),
    "to": StepKind("DEVICE", "Move what is not on cpu or meta.", lambda c, v, s: remap(c, v, **s.names)),
    "map": StepKind(
        "FROM=TO",
        "Move one device to another, as in cuda:*=cpu; repeatable.",
        lambda c, v, s: remap(c, device_pairs([v]), **s.names),
    ),
    "cast": StepKind("DTYPE", "Cast floating-point tensors.", _cast),
    "for": StepKind("inference", "Drop optimizer, scheduler and EMA entries.", lambda c, v, _: drop_for(c, v)),
    "slim": StepKind("", "Drop bytes that no tensor uses.", lambda c, _, s: slim(c, **s.only.patterns)),
    "dedupe": StepKind(
        "", "Merge storages with the same bytes into one: tied tensors.", lambda c, _, s: merged_doubles(c, s.only)
    ),
    "merge": StepKind("OTHER", "Copy tensors from another checkpoint.", _merge),
    "merge-entry": StepKind("OTHER:FROM[=TO]", "Copy a whole entry from another checkpoint.", _merge_entry),
    "redact": StepKind("KINDS", f"Remove what is private: all, or {', '.join(KINDS)}.", _redact),
    "sanitize": StepKind("", "Replace what torch.load refuses by plain values.", _sanitize),
    "repack": StepKind("", "Rewrite the file in torch's own layout.", lambda c, _v, _: repack(c)),
}

#: Metavars of steps whose text names a file to read.
FILES: Final = ("FILE", "OTHER", "OTHER:FROM[=TO]")


def files_of(steps: Iterable[Step]) -> tuple[str, ...]:
    """Return the files that the steps read."""
    texts = [(str(text), STEPS[name].metavar) for name, text in steps if name in STEPS and STEPS[name].metavar in FILES]
    return tuple(text.rpartition(":")[0] if ":" in metavar else text for text, metavar in texts)


#: Options that modify the steps after them: metavar of the value ("" for a flag), help line.
MODIFIERS: Final[Mapping[str, tuple[str, str]]] = {
    "repeat": ("N|all", "How often to remove the prefix."),
    "by-order": ("", "With --like: pair the names in order; shapes must agree."),
    "prune-optimizer": ("", "Also remove the optimizer state of removed parameters."),
    "no-overflow": ("", "Refuse finite values that would become infinite or NaN."),
    "optimizer": ("", "Also convert optimizer state."),
    "as-state-dict": ("", "Replace a pickled module by its state dict."),
    "drop-unknown": ("", "Drop what cannot be converted and holds no tensors, and name it."),
    "local-parts": ("", "Replace a DTensor or ShardedTensor by the part of its rank."),
}


def read_table(path: str) -> dict[str, str]:
    """Return the name table in a file; raise UnreadableError if it cannot be read, TargetError if it is invalid."""
    step = "see what it is: " + command("inspect", path)
    try:
        text = read_bytes(path, _TABLE).decode()
    except UnreadableError as error:
        error.step = error.step or step
        raise
    except UnicodeDecodeError as error:
        raise UnreadableError("it is not a text file", path=path, next=step) from error
    return parse_table(text, path)
