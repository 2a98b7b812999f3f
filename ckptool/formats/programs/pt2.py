"""torch.export archives (.pt2): a program, and weights as raw records described in JSON.

Source: ``torch/export/pt2_archive/_package.py`` (``_save_raw_tensors``, ``_load_state_dict``) and
``torch/_export/serde/schema.py``. Before torch 2.8: ``torch/export/__init__.py``, where the weights are a torch.save
file within the archive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, Final

from ...base.dtypes import BY_NAME
from ...base.errors import MalformedError, PickleError
from ...base.findings import Finding
from ...base.lazy import regex
from ...base.text import quoted
from ...checkpoint.programs import ProgramFacts
from ...checkpoint.tensors import Storage, TensorReader
from ...files.zips.reader import Archive
from ...pickles.nodes import Ref
from .archive import ProgramArchive, code_device, describe, name_parts

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
_DEVICE: Final = regex(rb'"type": ?"([a-z]{1,20})", ?"index": ?(null|\d{1,4})|"AOTI_DEVICE_KEY": ?"([a-z]{1,20})"')
_COMPILED: Final = regex(r"data/aotinductor/.*_metadata\.json\Z")
_CONSTANTS: Final = regex(r"data/constants/.*_constants_config\.json\Z")
#: The other torch.save files in archives before torch 2.8.
_OTHER_OLD: Final = regex(r"(?:data/constants/.+\.pt|serialized_constants\.(?:pt|json))\Z")
#: Constants that are not tensors, pickled by C++ or Python.
_OBJECT: Final = regex(r"data/constants/(?:custom|opaque)_obj_")
#: Bytes of the program that are searched for devices and the version.
_MAX_PROGRAM: Final = 64 << 20


class Pt2(ProgramArchive):
    """A torch.export archive. The graph holds its models' state dicts; the only one is the root."""

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
        pickled = name_parts("pickled object", objects)
        old = [name for name in names if _OTHER_OLD.fullmatch(name)]
        held = ((name, self._storages(name)) for name in old)
        old = [name for name, storages in held if storages is None or any(storage.numel for storage in storages)]
        self.unnamed = [*name_parts("constant", constants), *name_parts("file", old, rest=" of constants"), *pickled]
        self._search_programs(programs)
        for name in names:
            if _CONSTANTS.fullmatch(name) or _COMPILED.fullmatch(name):
                self._add_devices(name, self._read(name))
            elif name in inputs:
                tags = Counter(storage.location for storage in self._storages(name) or ())
                self.named_devices += [code_device(name, tag, tags[tag], "a sample input") for tag in sorted(tags)]
        what = f"it is {self.kind}, which holds code: {self.loader} reads it, torch.load does not"
        if compiled:
            what += ", and it holds compiled machine code, which runs when it is loaded"
        elif self.inner or inputs or objects:
            # deserialize_torch_artifact in torch/_export/serde/serialize.py loads what weights_only=True refuses,
            # without that option.
            what += ", and pickles within it run when it is loaded"
        facts: ProgramFacts = {"models": list(models), "parameters": self.parameters, "buffers": self.buffers}
        facts = {**facts, "constants": constants, "compiled_files": len(compiled), "extra_files": extra}
        others = [*name_parts("program", programs), *name_parts("file", inputs, rest=" of sample inputs"), *pickled]
        describe(self, what, facts, others)

    def audit(self, keys: Collection[str]) -> list[Finding]:
        # Nested torch.save files are normal here.
        return [problem for problem in super().audit(keys) if problem.code != "nested-archive"]

    def _storages(self, name: str) -> list[Storage] | None:
        """Return the storages of a nested torch.save file; None for another file."""
        record = self.archive.find(name)
        try:
            return [*TensorReader(self.nested_file(record).graph).storages.values()] if record and record.size else []
        except (MalformedError, PickleError):
            return None

    def _weights(self, name: str) -> Ref:
        items = []
        for key, entry in self._entries(name).items():
            path, meta = str(entry.get("path_name")), entry.get("tensor_meta")
            meta = meta if isinstance(meta, dict) else {}
            record = self.archive.find(f"data/weights/{path}")
            self.parameters += entry.get("is_param") is True
            self.buffers += entry.get("is_param") is not True
            if entry.get("use_pickle") is True and record is not None:
                if path not in self.inner:
                    self.inner[path] = self.nested_file(record)
                items.append((key, self.append_graph(self.inner[path].graph, f"{path}:{{}}".format)))
                continue
            number = meta.get("dtype") if meta.get("layout", _STRIDED) == _STRIDED else None
            dtype = BY_NAME.get(SCALAR_TYPES.get(number, "")) if type(number) is int else None
            numbers = meta.get("sizes"), meta.get("strides"), meta.get("storage_offset")
            tensor = self.plain_tensor(f"{name}, {quoted(key)}", dtype, numbers, _int, path, record)
            items.append((key, self.builder.tensor(tensor._replace(location=_location(meta.get("device"))))))
        return self.builder.mapping(items)

    def _entries(self, name: str) -> dict[str, dict[str, Any]]:
        config = self.json(name)
        entries = config.get("config") if isinstance(config, dict) else None
        if not isinstance(entries, dict) or not all(isinstance(meta, dict) for meta in entries.values()):
            raise self.damaged(name, " describes no weights")
        return entries

    def _old_weights(self, name: str) -> Ref:
        record = self.archive.find(name)
        assert record is not None
        self.inner[name] = file = self.nested_file(record)
        self.byteorder = file.byteorder
        return self.append_graph(file.graph, f"{name}:{{}}".format)

    def _search_programs(self, programs: list[str]) -> None:
        torch = ""
        for name in programs:
            text = self._read(name)
            versions = _TORCH.findall(text)
            torch = versions[-1].decode() if versions else torch
            self._add_devices(name, text)
        version = (self.archive.text("archive_version") or self.archive.text("version") or b"").strip()[:20]
        self.writer = f"torch {torch}" if torch else "torch.export"
        self.writer += f" (archive version {version.decode('ascii', 'replace')})" if version else ""

    def _read(self, name: str) -> bytes:
        """Return a text of the program; b"" if it is too large to be searched."""
        record = self.archive.find(name)
        return self.archive.read(record, _MAX_PROGRAM) if record and record.size <= _MAX_PROGRAM else b""

    def _add_devices(self, name: str, text: bytes) -> None:
        for (kind, index, key), count in sorted(Counter(_DEVICE.findall(text)).items()):
            device = (kind or key).decode() + (f":{int(index)}" if index not in (b"", b"null") else "")
            what = "the compiled code" if key else "the program"
            self.named_devices.append(code_device(name, device, count, what))


def _location(device: Any) -> str:
    kind, index = (device.get("type"), device.get("index")) if isinstance(device, dict) else ("cpu", None)
    kind = kind if type(kind) is str else "cpu"
    return f"{kind}:{index}" if type(index) is int and kind != "cpu" else kind


def _int(value: Any) -> int | None:
    """Return the number in ``{"as_int": 3}`` or in the plain form of older files; None for anything else."""
    number = value.get("as_int") if isinstance(value, dict) else value
    return number if type(number) is int and 0 <= number < 1 << 62 else None


#: Reads an archive; raises MalformedError if its description is damaged.
read: Final = Pt2
