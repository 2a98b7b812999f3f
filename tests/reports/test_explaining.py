"""Each known error: the library prints the message, its entry is found, its command runs, and then the file loads."""

from __future__ import annotations

import argparse
import collections
import gzip
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
from ckptool.reports.explaining.known_errors import KNOWN_ERRORS, KnownError, explanation

PATH = "model.pth"


def net(out: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(collections.OrderedDict(conv=nn.Linear(2, 4), fc=nn.Linear(4, out)))


def prefixed(prefix: str) -> None:
    torch.save({prefix + key: value for key, value in net().state_dict().items()}, PATH)


def fill(path: str = PATH, model: nn.Module | None = None, strict: bool = True) -> Any:
    return (model or net()).load_state_dict(torch.load(path, weights_only=True), strict=strict)


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


def cut(legacy: bool, size: int) -> None:
    Path(PATH).write_bytes(saved(legacy)[:-size])


def saved_with(name: str) -> None:
    torch.save({**net().state_dict(), name: torch.arange(4.0)}, PATH)


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


def tied(path: str = PATH) -> None:
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight}, path)


def save_safetensors() -> object:
    from safetensors.torch import save_file

    save_file(torch.load(PATH), "out.safetensors")
    return None


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


def half_optimizer() -> None:
    """What salvage leaves: one parameter lost one of its values."""
    model = net()
    optim = torch.optim.Adam(model.parameters())
    sum(value.sum() for value in model.parameters()).backward()  # type: ignore[union-attr]
    optim.step()
    state = optim.state_dict()
    del state["state"][2]["exp_avg_sq"]
    torch.save({"state_dict": model.state_dict(), "optimizer": state}, PATH)


def step_optimizer() -> None:
    model = net()
    optim = torch.optim.Adam(model.parameters())
    optim.load_state_dict(torch.load(PATH)["optimizer"])
    sum(value.sum() for value in model.parameters()).backward()  # type: ignore[union-attr]
    optim.step()


def a_record_damaged() -> None:
    data = bytearray(saved())
    with zipfile.ZipFile(PATH) as archive:
        place = next(info.header_offset for info in archive.infolist() if info.filename.endswith("data/0"))
    data[place : place + 4] = bytes(4)
    Path(PATH).write_bytes(data)


def other_zip() -> None:
    with zipfile.ZipFile(PATH, "w") as archive:
        archive.writestr("folder/readme.txt", "no checkpoint")


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


def with_attribute() -> None:
    state = net().state_dict(keep_vars=True)
    state["fc.weight"].tag = 1  # type: ignore[attr-defined]
    torch.save(state, PATH)


def load_without_function() -> object:
    """What torch before 2.0 does, which has no such function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._utils, "_rebuild_parameter_with_state")
        return torch.load(PATH, weights_only=False)


def raise_(text: str) -> object:
    """Stand for a program that prints this text."""
    raise RuntimeError(text)


CASES = {
    "module-prefix": Case(lambda: prefixed("module."), fill, fill),
    "wrapper-prefix": Case(lambda: prefixed("_orig_mod."), fill, fill),
    "added-prefix": Case(lambda: prefixed("model.net."), fill, fill),
    "nested-state-dict": Case(wrapped, fill, fill),
    "size-mismatch": Case(
        saved, lambda: fill(model=net(5)), lambda path: fill(path, net(5), strict=False), model=lambda: net(5)
    ),
    "computed-buffers": Case(lambda: saved_with("conv.position_ids"), fill, lambda path: fill(path, strict=False)),
    "other-keys": Case(lambda: saved_with("extra.weight"), fill, fill),
    "no-such-entry": Case(
        saved, lambda: torch.load(PATH)["state_dict"], lambda path: torch.load(path)["state_dict"]["fc.weight"]
    ),
    "optimizer-values": Case(
        half_optimizer, step_optimizer, lambda path: net().load_state_dict(torch.load(path)["state_dict"])
    ),
    "optimizer-groups": Case(
        optimizer, load_optimizer, lambda path: net().load_state_dict(torch.load(path)["state_dict"])
    ),
    "no-such-device": Case(lambda: tagged("cuda:1"), no_gpus(1), cause="now tagged cuda:0", model=None),
    "no-cuda": Case(lambda: tagged("cuda:0"), load(), fill),
    "unknown-location": Case(unknown_location, load(), fill),
    "lfs-pointer": Case(save_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n"), load()),
    "web-page": Case(save_bytes(b"<!DOCTYPE html><html></html>"), load(weights_only=False), cause="web page"),
    "compressed": Case(lambda: Path(PATH).write_bytes(gzip.compress(saved())), load(), cause="gzip"),
    "not-torch": Case(save_bytes(json.dumps({"a": 1}).encode()), load(), cause="JSON"),
    "no-directory": Case(lambda: cut(False, 300), load(), state_dict_of),
    "unexpected-eof": Case(lambda: cut(True, 4), load(), state_dict_of),
    "damaged-record": Case(a_record_damaged, load(), state_dict_of),
    "no-data-pkl": Case(other_zip, load(), cause="readme.txt"),
    "plain-pickle": Case(saved, load_pickle, cause="state dict"),
    "numpy-2": Case(
        lambda: torch.save({"a": torch.ones(2), "loss": np.float64(0.5), "more": np.ones(3)}, PATH),
        without_numpy_2,
        load_any,
    ),
    "newer-torch": Case(with_attribute, load_without_function, open_safetensors),
    "model-not-state-dict": Case(
        lambda: torch.save(net(), PATH), lambda: net().load_state_dict(torch.load(PATH, weights_only=False)), fill
    ),
    "empty-file": Case(save_bytes(b""), load(weights_only=False), cause="empty"),
    "torchscript": Case(lambda: torch.jit.script(net()).save(PATH), load(), fill),
    "torch-tar": Case(copied("torch01.tar"), load(map_location="cpu", weights_only=True), load_any),
    "mmap": Case(lambda: saved(legacy=True), load(mmap=True), lambda path: torch.load(path, mmap=True)),
    "acting-global": Case(evil, load(), cause="posix.system"),
    "needs-import": Case(copied("dtensor.pt"), load_alone, cause="torch.distributed.tensor"),
    "not-torchscript": Case(saved, lambda: torch.jit.load(PATH), cause="state dict"),
    "weights-only-global": Case(
        lambda: torch.save({"a": torch.ones(2), "args": argparse.Namespace(b=1)}, PATH), load(), load_any
    ),
    "weights-only": Case(
        lambda: torch.save({"a": torch.ones(2)}, PATH, pickle_protocol=4, _use_new_zipfile_serialization=False),
        load(),
        load_any,
    ),
    "state-dict-not-model": Case(saved, lambda: torch.load(PATH).eval(), cause="state dict"),
    "safetensors-header": Case(saved, open_safetensors, open_safetensors, model=None),
    "safetensors-cut": Case(cut_safetensors, open_safetensors, state_dict_of),
    "shared-memory": Case(tied, save_safetensors, open_safetensors),
    "all-keys-matched": Case(saved, lambda: raise_(str(fill())), cause="shows no cause"),
    "no-such-key": Case(
        lambda: torch.save({"model.embed_tokens.weight": torch.ones(4, 2), "model.norm.weight": torch.ones(2)}, PATH),
        lambda: torch.load(PATH)["lm_head.weight"],
        lambda path: torch.load(path)["lm_head.weight"],
    ),
    "no-other-entry": Case(wrapped, lambda: torch.load(PATH)["optimizer"], cause="state_dict and epoch"),
    "non-contiguous": Case(
        lambda: torch.save({"a": torch.ones(2, 3).t()}, PATH), save_safetensors, open_safetensors, model=None
    ),
    "meta-tensor": Case(saved, lambda: nn.Linear(2, 3, device="meta").to("cpu"), cause="has values for"),
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
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", REPORTED)
def test_a_reported_message(name: str) -> None:
    found = explanation(REPORTED[name])
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
        assert not re.search(r"\{[a-z]+\}", error.why_of(found.details) + error.python_for("a.pth", found.details))


#: Whole tracebacks as Python printed them (fixtures/generators/make_tracebacks.py), named for their entries: of other
#: versions than CASES raises them with, and unrelated ones.
TRACEBACKS = sorted(Path(__file__).with_name("tracebacks").glob("*.txt"))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("path", TRACEBACKS, ids=lambda path: path.stem)
def test_a_traceback(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, name = path.read_text(encoding="utf-8"), path.name.partition(".")[0]
    found = explanation(text)
    if name.startswith("unrelated-"):
        assert found is None
        assert run(["explain", text]) == 1
        assert "No explanation is known for this message" in " ".join(capsys.readouterr().out.split())
    else:
        assert found is not None
        assert found.error.name == name


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
        "",
    ],
)
def test_an_unknown_message(text: str) -> None:
    assert explanation(text) is None


def test_the_prefix_of_the_message_is_filled_in() -> None:
    text = 'Missing key(s) in state_dict: "a.w", "b.w". Unexpected key(s) in state_dict: "net.a.w", "net.b.w". '
    found = explanation(text)
    assert found is not None and found.error.name == "added-prefix"
    assert "'net.'" in found.error.why_of(found.details)
    assert (
        found.error.command_for("run 1.pth", found.details)
        == "ckptool strip-module 'run 1.pth' --strip-prefix net. -o 'run 1.plain.pth'"
    )
    python = found.error.python_for("run 1.pth", found.details)
    assert 'torch.load("run 1.pth", map_location="cpu")' in python
    assert 'key.removeprefix("net.")' in python
    inner = text.replace('"net.a.w"', '"a._orig_mod.w"').replace('"net.b.w"', '"b._orig_mod.w"')
    assert 'key.replace("_orig_mod.", "")' in ckptool.explain(inner)["python"]


#: As people paste them: notebooks with colours, Windows, other programs around the message; named for their entries.
FORUM = sorted(Path(__file__).with_name("forum").glob("*.txt"))


@pytest.mark.parametrize("path", FORUM, ids=lambda path: path.stem)
def test_a_message_of_a_forum(path: Path) -> None:
    found = explanation(path.read_text(encoding="utf-8"))
    assert found is not None
    assert found.error.name == path.stem


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
