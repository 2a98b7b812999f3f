"""Judge what loading a checkpoint may run, and load it with torch."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..base.errors import UnreadableError
from ..base.map_location import MapLocation
from ..base.records import TypedDict
from ..base.steps import command, suggested_output
from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.programs import program_of
from ..files.downloads import expect_reads
from ..files.sources import FolderSource, Span
from ..formats import carried_pickles
from ..formats.opening import in_several_files, open_checkpoint
from ..safety.torch_lists import DEFAULT
from ..safety.verdict import Verdict, examine, verdict_of

if TYPE_CHECKING:
    from .checks import Checked, Companions


class VerdictReport(TypedDict):
    """What loading may run: ``verdict`` is weights-only, unsafe, program or unknown. For weights-only,
    ``reasons`` name text that only other programs than torch.load read.
    """

    verdict: str
    reasons: list[str]


def checkpoint_verdict(
    checkpoint: Checkpoint,
    torch: str = DEFAULT,
    *,
    quick: bool = False,
    checked: Checked | None = None,
    companions: Companions | None = None,
) -> Verdict:
    """Return the verdict on a checkpoint and, if that is a folder, on all files in it.

    ``checked`` and ``companions`` can be passed if they are already known. ``quick`` relies on the directory, without
    searching every header for records that it does not list.
    """
    program, container = program_of(checkpoint), checkpoint.container
    if checked is not None:
        pickles, problems = list(checked.pickles), list(checked.problems)
    else:
        own = program.own_names if program is not None else ()
        every = container.pickles(quick=quick) if checkpoint.pickled else ()
        pickles = list(examine(chain(every, carried_pickles(checkpoint)), torch, own))
        problems = [*container.problems, *(() if quick else container.audit(checkpoint.survey.reader.storages))]
    unclear = [problem.message for problem in problems if problem.ambiguous]
    unclear += [
        f"{text}, which ckptool does not follow" for text in dict.fromkeys(checkpoint.survey.unsupported.values())
    ]
    if isinstance(checkpoint.source, FolderSource):
        from .checks import check_companions  # imported only for folders

        beside = companions or check_companions(checkpoint.source, torch)
        every_pickle = [*pickles, *beside.pickles]
        pickles = [item._replace(calls=tuple(map(item.described, item.calls))) for item in every_pickle]
        unclear += [f"{item['name']}: {item['why']}" for item in beside.files if not item["looked_at"]]
    kind = f"{program.kind}, read by {program.loader}" if program is not None else ""
    return verdict_of(pickles, torch, program=kind, unclear=unclear)


def verdict_report(verdict: Verdict) -> VerdictReport:
    """Return the verdict in the form of a report."""
    return {"verdict": verdict.word, "reasons": list(verdict.reasons)}


class LoadReport(TypedDict):
    """The result of torch.load: the number of tensors by device, or torch's error, which ``explain`` explains."""

    ok: bool
    error: str | None
    devices: dict[str, int]


def load_whole(path: str, map_location: MapLocation) -> Any:
    """Return the result of torch.load for a file; for a Hugging Face folder, the objects of all files as one dict.

    Raise UnreadableError with torch's message.
    """
    from ..formats.names.hf import is_index
    from ..values.torch.loads import load_object

    if not in_several_files(path):
        return load_object(path, map_location)
    with open_checkpoint(path) as checkpoint:
        if checkpoint.traits.loads == "converted":
            output = suggested_output(path, extension=".pth")
            step = "convert it to one: " + command("convert", path, output=output)
            raise UnreadableError("torch.load reads files, and this is a folder of parts", path=path, next=step)
        every = (source for source in checkpoint.sources if source.identity is not None)
        files = [source for source in every if not is_index(source.name)]
        expect_reads((Span(file, 0, file.size) for file in files), path=path)
    loaded: dict[str, Any] = {}
    for file in files:
        loaded |= load_object(file.name, map_location, expected=True)
    return loaded


def load_report(path: str, map_location: MapLocation) -> LoadReport:
    """Load a file with torch and return the report."""
    from ..values.torch.loads import tensors_in

    try:
        loaded = load_whole(path, map_location)
    except UnreadableError as error:
        return {"ok": False, "error": error.what, "devices": {}}
    return {"ok": True, "error": None, "devices": dict(Counter(str(tensor.device) for tensor in tensors_in(loaded)))}
