"""Errors that name a file which ckptool does not read as a checkpoint, with the next step."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from shlex import quote
from typing import Final, cast

from ...base.errors import MalformedError, NotACheckpointError, PickleError, TruncatedPickleError, UnreadableError
from ...base.lazy import regex
from ...base.limits import LIMITS
from ...base.steps import WHOLE_COPY, AnyStep, NextStep, as_step, by_place, command, salvage_step
from ...base.text import human_bytes, join_limited, pluralize, quoted
from ...files.archives import SEPARATOR, checkpoints_in, gzip_name
from ...files.compressed import compression_of, inflate_start
from ...files.sources import BytesSource, Source
from ...files.tars import is_header
from ...files.zips.reader import Archive
from ...pickles.nodes import Global, Node
from ..rescue import measure_cut_zip
from ..search.budget import RECOGNISED, decode_start
from ..search.inert import is_text
from ..zip_kinds import kind_of
from .frameworks import ForeignFormat, archive_producer, foreign_archive, foreign_pickle, match_magic, match_structure

#: The advice for remote archives that ckptool does not read.
_UNPACK: Final = "download it, then unpack it"
#: Kinds of files in place of one that never arrived: a pointer, a web page, a link as text, an empty file.
PLACEHOLDERS = frozenset(("git-lfs-pointer", "html", "link-text", "empty", "zeros"))
_DOWNLOAD: Final = (
    "download it again, logged in or from the link of the raw file",
    "upload the file itself",
    "log in, or use the link of the raw file",
)


def explain(head: bytes, source: Source) -> UnreadableError:
    """Return the error that names the format of a file; ``head`` are its first bytes."""
    error = explain_before_pickle(head, source) or _pickle(head, source)
    if error is not None:
        return error
    what = "it is not a checkpoint: its first bytes match no format that ckptool knows"
    return _error("unknown", what, source)


def explain_before_pickle(head: bytes, source: Source) -> UnreadableError | None:
    """Return the error that names a format which goes before a binary pickle, or None for all other files."""
    tests = (_empty, _magic, _text_pickle, _text, _compressed, _tensor_files, _archives)
    return next((error for test in tests if (error := test(head, source)) is not None), None)


def explain_placeholder(source: Source) -> UnreadableError | None:
    """Return the error for a pointer file, a server's message or an empty file; None for other files."""
    head = source.read(0, 1024)
    error = _empty(head, source) or _text(head, source)
    if error is None:
        return None
    message = error.what.startswith("it is a JSON message") and b'"weight_map"' not in head
    return error if error.kind in PLACEHOLDERS or (message and error.kind == "json") else None


def _error(kind: str, what: str, source: Source, next: AnyStep = "") -> NotACheckpointError:
    return NotACheckpointError(what, kind=kind, path=source.name, next=next)


def _empty(head: bytes, source: Source) -> NotACheckpointError | None:
    if not head:
        step = by_place(source.name, "write or download it again", "upload it again", "check the link")
        return _error("empty", "the file is empty", source, step)
    if not head.strip(b"\0"):
        what = "it begins with zeros: its first blocks were never written, as after a crash or a broken download"
        return _error("zeros", what, source, "get the file again")
    return None


def _magic(head: bytes, source: Source) -> NotACheckpointError | None:
    known = match_magic(source)
    return _foreign(known, source) if known else None


def _text(head: bytes, source: Source) -> NotACheckpointError | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d{1,18})", head)
        real = f" that stands for a file of {human_bytes(int(size.group(1)))}" if size else ""
        what = f"it is a Git LFS pointer{real}, not the checkpoint"
        step = by_place(
            source.name, "git lfs pull fetches it", "upload the file itself", "use the link of the file itself"
        )
        return _error("git-lfs-pointer", what, source, step)
    if start[:64].lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")):
        title = re.search(rb"<(?:title|message)>\s*([^<]{1,80})", head, re.I)
        titled = f" titled {title.group(1).decode('utf-8', 'replace').strip()!r}" if title else ""
        what = f"it is a web page{titled}, not a checkpoint: the download went wrong"
        return _error("html", what, source, by_place(source.name, *_DOWNLOAD))
    if not is_text(head):
        return None
    if re.match(_JSON, start):
        return _json(head, source)
    if source.size < 4096 and b"\n" not in head.strip() and b"/" in head:
        what = "it is a short text that looks like a path: a symbolic link that Git checked out as a file"
        return _error("link-text", what, source, "name the file that it points to")
    first = head.strip().split(b"\n")[0][:60].decode("utf-8", "replace").strip()
    return _error("text", f"it is text that begins with {first!r}, not a checkpoint", source, "check the path")


#: The start of a JSON text. A list of bare words in brackets, as in vocabularies and settings, is not JSON.
_JSON: Final = rb'\{\s*(?:"|\}|\Z)|\[\s*(?:["\[{\]]|-?\d[\d.eE+-]*\s*[,\]]|(?:true|false|null)\b|\Z)'


def _json(head: bytes, source: Source) -> NotACheckpointError:
    message = re.search(rb'"(?:error|message|detail|title|error_description)"\s*:\s*"((?:[^"\\]|\\.){1,80})', head)
    if message:
        text = message.group(1).decode("utf-8", "replace")
        what = f"it is a JSON message of a server, {quoted(text)}, not the checkpoint: the download went wrong"
        return _error("json", what, source, by_place(source.name, *_DOWNLOAD))
    if b'"weight_map"' in head or b'"weight_map"' in source.read(max(source.size - 4096, 0), 4096):
        shards = re.findall(rb'"([^"\\]{1,100}\.(?:safetensors|bin|h5))"', source.read(0, 1 << 16))
        such_as = f", such as {quoted(min(shards).decode('utf-8', 'replace'))}" if shards else ""
        what = f"it is the index of weights in shards{such_as}: names, not weights"
        return _error("index", what, source, "name its folder, or one of the shards")
    what = "it is JSON text, not a checkpoint: a message of a server, or a configuration"
    step = by_place(source.name, "look into it, then download the checkpoint itself", "name the checkpoint itself")
    return _error("json", what, source, step)


def _compressed(head: bytes, source: Source) -> NotACheckpointError | None:
    name, compression = source.name, compression_of(head)
    if compression is None or not compression.unpack:
        return None
    kind = compression.name
    plain = inflate_start(BytesSource(head), compression) if kind in ("gzip", "zlib") else b""
    if kind == "zlib" and not plain:
        return None
    if kind == "zlib" and plain[:1] == b"\x80":
        what = "it is a pickle that zlib compressed, as joblib does"
        return _error("joblib", what, source, "joblib.load reads it, and runs what it names")
    unpack = by_place(name, f"unpack it with {compression.unpack}, then name what it holds", _UNPACK)
    if plain[257:262] == b"ustar" and plain[:4] != b"PK\x03\x04":
        error = _archive_error(source, kind, "a gzipped tar archive", unpack)
        return error or _error(kind, "it is gzip data of a tar", source, unpack)
    content = " of a zip checkpoint" if plain[:4] == b"PK\x03\x04" else " of a pickle" if plain[:1] == b"\x80" else ""
    step = as_step(unpack)
    # gzip data ends with its inflated size in bytes, modulo 2**32.
    if content and int.from_bytes(source.read(max(0, source.size - 4), 4), "little") <= LIMITS.member_bytes:
        step = command("inspect", f"{name}{SEPARATOR}{gzip_name(name)}")
    return _error(kind, f"it is {kind} data{content}", source, step)


def _tensor_files(head: bytes, source: Source) -> NotACheckpointError | None:
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] <= min(100_000_000, source.size):
        return _error("safetensors", "it is a safetensors file", source, command("inspect", source.name))
    known = match_structure(head, source)
    return _foreign(known, source) if known else None


def _foreign(known: ForeignFormat, source: Source) -> NotACheckpointError:
    name, colon, detail = known.description.partition(": ")
    return _error(known.kind, f"it is {name}, not a torch checkpoint{colon}{detail}", source, known.tool)


def _archives(head: bytes, source: Source) -> UnreadableError | None:
    if head[257:262] == b"ustar" or is_header(head[:512]):
        member = head[:100].split(b"\0")[0].decode("utf-8", "replace")
        unpack = by_place(source.name, f"tar -xf {quote(source.name)}, then name the file inside", _UNPACK)
        error = _archive_error(source, "tar", "a tar archive", unpack)
        return error or _error("tar", f"it is a tar archive, first member {quoted(member)}", source, unpack)
    if head[:4] == b"PK\x05\x06":
        return _error("empty-zip", "it is an empty zip archive", source)
    if head[:4] == b"PK\x07\x08":
        return _error("zip", "it is one part of a split zip archive", source)
    tail = source.read(max(source.size - 1024, 0), 1024)
    if b"PK\x05\x06" not in tail:
        return None
    if head[2:4] == b"\x03\x04":
        what = f"its first two bytes are {head[:2].decode('latin-1')!r}, and a zip checkpoint begins with 'PK'"
        if head[:2].isdigit():
            what += ": GPT-SoVITS writes its version there, and only GPT-SoVITS reads it"
        return MalformedError(what, path=source.name, next=salvage_step(source.name))
    if b"PK\x06\x07" in tail:
        what = "it ends like a zip checkpoint, but other bytes precede it, or its start is lost"
        return MalformedError(what, path=source.name, next=f"{WHOLE_COPY}, or " + salvage_step(source.name))
    return None


#: Words in the names of other files that may be larger than the weights, as in a zip of Stable-Baselines3.
_NOT_WEIGHTS = regex(r"optim|variables|sched|random|rng|scaler|replay", re.I)


def _archive_error(source: Source, kind: str, archive: str, unpack: str) -> NotACheckpointError | None:
    inside = checkpoints_in(source)
    if not inside:
        return None
    names = [f"{quoted(item.name)} ({human_bytes(item.size)})" for item in inside]
    many = f"{pluralize(len(names), 'file')} named like checkpoints: {join_limited(names)}"
    first = max(inside, key=lambda item: (not _NOT_WEIGHTS.search(item.name), item.size))
    step = command("inspect", f"{source.name}!{first.name}")
    if first.size > LIMITS.member_bytes and archive != "a tar archive":
        step = as_step(unpack)  # it may need inflating, which is not done in memory
    return _error(kind, f"it is {archive} that holds {names[0] if len(names) == 1 else many}", source, step)


#: The start of a protocol 0 pickle, which is text: a dict, a list, or a class that is called.
_PROTOCOL_0: Final = rb"\([dl]p?\d*\n|\(i[\w.]+\n\w+\n|c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n"


def _text_pickle(head: bytes, source: Source) -> UnreadableError | None:
    return _pickle(head, source) if head[:1] in (b"(", b"c") and is_text(head) else None


def _pickle(head: bytes, source: Source) -> UnreadableError | None:
    """Recognise a pickle that is not in a torch format, complete or nearly; None for other data."""
    binary = head[:1] == b"\x80" and head[1:2] <= b"\x05"
    if not binary and not head.startswith((b"(", b"]", b"}", b"c")):
        return None
    whole = True
    try:
        graph, end, _ = decode_start(source)
        nodes: Sequence[Node] = graph.nodes
        if not binary and (len(nodes) < 2 or source.read(end, 64).strip()):
            return None  # text that happens to begin like a pickle
    except PickleError as error:
        nodes = cast("Sequence[Node]", error.seen)
        long = source.size > RECOGNISED and isinstance(error, TruncatedPickleError)
        whole = long and (binary or re.match(_PROTOCOL_0, head) is not None)
    known = foreign_pickle(nodes, source)
    if known is not None:
        return _error(known.kind, f"it is {known.description}", source, known.tool or command("scan", source.name))
    if whole:
        return _bare_pickle(nodes, source)
    if not binary:
        return None
    what = "it begins like a bare pickle, not like a file of torch.save"
    return _error("pickle", what, source, command("scan", source.name))


#: Globals that Python values, tensors and arrays are made of: no classes that a reader must have installed.
_PLAIN: Final = (
    r"torch(?:\.storage\._load_from_bytes|\._utils\.\w+|\.\w+Storage|\.Size|\.device|\.\w*\d+|\.bool)\Z"
    r"|numpy\.|_codecs\.|copy_?reg\.|collections\.|(?:__builtin__|builtins)\.(?!eval|exec|getattr|__import__)"
)


def _bare_pickle(nodes: Sequence[Node], source: Source) -> NotACheckpointError:
    """Return the error for a bare pickle; its content is described up to the place where decoding stopped."""
    names = list(dict.fromkeys(f"{node.module}.{node.name}" for node in nodes if isinstance(node, Global)))
    tensors = any(name.startswith(("torch.storage._load", "torch._utils._rebuild")) for name in names)
    data = ["tensors"] * tensors + ["NumPy arrays"] * any(name.startswith("numpy.") for name in names)
    objects = [name for name in names if not re.match(_PLAIN, name)]
    what = "it is a bare pickle, written by pickle.dump and not by torch.save"
    what += f", with {join_limited(data)} in it" if data else ""
    what += f": pickle.load would call {join_limited(objects, most=3)}" if objects else ""
    advice = ""
    if objects:
        advice = "do not load it unless you trust who made it: "
    elif data:
        advice = "pickle.load reads it, and torch.save makes a checkpoint of it: "
    return _error("pickle", what, source, advice + command("scan", source.name))


def explain_zip(archive: Archive) -> NotACheckpointError | None:
    """Return the error that names a zip archive which is not a checkpoint, or None if it may be one."""
    source = archive.source
    if program := kind_of(archive):
        step = command("inspect", source.name)
        return _error(program.name, f"it is {program.noun}: a program, not only weights", source, step)
    if archive.find("data.pkl") is not None:
        return None
    if known := foreign_archive(archive):
        return _foreign(known, source)
    producer = archive_producer(archive)
    name = f"{producer}, a zip archive" if producer else "a zip archive"
    if error := _archive_error(source, "zip", name, f"unzip {quote(source.name)}, then name the file inside"):
        return error
    names = [record.name for record in archive.records]
    pickle = next((name for name in names if name.endswith("/data.pkl")), None)
    if pickle is not None:
        return _error("zip", f"its {pickle!r} is not in the folder of its first record, where torch looks", source)
    first = ", ".join(repr(name) for name in names[:3])
    return _error("zip", f"it is a zip archive without data.pkl (it holds {first or 'nothing'})", source)


def explain_damaged_zip(source: Source, error: MalformedError) -> UnreadableError:
    """Return the error for a zip without a usable directory."""
    head = source.read(0, 512)
    name_size = int.from_bytes(head[26:28], "little")
    name = head[30 : 30 + name_size].decode("utf-8", "replace")
    rescue = salvage_step(source.name)
    left = measure_cut_zip(source)
    if b"PK\x05\x06" in source.read(max(source.size - 66_000, 0), 66_000):
        error.path = source.name
        error.step = rescue if left is not None else NextStep()
        return error
    if left is None:
        whose = "a torch checkpoint" if name.endswith("/data.pkl") else f"a zip archive (first record {quoted(name)})"
        what = f"{whose} that is cut: it ends after {human_bytes(source.size)}, before the directory at a zip's end"
        again = by_place(source.name, "copy or download it again, whole", WHOLE_COPY)
        return MalformedError(what, path=source.name, next=again)
    what = f"a torch checkpoint that is cut at {human_bytes(left.size)} of about {human_bytes(left.expected_size)}:"
    what += f" {left.whole:,} of {pluralize(left.tensors, 'tensor')} whole"
    step = f"{by_place(source.name, 'download it again', WHOLE_COPY)}, or " + rescue
    return MalformedError(what, path=source.name, next=step)
