"""Situations that people described in public threads, rebuilt as files and tried as those people would try them."""

from __future__ import annotations

from .adapters import SITUATIONS as ADAPTERS
from .classes import SITUATIONS as CLASSES
from .devices import SITUATIONS as DEVICES
from .entries import SITUATIONS as ENTRIES
from .hugging_face import SITUATIONS as HUGGING_FACE
from .names import SITUATIONS as NAMES
from .other_formats import SITUATIONS as OTHER_FORMATS
from .parts import SITUATIONS as PARTS
from .situation import Situation

#: The title of each group, and its situations.
GROUPS: dict[str, list[Situation]] = {
    "Where the weights are in the file": ENTRIES,
    "Names and shapes": NAMES,
    "Classes of other packages": CLASSES,
    "Devices and random numbers": DEVICES,
    "Adapters": ADAPTERS,
    "Hugging Face folders and safetensors": HUGGING_FACE,
    "Files of several processes": PARTS,
    "Other formats, and damage": OTHER_FORMATS,
}
