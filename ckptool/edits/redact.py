"""Redact what a published file should not reveal: paths, user and host names, sources, training arguments.

That is in the object, and in the texts beside it: headers, extra records and comments of archives, files of the folder.
A text that an edit rewrites can be redacted. Any other text stays, and is listed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, Literal, TypeAlias, get_args

from ..base.addresses import is_remote
from ..base.errors import CkptoolError, TargetError
from ..base.globs import MATCH_ALL, Globs, Patterns
from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import cut, join_limited
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import callable_name, class_name, list_items, mapping
from ..checkpoint.paths import bounded, children, joined, within
from ..checkpoint.tensors import RebuildCall
from ..files.archives import read_bytes
from ..files.sources import FolderSource
from ..files.zips.reader import content_chunks
from ..formats.opening import open_checkpoint, takes_path
from ..pickles.nodes import Call, Graph, Persistent, Ref
from .entries import drop_entries
from .optimizers import optimizers
from .sanitize.companions import content

Kind: TypeAlias = Literal["paths", "users", "sources", "args"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

#: An absolute path within a text. It has two steps or more, so that "/" and "a/b" do not match, and is not the end of a
#: URL.
_PATH: Final = regex(
    r"(?<![\w.:/\\~-])(?:~|/(?=[\w.@+-]+/))(?:[\w.@+-]*/)+[\w.@+-]*"
    r"|(?<![\w])[A-Za-z]:(?:\\|/(?!/))(?:[^\\/:*?\"<>|\s]+[\\/])*[^\\/:*?\"<>|\s]*"
    r"|\\\\[\w.-]+\\[^\s:*?\"<>|]+"
)
#: A text that is a single absolute path, which may contain spaces.
_WHOLE: Final = regex(r"(?:/(?:[^/\n]+/)+[^/\n]*|[A-Za-z]:[\\/][^\n]*)\Z")
#: A string of JSON, and the colon after a key.
_LITERAL: Final = regex(r'("(?:[^"\\\n]|\\.)*")(\s*:)?')
#: A path that contains a user's name.
_HOME: Final = regex(
    r"(?:/home|/Users|/export/home|[A-Za-z]:\\+(?:Users|Documents and Settings))(?:/|\\+)([^/\\\s\"']+)"
)
#: Names of entries that hold the name of a user or machine.
_NAMED: Final = regex(r"(?:\A|[_.-])(?:user(?:_?name)?|host(?:_?name)?|node_?name|machine|login|email)\Z", re.I)
#: Top-level entries with training arguments.
_ARGUMENTS: Final = regex(
    r"(?:\A|_)(?:args?|arguments|argv|opts?|options|cfg|configs?|hparams|hyper_?parameters|hyper_?params|params_dict|cmd"
    r"|command(?:_line)?|namespace)\Z",
    re.I,
)
#: Where a user's name may begin in a text: at a word, or at a character outside of words.
_BEGINNING: Final = regex("(?<![a-z0-9])(?:[a-z0-9]+|[^a-z0-9])")
_WORD: Final = regex("[a-z0-9]")
#: Names found on every machine, which reveal nothing.
_COMMON: Final = frozenset(("root", "user", "ubuntu", "runner", "shared", "public", "default", "work", "data"))
_PATHLIB: Final = regex(r"pathlib(?:\._local)?\.(?:Pure)?(?:Posix|Windows)?Path\Z")


class _Users:
    """Users' names in lower case, and their lengths by first word, longest first."""

    def __init__(self, names: Iterable[str]) -> None:
        # Linux allows 32 characters, Windows 256.
        self.names = {name.lower() for name in names if len(name) <= 256} - _COMMON
        lengths: dict[str, set[int]] = {}
        for name in self.names:
            lengths.setdefault(_BEGINNING.findall(name)[0], set()).add(len(name))
        self.lengths = {beginning: sorted(of, reverse=True) for beginning, of in lengths.items()}


class PrivateItem(NamedTuple):
    """Something private: its kind, path, description, and holder; ``new`` replaces it, None drops its entry."""

    kind: Kind
    path: str
    what: str
    ref: Ref  # -1 for an item that is not in the object
    new: str | None
    holder: Text | None = None


@takes_path
def redact(
    checkpoint: Checkpoint, kinds: Kind | Sequence[Kind] = KINDS, *, include: Patterns = (), exclude: Patterns = ()
) -> Checkpoint:
    """Redact what ``private_and_left`` finds for these kinds.

    Absolute paths keep their last part. Users and hosts become "user" and "host", sources become empty, and entries
    with training arguments are dropped. Headers and the files of a folder are included. ``include`` and ``exclude``
    choose by path. No old bytes stay in the output; texts that stay are noted. Raise TargetError for an unknown kind.

    >>> ckptool.redact("args.pth").changes[0].words
    'dropped args'
    """
    # A string is one kind of data, not one kind per letter.
    kinds = [kinds] if isinstance(kinds, str) else kinds
    _refuse_unknown(kinds)
    items, left = private_and_left(checkpoint, kinds, only=Globs(include, exclude))
    before = checkpoint
    checkpoint = _with_texts(checkpoint, [item for item in items if item.holder is not None], left, kinds)
    items = [item for item in items if item.holder is None]
    if not items:
        nothing = Change("redact", "", 0, 0, f"nothing private is recognised: {', '.join(kinds)}")
        return _laid_out(checkpoint, checkpoint.graph, [nothing] if checkpoint is before else [])
    names = [item.path for item in items if item.new is None]
    if names:
        gone = {entry.key for entry in checkpoint.survey.entries if entry.path in names}
        summary = f"dropped {join_limited(names)}"
        checkpoint = drop_entries(checkpoint, gone, [Change("redact-args", "", len(names), 0, summary)])
        items = [item for item in items if not any(within(item.path, name) for name in names)]
    editor = GraphEditor(checkpoint.graph)
    changes = []
    for item in items:
        if item.new is None:
            continue
        node = checkpoint.graph.nodes[item.ref]
        if type(node) is tuple:  # the parts of a pathlib object
            editor.changed[item.ref] = (editor.add(item.new),)
        else:
            editor.changed[item.ref] = item.new.encode() if type(node) is bytes else item.new
        changes.append(Change(f"redact-{item.kind}", item.path, 1, 0, f"{item.what} -> {cut(item.new)!r}"))
    return _laid_out(checkpoint, editor.done(), changes)


def _laid_out(checkpoint: Checkpoint, graph: Graph, changes: Sequence[Change]) -> Checkpoint:
    """Return the edited checkpoint, laid out again without any private leftovers.

    A zip loses the bytes between records, extra records, comments, unreachable objects and its root folder's name,
    which is often a file name. A legacy file has none of these. Unlike a zip it may hold module sources.
    """
    is_zip = checkpoint.container.keeps_format
    return checkpoint.changed(graph, changes, needs_relayout=is_zip, root="archive" if is_zip else "")


def parse_kinds(text: str) -> list[str]:
    """Parse kinds separated by commas; ``all`` is every kind. Raise TargetError for an unknown kind."""
    kinds: list[str] = [*KINDS] if text == "all" else [kind.strip() for kind in text.split(",")]
    _refuse_unknown(kinds)
    return kinds


def _refuse_unknown(kinds: Iterable[str]) -> None:
    if unknown := next((kind for kind in kinds if kind not in KINDS), None):
        raise TargetError(f"{unknown!r} cannot be redacted", next=f"one of {', '.join(KINDS)}")


def private_and_left(
    checkpoint: Checkpoint, kinds: Collection[Kind] = KINDS, *, only: Globs = MATCH_ALL
) -> tuple[list[PrivateItem], list[str]]:
    """Return everything private of these kinds, in file order, and where something private may stay."""
    graph = checkpoint.graph
    items: list[PrivateItem] = []
    texts = list(_texts(graph))
    beside = list(texts_beside(checkpoint))
    every = (*(text for _, _, text, _ in texts), *(each.text for each in beside if each.use != "pickle"))
    users = _Users(name for text in every for name in _HOME.findall(text))
    keys = {str(graph.nodes[key]) for item in checkpoint.state_dicts if item.path == "" for key, _ in item.items}
    inside = [item.path for item in checkpoint.state_dicts] + [item.path for item in optimizers(graph)]
    for entry in checkpoint.survey.entries if "args" in kinds else ():
        chosen = _ARGUMENTS.search(entry.key) and entry.key not in keys and only.match("", entry.path)
        if chosen and not any(within(p, entry.path) for p in inside):
            message = f"training arguments, {class_name(graph, entry.ref)}"
            items.append(PrivateItem("args", entry.path, message, entry.ref, None))
    seen: set[Ref] = set()
    for path, ref, text, is_source in texts:
        result = _redacted(path, text, is_source, users, kinds) if ref not in seen and only.match("", path) else None
        if result is not None:
            seen.add(ref)
            message = "a module's source" if is_source else repr(cut(text))
            items.append(PrivateItem(result[0], path, message, ref, result[1]))
    items = _with_distinct_keys(graph, items)
    left: list[str] = []
    for each in beside:
        if only.match("", each.path):
            found, stays = _beside(each, users, kinds)
            items += found
            left += stays
    return items, left


def _beside(each: Text, users: _Users, kinds: Collection[Kind]) -> tuple[list[PrivateItem], list[str]]:
    """Return what is private in a text beside the object, and what stays there."""
    path = each.path
    if each.use == "unread":
        return [], [f"{path} is not read, and may hold anything"]
    if each.use == "pickle":
        try:
            with open_checkpoint(each.text) as opened:
                found, left = private_and_left(opened, kinds)
        except CkptoolError:
            return [], [f"{path} is not read, and may hold anything"]
        inner = [item._replace(path=f"{path}: {item.path}".rstrip(": "), holder=each) for item in found]
        return inner, [f"{path}: {text}" for text in left]
    if each.use == "header" and "args" in kinds and _ARGUMENTS.search(each.name):
        return [PrivateItem("args", path, "training arguments, a text", -1, None, each)], []
    result = _redacted(each.name, each.text, False, users, kinds, names=each.use != "json")
    left = []
    if each.use == "header" and _redacted("", each.name, False, users, kinds) is not None:
        left.append(f"{path}: the name of this entry is not changed")
    if (
        each.use == "json"
        and "users" in kinds
        and _without_users(after := result[1] if result else each.text, users) != after
    ):
        left.append(f"{path} still has the name of a user in keys or words, which may mean something else")
    if result is None:
        return [], left
    if each.use == "kept":
        return [], [f"{path} holds {_examples(each.text, users)}, which is not changed"]
    what = repr(cut(each.text)) if each.use == "header" else _examples(each.text, users)
    new = None if each.use == "removed" else result[1]
    return [PrivateItem(result[0], path, what, -1, new, each)], left


def _examples(text: str, users: _Users) -> str:
    found = [match.group() for match in _PATH.finditer(text)]
    found = found or [word for word in text.split() if _without_users(word, users) != word]
    return join_limited([repr(cut(each)) for each in dict.fromkeys(found)], most=3)


def _with_texts(
    checkpoint: Checkpoint, items: Sequence[PrivateItem], left: Sequence[str], kinds: Sequence[Kind]
) -> Checkpoint:
    """Return the checkpoint with new texts in its header and in the files beside it, and notes on what stays."""
    texts, companions, changes = dict[str, str | None](), dict(checkpoint.companions), list[Change]()
    for item in items:
        assert item.holder is not None
        use, file, name, _ = item.holder
        if use == "header":
            texts[name] = item.new
        elif use == "json":
            companions[file] = (item.new or "").encode()
        elif use == "pickle" and file not in companions:
            with open_checkpoint(item.holder.text) as opened:
                companions[file] = content(redact(opened, kinds))
        short = use in ("header", "pickle") and item.new is not None
        how = f" -> {cut(item.new)!r}" if short and item.new is not None else ", removed" if item.new is None else ""
        changes.append(Change(f"redact-{item.kind}", item.path, 1, 0, f"{item.what}{how}"))
    if left:
        changes.append(Change("redact", "", 0, len(left), f"something private may stay: {'; '.join(left)}"))
    if not changes:
        return checkpoint
    return checkpoint.with_texts(texts, changes).replace(companions=companions)


def _redacted(
    path: str, text: str, is_source: bool, users: _Users, kinds: Collection[Kind], *, names: bool = True
) -> tuple[Kind, str] | None:
    """Return the kind and the redacted text, or None if nothing is private; a text may contain both a path
    and a name. Without ``names``, a user's name is replaced only in sentences and paths of JSON: other words may be
    keywords.
    """
    if is_source:
        return ("sources", "") if text and "sources" in kinds else None
    new = without_paths(text) if "paths" in kinds else text
    kind: Kind = "users" if new == text else "paths"
    if "users" in kinds:
        last = path.rpartition(".")[2]
        unnamed = _without_users(new, users) if names else _in_sentences(new, users)
        if unnamed != new:
            new = unnamed
        elif new == text and text and _NAMED.search(last) and text.lower() not in {*_COMMON, "host"}:
            new = "host" if re.search("host|node|machine", last, re.I) else "user"
    return (kind, new) if new != text else None


def _without_users(text: str, users: _Users) -> str:
    """Replace each user's name that is a separate word by "user"; prefer the longest name."""
    lower, parts, at = text.lower(), list[str](), 0
    for begin in _BEGINNING.finditer(lower) if users.names and len(lower) == len(text) else ():
        start = begin.start()
        for size in users.lengths.get(begin.group(), ()) if start >= at else ():
            if lower[start : start + size] in users.names and not _WORD.match(lower, start + size):
                parts += [text[at:start], "user"]
                at = start + size
                break
    return "".join((*parts, text[at:]))


def _in_sentences(text: str, users: _Users) -> str:
    """Replace users' names in the strings of JSON that are no keys and no single words."""

    def replaced(match: re.Match[str]) -> str:
        word = match[2] or not re.search(r"[^\w.\"-]", match[1])
        return match[0] if word else _without_users(match[0], users)

    return _LITERAL.sub(replaced, text)


def _with_distinct_keys(graph: Graph, items: Sequence[PrivateItem]) -> list[PrivateItem]:
    """Number redacted keys that would otherwise equal another key of their mapping."""
    new = {item.ref: item.new for item in items if item.new is not None}
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
    return [item._replace(new=new.get(item.ref)) if item.new is not None else item for item in items]


def without_paths(text: str) -> str:
    """Replace each absolute path in a text by its last part."""
    if "/" not in text and "\\" not in text:
        return text
    if _WHOLE.match(text) and "://" not in text:
        return _last_part(text)
    if text.lstrip()[:1] in ("{", "["):  # JSON escapes backslashes
        text = _LITERAL.sub(lambda match: _in_literal(match[1]) + (match[2] or ""), text)
    return _PATH.sub(lambda match: _last_part(match.group()), text)


def _in_literal(literal: str) -> str:
    try:
        text: str = json.loads(literal)
    except ValueError:
        return literal
    is_json = text[:1] in ("{", "[")
    new = _PATH.sub(lambda match: _last_part(match.group()), text) if is_json else without_paths(text)
    return json.dumps(new, ensure_ascii=literal.isascii()) if new != text else literal


def _last_part(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1] or "."


def _texts(graph: Graph) -> Iterator[tuple[str, Ref, str, bool]]:
    """Yield (path, reference, text, whether it is source code) for every string, whether a value or a key."""
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
            if not CONTROL.search(decoded):
                yield path, ref, decoded, False
        elif isinstance(node, Call) and _PATHLIB.match(class_name(graph, ref)):
            parts = [str(nodes[part]) for part in list_items(nodes[node.args])]
            yield path, node.args, "/".join(parts).replace("//", "/", 1), False
        elif isinstance(node, Persistent):
            pid = nodes[node.pid]
            if type(pid) is tuple and len(pid) == 4 and nodes[pid[0]] == "module":
                # (module, class, file, source): torch/serialization.py, persistent_id in _legacy_save.
                yield from ((path, part, text, True) for part in pid[2:] if type(text := nodes[part]) is str)
        else:
            work += reversed(list(_below(graph, ref, bounded(path, ref))))


def _below(graph: Graph, ref: Ref, path: str) -> Iterator[tuple[Ref, str]]:
    node = graph.nodes[ref]
    name = callable_name(graph, node.func) if isinstance(node, Call) else ""
    if isinstance(node, Call) and name.startswith("torch._utils."):
        # Of the arguments of a tensor, only the attributes that were set on it hold texts of the user.
        call = RebuildCall(ref, ref, name, node.func, node.args, tuple(list_items(graph.nodes[node.args])))
        yield from [(call.state, path)] if call.state >= 0 else []
    elif isinstance(node, Call):
        yield node.func, path  # a class with its source, in old files
    for child in children(graph, ref):
        is_argument = child.key < 0 and child.step[:1] == "("
        inner = path if is_argument else joined(path, child.step)
        text = graph.nodes[child.key] if child.key >= 0 else None
        if type(text) is tuple or (type(text) is str and without_paths(text) != text):
            yield child.key, inner
        if not is_argument or not name.startswith("torch._utils."):
            encoded = name == "_codecs.encode"  # pickle protocol 2 writes bytes this way
            if not encoded or (child.step == "(0)" and not CONTROL.search(str(graph.nodes[child.ref]))):
                yield child.ref, inner


#: What becomes of a text: it is rewritten, removed with its record, kept, or "pickle" for a file with an object.
Use: TypeAlias = Literal["header", "json", "removed", "kept", "pickle", "unread"]

#: The largest text and the largest pickle beside the weights that are read.
_LARGEST: Final = 16 << 20
#: Files whose words are vocabulary: a change would change the tokens.
_VOCABULARY: Final = regex(
    r"(?:tokenizer|vocab|added_tokens)\.json\Z|(?:vocab|merges)\.txt\Z|.*\.(?:model|tiktoken|spm)\Z"
)
#: The end of a zip without its comment, whose length is in the last two bytes.
_ZIP_END: Final = b"PK\x05\x06"
_END_SIZE: Final = 22
#: Characters that no text contains.
CONTROL: Final = regex("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufffd]")


class Text(NamedTuple):
    """A text beside the object. ``file`` is its file in a folder, or "", and ``name`` its entry or record."""

    use: Use
    file: str
    name: str
    text: str

    @property
    def path(self) -> str:
        """Where it is, for people."""
        name = f"__metadata__.{self.name}" if self.use == "header" else self.name
        return ": ".join(filter(None, (self.file, name)))


def texts_beside(checkpoint: Checkpoint) -> Iterator[Text]:
    """Yield every text beside the object, and files that may hold texts and are not read."""
    if checkpoint.texts is None:
        for file, entries in checkpoint.container.texts():
            yield from (Text("header", file, name, text) for name, text in entries.items())
    else:
        yield from (Text("header", "", name, text) for name, text in checkpoint.texts.items())
    if isinstance(checkpoint.source, FolderSource):
        for path in (*checkpoint.source.beside, *checkpoint.source.links):
            yield from _in_file(checkpoint, path)
    else:
        yield from _in_archive(checkpoint)


def _in_file(checkpoint: Checkpoint, path: str) -> Iterator[Text]:
    name = os.path.basename(path)
    if _VOCABULARY.match(name):
        return
    data = checkpoint.companions.get(name)
    try:
        if data is None and not is_remote(path) and os.path.getsize(path) > _LARGEST:
            yield Text("unread", name, "", "")
            return
        data = read_bytes(path, _LARGEST) if data is None else data
    except (CkptoolError, OSError):
        yield Text("unread", name, "", "")
        return
    text = data.decode("utf-8", "replace")
    if CONTROL.search(text):
        yield Text("pickle" if name not in checkpoint.companions else "unread", name, "", path)
    else:
        yield Text("json" if name.endswith((".json", ".jsonl")) else "kept", name, "", text)


def _in_archive(checkpoint: Checkpoint) -> Iterator[Text]:
    """Yield records without a storage and the comment of a zip. A new layout has neither; other edits keep them."""
    source, container = checkpoint.source, checkpoint.container
    kept = not container.drops_records
    use: Use = "kept" if kept else "removed"
    begin = max(source.size - _END_SIZE - 0xFFFF, 0)
    tail = source.read(begin, source.size - begin)
    end, comment = tail[at:][:_END_SIZE] if (at := tail.rfind(_ZIP_END)) >= 0 else b"", tail[at + _END_SIZE :]
    if end and comment and int.from_bytes(end[-2:], "little") == len(comment):
        yield Text(use, "", "the comment of the zip", comment.decode("utf-8", "replace"))
    for record in container.records() if container.keeps_format or kept else ():
        if record.key or (not kept and record.name.endswith("/data.pkl")):
            continue
        if record.size > _LARGEST:
            yield Text("unread", "", record.name, "")
            continue
        data = b"".join(content_chunks(record.span, record.size, record.compressed, record.name))
        text = f"{record.name}\n{data.decode('utf-8', 'replace')}" if kept else data.decode("latin-1")
        yield Text(use, "", record.name, text)
