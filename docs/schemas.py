"""A JSON Schema for the output of each command and for each file, made from their types.

``python -m docs.schemas FOLDER`` writes the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired

from ckptool.cli.edit_report import EditReport, RenameReport, SanitizeReport
from ckptool.cli.edits import PrivateReports
from ckptool.cli.main import COMMANDS
from ckptool.cli.match import AppliedReport
from ckptool.cli.render import FailureReport, schema_of
from ckptool.cli.salvage import SalvageReport
from ckptool.edits.matching.match import MatchReport
from ckptool.reports.comparing.diff import DiffReport
from ckptool.reports.comparing.fingerprint import HashReport
from ckptool.reports.comparing.lock import FolderLock, Lock
from ckptool.reports.comparing.values import Distances, ValueDifference
from ckptool.reports.explaining.explanation import ExplainReport
from ckptool.reports.file_rows import FileRow
from ckptool.reports.inspection import InspectReport
from ckptool.reports.keys import KeysReport
from ckptool.reports.loads import LoadReport
from ckptool.reports.scan import ScanLine, ScanReport
from ckptool.reports.stats import StatsReport
from ckptool.reports.validate import ValidateReport
from ckptool.saving import HistoryReport, UndoReport

#: Commands without their own JSON: completion prints a script, report writes a page.
WITHOUT: Final = frozenset(("completion", "report"))
#: Report types by command. Commands not listed here write an output, and print an EditReport or a FailureReport.
REPORTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "inspect": (InspectReport, FailureReport),
    "keys": (KeysReport, FailureReport),
    "stats": (StatsReport, FailureReport),
    "explain": (ExplainReport,),
    "scan": (ScanReport, ScanLine, FileRow),
    "validate": (ValidateReport, FileRow),
    "diff": (DiffReport, FailureReport),
    "match": (MatchReport, AppliedReport, FailureReport),
    "hash": (HashReport, FailureReport, FileRow),
    "lock": (Lock, FolderLock, FileRow),
    "rename": (RenameReport, FailureReport),
    "redact": (EditReport, PrivateReports, FailureReport),
    "sanitize": (SanitizeReport, FailureReport),
    "salvage": (SalvageReport, FailureReport),
    "undo": (UndoReport, HistoryReport, FailureReport),
}
#: Types that report modules import only for type checkers, so that their annotations can be resolved here.
_NAMES: Final = {item.__name__: item for item in (Distances, LoadReport, ValueDifference)}
_SIMPLE: Final = {str: "string", int: "integer", float: "number", bool: "boolean", NoneType: "null"}


def _value_schema() -> dict[str, Any]:
    """Return the schema of the output of ``get``, which is the bare value: see ``ckptool.reports.entries``."""
    value = {"$ref": "#/$defs/value"}
    texts: dict[str, Any] = {"type": "string"}
    shape = {"type": "array", "items": {"type": "integer"}}
    tensor = {"tensor": texts, "dtype": texts, "shape": shape}
    objects: dict[str, tuple[str, dict[str, Any]]] = {
        "bytes": ("Bytes.", {"base64": texts}),
        "quantized": ("A quantized tensor.", {"int_repr": value, "scale": value, "zero_point": value}),
        "quantized_by_channel": (
            "A quantized tensor with a scale for each channel.",
            {"int_repr": value, "scales": value, "zero_points": value, "axis": {"type": "integer"}},
        ),
        "parts": ("A tensor made of tensors.", {**tensor, "parts": {"type": "object", "additionalProperties": value}}),
        "unread": ("A tensor without values, and why.", {**tensor, "reason": texts}),
        "object": ("An object.", {"class": texts, "attributes": {"type": "object", "additionalProperties": value}}),
        "global": ("A class or function.", {"global": texts}),
        "storage": ("A storage without a tensor.", {"storage": texts}),
        "ref": ("What is within itself, or was written before at this path.", {"ref": texts}),
    }
    defined: dict[str, Any] = {
        name: {
            "description": text,
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
        for name, (text, fields) in objects.items()
    }
    defined["value"] = {
        "anyOf": [
            {"type": ["boolean", "integer", "number", "null"]},
            {"description": 'A text, or "nan", "inf" or "-inf".', "type": "string"},
            {"description": "A list, or a tensor as lists in lists.", "type": "array", "items": value},
            *({"$ref": f"#/$defs/{name}"} for name in objects),
            {"description": "A dict.", "type": "object", "additionalProperties": value},
        ]
    }
    return {**_head("get", "The value at a path."), **value, "$defs": dict(sorted(defined.items()))}


def _head(command: str, text: str) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:ckptool:{command.replace(' ', '-')}:1",
        "title": f"ckptool {command} --format json",
        "description": text,
    }


def schema(command: str) -> dict[str, Any]:
    """Return the schema of one report of a command."""
    if command == "get":
        return _value_schema()
    reports = REPORTS.get(command, (EditReport, FailureReport))
    defined: dict[str, Any] = {}
    roots = [_reference(report, defined, schema_of(command)) for report in reports]
    return {
        **_head(command, f"One report of ckptool {command}; for several inputs it prints a list of these."),
        **(roots[0] if len(roots) == 1 else {"oneOf": roots}),
        "$defs": dict(sorted(defined.items())),
    }


def _reference(kind: Any, defined: dict[str, Any], name: str = "") -> dict[str, Any]:
    """Return a reference to a TypedDict, and add its definition to ``defined``. ``name`` is the id of its schema."""
    if kind.__name__ not in defined:
        defined[kind.__name__] = {}  # ends the recursion of a type that contains itself
        defined[kind.__name__] = _definition(kind, defined, name)
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _definition(kind: Any, defined: dict[str, Any], name: str) -> dict[str, Any]:
    hints = get_type_hints(kind, localns=_NAMES | {"NotRequired": NotRequired}, include_extras=True)
    # ``__optional_keys__`` knows ``total=False``, but misses NotRequired in annotations that are strings.
    optional = {key for key, hint in hints.items() if get_origin(hint) is NotRequired} | kind.__optional_keys__
    properties = {
        key: _of_type(get_args(hint)[0] if get_origin(hint) is NotRequired else hint, defined)
        for key, hint in hints.items()
    }
    if name and hints.get("schema") is str:
        properties["schema"] = {"const": name}
    return {
        "type": "object",
        "description": " ".join((kind.__doc__ or "").partition(">>>")[0].split()).replace("``", "`"),
        "properties": properties,
        "required": [key for key in hints if key not in optional],
        "additionalProperties": False,
    }


def _of_type(kind: Any, defined: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an annotated type."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object):
        return {}
    if kind in _SIMPLE:
        return {"type": _SIMPLE[kind]}
    if hasattr(kind, "__optional_keys__"):  # a typed dict
        return _reference(kind, defined)
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return _any_of([_of_type(argument, defined) for argument in arguments])
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return {"type": "array", "items": _of_type(arguments[0], defined)}
    if origin is dict and arguments[0] is str:
        return {"type": "object", "additionalProperties": _of_type(arguments[1], defined)}
    raise TypeError(f"no schema for {kind}")


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    if all(item.keys() == {"type"} for item in schemas):
        return {"type": [item["type"] for item in schemas]}
    return {"anyOf": schemas}


def files() -> dict[str, str]:
    """Map file names to the text of the schemas."""
    commands: Iterable[str] = sorted(COMMANDS.keys() - WITHOUT)
    return {
        f"{name.replace(' ', '-')}.json": json.dumps(schema(name), indent=2, ensure_ascii=False) + "\n"
        for name in commands
    }


def table() -> str:
    """Return the table of schemas. Commands with the same reports share a row."""
    rows: dict[str, list[str]] = {}
    for command in sorted(COMMANDS.keys() - WITHOUT):
        reports = REPORTS.get(command, (EditReport, FailureReport)) if command != "get" else ()
        names = ", ".join(f"`{report.__name__}`" for report in reports) or "the value itself"
        rows.setdefault(names, []).append(f"`{command}`")
    lines = [f"| {', '.join(commands)} | {names} |" for names, commands in rows.items()]
    return "\n".join(["| command | reports |", "| --- | --- |", *lines])


def definitions() -> str:
    """Return a Markdown section per object in a report, with a table of its fields."""
    defined: dict[str, dict[str, Any]] = {}
    for command in sorted(COMMANDS.keys() - WITHOUT - {"get"}):
        for name, item in schema(command)["$defs"].items():
            known = defined.setdefault(name, item)
            if known != item:  # several commands share this report; only the id of the schema differs
                known["properties"]["schema"] = {"type": "string"}
    return "\n".join(_section(name, defined[name]) for name in sorted(defined))


def _section(name: str, item: Mapping[str, Any]) -> str:
    lines = [f"({name})=", f"### `{name}`", "", item["description"], ""]
    lines += ["| field | type | present |", "| --- | --- | --- |"]
    for field, kind in item["properties"].items():
        lines.append(f"| `{field}` | {_words(kind)} | {'always' if field in item['required'] else 'sometimes'} |")
    return "\n".join([*lines, ""])


def _words(kind: Mapping[str, Any]) -> str:
    """Return a type in words, as Markdown."""
    if "$ref" in kind:
        name = kind["$ref"].rpartition("/")[2]
        return f"[{name}](#{name})"
    if "anyOf" in kind:
        return " or ".join(map(_words, kind["anyOf"]))
    if "const" in kind or "enum" in kind:
        return " or ".join(f"`{json.dumps(value)}`" for value in kind.get("enum", [kind.get("const")]))
    if kind.get("type") == "array":
        return f"list of {_words(kind['items'])}"
    if kind.get("type") == "object":
        return f"object of {_words(kind['additionalProperties'])}"
    types = kind.get("type", "any")
    return types if isinstance(types, str) else " or ".join(types)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, "utf-8")
