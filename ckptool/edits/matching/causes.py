"""Why keys of one model do not load into another form of it: the reasons that names and shapes show."""

from __future__ import annotations

from .adapters import adapter_causes
from .fused import Side, fused_causes
from .names import Cause, Comparison
from .sizes import size_causes
from .state_dict_errors import Mismatch


def causes_of(own: Side, target: Side, rest: Comparison) -> list[Cause]:
    """Return the reasons for the differences that are left."""
    sizes = [
        Mismatch(item.key, have, want)
        for item in rest.sizes
        if not own.specs[item.key].part
        and (have := own.shape(item.key)) is not None
        and (want := target.shape(item.key)) is not None
    ]
    shapes = {name: spec.shape for name, spec in own.specs.items()}
    return [
        *adapter_causes(own, target.specs, rest),
        *(size_causes(sizes, shapes) if sizes else []),
        *fused_causes(own, target, rest),
    ]
