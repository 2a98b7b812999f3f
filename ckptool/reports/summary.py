"""The report of ``inspect`` as text: its facts, its top-level entries, and its line in an overview."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..base.findings import Effect, codes
from ..base.lazy import regex
from ..base.text import cut, cut_key, human_bytes, join_limited, pluralize, shape_text, shown, step_words

if TYPE_CHECKING:
    from .inspection import DeviceReport, EntryReport, InspectReport, QuantizedReport, StateDictReport
    from .loads import VerdictReport

#: The columns of the overview of many files.
OVERVIEW_COLUMNS = ("path", "bytes", "format", "layout", "keys", "prefix", "devices", "findings")
#: The columns of the table of top-level entries.
ENTRY_COLUMNS = ("entry", "type", "value", "bytes")
#: Findings that a column of the overview already shows.
_SHOWN_BY_COLUMNS = frozenset(("prefix", "device", "together", "map-location"))


#: Dtypes of weights, which a model may hold in another floating-point dtype.
_FLOATS = ("float", "bfloat")
#: The most dtypes in one line.
_DTYPES: Final = 8


def headline(report: InspectReport) -> str:
    """Return the first line of the summary: path, size, format and writer."""
    return f"{report['path']}: {human_bytes(report['bytes'])}, {report['format']}, written by {report['writer']}"


def overview_row(report: InspectReport) -> tuple[str, ...]:
    """Return the report of ``inspect`` as one line with the columns of ``OVERVIEW_COLUMNS``.

    Keys and prefixes cover state dicts with high confidence. Findings are listed by code, worst first, without notes
    and without findings that a column shows.
    """
    sure = [item for item in report["state_dicts"] if item["confidence"] == "high"]
    kind, container = report["layout"]["kind"], report["layout"]["container"]
    prefixes = []
    for item in sure:
        prefix = item["prefix"]
        part = "" if prefix["status"] == "all" else f" ({prefix['keys']:,} of {item['keys']:,})"
        prefixes += [f"{prefix['name']}{part}"] if prefix["keys"] else []
    lands = [(item["location"], item.get("lands_on", item["location"])) for item in report["devices"]]
    devices = [tag if tag == there else f"{tag} -> {there}" for tag, there in lands]
    bad = [item for item in report["findings"] if item["level"] != "note" and item["code"] not in _SHOWN_BY_COLUMNS]
    return (
        report["path"],
        human_bytes(report["bytes"]),
        report["format"],
        (container if kind == "other" else kind) + step_words(report.get("step")),
        f"{sum(item['keys'] for item in sure):,}" if sure else "",
        join_limited(list(dict.fromkeys(prefixes)), most=2),
        join_limited(devices, most=3),
        ("error: " if bad and bad[0]["level"] == "error" else "")
        + join_limited(list(dict.fromkeys(item["code"] for item in bad)), most=3),
    )


def layout_words(report: InspectReport) -> str:
    """Describe the layout: "wrapped dict; state dict under 'state_dict', 62 tensors, prefix 'module.' on all keys"."""
    kind, container = report["layout"]["kind"], report["layout"]["container"]
    sure = [item for item in report["state_dicts"] if item["confidence"] == "high"]
    if kind == "bare":
        others = report["tensors"] - sure[0]["tensors"] if sure else 0
        beside = f"; beside it {pluralize(others, 'tensor')} more" if others > 0 else ""
        return f"bare {container}, {_state_dict_words(sure[0])}{beside}" if sure else f"bare {container}"
    if kind == "tensor":
        return "a single tensor"
    if kind == "module":
        return f"a pickled module of class {container}"
    start = "wrapped dict" if kind == "wrapped" else container
    if "program" in report and not report["tensors"]:
        return "a program without parameters and buffers by name"
    if not sure:
        return f"{start} without a state dict"
    if len(sure) == 1:
        return f"{start}; state dict under {sure[0]['key']!r}, {_state_dict_words(sure[0])}"
    each = "; ".join(f"{item['key']!r} ({_state_dict_words(item)})" for item in sure[: shown(4)])
    more = f"; and {len(sure) - 4} more" if len(sure) > shown(4) else ""
    return f"{start}; {len(sure)} state dicts: {each}{more}"


def _state_dict_words(item: StateDictReport) -> str:
    prefix = item["prefix"]
    if prefix["status"] == "none":
        words = "no prefix"
        if item["common_prefix"] and item["keys"] > 1:
            words += f" from a wrapper, all keys begin with {item['common_prefix']!r}"
    elif prefix["status"] == "all":
        words = f"prefix {prefix['name']!r} on all keys"
    else:
        words = f"prefix {prefix['name']!r} on {prefix['keys']:,} of {item['keys']:,} keys"
    inside = [name for name in item["wrappers"] if name + "." not in prefix["name"] and name != "module"]
    if inside:
        words += f", {join_limited([repr(name + '.') for name in inside])} inside"
    return f"{pluralize(item['tensors'], 'tensor')}, {words}"


def safety_words(safety: VerdictReport) -> str:
    """Return the verdict and the first reason: ``unsafe: posix.system('id') when unpickled, and 2 more reasons``."""
    reasons = [cut(reason, shown(100)) for reason in safety["reasons"][: shown(1)]]
    rest = len(safety["reasons"]) - len(reasons)
    words = f"{safety['verdict']}: {'; '.join(reasons)}" if any(reasons) else safety["verdict"]
    return words + (f", and {pluralize(rest, 'more reason')}" if rest else "")


def facts(report: InspectReport) -> list[tuple[str, str]]:
    """Return the lines of the summary as (label, text)."""
    safety = ("safety", safety_words(report["safety"]))
    is_safe = report["safety"]["verdict"] == "weights-only"
    lines = [] if is_safe else [safety]  # a warning comes first
    if report["tensors"]:
        where = "in the state dict" if len(report["state_dicts"]) == 1 else "in state dicts"
        elements = f"{_human_count(report['parameters'])} parameters and buffers"
        lines.append(("tensors", f"{report['tensors']:,}; {elements} {where if report['state_dicts'] else 'in all'}"))
        dtypes = [f"{item['dtype']} ({human_bytes(item['bytes'])})" for item in report["dtypes"]]
        rest = len(dtypes) - shown(_DTYPES)
        lines.append(("dtypes", ", ".join(dtypes[: shown(_DTYPES)]) + (f" and {rest:,} more" if rest > 0 else "")))
        if report["state_dicts"] and any(item["dtype"].startswith(_FLOATS) for item in report["dtypes"]):
            half, full = (human_bytes(size * report["parameters"]) for size in (2, 4))
            lines.append(("memory", f"{half} in bfloat16 or float16, {full} in float32"))
        if "quantized" in report:
            lines.append(("quantized", _quantized_words(report["quantized"])))
    if "model" in report or "family" in report:
        lines.append(("model", report.get("model") or f"{report['family']}, by its names"))
    lines += [safety] if is_safe else []
    lines.append(("layout", layout_words(report)))
    if report["tensors"]:
        stored = f"{human_bytes(report['storage_bytes'])} in {pluralize(report['storages'], 'storage')}"
        if report["unused_bytes"]:
            stored += f", {human_bytes(report['unused_bytes'])} of it unused"
        if report["shared_storages"]:
            stored += f", {report['shared_storages']:,} shared"
        lines.append(("bytes", stored))
        if "sharding" in report:
            lines.append(("shards", report["sharding"]["words"]))
        lines.append(("devices", ", ".join(map(_device, report["devices"]))))
    if report["metadata"]:
        texts = [f"{cut(name, 40)}={cut(repr(value), 60)}" for name, value in report["metadata"].items()]
        lines.append(("metadata", join_limited(texts, most=6)))
    verdict, what = report["weights_only"], "each file" if report["loads"] == "each file" else "it"
    if report["protocol"] is None and report["loads"] == "converted":
        lines.append(("loads", f"{report['loader']} loads it"))
    elif report["protocol"] is None and verdict["loads"]:
        by_torch = f"torch.load of torch {verdict['torch']} by its name"
        lines.append(("loads", f"{report['loader']} loads {what}, and {by_torch}"))
    else:
        # torch.load does not load a DCP folder, so the verdict is about the file that convert makes from it.
        lines.append(("as one file" if report["loads"] == "converted" else "torch.load", _verdict(report, what)))
    if "load" in report:
        places = [f"{pluralize(count, 'tensor')} on {device}" for device, count in report["load"]["devices"].items()]
        yes = f"yes: {', '.join(places) or 'no tensors'}"
        lines.append(("loaded", yes if report["load"]["ok"] else f"no: {report['load']['error']}"))
    return lines


def _quantized_words(item: QuantizedReport) -> str:
    """Return the formats and counts: ``bitsandbytes nf4, 61 of 75 weights``."""
    total = sum(item["formats"].values()) + item["plain"]
    each = [f"{name}, {number:,} of {pluralize(total, 'weight')}" for name, number in item["formats"].items()]
    return join_limited(each, most=4) if each else f"{pluralize(item['tensors'], 'part')} without their weights"


def _device(item: DeviceReport) -> str:
    lands = f" -> {item['lands_on']}" if "lands_on" in item else ""
    others = item.get("other_bytes", 0)
    rest = f"; {human_bytes(others)} more in no tensor" if others else ""
    size = human_bytes(item["bytes"] - others)
    return f"{item['location']}{lands} ({pluralize(item['tensors'], 'tensor')}, {size}{rest})"


def _verdict(report: InspectReport, what: str) -> str:
    verdict = report["weights_only"]
    call = f"weights_only=True of torch {verdict['torch']}"
    if any(Effect.AMBIGUOUS in codes()[item["code"]].effect for item in report["findings"]):
        return "it is not clear which records torch reads"
    if verdict["loads"]:
        return f"{call} loads {what}"
    why = f": {verdict['blockers'][0]['rule']}" if "program" in report else ""  # otherwise the findings say why
    return f"{call} refuses it{why}"


def entry_rows(report: InspectReport) -> list[tuple[str, str, str, str]]:
    """Return the rows of ``ENTRY_COLUMNS``: the bare state dict if there are entries beside it, then each entry.

    Many entries with similar keys share a row, as do all extra states of modules.
    """
    if not report["entries"]:
        return []
    rows = []
    bare = next((item for item in report["state_dicts"] if item["key"] == "" and item["tensors"]), None)
    if bare is not None:
        rows.append(("(state dict)", bare["container"], _state_dict_words(bare), human_bytes(bare["bytes"])))
    groups: dict[str, list[EntryReport]] = {}
    for entry in report["entries"]:
        groups.setdefault(_family(entry["key"]), []).append(entry)
    for family, entries in groups.items():
        if len(entries) < (2 if family == _EXTRA else _ALIKE):
            rows += [_row(entry["key"], [entry], _value(entry, report)) for entry in entries]
        else:
            rows.append(_row(family, entries, _counts(len(entries), sum(entry["tensors"] for entry in entries))))
    return rows


#: Modules with other state than tensors have it in an entry with this name; a sharded checkpoint adds the shard.
_EXTRA: Final = "*._extra_state"
_IS_EXTRA: Final = regex(r"\._extra_state(?=[/.]|\Z)")
#: So many entries with keys of one form share a row.
_ALIKE: Final = 8


def _family(key: str) -> str:
    """Return the form of a key: "optimizer.*.lr" for all keys with this first and last segment."""
    if _IS_EXTRA.search(key):
        return _EXTRA
    first, *middle, last = key.split(".") if "." in key else (key, "")
    return f"{first}.*.{last}" if middle else key


def _row(key: str, entries: Sequence[EntryReport], value: str) -> tuple[str, str, str, str]:
    kinds = {entry["type"] for entry in entries}
    size = sum(entry["bytes"] for entry in entries)
    kind = cut(kinds.pop(), 48) if len(kinds) == 1 else ""
    return cut_key(key, 48), kind, cut(value, 60), human_bytes(size) if size else ""


def _value(entry: EntryReport, report: InspectReport) -> str:
    if "value" in entry:
        value = entry["value"]
        return repr(value) if isinstance(value, str) else str(value)
    if "arguments" in entry:
        return f"({', '.join(map(repr, entry['arguments']))})"
    if "shape" in entry:
        return f"{entry['dtype']} {shape_text(entry['shape'])}"
    if "state_dict" in entry:
        item = report["state_dicts"][entry["state_dict"]]
        maybe = " (low confidence)" if item["confidence"] == "low" else ""
        return f"state dict{maybe}: {_state_dict_words(item)}"
    return _counts(entry.get("length"), entry["tensors"])


def _counts(entries: int | None, tensors: int) -> str:
    counts = ((entries, "entry"), (tensors or None, "tensor"))
    return ", ".join(pluralize(count, noun) for count, noun in counts if count is not None)


def _human_count(count: int) -> str:
    """Format a number of parameters as ``3,205``, ``11.2 M``, ``6.74 B``."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= limit:
            value = count / limit
            return f"{value:.{2 if value < 10 else 1}f} {unit}"
    return f"{count:,}"
