"""Texts: configuration that runs code and configuration that does not, escaped, encoded and broken in many ways.

The judges are the parsers that loaders use: ``json`` and PyYAML. Where one of them reads a key or a tag that makes a
loader run code, ``scan`` must say so.
"""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import yaml

from .opcodes import bytewise

_PICKLE = base64.b64encode(b"cposix\nsystem\n(S'true'\ntR.").decode()
#: Texts to begin with, by name; those that begin with "plain" run nothing.
BASES: dict[str, Any] = {
    "hydra": {"model": {"_target_": "os.system", "command": "true"}, "lr": 0.1},
    "jsonpickle": [{"a": 1}, {"py/object": "lib.Thing", "x": {"py/type": "os.system"}}],
    "auto_map": {"auto_map": {"AutoModel": "modeling_x.Model"}, "hidden_size": 8},
    "remote": {"trust_remote_code": True, "name": "x"},
    "keras": {"class_name": "Lambda", "config": {"name": "a"}},
    "agent": {"policy": {":type:": "x", ":serialized:": _PICKLE}},
    "template": {"chat_template": "{{ ''.__class__ }}"},
    "plain": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}, "names": ["a", "b"]},
    "plain-words": {"vocab": {"_target_": 1, "auto_map": 2, "x y": 3}, "text": 'it\'s "so": a\\b # c'},
}
#: Tags from which yaml.unsafe_load makes objects.
_TAGS = ("python/object/apply:os.system", "python/name:os.system", "python/object/new:os.system", "python/module:os")
_BITS = (
    *("\n", " ", "\t", "#", " # ", ": ", ":", "- ", "? ", "|", ">", "'", '"', "\\", "\\\n", "{", "}", "[", "]", ","),
    *("&a ", "*a", "!!str ", "!", "---\n", "...\n", "%TAG !e! tag:yaml.org,2002:py\n---\n", "\u2028", "\ufeff", "~"),
)


def mutated_text(data: bytes, chance: random.Random) -> bytes:
    """A text after one change: its keys written otherwise, another encoding, parts moved, characters put in."""
    way = chance.randrange(12)
    if way == 0:
        return bytewise(data, chance)
    if way == 1:
        encoding = chance.choice(("utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"))
        return data.decode("utf-8", "replace").encode(encoding)
    text = data.decode("utf-8", "replace")
    if way == 2:
        return yaml.safe_dump(
            _value(text),
            default_style=chance.choice((None, '"', "'", "|")),
            default_flow_style=chance.choice((None, True, False)),
        ).encode()
    if way == 3:
        return _escaped(text, chance).encode()
    if way == 4:
        return json.dumps({"x": text, "y": [text]}).encode()
    if way == 5:
        return json.dumps(_value(text), indent=chance.choice((None, 1, 4))).encode()
    if way in (6, 7):
        return _tagged(text, chance).encode()
    at = chance.randrange(len(text) + 1)
    if way == 8:
        text = text[:at] + chance.choice(_BITS) + text[at:]
    elif way == 9:
        text = text[:at] + text[at + chance.choice((1, 1, 2, 8, 30)) :]
    elif way == 10:
        lines = text.split("\n")
        chance.shuffle(lines)
        text = "\n".join(lines)
    else:
        text = chance.choice(_BITS) + text
    return text.encode("utf-8", "replace")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, AttributeError, LookupError, RecursionError) as error:
            raise ValueError("not a text with a value") from error


def _escaped(text: str, chance: random.Random) -> str:
    """Write characters of strings in double quotes as escapes."""
    forms = ("\\u{:04x}",) if chance.random() < 0.7 else ("\\x{:02x}", "\\u{:04X}", "\\U{:08x}")
    rate = chance.choice((0.1, 0.5, 1.0))

    def one(match: re.Match[str]) -> str:
        if "\\" in match[0]:
            return match[0]
        return "".join(
            chance.choice(forms).format(ord(letter))
            if letter != '"' and chance.random() < rate and ord(letter) < 256
            else letter
            for letter in match[0]
        )

    return re.sub(r'"[^"\n]*"', one, text)


def _tagged(text: str, chance: random.Random) -> str:
    tag = chance.choice(_TAGS)
    rate = chance.choice((0, 0.1, 1))
    spelled = "".join(f"%{ord(letter):02x}" if chance.random() < rate else letter for letter in tag)
    at = chance.choice([match.end() for match in re.finditer(r"[:\[,-] ?|^", text)])
    cut = chance.randrange(1, 8)
    head, tagged = chance.choice(
        (
            ("", f"!!{spelled}"),
            ("", f"!<tag:yaml.org,2002:{spelled}>"),
            (f"%TAG !e! tag:yaml.org,2002:{tag[:cut]}\n--- ", f"!e!{tag[cut:]}"),
            ("%TAG ! tag:yaml.org,2002:\n--- ", f"!{spelled}"),
        )
    )
    return head + text[:at] + " " + tagged + " " + text[at:]


# -- what the parsers read -------------------------------------------------------------------------------------------


def dangerous(data: bytes) -> str:
    """Return what in a text makes a loader run code, as a parser reads it; "" where no parser reads such a thing."""
    try:
        return _in_value(json.loads(data), 0)
    except (ValueError, RecursionError):
        pass
    try:
        for node in yaml.compose_all(data, Loader=yaml.SafeLoader):
            told = _in_node(node)
            if told:
                return told
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError, TypeError, LookupError):
        return ""  # what comes before an error is of an earlier document
    return ""


def _in_value(value: Any, depth: int) -> str:
    told: list[str] = []
    work = [value]
    while work:
        part = work.pop()
        if isinstance(part, dict):
            told += [key for key, inner in part.items() if _runs(key, inner)]
            work.extend(part.values())
        elif isinstance(part, list):
            work.extend(part)
        elif isinstance(part, str) and depth < 2 and part[:1] in ("{", "["):
            try:
                told.append(_in_value(json.loads(part), depth + 1))
            except (ValueError, RecursionError):
                continue
    return next(filter(None, told), "")


def _runs(key: str, value: Any) -> bool:
    if key in ("_target_", "py/object", "py/type"):
        return isinstance(value, str) and re.fullmatch(r"[A-Za-z]\w*(\.\w+)+", value) is not None
    if key == "auto_map":
        return isinstance(value, dict) and bool(value)
    if key == "trust_remote_code":
        return value is True
    if key == "class_name":
        return value == "Lambda"
    if key == ":serialized:":
        return isinstance(value, str)
    return key == "chat_template" and isinstance(value, str) and value == BASES["template"]["chat_template"]


def _in_node(root: Any) -> str:
    work, seen = [root], set()
    while work:
        node = work.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        if any(node.tag == f"tag:yaml.org,2002:{tag}" for tag in _TAGS):
            return str(node.tag)
        for item in node.value if isinstance(node.value, list) else ():
            if isinstance(item, tuple):
                key, inner = item
                plain = key.tag == "tag:yaml.org,2002:str"
                if plain and _runs(key.value, _plain(inner)):
                    return str(key.value)
                work += [key, inner]
            else:
                work.append(item)
    return ""


def _plain(node: Any) -> Any:
    if node.tag == "tag:yaml.org,2002:bool":
        return node.value.lower() in ("yes", "true", "on")
    if isinstance(node, yaml.MappingNode):
        return dict.fromkeys(range(len(node.value)))
    return node.value if node.tag == "tag:yaml.org,2002:str" else None


def bases() -> Iterator[tuple[str, bytes]]:
    """Yield the texts to begin with, as JSON and as YAML."""
    for name, value in BASES.items():
        yield f"made-{name}.json", json.dumps(value, indent=1).encode()
        yield f"made-{name}.yaml", yaml.safe_dump(value).encode()
