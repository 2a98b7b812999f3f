"""The only module that imports torch, and only inside of functions: real loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import TargetError, UnreadableError
from .locations import MapLocation

if TYPE_CHECKING:
    import torch

__all__ = [
    "at_path",
    "cast_elements",
    "count_nonfinite",
    "load_object",
    "mean_elements",
    "model_state",
    "need_torch",
    "tensors_in",
]


def load_object(path: str, map_location: MapLocation = None) -> Any:
    """``torch.load(path, map_location, weights_only=True)``: never anything less safe.

    Raises UnreadableError with the first sentence of torch's error.
    """
    import pickle

    torch = need_torch("really loading it", path)
    location = dict(map_location) if isinstance(map_location, Mapping) else map_location
    try:
        return torch.load(path, map_location=location, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, AttributeError, TypeError, ValueError, EOFError, OSError) as error:
        raise UnreadableError(f"torch.load refuses it: {_first_sentence(error)}", path=path) from error
    except (AssertionError, ImportError, KeyError, IndexError) as error:
        # Backends that are not there, and operands that the restricted unpickler does not expect.
        what = f"torch.load fails with {type(error).__name__}: {_first_sentence(error)}"
        raise UnreadableError(what, path=path) from error


def count_nonfinite(
    data: bytearray, dtype: str, view: tuple[tuple[int, ...], tuple[int, ...]] | None = None
) -> tuple[int, int]:
    """How many elements are NaN, and how many infinite; ``view`` is the (shape, stride) of one with holes."""
    torch = need_torch("reading values")
    values = torch.frombuffer(data, dtype=getattr(torch, dtype))
    if view is not None:
        values = values.as_strided(*view)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.element_size() == 1:
        # float8 types know few operations; what is no number in them is none in float32.
        values = values.to(torch.float32)
    wide = values.dtype if values.dtype in (torch.float32, torch.float64) else torch.float32
    if bool(torch.isfinite(torch.sum(values, dtype=wide))):
        return 0, 0  # one of them would have shown in the sum; a sum that overflows is looked at closely
    return int(torch.isnan(values).sum()), int(torch.isinf(values).sum())


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


def cast_elements(data: bytes, dtype: str, target: str) -> tuple[bytes, int]:
    """Little-endian elements in another dtype, as ``Tensor.to`` has them, and how many finite values are none now."""
    torch = need_torch("casting values")
    values = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype))
    out, made = _room(torch, values.numel(), getattr(torch, target))
    made.copy_(values)
    return bytes(out), _overflowed(torch, values, made)


def _overflowed(torch: Any, values: Any, made: Any) -> int:
    if not (values.is_floating_point() and made.is_floating_point()):
        return 0
    largest = torch.finfo(made.dtype).max
    if largest >= torch.finfo(values.dtype).max:
        return 0
    if values.element_size() == 1:
        values = values.to(torch.float32)
    # NaN and Inf show in the extremes; only then every value is looked at.
    low, high = torch.aminmax(values)
    if -largest <= float(low) and float(high) <= largest:
        return 0
    wide = made if made.element_size() > 1 else made.to(torch.float32)
    return int((torch.isfinite(values) & ~torch.isfinite(wide)).sum())


def mean_elements(parts: Sequence[bytes], weights: Sequence[float], dtype: str, wide: str) -> bytes:
    """The weighted mean of elements of a dtype, summed in the dtype ``wide`` in the order given, in their own dtype."""
    torch = need_torch("averaging values")
    kind = getattr(torch, dtype)
    sums: Any = None
    for data, weight in zip(parts, weights):
        values = torch.frombuffer(bytearray(data), dtype=kind).to(getattr(torch, wide))
        sums = values * weight if sums is None else sums.add_(values, alpha=weight)
    out, mean = _room(torch, sums.numel(), kind)
    mean.copy_(sums / sum(weights))
    return bytes(out)


def _room(torch: Any, count: int, dtype: Any) -> tuple[bytearray, Any]:
    """Memory for elements, and a tensor over it: the way to bytes where numpy is not installed."""
    out = bytearray(count * torch.empty((), dtype=dtype).element_size())
    return out, torch.frombuffer(out, dtype=dtype)


def need_torch(purpose: str, path: str = "") -> Any:
    """The module torch; raises UnreadableError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        hint = "pip install torch (a CPU build is enough)"
        raise UnreadableError(f"{purpose} needs torch, which is not installed", path=path, next=hint) from error
    return torch


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
