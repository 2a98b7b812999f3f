"""The table of edits: ``edit`` does whatever the single commands do, and each option reaches its function."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import say
from conftest import FIXTURES
from lora_adapters import factors, write_adapter

import ckptool
from ckptool.cli.help import headings
from ckptool.cli.main import COMMANDS
from ckptool.edits.redact import KINDS
from ckptool.edits.table import EDITS, MODIFIERS, STEPS, Edit, Parameter, function

#: A valid text for each parameter, by its name.
TEXTS = {
    "": "module.*=encoder.*",
    "adapters": "adapter",
    "alpha": "3",
    "as_state_dict": "",
    "base": "other.pth",
    "by_order": "",
    "dedupe": "",
    "drop_unknown": "",
    "fill": "zero",
    "globs": "*.weight",
    "include_cpu": "",
    "key": "state_dict",
    "like": "plain.pth",
    "map": "cuda:0=cuda:3",
    "no_overflow": "",
    "optimizer": "",
    "other": "other.pth",
    "other_key": "state_dict",
    "others": "other.pth",
    "prefix": "module.",
    "purpose": "inference",
    "strings": "",
    "form": "new",
    "tie": "state_dict.a=b",
    "untie": "a",
    "to": "cpu",
    "to_dtype": "bfloat16",
    "visible": "1,0",
    "vocab": "9",
    "weights": "-0.25",
    "wrappers": "",
}


#: Options that choose tensors in the fixture, by edit.
CHOSEN = {"resize": ["--include", "*head.*"]}


class Case:
    """One way to apply an edit, with or without the parameters that modify it."""

    def __init__(self, edit: Edit, way: Parameter | None, modified: bool) -> None:
        self.edit, self.way, self.modified = edit, way, modified
        excluded = way.excludes if way is not None else ()
        #: The parameters given besides the one that applies the edit.
        self.more = [each for each in edit.parameters if modified and not each.step and each.name not in excluded]

    def __str__(self) -> str:
        return f"{self.edit.name} {self.way.name if self.way else ''}{' modified' * self.modified}"

    def alone(self) -> list[str]:
        """Return the command of the edit."""
        words = [self.edit.name, "in.pth", *CHOSEN.get(self.edit.name, ())]
        for each in [each for each in self.edit.parameters if each is self.way or each in self.more or each.argument]:
            text = [self.text(each)] if each.metavar else []
            words += text if each.argument or each.rest else [f"--{each.spelled}", *text]
        return words

    def text(self, parameter: Parameter) -> str:
        """Return the value of a parameter."""
        return "epoch=@names.json" if parameter.step == "set" else TEXTS[parameter.name]

    def together(self) -> list[str]:
        """Return the same as an option of ``edit``."""
        words = ["edit", "in.pth", *CHOSEN.get(self.edit.name, ())]
        # A modifier that does not go with this way is for other steps of the same edit.
        for each in [each for each in self.edit.parameters if self.modified and not each.step]:
            words += [f"--{each.spelled}", *([self.text(each)] if each.metavar else [])]
        if self.way is None:
            return [*words, f"--{self.edit.name}"]
        return [*words, f"--{self.way.step}", *([self.text(self.way)] if self.way.metavar else [])]


#: The options of ``edit`` that apply an edit.
OF_EDIT = {name for _, names in headings("edit") for name in names}


def cases() -> Iterator[Case]:
    """Every edit but ``dequantize``, which needs a quantized model."""
    for edit in EDITS.values():
        ways: list[Parameter | None] = [each for each in edit.parameters if f"--{each.step}" in OF_EDIT]
        for way in [*([None] if edit.flag else []), *ways]:
            # ``slim --for`` slims as well: ``edit --for`` is an edit of its own.
            if (
                edit.name != "dequantize"
                and edit.summary
                and not (way is not None and way.step in EDITS and way.step != edit.name)
            ):
                yield Case(edit, way, False)
                if any(not each.step for each in edit.parameters):
                    yield Case(edit, way, True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "ddp4_training.pth", "in.pth")
    shutil.copy(FIXTURES / "ddp4_training.pth", "other.pth")
    assert say("strip-module", "in.pth", "-o", "plain.pth").code == 0
    tensors = {key: item[..., None, None] for key, item in factors("module.head", 5, 12).items()}
    write_adapter(Path("adapter"), tensors)
    Path("names.json").write_text(json.dumps({"module.stem.0.weight": "first"}))
    return tmp_path


@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_edit_does_what_the_command_does(case: Case, folder: Path) -> None:
    reports = []
    for words, name in ((case.alone(), "alone.pth"), (case.together(), "together.pth")):
        said = say(*words, "-o", name, "--json")
        reports.append(json.loads(said.out))
    assert (folder / "alone.pth").read_bytes() == (folder / "together.pth").read_bytes()
    assert reports[0]["changes"] == reports[1]["changes"]
    assert reports[0]["changed"] or case.edit.name in ("slim", "sanitize")


def test_every_parameter_is_an_option_of_edit() -> None:
    for edit in EDITS.values():
        assert edit.name in COMMANDS if edit.summary else not edit.examples
        for each in edit.parameters:
            # These are options of their commands, whose names are steps of edit.
            is_step = each.step or (each.name == "to_dtype" and edit.name != "cast") or edit.name.startswith("lora ")
            is_step = is_step and each.spelled in STEPS
            assert each.spelled in (STEPS if is_step else MODIFIERS), (edit.name, each)


def test_help_names_every_choice() -> None:
    for name in KINDS:
        assert name in EDITS["redact"].title


def test_functions_take_the_parameters() -> None:
    for edit in EDITS.values():
        own = (each for each in edit.parameters if each.step not in EDITS or each.step == edit.name)
        names = {*(each.name for each in own), *edit.scope} - {""}
        taken = inspect.signature(function(edit.function)).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
            assert names <= {*[*taken][1:]}, edit.name
        for each in edit.parameters:
            assert not each.parse or callable(function(each.parse))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cast in.pth bf16", "cast in.pth --to-dtype bf16"),
        ("cast in.pth other.pth float16", "cast in.pth other.pth --to-dtype float16"),
        ("rename in.pth module.*=a.*", "rename in.pth --rename module.*=a.*"),
        (
            "rename in.pth other.pth module.*=a.* a.stem.*=a.root.*",
            "rename in.pth other.pth --rename module.*=a.* --rename a.stem.*=a.root.*",
        ),
        (
            "rename in.pth --rename s/module/b/ s/^b/c/ c.*=d.*",
            "rename in.pth --rename s/module/b/ --rename s/^b/c/ --rename c.*=d.*",
        ),
        ("extract in.pth --key state_dict", "extract in.pth state_dict"),
        ("redact in.pth paths,users", "redact in.pth --redact paths,users"),
        ("resize in.pth 9 --include *head.*", "resize in.pth --vocab 9 --include *head.*"),
    ],
)
def test_a_value_may_stand_after_the_paths(typed: str, meant: str, folder: Path) -> None:
    results = []
    for number, call in enumerate((typed, meant)):
        out = folder / f"out{number}"
        said = say(*call.split(), "--out-dir", str(out))
        results.append((said.code, {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else {}))
    assert results[0] == results[1]
    assert results[0][0] == 0
    assert results[0][1]


def test_a_file_named_like_a_value_is_a_file(folder: Path) -> None:
    shutil.copy(folder / "in.pth", folder / "bf16")
    said = say("cast", "in.pth", "bf16", "--out-dir", "out")
    assert said.code == 2
    assert "Missing option '--to-dtype'" in said.err


def test_extract_takes_the_only_state_dict(folder: Path) -> None:
    only = [path.name for path in folder.glob("*.pth") if len(ckptool.open(path).state_dicts) == 1]
    assert only
    for name in only:
        path = ckptool.open(folder / name).state_dicts[0].path or "."
        for out, call in (("a.pth", [name]), ("b.pth", [name, path])):
            assert say("extract", *call, "-o", out, "--force").code == 0
        assert (folder / "a.pth").read_bytes() == (folder / "b.pth").read_bytes()
    shutil.copy(FIXTURES / "gan.pth", folder)
    said = say("extract", "gan.pth", "-o", "c.pth")
    assert said.code == 2
    assert "the state dicts are" in said.err


#: The commands that take several inputs, with what else they need.
SEVERAL = {
    "keys": [],
    "stats": [],
    "hash": [],
    "lock": [],
    "strip-module": ["--out-dir", "out"],
    "convert": ["--to-format", "legacy", "--out-dir", "out"],
    "salvage": ["--out-dir", "out"],
    "redact": ["--redact", "all", "--out-dir", "out"],
    "average": ["-o", "average.pth"],
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_quoted_glob_names_its_files(name: str, folder: Path) -> None:
    results: list[object] = []
    for number, paths in enumerate((["in.pth", "other.pth"], ["[io]*.pth"])):
        more = [f"{number}{word}" if word in ("out", "average.pth") else word for word in SEVERAL[name]]
        said = say(name, *paths, *more)
        written = sorted((path.name.lstrip("01"), path.read_bytes()) for path in folder.glob(f"{number}*/*"))
        results += [(said.code, said.out.replace(f"{number}out", "out").replace(f"{number}average", "average"))]
        results += [(written, said.err)]
    assert results[:2] == results[2:]
    assert "Usage" not in str(results)
