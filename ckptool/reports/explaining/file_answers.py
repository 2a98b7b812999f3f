"""Answers for one file about its format, its optimizer, and the names that libraries look for."""

from __future__ import annotations

import os
import re
from typing import Final

from ...base.findings import JOINED
from ...base.lazy import regex
from ...base.nearest import nearest
from ...base.steps import NextStep, advice, command, is_folder, suggested_output
from ...base.text import join_limited, pluralize, shape_text
from ...checkpoint.checkpoint import Checkpoint, Target, Tied
from ...checkpoint.container import is_complete
from ...checkpoint.objects import list_items, values_of
from ...checkpoint.paths import within
from ...checkpoint.quantized import quantization
from ...checkpoint.survey import StateDict
from ...edits.matching.sizes import size_causes, sizes_text
from ...edits.matching.state_dict_errors import Mismatch
from ...edits.optimizers import Optimizer, drop_step, entries_to_drop, optimizers, parameter_states, state_owners
from ...files.sources import FolderSource
from ...formats.losses import entries_outside
from ...formats.outputs import OUTPUTS
from ...pickles.nodes import Global
from ..edit_steps import edit_step
from .answers import NAMED, contents, entry_answer, join_sentences, likeliest, load_lines
from .finders import Answer, Details, as_python, sentence

#: Options by which the groups of an optimizer tell which one it is; the first one counts.
WRITERS: Final = {
    "dampening": "SGD", "centered": "RMSprop", "rho": "Adadelta", "lr_decay": "Adagrad", "etas": "Rprop",
    "lambd": "ASGD", "beta2_decay": "Adafactor", "momentum_decay": "NAdam", "amsgrad": "Adam or AdamW",
}  # fmt: skip
#: Options that torch looks up in groups without a default.
OPTIONS: Final = ("betas", "momentum", *WRITERS)


def optimizer_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for an optimizer of other parameters, or without a value that torch looks for: weights load without it."""
    path, found, wanted = checkpoint.path, optimizers(checkpoint.graph), details.get("entry", "")
    if not found:
        return Answer(f"{path} holds no optimizer: {contents(checkpoint)}.", cause="elsewhere")
    reasons = [(item, _unfit(checkpoint, item, wanted)) for item in found]
    broken = [item for item, reason in reasons if reason]
    if not broken:
        return Answer(f"{path} has {wanted!r} wherever its optimizer needs it.", cause="elsewhere")
    why = f"{path}: {join_sentences(reason for _, reason in reasons if reason)}"
    if not wanted:
        why += ", and your optimizer has another number or other groups. Layers were added, removed or frozen since"
    why += ". The weights load without the optimizer, which then starts afresh."
    return Answer(why, drop_step(path, entries_to_drop(checkpoint, broken).values()))


def _unfit(checkpoint: Checkpoint, optimizer: Optimizer, wanted: str) -> str:
    """Describe where an optimizer lacks a value, or return ""; for no value, describe the size of the optimizer."""
    graph, place = checkpoint.graph, repr(optimizer.path) if optimizer.path else "it"
    if not wanted:
        size = sum(len(list_items(graph.nodes[group.params])) for group in optimizer.groups)
        return f"{place} has {pluralize(size, 'parameter')}"
    options = {name for group in optimizer.groups for name in values_of(graph, group.ref)}
    writer = next((name for option, name in WRITERS.items() if option in options), "another optimizer")
    if wanted in OPTIONS:
        return "" if wanted in options else f"{writer} saved {place}, and its groups have no {wanted!r}"
    states = parameter_states(graph, optimizer)
    lacking = {ref: own for ref, own in states.items() if wanted not in own}
    if not lacking:
        return ""
    if len(lacking) == len(states):
        names = join_limited(list(next(iter(lacking.values()))))
        return f"{writer} saved {place} with {names} for each parameter, and your optimizer expects {wanted!r}"
    owners = state_owners(checkpoint)
    keys = join_limited([repr(owners[ref][1]) for ref in lacking if ref in owners], most=NAMED)
    number = f"{len(lacking):,} of {pluralize(len(states), 'parameter')}{f' ({keys})' if keys else ''}"
    return f"{place} lacks {wanted!r} for {number}: load_state_dict() or step() raises KeyError"


def other_entry_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for an entry other than the weights; an optimizer may look for "step" in the state of a parameter."""
    frame = text.rpartition('  File "')[2]
    if details["entry"] == "step" and (frame == text or re.search(r"torch[/\\]optim", frame)):
        answer = optimizer_answer(checkpoint, text, details)
        if answer is not None and answer.cause == "file":
            return answer
    return entry_answer(checkpoint, text, details)


def weights_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where code takes a state dict for a model: name the place of the weights."""
    path = checkpoint.path
    if checkpoint.survey.modules:
        return None
    dicts = checkpoint.state_dicts
    if not dicts:
        return None
    place = likeliest(dicts, "state_dict").path
    where = f"in its entry {place!r}" if place else "at its top level"
    why = (
        f"{path} holds a state dict {where}, not a model. Build the model with its own code, then load the"
        " state dict into it."
    )
    return Answer(
        why,
        python=f"model = Net()\n{load_lines(path, place)}\nmodel.load_state_dict(state)\nmodel.eval()",
        cause="elsewhere",
    )


def loader_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where another function opened a file of torch.save: torch.load reads it."""
    if checkpoint.traits.loader != "torch.load" or checkpoint.traits.loads != "file":
        return None
    path = checkpoint.path
    why = f"torch.save wrote {path}, with {contents(checkpoint)}. Open it with torch.load."
    return Answer(why, python=load_lines(path), cause="elsewhere")


def suffix_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where torch.load opened safetensors: write what it reads."""
    if not is_safetensors(checkpoint) or is_folder(checkpoint.path):
        return None
    path = checkpoint.path
    lines = f"from safetensors.torch import load_file\nstate = load_file({as_python(path)})"
    why = f"{path} is safetensors, whatever its name says, and torch.load reads pickles. load_file reads it as it is."
    return Answer(why, edit_step("convert", path, word="torch", to_format="torch", extension=".pth"), lines)


def is_safetensors(checkpoint: Checkpoint) -> bool:
    """Return whether safetensors loads the file as it is."""
    return checkpoint.traits.loader.startswith("safetensors")


def safetensors_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where safetensors was expected: convert a file of torch.save."""
    if is_safetensors(checkpoint) or not checkpoint.state_dicts:
        return None
    why = f"{checkpoint.path} is not safetensors, but {checkpoint.format}: {checkpoint.container.writer} wrote it."
    return Answer(why, to_safetensors(checkpoint))


def to_safetensors(checkpoint: Checkpoint, output: str = "") -> NextStep:
    """Return the command that writes the weights as safetensors, one for each state dict, with a choice wherever
    ``convert`` needs one.

    Return an empty step if tensors with values would be lost. Only one state dict can have the given ``output``.
    """
    dicts = [item for item in checkpoint.state_dicts if item.confidence == "high"] or checkpoint.state_dicts
    if output and len(dicts) > 1:
        return NextStep()
    steps = [_converted(checkpoint, item, output, alone=len(dicts) == 1) for item in dicts]
    if not all(steps) or len(steps) > _MOST_COMMANDS:
        return NextStep()
    return advice(*steps)


#: The most commands in one answer.
_MOST_COMMANDS: Final = 4


def _converted(checkpoint: Checkpoint, chosen: StateDict, output: str, *, alone: bool) -> NextStep:
    """Return the command that writes one state dict as safetensors, or an empty step if tensors would be lost."""
    tensors = checkpoint.survey.tensors_in([chosen.path])
    shared = [entry.tensor.storage for entry in tensors if entry.tensor.storage]
    storages = set(shared)
    tied: Tied = "keep-first" if len(storages) < len(shared) else ""
    inside = [entry.tensor for entry in checkpoint.survey.tensors if within(entry.path, chosen.path)]
    if chosen.path and any(tensor.storage not in storages for tensor in inside):
        return NextStep()  # such as the tensors of an extra state, unlike copies of the others
    target = Target("safetensors", chosen.path, tied)
    losses = [*entries_outside(checkpoint, chosen), *OUTPUTS["safetensors"].writer().fit(checkpoint, target).losses]
    if any(loss.drops for loss in losses if loss.kind != "entries"):
        return NextStep()
    word = "" if alone else re.sub(r"\W+", "_", chosen.path).strip("_")
    output = output or suggested_output(checkpoint.path, word, ".safetensors")
    if output == checkpoint.path:
        output = suggested_output(checkpoint.path, "2", ".safetensors")
    return command(
        "convert",
        checkpoint.path,
        output=output,
        key="" if alone and chosen.confidence == "high" else chosen.path or ".",
        tied=tied,
        allow_loss=[*dict.fromkeys(loss.kind for loss in losses)],
    )


def safetensors_copy(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where safetensors refused to save a model: convert the checkpoint that torch.save wrote."""
    if not checkpoint.state_dicts:
        return None
    path = checkpoint.path
    if is_safetensors(checkpoint):
        return Answer(f"{path} is safetensors already. The message comes from saving another model.", cause="elsewhere")
    refused = f", which refuses {details['name']!r}: it is not a tensor" if details.get("name") else ""
    why = (
        f"{path} holds {contents(checkpoint)}. The message comes from saving it with save_file{refused}; convert writes"
        " the tensors without loading them."
    )
    return Answer(why, to_safetensors(checkpoint))


def metadata_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a safetensors file whose header does not name the framework."""
    path = checkpoint.path
    if not is_safetensors(checkpoint) or "format" in checkpoint.container.metadata:
        return None
    why = f"{path}: its header does not name the framework, which transformers wants as format=pt."
    return Answer(why, edit_step("convert", path, word="pt", extension=".safetensors", metadata="format=pt"))


def named_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where transformers or diffusers looks for weights under a fixed name: write them under that name."""
    path = checkpoint.path
    if is_folder(path) or not checkpoint.state_dicts or os.path.basename(path) in text:
        return None
    name = "diffusion_pytorch_model.safetensors" if "diffusion_pytorch_model" in text else "model.safetensors"
    output = os.path.join(os.path.dirname(path), name)
    if os.path.exists(output):
        return None
    why = f"{path} is whole, but the program looks for {name}, next to a config.json that describes the model."
    return Answer(why, to_safetensors(checkpoint, output))


def folder_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a folder of per-rank files: if all of them are there, join the weights."""
    folder = isinstance(checkpoint.source, FolderSource)
    if (
        not folder
        or is_safetensors(checkpoint)
        or not checkpoint.state_dicts
        or not is_complete(checkpoint.container.problems)
    ):
        return None
    why = f"{checkpoint.path} is complete: {contents(checkpoint)}. The weights can be joined into one file."
    return Answer(why, to_safetensors(checkpoint))


def legacy_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where mmap needs the format of torch 1.6: write the file in it."""
    if not checkpoint.traits.storages_in_sequence:
        return None
    why = f"{checkpoint.path} is in the format of torch 1.5 and earlier, whose tensors cannot be mapped."
    return Answer(why, edit_step("repack", checkpoint.path, word="clean"))


def old_torch_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where torch 1.5 or earlier loads a file of torch 1.6 or later: write it in the old format."""
    if checkpoint.traits.loader != "torch.load" or checkpoint.traits.no_checksums:
        return None
    if OUTPUTS["legacy"].writer().fit(checkpoint, Target("legacy")).losses:
        return Answer(f"{checkpoint.path} holds what torch 1.5 cannot hold. Upgrade torch.")
    why = (
        f"{checkpoint.path} is in the format of torch 1.6, and your torch is older. Upgrade torch, or convert the file."
    )
    return Answer(why, edit_step("convert", checkpoint.path, word="legacy", to_format="legacy"))


#: How messages about kernels spell dtypes.
_KERNEL_DTYPES: Final = {"Half": "float16", "BFloat16": "bfloat16"}


def dtype_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for tensors of a dtype that the user's torch lacks, or cannot compute with: cast them to float32, which
    holds every value.
    """
    path, dtype = checkpoint.path, _KERNEL_DTYPES.get(details["name"], details["name"])
    number = sum(entry.tensor.dtype == dtype for entry in checkpoint.survey.tensors)
    if not number:
        return None
    lacks = "cannot compute with here" if details["name"] in _KERNEL_DTYPES else "does not know"
    why = f"{path} has {pluralize(number, 'tensor')} of the dtype {dtype}, which your torch {lacks}."
    if "float" not in dtype:
        return Answer(f"{why} Upgrade torch.")
    return Answer(f"{why} Upgrade torch, or cast them.", edit_step("cast", path, word="float32", to_dtype="float32"))


def meta_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a model on the device meta: say whether the file has values for it."""
    tensors = checkpoint.survey.tensors
    without = sum(entry.tensor.location == "meta" for entry in tensors)
    if without or not tensors:
        return None  # a finding says so
    lines = f"{load_lines(checkpoint.path)}\nmodel.load_state_dict(state, assign=True)"
    why = f"{checkpoint.path} has values for its {pluralize(len(tensors), 'tensor')}. Load them with assign=True."
    return Answer(why, python=lines, cause="elsewhere")


def quantized_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a program that needs plain weights: name the format of the quantized ones."""
    found = quantization(checkpoint)
    if not found:
        return None
    why = f"{checkpoint.path} is quantized: {found.words}. The converter needs plain weights: give it the model before"
    return Answer(f"{why} it was quantized, or dequantize it with the library that quantized it.")


def joined_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a class that a file needs because its tensors are in other files: write them as one file."""
    problems = checkpoint.container.problems
    if not checkpoint.state_dicts or all(item.code != JOINED for item in problems) or not is_complete(problems):
        return None
    why = f"{checkpoint.path}: {checkpoint.container.writer}. Written as one file they need no other library."
    return Answer(why, to_safetensors(checkpoint))


def index_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for an index of shards without metadata: write a new one."""
    if "index" not in " ".join(problem.message for problem in checkpoint.container.problems):
        return None
    why = f"{checkpoint.path}: its shards are whole, but the index lacks 'metadata', which transformers reads."
    return Answer(why, edit_step("repack", checkpoint.path, word="clean"))


#: The state of a parameter that is known by its number.
_BY_NUMBER: Final = regex(r"(\S*optim\w*(?:\.\S+)?\.state)\.\d+\.")


def missing_key_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer where torch.distributed.checkpoint does not find a name: say which names are similar."""
    wanted = details["name"]
    names = [entry.path for entry in checkpoint.survey.tensors]
    path = checkpoint.path
    if wanted in names:
        return Answer(f"{path} has {wanted!r}. The message is about another folder.", cause="elsewhere")
    inside = _BY_NUMBER.match(wanted)
    if inside and any(name.startswith((f"{inside[1]}.", f"{inside[1]}[")) for name in names):
        return Answer(
            f"{path} has no {wanted!r}: the state of the optimizer is kept by the names of the parameters, such as"
            f" {next(name for name in names if name.startswith(inside[1]))!r}, not by their numbers. Load it with"
            " get_optimizer_state_dict and set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which"
            " use names; or load the model alone."
        )
    near = [name for name in names if name.endswith("." + wanted) or wanted.endswith("." + name)][:NAMED]
    near = near or nearest(wanted, names)
    similar = f" Similar names are {join_limited([repr(name) for name in near])}." if near else ""
    why = (
        f"{path} has no {wanted!r}.{similar} Build the state dict to fill with the names of the folder; if only the"
        " optimizer is missing, load the model alone."
    )
    return Answer(why, command("keys", path))


def shape_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a tensor of another shape whose key the message does not name in full."""
    saved, wanted = (
        tuple(int(size) for size in details[name].replace(",", " ").split()) for name in ("saved", "wanted")
    )
    entries = [entry for entry in checkpoint.survey.tensors if entry.tensor.shape == saved]
    entries = [entry for entry in entries if entry.key.endswith(details["name"])] or entries
    if not entries:
        why = f"{checkpoint.path}: no tensor in it has the shape {shape_text(saved)}"
        return Answer(f"{why}. The message is about another file.", cause="elsewhere")
    found = [Mismatch(entry.key, saved, wanted) for entry in entries[:NAMED]]
    shapes = {entry.key: entry.tensor.shape for entry in checkpoint.survey.tensors}
    why = " ".join(sentence(cause.message) for cause in size_causes(found, shapes))
    return Answer(f"{checkpoint.path}: {sizes_text(found)}. {why}")


def newer_torch_answer(checkpoint: Checkpoint, text: str, details: Details) -> Answer | None:
    """Answer for a file of a newer torch: every torch reads safetensors."""
    named = any(node.name == details["name"] for _, node in checkpoint.graph.of_type(Global))
    if not checkpoint.state_dicts or not named:
        return None
    why = f"{checkpoint.path}: a newer torch saved it, with {details['name']}. Every torch reads safetensors."
    return Answer(why, to_safetensors(checkpoint))
