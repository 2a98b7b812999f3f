"""Change devices: location tags of storages, ``torch.device`` objects, and on request plain strings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..base.errors import RefusedError, TargetError, adding_path
from ..base.globs import Globs, Patterns
from ..base.map_location import check_device
from ..base.records import NamedTuple
from ..base.steps import option
from ..base.text import join_limited, pluralize
from ..checkpoint.backends import FROM_VALUES, backend_arguments
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.graph_editor import GraphEditor
from ..checkpoint.objects import device_text, mapped_name
from ..checkpoint.programs import program_of
from ..checkpoint.selection import dotted
from ..formats.opening import takes_path
from ..pickles.nodes import Call, Dict, Global, Persistent, Ref
from .recompute import chosen_storages
from .sharded import mesh_devices, reset_meshes


class DeviceMap(NamedTuple):
    """A mapping from devices to the devices that replace them.

    ``to`` replaces every device except cpu and meta; with ``include_cpu`` these too. ``map`` replaces single devices;
    ``"cuda:*"`` means every cuda device. ``visible`` lists physical GPU numbers, each replaced by its position, as
    under CUDA_VISIBLE_DEVICES. The first that applies counts: map, visible, to.

    >>> devices = ckptool.DeviceMap("cpu", {"cuda:1": "cuda:0"})
    >>> devices("cuda:1"), devices("cuda:3")
    ('cuda:0', 'cpu')
    """

    to: str = ""
    map: Mapping[str, str] = {}
    visible: Sequence[int] = ()
    include_cpu: bool = False

    def __call__(self, device: str) -> str:
        """Return the device that replaces this one, or the same device if nothing applies."""
        kind, _, index = device.partition(":")
        target = self.map.get(device) or self.map.get(f"{kind}:*")
        if target:
            return target
        if self.visible and kind == "cuda" and index.isdigit():
            if int(index) not in self.visible:
                message = f"{device} is not among the visible devices {','.join(map(str, self.visible))}"
                raise RefusedError(message, next=f"say where it goes, too: {option('map', f'{device}=cuda:0')}")
            return f"cuda:{list(self.visible).index(int(index))}"
        return self.to if self.to and (self.include_cpu or kind not in ("cpu", "meta")) else device

    def check(self) -> None:
        """Raise TargetError if a target is one that torch could not restore, or if nothing is mapped."""
        for target in (*([self.to] if self.to else []), *self.map.values()):
            check_device(target)
        for origin in self.map:
            if not origin or "=" in origin:
                raise TargetError(f"{origin!r} is not a device", next="write `--map cuda:1=cuda:0`")
        if len(set(self.visible)) != len(self.visible):
            raise TargetError("a device is named twice among the visible ones")
        if not (self.to or self.map or self.visible):
            step = "say where to: `--to cpu`, `--map cuda:1=cuda:0` or `--visible 1,3`"
            raise TargetError("no target", next=step)


@takes_path
def remap(
    checkpoint: Checkpoint,
    devices: DeviceMap | str | Mapping[str, str],
    *,
    strings: bool = False,
    key: str | None = None,
    include: Patterns = (),
    exclude: Patterns = (),
) -> Checkpoint:
    """Give storages and ``torch.device`` objects other devices; tensor bytes are unchanged.

    ``devices`` is a DeviceMap, a target such as "cpu", or a dict such as ``{"cuda:1": "cuda:0"}``. ``strings`` also
    changes plain strings that name a device. ``key``, the path of a state dict, ``include`` and ``exclude`` choose
    tensors: only their storages move, and with them every tensor that shares one. Raise TargetError for a target that
    torch could not restore.

    >>> moved = ckptool.remap("training.pth", "cpu")
    >>> moved["state_dict"]["module.head.bias"].device
    'cpu'
    >>> ckptool.remap("training.pth", {"cuda:0": "cuda:1"}).changes[0].words
    '30 storages tagged cuda:0, now tagged cuda:1'
    """
    if isinstance(devices, Mapping):
        devices = DeviceMap(map=devices)
    elif not isinstance(devices, DeviceMap):
        devices = DeviceMap(to=str(devices))  # also a torch.device
    devices.check()
    only = dotted(Globs(include, exclude), checkpoint)
    chosen = chosen_storages(checkpoint, key, only) if key is not None or only else None
    with adding_path(checkpoint.path):
        return _remapped(checkpoint, devices, strings, chosen)


def device_pairs(texts: Iterable[str]) -> dict[str, str]:
    """Parse ``cuda:1=cuda:0,cuda:2=cpu``; raise TargetError for anything else."""
    pairs: dict[str, str] = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        origin, equals, target = (piece.strip() for piece in pair.partition("="))
        if not (origin and equals and target):
            raise TargetError(f"{pair!r} is not FROM=TO", next="write cuda:1=cuda:0")
        if pairs.get(origin, target) != target:
            raise TargetError(f"{origin} is mapped twice")
        check_device(target)
        pairs[origin] = target
    return pairs


def parse_visible(text: str) -> Sequence[int]:
    """Parse the numbers of GPUs, ``1,3``; raise TargetError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise TargetError(f"{text!r} is not a list of GPU numbers", next="write 1,3")
    devices = DeviceMap(visible=tuple(map(int, parts)))
    devices.check()
    return devices.visible


def parse_device(text: str) -> str:
    """Return the text; raise TargetError if torch could not restore such a device."""
    check_device(text)
    return text


def remap_by_options(checkpoint: Checkpoint, *, strings: bool = False, **how: Any) -> Checkpoint:
    """Remap devices; the fields of a DeviceMap are arguments."""
    devices = DeviceMap(**{name: how.pop(name) for name in DeviceMap._fields if name in how})
    return remap(checkpoint, devices, strings=strings, **how)


def _remapped(checkpoint: Checkpoint, devices: DeviceMap, strings: bool, chosen: set[str] | None) -> Checkpoint:
    """Remap the storages in ``chosen``; if it is None, all storages and everything else that names a device."""
    editor = GraphEditor(checkpoint.graph)
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
            node = editor.graph.nodes[ref]
            assert isinstance(node, Persistent)
            pid = editor.graph.nodes[node.pid]
            assert type(pid) is tuple
            editor.changed[node.pid] = (*pid[:3], editor.text(pid[3], new), *pid[4:])
    objects = _move_objects(editor, devices) if chosen is None else 0
    changes = [
        Change("remap", "", count, 0, f"{pluralize(count, 'storage')} tagged {old}, now tagged {new}")
        for (old, new), count in moved.items()
    ]
    changes += [Change("remap", "", 0, n, f"{pluralize(n, 'storage')} on {old}, unchanged") for old, n in kept.items()]
    tags = {*kept, *(old for old, _ in moved)}
    there = f" (there are {join_limited(sorted(tags))})" if tags else ""
    known = {*tags, *(f"{tag.partition(':')[0]}:*" for tag in tags)}
    unmatched = [f"no storage is tagged {pattern}{there}" for pattern in devices.map if pattern not in known]
    changes += [Change("remap", "", 0, 0, message) for message in unmatched]
    if any(new == "meta" for _, new in moved):
        changes.append(Change("remap", "", 0, 0, "what is tagged meta loads without its values"))
    if objects:
        changes.append(Change("remap-objects", "", objects, 0, f"{pluralize(objects, 'torch.device object')} moved"))
    if chosen is None:
        changes += _strings(checkpoint, devices, editor if strings else None)
        changes += _meshes(checkpoint, devices, editor if strings else None)
        changes += _in_code(checkpoint, devices)
    if unmatched and not (moved or devices.to or devices.visible) and {change.edit for change in changes} == {"remap"}:
        raise RefusedError(unmatched[0], next="name one of them" if tags else "")
    return checkpoint.changed(editor.done(), changes)


def _in_code(checkpoint: Checkpoint, devices: DeviceMap) -> list[Change]:
    program = program_of(checkpoint)
    changes = []
    for named in program.named_devices if program is not None else ():
        if devices(named["device"]) != named["device"]:
            summary = f"{named['what']} names {named['device']} {pluralize(named['number'], 'time')}"
            changes.append(Change("remap-code", named["where"], 0, named["number"], summary, ("it stays as it is",)))
    return changes


def _strings(checkpoint: Checkpoint, devices: DeviceMap, editor: GraphEditor | None) -> list[Change]:
    """Change plain strings that name a device; only report them if ``editor`` is None."""
    changes = []
    program = program_of(checkpoint)
    edited: set[Ref] = set()
    for name in (*checkpoint.survey.devices, *(program.attribute_devices if program is not None else ())):
        # A program's attributes were read when it was opened; an edit may have changed them since.
        old = checkpoint.graph.nodes[name.ref]
        if name.is_object or type(old) is not str:
            continue
        new = devices(old)
        if new == old:
            continue
        if editor is None:
            summary = f"the string {old!r} stays"
            changes.append(Change("device-string", name.path, 0, 1, summary, ("`--strings` changes it too",)))
        else:
            editor.changed[name.ref] = new
            edited.add(name.ref)
            changes.append(Change("device-string", name.path, 1, 0, f"the string {old!r} now reads {new!r}"))
    if editor is not None and edited:
        _keep_names(editor, edited)
    return changes


def _keep_names(editor: GraphEditor, strings: set[Ref]) -> None:
    """Keep dict keys and attribute names unchanged if they share one object with a changed string."""
    for ref, old in enumerate(editor.graph.nodes):
        if not isinstance(old, Dict | Call):
            continue
        node = editor.node(ref)
        assert isinstance(node, Dict | Call)
        if strings.isdisjoint(node.pairs[::2]):
            continue
        pairs = list(node.pairs)
        for at in range(0, len(pairs), 2):
            key = editor.graph.nodes[pairs[at]] if pairs[at] in strings else None
            if type(key) is str:
                pairs[at] = editor.constant(key)
        editor.changed[ref] = Dict(pairs) if isinstance(node, Dict) else node.filled(node.items, pairs, node.states)


def _meshes(checkpoint: Checkpoint, devices: DeviceMap, editor: GraphEditor | None) -> list[Change]:
    """Change the device types in the meshes of DTensors; only report them if ``editor`` is None."""
    moves: defaultdict[tuple[str, str], list[Ref]] = defaultdict(list)
    for ref, old in mesh_devices(checkpoint).items():
        if (new := devices(old).partition(":")[0]) != old:
            moves[old, new].append(ref)
    changes = []
    for (old, new), refs in moves.items():
        if editor is None:
            notes = ("`--strings` changes it too",)
            changes.append(Change("device-mesh", "", 0, len(refs), f"the DeviceMesh of {old!r} stays so", notes))
        else:
            reset_meshes(editor, refs, new)
            changes.append(Change("device-mesh", "", len(refs), 0, f"the DeviceMesh of {old!r} is now of {new!r}"))
    return changes


def _move_objects(editor: GraphEditor, devices: DeviceMap) -> int:
    """Move ``torch.device(...)`` calls and tensors rebuilt from values and a device; return how many moved."""
    nodes = editor.graph.nodes
    functions = {}
    for ref, node in enumerate(nodes):
        if type(node) is Global:
            name = mapped_name(node)
            if name == "torch.device" or backend_arguments(name) == FROM_VALUES:
                functions[ref] = _move_object if name == "torch.device" else _move_argument
    return sum(
        functions[node.func](editor, ref, node, devices)
        for ref, node in enumerate(nodes if functions else ())
        if type(node) is Call and node.func in functions
    )


def _move_object(editor: GraphEditor, ref: Ref, node: Call, devices: DeviceMap) -> bool:
    graph = editor.graph
    old = device_text(graph, ref)
    new = devices(old) if old else old
    args = graph.nodes[node.args]
    if not new or new == old or type(args) is not tuple:
        return False
    kind, _, index = new.partition(":")
    if ":" in str(graph.nodes[args[0]]):
        # TorchScript writes torch.device('cuda:1'); torch.save writes torch.device('cuda', 1).
        parts: tuple[Ref, ...] = (editor.text(args[0], new),)
    elif not index:
        parts = (editor.text(args[0], kind),)
    else:
        same = len(args) > 1 and graph.nodes[args[1]] == int(index)
        parts = (editor.text(args[0], kind), args[1] if same else editor.add(int(index)))
    moved = Call(node.op, node.func, editor.add(parts, node.args), node.kwargs)
    editor.changed[ref] = moved.filled(node.items, node.pairs, node.states)
    return True


def _move_argument(editor: GraphEditor, _ref: Ref, node: Call, devices: DeviceMap) -> bool:
    args = editor.graph.nodes[node.args]
    old = editor.graph.nodes[args[2]] if type(args) is tuple and len(args) > 2 else None
    if type(args) is not tuple or type(old) is not str or devices(old) == old:
        return False
    editor.changed[node.args] = (*args[:2], editor.text(args[2], devices(old)), *args[3:])
    return True
