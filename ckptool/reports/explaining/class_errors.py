"""Errors about the classes in a file, and about the versions of torch, Python and numpy. See ``known_errors``."""

from __future__ import annotations

from typing import Final

from ...base.steps import command, suggested_output
from .file_answers import dtype_answer, joined_answer, loader_answer, newer_torch_answer, weights_answer
from .finders import CLASSES, KnownError, acting_global, edited, raised, searched, shown

_PLAIN: Final = edited("sanitize", word="plain")
_WEIGHTS: Final = edited("sanitize", word="plain", as_state_dict=True)

CLASS_ERRORS: Final = (
    KnownError(
        "acting-global",
        "Weights only load failed. ... Trying to load unsupported GLOBAL posix.system whose module posix is blocked.",
        "The file names {name}, which acts on the machine or reaches other functions: with weights_only=False it may "
        "run a command. Do not load it before scan has shown what is called, and you trust it.",
        acting_global,
        shown("scan"),
        topic=CLASSES,
    ),
    KnownError(
        "weights-only-global",
        "Weights only load failed. ... Unsupported global: GLOBAL argparse.Namespace was not an allowed global by "
        "default.",
        "Since torch 2.6 torch.load builds only tensors and plain containers, and the file holds an object of another "
        "class, {name}. sanitize replaces such objects by plain values.",
        searched(r"Unsupported (?:global: GLOBAL|class) (?P<name>[\w.]*\w)"),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
        topic=CLASSES,
    ),
    KnownError(
        "needs-import",
        "Weights only load failed. ``torch.distributed.tensor`` must be imported to load DTensors",
        "torch knows the classes of such tensors only after their module is imported. inspect shows these tensors, and "
        "whether they are whole.",
        searched(r"``(?P<module>torch[\w.]*)`` (?:and ``[\w.]+`` )?must be imported"),
        shown("inspect"),
        'import {module}\nstate = torch.load("model.pth")',
        ("``torch.nested`` and ``torch._dynamo`` must be imported to load nested jagged tensors (NJTs)",),
        topic=CLASSES._replace(codes=CLASSES.codes | {"shards", "process-group"}),
    ),
    KnownError(
        "weights-only",
        "Weights only load failed. ... WeightsUnpickler error: ...",
        "Since torch 2.6 torch.load builds only tensors and plain containers from pickle protocol 2, and the file "
        "holds something else. sanitize writes the same values in that form.",
        searched(
            r"Weights only load failed|WeightsUnpickler error|Unsupported operand \d"
            r"|Can only (?:build Tensor|create new object for|append to lists|extend lists|SETITEMS? for dict)"
            r"|Only persistent_load of storage|persistent_load id must be"
        ),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # runs what the file says',
        (
            "Unsupported operand 149",
            "Can only build Tensor, Parameter, OrderedDict or types allowlisted via `add_safe_globals`, but got ...",
            "Can only create new object for nn.Parameter or classes allowlisted via `add_safe_globals` but got ...",
            "Only persistent_load of storage is allowed, but got ...",
            "persistent_load id must be tuple or int, but got ...",
        ),
        topic=CLASSES,
    ),
    KnownError(
        "path-object",
        "NotImplementedError: cannot instantiate 'PosixPath' on your system",
        "The file holds a path object of another system: Windows cannot make a PosixPath, and Linux cannot make a "
        "WindowsPath. sanitize replaces it by text.",
        searched(r"cannot instantiate '(?P<name>PosixPath|WindowsPath)' on your system"),
        _PLAIN,
        """\
import pathlib
pathlib.PosixPath = pathlib.WindowsPath  # on Windows
state = torch.load("model.pth", weights_only=False)  # runs what the file says""",
        (
            "NotImplementedError: cannot instantiate 'WindowsPath' on your system",
            "pathlib.UnsupportedOperation: cannot instantiate 'WindowsPath' on your system",
        ),
        topic=CLASSES,
    ),
    KnownError(
        "path-module",
        "ModuleNotFoundError: No module named 'pathlib._local'; 'pathlib' is not a package",
        "The file holds a path object of Python 3.13, and your Python is older. sanitize replaces it by text.",
        searched(r"No module named '(?P<name>pathlib\._local)'"),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # with Python 3.13; runs what the file says',
        topic=CLASSES,
    ),
    KnownError(
        "numpy-2",
        "ModuleNotFoundError: No module named 'numpy._core'",
        "The file holds an array or a number of numpy 2, and your numpy is older. sanitize replaces them by tensors "
        "and plain values.",
        raised(r"No module named '(?P<name>numpy\._core)"),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # with numpy 2; runs what the file says',
        topic=CLASSES,
    ),
    KnownError(
        "numpy-random",
        "ValueError: <class 'numpy.random._mt19937.MT19937'> is not a known BitGenerator module.",
        "The file holds a random number generator of another version of numpy. sanitize replaces it by plain values.",
        searched(r"is not a known BitGenerator module|__(?:randomstate|generator|bit_generator)_ctor\(\) takes"),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # with the numpy that saved it',
        ("TypeError: __randomstate_ctor() takes from 0 to 1 positional arguments but 2 were given",),
        topic=CLASSES,
    ),
    KnownError(
        "pickled-code",
        "TypeError: code() argument 13 must be str, not int",
        "The file holds the code of a function, which cloudpickle or dill saved with another version of Python. "
        "sanitize replaces the function by plain values.",
        raised(
            r"code\(\) (?:argument \d+ must be|takes at (?:most|least) \d+ arguments)"
            r"|code expected at (?:most|least) \d+ arguments|an integer is required \(got type bytes\)"
        ),
        _PLAIN,
        'state = torch.load("model.pth", weights_only=False)  # with the Python that saved it',
        ("TypeError: code expected at most 16 arguments, got 18", "TypeError: an integer is required (got type bytes)"),
        topic=CLASSES,
    ),
    KnownError(
        "no-module",
        "ModuleNotFoundError: No module named 'models'",
        "The file holds an object, often the whole model, whose class is in the module {name} of the code that saved "
        "it. The weights need no code: sanitize takes them out.",
        raised(r"No module named '(?P<name>[\w.]+)'"),
        _WEIGHTS,
        """\
import sys
sys.path.insert(0, "folder/of/the/project")
state = torch.load("model.pth", weights_only=False).state_dict()""",
        topic=CLASSES,
        answer=joined_answer,
    ),
    KnownError(
        "newer-torch",
        "AttributeError: Can't get attribute '_rebuild_parameter_with_state' on <module 'torch._utils' from ...>",
        "A newer torch saved the file: yours has no {name}. Upgrade torch, or convert the file to safetensors, which "
        "every torch reads.",
        raised(r"Can't get attribute '(?P<name>_rebuild\w+)' on <module 'torch\._utils'"),
        lambda path, details: command(
            "convert",
            path,
            allow_loss=("requires-grad", "attributes"),
            output=suggested_output(path, extension=".safetensors"),
        ),
        topic=CLASSES,
        answer=newer_torch_answer,
    ),
    KnownError(
        "newer-dtype",
        "AttributeError: module 'torch' has no attribute 'float8_e4m3fn'",
        "The file has tensors of the dtype {name}, which your torch does not know. Upgrade torch, or cast them to "
        "float32.",
        searched(
            r"(?:module 'torch' has no attribute|Can't get attribute) "
            r"'(?P<name>(?:float[48]_|u?int[1-7]\b|uint(?:16|32|64))\w*)'"
        ),
        edited("cast", word="float32", to_dtype="float32"),
        topic=CLASSES._replace(absent="torch.load reads it with a torch that knows the dtype: upgrade torch"),
        answer=dtype_answer,
    ),
    KnownError(
        "no-kernel",
        "RuntimeError: \"slow_conv2d_cpu\" not implemented for 'Half'",
        "Your torch cannot compute this on the CPU in half precision, and the file has such weights. Upgrade torch, or "
        "cast them to float32.",
        searched(r"not implemented for '(?P<name>Half|BFloat16)'"),
        edited("cast", word="float32", to_dtype="float32"),
        "model.float()",
        ("RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",),
        topic=CLASSES._replace(absent="Its weights are in full precision: the code calls model.half(); remove that"),
        answer=dtype_answer,
    ),
    KnownError(
        "no-class",
        "AttributeError: Can't get attribute 'Net' on <module '__main__' from 'train.py'>",
        "The file holds a whole model or another object, and its class {name} is not where it was then: in the script "
        "that runs, or in another version of a package. The weights need no class: sanitize takes them out.",
        raised(
            r"(?:Can't get attribute '(?P<name>[\w.]+)' on <module|module '__main__' has no attribute '(?P<other>\w+)')"
        ),
        _WEIGHTS,
        'state = torch.load("model.pth", weights_only=False).state_dict()  # where the class is defined',
        ("AttributeError: module '__main__' has no attribute 'Net'",),
        topic=CLASSES,
    ),
    KnownError(
        "upsample",
        "AttributeError: 'Upsample' object has no attribute 'recompute_scale_factor'",
        "Another version of torch or of the project saved the whole model, and a layer of it lacks an attribute that "
        "yours reads. Build the model with your version, and load only the weights.",
        searched(
            r"'(?P<layer>\w+)' object has no attribute "
            r"'(?P<attribute>recompute_scale_factor|_non_persistent_buffers_set|padding_mode|inplace|approximate|"
            r"batch_first|norm_first|_lazy_load_hook|_buffers|_parameters|_modules|_is_full_backward_hook|_is_hf_initialized|_backend|"
            r"_(?:load_state_dict|state_dict|backward|forward)_\w*hooks\w*)'"
            r"|'(?P<head>Detect|Segment|Pose|Conv|C2f|C3k2)' object has no attribute '\w+'"
        ),
        _WEIGHTS,
        """\
model = Net()
model.load_state_dict(torch.load("model.pth", weights_only=False).state_dict())""",
        (
            "AttributeError: 'Conv2d' object has no attribute 'padding_mode'",
            "AttributeError: 'GELU' object has no attribute 'approximate'",
            "AttributeError: 'Linear' object has no attribute '_lazy_load_hook'",
            "AttributeError: 'Detect' object has no attribute 'grid'",
        ),
        topic=CLASSES,
    ),
    KnownError(
        "process-group",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
        "torch builds a whole DistributedDataParallel model, and sharded tensors, only inside a process group. "
        "sanitize takes the weights out.",
        raised(r"Default process group has not been initialized"),
        _WEIGHTS,
        """\
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:29500", rank=0, world_size=1)
state = torch.load("model.pth", weights_only=False)  # runs what the file says""",
        topic=CLASSES._replace(codes=CLASSES.codes | {"process-group", "shards"}),
    ),
    KnownError(
        "model-not-state-dict",
        "TypeError: Expected state_dict to be dict-like, got <class 'models.Net'>.",
        "The file holds a whole model, {name}, and the code wants the state dict of one. sanitize takes the "
        "weights out.",
        searched(
            r"Expected state_dict to be dict-like, got <class '(?P<name>[\w.]+)'>"
            r"|'(?P<model>(?!OrderedDict|NoneType)[A-Z]\w+)' object (?:has no attribute "
            r"'(?:copy|keys|items|values|get)'|is not subscriptable|does not support item assignment)"
        ),
        _WEIGHTS,
        'model.load_state_dict(torch.load("model.pth", weights_only=False).state_dict())  # runs what the file says',
        (
            "AttributeError: 'Net' object has no attribute 'copy'",
            "TypeError: 'DataParallel' object is not subscriptable",
        ),
        topic=CLASSES,
        answer=weights_answer,
    ),
    KnownError(
        "state-dict-not-model",
        "AttributeError: 'collections.OrderedDict' object has no attribute 'eval'",
        "The file holds weights, not a model: build the model with its own code, then call load_state_dict. inspect "
        "says whether the weights are the whole file or one entry of it.",
        searched(
            r"'(?:collections\.)?OrderedDict' object (?:has no attribute '(?:eval|to|cuda|cpu|train|parameters|forward|"
            r"half|float|modules|state_dict|named_parameters|predict|load_state_dict|names|module)'|is not callable)"
            r"|'dict' object has no attribute '(?:eval|parameters|named_parameters|modules|state_dict|load_state_dict)'"
        ),
        shown("inspect"),
        'model = Net()\nmodel.load_state_dict(torch.load("model.pth", map_location="cpu"))\nmodel.eval()',
        (
            "AttributeError: 'dict' object has no attribute 'eval'",
            "TypeError: 'collections.OrderedDict' object is not callable",
        ),
        topic=CLASSES,
        answer=weights_answer,
    ),
    KnownError(
        "path-not-state-dict",
        "AttributeError: 'str' object has no attribute 'copy'",
        "load_state_dict takes the state dict and got a path, or torch.load takes a path and got a state dict. Load "
        "the file once, and pass on the result.",
        raised(
            r"'str' object has no attribute '(?:copy|items|keys)'|'dict' object has no attribute 'seek'",
            r"load_state_dict",
        ),
        shown("inspect"),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu"))',
        (
            "AttributeError: 'dict' object has no attribute 'seek'. You can only torch.load from a file that is "
            "seekable.",
        ),
        topic=CLASSES,
        answer=weights_answer,
    ),
    KnownError(
        "plain-pickle",
        "_pickle.UnpicklingError: A load persistent id instruction was encountered, but no persistent_load function "
        "was specified.",
        "torch.save wrote the file, and pickle, joblib or pandas opened it. torch.load reads it.",
        searched(r"A load persistent id instruction was encountered"),
        shown("inspect"),
        'state = torch.load("model.pth", map_location="cpu")',
        answer=loader_answer,
    ),
    KnownError(
        "old-python",
        "ValueError: unsupported pickle protocol: 5",
        "The file uses pickle protocol {name}, which a newer Python wrote and yours does not read. sanitize writes the "
        "same values in protocol 2.",
        searched(r"unsupported pickle protocol: (?P<name>\d)"),
        _PLAIN,
        'torch.save(state, "model.plain.pth", pickle_protocol=2)  # where it was saved',
        topic=CLASSES,
    ),
    KnownError(
        "python-2",
        "UnicodeDecodeError: 'ascii' codec can't decode byte 0xc3 in position 0: ordinal not in range(128)",
        "Python 2 wrote the file, and its strings are bytes that Python 3 has to decode. sanitize decodes them.",
        # Skip pickles and gzip files opened as text, which fail at their first bytes.
        raised(r"'(?:ascii|utf-8)' codec can't decode byte (?!0x80 in position 0\b|0x8b in position 1\b)"),
        _PLAIN,
        'state = torch.load("model.pth", encoding="latin1", weights_only=False)  # runs what the file says',
        ("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xc3 in position 0: invalid continuation byte",),
        topic=CLASSES,
    ),
)
