"""Each known error: the library prints the message, its entry is found, its command runs, and then the file loads."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from command_line import say
from conftest import FIXTURES
from torch import nn

import ckptool
from ckptool.cli.explain import is_log
from ckptool.cli.main import run
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS, KnownError, command_line, explanation, filled

PATH = "model.pth"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(collections.OrderedDict(conv=nn.Linear(2, 4), fc=nn.Linear(4, 3)))


def prefixed(prefix: str) -> None:
    torch.save({prefix + key: value for key, value in net().state_dict().items()}, PATH)


def fill(path: str = PATH) -> Any:
    return net().load_state_dict(torch.load(path, weights_only=True))


class Case(NamedTuple):
    """``make`` writes the file, ``fails`` loads it, and ``loads`` loads what the command wrote, or the one that it
    prints; None where the bytes cannot be had from the file, and the command prints ``cause``. ``model`` is the one
    that the Python of the entry fills; None where that needs what is not here."""

    make: Callable[[], object]
    fails: Callable[[], object]
    loads: Callable[[str], object] | None = None
    cause: str = ""
    model: Callable[[], object] | None = net


def save_bytes(data: bytes) -> Callable[[], object]:
    return lambda: Path(PATH).write_bytes(data)


def saved(legacy: bool = False) -> bytes:
    torch.save(net().state_dict(), PATH, _use_new_zipfile_serialization=not legacy)
    return Path(PATH).read_bytes()


def wrapped() -> None:
    torch.save({"state_dict": net().state_dict(), "epoch": 3}, PATH)


def tagged(location: str) -> None:
    saved()
    ckptool.save(ckptool.remap(PATH, {"cpu": location}), PATH + ".new")
    Path(PATH + ".new").replace(PATH)


def unknown_location() -> None:
    Path(PATH).write_bytes(saved(legacy=True).replace(b"X\3\0\0\0cpu", b"X\3\0\0\0xyz"))


def no_gpus(count: int) -> Callable[[], object]:
    def load() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: count > 0)
            patch.setattr(torch.cuda, "device_count", lambda: count)
            patch.setattr(torch.cuda, "_is_compiled", lambda: True)
            return torch.load(PATH)

    return load


def load(**how: Any) -> Callable[[], object]:
    return lambda: torch.load(PATH, **how)


def load_alone() -> None:
    """Load it in a process of its own, in which nothing else is imported."""
    script = f"import torch; torch.load({PATH!r})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    raise RuntimeError(done.stderr)


def state_dict_of(path: str) -> object:
    state = torch.load(path, weights_only=True)
    assert state and all(isinstance(value, torch.Tensor) for value in state.values())
    return state


def load_any(path: str) -> object:
    return torch.load(path, weights_only=True)


def open_safetensors(path: str = PATH) -> object:
    from safetensors.torch import load_file

    return load_file(path)


def cut_safetensors() -> None:
    from safetensors.torch import save_file

    save_file(net().state_dict(), PATH)
    Path(PATH).write_bytes(Path(PATH).read_bytes()[:-8])


def evil() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("true",)

    torch.save({"a": Evil()}, PATH)


def copied(name: str) -> Callable[[], object]:
    return lambda: shutil.copy(FIXTURES / name, PATH)


def optimizer() -> None:
    model = net()
    optim = torch.optim.Adam(model.parameters())
    torch.save({"state_dict": model.state_dict(), "optimizer": optim.state_dict()}, PATH)


def load_optimizer() -> object:
    return torch.optim.Adam(net().fc.parameters()).load_state_dict(torch.load(PATH)["optimizer"])  # type: ignore[union-attr,arg-type,union-attr]


def a_record_damaged() -> None:
    data = bytearray(saved())
    with zipfile.ZipFile(PATH) as archive:
        place = next(info.header_offset for info in archive.infolist() if info.filename.endswith("data/0"))
    data[place : place + 4] = bytes(4)
    Path(PATH).write_bytes(data)


def load_pickle() -> object:
    with open(PATH, "rb") as file:
        return pickle.load(file)


def without_numpy_2() -> object:
    """What an older numpy does, which has no module of that name."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("numpy._core")]:
            patch.delitem(sys.modules, name)
        patch.setattr(np, "__path__", [])
        return torch.load(PATH, weights_only=False)


def raise_(text: str) -> object:
    """Stand for a program that prints this text."""
    raise RuntimeError(text)


#: Errors that no situation of tests/situations has.
CASES = {
    "added-prefix": Case(lambda: prefixed("model.net."), fill, fill),
    "optimizer-groups": Case(
        optimizer, load_optimizer, lambda path: net().load_state_dict(torch.load(path)["state_dict"])
    ),
    "no-such-device": Case(lambda: tagged("cuda:1"), no_gpus(1), cause="now tagged cuda:0", model=None),
    "unknown-location": Case(unknown_location, load(), fill),
    "not-torch": Case(save_bytes(json.dumps({"a": 1}).encode()), load(), cause="JSON"),
    "no-directory": Case(lambda: Path(PATH).write_bytes(saved()[:-300]), load(), state_dict_of),
    "damaged-record": Case(a_record_damaged, load(), state_dict_of),
    "plain-pickle": Case(saved, load_pickle, cause="state dict"),
    "numpy-2": Case(
        lambda: torch.save({"a": torch.ones(2), "loss": np.float64(0.5), "more": np.ones(3)}, PATH),
        without_numpy_2,
        load_any,
    ),
    "model-not-state-dict": Case(
        lambda: torch.save(net(), PATH), lambda: net().load_state_dict(torch.load(PATH, weights_only=False)), fill
    ),
    "empty-file": Case(save_bytes(b""), load(weights_only=False), cause="empty"),
    "torch-tar": Case(copied("torch01.tar"), load(map_location="cpu", weights_only=True), load_any),
    "mmap": Case(lambda: saved(legacy=True), load(mmap=True), lambda path: torch.load(path, mmap=True)),
    "acting-global": Case(evil, load(), cause="posix.system"),
    "needs-import": Case(copied("dtensor.pt"), load_alone, cause="torch.distributed.tensor"),
    "not-torchscript": Case(saved, lambda: torch.jit.load(PATH), cause="state dict"),
    "state-dict-not-model": Case(saved, lambda: torch.load(PATH).eval(), cause="state dict"),
    "safetensors-cut": Case(cut_safetensors, open_safetensors, state_dict_of),
    "all-keys-matched": Case(saved, lambda: raise_(str(fill())), cause="shows no cause"),
    "gguf-architecture": Case(
        copied("real/tiny.gguf"), lambda: raise_(REPORTED["gguf-architecture"]), cause="Its converter"
    ),
    "no-other-entry": Case(wrapped, lambda: torch.load(PATH)["optimizer"], cause="state_dict and epoch"),
}


def message(fails: Callable[[], object]) -> str:
    try:
        fails()
    except Exception:
        return traceback.format_exc()
    pytest.fail("it loads")


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_an_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    case.make()
    text = message(case.fails)
    found = explanation(text)
    assert found is not None
    assert found.error.name == name
    Path("error.txt").write_text(text, encoding="utf-8")
    report = ckptool.explain(text, PATH)
    assert (report["name"], report["path"]) == (name, PATH)
    read = json.loads(say("explain", "error.txt", PATH, "--json").out)
    assert {**read, "why": "", "next": ""} == {**report, "why": "", "next": ""}
    assert report["message"].split(":")[0] in text
    printed = report["why"] + report["next"]
    if report["next"]:
        printed += follow(shlex.split(report["next"]), case, capsys)
    else:
        assert case.loads is None or report["python"]
    assert case.cause in printed
    names = {"torch": torch, "model": case.model, "Net": net, "argparse": argparse}
    for lines in (report["python"], found.error.python_for(PATH, found.details)):
        if lines and case.model is not None:
            exec(lines, names | {"model": case.model()})


def follow(words: list[str], case: Case, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command, and the one that it prints, until one has written a file; that is loaded."""
    code = run(words[1:])
    printed = "".join(capsys.readouterr())
    assert code in ((0, 1) if case.loads else (0, 1, 3)), printed
    if case.loads and "-o" in words:
        case.loads(words[words.index("-o") + 1])
    elif case.loads:
        arrow = next(line for line in printed.splitlines() if line.startswith("  -> "))
        return printed + follow(shlex.split(arrow[5:]), case, capsys)
    return printed


#: Messages of other versions and libraries, as they were reported.
REPORTED = {
    "extra-state": "RuntimeError: Error(s) in loading state_dict for GPTModel:\n\tUnexpected key(s) in state_dict: "
    '"decoder.layers.0.self_attention.linear_proj._extra_state", "decoder.final_layernorm._extra_state". ',
    "not-a-program": "E/AndroidRuntime: com.facebook.jni.CppException: [enforce fail at inline_container.cc:222] . "
    "file not found: archive/constants.pkl\n\tat org.pytorch.Module.load(Module.java:23)",
    "device-rebuild": "AttributeError: Can't get attribute '_rebuild_npu_tensor' on <module 'torch_npu.utils.storage'>",
    "peft-names": "Error(s) in loading state_dict for PeftModel:\n\tMissing key(s) in state_dict: "
    '"base_model.model.q.lora_A.default.weight", "base_model.model.q.lora_B.default.weight".',
    "lora-key-not-loaded": "lora key not loaded: lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
    "gguf-architecture": "llama_model_load: error loading model: unknown model architecture: 'qwen35'",
    "gpu-memory": 'Traceback (most recent call last):\n  File "torch/serialization.py", line 1000, in _load\n'
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.80 GiB total capacity)",
    "empty-weights": "RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:\n\tsize mismatch for "
    "model.embed_tokens.weight: copying a param with shape torch.Size([0]) from checkpoint, the shape in current model "
    "is torch.Size([32000, 4096]).\n\tsize mismatch for model.norm.weight: copying a param with shape "
    "torch.Size([0]) from checkpoint, the shape in current model is torch.Size([4096]).",
    "other-shape": 'ValueError: Trying to set a tensor of shape torch.Size([0]) in "weight" (which has shape '
    "torch.Size([32000, 4096])), this look incorrect.",
    "partly-transferred": "Transferred 606/708 items from pretrained weights\nAMP: running Automatic Mixed Precision",
    "missing-arguments": "TypeError: Net.__init__() missing 2 required positional arguments: 'hidden' and 'classes'",
    "invalid-ordinal": "RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors might be reported at some",
    "no-memory": "RuntimeError: [enforce fail at C:\\cb\\alloc_cpu.cpp:81] . DefaultCPUAllocator: not enough memory: "
    "you tried to allocate 1073741824 bytes.",
    "safetensors-old": "SafetensorError: Error while deserializing header: invalid JSON in header: unknown variant "
    "`F8_E8M0`, expected one of `BOOL`, `U8`, `I8` at line 1 column 80",
    "no-weights-file": "OSError: Error no file named diffusion_pytorch_model.bin found in directory ./ControlNetModel.",
    "missing-shard": 'FileNotFoundError: No such file or directory: "/models/llama/model-00002-of-00003.safetensors"',
    "model-parallel": '  File "llama/generation.py", line 88\nAssertionError: Loading a checkpoint for MP=8 but '
    "world size is 1",
    "adapter-vocabulary": "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch for "
    "base_model.model.lm_head.lora_B.default.weight: copying a param with shape torch.Size([32003, 8]) from "
    "checkpoint, the shape in current model is torch.Size([32000, 8]).",
    "averaged-weights": "RuntimeError: Error(s) in loading state_dict for LatentDiffusion:\n\tUnexpected key(s) in "
    'state_dict: "model_ema.diffusion_modelout2bias", "model_ema.decay".',
    "module-prefix": "\x1b[0;31mRuntimeError\x1b[0m: RuntimeError: Error(s) in loading state_dict for ResNet:\n"
    '\tMissing key(s) in state_dict: "layer1.0.weight", "fc.weight". \n'
    '\tUnexpected key(s) in state_dict: "module.layer1.0.weight", "module.fc.weight". \n',
    "missing-prefix": "RuntimeError: Error(s) in loading state_dict for OptimizedModule:\n"
    '\tMissing key(s) in state_dict: "_orig_mod.wte.weight", "_orig_mod.head.weight". \n'
    '\tUnexpected key(s) in state_dict: "wte.weight", "head.weight".',
    "no-class": "AttributeError: Can't get attribute 'C3k2' on <module 'ultralytics.nn.modules.block' from '/b.py'>",
    "no-module": "ModuleNotFoundError: No module named 'models.yolo'",
    "old-torch": "RuntimeError: version_ <= kMaxSupportedFileFormatVersion INTERNAL ASSERT FAILED at container.cc:132"
    ", please report a bug to PyTorch.\nframe #0: c10::Error::Error() + 0x33 (0x7f69 in libc10.so)\n",
    "python-2": "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xe9 in position 3: invalid continuation byte",
    "safetensors-cut": "Exception: Error while deserializing header: MetadataIncompleteBuffer",
    "unable-to-load": "OSError: Unable to load weights from checkpoint file for '/unet/diffusion_pytorch_model.bin'",
    "unexpected-eof": "RuntimeError: storage has wrong size: expected -4613279438143028943 got 512",
    "web-page": "_pickle.UnpicklingError: Weights only load failed. WeightsUnpickler error: Unsupported operand 60",
}


#: The lines of a traceback through torch, as Python prints them under Windows.
TRACEBACK = """Traceback (most recent call last):
  File "C:\\Users\\Li\\train.py", line 14, in <module>
    state = torch.load('model.pth')
            ^^^^^^^^^^^^^^^^^^^^^^^
  File "C:\\envs\\lib\\site-packages\\torch\\serialization.py", line 713, in load
    return _legacy_load(opened_file, map_location, pickle_module, **pickle_load_args)
"""


@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_message(name: str) -> None:
    """Alone, and in the output of a program."""
    program = f"Epoch 1\n{TRACEBACK if name != 'missing-arguments' else ''}{REPORTED[name]}\nPress any key . . .\n"
    for text in (REPORTED[name], program):
        found = explanation(text)
        assert found is not None
        assert found.error.name == name


def test_every_name_is_that_of_one_error() -> None:
    names = [error.name for error in KNOWN_ERRORS]
    assert len(set(names)) == len(names)
    assert {*CASES, *REPORTED} <= {*names}


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("error", KNOWN_ERRORS, ids=lambda error: error.name)
def test_every_message_of_the_page_is_found(error: KnownError) -> None:
    for text in (error.message, *error.alike):
        found = explanation(text)
        assert found is not None
        assert found.error is error
        assert not re.search(r"\{[a-z]+\}", filled(error.why, found.details) + error.python_for("a.pth", found.details))


#: The lines of a traceback that ends in the program itself.
OWN = 'Traceback (most recent call last):\n  File "train.py", line 15, in <module>\n'


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        "KeyError: 'labels'",
        "AttributeError: 'dict' object has no attribute 'to'",
        "AssertionError: Torch not compiled with CUDA enabled",  # of model.cuda()
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x80 in position 0: invalid start byte",  # pickle
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0x8b in position 1: invalid start byte",  # gzip
        "AttributeError: 'BertEmbeddings' object has no attribute 'position_embedding_type'",
        "ValueError: Unrecognized model in ./x. Should have a `model_type` key\nin its config.json",
        # Of the program itself, as the line before the error says.
        f"{OWN}    print(config['model'])\n          ~~~~~~^^^^^^^^^\nKeyError: 'model'",
        f"{OWN}    print(float('1,5'))\nValueError: could not convert string to float: '1,5'",
        f"{OWN}    import models_of_mine\nModuleNotFoundError: No module named 'models_of_mine'",
        f"{OWN}    json.load(open('x'))\njson.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        f"{OWN}    open('x').read()\nUnicodeDecodeError: 'ascii' codec can't decode byte 0xc3 in position 3: ordinal",
        "FileNotFoundError: [Errno 2] No such file or directory: 'model.pth'",
        "",
    ],
)
def test_an_unknown_message(text: str) -> None:
    assert explanation(text) is None
    assert not text or say("explain", text).code == 1


def test_the_prefix_of_the_message_is_filled_in() -> None:
    text = 'Missing key(s) in state_dict: "a.w", "b.w". Unexpected key(s) in state_dict: "net.a.w", "net.b.w". '
    found = explanation(text)
    assert found is not None and found.error.name == "added-prefix"
    assert "'net.'" in filled(found.error.why, found.details)
    assert (
        command_line(found.error.step, "run 1.pth", found.details)
        == "ckptool strip-module 'run 1.pth' --strip-prefix net. -o 'run 1.plain.pth'"
    )
    python = found.error.python_for("run 1.pth", found.details)
    assert 'torch.load("run 1.pth", map_location="cpu")' in python
    assert 'key.removeprefix("net.")' in python
    inner = text.replace('"net.a.w"', '"a._orig_mod.w"').replace('"net.b.w"', '"b._orig_mod.w"')
    assert 'key.replace("_orig_mod.", "")' in ckptool.explain(inner)["python"]


# -- where the message and the file come from --------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a checkpoint, a log with a message about it, and the same log as PowerShell writes it."""
    monkeypatch.chdir(tmp_path)
    saved()
    log = "Epoch 1\nTraceback (most recent call last):\nKeyError: 'state_dict'\n"
    Path("train.log").write_text(log, encoding="utf-8")
    Path("shell.log").write_text(log, encoding="utf-16")


def piped(stdin: str, *words: str) -> str:
    """Run explain in a shell, with a redirection or a pipe before it. Return all that it prints, and the exit code."""
    tool = shlex.join([sys.executable, "-m", "ckptool", "explain", *words])
    line = f"{stdin} {tool}" if stdin.endswith("|") else f"{tool} {stdin}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    return f"{done.stdout}{' '.join(done.stderr.split())}[exit {done.returncode}]"


def test_every_way_to_give_the_message_is_the_same(workplace: None) -> None:
    wanted = say("explain", "KeyError: 'state_dict'", PATH).out + "[exit 0]"
    assert f"ckptool edit {PATH} --wrap state_dict" in wanted
    ways = [("cat train.log |", PATH), ("cat train.log |", "-", PATH), ("cat train.log |", PATH, "-")]
    ways += [("< train.log", PATH), ("< /dev/null", "train.log", PATH), ("< /dev/null", "shell.log", PATH)]
    ways += [("<&-", PATH, "train.log"), ("cat train.log |", "/dev/stdin", PATH)]
    assert {way: piped(*way) for way in ways} == dict.fromkeys(ways, wanted)
    alone = " ".join(piped("cat train.log |").split())
    assert "with the path of the checkpoint at the" in alone and "->" not in alone


@pytest.mark.parametrize("stdin", ["< /dev/null", "<&-", "true |"])
def test_without_a_message_the_answer_is_what_the_file_shows(stdin: str, workplace: None) -> None:
    assert f"{PATH}: a state dict of 4 keys, without findings" in piped(stdin, PATH)
    prefixed("module.")
    assert f"ckptool strip-module {PATH}" in piped(stdin, PATH)
    assert "2>&1 | ckptool explain[exit 2]" in piped(stdin)


def test_a_terminal_is_not_waited_for(workplace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, name = os.openpty()
    with open(terminal, "rb"), open(name, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert "without findings" in say("explain", PATH).out
        assert "There is no message." in say("explain").err


def test_what_is_no_message_is_refused(workplace: None) -> None:
    Path("empty.txt").touch()
    shutil.copy(PATH, "other.pth")
    assert "ckptool: missing.log: no such file" in say("explain", "missing.log", PATH).err
    assert "There is no message in empty.txt." in say("explain", "empty.txt").err
    assert f"explain reads one: ckptool explain {PATH}" in say("explain", "other.pth", PATH).err


@pytest.mark.parametrize(
    ("name", "content", "log"),
    [
        ("train.log", b"\x1b[31mloss\x1b[0m\r50%\b\b100%", True),
        ("out", "Größe\n".encode("utf-16"), True),
        ("pointer.bin", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", False),
        ("model.safetensors.index.json", b"{}", False),
        ("model.pth", b"<html>Not found</html>", False),
        ("renamed", pickle.dumps({"a": 1}, protocol=2), False),
    ],
)
def test_a_log_is_told_from_a_checkpoint(name: str, content: bytes, log: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    assert is_log(str(tmp_path / name)) == log
