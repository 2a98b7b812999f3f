"""The errors of ``load_state_dict``: missing keys, unexpected keys, and other shapes. See ``known_errors``."""

from __future__ import annotations

from typing import Final

from ...base.steps import command, suggested_output
from .finders import (
    KnownError,
    added_prefix,
    any_keys,
    dropped,
    edited,
    emptied,
    mismatched,
    missing_prefix,
    module_prefix,
    nested,
    of_keys,
    shown,
    wrapper_prefix,
)

_CONSUME: Final = """\
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
state = torch.load("model.pth", map_location="cpu")
consume_prefix_in_state_dict_if_present(state, "{prefix}")
model.load_state_dict(state)"""

#: The first that matches counts.
STATE_DICT_ERRORS: Final = (
    KnownError(
        "module-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "module.conv1.weight", ...',
        "The model was saved inside DataParallel or DistributedDataParallel, which put '{prefix}' before every key. "
        "Your model is not wrapped, so its keys do not have it.",
        of_keys(module_prefix),
        edited("strip-module", word="plain"),
        _CONSUME,
    ),
    KnownError(
        "wrapper-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "_orig_mod.conv1.weight"',
        "A wrapper put its name into the keys: torch.compile writes _orig_mod, Lightning Fabric _forward_module, FSDP "
        "_fsdp_wrapped_module, activation checkpointing _checkpoint_wrapped_module.",
        of_keys(wrapper_prefix),
        edited("strip-module", word="plain", wrappers=True),
        """\
state = torch.load("model.pth", map_location="cpu")
model.load_state_dict({{plain}: value for key, value in state.items()})""",
    ),
    KnownError(
        "added-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "model.conv1.weight", ...',
        "The model was saved as a part of a larger one, such as a LightningModule with the network in self.model: its "
        "keys begin with '{prefix}', the name of that attribute.",
        of_keys(added_prefix),
        edited("strip-module", word="plain", prefix="{prefix}"),
        _CONSUME,
    ),
    KnownError(
        "missing-prefix",
        'Missing key(s) in state_dict: "module.conv1.weight", ... Unexpected key(s) in state_dict: "conv1.weight", ...',
        "The model that loads it is wrapped, or is a part of a larger one, and the saved one was not: the keys in the "
        "file lack the prefix '{prefix}'.",
        of_keys(missing_prefix),
        edited("add-module", word="wrapped", prefix="{prefix}"),
        'model.{attribute}.load_state_dict(torch.load("model.pth", map_location="cpu"))',
    ),
    KnownError(
        "nested-state-dict",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "state_dict", "epoch", ...',
        "The file holds a whole training run: the weights are in its entry '{entry}', beside the optimizer, the epoch "
        "and the like.",
        of_keys(nested),
        lambda path, details: command("extract", path, details["entry"], output=suggested_output(path, "weights")),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu")["{entry}"])',
    ),
    KnownError(
        "empty-weights",
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([0]) from checkpoint, the "
        "shape in current model is torch.Size([32000, 4096]).",
        "The file has names without values: with DeepSpeed ZeRO-3 each rank holds a part of every weight, and one rank "
        "saved without gathering them. Save again on all ranks with trainer.save_model(), model.save_checkpoint() or "
        "zero3_save_16bit_model; or convert the folder global_stepN that DeepSpeed saved beside it, which has all "
        "parts.",
        of_keys(emptied),
        shown("inspect"),
        alike=(
            "size mismatch for base_model.model.q.lora_A.default.weight: copying a param with shape torch.Size([0]) "
            "from checkpoint, the shape in current model is torch.Size([4, 16]).",
        ),
    ),
    KnownError(
        "size-mismatch",
        "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint, the shape in "
        "current model is torch.Size([10, 512]).",
        "The layer has another size than the one that was saved, as a classifier for other classes has. Leave it out, "
        "load the rest with strict=False, and train it again.",
        of_keys(mismatched),
        dropped,
        """\
state = torch.load("model.pth", map_location="cpu")
for key in [{listed}]:
    del state[key]
model.load_state_dict(state, strict=False)""",
    ),
    KnownError(
        "other-keys",
        'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "head.weight", ... Unexpected key(s) in '
        'state_dict: "fc.weight", "fc.bias", ...',
        "The names differ by more than a prefix, or the file has too few or too many of them. Save the message in "
        "error.txt: match takes the names of your model out of it, and finds the shortest edit that makes them fit.",
        of_keys(any_keys),
        shown("match", error="error.txt"),
        'print(model.load_state_dict(torch.load("model.pth", map_location="cpu"), strict=False))',
    ),
)
