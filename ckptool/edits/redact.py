"""What a published file should not tell: absolute paths, names of users and hosts, sources, training arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from ..base.errors import TargetError
from ..base.globs import EVERY, Globs
from ..base.text import cut, listed
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import attributes, callable_name, class_name, elements, mapping
from ..checkpoint.paths import as_children, bounded, joined, within
from ..pickles.nodes import Call, FrozenSet, Graph, List, Persistent, Ref, Set
from .entries import drop_entries
from .optimizers import optimizers

Kind: TypeAlias = Literal["paths", "users", "sources", "args"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: An absolute path within a text: two steps or more, so that "/" and "a/b" are none; not the rest of an URL.
_PATH: Final = re.compile(
    r"(?<![\w.:/\\~-])(?:~|/(?=[\w.@+-]+/))(?:[\w.@+-]*/)+[\w.@+-]*"
    r"|(?<![\w])[A-Za-z]:\\(?:[^\\/:*?\"<>|\s]+\\)*[^\\/:*?\"<>|\s]*"
    r"|\\\\[\w.-]+\\[^\s:*?\"<>|]+"
)
#: A text that is one absolute path, blanks and all.
_WHOLE: Final = re.compile(r"(?:/(?:[^/\n]+/)+[^/\n]*|[A-Za-z]:\\[^\n]*)\Z")
#: Where the name of a user stands in a path.
_HOME: Final = re.compile(r"(?:/home|/Users|/export/home|[A-Za-z]:\\(?:Users|Documents and Settings))[/\\]([^/\\\s]+)")
#: Entries that name a user or a machine.
_NAMED: Final = re.compile(r"(?:\A|[_.-])(?:user(?:_?name)?|host(?:_?name)?|node_?name|machine|login|email)\Z", re.I)
#: Top-level entries with the arguments of a training.
_ARGUMENTS: Final = re.compile(
    r"(?:\A|_)(?:args?|arguments|argv|opts?|options|cfg|configs?|hparams|hyper_?parameters|hyper_?params|params_dict|cmd"
    r"|command(?:_line)?|namespace)\Z",
    re.I,
)
#: Where the name of a user may begin in a text: a word, or a character that no word has.
_BEGINNING: Final = re.compile("(?<![a-z0-9])(?:[a-z0-9]+|[^a-z0-9])")
_WORD: Final = re.compile("[a-z0-9]")
#: Characters of a user's name: Linux allows 32, Windows 256.
_LONGEST: Final = 256
#: Names that every machine has: they tell nothing.
_COMMON: Final = frozenset(("root", "user", "ubuntu", "runner", "shared", "public", "default", "work", "data"))
#: Calls that make tensors, with attributes of the user's as their fourth argument.
_WITH_STATE: Final = frozenset(
    f"torch.{name}"
    for name in (
        *("_utils._rebuild_parameter_with_state", "_tensor._rebuild_from_type_v2", "_tensor._rebuild_from_type"),
        *("_utils._rebuild_from_type_v2", "tensor._rebuild_from_type"),
    )
)
#: What no text has.
_CONTROL: Final = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufffd]")
_PATHLIB: Final = re.compile(r"pathlib(?:\._local)?\.(?:Pure)?(?:Posix|Windows)?Path\Z")


class _Users:
    """The names of users in lower case, and their sizes by how they begin, from large to small.

    A text may name a hundred thousand: so each is found in a step for each size.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = {name.lower() for name in names if len(name) <= _LONGEST} - _COMMON
        sizes: dict[str, set[int]] = {}
        for name in self.names:
            sizes.setdefault(_BEGINNING.findall(name)[0], set()).add(len(name))
        self.sizes = {begin: sorted(found, reverse=True) for begin, found in sizes.items()}


class Finding(NamedTuple):
    """Something private: of which kind, where, what, and the node that holds it.

    ``new`` is the text that would take its place, None where the whole entry would go.
    """

    kind: Kind
    path: str
    what: str
    ref: Ref
    new: str | None


def redact(checkpoint: Checkpoint, kinds: Sequence[Kind] = KINDS, *, only: Globs = EVERY) -> Checkpoint:
    """Take out what ``private_matters`` finds of these kinds.

    Of an absolute path its last part stays; users and hosts become "user" and "host", sources empty, and the entries
    with training arguments go. ``only`` chooses by path. No former byte stays in the output. Raises
    TargetError for an unknown kind.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise TargetError(f"{unknown[0]!r} is nothing to redact", next=f"one of {', '.join(KINDS)}")
    found = private_matters(checkpoint, kinds, only=only)
    if not found:
        nothing = Change("redact", "", 0, 0, f"nothing private is recognised: {', '.join(kinds)}")
        return _laid_out(checkpoint, checkpoint.graph, [nothing])
    names = [finding.path for finding in found if finding.new is None]
    if names:
        gone = {entry.key for entry in checkpoint.survey.entries if entry.path in names}
        what = f"dropped {listed(names)}"
        checkpoint = drop_entries(checkpoint, gone, [Change("redact-args", "", len(names), 0, what)])
        found = [item for item in found if not any(within(item.path, name) for name in names)]
    rewrite = GraphEditor(checkpoint.graph)
    changes = []
    for finding in found:
        if finding.new is None:
            continue
        node = checkpoint.graph.nodes[finding.ref]
        if type(node) is tuple:  # the parts of a pathlib object
            rewrite.changed[finding.ref] = (rewrite.add(finding.new),)
        else:
            rewrite.changed[finding.ref] = finding.new.encode() if type(node) is bytes else finding.new
        changes.append(Change(f"redact-{finding.kind}", finding.path, 1, 0, f"{finding.what} -> {cut(finding.new)!r}"))
    return _laid_out(checkpoint, rewrite.done(), changes)


def _laid_out(checkpoint: Checkpoint, graph: Graph, changes: Sequence[Change]) -> Checkpoint:
    """Bytes between records, other records, comments, objects that nothing leads to and the name of the folder, often
    that of a file, do not come along. A legacy file has none of these, and may hold modules, which a zip cannot."""
    if checkpoint.format != "torch-zip":
        return checkpoint.changed(graph, changes)
    return checkpoint.changed(graph, changes, anew=True, root="archive")


def private_matters(checkpoint: Checkpoint, kinds: Collection[Kind] = KINDS, *, only: Globs = EVERY) -> list[Finding]:
    """Everything private of these kinds that is recognised, in the order of the file; ``only`` chooses by path.

    A text that stands at several places is one object: it is there if one of its places is chosen.
    """
    graph = checkpoint.graph
    found: list[Finding] = []
    texts = list(_texts(graph))
    users = _Users(name for _, _, text, _ in texts for name in _HOME.findall(text))
    bare = any(item.path == "" for item in checkpoint.state_dicts)
    inside = [item.path for item in checkpoint.state_dicts] + [item.path for item in optimizers(graph)]
    for entry in checkpoint.survey.entries if not bare and "args" in kinds else ():
        if (
            _ARGUMENTS.search(entry.key)
            and only.match(entry.path)
            and not any(within(path, entry.path) for path in inside)
        ):
            kind = class_name(graph, entry.ref)
            found.append(Finding("args", entry.path, f"training arguments, {kind}", entry.ref, None))
    # A text that stands at several places is one object, and changes at all of them.
    seen: set[Ref] = set()
    for path, ref, text, source in texts:
        told = _private(path, text, source, users, kinds) if ref not in seen and only.match(path) else None
        if told is not None:
            seen.add(ref)
            shown = "a module's source" if told[0] == "sources" else repr(cut(text))
            found.append(Finding(told[0], path, shown, ref, told[1]))
    return _apart(graph, found)


def _private(path: str, text: str, source: bool, users: _Users, kinds: Collection[Kind]) -> tuple[Kind, str] | None:
    """What is private in a text, and the text without it; one text may hold a path and a name."""
    if source:
        return ("sources", "") if text and "sources" in kinds else None
    new = without_paths(text) if "paths" in kinds else text
    kind: Kind = "users" if new == text else "paths"
    if "users" in kinds:
        last = path.rpartition(".")[2]
        unnamed = _without_users(new, users)
        if unnamed != new:
            new = unnamed
        elif new == text and text and _NAMED.search(last) and text.lower() not in {*_COMMON, "host"}:
            new = "host" if re.search("host|node|machine", last, re.I) else "user"
    return (kind, new) if new != text else None


def _without_users(text: str, users: _Users) -> str:
    """The text with "user" in place of each name that is a word of its own; of two that begin alike the longer."""
    lower, parts, at = text.lower(), list[str](), 0
    for begin in _BEGINNING.finditer(lower) if users.names and len(lower) == len(text) else ():
        start = begin.start()
        for size in users.sizes.get(begin.group(), ()) if start >= at else ():
            if lower[start : start + size] in users.names and not _WORD.match(lower, start + size):
                parts += [text[at:start], "user"]
                at = start + size
                break
    return "".join((*parts, text[at:]))


def _apart(graph: Graph, found: Sequence[Finding]) -> list[Finding]:
    """The findings with other new texts for keys that would become one with another of their mapping."""
    new = {item.ref: item.new for item in found if item.new is not None}
    for ref in graph.reachable() if new else ():
        keys = [key for key, _ in mapping(graph, ref) or ()]
        if not any(key in new for key in keys):
            continue
        taken = {graph.nodes[key] for key in keys if key not in new}
        for key in dict.fromkeys(key for key in keys if key in new):
            base, number = new[key], 1
            while new[key] in taken:
                number += 1
                new[key] = f"{base} {number}"
            taken.add(new[key])
    return [item._replace(new=new.get(item.ref)) if item.new is not None else item for item in found]


def without_paths(text: str) -> str:
    """The text with the last part in place of each absolute path."""
    if "/" not in text and "\\" not in text:
        return text
    if _WHOLE.match(text) and "://" not in text:
        return _last(text)
    return _PATH.sub(lambda found: _last(found.group()), text)


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "."


def _texts(graph: Graph) -> Iterator[tuple[str, Ref, str, bool]]:
    """(path, reference, text, is it a source?) of every string that is a value or a key, each place once."""
    nodes = graph.nodes
    seen = bytearray(len(nodes))
    work: list[tuple[Ref, str]] = [(graph.root, "")]
    while work:
        ref, path = work.pop()
        node = nodes[ref]
        if type(node) is str:
            yield path, ref, node, False
            continue
        if seen[ref]:
            continue
        seen[ref] = 1
        if type(node) is bytes:
            decoded = node.decode("utf-8", "replace")
            if _is_text(decoded):
                yield path, ref, decoded, False
            continue
        if isinstance(node, Call) and _PATHLIB.match(class_name(graph, ref)):
            parts = [str(nodes[part]) for part in elements(nodes[node.args])]
            yield path, node.args, "/".join(parts).replace("//", "/", 1), False
            continue
        if isinstance(node, Persistent):
            pid = nodes[node.pid]
            if type(pid) is tuple and len(pid) == 4 and nodes[pid[0]] == "module":
                # (module, class, file, source): torch/serialization.py, persistent_id in _legacy_save.
                for part in pid[2:]:
                    text = nodes[part]
                    if type(text) is str:
                        yield path, part, text, True
            continue
        below = list(_below(graph, ref, bounded(path, ref)))
        work += reversed(below)


def _is_text(text: str) -> bool:
    """Are these bytes a text? What is none is left alone: a checkpoint within the checkpoint, the data of an array."""
    return not _CONTROL.search(text)


def _below(graph: Graph, ref: Ref, path: str) -> Iterator[tuple[Ref, str]]:
    node = graph.nodes[ref]
    items = mapping(graph, ref)
    if items is not None:
        for step, value, key in as_children(graph, items):
            inner, text = joined(path, step), graph.nodes[key]
            if type(text) is tuple or (type(text) is str and without_paths(text) != text):
                yield key, inner
            yield value, inner
    elif isinstance(node, tuple | List | Set | FrozenSet):
        held: Sequence[Ref] = node if isinstance(node, tuple) else node.items
        yield from ((part, f"{path}[{number}]") for number, part in enumerate(held))
    if isinstance(node, Call):
        name = callable_name(graph, node.func)
        parts = elements(graph.nodes[node.args])
        if name in _WITH_STATE:
            yield from ((part, path) for part in parts[3:])
        elif name == "_codecs.encode":  # how protocol 2 writes bytes
            yield from ((part, path) for part in parts[:1] if _is_text(str(graph.nodes[part])))
        elif items is None and not name.startswith("torch._utils."):
            yield node.func, path
            yield from ((part, path) for part in parts)
        yield from ((part, f"{path}[{number}]") for number, part in enumerate(node.items))
        for step, value, _ in as_children(graph, attributes(graph, node)):
            yield value, joined(path, step)
