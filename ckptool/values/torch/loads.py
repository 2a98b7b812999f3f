"""Real loads, and real models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...base.errors import TargetError, UnreadableError
from ...base.map_location import MapLocation
from ...files.archives import is_address, open_any

if TYPE_CHECKING:
    import torch

# -- The door to torch


def need_torch(purpose: str, path: str = "") -> Any:
    """The module torch; raises UnreadableError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        hint = "pip install torch (a CPU build is enough)"
        raise UnreadableError(f"{purpose} needs torch, which is not installed", path=path, next=hint) from error
    return torch


def load_object(path: str, map_location: MapLocation = None) -> Any:
    """``torch.load(path, map_location, weights_only=True)``: never anything less safe.

    Raises UnreadableError with the first sentence of torch's error.
    """
    import pickle
    import warnings

    torch = need_torch("really loading it", path)
    location = dict(map_location) if isinstance(map_location, Mapping) else map_location
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own deprecations, which name lines of ours
            return torch.load(_readable(path), map_location=location, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, OSError) as error:
        raise UnreadableError(f"torch.load refuses it: {_first_sentence(error)}", path=path) from error
    except Exception as error:
        # Of any class: backends that are not there, operands that the unpickler does not expect, safetensors' own.
        what = f"torch.load fails with {type(error).__name__}: {_first_sentence(error)}"
        raise UnreadableError(what, path=path) from error


def _readable(path: str) -> Any:
    """What torch can read: the path, or the bytes of a file within an archive."""
    if not is_address(path):
        return path
    import io

    source = open_any(path)
    try:
        return io.BytesIO(source.read(0, source.size))
    finally:
        source.close()


def _first_sentence(error: BaseException) -> str:
    """Torch's messages run over many lines of advice; the cause is in one of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for mark in ("Unsupported ", "WeightsUnpickler error: "):
        for line in lines:
            if mark in line and not line.endswith(mark.strip()):
                return line.partition("WeightsUnpickler error:")[2].strip() or line
    return lines[0] if lines else type(error).__name__


def tensors_in(loaded: Any) -> list[torch.Tensor]:
    """Every tensor in dicts, lists and tuples, each object once."""
    import torch

    found: list[torch.Tensor] = []
    seen: set[int] = set()
    work = [loaded]
    while work:
        value = work.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            work.extend(value.values())
        elif isinstance(value, list | tuple | set):
            work.extend(value)
    return found


def at_path(loaded: Any, steps: list[str | int]) -> Any:
    """The object that the steps lead to: keys of mappings, numbers of sequences."""
    for step in steps:
        loaded = loaded[step]
    return loaded


def model_state(spec: str) -> Mapping[str, Any]:
    """The state dict of the model that ``package.module:callable`` makes, built on the meta device.

    This imports and runs what it names, the user's own code: the current folder is on the path, as with ``python -m``,
    and what the code prints goes to stderr. Raises TargetError where that does not give a model.
    """
    import os
    import sys
    from contextlib import redirect_stdout
    from importlib import import_module

    name, colon, attribute = spec.partition(":")
    if not colon or not attribute or not all(part.isidentifier() for part in (*name.split("."), *attribute.split("."))):
        step = "name a module and what in it makes the model, such as models.unet:build"
        raise TargetError(f"{spec!r} is not PACKAGE.MODULE:CALLABLE", next=step)
    torch = need_torch("building a model", spec)
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            made = _imported(spec, import_module, name)
            for part in attribute.split("."):
                made = _attribute(spec, made, part)
            if not isinstance(made, torch.nn.Module | Mapping):
                made = _built(spec, torch, made)
            if isinstance(made, torch.nn.Module):
                made = made.state_dict()
    finally:
        sys.path[:] = before
    if not isinstance(made, Mapping):
        what = f"it gives {type(made).__name__}, where a torch.nn.Module or a state dict is wanted"
        raise TargetError(what, path=spec, next="name a function without parameters that returns the model")
    return made


def _imported(spec: str, load: Callable[[str], Any], name: str) -> Any:
    try:
        return load(name)
    except (Exception, SystemExit) as error:
        what = f"importing {name} ends with {type(error).__name__}: {_first_sentence(error)}"
        step = "run ckptool where 'python -c \"import " + name + "\"' works"
        raise TargetError(what, path=spec, next=step) from error


def _attribute(spec: str, made: Any, part: str) -> Any:
    try:
        return getattr(made, part)
    except AttributeError as error:
        from difflib import get_close_matches

        near = get_close_matches(part, [name for name in dir(made) if not name.startswith("_")], 1)
        what = f"there is no {part!r} in {getattr(made, '__name__', type(made).__name__)}"
        raise TargetError(what, path=spec, next=f"did you mean {near[0]!r}?" if near else "") from error


def _built(spec: str, torch: Any, make: Any) -> Any:
    try:
        with torch.device("meta"):
            return make()
    except (Exception, SystemExit) as error:
        what = f"calling it on the meta device ends with {type(error).__name__}: {_first_sentence(error)}"
        step = "name a function without parameters that builds the model and reads no weights"
        raise TargetError(what, path=spec, next=step) from error
