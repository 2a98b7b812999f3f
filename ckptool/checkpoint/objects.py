"""Python's own conventions over a pickle graph: global names, mappings, attributes, scalars, paths."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final, TypeAlias

from ..pickles import opcodes as op
from ..pickles.nodes import Call, Dict, FrozenSet, Global, Graph, Instance, List, Node, Persistent, Ref, Set, children

Scalar: TypeAlias = "bool | int | float | str | None"

#: Python 2 names that unpicklers replace (``_compat_pickle``), as far as they stand in checkpoints.
_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "Queue": "queue",
    "SocketServer": "socketserver",
    "ConfigParser": "configparser",
    "repr": "reprlib",
    "tkFileDialog": "tkinter.filedialog",
    "tkSimpleDialog": "tkinter.simpledialog",
    "tkColorChooser": "tkinter.colorchooser",
    "tkCommonDialog": "tkinter.commondialog",
    "Dialog": "tkinter.dialog",
    "Tkdnd": "tkinter.dnd",
    "tkFont": "tkinter.font",
    "tkMessageBox": "tkinter.messagebox",
    "ScrolledText": "tkinter.scrolledtext",
    "Tkconstants": "tkinter.constants",
    "Tix": "tkinter.tix",
    "ttk": "tkinter.ttk",
    "Tkinter": "tkinter",
    "markupbase": "_markupbase",
    "_winreg": "winreg",
    "thread": "_thread",
    "dummy_thread": "_dummy_thread",
    "dbhash": "dbm.bsd",
    "dumbdbm": "dbm.dumb",
    "dbm": "dbm.ndbm",
    "gdbm": "dbm.gnu",
    "xmlrpclib": "xmlrpc.client",
    "SimpleXMLRPCServer": "xmlrpc.server",
    "httplib": "http.client",
    "htmlentitydefs": "html.entities",
    "HTMLParser": "html.parser",
    "Cookie": "http.cookies",
    "cookielib": "http.cookiejar",
    "BaseHTTPServer": "http.server",
    "test.test_support": "test.support",
    "commands": "subprocess",
    "urlparse": "urllib.parse",
    "robotparser": "urllib.robotparser",
    "urllib2": "urllib.request",
    "anydbm": "dbm",
    "_abcoll": "collections.abc",
    "cPickle": "pickle",
    "_elementtree": "xml.etree.ElementTree",
    "FileDialog": "tkinter.filedialog",
    "SimpleDialog": "tkinter.simpledialog",
    "DocXMLRPCServer": "xmlrpc.server",
    "SimpleHTTPServer": "http.server",
    "CGIHTTPServer": "http.server",
    "UserDict": "collections",
    "UserList": "collections",
    "UserString": "collections",
    "whichdb": "dbm",
    "StringIO": "io",
    "cStringIO": "io",
}
_NAMES = {
    ("__builtin__", "xrange"): "builtins.range",
    ("__builtin__", "reduce"): "functools.reduce",
    ("__builtin__", "intern"): "sys.intern",
    ("__builtin__", "unichr"): "builtins.chr",
    ("__builtin__", "unicode"): "builtins.str",
    ("__builtin__", "long"): "builtins.int",
    ("__builtin__", "basestring"): "builtins.str",
    ("itertools", "izip"): "builtins.zip",
    ("itertools", "imap"): "builtins.map",
    ("itertools", "ifilter"): "builtins.filter",
    ("itertools", "ifilterfalse"): "itertools.filterfalse",
    ("itertools", "izip_longest"): "itertools.zip_longest",
    ("UserDict", "IterableUserDict"): "collections.UserDict",
    ("UserList", "UserList"): "collections.UserList",
    ("UserString", "UserString"): "collections.UserString",
    ("whichdb", "whichdb"): "dbm.whichdb",
    ("_socket", "fromfd"): "socket.fromfd",
    ("_multiprocessing", "Connection"): "multiprocessing.connection.Connection",
    ("multiprocessing.process", "Process"): "multiprocessing.context.Process",
    ("multiprocessing.forking", "Popen"): "multiprocessing.popen_fork.Popen",
    ("urllib", "ContentTooShortError"): "urllib.error.ContentTooShortError",
    ("urllib", "getproxies"): "urllib.request.getproxies",
    ("urllib", "pathname2url"): "urllib.request.pathname2url",
    ("urllib", "quote_plus"): "urllib.parse.quote_plus",
    ("urllib", "quote"): "urllib.parse.quote",
    ("urllib", "unquote_plus"): "urllib.parse.unquote_plus",
    ("urllib", "unquote"): "urllib.parse.unquote",
    ("urllib", "url2pathname"): "urllib.request.url2pathname",
    ("urllib", "urlcleanup"): "urllib.request.urlcleanup",
    ("urllib", "urlencode"): "urllib.parse.urlencode",
    ("urllib", "urlopen"): "urllib.request.urlopen",
    ("urllib", "urlretrieve"): "urllib.request.urlretrieve",
    ("urllib2", "HTTPError"): "urllib.error.HTTPError",
    ("urllib2", "URLError"): "urllib.error.URLError",
}

#: What makes an ordered or an exact mapping when it is called without arguments.
_DICTS = frozenset(("collections.OrderedDict", "builtins.dict"))
_COUNTER = "collections.Counter"
#: Classes that copy the mapping which they are called with, and which argument that is.
_COPYING = {"collections.OrderedDict": 0, "builtins.dict": 0, _COUNTER: 0, "collections.defaultdict": 1}
#: Kinds of keys of which two are one only when they are the same text, or the same number.
_DISTINCT: Final = frozenset((str, int))
#: Kinds that hold nothing.
_PLAIN: Final = frozenset((str, int, bool, float, bytes, type(None)))
#: Mappings made of mappings that are followed.
_NESTED = 4

#: Parts of one key that are looked at; beyond that, as for keys of unknown classes, it is equal to itself alone.
_KEY_PARTS: Final = 1_000
#: Functions that give another object with every call, whatever they are given.
_FRESH: Final = frozenset(
    (
        *("collections.OrderedDict", "collections.defaultdict", "collections.Counter", "collections.deque"),
        *("builtins.dict", "builtins.list", "builtins.set", "builtins.bytearray", "builtins.object"),
        *("copyreg._reconstructor", "copyreg.__newobj__", "copyreg.__newobj_ex__"),
        *("torch.nn.parameter.Parameter", "torch.autograd.variable.Variable", "torch.storage._load_from_bytes"),
    )
)
#: Calls that make a value of a list.
_VALUES: Final = frozenset(("torch.Size", "builtins.tuple", "builtins.frozenset"))
#: Names of torch that are one object: ``torch.float is torch.float32``.
_SAME_NAMES: Final = {
    "torch.float": "torch.float32",
    "torch.double": "torch.float64",
    "torch.half": "torch.float16",
    "torch.short": "torch.int16",
    "torch.int": "torch.int32",
    "torch.long": "torch.int64",
    "torch.chalf": "torch.complex32",
    "torch.cfloat": "torch.complex64",
    "torch.cdouble": "torch.complex128",
}


def mapped_name(node: Global) -> str:
    """``module.name`` as Python 3 resolves it, old Python 2 names replaced."""
    full = _NAMES.get((node.module, node.name))
    if full is not None:
        return full
    return f"{_MODULES.get(node.module, node.module)}.{node.name}"


def callable_name(graph: Graph, ref: Ref) -> str:
    """The mapped name of what a call calls, "" when it is no global.

    The legacy format wraps the classes of modules in a persistent id, ('module', class, file, source).
    """
    node = graph.nodes[ref]
    if isinstance(node, Persistent):
        pid = graph.nodes[node.pid]
        node = graph.nodes[pid[1]] if type(pid) is tuple and len(pid) == 4 else None
    return mapped_name(node) if isinstance(node, Global) else ""


def class_name(graph: Graph, ref: Ref) -> str:
    """What a node is, in a word or a dotted name: "dict", "str", "argparse.Namespace", "tensor" is not known here."""
    node = graph.nodes[ref]
    if isinstance(node, Call):
        name = callable_name(graph, node.func)
        if name in ("copyreg._reconstructor", "copyreg.__newobj__"):
            args = graph.nodes[node.args]
            if type(args) is tuple and args:
                return callable_name(graph, args[0]) or "object"
        if name == "_codecs.encode":
            return "bytes"
        return "OrderedDict" if name == "collections.OrderedDict" else name.removeprefix("builtins.") or "object"
    if isinstance(node, Global):
        return "global"
    if node is None:
        return "None"
    return type(node).__name__.lower()


def is_ordered_dict(graph: Graph, ref: Ref) -> bool:
    """Is it an OrderedDict?"""
    node = graph.nodes[ref]
    return isinstance(node, Call) and callable_name(graph, node.func) == "collections.OrderedDict"


def mapping(graph: Graph, ref: Ref) -> list[tuple[Ref, Ref]] | None:
    """The (key, value) references of a mapping, or None.

    A mapping is a dict, an OrderedDict or Counter in any form that ``given_pairs`` follows (Python 2 writes
    ``OrderedDict([[k, v], ...])``), or another object that was filled by key, such as a dict subclass. Of a key that
    is written twice the last value counts, at the first place, as in Python.
    """
    node = graph.nodes[ref]
    if isinstance(node, Dict):
        return last_pairs(graph, node.pairs)
    if not isinstance(node, Call):
        return None
    given = given_pairs(graph, node)
    if given is not None:
        return last_pairs(graph, [*given, *node.pairs])
    return last_pairs(graph, node.pairs) if node.pairs or is_ordered_dict(graph, ref) else None


def plain_parts(graph: Graph, ref: Ref) -> list[Node] | None:
    """Keys and values in turn of a dict of texts, numbers, bytes and None alone; None for anything else.

    There is nothing in it to go to, and a file of some megabytes can hold hundreds of thousands of such dicts.
    """
    node = graph.nodes[ref]
    if type(node) is not Dict:
        return None
    parts = [graph.nodes[part] for part in node.pairs]
    return parts if _PLAIN.issuperset(map(type, parts)) else None


def holds_constants(graph: Graph, ref: Ref) -> bool:
    """Is it a container of texts, numbers, bytes and None alone? One can stand at a thousand places."""
    known: bool | None = graph.memo.get(("constants", ref))
    if known is None:
        node = graph.nodes[ref]
        held = children(node) if isinstance(node, tuple | List | Dict | Set | FrozenSet) else None
        known = held is not None and _PLAIN.issuperset([type(graph.nodes[part]) for part in held])
        graph.memo["constants", ref] = known
    return known


def last_pairs(graph: Graph, pairs: Sequence[Ref]) -> list[tuple[Ref, Ref]]:
    """(key, value) of alternating references as a dict ends up with them: the first of equal keys, the last value."""
    nodes = graph.nodes
    refs, values = pairs[::2], pairs[1::2]
    keys = [nodes[ref] for ref in refs]
    if _DISTINCT.issuperset(map(type, keys)) and len(set(keys)) == len(keys):
        return list(zip(refs, values))  # as nearly every mapping: there may be a million of them
    found: dict[Hashable, tuple[Ref, Ref]] = {}
    for ref, value in zip(refs, values):
        name = nodes[ref]
        key = name if type(name) is str else same_key(graph, ref)
        found[key] = (found[key][0] if key in found else ref, value)
    return list(found.values())


def same_key(graph: Graph, ref: Ref) -> Hashable:
    """A value that is equal for two keys where Python calls them equal: 1, True and 1.0 are one key, b"a" is not "a".

    A NaN, an object of an unknown class and what has no hash are equal to themselves alone. What a function gives for
    equal arguments is equal, such as members of an enumeration, but for functions that make new objects each time.
    """
    node = graph.nodes[ref]
    if node is None or isinstance(node, str | int | bytes):
        return node
    if isinstance(node, float):
        return node if node == node else object()  # two objects: a pickler never shares a float
    known = graph.memo.get(("key", ref))
    if known is None:
        try:
            known = _made_key(graph, ref, [_KEY_PARTS])
        except (_LongKeyError, RecursionError):
            known = ("own", ref)
        graph.memo["key", ref] = known
    return known


class _LongKeyError(Exception):
    """A key of more parts than are looked at."""


def _made_key(graph: Graph, ref: Ref, left: list[int]) -> Hashable:
    """What ``same_key`` gives for a key that is made of others, within the budget."""
    node = graph.nodes[ref]
    left[0] -= 1 if not isinstance(node, str | bytes) else 1 + (len(node) >> 10)
    if left[0] < 0:
        raise _LongKeyError
    if node is None or isinstance(node, str | int | bytes):
        return node
    if isinstance(node, float):
        return node if node == node else object()
    if isinstance(node, tuple):
        return ("tuple", *(_made_key(graph, part, left) for part in node))
    if isinstance(node, FrozenSet):
        return ("frozenset", frozenset(_made_key(graph, part, left) for part in node.items))
    if isinstance(node, Global) and node.filling is None:
        name = mapped_name(node)
        return ("global", _SAME_NAMES.get(name, name))
    if isinstance(node, Call) and node.op == op.REDUCE and node.filling is None:
        return _called_key(graph, ref, node, left)
    return ("own", ref)


def _called_key(graph: Graph, ref: Ref, node: Call, left: list[int]) -> Hashable:
    value = constant(graph, ref)
    if value is not None:
        return value if value == value else object()
    device = device_text(graph, ref)
    if device is not None:
        return ("torch.device", device)
    name, args = callable_name(graph, node.func), graph.nodes[node.args]
    if type(args) is not tuple or not args or not name or name in _FRESH or "._rebuild" in name:
        return ("own", ref)
    held = graph.nodes[args[0]]
    if (
        name in ("torch.Size", "builtins.tuple", "builtins.frozenset")
        and len(args) == 1
        and isinstance(held, List | tuple)
    ):
        parts = held if isinstance(held, tuple) else held.items
        made = [_made_key(graph, part, left) for part in parts]
        return ("frozenset", frozenset(made)) if name == "builtins.frozenset" else ("tuple", *made)
    return ("call", name, *(_made_key(graph, part, left) for part in args))


def constant(graph: Graph, ref: Ref) -> bytes | complex | None:
    """The bytes or the complex number that a call makes, as protocols before 3 write them; None for anything else."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or node.filling is not None:
        return None
    name, args = callable_name(graph, node.func), graph.nodes[node.args]
    if type(args) is not tuple:
        return None
    values = [graph.nodes[arg] for arg in args[:3]]
    if name == "builtins.bytes" and not values:
        return b""
    if name == "_codecs.encode" and len(values) == 2 and values[1] in ("latin1", "latin-1") and type(values[0]) is str:
        try:
            return values[0].encode("latin-1")
        except UnicodeEncodeError:
            return None
    if name == "builtins.complex" and len(values) == 2 and all(type(value) in (int, float) for value in values):
        try:
            return complex(*values)  # type: ignore[arg-type]
        except OverflowError:
            return None
    return None


def given_pairs(graph: Graph, node: Call) -> Sequence[Ref] | None:
    """Alternating keys and values that a mapping was made with: its argument is copied when it is called.

    None where it is not a call of a mapping class, or one with an argument that is not followed: see ``unfollowed``.
    """
    place = _COPYING.get(callable_name(graph, node.func))
    if place is None:
        return None
    levels: list[Sequence[Ref]] = []
    inner: Node = node
    for _ in range(_NESTED):
        if not isinstance(inner, Call) or (place := _COPYING.get(callable_name(graph, inner.func))) is None:
            break
        if inner is not node:
            levels.append(inner.pairs)
        args = graph.nodes[inner.args]
        if type(args) is not tuple or inner.op in (op.NEWOBJ, op.NEWOBJ_EX) or len(args) <= place:
            # ``__new__`` of a dict takes any arguments, and leaves them alone.
            return [part for level in reversed(levels) for part in level] if type(args) is tuple else None
        if len(args) > place + 1 or inner.kwargs >= 0:
            return None
        counts = callable_name(graph, inner.func) == _COUNTER
        inner = graph.nodes[args[place]]
        if isinstance(inner, Dict):
            levels.append(inner.pairs)
        elif isinstance(inner, List | tuple) and not (counts and elements(inner)):
            couples = _couples(graph, args[place])
            if couples is None:
                return None
            levels.append(couples)
        else:
            continue
        return levels[0] if len(levels) == 1 else [part for level in reversed(levels) for part in level]
    return None


def _couples(graph: Graph, ref: Ref) -> list[Ref] | None:
    """The elements of the pairs in a list, one behind the other; None where they are no pairs.

    One list can be what a thousand mappings are made of: it is looked through once.
    """
    if ("couples", ref) not in graph.memo:
        couples = [elements(graph.nodes[couple]) for couple in elements(graph.nodes[ref])]
        alike = all(len(couple) == 2 for couple in couples)
        graph.memo["couples", ref] = [part for couple in couples for part in couple] if alike else None
    found: list[Ref] | None = graph.memo["couples", ref]
    return found


def copied_argument(graph: Graph, node: Call) -> int:
    """The place of the argument whose entries a mapping copies when it is made, -1 where none is followed."""
    place = _COPYING.get(callable_name(graph, node.func))
    args = graph.nodes[node.args]
    if place is None or type(args) is not tuple or len(args) <= place or node.op in (op.NEWOBJ, op.NEWOBJ_EX):
        return -1
    return place if given_pairs(graph, node) is not None else -1


def listed_pairs(graph: Graph, node: Call) -> list[Ref] | None:
    """The references of the pairs in ``OrderedDict([[k, v], ...])`` or a tuple of them, else None."""
    if callable_name(graph, node.func) not in _DICTS or node.op in (op.NEWOBJ, op.NEWOBJ_EX):
        return None
    args = graph.nodes[node.args]
    if type(args) is not tuple or len(args) != 1:
        return None
    listed = graph.nodes[args[0]]
    if not isinstance(listed, List | tuple):
        return None
    for pair in elements(listed):
        if len(elements(graph.nodes[pair])) != 2:
            return None
    return list(elements(listed))


def elements(node: Node) -> tuple[Ref, ...]:
    """The references in a list or tuple; nothing for another node."""
    if type(node) is tuple:
        return node
    return tuple(node.items) if isinstance(node, List) else ()


def attributes(graph: Graph, node: Instance) -> list[tuple[Ref, Ref]]:
    """The (name, value) references that BUILD sets: from ``__dict__``, then from slots."""
    found: list[tuple[Ref, Ref]] = []
    parts: tuple[Ref, ...] = ()
    for state in node.states:
        value = graph.nodes[state]
        parts = value if type(value) is tuple and len(value) == 2 else (state,)
        for part in parts:
            found += mapping(graph, part) or []
    if len(node.states) < 2 and len(parts) < 2:
        return found
    return last_pairs(graph, [ref for pair in found for ref in pair])


def scalar(graph: Graph, ref: Ref) -> Scalar:
    """The value of a constant or a string; None also for everything else."""
    node = graph.nodes[ref]
    return node if node is None or isinstance(node, bool | int | float | str) else None


def device_text(graph: Graph, ref: Ref) -> str | None:
    """``cuda:1`` for a ``torch.device`` call, None for anything else."""
    node = graph.nodes[ref]
    if not isinstance(node, Call) or callable_name(graph, node.func) != "torch.device":
        return None
    args = graph.nodes[node.args]
    if type(args) is not tuple or not 1 <= len(args) <= 2:
        return None
    kind = graph.nodes[args[0]]
    if type(kind) is not str:
        return None
    if len(args) == 1:
        return kind
    index = graph.nodes[args[1]]
    # Torch keeps the index in eight bits; Python refuses to print very large numbers.
    return f"{kind}:{index}" if type(index) is int and abs(index) < 1 << 31 else kind if index is None else None


# -- The state of a tensor that holds others: what one rank had of a tensor that is spread over several, for one

#: The class of a local shard; torch 1.10 had it elsewhere.
_SHARDS: Final = frozenset(
    f"torch.distributed.{module}.Shard"
    for module in ("_shard.sharded_tensor.shard", "_sharded_tensor.api", "_shard.sharded_tensor.api")
)


def state_values(graph: Graph, state: Ref) -> Iterator[Ref]:
    """What may be a tensor in the state of a wrapper: the values of a dict, or of (dict, slots), or local shards."""
    node = graph.nodes[state]
    for part in node if type(node) is tuple else (state,):
        yield from (value for _, value in mapping(graph, part) or ())
    yield from (shard["tensor"] for shard in local_shards(graph, state) if "tensor" in shard)


def local_shards(graph: Graph, state: Ref) -> list[dict[str, Ref]]:
    """The shards of a ShardedTensor in its state, (shards, metadata, group, spec, rrefs): "tensor" and "metadata"."""
    parts = graph.nodes[state]
    shards = elements(graph.nodes[parts[0]]) if type(parts) is tuple and parts else ()
    return [named_attributes(graph, shard) for shard in shards if class_name(graph, shard) in _SHARDS]


def named_attributes(graph: Graph, ref: Ref) -> dict[str, Ref]:
    """The attributes of an object by their names; nothing for what is no object."""
    node = graph.nodes[ref]
    pairs = attributes(graph, node) if isinstance(node, Call) else ()
    return {name: value for key, value in pairs if type(name := graph.nodes[key]) is str}
