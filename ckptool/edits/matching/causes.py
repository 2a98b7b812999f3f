"""Why keys of one model do not load into another form of it: the reasons that names and shapes show."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.steps import AnyStep
from ...checkpoint.checkpoint import Checkpoint
from .adapters import adapter_causes
from .fused import Side, fused_causes
from .names import Cause, Comparison
from .sizes import size_causes
from .state_dict_errors import Mismatch
from .targets import MatchTarget


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


def with_own_step(
    checkpoint: Checkpoint, target: MatchTarget, causes: Sequence[Cause], now: Comparison | None
) -> tuple[list[Cause], AnyStep]:
    """Return the causes, and the command that has its own edit for them: adapters are merged, vocabularies resized.

    ``now`` compares the state dict as it is, None if it has to be moved first. The step is "" for other causes.
    """
    kinds = [cause.kind for cause in causes]
    if "adapter" in kinds and target.kind == "checkpoint":
        from ..lora import merge_verdict  # only for adapters

        step, verdict = merge_verdict(target.source, checkpoint)
        return [
            cause._replace(message=verdict) if verdict and cause.kind == "adapter" else cause for cause in causes
        ], step
    if kinds == ["vocabulary"] and now is not None and not (now.missing or now.unexpected):
        from ..resize import resize_step  # only for vocabularies

        return [*causes], resize_step(checkpoint, {item.key: target.shapes[item.key] for item in now.sizes})
    return [*causes], ""
