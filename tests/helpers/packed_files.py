"""Files packed into archives and arrays, and an object whose pickle calls a function."""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from typing import Any

import numpy as np
import torch


class Recorded:
    """Makes an unpickler call ``os.system``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


def zipped(data: bytes, member: str = "policy.dat", method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("readme.txt", "hello")
        archive.writestr(member, data)
    return out.getvalue()


def tarred(data: bytes, member: str = "x/policy.dat", mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo(member)
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def beside_tensors(data: bytes, record: str = "config") -> bytes:
    """A file of torch.save with another record."""
    out = io.BytesIO()
    torch.save({"w": torch.ones(2)}, out)
    with zipfile.ZipFile(out, "a") as archive:
        archive.writestr(f"archive/extra/{record}", data)
    return out.getvalue()


def object_array(data: bytes) -> bytes:
    """An .npy file of objects, in which the pickle of the array is another one."""
    out = io.BytesIO()
    np.save(out, np.array([None], dtype=object), allow_pickle=True)
    size = int.from_bytes(out.getvalue()[8:10], "little")
    return out.getvalue()[: 10 + size] + data
