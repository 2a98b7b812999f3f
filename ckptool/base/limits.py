"""Every bound on what a file may make ckptool allocate or print, with its reason.

A hostile file declares any size it likes; nothing here is ever taken from the file.
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """All limits in one frozen value; ``LIMITS._replace(...)`` gives another."""

    #: bytes of one pickle, inflated. 200,000 tensors need about 55 MB; numpy arrays live inside the pickle.
    pickle_bytes: int = 1 << 30
    #: nodes of one pickle: 200,000 tensors with their optimizer take about 6 million.
    nodes: int = 40_000_000
    #: the largest number in a memo, where the unpickler that is asked keeps an array of them, 16 bytes each.
    memo: int = 40_000_000
    #: nodes that a pickle may have whatever its size, and bytes that each further one must take: those of tensors and
    #: their optimizers take nine, lists of pairs of numbers ten. Made by hand, a node takes one: a megabyte of them
    #: would take ten seconds.
    few_nodes: int = 250_000
    bytes_per_node: int = 8
    #: times that a deflated record may grow; deflate itself stops at 1,032, text and numbers stay below 30.
    inflation: int = 100
    #: bytes that a deflated storage may grow to beyond that, all zeros: some seconds of work.
    inflated_bytes: int = 4 << 30
    #: bytes of a small text record (``version``, ``byteorder``): the real ones have under 64.
    text_bytes: int = 4096
    #: decimal digits of one integer: CPython itself stops at 4,300 when it prints one.
    int_digits: int = 4300
    #: findings or globals printed one by one; the rest is counted.
    listed: int = 10_000
    #: characters of one name or value in a table; JSON is never cut.
    cell_chars: int = 120
    #: characters of a path that are built; no model nests its names this deep.
    path_chars: int = 600
    #: places at which tensors, texts and entries are listed once more, after the first place of each: tied weights
    #: have two or three, and a list of two bytes for each place has millions.
    places: int = 100_000
    #: calls within the call that makes a tensor, and tensors within tensors: torch itself writes three or four levels.
    tensor_depth: int = 8
    #: dimensions of one tensor: torch itself allows 64 in most operations; more is hostile or nonsense.
    dimensions: int = 1024
    #: members of a tar archive that are looked at: each costs a read, and training runs have some hundreds.
    members: int = 100_000
    #: bytes of a deflated or gzipped member that is opened in memory: the models that such archives hold (agents of
    #: stable-baselines3, taggers of AllenNLP) are small, and a larger one is better unpacked once.
    member_bytes: int = 256 << 20
    #: archives within archives: two are seen (a zip in a tar.gz), more is hostile or a mistake.
    nesting: int = 8
    #: files of folders that are open at once, of all folders together: every system allows a process 64.
    open_files: int = 24


LIMITS = Limits()
