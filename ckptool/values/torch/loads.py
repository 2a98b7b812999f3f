"""Access to torch itself: load a checkpoint for real, build a model, and multiply by its BLAS."""

from __future__ import annotations

import io
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ...base.addresses import is_remote
from ...base.errors import CkptoolError, TargetError, UnreadableError
from ...base.map_location import MapLocation
from ...base.steps import STDIN
from ...files.archives import file_name, is_address, open_any
from ...files.downloads import expect_reads
from ...files.sources import Plan, Span
from ...files.write.output import write_file

if TYPE_CHECKING:
    import torch


#: The numbers of threads that ``one_thread`` has to restore.
_changing = threading.Lock()
_threads: list[int] = []


def need_torch(purpose: str, path: str = "") -> Any:
    """Return the module torch; raise UnreadableError if it is not installed.

    Without numpy, torch warns at its first import, because it compiles a function that could use arrays. ckptool passes
    bytes to torch and needs none.
    """
    import warnings

    try:
        with _signals_after(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            import torch
    except ImportError as error:
        raise _no_torch(purpose, path) from error
    return torch


def check_torch(purpose: str, path: str = "") -> None:
    """Raise UnreadableError if torch is not installed, without importing it."""
    if not _torch_file():
        raise _no_torch(purpose, path)


def _torch_file() -> str:
    try:
        found = find_spec("torch")
    except ImportError:
        found = None
    return (found and found.origin) or ""


def _no_torch(purpose: str, path: str) -> UnreadableError:
    hint = "pip install torch (a CPU build is enough)"
    return UnreadableError(f"{purpose} needs torch, which is not installed", path=path, next=hint)


@cache
def float32_product() -> Callable[[Any, Any], Any] | None:
    """Return a function that multiplies two row-major matrices of NumPy by torch's own BLAS; None if that is not found.

    The library loads in a sixth of the time of ``import torch``. On an x86 CPU, torch calls ``sgemm`` for any two
    float32 matrices (ATen/native/CPUBlas.cpp), except for one row times one column, so the bits are torch's.
    """
    if platform.machine() != "x86_64" or not (torch := _torch_file()):
        return None
    try:
        import ctypes  # takes milliseconds to load, and some builds of Python lack it

        import numpy

        library = ctypes.CDLL(os.path.join(os.path.dirname(torch), "lib", "libtorch_cpu.so"))
        sgemm, use_threads = library.sgemm_, library.MKL_Set_Num_Threads_Local
    except (ImportError, OSError, AttributeError):
        return None
    one, zero = (ctypes.byref(ctypes.c_float(number)) for number in (1, 0))

    def product(left: Any, right: Any) -> Any:
        result = numpy.empty((left.shape[0], right.shape[1]), numpy.float32)
        # The matrices are column-major to BLAS, so the factors change places. Integers of 64 bits also serve a BLAS
        # that reads 32.
        columns, rows, inner = (ctypes.byref(ctypes.c_int64(size)) for size in (*result.shape[::-1], left.shape[1]))
        a, b, c = (ctypes.c_void_p(matrix.ctypes.data) for matrix in (right, left, result))
        threads = use_threads(1)  # several pieces are computed at the same time
        sgemm(b"n", b"n", columns, rows, inner, one, a, columns, b, inner, zero, c, columns)
        use_threads(threads)
        return result

    return product


@contextmanager
def one_thread(torch: Any) -> Iterator[None]:
    """Make torch compute with one thread, so that sums do not depend on the machine or the number of threads.

    Several may be active at the same time; the last one to end restores the number of threads.
    """
    with _changing:
        _threads.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _changing:
            before = _threads[0]
            _threads.pop()
            if not _threads:
                torch.set_num_threads(before)


def torch_dtype(torch: Any, name: str) -> Any:
    """Return a torch dtype; raise UnreadableError if the installed torch is too old to have it."""
    found = getattr(torch, name, None)
    if found is None:
        raise UnreadableError(f"torch {torch.__version__} has no dtype {name}", next="pip install --upgrade torch")
    return found


@contextmanager
def _signals_after() -> Iterator[None]:
    """Delay signals until torch is imported, because its extension modules turn their exceptions into ImportError."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def load_object(path: str, map_location: MapLocation = None, *, expected: bool = False) -> Any:
    """Return ``torch.load(path, map_location, weights_only=True)``; never load in a less safe way.

    ``expected`` says that the bytes of a remote file were announced before. Raise UnreadableError with the line of
    torch's error that names the cause, RefusedError for a remote file that is too large.
    """
    import pickle
    import warnings

    torch = need_torch("loading it with torch.load", path)
    location = dict(map_location) if isinstance(map_location, Mapping) else map_location
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecation warnings would name lines in ckptool
            with _readable(path, expected) as readable:
                return torch.load(readable, map_location=location, weights_only=True)
    except CkptoolError:
        raise
    except (RuntimeError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, OSError) as error:
        raise UnreadableError(f"torch.load refuses it: {_cause(error)}", path=path) from error
    except Exception as error:
        # Any class is possible: missing backends, operands that the unpickler does not expect, errors of safetensors.
        message = f"torch.load fails with {type(error).__name__}: {_cause(error)}"
        raise UnreadableError(message, path=path) from error


@contextmanager
def _readable(path: str, expected: bool) -> Iterator[Any]:
    """Yield what torch can read: the path, a copy of a remote file, or the bytes of a member or of standard input."""
    if path != STDIN and not (is_address(path) or is_remote(path)):
        yield path
        return
    with closing(open_any(path)) as source:
        if not expected:
            expect_reads([Span(source, 0, source.size)])
        if not is_remote(path) or is_address(path):
            yield io.BytesIO(source.read(0, source.size))
            return
        with TemporaryDirectory() as folder:  # torch.load reads some formats from a file with a name alone
            name = os.path.join(folder, f"model{os.path.splitext(file_name(path))[1]}")
            write_file(Plan((Span(source, 0, source.size),)), name, ())
            yield name


def _cause(error: BaseException) -> str:
    """Return the line of an error that names the cause, because torch adds many lines of advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for phrase in ("Unsupported ", "WeightsUnpickler error: "):
        for line in lines:
            if phrase in line and not line.endswith(phrase.strip()):
                return line.partition("WeightsUnpickler error:")[2].strip() or line
    return lines[0] if lines else type(error).__name__


def tensors_in(loaded: Any) -> list[torch.Tensor]:
    """Return every tensor in dicts, lists and tuples, each object once."""
    import torch

    tensors: list[torch.Tensor] = []
    seen: set[int] = set()
    work = [loaded]
    while work:
        value = work.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, Mapping):
            work.extend(value.values())
        elif isinstance(value, list | tuple | set):
            work.extend(value)
    return tensors


def model_state(spec: str) -> Mapping[str, Any]:
    """Return the state dict of the model that ``package.module:callable`` makes, built on the meta device.

    This imports and runs the user's own code. The current folder is on the path, as with ``python -m``, and output of
    the code goes to stderr. Raise TargetError if the result is not a model or state dict.
    """
    import sys
    from contextlib import redirect_stdout
    from importlib import import_module

    name, colon, attribute = spec.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in (*name.split("."), *attribute.split("."))):
        step = "name a module and what in it makes the model, such as models.unet:build"
        raise TargetError(f"{spec!r} is not PACKAGE.MODULE:CALLABLE", next=step)
    torch = need_torch("building a model", spec)
    path = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            with _user_code(spec, f"importing {name}", f"run ckptool where 'python -c \"import {name}\"' works"):
                model: Any = import_module(name)
            with _user_code(spec, f"looking for {attribute} in {name}", "name what makes the model there"):
                model = attrgetter(attribute)(model)
            if not isinstance(model, torch.nn.Module | Mapping):
                step = "name a function without parameters that builds the model and reads no weights"
                with _user_code(spec, "calling it on the meta device", step), torch.device("meta"):
                    model = model()
            if isinstance(model, torch.nn.Module):
                model = model.state_dict()
    finally:
        sys.path[:] = path
    if not isinstance(model, Mapping):
        message = f"it gives {type(model).__name__}, where a torch.nn.Module or a state dict is wanted"
        raise TargetError(message, path=spec, next="name a function without parameters that returns the model")
    return model


@contextmanager
def _user_code(spec: str, action: str, step: str) -> Iterator[None]:
    """Turn any exception of the user's code, or its exit, into a TargetError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        message = f"{action} ends with {type(error).__name__}: {_cause(error)}"
        raise TargetError(message, path=spec, next=step) from error
