"""Python's own conventions over a pickle graph: global names, mappings, attributes, scalars, paths."""

from __future__ import annotations

import re
from typing import TypeAlias

from .errors import TargetError
from .pickles.nodes import Call, Dict, Global, Graph, Instance, List, Node, Persistent, Ref

__all__ = [
    "Scalar",
    "attributes",
    "callable_name",
    "class_name",
    "device_text",
    "elements",
    "is_ordered_dict",
    "listed_pairs",
    "mapped_name",
    "mapping",
    "parse_path",
    "scalar",
    "spell_key",
    "within",
]

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

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_STEP = re.compile(r"""\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(-?\d+)\]|\["((?:[^"\\]|\\.)*)"\]""")


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

    A mapping is a dict, an OrderedDict in any of its forms (Python 2 writes
    ``OrderedDict([[k, v], ...])``), or another object that was filled by key, such as a dict subclass.
    """
    node = graph.nodes[ref]
    if isinstance(node, Dict):
        return list(zip(node.pairs[::2], node.pairs[1::2]))
    if not isinstance(node, Call):
        return None
    filled = list(zip(node.pairs[::2], node.pairs[1::2]))
    listed = listed_pairs(graph, node)
    if listed is not None:
        entries = (elements(graph.nodes[pair]) for pair in listed)
        return [(key, value) for key, value in entries] + filled
    return filled if filled or is_ordered_dict(graph, ref) else None


def listed_pairs(graph: Graph, node: Call) -> list[Ref] | None:
    """The references of the [key, value] lists in ``OrderedDict([[k, v], ...])``, else None."""
    if callable_name(graph, node.func) not in _DICTS:
        return None
    args = graph.nodes[node.args]
    if type(args) is not tuple or len(args) != 1:
        return None
    listed = graph.nodes[args[0]]
    if not isinstance(listed, List):
        return None
    for pair in listed.items:
        if len(elements(graph.nodes[pair])) != 2:
            return None
    return list(listed.items)


def elements(node: Node) -> tuple[Ref, ...]:
    """The references in a list or tuple; nothing for another node."""
    if type(node) is tuple:
        return node
    return tuple(node.items) if isinstance(node, List) else ()


def attributes(graph: Graph, node: Instance) -> list[tuple[Ref, Ref]]:
    """The (name, value) references that BUILD sets: from ``__dict__``, then from slots."""
    found: list[tuple[Ref, Ref]] = []
    for state in node.states:
        value = graph.nodes[state]
        parts = value if type(value) is tuple and len(value) == 2 else (state,)
        for part in parts:
            found += mapping(graph, part) or []
    return found


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


def spell_key(base: str, key: Node) -> str:
    """The path of a mapping's entry: ``base.key``, or ``base["a.b"]`` where the key is not a plain word."""
    if isinstance(key, str):
        if _PLAIN_KEY.match(key):
            return f"{base}.{key}" if base else key
        quoted = key.replace("\\", "\\\\").replace('"', '\\"')
        return f'{base}["{quoted}"]'
    if isinstance(key, int) and not isinstance(key, bool) and abs(key) < 1 << 63:
        return f"{base}[{key}]"
    return f"{base}[{key!r}]" if key is None or isinstance(key, bool | float | bytes) else f"{base}[?]"


def within(path: str, outer: str) -> bool:
    """Is something at ``path`` the thing at ``outer``, or in it?"""
    return path == outer or path.startswith((f"{outer}.", f"{outer}["))


def parse_path(text: str) -> list[str | int]:
    """The steps of a path as ``inspect`` prints it; raises TargetError if it is none."""
    steps: list[str | int] = []
    at = 0
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None or (at == 0 and text[0] == "."):
            raise TargetError(
                f"{text!r} is no path", next='paths look like state_dict, models[0].net, callbacks["a.b"]'
            )
        word, index, quoted = found.groups()
        if word is not None:
            if at and text[at] != ".":
                raise TargetError(f"{text!r} is no path: a dot is missing before {word!r}")
            steps.append(word)
        elif index is not None:
            steps.append(int(index))
        else:
            steps.append(re.sub(r"\\(.)", r"\1", quoted))
        at = found.end()
    return steps
