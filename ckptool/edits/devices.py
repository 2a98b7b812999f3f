"""Retargeting devices: location tags of storages, ``torch.device`` objects, and on request plain strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..base.errors import RefusedError, TargetError
from ..base.globs import EVERY, Globs
from ..base.map_location import check_target
from ..base.text import counted, listed
from ..checkpoint.changes import Change
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.graph_editor import Rewrite
from ..checkpoint.objects import device_text, mapped_name
from ..checkpoint.programs import NamedDevice, program_of
from ..checkpoint.selection import selected_tensors
from ..pickles.nodes import Call, Dict, Global, Persistent, Ref
from .sharded import mesh_devices, reset_meshes


class DeviceMap(NamedTuple):
    """What becomes of a device.

    ``to`` is where everything goes that is not cpu or meta (with ``include_cpu`` also these); ``pairs`` maps
    single devices, ``"cuda:*"`` stands for every cuda device; ``visible`` are physical GPU numbers, each of
    which becomes its position, as under CUDA_VISIBLE_DEVICES. The first that applies counts: pairs,
    visible, to.
    """

    to: str = ""
    pairs: Mapping[str, str] = {}
    visible: Sequence[int] = ()
    include_cpu: bool = False

    def __call__(self, device: str) -> str:
        """The device that takes the place of this one: itself when nothing applies."""
        kind, _, index = device.partition(":")
        found = self.pairs.get(device) or self.pairs.get(f"{kind}:*")
        if found:
            return found
        if self.visible and kind == "cuda" and index.isdigit():
            if int(index) not in self.visible:
                what = f"{device} is not among the visible devices {','.join(map(str, self.visible))}"
                raise RefusedError(what, next=f"say where it goes, too: --map {device}=cuda:0")
            return f"cuda:{list(self.visible).index(int(index))}"
        if self.to and (self.include_cpu or kind not in ("cpu", "meta")):
            return self.to
        return device

    def check(self) -> None:
        """Raise TargetError for a target that torch could not restore, or when there is nothing to map."""
        for target in (*([self.to] if self.to else []), *self.pairs.values()):
            check_target(target)
        for origin in self.pairs:
            if not origin or "=" in origin:
                raise TargetError(f"{origin!r} is no device", next="write --map cuda:1=cuda:0")
        if len(set(self.visible)) != len(self.visible):
            raise TargetError("a device is named twice among the visible ones")
        if not (self.to or self.pairs or self.visible):
            raise TargetError("no target", next="say where to: --to cpu, --map cuda:1=cuda:0 or --visible 1,3")


def remap_devices(
    checkpoint: Checkpoint,
    devices: DeviceMap | str | Mapping[str, str],
    *,
    strings: bool = False,
    key: str | None = None,
    only: Globs = EVERY,
) -> Checkpoint:
    """Give storages and ``torch.device`` objects other devices; no tensor byte is touched.

    ``devices`` is a DeviceMap, a target such as "cpu", or a dict such as ``{"cuda:1": "cuda:0"}``.
    ``strings`` changes the plain strings that name a device, too. ``key``, the path of a state dict, and ``only``
    choose tensors: their storages move, with all that share these, and nothing else. Raises TargetError for a target
    that torch could not restore.
    """
    if isinstance(devices, str):
        devices = DeviceMap(to=devices)
    elif not isinstance(devices, DeviceMap):
        devices = DeviceMap(pairs=devices)
    devices.check()
    try:
        return _remapped(checkpoint, devices, strings, _chosen(checkpoint, key, only))
    except RefusedError as error:
        error.path = error.path or checkpoint.path
        raise


def device_pairs(texts: Iterable[str]) -> dict[str, str]:
    """``cuda:1=cuda:0,cuda:2=cpu`` as a dict; raises TargetError for anything else."""
    found: dict[str, str] = {}
    for part in (part for text in texts for part in text.split(",")):
        origin, equals, target = (piece.strip() for piece in part.partition("="))
        if not (origin and equals and target):
            raise TargetError(f"{part!r} is not FROM=TO", next="write cuda:1=cuda:0")
        if found.get(origin, target) != target:
            raise TargetError(f"{origin} is mapped twice")
        found[origin] = target
    return found


def _chosen(checkpoint: Checkpoint, key: str | None, only: Globs) -> set[str] | None:
    """The storages of the chosen tensors; None for no choice."""
    if key is None and not only:
        return None
    reader = checkpoint.survey.reader
    found: set[str] = set()
    for entry in selected_tensors(checkpoint, key):
        if only.match(entry.key, entry.path):
            found.update(part.storage for part in reader.parts(entry.tensor))
    return found


def _remapped(checkpoint: Checkpoint, devices: DeviceMap, strings: bool, chosen: set[str] | None) -> Checkpoint:
    graph = checkpoint.graph
    rewrite = Rewrite(graph)
    moved: Counter[tuple[str, str]] = Counter()
    kept: Counter[str] = Counter()
    keys: set[str] = set()
    for ref, storage in checkpoint.survey.reader.uses():
        old = storage.location
        new = devices(old) if chosen is None or storage.key in chosen else old
        if storage.key not in keys:
            keys.add(storage.key)
            if new == old:
                kept[old] += 1
            else:
                moved[old, new] += 1
        if new != old:
            _retag(rewrite, ref, new)
    objects = _device_objects(rewrite, devices) if chosen is None else 0
    changes = [
        Change("remap", "", count, 0, f"{counted(count, 'storage')} tagged {old}, now tagged {new}")
        for (old, new), count in moved.items()
    ]
    for old, count in kept.items():
        changes.append(Change("remap", "", 0, count, f"{counted(count, 'storage')} on {old} as before"))
    tags = {*kept, *(old for old, _ in moved)}
    there = f" (there are {listed(sorted(tags))})" if tags else ""
    changes += [
        Change("remap", "", 0, 0, f"no storage is tagged {pattern}{there}")
        for pattern in devices.pairs
        if pattern not in tags and not any(f"{tag.partition(':')[0]}:*" == pattern for tag in tags)
    ]
    if any(new == "meta" for _, new in moved):
        changes.append(Change("remap", "", 0, 0, "what is tagged meta loads without its values"))
    if objects:
        changes.append(Change("remap-objects", "", objects, 0, f"{counted(objects, 'torch.device object')} moved"))
    if chosen is None:
        changes += _strings(checkpoint, devices, rewrite if strings else None)
        changes += _meshes(checkpoint, devices, rewrite if strings else None)
        changes += _in_code(checkpoint, devices)
    return checkpoint.changed(rewrite.done(), changes)


def _in_code(checkpoint: Checkpoint, devices: DeviceMap) -> list[Change]:
    """Devices that the code of a program names: it stays as it is."""
    program = program_of(checkpoint)
    named = program.named_devices if program is not None else ()
    stays = ("it stays as it is",)
    return [
        Change("remap-code", item.where, 0, item.number, f"{item.what} names {item.device} {_times(item)}", stays)
        for item in named
        if devices(item.device) != item.device
    ]


def _times(item: NamedDevice) -> str:
    return counted(item.number, "time")


def _strings(checkpoint: Checkpoint, devices: DeviceMap, rewrite: Rewrite | None) -> list[Change]:
    """Plain strings that name a device: changed on request, else only listed."""
    changes = []
    program = program_of(checkpoint)
    within = program.attribute_devices if program is not None else ()
    found: set[Ref] = set()
    for name in (*checkpoint.survey.devices, *within):
        # What the objects of a program say was read when it was opened: an edit may have changed it since.
        old = checkpoint.graph.nodes[name.ref]
        if name.is_object or type(old) is not str:
            continue
        new = devices(old)
        if new == old:
            continue
        if rewrite is None:
            what = f"the string {old!r} stays"
            changes.append(Change("device-string", name.path, 0, 1, what, ("--strings changes it too",)))
        else:
            rewrite.changed[name.ref] = new
            found.add(name.ref)
            changes.append(Change("device-string", name.path, 1, 0, f"the string {old!r} now reads {new!r}"))
    if rewrite is not None and found:
        _keep_names(rewrite, found)
    return changes


def _keep_names(rewrite: Rewrite, strings: set[Ref]) -> None:
    """Leave the keys and the names of attributes as they are that are one object with a string that changes."""
    for ref, old in enumerate(rewrite.graph.nodes):
        if not isinstance(old, Dict | Call):
            continue
        node = rewrite.node(ref)
        assert isinstance(node, Dict | Call)
        if strings.isdisjoint(node.pairs[::2]):
            continue
        pairs = list(node.pairs)
        for at in range(0, len(pairs), 2):
            key = rewrite.graph.nodes[pairs[at]] if pairs[at] in strings else None
            if type(key) is str:
                pairs[at] = rewrite.constant(key)
        rewrite.changed[ref] = Dict(pairs) if isinstance(node, Dict) else node.filled(node.items, pairs, node.states)


def _meshes(checkpoint: Checkpoint, devices: DeviceMap, rewrite: Rewrite | None) -> list[Change]:
    """The kinds of devices that the meshes of DTensors name: changed on request, else only told."""
    found: dict[tuple[str, str], list[Ref]] = {}
    for ref, kind in mesh_devices(checkpoint).items():
        new = devices(kind).partition(":")[0]
        if new != kind:
            found.setdefault((kind, new), []).append(ref)
    changes = []
    for (kind, new), refs in found.items():
        one = len(refs) == 1
        which = f"the DeviceMesh of {kind!r}" if one else f"{len(refs):,} DeviceMeshes of {kind!r}"
        if rewrite is None:
            notes = (f"--strings changes {'it' if one else 'them'} too",)
            changes.append(Change("device-mesh", "", 0, len(refs), f"{which} {'stays' if one else 'stay'} so", notes))
        else:
            reset_meshes(rewrite, refs, new)
            what = f"{which} {'is' if one else 'are'} now of {new!r}"
            changes.append(Change("device-mesh", "", len(refs), 0, what))
    return changes


def _retag(rewrite: Rewrite, ref: Ref, new: str) -> None:
    """Replace the location in one persistent id; ids that were one tuple stay one."""
    node = rewrite.graph.nodes[ref]
    assert isinstance(node, Persistent)
    pid = rewrite.graph.nodes[node.pid]
    assert type(pid) is tuple
    rewrite.changed[node.pid] = (*pid[:3], rewrite.text(pid[3], new), *pid[4:])


def _device_objects(rewrite: Rewrite, devices: DeviceMap) -> int:
    """Move ``torch.device(...)`` calls and the device arguments of ``_rebuild_device_tensor_from_*``."""
    nodes = rewrite.graph.nodes
    kinds = {}
    for ref, node in enumerate(nodes):
        if type(node) is Global:
            name = mapped_name(node)
            if name == "torch.device" or name.startswith("torch._utils._rebuild_device_tensor_from_"):
                kinds[ref] = name
    count = 0
    for ref, node in enumerate(nodes) if kinds else ():
        if type(node) is Call and node.func in kinds:
            if kinds[node.func] == "torch.device":
                count += _move_object(rewrite, ref, node, devices)
            else:
                count += _move_argument(rewrite, node, devices)
    return count


def _move_object(rewrite: Rewrite, ref: Ref, node: Call, devices: DeviceMap) -> int:
    graph = rewrite.graph
    old = device_text(graph, ref)
    new = devices(old) if old else old
    args = graph.nodes[node.args]
    if not new or new == old or type(args) is not tuple:
        return 0
    kind, _, index = new.partition(":")
    if ":" in str(graph.nodes[args[0]]):
        # TorchScript writes torch.device('cuda:1'), torch.save torch.device('cuda', 1).
        parts: tuple[Ref, ...] = (rewrite.text(args[0], new),)
    elif not index:
        parts = (rewrite.text(args[0], kind),)
    else:
        same = len(args) > 1 and graph.nodes[args[1]] == int(index)
        parts = (rewrite.text(args[0], kind), args[1] if same else rewrite.add(int(index)))
    moved = Call(node.op, node.func, rewrite.add(parts, node.args), node.kwargs)
    rewrite.changed[ref] = moved.filled(node.items, node.pairs, node.states)
    return 1


def _move_argument(rewrite: Rewrite, node: Call, devices: DeviceMap) -> int:
    args = rewrite.graph.nodes[node.args]
    old = rewrite.graph.nodes[args[2]] if type(args) is tuple and len(args) > 2 else None
    if type(args) is not tuple or type(old) is not str or devices(old) == old:
        return 0
    rewrite.changed[node.args] = (*args[:2], rewrite.text(args[2], devices(old)), *args[3:])
    return 1


#: The edit by the name of its command.
remap = remap_devices
