"""TorchScript archives of torch 1.0 to 1.3: modules and tensors in ``model.json``, bytes in ``tensors/N``.

Source: ``caffe2/proto/torch.proto`` (ModelDef, ModuleDef, TensorDef) and ``torch/csrc/jit/export.cpp`` of torch 1.0. In
protobuf's JSON form, 64-bit numbers are strings, and fields that are zero or false may be missing.
"""

from __future__ import annotations

from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.text import quoted
from ...checkpoint.objects import callable_name, list_items
from ...files.zips.reader import Archive
from ...pickles.nodes import Call, Ref
from .archive import ProgramArchive, describe, graph_of

_MODEL: Final = "model.json"
#: ``TensorProto.DataType`` of caffe2, where the lower-case name is not torch's.
_DTYPES: Final = {"FLOAT": "float32", "DOUBLE": "float64", "BYTE": "uint8"}
#: The most modules that are visited. In JSON they form a tree, so there cannot be more than bytes.
_MAX_MODULES: Final = 1_000_000
_MAX_CHARACTERS: Final = 64_000_000


class JsonScript(ProgramArchive):
    """An archive with ``model.json``: a dict of its parameters, buffers and tensor attributes by name."""

    format = "torchscript-1.0"
    kind = "a TorchScript archive of torch 1.0"
    own_names = ("torch.jit._pickle.",)
    loader = "torch 1.0 to 1.3 (torch.jit.load)"

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive)
        model = self.json(_MODEL)
        tensors = model.get("tensors", []) if isinstance(model, dict) else None
        module = model.get("mainModule") if isinstance(model, dict) else None
        if not isinstance(tensors, list) or not isinstance(module, dict):
            raise self.damaged(_MODEL, " describes no module")
        self._tensors = tensors
        self._refs: dict[int, Ref] = {}
        self.parameters = 0
        self.graph = self.builder.graph(self.builder.mapping(self._items(module)))
        files = [name for name in self.names() if name.startswith("code/")]
        self.named_devices = self.devices_in_sources(files)
        version = model.get("producerVersion")
        self.writer = f"torch {version}" if isinstance(version, str) else "torch 1.0 to 1.3"
        what = "it is a TorchScript archive of torch 1.0 to 1.3, which holds code: no later torch loads it"
        describe(self, what, {"code_files": len(files), "parameters": self.parameters, "tensors": len(tensors)})

    def _items(self, main: dict[str, Any]) -> list[tuple[str, Ref]]:
        items: list[tuple[str, Ref]] = []
        attributes = self._tensor_attributes()
        work: list[tuple[dict[str, Any], str]] = [(main, "")]
        characters = visited = 0
        while work:
            module, prefix = work.pop()
            visited += 1
            characters += len(prefix)
            if visited > _MAX_MODULES or characters > _MAX_CHARACTERS:
                raise self.damaged(_MODEL, " has modules that nest endlessly")
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
            work.extend((child, f"{prefix}{child.get('name', '')}.") for child in reversed(inner))
        return items

    def _tensor_attributes(self) -> dict[int, int]:
        graph = graph_of(self.archive, "attributes.pkl")
        if graph is None:
            return {}
        tensors: dict[int, int] = {}
        for number, ref in enumerate(list_items(graph.nodes[graph.root])):
            node = graph.nodes[ref]
            if type(node) is Call and callable_name(graph, node.func) == "torch.jit._pickle.build_tensor_from_id":
                values = [graph.nodes[arg] for arg in list_items(graph.nodes[node.args])]
                if values and type(values[0]) is int:
                    tensors[number] = values[0]
        return tensors

    def _tensor(self, number: int) -> Ref:
        if number not in self._refs:
            meta = self._tensors[number] if 0 <= number < len(self._tensors) else None
            meta = meta if isinstance(meta, dict) else {}
            data, name = meta.get("data"), str(meta.get("dataType", ""))
            key = data.get("key") if isinstance(data, dict) else None
            record = self.archive.find(key) if type(key) is str else None
            numbers = meta.get("dims", []), meta.get("strides", []), meta.get("offset", 0)
            dtype, where = BY_NAME.get(_DTYPES.get(name, name.lower())), f"{_MODEL}: tensor {quoted(str(number))}"
            tensor = self.plain_tensor(where, dtype, numbers, _int, str(key), record)
            if type(device := meta.get("device")) is str:
                tensor = tensor._replace(location=device)
            self._refs[number] = self.builder.tensor(tensor)
        return self._refs[number]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _int(value: Any) -> int | None:
    """Return a number, also from a string of up to 18 digits; None for anything else."""
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 62 else None


#: Reads an archive; raises MalformedError if its description is damaged.
read: Final = JsonScript
