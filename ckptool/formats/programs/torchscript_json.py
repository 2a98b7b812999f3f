"""TorchScript archives of torch 1.0 to 1.3: modules and tensors in ``model.json``, bytes in ``tensors/N``.

Source: ``caffe2/proto/torch.proto`` (ModelDef, ModuleDef, TensorDef) and ``torch/csrc/jit/export.cpp`` of torch 1.0, as
protobuf spells messages in JSON: 64-bit numbers are texts, and what is zero or false may be missing.
"""

from __future__ import annotations

from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, PickleError
from ...base.limits import LIMITS
from ...base.text import counted, shown
from ...checkpoint.graph_builder import PlainTensor
from ...checkpoint.objects import callable_name, elements, scalar
from ...files.zips.reader import Archive
from ...pickles.decode import decode
from ...pickles.nodes import Call, Ref
from .archive import ProgramArchive, read_json, source_devices

#: ``TensorProto.DataType`` of caffe2.
_DTYPES: Final = {
    "FLOAT": "float32",
    "DOUBLE": "float64",
    "FLOAT16": "float16",
    "BFLOAT16": "bfloat16",
    "INT64": "int64",
    "INT32": "int32",
    "INT16": "int16",
    "INT8": "int8",
    "UINT8": "uint8",
    "BYTE": "uint8",
    "BOOL": "bool",
}
#: Modules that are visited; those of JSON are a tree, so there cannot be more than it has bytes.
_MODULES: Final = 1_000_000
_CHARACTERS: Final = 64_000_000


class JsonScript(ProgramArchive):
    """An archive with ``model.json``: a dict of its parameters, buffers and tensor attributes by name."""

    format = "torchscript-1.0"
    kind = "a TorchScript archive of torch 1.0"
    own_names = ("torch.jit._pickle.",)
    loader = "torch 1.0 to 1.3 (torch.jit.load)"

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive)
        record = archive.find("model.json")
        assert record is not None
        model = read_json(archive, record)
        tensors = model.get("tensors", []) if isinstance(model, dict) else None
        module = model.get("mainModule") if isinstance(model, dict) else None
        if not isinstance(tensors, list) or not isinstance(module, dict):
            raise MalformedError("model.json describes no module", path=archive.source.name, where=record.name)
        self._tensors = tensors
        self._made: dict[int, Ref] = {}
        self.parameters = 0
        self.graph = self.builder.graph(self.builder.mapping(self._items(module)))
        files = [name for name in self.names() if name.startswith("code/")]
        code = len(files)
        self.named_devices = source_devices(archive, files)
        version = model.get("producerVersion")
        self.writer = f"torch {version}" if isinstance(version, str) else "torch 1.0 to 1.3"
        self.beside = [f"the program ({counted(code, 'file')} of code)"]
        self.described = {
            "kind": self.kind,
            "executable": True,
            "code_files": code,
            "parameters": self.parameters,
            "tensors": len(tensors),
            "devices": {"code": [item._asdict() for item in self.named_devices]},
        }
        what = "it is a TorchScript archive of torch 1.0 to 1.3, executable by nature: no later torch loads it"
        self.tell(what)
        self.tell_devices("nothing moves them when it is loaded")

    def _items(self, main: dict[str, Any]) -> list[tuple[str, Ref]]:
        items: list[tuple[str, Ref]] = []
        attributes = self._attributes()
        work: list[tuple[dict[str, Any], str]] = [(main, "")]
        characters = visited = 0
        while work:
            module, prefix = work.pop()
            visited += 1
            characters += len(prefix)
            if visited > _MODULES or characters > _CHARACTERS:
                raise MalformedError("its modules nest without end", path=self.archive.source.name, where="model.json")
            for parameter in _dicts(module.get("parameters")):
                number = _int(parameter.get("tensorId", 0))
                if number is not None:
                    self.parameters += parameter.get("isBuffer") is not True
                    items.append((prefix + str(parameter.get("name", "")), self._tensor(number)))
            for attribute in _dicts(module.get("attributes")):
                place = _int(attribute.get("id", 0))
                if attribute.get("type") == "Tensor" and place in attributes:
                    items.append((prefix + str(attribute.get("name", "")), self._tensor(attributes[place])))
            inner = _dicts(module.get("submodules"))
            work.extend((one, f"{prefix}{one.get('name', '')}.") for one in reversed(inner))
        return items

    def _attributes(self) -> dict[int, int]:
        """The tensors among the attributes: number of the attribute -> number of the tensor."""
        record = self.archive.find("attributes.pkl")
        if record is None:
            return {}
        try:
            graph = decode(self.archive.read(record, LIMITS.pickle_bytes), where=record.name).graph
        except PickleError:
            return {}  # it is among the pickles, and said to be broken there
        found: dict[int, int] = {}
        for number, ref in enumerate(elements(graph.nodes[graph.root])):
            node = graph.nodes[ref]
            if type(node) is Call and callable_name(graph, node.func) == "torch.jit._pickle.build_tensor_from_id":
                args = graph.nodes[node.args]
                value = scalar(graph, args[0]) if type(args) is tuple and args else None
                if type(value) is int:
                    found[number] = value
        return found

    def _tensor(self, number: int) -> Ref:
        if number not in self._made:
            self._made[number] = self.builder.tensor(self._described(number))
        return self._made[number]

    def _described(self, number: int) -> PlainTensor:
        meta = self._tensors[number] if 0 <= number < len(self._tensors) else None
        if not isinstance(meta, dict):
            raise self._wrong(number, "it is not described")
        data = meta.get("data")
        key = data.get("key") if isinstance(data, dict) else None
        record = self.archive.find(key) if type(key) is str else None
        if type(key) is not str or record is None:
            raise self._wrong(number, "its bytes are not in the archive")
        dtype = BY_NAME.get(_DTYPES.get(str(meta.get("dataType", "")), ""))
        shape, strides = _ints(meta.get("dims", [])), _ints(meta.get("strides", []))
        offset = _int(meta.get("offset", 0))
        if dtype is None or shape is None or strides is None or offset is None or len(shape) != len(strides):
            raise self._wrong(number, "its dtype or its sizes make no sense")
        device = meta.get("device")
        self.records_of[key] = record
        location = device if type(device) is str else "cpu"
        return PlainTensor(dtype, shape, strides, key, record.size, offset, location)

    def _wrong(self, number: int, why: str) -> MalformedError:
        what = f"model.json is damaged at tensor {shown(str(number))}: {why}"
        return MalformedError(what, path=self.archive.source.name, where="model.json")


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _int(value: Any) -> int | None:
    """A number, or a text of up to 18 digits."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _ints(values: Any) -> tuple[int, ...] | None:
    if not isinstance(values, list) or len(values) > LIMITS.dimensions:
        return None
    found = [number for value in values if (number := _int(value)) is not None]
    return tuple(found) if len(found) == len(values) else None


def read(archive: Archive) -> JsonScript:
    """Read the description; raises MalformedError where it is damaged."""
    return JsonScript(archive)
