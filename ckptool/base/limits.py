"""All limits on memory, time and output that a file may make ckptool spend, each with its reason.

A hostile file declares any size it likes, so no limit is ever taken from the file.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from .records import NamedTuple


class Limits(NamedTuple):
    """All limits; ``LIMITS._replace(...)`` derives others."""

    #: bytes of one inflated pickle; 200,000 tensors need about 55 MB, and numpy arrays live inside the pickle
    pickle_bytes: int = 1 << 30
    #: nodes of one pickle; 200,000 tensors with their optimizer take about 6 million
    nodes: int = 40_000_000
    #: the largest memo index; unpicklers implemented in C keep an array of 16 bytes per index
    memo: int = 40_000_000
    #: nodes allowed in a pickle of any size, and bytes required per further node. Tensors and their optimizers take
    #: nine bytes per node, lists of number pairs ten. A crafted node takes one byte: a megabyte of them would take ten
    #: seconds.
    few_nodes: int = 250_000
    bytes_per_node: int = 8
    #: open marks of one pickle; nested tuples open one each
    marks: int = 1_000_000
    #: POP and DUP opcodes in one pickle; picklers write a POP only for tuples that contain themselves
    discards: int = 1_000_000
    #: growth factor of a deflated record; deflate stops at 1,032, text and numbers stay below 30
    inflation: int = 100
    #: bytes up to which a deflated storage may exceed this factor (all zeros); inflating them takes some seconds
    inflated_bytes: int = 4 << 30
    #: bytes of a small text record (``version``, ``byteorder``); real ones have fewer than 64
    text_bytes: int = 4096
    #: decimal digits of one integer; CPython refuses to print more than 4,300
    int_digits: int = 4300
    #: times that one pickle names a global. Picklers name each class once, and then fetch it from the memo; a file
    #: of 200,000 tensors names some hundred. A million names would take 700 MB.
    names: int = 300_000
    #: findings or globals printed one by one; the rest are counted
    listed: int = 10_000
    #: characters of one name or value in a table; JSON is never truncated
    cell_chars: int = 120
    #: characters of a path; no real model nests its names this deep
    path_chars: int = 600
    #: paths listed for tensors, strings and entries in addition to the first path of each. Tied weights have two or
    #: three paths; a list that spends two bytes per reference can have millions.
    places: int = 100_000
    #: calls within the call that makes a tensor, and tensors within tensors; torch writes three or four levels
    tensor_depth: int = 8
    #: dimensions of one tensor; torch allows 64 in most operations, so more is hostile or nonsense
    dimensions: int = 1024
    #: members read from a tar archive; each costs a read, and training runs have some hundreds
    members: int = 100_000
    #: bytes of a deflated or gzipped member that is opened in memory. Models in such archives (agents of
    #: stable-baselines3, taggers of AllenNLP) are small; a larger one is better unpacked once.
    member_bytes: int = 256 << 20
    #: bytes of a stream that are copied to a temporary file; an endless stream must not fill the disk
    spooled_bytes: int = 64 << 30
    #: nested archives; two occur in practice (a zip in a tar.gz), more is hostile or a mistake
    nesting: int = 8
    #: files of all folders that are open at once; every system allows a process 64
    open_files: int = 24
    #: bytes that one command reads from afar, unless it is allowed more; lists of tensors need less than a MB, and
    #: what needs more than this is better downloaded once
    download_bytes: int = 1 << 30
    #: requests for one remote file that are under way at once; the headers of 680 records are 11 round trips
    requests: int = 64
    #: bytes of one remote file that are kept in memory
    remote_bytes: int = 40 << 20
    #: files in one remote folder; the largest models have some hundreds of shards, ranks of large runs some thousands
    remote_files: int = 100_000
    #: bytes of a remote object that is written; S3 allows this much
    object_bytes: int = 5 << 40
    #: seconds for the list of the files in one remote folder; 100,000 files are 100 pages
    listing_seconds: float = 120.0
    #: how often a request is sent again after a failure that may pass, with growing pauses of a second in total
    retries: int = 3
    #: seconds in which the last of these is sent, less the time to wait for it; and seconds of one request with its
    #: answer of at most 4 MiB
    retry_seconds: float = 60.0
    request_seconds: float = 120.0
    #: bytes of an answer with no content of an object, such as the list of the files in a folder
    answer_bytes: int = 64 << 20
    #: seconds in which a server must accept a connection, and seconds in which the next bytes must come
    connect_seconds: float = 5.0
    read_seconds: float = 10.0


LIMITS = Limits()

#: Bytes of remote files that the command under way has announced to read so far. None outside of a command line: there
#: each call has its own limit.
ANNOUNCED: Final[ContextVar[int | None]] = ContextVar("announced", default=None)
