"""The errors that people search for: the message, why it comes, the command that helps, and Python that does the same.

A table as data: ``explanation`` finds the entry of a text, ``docs/errors.md`` is made of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ...base.prefixes import WRAPPERS, unwrapper
from ...base.steps import Line, NextStep, argument, as_step, command, suggested_output
from ...edits.like.state_dict_errors import StateDictError, prefix_between, read_error

#: What an entry took from the text: a prefix, a name, a number.
Details: TypeAlias = Mapping[str, str]

#: Entries under which training scripts keep a model.
_MODEL_ENTRIES: Final = (
    "state_dict", "model_state_dict", "model", "net", "network", "module", "weights", "params", "params_ema", "ema",
    "generator", "teacher", "student",
)  # fmt: skip


class KnownError(NamedTuple):
    """An error message. ``message`` is as the library prints it, shortened by "..."; ``name`` is its anchor.

    ``find`` returns the details of a text that has the message, None for another text. ``step`` is the command for a
    checkpoint, and ``python`` are the lines that do the same; either is empty where only another file helps.
    """

    name: str
    message: str
    why: str
    find: Callable[[str], Details | None]
    step: Callable[[str, Details], NextStep]
    python: str = ""


def _searched(pattern: str) -> Callable[[str], Details | None]:
    """Return a function that finds a pattern; its named groups are the details."""

    def find(text: str) -> Details | None:
        match = re.search(pattern, text)
        return None if match is None else {name: value or "" for name, value in match.groupdict().items()}

    return find


def _of_keys(judge: Callable[[StateDictError], Details | None]) -> Callable[[str], Details | None]:
    """Return a function that judges the message of ``load_state_dict``."""

    def find(text: str) -> Details | None:
        error = read_error(text)
        return None if error is None else judge(error)

    return find


def _edited(name: str, *options: str, word: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is one edit; ``{...}`` in an option stands for a detail."""

    def step(path: str, details: Details) -> NextStep:
        filled = tuple(option.format(**details) for option in options)
        return command(name, path, options=filled, output=suggested_output(path, word))

    return step


def _shown(name: str, *options: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is a command which writes nothing."""
    return lambda path, details: command(name, path, options=options)


def _shell(text: str) -> Callable[[str, Details], NextStep]:
    """Return the step that is a command of another program; ``{path}`` stands for the file."""
    return lambda path, details: as_step(Line(text.format(path=argument(path))))


# -- load_state_dict


def _prefix(error: StateDictError) -> str:
    """Return the prefix that the keys of the checkpoint have, and those of the model have not."""
    return prefix_between(error.missing, error.unexpected)


def _module(error: StateDictError) -> Details | None:
    prefix = _prefix(error)
    return {"prefix": prefix} if prefix == "module." else None


def _wrapper(error: StateDictError) -> Details | None:
    prefix = _prefix(error)
    if prefix and all(part in WRAPPERS for part in prefix[:-1].split(".")):
        return {"prefix": prefix}
    unwrap = unwrapper([*error.unexpected])
    plain = {unwrap(key) for key in error.unexpected}
    return {"prefix": ""} if error.missing and plain >= set(error.missing) else None


def _other_prefix(error: StateDictError) -> Details | None:
    prefix = _prefix(error)
    return {"prefix": prefix} if prefix else None


def _wanted_prefix(error: StateDictError) -> Details | None:
    prefix = prefix_between(error.unexpected, error.missing)
    return {"prefix": prefix} if prefix else None


def _nested(error: StateDictError) -> Details | None:
    entry = next((name for name in _MODEL_ENTRIES if name in error.unexpected), "")
    return {"entry": entry} if entry and error.missing else None


def _mismatched(error: StateDictError) -> Details | None:
    if not error.mismatched or error.missing or error.unexpected:
        return None
    return {"keys": " ".join(item.key for item in error.mismatched)}


def _any(error: StateDictError) -> Details | None:
    return {}


def _dropped(path: str, details: Details) -> NextStep:
    keys = tuple(details["keys"].split())
    return command("drop", path, *keys, output=suggested_output(path, "rest"))


def _first_byte(byte: str, number: int) -> Callable[[str], Details | None]:
    """Return a function that finds what torch.load says of a file that begins with a byte, with and without
    ``weights_only``."""
    return _searched(rf"invalid load key, '(?:{byte})'|Unsupported operand {number}\b")


_CONSUME: Final = """\
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
state = torch.load("model.pth", map_location="cpu")
consume_prefix_in_state_dict_if_present(state, "{prefix}")
model.load_state_dict(state)"""

#: All of them; of two that fit the first counts.
KNOWN_ERRORS: Final = (
    KnownError(
        "module-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "module.conv1.weight", ...',
        "The model was saved inside DataParallel or DistributedDataParallel, which put module. before every key. Your "
        "model is not wrapped, so its keys do not have it.",
        _of_keys(_module),
        _edited("strip-module", word="plain"),
        _CONSUME.format(prefix="module."),
    ),
    KnownError(
        "wrapper-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "_orig_mod.conv1.weight"',
        "A wrapper put its name into the keys: torch.compile writes _orig_mod, Lightning Fabric _forward_module, FSDP "
        "_fsdp_wrapped_module, activation checkpointing _checkpoint_wrapped_module.",
        _of_keys(_wrapper),
        _edited("strip-module", "--wrappers", word="plain"),
        _CONSUME.format(prefix="_orig_mod."),
    ),
    KnownError(
        "added-prefix",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "model.conv1.weight", ...',
        "The model was saved as a part of a larger one, such as a LightningModule with the network in self.model: its "
        "keys begin with the name of that attribute.",
        _of_keys(_other_prefix),
        _edited("strip-module", "--prefix", "{prefix}", word="plain"),
        _CONSUME.format(prefix="model."),
    ),
    KnownError(
        "missing-prefix",
        'Missing key(s) in state_dict: "module.conv1.weight", ... Unexpected key(s) in state_dict: "conv1.weight", ...',
        "The model that loads it is wrapped, or a part of a larger one, and the saved one was not: the keys lack the "
        "prefix.",
        _of_keys(_wanted_prefix),
        _edited("add-module", "--prefix", "{prefix}", word="wrapped"),
        'model.module.load_state_dict(torch.load("model.pth", map_location="cpu"))',
    ),
    KnownError(
        "nested-state-dict",
        'Missing key(s) in state_dict: "conv1.weight", ... Unexpected key(s) in state_dict: "state_dict", "epoch", ...',
        "The file holds a training run: the weights are in one entry of it, beside the optimizer and the epoch.",
        _of_keys(_nested),
        lambda path, details: command("extract", path, details["entry"], output=suggested_output(path, "weights")),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu")["state_dict"])',
    ),
    KnownError(
        "size-mismatch",
        "size mismatch for fc.weight: copying a param with shape torch.Size([1000, 512]) from checkpoint, the shape in "
        "current model is torch.Size([10, 512]).",
        "The layer has another size than the one that was saved, as a classifier for other classes has. Leave it out, "
        "load the rest with strict=False, and train it anew.",
        _of_keys(_mismatched),
        _dropped,
        """\
state = torch.load("model.pth", map_location="cpu")
state = {key: value for key, value in state.items() if not key.startswith("fc.")}
model.load_state_dict(state, strict=False)""",
    ),
    KnownError(
        "other-keys",
        "Error(s) in loading state_dict for Net: Missing key(s) in state_dict: ..., Unexpected key(s) ...",
        "The names differ by more than a prefix. match compares them with those of your model, and finds the shortest "
        "edit that makes them fit.",
        _of_keys(_any),
        _shown("match", "--model", "package.module:Model"),
        'print(model.load_state_dict(torch.load("model.pth", map_location="cpu"), strict=False))',
    ),
    KnownError(
        "no-such-entry",
        "KeyError: 'state_dict'",
        "The code expects a training run with the weights in an entry, and the file is the state dict itself, or calls "
        "the entry something else.",
        _searched(rf"KeyError: '(?P<entry>{'|'.join(_MODEL_ENTRIES)})'"),
        lambda path, details: command("wrap", path, details["entry"], output=suggested_output(path, "nested")),
        """\
state = torch.load("model.pth", map_location="cpu")
model.load_state_dict(state.get("state_dict", state))""",
    ),
    KnownError(
        "optimizer-groups",
        "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "The optimizer was saved for another number of parameters: layers were added, frozen or removed since. Its "
        "momentum belongs to the old ones.",
        _searched(r"parameter group that doesn't match the size|loaded state dict has a different number of parameter"),
        lambda path, details: command("drop", path, "optimizer*", output=suggested_output(path, "weights")),
        'state = torch.load("model.pth", map_location="cpu")\nstate.pop("optimizer_state_dict")',
    ),
    # -- devices
    KnownError(
        "no-such-device",
        "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
        "Each tensor is tagged with the device it was on, and this machine has fewer.",
        _searched(r"Attempting to deserialize object on (?P<device>\w+) device \d+ but"),
        lambda path, details: command(
            "remap", path, options=("--to", f"{details['device'].lower()}:0"), output=suggested_output(path, "gpu0")
        ),
        'state = torch.load("model.pth", map_location="cuda:0")',
    ),
    KnownError(
        "no-cuda",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Each tensor is tagged with the GPU it was on, and this machine has none, or its torch was built without it.",
        _searched(r"Attempting to deserialize object on a \w+ device|Torch not compiled with CUDA enabled"),
        _edited("remap", "--to", "cpu", word="cpu"),
        'state = torch.load("model.pth", map_location="cpu")',
    ),
    KnownError(
        "unknown-location",
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)",
        "The tag of a tensor names a kind of device that this torch does not know: another accelerator, or its plugin "
        "is not imported.",
        _searched(r"don't know how to restore data location|device module is not registered"),
        _edited("remap", "--to", "cpu", word="cpu"),
        'state = torch.load("model.pth", map_location=lambda storage, location: storage)',
    ),
    # -- what is no checkpoint
    KnownError(
        "lfs-pointer",
        "invalid load key, 'v'.",
        "The file is a Git LFS pointer: a few lines of text that stand for the checkpoint. The repository was cloned "
        "without Git LFS. With weights_only torch says: Unsupported operand 118.",
        _first_byte("v", 118),
        _shell("git lfs pull --include {path}"),
    ),
    KnownError(
        "web-page",
        "invalid load key, '<'.",
        "The file is a web page: the server answered with a login, a warning or an error in its place. With "
        "weights_only torch says: Unsupported operand 60.",
        _first_byte("<", 60),
        _shown("inspect"),
    ),
    KnownError(
        "compressed",
        r"invalid load key, '\x1f'.",
        "The file is compressed with gzip, as a .tar.gz is. With weights_only torch says: Unsupported operand 31.",
        _first_byte(r"\\x1f", 31),
        _shown("inspect"),
        """\
with gzip.open("model.pth") as file:
    state = torch.load(io.BytesIO(file.read()), map_location="cpu")""",
    ),
    KnownError(
        "not-torch",
        "invalid load key, ...",
        "torch.load found no pickle: the file has another format, such as safetensors, Keras or JSON, or is damaged at "
        "its beginning.",
        _searched(r"invalid load key, |Unsupported operand (?!1[2-5]\d\b(?<!123))\d+"),
        _shown("inspect"),
    ),
    KnownError(
        "magic-number",
        "Invalid magic number; corrupt file?",
        "The file is a pickle, but torch.save did not write it: pickle.dump, joblib or another program did.",
        _searched(r"Invalid magic number; corrupt file"),
        _shown("inspect"),
        'with open("model.pth", "rb") as file:\n    state = pickle.load(file)  # runs what the file says',
    ),
    KnownError(
        "no-directory",
        "PytorchStreamReader failed reading zip archive: failed finding central directory",
        "The end of the file is missing: a download or a copy broke off, or the disk was full.",
        _searched(r"failed finding central directory|invalid header or archive is corrupted|not a ZIP archive"),
        _edited("salvage", word="saved"),
    ),
    KnownError(
        "unexpected-eof",
        "unexpected EOF, expected 4 more bytes. The file might be corrupted.",
        "The end of the file is missing: a download or a copy broke off, or the disk was full.",
        _searched(r"unexpected EOF, expected|pickle data was truncated|storage has wrong byte size"),
        _edited("salvage", word="saved"),
    ),
    KnownError(
        "empty-file",
        "EOFError: Ran out of input",
        "The file is empty, or ends at once: the disk was full when it was saved, or the save was killed.",
        _searched(r"Ran out of input|(?m:^EOFError$)"),
        _shown("inspect"),
    ),
    # -- other formats and versions
    KnownError(
        "old-torch",
        "... is a zip archive (did you mean to use torch.jit.load()?)",
        "torch before 1.6 reads no file that torch 1.6 or later saved.",
        _searched(r"is a zip archive \(did you mean"),
        _edited("convert", "--to-format", "legacy", word="legacy"),
        'torch.save(state, "model.legacy.pth", _use_new_zipfile_serialization=False)',
    ),
    KnownError(
        "not-torchscript",
        "PytorchStreamReader failed locating file constants.pkl: file not found",
        "torch.jit.load reads TorchScript programs, and this file was saved by torch.save: torch.load reads it.",
        _searched(r"failed locating file constants\.pkl|file not found: .*constants\.pkl"),
        _shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu")',
    ),
    KnownError(
        "weights-only-global",
        "Weights only load failed. ... Unsupported global: GLOBAL argparse.Namespace was not an allowed global ...",
        "Since torch 2.6 torch.load builds nothing but tensors and plain containers, and the file has an object of "
        "another class in it.",
        _searched(r"Unsupported (?:global: GLOBAL|class) (?P<name>[\w.]+)"),
        _edited("sanitize", word="plain"),
        """\
with torch.serialization.safe_globals([argparse.Namespace]):  # if you trust the file
    state = torch.load("model.pth")""",
    ),
    KnownError(
        "weights-only",
        "Weights only load failed. ...",
        "Since torch 2.6 torch.load builds nothing but tensors and plain containers, and the file asks for something "
        "else.",
        _searched(r"Weights only load failed|WeightsUnpickler error"),
        _edited("sanitize", word="plain"),
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
    ),
    KnownError(
        "no-module",
        "ModuleNotFoundError: No module named 'models'",
        "The whole model was pickled, and its class is imported from the code that saved it. The weights in it need no "
        "code.",
        _searched(r"No module named '(?P<name>[\w.]+)'"),
        _edited("sanitize", "--as-state-dict", word="plain"),
        'sys.path.insert(0, "path/of/the/project")\nstate = torch.load("model.pth", weights_only=False).state_dict()',
    ),
    KnownError(
        "no-class",
        "AttributeError: Can't get attribute 'Net' on <module '__main__' ...>",
        "The whole model was pickled in a script, and its class is not in the one that loads it. Weights need none.",
        _searched(r"Can't get attribute '(?P<name>[\w.]+)' on <module"),
        _edited("sanitize", "--as-state-dict", word="plain"),
        'state = torch.load("model.pth", weights_only=False).state_dict()  # where the class is defined',
    ),
    KnownError(
        "upsample",
        "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'",
        "The whole model was pickled by an older torch, whose modules lack attributes that yours reads. Build the "
        "model with your torch, and load the weights alone.",
        _searched(
            r"'(?P<name>\w+)' object has no attribute "
            r"'(?:recompute_scale_factor|_non_persistent_buffers_set|padding_mode|inplace)'"
        ),
        _edited("sanitize", "--as-state-dict", word="plain"),
        """\
for module in model.modules():
    if isinstance(module, torch.nn.Upsample):
        module.recompute_scale_factor = None""",
    ),
    KnownError(
        "state-dict-not-model",
        "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'",
        "The file holds weights, not a model: build the model with its own code, then load them into it.",
        _searched(
            r"'(?:collections\.)?(?:OrderedDict|dict)' object (?:has no attribute '(?:eval|to|cuda|train|parameters|"
            r"forward|half|float|modules|state_dict)'|is not callable)"
        ),
        _shown("inspect"),
        'model = Net()\nmodel.load_state_dict(torch.load("model.pth", map_location="cpu"))\nmodel.eval()',
    ),
    KnownError(
        "python-2",
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc3 in position 0: ordinal not in range(128)",
        "The file was written by Python 2, whose strings are bytes that Python 3 has to decode.",
        _searched(r"'(?:ascii|utf-8)' codec can't decode byte"),
        _edited("sanitize", word="plain"),
        'state = torch.load("model.pth", encoding="latin1", weights_only=False)',
    ),
    KnownError(
        "safetensors-header",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "The file is not safetensors, whatever its name says: a renamed .pth, a Git LFS pointer, or a web page.",
        _searched(r"HeaderToo(?:Large|Small)|InvalidHeader(?:Deserialization|Length|Start)|(?i:header too large)"),
        _shown("inspect"),
    ),
    KnownError(
        "safetensors-cut",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "The end of the file is missing: its header names more bytes than there are.",
        _searched(r"MetadataIncompleteBuffer|incomplete metadata, file not fully covered"),
        _edited("salvage", word="saved"),
    ),
    KnownError(
        "shared-memory",
        "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
        "when loading them again",
        "safetensors holds no tensor twice, and tied weights are one tensor under two names.",
        _searched(r"Some tensors share memory"),
        lambda path, details: command(
            "convert", path, options=("--tied", "keep-first"), output=suggested_output(path, extension=".safetensors")
        ),
        'safetensors.torch.save_model(model, "model.safetensors")',
    ),
    KnownError(
        "vulnerability",
        "Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now require users to "
        "upgrade torch to at least v2.6",
        "transformers loads no .bin with a torch before 2.6. It loads safetensors with any.",
        _searched(r"serious vulnerability issue in `?torch\.load"),
        lambda path, details: command("convert", path, output=suggested_output(path, extension=".safetensors")),
        'save_file(torch.load("pytorch_model.bin", map_location="cpu"), "model.safetensors", {"format": "pt"})',
    ),
    KnownError(
        "unable-to-load",
        "OSError: Unable to load weights from pytorch checkpoint file for 'pytorch_model.bin' at 'pytorch_model.bin'.",
        "transformers says this for every file that torch.load refuses: most often it is a Git LFS pointer, or cut.",
        _searched(r"Unable to load weights from pytorch checkpoint file"),
        _shown("inspect"),
    ),
    KnownError(
        "dcp-missing-key",
        "RuntimeError: Missing key in checkpoint state_dict: model.weight.",
        "The folder of torch.distributed.checkpoint has other names than the state dict that it is to fill. keys lists "
        "them, and rename changes them.",
        _searched(r"Missing key in checkpoint state_dict: (?P<name>\S+?)\.?(?:\s|$)"),
        _shown("keys"),
        'print(*FileSystemReader("folder").read_metadata().state_dict_metadata, sep="\\n")',
    ),
)
