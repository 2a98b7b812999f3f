"""Errors about keys: ``load_state_dict``, and code that looks for an entry or a key. See ``known_errors``."""

from __future__ import annotations

from typing import Final

from ...base.steps import NextStep, command, suggested_output
from ...edits.purposes import LIGHTNING
from .answers import COUNTERS, entry_answer, key_answer
from .file_answers import OPTIONS, optimizer_answer, other_entry_answer, shape_answer
from .finders import (
    KEYS,
    MODEL_ENTRIES,
    Details,
    KnownError,
    added_prefix,
    any_keys,
    computed,
    dropped,
    edited,
    emptied,
    mismatched,
    missing_prefix,
    module_prefix,
    nested,
    of_keys,
    other_layout,
    raised,
    searched,
    shown,
    transferred,
    wrapper_prefix,
)

#: It keeps the names that the model has: perhaps only some keys have the prefix.
_RENAMED: Final = """\
state = torch.load("model.pth", map_location="cpu")
own = model.state_dict().keys()
model.load_state_dict({key if key in own else {renamed}: value for key, value in state.items()})"""

#: Entries of a training run other than the weights.
_OTHER_ENTRIES: Final = (
    *COUNTERS, "optimizer", "optimizer_state_dict", "optimizer_states", "optim", "lr_scheduler", "lr_schedulers",
    "scheduler", "scheduler_state_dict", "hyper_parameters", "hparams", "callbacks", "args", "cfg", "config", "opt",
    "options", "arch", "meta", "best_acc", "best_acc1", "best_prec1", "best_loss", "best_score", "loss", "scaler",
    "amp", "ema_state_dict", "iters", "model_args", "model_cfg", "model_config", "vocab", "classes",
    "class_to_idx", "train_loss", "val_loss",
)  # fmt: skip
_USES_FILE: Final = r"(?i)load|ckpt|checkpoint|state|weight|resume|saved|pretrain"

_POPPED: Final = 'checkpoint = torch.load("model.pth", map_location="cpu")\ncheckpoint.pop("optimizer")'


def _without_optimizer(path: str, details: Details) -> NextStep:
    return command("drop", path, "optim*", output=suggested_output(path, "weights"))


#: The first that matches counts.
STATE_DICT_ERRORS: Final = (
    KnownError(
        "module-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "module.conv1.weight", ...',
        "DataParallel or DistributedDataParallel put '{prefix}' before every key when the model was saved, and your "
        "model is not wrapped in one. Remove the prefix.",
        of_keys(module_prefix),
        edited("strip-module", word="plain"),
        _RENAMED,
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "wrapper-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "_orig_mod.conv1.weight"',
        "A wrapper put its name into the keys: torch.compile writes _orig_mod, Lightning Fabric _forward_module, FSDP "
        "_fsdp_wrapped_module, activation checkpointing _checkpoint_wrapped_module. Remove these names.",
        of_keys(wrapper_prefix),
        edited("strip-module", word="plain", wrappers=True),
        _RENAMED,
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "added-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "model.conv1.weight", ...',
        "The model was saved as a part of a larger one, such as a LightningModule with the network in self.model, so "
        "its keys begin with '{prefix}'. Remove the prefix.",
        of_keys(added_prefix),
        edited("strip-module", word="plain", strip_prefix="{prefix}"),
        _RENAMED,
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "missing-prefix",
        'Missing key(s) in state_dict: "module.conv1.weight", ... Unexpected key(s) in state_dict: "conv1.weight", ...',
        "The file has keys of your model without the prefix '{prefix}': it was saved before the model was wrapped, or "
        "it is the file of a part of your model. Add the prefix to these keys.",
        of_keys(missing_prefix),
        edited("add-module", word="wrapped", add_prefix="{prefix}"),
        _RENAMED,
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "averaged-weights",
        'Unexpected key(s) in state_dict: "model_ema.decay", "model_ema.num_updates", "model_ema.diffusion_model...',
        "The file has a second copy of the weights, their moving average, under names without dots. Models are used "
        "with the average: give it the names of the model.",
        searched(r'Unexpected key\(s\) in state_dict:[^\n]*"model_ema\.(?:decay|num_updates)"'),
        edited("edit", word="ema", use_ema=True),
    ),
    KnownError(
        "computed-buffers",
        "Error(s) in loading state_dict for CLIPTextModel: Unexpected key(s) in state_dict: "
        '"text_model.embeddings.position_ids".',
        "Only buffers differ that the model computes itself: {keys}. Another version of the library saved them, or did "
        "not. strict=False loads everything else, and nothing is lost.",
        of_keys(computed),
        shown("keys"),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu"), strict=False)',
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "nested-state-dict",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "state_dict", "epoch", ...',
        "The file holds a whole training run, and the weights are in its entry '{entry}'. Extract that entry.",
        of_keys(nested),
        lambda path, details: command("extract", path, details["entry"], output=suggested_output(path, "weights")),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu")["{entry}"])',
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "empty-weights",
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([0]) from checkpoint, the "
        "shape in current model is torch.Size([32000, 4096]).",
        "The file has names without values: with DeepSpeed ZeRO-3 each rank holds a part of every weight, and one rank "
        "saved without gathering them. Save again on all ranks with trainer.save_model(), model.save_checkpoint() or "
        "zero3_save_16bit_model; or convert the folder global_stepN that DeepSpeed saved beside it.",
        of_keys(emptied),
        shown("inspect"),
        alike=(
            "size mismatch for base_model.model.q.lora_A.default.weight: copying a param with shape torch.Size([0]) "
            "from checkpoint, the shape in current model is torch.Size([4, 16]).",
        ),
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "size-mismatch",
        "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint, the shape in "
        "current model is torch.Size([10, 512]).",
        "{causes}",
        of_keys(mismatched),
        dropped,
        """\
state = torch.load("model.pth", map_location="cpu")
for key in [{listed}]:
    del state[key]
model.load_state_dict(state, strict=False)""",
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "other-layout",
        "Error(s) in loading state_dict for LlamaForCausalLM: Missing key(s) in state_dict: "
        '"model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", ... Unexpected key(s) in state_dict: '
        '"tok_embeddings.weight", "layers.0.attention.wq.weight", ...',
        "The file has the same model in the layout of another library, and the model expects that of {family}. Other "
        "names are not enough: rows stand in another order, or several tensors are one. A recipe moves them; the "
        "numbers that it needs, such as the number of heads, are in params.json or config.json.",
        of_keys(other_layout),
        lambda path, details: command(
            "convert", path, output=suggested_output(path, "converted", ".safetensors"), to_names=details["family"]
        ),
        example="consolidated.00.pth",
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "other-keys",
        'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "head.weight", ... Unexpected key(s) in '
        'state_dict: "fc.weight", "fc.bias", ...',
        "The names differ by more than a prefix, or the file has too few or too many of them. Save the message in "
        "error.txt: match reads the names of your model from it and finds the shortest edit that makes them fit.",
        of_keys(any_keys),
        shown("match", error="error.txt"),
        'print(model.load_state_dict(torch.load("model.pth", map_location="cpu"), strict=False))',
        (
            "_IncompatibleKeys(missing_keys=['head.weight'], unexpected_keys=['fc.weight', 'fc.bias'])",
            "Some weights of Net were not initialized from the model checkpoint at ./out and are newly initialized: "
            "['head.weight']",
            "unexpected key in source state_dict: fc.weight, fc.bias",
            "missing keys in source state_dict: head.weight",
            "Missing keys (head.weight, head.bias) discovered while loading pretrained weights.",
        ),
        topic=KEYS,
        answer=key_answer,
    ),
    KnownError(
        "model-parallel",
        "AssertionError: Loading a checkpoint for MP=2 but world size is 1",
        "The model is cut into {parts} files, and Meta's code wants a process for each; torchrun can start {parts}. "
        "convert joins the files of the folder into one, for a single process.",
        searched(r"Loading a checkpoint for MP=(?P<parts>\d+) but world size is \d+"),
        lambda path, details: command("convert", path, output=suggested_output(path, "joined", ".pth")),
        example="llama-2-13b",
        topic=KEYS,
    ),
    KnownError(
        "keys-not-in-message",
        "RuntimeError: Error(s) in loading state_dict for DataParallel:",
        "The keys stand in the lines after this one. Give the whole message, from a file or through a pipe.",
        searched(r"Error\(s\) in loading state_dict for \S+:|(?:Missing|Unexpected) key\(s\) in state_dict"),
        shown("inspect"),
        alike=("Missing key(s) in state_dict",),
        topic=KEYS,
    ),
    KnownError(
        "partly-transferred",
        "Transferred 319/355 items from pretrained weights",
        "ultralytics loads the tensors with a name and shape of the model: {left} of {all} keep their initial values, "
        "as the head does for another number of classes. match with a file of such a model names them.",
        transferred,
        shown("keys"),
        example="best.pt",
        topic=KEYS,
    ),
    KnownError(
        "other-shape",
        'ValueError: Trying to set a tensor of shape torch.Size([32001, 4096]) in "weight" (which has shape '
        "torch.Size([32000, 4096])), this looks incorrect.",
        "A tensor has another shape in the file than in the model, which config.json describes: other sizes, another "
        "vocabulary, or weights without values.",
        searched(
            r"Trying to set a tensor of shape torch\.Size\(\[(?P<saved>[\d, ]*)\]\) in \"(?P<name>[^\"]*)\" \(which "
            r"has shape torch\.Size\(\[(?P<wanted>[\d, ]*)\]\)\)"
        ),
        shown("keys"),
        example="model.safetensors",
        topic=KEYS,
        answer=shape_answer,
    ),
    KnownError(
        "no-such-entry",
        "KeyError: 'state_dict'",
        "The code expects the weights in an entry '{entry}'. The file is the state dict itself, or has another name "
        "for the entry.",
        raised(rf"KeyError: ['\"](?P<entry>{'|'.join(MODEL_ENTRIES)})['\"]", _USES_FILE, last=True),
        lambda path, details: command("wrap", path, details["entry"], output=suggested_output(path, "nested")),
        """\
state = torch.load("model.pth", map_location="cpu")
model.load_state_dict(state.get("{entry}", state))""",
        topic=KEYS,
        answer=entry_answer,
    ),
    KnownError(
        "not-lightning",
        "KeyError: 'pytorch-lightning_version'",
        "load_from_checkpoint reads the entry '{entry}', which Lightning writes, and another program saved the file. "
        "Put the weights into state_dict and add the entries that Lightning reads.",
        raised(rf"KeyError: ['\"](?P<entry>{'|'.join(set(LIGHTNING) - set(COUNTERS))})['\"]", r""),
        lambda path, details: command(
            "wrap", path, output=suggested_output(path, "lightning", ".ckpt"), for_="lightning"
        ),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu"))',
        topic=KEYS,
        answer=entry_answer,
    ),
    KnownError(
        "missing-arguments",
        "TypeError: __init__() missing 1 required positional argument: 'num_classes'",
        "load_from_checkpoint builds the model from the entry hyper_parameters, and the file has no such argument in "
        "it: save_hyperparameters() was not called. Pass the argument to load_from_checkpoint.",
        raised(
            r"__init__\(\) missing \d+ required (?:positional|keyword-only) arguments?: '(?P<name>\w+)'",
            r"load_from_checkpoint|_load_state|lightning",
        ),
        shown("get"),
        'model = Net.load_from_checkpoint("model.pth", {name}=...)',
    ),
    KnownError(
        "no-such-key",
        "KeyError: 'lm_head.weight'",
        "The code takes '{entry}' out of the state dict, which has no such key: it has another prefix, or is tied to "
        "another key.",
        raised(
            r"(?:KeyError: ['\"]|File does not contain tensor )(?P<entry>[\w.]+\.(?:weight|bias|running_mean|"
            r"in_proj_weight))\b",
            r"",
        ),
        shown("keys"),
        alike=("safetensors_rust.SafetensorError: File does not contain tensor lm_head.weight",),
        topic=KEYS,
        answer=entry_answer,
    ),
    KnownError(
        "no-other-entry",
        "KeyError: 'optimizer'",
        "The code expects a whole training run with an entry '{entry}', and the file has none: it holds only weights, "
        "or another program saved it.",
        raised(rf"KeyError: ['\"](?P<entry>{'|'.join(_OTHER_ENTRIES)})['\"]", _USES_FILE, last=True),
        shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu").get("{entry}")',
        topic=KEYS,
        answer=other_entry_answer,
    ),
    KnownError(
        "optimizer-values",
        "KeyError: 'exp_avg_sq'",
        "The optimizer looks for '{entry}', and the file does not have it for each parameter: another optimizer saved "
        "the state, or a part of it is lost. load_state_dict accepts most such states, and step() fails. Load the "
        "weights without it.",
        searched(
            r"KeyError: ['\"](?P<entry>(?:max_)?exp_(?:avg|avg_sq|inf)|momentum_buffer|square_avg|acc_delta|"
            rf"{'|'.join(OPTIONS)})['\"]"
        ),
        _without_optimizer,
        _POPPED,
        answer=optimizer_answer,
    ),
    KnownError(
        "optimizer-groups",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "The optimizer was saved for another number of parameters: layers were added, frozen or removed since. Load "
        "the weights without it.",
        searched(
            r"parameter group that doesn't match the size|loaded state dict has a different number of parameter"
            r"|param 'initial_lr' is not specified in param_groups"
        ),
        _without_optimizer,
        _POPPED,
        (
            "ValueError: loaded state dict has a different number of parameter groups",
            "KeyError: \"param 'initial_lr' is not specified in param_groups[0] when resuming an optimizer\"",
        ),
        answer=optimizer_answer,
    ),
)
