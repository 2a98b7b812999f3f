"""Give a model the names and the layout of another library, by a recipe: a built-in table, or a file of the user.

A tensor that only changes its name keeps its storage. Others get storages whose bytes are gathered while the output is
written: nothing is read here.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from ..base.dtypes import BY_NAME, Dtype
from ..base.errors import MalformedError, RefusedError, TargetError
from ..base.records import NamedTuple
from ..base.steps import command, option
from ..base.text import join_limited, pluralize, quoted
from ..checkpoint.checkpoint import Change, Checkpoint
from ..checkpoint.objects import mapping, values_of
from ..checkpoint.quantized import quantization, refuse_torn
from ..checkpoint.selection import selected
from ..checkpoint.survey import StateDict
from ..checkpoint.tensors import Tensor, contiguous_strides
from ..files.archives import read_object
from ..files.sources import FolderSource, Span
from ..formats.names.megatron import arguments
from ..formats.opening import open_checkpoint, takes_path
from ..formats.pieces import Chunk, RowSource, assembled
from ..formats.rank_part import part_of
from ..formats.recipes.evaluation import (
    Block,
    Output,
    Result,
    UnfitError,
    UnknownError,
    View,
    apply,
    covers,
    fits,
    named,
)
from ..formats.recipes.numbers import CONFIGURATIONS, configurations, described, model_type
from ..formats.recipes.recipe import (
    TABLES,
    Recipe,
    built_in,
    built_in_both_ways,
    built_in_heads,
    built_in_names,
    read_recipe,
)
from ..pickles.nodes import Ref
from .model_config import CONFIG
from .optimizers import optimizers
from .recompute import Recomputation, quantized_refusal, refuse_bits, tensors_of
from .slim import equal_values

#: The file with non-tensor values in Megatron-LM's distributed format, up to version 0.16.
_COMMON: Final = "common.pt"
#: Entries of a checkpoint that may hold the numbers of its model.
_ENTRIES: Final = frozenset(("args", "config", "dims", "hyper_parameters", "model_args", "model_config"))
#: Dtypes with several numbers in a byte, where torch counts bytes as elements.
_SUB_BYTE: Final = frozenset(("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2"))


class _Choice(NamedTuple):
    """A recipe in the direction that fits a state dict, and its result."""

    recipe: Recipe
    state_dict: StateDict
    result: Result


def families() -> list[str]:
    """Return the families of names that built-in recipes lead to."""
    return sorted({family for head in built_in_heads().values() for family in (head.a, head.b)})


@takes_path
def named_as(
    checkpoint: Checkpoint,
    family: str,
    *,
    key: str | None = None,
    config: str | Mapping[str, Any] | None = None,
    allow_loss: Collection[str] = (),
) -> Checkpoint:
    """Give a model the names and the layout of another library, such as "hf:llama".

    The ``model_type`` of a configuration and the names tell which built-in recipe fits. ``key`` is the path of its
    state dict; ``config`` is a JSON file, or its content, with numbers of the model that are not beside the weights.
    ``allow_loss`` with "entries" leaves out a tensor that has no place there, such as an output layer that is not the
    embedding. Raise TargetError for an unknown family, RefusedError if no recipe fits the model, a number is not known,
    or the result could not be converted back.
    """
    if family.startswith("lora:"):
        from .lora_layouts import convert_lora  # adapters have layouts of their own

        return convert_lora(checkpoint, family, key=key, config=config, allow_loss=allow_loss)
    known = families()
    if family not in known:
        like = _possible(checkpoint, key, list(_described_beside(checkpoint))) or known
        raise TargetError(f"{family!r} is not a family of names", next=f"one of {join_limited(like, most=len(like))}")
    heads = {name: head for name, head in built_in_heads().items() if family in (head.a, head.b)}
    # The writer of a folder of parts is the family that its shapes show.
    writer = checkpoint.container.writer.partition(",")[0]
    recipes = [built_in(name) for name, head in heads.items() if head.a == writer] or [*map(built_in, heads)]
    turned = [recipe if recipe.b == family else recipe.reversed() for recipe in recipes]
    return _applied(checkpoint, turned, family, key, config, allow_loss)


@takes_path
def apply_recipe(
    checkpoint: Checkpoint,
    recipe: str | Recipe,
    *,
    key: str | None = None,
    config: str | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Rename and rearrange the tensors of a model by a recipe: a TOML file, or the name of a built-in one.

    It is applied from side a to side b if the names are those of side a, else the other way round. ``key`` and
    ``config`` are as for ``named_as``.
    """
    if isinstance(recipe, Recipe):
        return _applied(checkpoint, [recipe], "", key, config)
    found = built_in(recipe) if recipe in built_in_names() else read_recipe(recipe)
    turned = found.reversed()
    own = [name for state_dict in selected(checkpoint, key) for name in tensors_of(checkpoint, state_dict)]
    directions = [found] if fits(found, own) and fits(turned, own) else [found, turned]
    return _applied(checkpoint, directions, "", key, config)


def leading_to(
    checkpoint: Checkpoint, key: str | None, wanted: Mapping[str, Sequence[int] | None]
) -> tuple[str, list[str]]:
    """Return the family with exactly these names and shapes after a recipe, or none, and the names left out."""
    facts: list[Mapping[str, Any]] = []
    for name in built_in_names():
        for recipe, inverse in built_in_both_ways(name):
            if recipe.rest or not fits(inverse, list(wanted)):
                continue
            facts = facts or list(_facts(checkpoint))
            with suppress(RefusedError):
                result = _chosen(checkpoint, [recipe], recipe.b, key, facts).result
                shapes = {output.name: output.shape for output in result.outputs}
                same = (shape is None or shapes[n] == tuple(shape) for n, shape in wanted.items() if n in shapes)
                if shapes.keys() == wanted.keys() and all(same):
                    return recipe.b, [*result.ignored, *result.apart]
    return "", []


def family_between(names: Sequence[str], wanted: Sequence[str], model: str) -> str:
    """Return the family that a built-in recipe leads to between these names, preferably one in ``model``, or none."""
    pairs = (pair for name in built_in_names() for pair in built_in_both_ways(name))
    found = [recipe.b for recipe, inverse in pairs if covers(recipe, names) and covers(inverse, wanted)]
    said = (family for family in found if family.rpartition(":")[2].replace("_", "") in model.lower())
    return next(said, found[0] if found else "")


def _applied(
    checkpoint: Checkpoint,
    recipes: Sequence[Recipe],
    family: str,
    key: str | None,
    config: str | Mapping[str, Any] | None,
    allow_loss: Collection[str] = (),
) -> Checkpoint:
    content = read_object(config) if isinstance(config, str) else config
    if content is None and isinstance(config, str):
        raise MalformedError("it is not a JSON object", path=config)
    given = [] if content is None else [content]
    facts = [*given, *_facts(checkpoint)]
    quantized = quantization(checkpoint)
    try:
        choice = _chosen(checkpoint, recipes, family, key, facts)
    except RefusedError as error:
        part = part_of(checkpoint)
        if quantized:
            raise quantized_refusal(checkpoint, quantized, error.what) from error
        if part is None or part.tensors_whole:
            raise
        step = command("inspect", part.folder) if part.folder else part.whole
        raise RefusedError(part.message, path=checkpoint.path, next=step) from error
    recipe, state_dict, result = choice
    if not {"entries", "all"} & {*allow_loss}:
        _refuse_untied(checkpoint, recipe, state_dict, result)
    graph, work = checkpoint.graph, Recomputation(checkpoint)
    refs = {str(graph.nodes[name]): (name, ref) for name, ref in state_dict.items}
    known: dict[object, Ref] = {}
    places = {name: at for at, name in enumerate(tensors_of(checkpoint, state_dict))}
    made: dict[str, tuple[int, tuple[Ref, Ref]]] = {}
    for output in result.outputs:
        made[output.name] = output.place, (work.editor.add(output.name), _made(work, output, refs, known))
    for name in result.rest:
        if name in made:
            raise RefusedError(f"{quoted(name)} stays, and another tensor would get its name", path=checkpoint.path)
        made[name] = places[name], refs[name]
    # Where tensors stay, the others keep their places among them.
    items = sorted(made.values(), key=lambda item: item[0]) if result.rest else made.values()
    inside = {name for name, _ in state_dict.items}
    others = [item for item in mapping(graph, state_dict.ref) or () if item[0] not in inside]
    work.editor.refill(state_dict.ref, [*(item for _, item in items), *others])
    gone = {name for name in refs if work.reader.tensor(refs[name][1]) is None} | {*result.ignored}
    left = [f"left out: {join_limited(sorted(gone), most=1)}"] if gone else []
    if result.apart:
        number = pluralize(len(result.apart), "tensor")
        left.append(f"left out: {number} of other parts of the file, such as {quoted(result.apart[0])}")
    if optimizers(graph) and any(output.blocks for output in result.outputs):
        left.append("states of the optimizer stay as they are, and fit no more")
    notes = (*result.notes, *left)
    config_json, more = _config(checkpoint, recipe, result, facts, given)
    notes += tuple(more)
    renamed = len(result.outputs)
    names = f"the names of {family or recipe.b}" if family or recipe.b not in ("a", "b") else "other names"
    number = pluralize(len({name for output in result.outputs for name in output.sources}), "tensor")
    origin = f" of {recipe.a}" if recipe.a not in ("a", "b") else ""
    what = f"{number}{origin} made into {renamed:,} with {names}"
    edited = work.done([Change("to-names", state_dict.path, renamed, 0, what, notes)])
    refuse_torn(checkpoint, edited, "the recipe")
    return edited.replace(companions={**edited.companions, CONFIG: config_json}) if config_json else edited


def _refuse_untied(checkpoint: Checkpoint, recipe: Recipe, state_dict: StateDict, result: Result) -> None:
    """Raise RefusedError if a tensor that the other layout lacks differs from the one that takes its place there."""
    tensors = tensors_of(checkpoint, state_dict)
    for name in result.ignored:
        other = recipe.tied.get(name, "")
        if other not in tensors or equal_values(checkpoint, tensors[name], tensors[other]):
            continue
        what = f"{quoted(name)} differs from {quoted(other)}, which a model of {recipe.b} has in its place"
        step = "keep its names; without that tensor, and with other results: `--allow-loss entries`"
        raise RefusedError(what, path=checkpoint.path, next=step)


#: Fields of a ``config.json`` that are not copied into the one for another class.
_OWN_FIELDS: Final = frozenset(
    ("_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype", "transformers_version")
)


def _config(
    checkpoint: Checkpoint,
    recipe: Recipe,
    result: Result,
    facts: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
) -> tuple[bytes, list[str]]:
    """Return the config.json for the result, or no bytes, and notes; refuse if the present one would become wrong."""
    target = recipe.b.removeprefix("hf:") if recipe.b.startswith("hf:") else ""
    source = checkpoint.source
    beside = source.beside if isinstance(source, FolderSource) else ()
    has_one = any(os.path.basename(path) == CONFIG for path in beside)
    kind = next((kind for _, kind in model_type(facts)), "")
    own = next((each for each in given if each.get("model_type") == target), None)
    # A config.json that describes the model in another layout is kept: it leads back.
    if not target or (own is None and has_one and f"hf:{kind}" != recipe.a):
        return b"", []
    if own is not None:
        return (json.dumps(own, indent=2) + "\n").encode(), [f"{CONFIG} taken from the one given"]
    names = [*(output.name for output in result.outputs), *result.rest]
    config, unknown, absent = described(recipe.config, result.numbers, facts, names)
    if f"hf:{kind}" == recipe.a:
        before = next(each for each in facts if each.get("model_type") == kind)
        unknown = unknown if recipe.config else [f"the fields of {recipe.b}"]
        kept = {name: value for name, value in before.items() if name not in _OWN_FIELDS}
        config = kept | {name: value for name, value in config.items() if {name} - (absent.keys() & kept.keys())}
        absent = {name: value for name, value in absent.items() if name not in kept}
    if unknown and has_one:
        step = f"give the {CONFIG} of the new layout: {option('config', CONFIG)}"
        what = f"{CONFIG} describes {recipe.a}, and for {recipe.b} it is not made: {join_limited(unknown)} not known"
        raise RefusedError(what, path=checkpoint.path, next=step)
    if unknown or not recipe.config:
        return b"", [f"{CONFIG} is not made: {join_limited(unknown)} not known"] if unknown else []
    sizes: Counter[str] = Counter()
    for entry in checkpoint.survey.tensors:
        sizes[entry.tensor.dtype] += entry.tensor.own_bytes
    config["torch_dtype"] = max(sizes, key=lambda dtype: sizes[dtype])
    usual = [f"{name} {json.dumps(value)}" for name, value in absent.items()]
    notes = [f"not recorded, so the usual values are taken: {join_limited(usual, most=9)}"] if usual else []
    return (json.dumps(config, indent=2) + "\n").encode(), [f"{CONFIG} made, for an output that is a folder", *notes]


def _chosen(
    checkpoint: Checkpoint, recipes: Sequence[Recipe], family: str, key: str | None, facts: Sequence[Mapping[str, Any]]
) -> _Choice:
    """Return the only recipe and state dict that fit together; raise RefusedError if none do, or several."""
    best: tuple[bool, int, RefusedError | None] = (False, 0, None)
    there = False
    found: list[_Choice] = []
    for state_dict in selected(checkpoint, key):
        views = {name: _view(tensor) for name, tensor in tensors_of(checkpoint, state_dict).items()}
        for recipe in recipes:
            try:
                result = apply(recipe, views, facts)
                _refuse_one_way(recipe, views, facts, result)
            except RefusedError as error:
                error.path = checkpoint.path
                count, whole = named(recipe, views)
                whole = whole and not isinstance(error, UnfitError)
                best = max(best, (whole, count, error), key=lambda item: item[:2])
                there = there or (family != "" and _applies(recipe.reversed(), views, facts))
                continue
            choice = _Choice(recipe, state_dict, result)
            same = ((other.state_dict, other.result.outputs, other.result.ignored) for other in found)
            if result.outputs and (state_dict, result.outputs, result.ignored) not in same:
                found.append(choice)
    if len(found) == 1:
        return found[0]
    paths = list(dict.fromkeys(choice.state_dict.path for choice in found))
    if len(paths) > 1:
        what = f"the recipe fits {pluralize(len(paths), 'state dict')}: {join_limited([repr(path) for path in paths])}"
        raise TargetError(what, path=checkpoint.path, next=f"choose one, for example {option('key', paths[0] or '.')}")
    if found:
        what = f"it may be {join_limited([choice.recipe.a for choice in found])}: their names are the same"
        raise RefusedError(f"{what}, and they differ in layout", path=checkpoint.path)
    whole, count, refusal = best
    if refusal is not None and count and (whole or not there):
        raise refusal
    if there:
        raise RefusedError(f"it has the names of {family} already", path=checkpoint.path)
    what = f"no recipe leads from its names to {family}" if family else "no tensor has a name of the recipe"
    if possible := _possible(checkpoint, key, facts) if family else []:
        raise RefusedError(f"{what}, only to {join_limited(possible, most=len(possible))}", path=checkpoint.path)
    raise RefusedError(what, path=checkpoint.path, next="see its names with " + command("keys", checkpoint.path))


def _applies(recipe: Recipe, views: Mapping[str, View], facts: Sequence[Mapping[str, Any]]) -> bool:
    try:
        return fits(recipe, views) and bool(apply(recipe._replace(model_types=((), ())), views, facts))
    except RefusedError as error:
        return isinstance(error, UnknownError)


def _possible(checkpoint: Checkpoint, key: str | None, facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the families that built-in recipes lead to from the names of a model, if they describe its type."""
    types = {kind for _, kind in model_type(facts)}
    tensors = [list(tensors_of(checkpoint, item)) for item in selected(checkpoint, key)]
    turned = (each for recipe in map(built_in, built_in_names()) for each in (recipe, recipe.reversed()))
    known = (recipe for recipe in turned if not recipe.model_types[0] or types <= {*recipe.model_types[0]})
    return sorted({recipe.b for recipe in known if any(fits(recipe, names) for names in tensors)})


def _view(tensor: Tensor) -> View:
    dtype = BY_NAME.get(tensor.dtype)
    packed = dtype is None or dtype.packed > 1 or dtype.name in _SUB_BYTE
    kind = f"packed, of the dtype {tensor.dtype}" if packed else tensor.kind
    return View(tensor.shape, tensor.stride, kind)


def _made(work: Recomputation, output: Output, refs: Mapping[str, tuple[Ref, Ref]], known: dict[object, Ref]) -> Ref:
    """Return the tensor of an output: the only source itself, or a new one. Equal outputs share their bytes."""
    if not output.blocks and len(output.sources) == 1:
        return refs[output.sources[0]][1]
    tensors: dict[str, Tensor] = {}
    for source in output.sources:
        tensor = work.reader.tensor(refs[source][1])
        assert tensor is not None
        refuse_bits(work.checkpoint, refs[source][1], source)
        if tensor in work.quantized.tensors:
            raise quantized_refusal(work.checkpoint, work.quantized, f"the recipe rearranges {quoted(source)}")
        tensors[source] = tensor
    name = output.sources[0]
    first = tensors[name]
    other = next((each for each, tensor in tensors.items() if tensor.dtype != first.dtype), "")
    if other:
        what = f"{quoted(name)} is {first.dtype} and {quoted(other)} {tensors[other].dtype}: they cannot be joined"
        step = "cast one of them first with " + command("cast", work.checkpoint.path)
        raise RefusedError(what, path=work.checkpoint.path, next=step)
    dtype = BY_NAME[first.dtype]
    chunks = [_chunk(work, block, tensors[block.source], dtype, output.name) for block in output.blocks]
    stored = {source: (tensor.storage, tensor.offset) for source, tensor in tensors.items()}
    places = tuple(block._replace(source=str(stored[block.source])) for block in output.blocks)
    identity = output.shape, places
    if identity not in known:
        piece = assembled(chunks, output.grid, dtype.itemsize, output.name).span
        assert piece is not None
        known[identity] = work.tensor(output.name, dtype, output.shape, piece, first.location)
    return known[identity]


def _chunk(work: Recomputation, block: Block, tensor: Tensor, dtype: Dtype, name: str) -> Chunk:
    """Return the bytes of a block; raise RefusedError if they are not in one piece of the file."""
    path, width = work.checkpoint.path, dtype.itemsize
    body = work.checkpoint.body(tensor.storage)
    if body is None or not isinstance(body.piece, Span) or body.compressed:
        step = command("edit", path, repack=True) if body is not None else ""
        raise RefusedError(f"the bytes of {quoted(block.source)} are not in one piece", path=path, next=step)
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride)) + 1 if tensor.numel else 0
    if tensor.offset < 0 or min(tensor.stride, default=0) < 0 or (tensor.offset + reach) * width > body.size:
        raise RefusedError(f"{quoted(block.source)} reaches beyond its storage", path=path)
    begin = body.piece.offset + (tensor.offset + block.begin) * width
    if len(block.shape) > 1 or block.stride not in ((), (1,)):
        return Chunk(block.box, RowSource(body.piece.source, begin, block.shape, block.stride, width, name), 0)
    return Chunk(block.box, body.piece.source, begin)


def _described_beside(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Return the content of the configurations beside the weights."""
    source = checkpoint.source
    folder = checkpoint.path if isinstance(source, FolderSource) else os.path.dirname(checkpoint.path)
    beside = source.beside if isinstance(source, FolderSource) else ()
    return configurations([*beside, *(os.path.join(folder, name) for name in CONFIGURATIONS)])


def _facts(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    yield from _described_beside(checkpoint)
    source, graph = checkpoint.source, checkpoint.graph
    own = arguments(graph)
    for path in source.beside if isinstance(source, FolderSource) and not own else ():
        if os.path.basename(path) == _COMMON:
            with closing(open_checkpoint(path)) as other:
                own = arguments(other.graph)
    values = values_of(graph, graph.root)
    entries = [values_of(graph, values[name]) for name in sorted(values.keys() & _ENTRIES)]
    described = [{field: graph.nodes[ref] for field, ref in entry.items()} for entry in entries]
    # In arguments of Megatron-LM, model_type means something else.
    for each in ([own] if own else []) + described:
        yield {field: value for field, value in each.items() if field != "model_type"}


# -- the way back


def _refuse_gaps(recipe: Recipe, names: Sequence[str]) -> None:
    """Raise RefusedError if numbers that count several kinds of modules, as {3B+J+1} does, leave one out."""
    patterns = (pattern.name for rule in recipe.rules for pattern in (*rule.a, *rule.b) if pattern.name.sums)
    heads = {each.texts[0] for each in patterns if any(abs(factor) > 1 for _, factor in each.sums[0].factors)}
    for head in sorted(heads):
        steps = (name[len(head) :].partition(".")[0] for name in names if name.startswith(head))
        found = {int(step) for step in steps if step.isdecimal()}
        gap = next(number for number in range(len(found) + 1) if number not in found)
        if gap < len(found):
            what = f"there would be {quoted(f'{head}{max(found)}')} without {quoted(f'{head}{gap}')}"
            raise RefusedError(f"{what}: the recipe counts blocks of another depth, or one is missing")


def _refuse_one_way(
    recipe: Recipe, tensors: Mapping[str, View], facts: Sequence[Mapping[str, Any]], result: Result
) -> None:
    """Raise RefusedError if the inverse of a built-in recipe does not lead back from a result of ``apply``.

    Names may differ once, as those of another version of the same layout do: then they lead to the same result again.
    """
    if not recipe.path.startswith(TABLES):
        return
    _refuse_gaps(recipe.expanded(tensors), [*tensors, *(output.name for output in result.outputs)])
    made = {output.name: View(output.shape, contiguous_strides(output.shape)) for output in result.outputs}
    kept = {name: tensors[name] for name in result.rest}
    what = "the result could not be converted back"
    try:
        inverse = recipe.reversed()._replace(model_types=((), ()))
        back = apply(inverse, made | kept, facts, result.numbers)
        names = {output.name: View(output.shape, contiguous_strides(output.shape)) for output in back.outputs}
        if {*names, *kept} == tensors.keys() - {*result.ignored, *result.apart}:
            return
        again = apply(recipe, names | kept, facts, result.numbers)
    except RefusedError as error:
        raise RefusedError(f"{what}: {error.what}") from error
    shapes = {output.name: output.shape for output in again.outputs}
    odd = sorted({(name, view.shape) for name, view in made.items()} ^ {*shapes.items()})
    if odd:
        raise RefusedError(f"{what}: {quoted(odd[0][0])} would be another tensor")
