"""The lists by torch version: against the torch that is installed, and against what the others computed themselves."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import pickletools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptool.pickles import opcodes as op
from ckptool.safety.torch_lists import (
    INSTALLED,
    NEWEST,
    VERSIONS,
    allowed,
    installed_version,
    maps_python2,
    newobj_targets,
    refused_opcodes,
    registered,
    rules,
)

#: What ``_get_allowed_globals()`` gave in the released torch: its size, and the SHA-256 of the sorted names, one a
#: line, cut to 16 digits. (The registered names and the opcodes were compared there, too.)
COMPUTED = {
    "1.13": (90, "80e2bf31ea8ec860"),
    "2.0": (90, "a25243bd17d84621"),
    "2.1": (90, "a25243bd17d84621"),
    "2.2": (94, "2568872790c5290f"),
    "2.3": (96, "0a04457cb8c45ed0"),
    "2.4": (119, "edf8071528d21f1c"),
    "2.5": (122, "3404a6795e9b4946"),
    "2.6": (128, "461c6dd8b2f9b2bc"),
    "2.7": (143, "8a45aeb8b9daf8c1"),
    "2.8": (144, "42e4591f56c40cf9"),
    "2.9": (144, "42e4591f56c40cf9"),
    "2.10": (144, "42e4591f56c40cf9"),
    "2.13": (144, "42e4591f56c40cf9"),
}

#: Read from their sources: see fixtures/generators/torch_facts.py.
READ = {"2.11", "2.12", "2.14", "2.15"}

#: Asks a fresh torch, because other tests and libraries register names of their own.
ASK = """
import json
import torch
from torch import _weights_only_unpickler as restricted
listed = sorted(restricted._get_allowed_globals())
user = sorted(getattr(restricted, "_get_user_allowed_globals", set)())  # torch 2.4 and later
print(json.dumps([torch.__version__, listed, user]))
"""

PROTO2 = b"\x80\x02"
PROTO3 = b"\x80\x03"


def named(name: str) -> bytes:
    module, _, attribute = name.rpartition(".")
    return b"c" + f"{module}\n{attribute}\n".encode()


def key(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def installed() -> str:
    torch = pytest.importorskip("torch")
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in VERSIONS:
        pytest.skip(f"no lists for torch {version}")
    return version


def takes(stream: bytes) -> bool:
    """Whether the restricted unpickler of the installed torch executes a pickle."""
    from torch import _weights_only_unpickler as restricted

    try:
        restricted.Unpickler(io.BytesIO(stream), encoding="utf-8").load()  # type: ignore[no-untyped-call]
    except Exception:
        return False
    return True


def test_the_lists_are_those_that_the_installed_torch_computes() -> None:
    version = installed()
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, timeout=300, check=True)
    full, listed, user = json.loads(done.stdout.splitlines()[-1])
    assert full.startswith(version + ".")
    assert allowed(version) == set(listed)
    assert registered(version) == set(user)


@pytest.mark.parametrize("version", COMPUTED)
def test_the_lists_are_those_that_each_torch_computed(version: str) -> None:
    text = "\n".join(sorted(allowed(version)))
    assert (len(allowed(version)), hashlib.sha256(text.encode()).hexdigest()[:16]) == COMPUTED[version]


@pytest.mark.parametrize("version", ["", "2", "2.99", "2.13.0", "1.12", " 2.6", "v2.6"])
def test_an_unknown_version_is_told(version: str) -> None:
    for ask in (allowed, registered, refused_opcodes, maps_python2, newobj_targets, rules):
        with pytest.raises(ValueError, match=r"no lists for torch .*1\.13, 2\.0"):
            ask(version)


def test_the_refused_opcodes() -> None:
    assert all(code in op.NAMES for version in VERSIONS for code in refused_opcodes(version))
    assert refused_opcodes(NEWEST) == set(op.NAMES) - op.ACCEPTED
    assert refused_opcodes("1.13") - refused_opcodes("2.0") == {op.BINFLOAT}
    assert all(refused_opcodes(version) == refused_opcodes(NEWEST) for version in VERSIONS[1:])


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_installed_torch_refuses_these_opcodes() -> None:
    refused = refused_opcodes(installed())
    from torch import _weights_only_unpickler as restricted

    for code in op.NAMES:
        # Lists and a mark to work on; what fails otherwise fails later than at "Unsupported operand".
        stream = PROTO2 + b"]](]" + bytes([code]) + bytes(16)
        try:
            restricted.Unpickler(io.BytesIO(stream)).load()  # type: ignore[no-untyped-call]
            message = ""
        except Exception as error:
            message = str(error)
        assert (message == f"Unsupported operand {code}") == (code in refused), op.NAMES[code]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_the_installed_torch_keeps_these_rules() -> None:
    version = installed()
    told = rules(version)
    ordered = named("collections.OrderedDict") + b")"
    counter = named("collections.Counter") + b")R"
    assert takes(PROTO2 + ordered + b"R.")
    assert takes(PROTO2 + ordered + b"\x81.") == told.newobj_listed
    if "collections.Counter" in allowed(version):
        assert takes(PROTO2 + counter + b"}" + key("a") + b"K\x01sb.") == told.build_listed
        assert takes(PROTO2 + counter + key("a") + b"K\x01s.")
    assert takes(PROTO2 + b"]K\x05aK\x00K\x01s.") != told.checks_setitem
    assert takes(PROTO2 + named("torch.storage.UntypedStorage") + b")R.")
    for proto, number in ((PROTO2, 2), (PROTO3, 3), (b"", 0)):
        assert takes(proto + named("__builtin__.bytearray") + b")R.") == maps_python2(version, number)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_pickler_writes_for_plain_data_is_read_by_all(version: str) -> None:
    stream = pickle.dumps({"a": [1, 300, -1, 2**40, (), (None, True)], "b": {}}, protocol=2)
    assert not {ord(code.code) for code, _, _ in pickletools.genops(stream)} & refused_opcodes(version)
    floats = pickle.dumps(0.5, protocol=2)
    refused = {ord(code.code) for code, _, _ in pickletools.genops(floats)} & refused_opcodes(version)
    assert refused == ({op.BINFLOAT} if version == "1.13" else set())


# -- Which torch a verdict is about unless another is named: the installed one.


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = '2.13.0+cpu'", "2.13"),
        ('from typing import Optional\n__version__ = "2.6.1"\n', "2.6"),
        ("__version__ = '1.5.0'", VERSIONS[0]),
        ("__version__ = '2.99.0'", NEWEST),
        ("__version__ = '3.0.0'", NEWEST),
        ("nothing", ""),
        ("", ""),
    ],
)
def test_the_version_of_the_installed_torch_is_read_without_importing_it(
    text: str, version: str, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(text)
    assert installed_version([str(tmp_path / "nowhere"), str(tmp_path)]) == version


def test_here_it_is_the_torch_that_is_imported() -> None:
    torch: Any = pytest.importorskip("torch")
    assert ".".join(torch.__version__.split(".")[:2]) == INSTALLED
