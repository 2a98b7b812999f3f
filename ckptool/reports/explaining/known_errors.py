"""Common errors: the message, its cause, the command that helps, and Python code that does the same.

The table is data: ``explanation`` finds the entry for a text, and ``docs/errors.md`` is generated from all entries.
"""

from __future__ import annotations

from typing import Final

from ...base.steps import command, suggested_output
from .finders import (
    MODEL_ENTRIES,
    NOT_OPCODES,
    KnownError,
    acting_global,
    converted,
    edited,
    first_byte,
    raised,
    searched,
    shell,
    shown,
)
from .state_dict_errors import STATE_DICT_ERRORS

#: All known errors; the first that matches counts.
KNOWN_ERRORS: Final = (
    *STATE_DICT_ERRORS,
    KnownError(
        "no-such-entry",
        "KeyError: 'state_dict'",
        "The code expects a whole training run with the weights in its entry '{entry}'. The file is the state dict "
        "itself, or calls the entry something else.",
        raised(
            rf"KeyError: '(?P<entry>{'|'.join(MODEL_ENTRIES)})'", r"(?i)load|ckpt|checkpoint|state|weight", last=True
        ),
        lambda path, details: command("wrap", path, details["entry"], output=suggested_output(path, "nested")),
        """\
state = torch.load("model.pth", map_location="cpu")
model.load_state_dict(state.get("{entry}", state))""",
    ),
    KnownError(
        "optimizer-groups",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        "The optimizer was saved for another number of parameters: layers were added, frozen or removed since. What it "
        "remembers, such as momentum, belongs to the old ones. Load the weights without it.",
        searched(r"parameter group that doesn't match the size|loaded state dict has a different number of parameter"),
        lambda path, details: command("drop", path, "optim*", output=suggested_output(path, "weights")),
        """\
checkpoint = torch.load("model.pth", map_location="cpu")
checkpoint.pop("optimizer")""",
        ("ValueError: loaded state dict has a different number of parameter groups",),
    ),
    # -- devices
    KnownError(
        "no-such-device",
        "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
        "Each tensor is tagged with the device it was on, and this machine has fewer of them.",
        searched(r"Attempting to deserialize object on (?P<name>\w+) device \d+ but torch\.(?P<device>\w+)\."),
        edited("remap", word="gpu0", to="{device}:0"),
        'state = torch.load("model.pth", map_location="{device}:0")',
    ),
    KnownError(
        "no-cuda",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Each tensor is tagged with the GPU it was on, and this machine has none, or its torch was built without it.",
        searched(r"Attempting to deserialize object on a \w+ device"),
        edited("remap", word="cpu", to="cpu"),
        'state = torch.load("model.pth", map_location="cpu")',
    ),
    KnownError(
        "unknown-location",
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)",
        "The tag of a tensor names a kind of device that this torch does not know: another accelerator, whose plugin "
        "is not imported, or a name that somebody made up.",
        searched(r"don't know how to restore data location|device module is not registered"),
        edited("remap", word="cpu", to="cpu"),
        'state = torch.load("model.pth", map_location=lambda storage, location: storage)',
        ("The NPU device module is not registered.",),
    ),
    # -- files that are not checkpoints
    KnownError(
        "lfs-pointer",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "The file is a Git LFS pointer: a few lines of text that stand for the checkpoint. The repository was cloned "
        "without Git LFS.",
        searched(first_byte("v", 118) + "|without having git-lfs installed"),
        shell("git lfs pull --include {path}"),
        "",
        (
            "Weights only load failed. ... Unsupported operand 118",
            "OSError: You seem to have cloned a repository without having git-lfs installed.",
        ),
    ),
    KnownError(
        "web-page",
        "_pickle.UnpicklingError: invalid load key, '<'.",
        "The file is a web page: the server answered with a login, a warning or an error in its place. Download it "
        "again from the link of the raw file, logged in if need be.",
        searched(first_byte("<", 60)),
        shown("inspect"),
        "",
        ("Weights only load failed. ... Unsupported operand 60",),
    ),
    KnownError(
        "compressed",
        r"_pickle.UnpicklingError: invalid load key, '\x1f'.",
        "The file is compressed with gzip, as a .tar.gz is. inspect looks into it, and names what it holds.",
        searched(first_byte(r"\\x1f", 31)),
        shown("inspect"),
        """\
import gzip, io
with gzip.open("model.pth") as file:
    state = torch.load(io.BytesIO(file.read()), map_location="cpu")""",
        ("Weights only load failed. ... Unsupported operand 31",),
    ),
    KnownError(
        "not-torch",
        "_pickle.UnpicklingError: invalid load key, ...",
        "torch.load found no pickle: the file has another format, such as safetensors, Keras or JSON, or is damaged at "
        "its beginning. inspect names the format.",
        searched(rf"invalid load key, |Unsupported operand {NOT_OPCODES}"),
        shown("inspect"),
        "",
        ("Weights only load failed. ... Unsupported operand 123",),
    ),
    KnownError(
        "magic-number",
        "RuntimeError: Invalid magic number; corrupt file?",
        "The file is a pickle, but torch.save did not write it: pickle.dump, joblib or another program did. inspect "
        "shows what is in it without running it.",
        searched(r"Invalid magic number; corrupt file"),
        shown("inspect"),
        """\
import pickle
with open("model.pth", "rb") as file:
    state = pickle.load(file)  # runs what the file says""",
    ),
    KnownError(
        "damaged-record",
        "RuntimeError: PytorchStreamReader failed reading file data/0: invalid header or archive is corrupted.",
        "A part of the file is damaged, {name}. Get the file again; salvage saves the tensors that are whole.",
        searched(r"PytorchStreamReader failed reading file (?P<name>[^\s:]+)"),
        edited("salvage", word="saved"),
        "",
        ("RuntimeError: PytorchStreamReader failed reading file data/12: file read failed",),
    ),
    KnownError(
        "no-directory",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "The end of the file is missing: a download or a copy broke off, or the disk was full. Get the file again; "
        "salvage saves the tensors that are whole.",
        searched(r"failed finding central directory|invalid header or archive is corrupted|not a ZIP archive"),
        edited("salvage", word="saved"),
        "",
        ("PytorchStreamReader failed reading zip archive: invalid header or archive is corrupted",),
    ),
    KnownError(
        "unexpected-eof",
        "RuntimeError: unexpected EOF, expected 4 more bytes. The file might be corrupted.",
        "The end of the file is missing: a download or a copy broke off, or the disk was full. Get the file again; "
        "salvage saves the tensors that are whole.",
        searched(r"unexpected EOF, expected|pickle data was truncated|storage has wrong (?:byte )?size"),
        edited("salvage", word="saved"),
        "",
        ("_pickle.UnpicklingError: pickle data was truncated", "RuntimeError: storage has wrong byte size"),
    ),
    KnownError(
        "not-all-written",
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "torch.save could not write all of it: most often the disk was full. What it left has no end. Make room and "
        "save again; salvage saves the tensors that are whole.",
        searched(r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing"),
        edited("salvage", word="saved"),
        "",
        ("RuntimeError: [enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/7",),
    ),
    KnownError(
        "empty-file",
        "EOFError: Ran out of input",
        "The file is empty, or ends at once: the disk was full when it was saved, or the save was killed.",
        raised(r"Ran out of input|(?m:^EOFError$)"),
        shown("inspect"),
    ),
    KnownError(
        "no-folder",
        "file in archive is not in a subdirectory: data.pkl",
        "The checkpoint was unpacked and zipped again without its folder, and torch wants all records in one.",
        searched(r"file in archive is not in a subdirectory"),
        edited("repack", word="clean"),
    ),
    KnownError(
        "is-a-folder",
        "IsADirectoryError: [Errno 21] Is a directory: 'model'",
        "torch.load reads one file. The folder may be a checkpoint in several files, or an archive that was unpacked: "
        "convert makes one file of either.",
        raised(r"IsADirectoryError: \[Errno 21\]|file .* is a directory"),
        lambda path, details: command("convert", path, output=suggested_output(path, extension=".pth")),
        "",
        (),
        "model",
    ),
    # -- other formats and versions
    KnownError(
        "old-torch",
        "RuntimeError: model.pth is a zip archive (did you mean to use torch.jit.load()?)",
        "torch 1.4 and earlier do not read what torch 1.6 and later save, unless it is saved in the old format.",
        searched(r"is a zip archive \(did you mean|maximum supported version for reading is [12]\b"),
        edited("convert", word="legacy", to_format="legacy"),
        'torch.save(state, "model.legacy.pth", _use_new_zipfile_serialization=False)  # with a newer torch',
        ("Attempted to read a PyTorch file with version 3, but the maximum supported version for reading is 2.",),
    ),
    KnownError(
        "not-torchscript",
        "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found",
        "The file is not a TorchScript program, which torch.jit.load reads. torch.save wrote it: torch.load reads it.",
        searched(r"failed locating file constants\.pkl|file not found: .*constants\.pkl"),
        shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu")',
        ("RuntimeError: [enforce fail at inline_container.cc] . file not found: archive/constants.pkl",),
    ),
    KnownError(
        "no-data-pkl",
        'RuntimeError: Expected hasRecord("version") to be true, but got false.',
        "The file is a zip archive, but not one of torch.save: it has no data.pkl. inspect says what is in it, and "
        "whether that is a checkpoint.",
        searched(r'hasRecord\("version"\)|failed locating file data\.pkl|file not found: \S*data\.pkl'),
        shown("inspect"),
        "",
        ("RuntimeError: PytorchStreamReader failed locating file data.pkl: file not found",),
    ),
    KnownError(
        "torchscript",
        "RuntimeError: Cannot use ``weights_only=True`` with TorchScript archives passed to ``torch.load``.",
        "The file is a TorchScript program, code and weights together: torch.jit.load reads it. convert takes the "
        "weights out of it.",
        searched(r"with TorchScript archives passed to"),
        lambda path, details: command("convert", path, output=suggested_output(path, "weights"), allow_loss="entries"),
        'model = torch.jit.load("model.pth", map_location="cpu")',
    ),
    KnownError(
        "torch-tar",
        "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",
        "The file was written by torch 0.1, as a tar archive.",
        searched(r"with files saved in the legacy \.tar format"),
        edited("convert", word="converted"),
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
    ),
    KnownError(
        "mmap",
        "RuntimeError: mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)",
        "The file is in the old format, in which torch 1.5 and earlier saved: its tensors cannot be mapped.",
        searched(r"mmap can only be used with files saved with"),
        edited("repack", word="clean"),
        'torch.save(torch.load("model.pth"), "model.clean.pth")',
    ),
    KnownError(
        "acting-global",
        "Weights only load failed. ... Trying to load unsupported GLOBAL posix.system whose module posix is blocked.",
        "The file names {name}, which acts on the machine or reaches other functions. With weights_only=False it "
        "may run a command. Do not load it before scan has shown what is called, and you trust it.",
        acting_global,
        shown("scan"),
    ),
    KnownError(
        "weights-only-global",
        "Weights only load failed. ... Unsupported global: GLOBAL argparse.Namespace was not an allowed global by "
        "default.",
        "Since torch 2.6 torch.load builds nothing but tensors and plain containers, and the file has an object of "
        "another class in it, {name}. sanitize replaces such objects by plain values.",
        searched(r"Unsupported (?:global: GLOBAL|class) (?P<name>[\w.]*\w)"),
        edited("sanitize", word="plain"),
        """\
with torch.serialization.safe_globals([{name}]):  # if you trust the file
    state = torch.load("model.pth")""",
    ),
    KnownError(
        "needs-import",
        "Weights only load failed. ``torch.distributed.tensor`` must be imported to load DTensors",
        "torch registers the classes of such tensors when their module is imported. inspect shows what kind of tensors "
        "are in the file, and whether they are whole.",
        searched(r"``(?P<module>torch[\w.]*)`` (?:and ``[\w.]+`` )?must be imported"),
        shown("inspect"),
        'import {module}\nstate = torch.load("model.pth")',
        ("``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)",),
    ),
    KnownError(
        "weights-only",
        "Weights only load failed. ... WeightsUnpickler error: ...",
        "Since torch 2.6 torch.load builds nothing but tensors and plain containers, and takes nothing but pickle "
        "protocol 2. The file has something else. sanitize writes the same values in that form.",
        searched(
            r"Weights only load failed|WeightsUnpickler error|Unsupported operand \d"
            r"|Can only (?:build Tensor|create new object for|append to lists|extend lists|SETITEMS? for dict)"
            r"|Only persistent_load of storage|persistent_load id must be"
        ),
        edited("sanitize", word="plain"),
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
        (
            "Unsupported operand 149",
            "Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got ...",
            "Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got ...",
            "Only persistent_load of storage is allowed, but got ...",
            "persistent_load id must be tuple or int, but got ...",
        ),
    ),
    KnownError(
        "numpy-2",
        "ModuleNotFoundError: No module named 'numpy._core'",
        "The file has an array or a number of numpy 2 in it, and your numpy is older. sanitize makes plain values and "
        "tensors of them.",
        raised(r"No module named 'numpy\._core"),
        edited("sanitize", word="plain"),
        'state = torch.load("model.pth", weights_only=False)  # with numpy 2; runs what the file says',
    ),
    KnownError(
        "no-module",
        "ModuleNotFoundError: No module named 'models'",
        "An object was pickled, often the whole model, and its class is imported from the code that saved it, the "
        "module {name}. The weights need no code.",
        raised(r"No module named '(?P<name>[\w.]+)'"),
        edited("sanitize", word="plain", as_state_dict=True),
        """\
import sys
sys.path.insert(0, "folder/of/the/project")
state = torch.load("model.pth", weights_only=False).state_dict()""",
    ),
    KnownError(
        "newer-torch",
        "AttributeError: Can't get attribute '_rebuild_parameter_with_state' on <module 'torch._utils' from ...>",
        "A newer torch saved the file: yours has no {name}. Upgrade torch, or convert the file to safetensors, which "
        "any of them reads.",
        raised(r"Can't get attribute '(?P<name>_rebuild\w+)' on <module 'torch\._utils'"),
        lambda path, details: command(
            "convert",
            path,
            allow_loss=("requires-grad", "attributes"),
            output=suggested_output(path, extension=".safetensors"),
        ),
    ),
    KnownError(
        "no-class",
        "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'train.py'>",
        "The whole model was pickled, and its class {name} is not where it was then: in the script that runs, or in "
        "another version of a package. The weights need no class.",
        raised(r"Can't get attribute '(?P<name>[\w.]+)' on <module"),
        edited("sanitize", word="plain", as_state_dict=True),
        'state = torch.load("model.pth", weights_only=False).state_dict()  # where {name} is defined',
    ),
    KnownError(
        "upsample",
        "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'",
        "The whole model was pickled by an older torch, whose {name} lacks an attribute that yours reads. Build the "
        "model with your torch, and load the weights alone.",
        searched(
            r"'(?P<name>\w+)' object has no attribute "
            r"'(?P<attribute>recompute_scale_factor|_non_persistent_buffers_set|padding_mode|inplace|approximate|"
            r"batch_first|norm_first|_(?:load_state_dict|state_dict|backward|forward)_\w*hooks\w*)'"
        ),
        edited("sanitize", word="plain", as_state_dict=True),
        """\
model = Net()
model.load_state_dict(torch.load("model.pth", weights_only=False).state_dict())""",
        (
            "AttributeError: 'Conv2d' object has no attribute 'padding_mode'",
            "AttributeError: 'GELU' object has no attribute 'approximate'",
        ),
    ),
    KnownError(
        "model-not-state-dict",
        "TypeError: Expected state_dict to be dict-like, got <class 'models.Net'>.",
        "The file holds a whole model, {name}, where load_state_dict wants the weights of one.",
        searched(r"Expected state_dict to be dict-like, got <class '(?P<name>[\w.]+)'"),
        edited("sanitize", word="plain", as_state_dict=True),
        'model.load_state_dict(torch.load("model.pth", weights_only=False).state_dict())  # runs what the file says',
    ),
    KnownError(
        "state-dict-not-model",
        "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'",
        "These are weights, not a model: build the model with its own code, then load_state_dict. inspect says whether "
        "they are the whole file or in an entry of it.",
        searched(
            r"'(?:collections\.)?OrderedDict' object (?:has no attribute '(?:eval|to|cuda|cpu|train|parameters|forward|"
            r"half|float|modules|state_dict|named_parameters)'|is not callable)"
            r"|'dict' object has no attribute '(?:eval|parameters|named_parameters|modules|state_dict|load_state_dict)'"
        ),
        shown("inspect"),
        'model = Net()\nmodel.load_state_dict(torch.load("model.pth", map_location="cpu"))\nmodel.eval()',
        (
            "AttributeError: 'dict' object has no attribute 'eval'",
            "TypeError: 'collections.OrderedDict' object is not callable",
        ),
    ),
    KnownError(
        "plain-pickle",
        "_pickle.UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function "
        "was specified.",
        "torch.save wrote the file, and pickle, joblib or pandas opened it: its tensors are beside the pickle. "
        "torch.load reads it.",
        searched(r"A load persistent id instruction was encountered"),
        shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu")',
    ),
    KnownError(
        "old-python",
        "ValueError: unsupported pickle protocol: 5",
        "The file is in pickle protocol {name}, which a newer Python wrote, and yours does not read. sanitize writes "
        "the same in protocol 2.",
        searched(r"unsupported pickle protocol: (?P<name>\d)"),
        edited("sanitize", word="plain"),
        'torch.save(state, "model.plain.pth", pickle_protocol=2)  # where it was saved',
    ),
    KnownError(
        "python-2",
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc3 in position 0: ordinal not in range(128)",
        "The file was written by Python 2, whose strings are bytes that Python 3 has to decode.",
        # Skip pickles and gzip files opened as text, which fail at their first bytes.
        raised(r"'(?:ascii|utf-8)' codec can't decode byte (?!0x80 in position 0\b|0x8b in position 1\b)"),
        edited("sanitize", word="plain"),
        'state = torch.load("model.pth", encoding="latin1", weights_only=False)  # runs what the file says',
        ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xc3 in position 0: invalid continuation byte",),
    ),
    KnownError(
        "safetensors-header",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "The file is not safetensors, whatever its name says: a checkpoint of torch.save, a Git LFS pointer, or a web "
        "page. convert makes safetensors of a checkpoint, and names anything else.",
        searched(
            r"HeaderToo(?:Large|Small)|InvalidHeader(?:Deserialization|Length|Start)?\b"
            r"|(?i:header too (?:large|small)|invalid (?:UTF-8 in )?header)"
        ),
        converted,
        """\
from safetensors.torch import save_file
with open("model.safetensors", "rb") as file:
    save_file(torch.load(file, map_location="cpu"), "model.2.safetensors")""",
        (
            "Error while deserializing header: header too large",
            "Error while deserializing header: InvalidHeaderDeserialization",
            "Error while deserializing header: HeaderTooSmall",
        ),
        "model.safetensors",
    ),
    KnownError(
        "safetensors-cut",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "The end of the file is missing: its header names more bytes than there are. Get the file again; salvage saves "
        "the tensors that are whole.",
        searched(r"MetadataIncompleteBuffer|incomplete metadata, file not fully covered"),
        edited("salvage", word="saved"),
        "",
        ("Error while deserializing header: incomplete metadata, file not fully covered",),
        "model.safetensors",
    ),
    KnownError(
        "safetensors-metadata",
        "OSError: The safetensors archive passed at model.safetensors does not contain the valid metadata. Make sure "
        "you save your model with the `save_pretrained` method.",
        "transformers wants the header of the file to name the framework, which save_file writes only if it is asked.",
        searched(r"safetensors archive passed at .* does not contain the valid metadata"),
        edited("convert", word="pt", metadata="format=pt"),
        """\
from safetensors.torch import load_file, save_file
save_file(load_file("model.safetensors"), "model.pt.safetensors", {"format": "pt"})""",
        (),
        "model.safetensors",
    ),
    KnownError(
        "shared-memory",
        "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
        "when loading them again",
        "safetensors holds no tensor twice, and tied weights are one tensor under two names. Save the model with "
        "torch.save, and let convert keep one of the names.",
        searched(r"Some tensors share memory"),
        lambda path, details: command(
            "convert", path, output=suggested_output(path, extension=".safetensors"), tied="keep-first"
        ),
        'from safetensors.torch import save_model\nsave_model(model, "model.safetensors")',
    ),
    KnownError(
        "vulnerability",
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now "
        "require users to upgrade torch to at least v2.6 in order to use the function.",
        "transformers loads no .bin with a torch before 2.6. It loads safetensors with any.",
        searched(r"serious vulnerability issue in `?torch\.load"),
        converted,
        """\
from safetensors.torch import save_file
state = torch.load("pytorch_model.bin", map_location="cpu")
save_file(state, "pytorch_model.safetensors", {"format": "pt"})""",
        (),
        "pytorch_model.bin",
    ),
    KnownError(
        "unable-to-load",
        "OSError: Unable to load weights from pytorch checkpoint file for 'pytorch_model.bin' at 'pytorch_model.bin'.",
        "transformers says this of every file that torch.load refuses: most often it is a Git LFS pointer, or its end "
        "is missing. inspect says which.",
        searched(r"Unable to load weights from (?:pytorch )?checkpoint file"),
        shown("inspect"),
        "",
        (),
        "pytorch_model.bin",
    ),
    KnownError(
        "dcp-missing-key",
        "RuntimeError: Missing key in checkpoint state_dict: model.weight.",
        "The folder of torch.distributed.checkpoint has other names than the state dict that it is to fill, {name} "
        "among them. keys lists what it has, and rename changes them.",
        searched(r"Missing key in checkpoint state_dict: (?P<name>[^\s,]*[^\s,.])"),
        shown("keys"),
        """\
from torch.distributed.checkpoint import FileSystemReader
print(*FileSystemReader("checkpoint").read_metadata().state_dict_metadata, sep="\\n")""",
        (),
        "checkpoint",
    ),
)
