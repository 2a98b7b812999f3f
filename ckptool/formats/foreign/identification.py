"""Naming what is not a checkpoint that ckptool reads, and the next step."""

from __future__ import annotations

import re
import struct
import zlib
from codecs import getincrementaldecoder
from collections.abc import Sequence
from shlex import quote
from typing import Final, cast

from ...base.errors import MalformedError, NotACheckpointError, PickleError, TruncatedPickleError, UnreadableError
from ...base.limits import LIMITS
from ...base.text import counted, human_bytes, listed, salvage_step, shown
from ...files.archives import MARK, checkpoints_in, gzip_name
from ...files.sources import Source
from ...files.tars import is_header
from ...files.zips.reader import Archive
from ...pickles.decode import decode
from ...pickles.nodes import Global, Node
from ..damaged import extent_of_zip
from . import files as foreign_files

#: Kinds of what stands in the place of a file that was never there: a pointer, a page, a link as text, nothing.
NOT_THERE = frozenset(("git-lfs-pointer", "html", "link-text", "empty", "zeros"))


def explain(head: bytes, source: Source) -> UnreadableError:
    """The error that says what a file is, from its first bytes."""
    for test in (_empty, _marked, _text_pickle, _text, _compressed, _tensor_files, _archives, _pickle):
        found = test(head, source)
        if found is not None:
            return found
    return _not("unknown", "it is no checkpoint: its first bytes are those of no format that ckptool knows", source)


def stand_in(source: Source) -> UnreadableError | None:
    """The error for a file that is only a pointer to another, or what a server said instead of it; None for others."""
    head = source.read(0, 1024)
    found = _empty(head, source) or _text(head, source)
    said = found is not None and found.what.startswith("it is a JSON message") and b'"weight_map"' not in head
    kinds = NOT_THERE | ({"json"} if said else set())
    return found if found is not None and found.kind in kinds else None


def _not(kind: str, what: str, source: Source, next: str = "") -> NotACheckpointError:
    return NotACheckpointError(what, kind=kind, path=source.name, next=next)


def _empty(head: bytes, source: Source) -> NotACheckpointError | None:
    if not head:
        return _not("empty", "the file is empty", source, "write or download it again")
    if not head.strip(b"\0"):
        what = "it begins with zeros: its first blocks were never written, as after a crash or a broken download"
        return _not("zeros", what, source, "get the file again")
    return None


def _marked(head: bytes, source: Source) -> NotACheckpointError | None:
    """What a mark at its beginning names, even where the rest is text."""
    found = foreign_files.marked(source)
    return _foreign(found, source) if found else None


def _text(head: bytes, source: Source) -> NotACheckpointError | None:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start.startswith(b"version https://git-lfs"):
        size = re.search(rb"\nsize (\d{1,18})", head)
        real = f" that stands for a file of {human_bytes(int(size.group(1)))}" if size else ""
        return _not("git-lfs-pointer", f"it is a Git LFS pointer{real}, not the checkpoint", source, "git lfs pull")
    lowered = start[:64].lower()
    if lowered.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")):
        title = re.search(rb"<(?:title|message)>\s*([^<]{1,80})", head, re.I)
        named = f" titled {title.group(1).decode('utf-8', 'replace').strip()!r}" if title else ""
        what = f"it is a web page{named}, not a checkpoint: the download went wrong"
        return _not("html", what, source, "download it again, logged in or from the link of the raw file")
    if re.match(_JSON, start) and _is_text(head):
        said = re.search(rb'"(?:error|message|detail|title|error_description)"\s*:\s*"((?:[^"\\]|\\.){1,80})', head)
        if said:
            text = said.group(1).decode("utf-8", "replace")
            what = f"it is a JSON message of a server, {shown(text)}, not the checkpoint: the download went wrong"
            return _not("json", what, source, "download it again, logged in or from the link of the raw file")
        if b'"weight_map"' in head or b'"weight_map"' in source.read(max(source.size - 4096, 0), 4096):
            shards = re.findall(rb'"([^"\\]{1,100}\.(?:safetensors|bin|h5))"', source.read(0, 1 << 16))
            first = min(shards).decode("utf-8", "replace") if shards else ""
            words = f", such as {shown(first)}" if first else ""
            what = f"it is the index of weights in shards{words}: names, not weights"
            return _not("index", what, source, "name its folder, or one of the shards")
        what = "it is JSON text, not a checkpoint: a message of a server, or a configuration"
        return _not("json", what, source, "look into it, then download the checkpoint itself")
    if _is_text(head) and source.size < 4096 and b"\n" not in head.strip() and b"/" in head:
        what = "it is a short text that looks like a path: a symbolic link that Git checked out as a file"
        return _not("link-text", what, source, "name the file that it points to")
    if _is_text(head):
        first = head.strip().split(b"\n")[0][:60].decode("utf-8", "replace").strip()
        return _not("text", f"it is text that begins {first!r}, not a checkpoint", source, "look into it")
    return None


#: How JSON begins; a list of words in brackets, as vocabularies and settings have them, is none.
_JSON: Final = rb'\{\s*(?:"|\}|\Z)|\[\s*(?:["\[{\]]|-?\d[\d.eE+-]*\s*[,\]]|(?:true|false|null)\b|\Z)'


def _is_text(head: bytes) -> bool:
    if any(byte < 32 and byte not in b"\t\n\r\f" for byte in head):
        return False
    try:
        # A character may be cut at the end of the head.
        getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _compressed(head: bytes, source: Source) -> NotACheckpointError | None:
    name = source.name
    if head[:2] == b"\x1f\x8b":
        inner = _gzipped(head)
        step = f"tar -xzf {quote(name)}" if inner == " of a tar" else _unpacked("gunzip -c", name, ".gz")
        around = _around(source, "gzip", "a gzipped tar archive", step) if inner == " of a tar" else None
        if around is not None:
            return around
        if inner and inner != " of a tar" and _gzip_size(source) <= LIMITS.member_bytes:
            step = f"ckptool inspect {quote(f'{name}{MARK}{gzip_name(name)}')}"
        else:
            step += ", then name what it holds"
        return _not("gzip", f"it is gzip data{inner}", source, step)
    if head[:1] == b"\x78" and head[1:2] in b"\x01\x5e\x9c\xda" and len(head) > 2:
        return _zlib(head, source)
    for magic, kind, tool in (
        (b"BZh", "bzip2", "bunzip2 -c"),
        (b"\xfd7zXZ\0", "xz", "unxz -c"),
        (b"\x28\xb5\x2f\xfd", "zstd", "unzstd -c"),
        (b"7z\xbc\xaf\x27\x1c", "7z", "7z x"),
        (b"Rar!", "rar", "unrar x"),
    ):
        if head.startswith(magic):
            step = _unpacked(tool, name, "." + kind) if tool.endswith("-c") else f"{tool} {quote(name)}"
            return _not(kind, f"it is {kind} data", source, f"{step}, then name what it holds")
    return None


def _gzip_size(source: Source) -> int:
    """The bytes that gzip data inflates to, as it ends with their number modulo 2**32."""
    return int.from_bytes(source.read(max(0, source.size - 4), 4), "little")


def _gzipped(head: bytes) -> str:
    """What is in gzip data, by its first bytes, "" where that is not known."""
    try:
        plain = zlib.decompressobj(31).decompress(head, 512)
    except zlib.error:
        return ""
    if plain[:4] == b"PK\x03\x04":
        return " of a zip checkpoint"
    return " of a tar" if plain[257:262] == b"ustar" else " of a pickle" if plain[:1] == b"\x80" else ""


def _zlib(head: bytes, source: Source) -> NotACheckpointError | None:
    """What zlib compressed without a header of gzip, as joblib does."""
    try:
        plain = zlib.decompressobj().decompress(head, 512)
    except zlib.error:
        return None
    if plain[:1] == b"\x80":
        return _not(
            "joblib",
            "it is a pickle that zlib compressed, as joblib does",
            source,
            "joblib.load reads it, and runs what it names",
        )
    step = f"{_unpacked('zlib-flate -uncompress', source.name, '.zlib')}, then name what it holds"
    return _not("zlib", "it is zlib data", source, step)


def _unpacked(tool: str, name: str, suffix: str) -> str:
    """The command that unpacks a file, whatever it is called."""
    plain = name.removesuffix(suffix) if name.endswith(suffix) else name + ".unpacked"
    return f"{tool} < {quote(name)} > {quote(plain)}"


def _tensor_files(head: bytes, source: Source) -> NotACheckpointError | None:
    if len(head) > 9 and head[8:9] == b"{" and struct.unpack_from("<Q", head)[0] <= min(100_000_000, source.size):
        return _not("safetensors", "it is a safetensors file", source, f"ckptool inspect {quote(source.name)}")
    found = foreign_files.named(head, source)
    return _foreign(found, source) if found else None


def _foreign(found: foreign_files.Named, source: Source) -> NotACheckpointError:
    what, colon, detail = found.what.partition(": ")
    return _not(found.kind, f"it is {what}, not a torch checkpoint{colon}{detail}", source, found.tool)


def _archives(head: bytes, source: Source) -> UnreadableError | None:
    if head[257:262] == b"ustar" or is_header(head[:512]):
        member = head[:100].split(b"\0")[0].decode("utf-8", "replace")
        step = f"tar -xf {quote(source.name)}, then name the file inside"
        return _around(source, "tar", "a tar archive", step) or _not(
            "tar", f"it is a tar archive, first member {shown(member)}", source, step
        )
    if head[:4] == b"PK\x05\x06":
        return _not("empty-zip", "it is an empty zip archive", source)
    if head[:4] == b"PK\x07\x08":
        return _not("zip", "it is one part of a split zip archive", source)
    tail = source.read(max(source.size - 1024, 0), 1024)
    if b"PK\x05\x06" in tail and b"PK\x06\x07" in tail:
        what = "it ends like a zip checkpoint, but other bytes stand in front of it, or its start is lost"
        step = f"get a whole copy of the file, or {salvage_step(source.name)}"
        return MalformedError(what, path=source.name, next=step)
    return None


#: Words in the names of files that stand beside the weights, and may be larger: a zip of Stable-Baselines3.
_SMALL_CHANGE = re.compile(r"optim|variables|sched|random|rng|scaler|replay", re.I)


def _around(source: Source, kind: str, what: str, unpack: str) -> NotACheckpointError | None:
    """The error for an archive with checkpoints in it, which have addresses; None for one without."""
    inside = checkpoints_in(source)
    if not inside:
        return None
    names = [f"{shown(item.name)} ({human_bytes(item.size)})" for item in inside]
    held = names[0] if len(names) == 1 else f"{counted(len(names), 'file')} called like checkpoints: {listed(names)}"
    first = max(inside, key=lambda item: (not _SMALL_CHANGE.search(item.name), item.size))
    step = f"ckptool inspect {quote(f'{source.name}!{first.name}')}"
    if first.size > LIMITS.member_bytes and what != "a tar archive":
        step = unpack  # it may have to be inflated, and that not in memory
    return _not(kind, f"it is {what} that holds {held}", source, step)


#: How pickles of protocol 0, which are text, begin with a dict, a list, or a class that is called.
_OLD: Final = rb"\([dl]p?\d*\n|\(i[\w.]+\n\w+\n|c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n"
#: Bytes of a pickle that are followed to say what is in it.
_FOLLOWED: Final = 1 << 20


def _text_pickle(head: bytes, source: Source) -> UnreadableError | None:
    """A pickle of protocol 0, which is text."""
    return _pickle(head, source) if head[:1] in (b"(", b"c") and _is_text(head) else None


def _pickle(head: bytes, source: Source) -> UnreadableError | None:
    """A pickle without torch's format around it, whole or nearly."""
    marked = head[:1] == b"\x80" and head[1:2] <= b"\x05"
    if not marked and not head.startswith((b"(", b"]", b"}", b"c")):
        return None
    try:
        graph, end, _ = decode(source.read(0, min(source.size, _FOLLOWED)))
    except PickleError as error:
        nodes = cast("Sequence[Node]", error.seen)
        known = foreign_files.named_pickle(nodes, source)
        long = source.size > _FOLLOWED and isinstance(error, TruncatedPickleError)
        if known is not None:
            return _pickled(known, source)
        if long and (marked or re.match(_OLD, head)):
            return _bare(nodes, source)
        if not marked:
            return None
        what = "it begins like a bare pickle, not like a file of torch.save"
        return _not("pickle", what, source, "python -m pickletools shows a pickle without running it")
    if not marked and (len(graph.nodes) < 2 or source.read(end, 64).strip()):
        return None  # text that happens to begin like a pickle
    known = foreign_files.named_pickle(graph.nodes, source)
    return _pickled(known, source) if known is not None else _bare(graph.nodes, source)


def _pickled(found: foreign_files.Named, source: Source) -> NotACheckpointError:
    step = found.tool or f"python -m pickletools {quote(source.name)} shows it without running it"
    return _not(found.kind, f"it is {found.what}", source, step)


#: What values of Python, tensors and arrays are made of: no classes that a reader must have.
_PLAIN: Final = (
    r"torch(?:\.storage\._load_from_bytes|\._utils\.\w+|\.\w+Storage|\.Size|\.device|\.\w*\d+|\.bool)\Z"
    r"|numpy\.|_codecs\.|copy_?reg\.|collections\.|(?:__builtin__|builtins)\.(?!eval|exec|getattr|__import__)"
)


def _bare(nodes: Sequence[Node], source: Source) -> NotACheckpointError:
    """The error for a bare pickle: what is in it, as far as it was followed."""
    names = list(dict.fromkeys(f"{node.module}.{node.name}" for node in nodes if isinstance(node, Global)))
    tensors = any(name.startswith(("torch.storage._load", "torch._utils._rebuild")) for name in names)
    held = ["tensors"] * tensors + ["NumPy arrays"] * any(name.startswith("numpy.") for name in names)
    objects = [name for name in names if not re.match(_PLAIN, name)]
    what = "it is a bare pickle, written by pickle.dump and not by torch.save"
    what += f", with {listed(held)} in it" if held else ""
    what += f": pickle.load would call {listed(objects, most=3)}" if objects else ""
    step = f"python -m pickletools {quote(source.name)} shows it without running it"
    if held and not objects:
        step += "; pickle.load reads it, and torch.save makes a checkpoint of it"
    elif objects:
        step += "; do not load it unless you trust who made it"
    return _not("pickle", what, source, step)


#: (records that must be there, kind, what it is)
_ZIP_KINDS = (
    (("constants.pkl", "bytecode.pkl"), "mobile-zip", "a PyTorch Mobile model"),
    (("constants.pkl",), "torchscript", "a TorchScript archive"),
    (("archive_format", "archive_version"), "pt2", "a torch.export program (.pt2)"),
    ((".data/extern_modules",), "torch-package", "a torch.package archive"),
    ((".data/python_version",), "torch-package", "a torch.package archive"),
    (("model.json",), "torchscript-1.0", "a TorchScript archive of torch 1.0"),
    (("serialized_exported_program.json",), "pt2", "a torch.export program"),
)


def zip_kind(archive: Archive) -> NotACheckpointError | None:
    """The error that names a zip archive which is no checkpoint; None when it may be one."""
    source = archive.source
    for records, kind, what in _ZIP_KINDS:
        if all(archive.find(name) is not None for name in records):
            step = f"what to do with it: ckptool inspect {quote(source.name)}"
            return _not(kind, f"it is {what}: a program, not only weights", source, step)
    if archive.find("data.pkl") is not None:
        return None
    names = [record.name for record in archive.records]
    other = foreign_files.named_archive(archive)
    if other is not None:
        return _foreign(other, source)
    by = foreign_files.packed_by(archive)
    what = f"{by}, a zip archive" if by else "a zip archive"
    around = _around(source, "zip", what, f"unzip {quote(source.name)}, then name the file inside")
    if around is not None:
        return around
    roots = [name for name in names if name.endswith("/data.pkl")]
    if roots:
        what = f"its {roots[0]!r} is not in the folder of its first record, where torch looks"
        return _not("zip", what, source)
    shown = ", ".join(repr(name) for name in names[:3])
    return _not("zip", f"it is a zip archive without data.pkl (it holds {shown or 'nothing'})", source)


def damaged_zip(source: Source, error: MalformedError) -> UnreadableError:
    """The error for a zip that has no usable directory."""
    head = source.read(0, 512)
    name_size = int.from_bytes(head[26:28], "little")
    name = head[30 : 30 + name_size].decode("utf-8", "replace")
    error.path = source.name
    rescue = salvage_step(source.name)
    extent = extent_of_zip(source)
    if b"PK\x05\x06" in source.read(max(source.size - 66_000, 0), 66_000):
        error.next = rescue if extent is not None else ""
        return error
    if extent is None:
        whose = "a torch checkpoint" if name.endswith("/data.pkl") else f"a zip archive (first record {shown(name)})"
        what = (
            f"{whose} that is cut: it ends after {human_bytes(source.size)}, before the directory that a zip ends with"
        )
        return MalformedError(what, path=source.name, next="copy or download it again, whole")
    all_there = ", what is missing or damaged is its end" if extent.whole == extent.tensors else ""
    what = (
        f"a torch checkpoint that is cut at {human_bytes(extent.there)} of about {human_bytes(extent.about)}:"
        f" {extent.whole:,} of {counted(extent.tensors, 'tensor')} whole{all_there}"
    )
    return MalformedError(what, path=source.name, next=f"download it again, or {rescue}")
