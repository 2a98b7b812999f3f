"""Errors about devices, and about files that are damaged or of another kind. See ``known_errors``."""

from __future__ import annotations

from typing import Final

from ...base.steps import command, suggested_output
from .file_answers import legacy_answer, loader_answer, old_torch_answer, suffix_answer
from .finders import (
    DAMAGE,
    DEVICES,
    FOLDER,
    NOT_OPCODES,
    KnownError,
    edited,
    first_byte,
    raised,
    searched,
    shell,
    shown,
)

#: All tensors to the CPU.
_TO_CPU: Final = edited("remap", word="cpu", to="cpu")

DEVICE_ERRORS: Final = (
    KnownError(
        "no-such-device",
        "Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1.",
        "Each tensor has a tag with the device that it was on, and this machine has fewer devices. Move the tags.",
        searched(r"(?P<name>\w+) device \d+ but torch\.(?P<device>\w+)\."),
        edited("remap", word="gpu0", to="{device}:0"),
        'state = torch.load("model.pth", map_location="{device}:0")',
        ("CUDA device 1 but torch.cuda.device_count() is 1",),
        topic=DEVICES,
    ),
    KnownError(
        "no-cuda",
        "Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False.",
        "Each tensor has a tag with the GPU that it was on, and this machine has no GPU, or its torch is built without "
        "support for it. Move the tags to the CPU.",
        searched(r"Attempting to deserialize object on (?:an? )?\w+ device"),
        _TO_CPU,
        'state = torch.load("model.pth", map_location="cpu")',
        ("Attempting to deserialize object on MPS device but torch.backends.mps.is_available() is False.",),
        topic=DEVICES,
    ),
    KnownError(
        "unknown-location",
        "don't know how to restore data location of torch.storage.UntypedStorage (tagged with ...)",
        "The tag of a tensor names a device that this torch does not know, such as another accelerator whose plugin is "
        "not imported. Move the tags to the CPU.",
        searched(r"don't know how to restore data location|device module is not registered"),
        _TO_CPU,
        'state = torch.load("model.pth", map_location=lambda storage, location: storage)',
        ("The NPU device module is not registered.",),
        topic=DEVICES,
    ),
    KnownError(
        "invalid-ordinal",
        "RuntimeError: CUDA error: invalid device ordinal",
        "The code or the file names a GPU with a number that this machine does not have.",
        searched(r"CUDA error: invalid device ordinal|Invalid device id"),
        _TO_CPU,
        'state = torch.load("model.pth", map_location="cpu")',
        ("AssertionError: Invalid device id",),
        topic=DEVICES,
    ),
    KnownError(
        "gpu-memory",
        'File "torch/serialization.py", line 1494, in load ... torch.OutOfMemoryError: CUDA out of memory.',
        "torch.load puts every tensor on the GPU that it was saved from, where the model may be already. Load it on "
        "the CPU: load_state_dict then copies one tensor after the other.",
        searched(r"torch[/\\]serialization\.py[\s\S]*CUDA out of memory"),
        _TO_CPU,
        'state = torch.load("model.pth", map_location="cpu")',
        topic=DEVICES,
    ),
    KnownError(
        "rng-state",
        "TypeError: RNG state must be a torch.ByteTensor",
        "map_location moved the state of the random number generator to the GPU, or the file holds it with a tag of a "
        "GPU. Load it on the CPU.",
        searched(r"RNG state must be a torch\.ByteTensor|expected a torch\.ByteTensor, but got"),
        _TO_CPU,
        'state = torch.load("model.pth", map_location="cpu")',
        ("TypeError: expected a torch.ByteTensor, but got torch.cuda.ByteTensor",),
        topic=DEVICES._replace(
            absent="The program loads it with a map_location that moves the state of the random number generator to"
            ' the GPU: load it with map_location="cpu", then move the model'
        ),
    ),
)

FILE_ERRORS: Final = (
    KnownError(
        "lfs-pointer",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
        "The file is a Git LFS pointer: a few lines of text that stand for the checkpoint. Git LFS was missing when "
        "the repository was cloned. Install it and fetch the file.",
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
        "The file is a web page: the server answered with a login, a warning or an error. Download the file again from "
        "its direct link.",
        searched(first_byte("<", 60)),
        shown("inspect"),
        "",
        ("Weights only load failed. ... Unsupported operand 60",),
    ),
    KnownError(
        "compressed",
        r"_pickle.UnpicklingError: invalid load key, '\x1f'.",
        "The file is compressed with gzip, as a .tar.gz is. inspect names the checkpoint in it.",
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
        "torch.load found no pickle: the file has another format, such as safetensors, Keras or JSON, or its beginning "
        "is damaged. inspect names the format.",
        searched(rf"invalid load key, |Unsupported operand {NOT_OPCODES}"),
        shown("inspect"),
        "",
        ("Weights only load failed. ... Unsupported operand 123",),
        answer=suffix_answer,
    ),
    KnownError(
        "damaged-record",
        "RuntimeError: PytorchStreamReader failed reading file data/0: invalid header or archive is corrupted.",
        "A part of the file is damaged: {name}. Get the file again, or save the tensors that are whole.",
        searched(r"PytorchStreamReader failed reading file (?P<name>[^\s:]+)"),
        edited("salvage", word="saved"),
        "",
        ("RuntimeError: PytorchStreamReader failed reading file data/12: file read failed",),
        topic=DAMAGE,
    ),
    KnownError(
        "missing-record",
        "RuntimeError: [enforce fail at inline_container.cc:222] . file not found: archive/data/94308821128336",
        "A tensor's bytes are not in the file: {name} is missing. Get the file again, or save the tensors that are "
        "whole.",
        searched(r"(?:file not found: |failed locating file )(?P<name>(?:\S*/)?data/\d+)"),
        edited("salvage", word="saved"),
        "",
        ("PytorchStreamReader failed locating file data/12: file not found",),
        topic=DAMAGE,
    ),
    KnownError(
        "no-directory",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "The end of the file is missing: a download or a copy broke off, or the disk was full. Get the file again, or "
        "save the tensors that are whole.",
        searched(
            r"failed finding central directory|invalid header or archive is corrupted|not a ZIP archive"
            r"|BadZipFile|(?i:file is not a zip file)|PytorchStreamReader failed\Z"
        ),
        edited("salvage", word="saved"),
        "",
        (
            "PytorchStreamReader failed reading zip archive: invalid header or archive is corrupted",
            "zipfile.BadZipFile: File is not a zip file",
            "PytorchStreamReader failed",
        ),
        topic=DAMAGE,
    ),
    KnownError(
        "unexpected-eof",
        "RuntimeError: unexpected EOF, expected 4 more bytes. The file might be corrupted.",
        "The end of the file is missing: a download or a copy broke off, or the disk was full. Get the file again, or "
        "save the tensors that are whole.",
        searched(
            r"unexpected EOF|pickle data was truncated|storage has wrong (?:byte )?size"
            r"|Compressed file ended before the end-of-stream|tarfile\.ReadError: unexpected end of data"
        ),
        edited("salvage", word="saved"),
        "",
        (
            "_pickle.UnpicklingError: pickle data was truncated",
            "RuntimeError: storage has wrong byte size",
            "EOFError: Compressed file ended before the end-of-stream marker was reached",
        ),
        topic=DAMAGE,
    ),
    KnownError(
        "broken-pickle",
        "_pickle.UnpicklingError: unpickling stack underflow",
        "The pickle in the file is damaged, or the file is not a pickle at all. Get the file again, or save the "
        "tensors that are whole.",
        searched(
            r"unpickling stack underflow|pickle exhausted before|could not find MARK|STACK_GLOBAL requires str"
            r"|unregistered extension code|unexpected MARK found|Memo value not found at index"
        ),
        edited("salvage", word="saved"),
        "",
        ("_pickle.UnpicklingError: could not find MARK", "_pickle.UnpicklingError: STACK_GLOBAL requires str"),
        topic=DAMAGE,
    ),
    KnownError(
        "not-all-written",
        "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598",
        "torch.save could not write the whole file: most often the disk was full. Make room and save again, or save "
        "the tensors that are whole.",
        searched(
            r"unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing|kind: StorageFull|No space left on device"
        ),
        edited("salvage", word="saved"),
        "",
        (
            "RuntimeError: [enforce fail at inline_container.cc:858] . PytorchStreamWriter failed writing file data/7",
            "OSError: [Errno 28] No space left on device",
        ),
        topic=DAMAGE,
    ),
    KnownError(
        "empty-file",
        "EOFError: Ran out of input",
        "The file is empty, or ends at once: the disk was full when it was saved, or the save was killed.",
        raised(r"Ran out of input|(?m:^EOFError$)"),
        shown("inspect"),
        topic=DAMAGE,
    ),
    KnownError(
        "no-folder",
        "file in archive is not in a subdirectory: data.pkl",
        "The checkpoint was unpacked and zipped again without its folder, and torch wants all records in one folder.",
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
        topic=FOLDER,
    ),
    KnownError(
        "no-memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 13958643712 bytes.",
        "The machine has too little memory for all tensors at once. Map the file instead of reading it, or load one "
        "shard after the other.",
        raised(r"DefaultCPUAllocator: (?:not enough memory|can't allocate memory)|(?m:^MemoryError)"),
        shown("inspect"),
        'state = torch.load("model.pth", mmap=True, map_location="cpu")',
    ),
)

FORMAT_ERRORS: Final = (
    KnownError(
        "old-torch",
        "RuntimeError: model.pth is a zip archive (did you mean to use torch.jit.load()?)",
        "torch 1.4 and earlier do not read the format of torch 1.6 and later. Convert the file to the old format, or "
        "upgrade torch.",
        searched(
            r"is a zip archive \(did you mean|maximum supported version for reading is [12]\b"
            r"|kMaxSupportedFileFormatVersion"
        ),
        edited("convert", word="legacy", to_format="legacy"),
        'torch.save(state, "model.legacy.pth", _use_new_zipfile_serialization=False)  # with a newer torch',
        (
            "Attempted to read a PyTorch file with version 3, but the maximum supported version for reading is 2.",
            "RuntimeError: version_ <= kMaxSupportedFileFormatVersion INTERNAL ASSERT FAILED",
        ),
        answer=old_torch_answer,
    ),
    KnownError(
        "not-torchscript",
        "RuntimeError: PytorchStreamReader failed locating file constants.pkl: file not found",
        "The file is not a TorchScript program, which torch.jit.load reads. torch.save wrote it: torch.load reads it.",
        searched(r"failed locating file constants\.pkl|file not found: .*constants\.pkl"),
        shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu")',
        ("RuntimeError: [enforce fail at inline_container.cc] . file not found: archive/constants.pkl",),
        answer=loader_answer,
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
        "torch-tar",
        "RuntimeError: Cannot use ``weights_only=True`` with files saved in the legacy .tar format.",
        "The file was written by torch 0.1, as a tar archive. convert writes it in today's format.",
        searched(r"with files saved in the legacy \.tar format"),
        edited("convert", word="converted"),
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
    ),
    KnownError(
        "mmap",
        "RuntimeError: mmap can only be used with files saved with `torch.save(_use_new_zipfile_serialization=True)",
        "The file is in the format of torch 1.5 and earlier, whose tensors cannot be mapped. repack writes it in "
        "today's format.",
        searched(r"mmap can only be used with files saved with"),
        edited("repack", word="clean"),
        'torch.save(torch.load("model.pth"), "model.clean.pth")',
        answer=legacy_answer,
    ),
)
