"""torch.export archives (.pt2): a program, and weights as raw records described in JSON.

Source: ``torch/export/pt2_archive/_package.py`` (``_save_raw_tensors``, ``_load_state_dict``) and
``torch/_export/serde/schema.py``. Before torch 2.8: ``torch/export/__init__.py``, where the weights are a torch.save
file within the archive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, PickleError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.text import join_limited, pluralize, quoted
from ...checkpoint.graph_builder import PlainTensor
from ...checkpoint.programs import NamedDevice, ProgramFacts
from ...checkpoint.tensors import TensorReader
from ...files.zips.reader import Archive, Record
from ...pickles.nodes import Ref
from .archive import ProgramArchive, append_graph, damaged, integers, name_parts, nested_file, read_json

#: ``ScalarType`` of torch/_export/serde/schema.py.
SCALAR_TYPES: Final = {
    **{1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32", 8: "float64"},
    **{9: "complex32", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16", 28: "uint16"},
    **{29: "float8_e4m3fn", 30: "float8_e5m2", 31: "float8_e4m3fnuz", 32: "float8_e5m2fnuz", 33: "float8_e8m0fnu"},
    **{34: "uint32", 35: "uint64"},
}
_STRIDED: Final = 7
_WEIGHTS: Final = regex(r"data/weights/(.+)_weights_config\.json\Z")
_LEGACY: Final = regex(r"data/weights/(.+)\.pt\Z")
#: Weights in archives before torch 2.8. Torch 2.1 used the suffix .json for the same content.
_OLD: Final = ("serialized_state_dict.pt", "serialized_state_dict.json")
_TORCH: Final = regex(rb'"torch_version": ?"([0-9A-Za-z.+-]{1,40})"')
_DEVICE: Final = regex(rb'"type": ?"([a-z]{1,20})", ?"index": ?(null|\d{1,4})')
_CONSTANTS: Final = regex(r"data/constants/.*_constants_config\.json\Z")
#: The other torch.save files in archives before torch 2.8.
_OTHER_OLD: Final = regex(r"(?:data/constants/.+\.pt|serialized_constants\.(?:pt|json))\Z")
#: Constants that are not tensors, pickled by C++ or Python.
_OBJECT: Final = regex(r"data/constants/(?:custom|opaque)_obj_")
#: Bytes of the program that are searched for devices and the version.
_MAX_PROGRAM: Final = 64 << 20


class Pt2(ProgramArchive):
    """A torch.export archive. The graph holds its models' state dicts; for a single model, its state dict is the
    root."""

    format = "pt2"
    kind = "a torch.export program"
    loader = "torch.export.load"
    maps = False

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive)
        names = self.names()
        self.parameters = self.buffers = 0
        models = {match[1]: self._weights(match[0]) for match in map(_WEIGHTS.fullmatch, names) if match}
        for name in names:
            legacy = _LEGACY.fullmatch(name)
            if name in _OLD or (legacy is not None and legacy[1] not in models):
                models[legacy[1] if legacy is not None else "model"] = self._old_weights(name)
        root = next(iter(models.values())) if len(models) == 1 else self.builder.mapping(models.items())
        self.graph = self.builder.graph(root)
        programs = [name for name in names if name.startswith("models/") or name == "serialized_exported_program.json"]
        constants = [key for name in names if _CONSTANTS.fullmatch(name) for key in self._entries(name)]
        compiled = [name for name in names if name.startswith("data/aotinductor/")]
        inputs = [name for name in names if name.startswith("data/sample_inputs/") or "example_inputs" in name]
        objects = [name for name in names if _OBJECT.match(name)]
        extra = [name.removeprefix("extra/") for name in names if name.startswith("extra/")]
        if compiled and not models and not programs:
            self.kind, self.loader = "an AOTInductor package", "torch._inductor.aoti_load_package"
        self.beside = [
            *([f"the program ({join_limited(programs, most=3)})"] if programs else []),
            *name_parts("constant", constants),
            *([f"{pluralize(len(compiled), 'file')} of compiled code"] if compiled else []),
            *(["sample inputs"] if inputs else []),
            *name_parts("pickled object", objects),
            *name_parts("extra file", extra),
        ]
        self.unnamed = self._parts_unnamed(names, constants, objects)
        self._search_programs(programs)
        self._add_fixed_devices(names, inputs)
        self.warn_of_devices("nothing moves them when it is loaded")
        what = f"it is {self.kind}, which holds code: {self.loader} reads it, torch.load does not"
        if compiled:
            what += ", and it holds compiled machine code, which runs when it is loaded"
        elif self.inner or inputs or objects:
            # deserialize_torch_artifact in torch/_export/serde/serialize.py loads what weights_only=True refuses,
            # without that option.
            what += ", and pickles within it run when it is loaded"
        facts: ProgramFacts = {"models": list(models), "parameters": self.parameters, "buffers": self.buffers}
        self.describe(what, {**facts, "constants": constants, "compiled_files": len(compiled), "extra_files": extra})

    def audit(self, keys: Collection[str]) -> list[Finding]:
        # Nested torch.save files are normal here.
        return [problem for problem in super().audit(keys) if problem.code != "nested-archive"]

    def _parts_unnamed(self, names: Sequence[str], constants: Sequence[str], objects: Sequence[str]) -> list[str]:
        """Describe the contents with tensors, or with objects that may hold some, outside of the state dicts."""
        old = [name for name in names if _OTHER_OLD.fullmatch(name) and self._has_tensors(name)]
        return [
            *name_parts("constant", constants),
            *name_parts("file", old, rest=" of constants"),
            *name_parts("pickled object", objects),
        ]

    def _has_tensors(self, name: str) -> bool:
        """Return whether a nested torch.save file has nonempty tensors, also for one that cannot be read."""
        record = self.archive.find(name)
        if record is None or not record.size:
            return False
        try:
            return any(
                storage.numel for storage in TensorReader(nested_file(self.archive, record).graph).storages.values()
            )
        except (MalformedError, PickleError):
            return True

    def _weights(self, name: str) -> Ref:
        """Build the state dict that one configuration describes."""
        items = []
        for key, meta in self._entries(name).items():
            path = meta.get("path_name")
            record = self.archive.find(f"data/weights/{path}")
            if type(path) is not str or record is None:
                raise self._damaged(name, key, "its bytes are not in the archive")
            self.parameters += meta.get("is_param") is True
            self.buffers += meta.get("is_param") is not True
            if meta.get("use_pickle") is True:
                if path not in self.inner:
                    self.inner[path] = nested_file(self.archive, record)
                ref = append_graph(self.builder, self.inner[path].graph, f"{path}:{{}}".format)
            else:
                self.records_of[path] = record
                ref = self.builder.tensor(self._tensor(name, key, meta.get("tensor_meta"), path, record))
            items.append((key, ref))
        return self.builder.mapping(items)

    def _json(self, name: str) -> Any:
        record = self.archive.find(name)
        return None if record is None else read_json(self.archive, record)

    def _entries(self, name: str) -> dict[str, dict[str, Any]]:
        config = self._json(name)
        entries = config.get("config") if isinstance(config, dict) else None
        if not isinstance(entries, dict) or not all(isinstance(meta, dict) for meta in entries.values()):
            raise damaged(self.archive, name, " describes no weights")
        return entries

    def _tensor(self, name: str, key: str, meta: Any, path: str, record: Record) -> PlainTensor:
        if not isinstance(meta, dict):
            raise self._damaged(name, key, "nothing describes it")
        number = meta.get("dtype")
        dtype = BY_NAME.get(SCALAR_TYPES.get(number, "")) if type(number) is int else None
        if dtype is None or meta.get("layout", _STRIDED) != _STRIDED:
            raise self._damaged(name, key, "its dtype or layout is unknown")
        shape, strides = integers(meta.get("sizes"), _int), integers(meta.get("strides"), _int)
        offset = _int(meta.get("storage_offset"))
        if shape is None or strides is None or offset is None or len(shape) != len(strides):
            raise self._damaged(name, key, "its sizes are not numbers")
        device = meta.get("device")
        location = _location(device) if isinstance(device, dict) else "cpu"
        return PlainTensor(dtype, shape, strides, path, record.size, offset, location)

    def _damaged(self, name: str, key: str, why: str) -> MalformedError:
        return damaged(self.archive, name, f" is damaged at {quoted(key)}: {why}")

    def _old_weights(self, name: str) -> Ref:
        """Build the state dict of an archive before torch 2.8: a nested torch.save file."""
        record = self.archive.find(name)
        assert record is not None
        self.inner[name] = file = nested_file(self.archive, record)
        self.byteorder = file.byteorder
        return append_graph(self.builder, file.graph, f"{name}:{{}}".format)

    def _add_fixed_devices(self, names: list[str], inputs: list[str]) -> None:
        """Add the devices of constants, sample inputs and compiled code, which no edit changes."""
        for name in names:
            if _CONSTANTS.fullmatch(name):
                metas = [meta.get("tensor_meta") for meta in self._entries(name).values()]
                devices = [meta.get("device") for meta in metas if isinstance(meta, dict)]
                locations = Counter(_location(device) for device in devices if isinstance(device, dict))
                self._add_devices(name, locations, "the list of constants")
            elif name in inputs or _OTHER_OLD.fullmatch(name):
                record = self.archive.find(name)
                if record is not None and record.size:
                    self._add_devices(name, self._locations(record), "what is saved there")
            elif name.startswith("data/aotinductor/") and name.endswith("_metadata.json"):
                metadata = self._json(name)
                key = metadata.get("AOTI_DEVICE_KEY") if isinstance(metadata, dict) else None
                self._add_devices(name, Counter([key] if type(key) is str else []), "the compiled code")

    def _locations(self, record: Record) -> Counter[str]:
        try:
            storages = TensorReader(nested_file(self.archive, record).graph).storages
            return Counter(storage.location for storage in storages.values())
        except (MalformedError, PickleError) as error:
            what = f"{quoted(record.name)} cannot be read, torch.export.load may refuse it: {error.what}"
            self.problems.append(Finding.of("broken-part", "warning", what, record.name))
            return Counter()

    def _add_devices(self, where: str, devices: Counter[str], what: str) -> None:
        self.named_devices += [NamedDevice(where, device, number, what) for device, number in sorted(devices.items())]

    def _search_programs(self, programs: list[str]) -> None:
        """Find the torch version that wrote the program, and the devices that it names."""
        torch = ""
        for name in programs:
            record = self.archive.find(name)
            if record is None or record.size > _MAX_PROGRAM:
                continue
            text = self.archive.read(record, _MAX_PROGRAM)
            versions = _TORCH.findall(text)
            torch = versions[-1].decode() if versions else torch
            for (kind, index), count in sorted(Counter(_DEVICE.findall(text)).items()):
                device = kind.decode() if index == b"null" else f"{kind.decode()}:{int(index)}"
                self.named_devices.append(NamedDevice(name, device, count, "the program"))
        version = (self.archive.text("archive_version") or self.archive.text("version") or b"").strip()[:20]
        self.writer = f"torch {torch}" if torch else "torch.export"
        self.writer += f" (archive version {version.decode('ascii', 'replace')})" if version else ""


def _location(device: dict[str, Any]) -> str:
    kind, index = device.get("type"), device.get("index")
    if type(kind) is not str:
        return "cpu"
    return f"{kind}:{index}" if type(index) is int and kind != "cpu" else kind


def _int(value: Any) -> int | None:
    """Return the number in ``{"as_int": 3}`` or in the plain form of older files; None for anything else."""
    number = value.get("as_int") if isinstance(value, dict) else value
    return number if type(number) is int and 0 <= number < 1 << 62 else None


def read(archive: Archive) -> Pt2:
    """Read the weights; raise MalformedError if their description is damaged."""
    return Pt2(archive)
