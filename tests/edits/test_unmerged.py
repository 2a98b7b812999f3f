"""lora merge of a model with an adapter inside: the state dict of a PEFT model, against PEFT where it is installed."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import say
from safetensors.torch import load_file, save_file
from test_merge_lora import _gpt2, _llama, assert_same, is_same

import ckptool
from ckptool.base.errors import RefusedError

MODULE = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
FOLDER = {"adapter_config.json", "adapter_model.safetensors"}
State = dict[str, torch.Tensor]


def inside(*names: str, prefix: str = "base_model.model.") -> State:
    """The state dict of a model with an adapter of each name."""
    torch.manual_seed(3)
    tensors = {f"{MODULE}.base_layer.weight": torch.randn(8, 8), "model.norm.weight": torch.randn(8)}
    for name in names or ("default",):
        tensors[f"{MODULE}.lora_A.{name}.weight"] = torch.randn(2, 8)
        tensors[f"{MODULE}.lora_B.{name}.weight"] = torch.randn(8, 2)
    return {prefix + key: value for key, value in tensors.items()}


def expected(state: Mapping[str, torch.Tensor], name: str = "default", scale: float = 1.5) -> State:
    bare = {key.removeprefix("base_model.model."): value for key, value in state.items()}
    a, b = (bare[f"{MODULE}.lora_{which}.{name}.weight"] for which in "AB")
    weight = bare[f"{MODULE}.base_layer.weight"] + (b @ a) * scale
    return {f"{MODULE}.weight": weight, "model.norm.weight": bare["model.norm.weight"]}


def write(folder: Path, state: State, config: Mapping[str, Any] | None = CONFIG, name: str = "model.pth") -> Path:
    path = folder / name
    save_file(state, path) if name.endswith(".safetensors") else torch.save(state, path)
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return path


# -- PEFT's own merge


class _Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = torch.nn.Conv2d(4, 6, 1), torch.nn.Conv2d(6, 70, 3)
        self.line, self.out = torch.nn.Conv1d(5, 7, 3), torch.nn.Linear(9, 66)


def _bf16(make: Callable[[], torch.nn.Module]) -> Callable[[], torch.nn.Module]:
    return lambda: make().to(torch.bfloat16)


ALL = {"target_modules": "all-linear"}
CONV1D = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
CONVOLUTIONS = {"target_modules": ["one", "three", "line", "out"]}
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "float32": (lambda: _llama(torch.float32), ALL),
    "bfloat16": (_llama, {**ALL, "use_rslora": True}),
    "float16": (lambda: _llama(torch.float16), ALL),
    "patterns": (_llama, {**ALL, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {r"^model\.layers.0.*v_proj": 5}}),
    "DoRA": (lambda: _llama(torch.float32), {**ALL, "use_dora": True}),
    "DoRA in bfloat16": (_llama, {**ALL, "use_dora": True}),
    "embedding": (_llama, {"target_modules": ["q_proj", "embed_tokens"]}),
    "DoRA of an embedding": (_llama, {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True}),
    "Conv1D": (_gpt2, CONV1D),
    "DoRA of Conv1D in bfloat16": (_bf16(_gpt2), {**CONV1D, "use_dora": True}),
    "convolutions": (_Convolutions, CONVOLUTIONS),
    "convolutions in bfloat16": (_bf16(_Convolutions), CONVOLUTIONS),
    "biases": (lambda: _llama(attention_bias=True), {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "all biases": (lambda: _llama(attention_bias=True), {**ALL, "bias": "all"}),
    "saved modules": (_llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "mlp"]}),
    "tokens": (_llama, {"target_modules": ["q_proj"], "trainable_token_indices": [3, 140]}),
    "tokens of a tied model": (
        lambda: _llama(**TIED),
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 140]},
    ),
    "a tied model": (lambda: _llama(**TIED), ALL),
    "a saved head of a tied model": (
        lambda: _llama(**TIED),
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
}


@pytest.mark.parametrize("way", ["in 16 bits", "cast", "injected"])
@pytest.mark.parametrize("name", CASES)
def test_peft_merges_to_the_same_bytes(name: str, way: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    make, settings = CASES[name]
    if way != "in 16 bits" and "all-linear" not in str(settings):
        pytest.skip("one case for each way is enough")
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 12, "init_lora_weights": False, **settings})
    cast = way == "cast"
    model = make()
    if way == "injected":
        peft.inject_adapter_in_model(config, model, adapter_name="my-style")
        wrapped = model
    else:
        wrapped = peft.get_peft_model(model, config, adapter_name="my-style", autocast_adapter_dtype=cast)
    for key, parameter in wrapped.named_parameters():
        if any(word in key for word in ("lora_", "trainable_tokens", "modules_to_save")):
            shift = 1 if "magnitude" in key else 0
            parameter.data = (torch.randn(parameter.shape) * 0.1 + shift).to(parameter.dtype)
    peft_names = {} if way == "injected" else peft.get_peft_model_state_dict(wrapped, adapter_name="my-style")
    (config if way == "injected" else wrapped.peft_config["my-style"]).save_pretrained(tmp_path)
    torch.save(wrapped.state_dict(), tmp_path / "model.pth")
    save_file({key: value.clone() for key, value in wrapped.state_dict().items()}, tmp_path / "m.safetensors")
    said = say("lora", "merge", tmp_path / "model.pth", "-o", tmp_path / "out.pth")
    assert said.code == 0, said.all
    assert say("lora", "merge", tmp_path / "m.safetensors", "-o", tmp_path / "out.safetensors").code == 0
    if way != "injected" and settings.get("bias") != "all":  # trained biases stay in the base
        kept = say("lora", "merge", tmp_path / "model.pth", "--keep", "adapter", "-o", tmp_path / "adapter")
        assert kept.code == 0, kept.all
        apart = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        # PEFT also saves the embedding itself, which the base model holds.
        assert_same(apart, {key: value for key, value in peft_names.items() if not key.endswith(".base_layer.weight")})
    result = wrapped.merge_and_unload().state_dict() if way != "injected" else _merged_in_place(wrapped)
    assert_same(torch.load(tmp_path / "out.pth"), dict(result))
    assert_same(load_file(tmp_path / "out.safetensors"), dict(result))


def _merged_in_place(model: torch.nn.Module) -> State:
    """Merge the layers of a model that is no PEFT model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {}
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
    for key, value in model.state_dict().items():
        if "lora_" not in key:
            found[key.replace(".base_layer", "")] = value
    return found


# -- without PEFT


@pytest.mark.parametrize("prefix", ["base_model.model.", "", "language_model.base_model.model."])
@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_the_product_is_added_with_the_scale_of_the_settings(name: str, prefix: str, tmp_path: Path) -> None:
    state = inside(prefix=prefix)
    path = write(tmp_path, state, None, name)
    out = tmp_path / f"out{path.suffix}"
    said = say("lora", "merge", path, "-o", out)
    assert said.code == 4 and "--config" in said.err and not out.exists()
    (tmp_path / "settings.json").write_text(json.dumps(CONFIG))
    assert say("lora", "merge", path, "--config", tmp_path / "settings.json", "-o", out).code == 0
    start = prefix.removesuffix("base_model.model.")
    own = expected({key.removeprefix(prefix): value for key, value in state.items()})
    result = load_file(out) if path.suffix == ".safetensors" else torch.load(out)
    assert_same(result, {start + key: value for key, value in own.items()})


def test_one_of_two_adapters_is_named(tmp_path: Path) -> None:
    state = inside("style", "task")
    path, out = write(tmp_path, state), tmp_path / "out.pth"
    for more in ([], ["--adapter", "default"]):
        said = say("lora", "merge", path, *more, "-o", out)
        assert said.code == 4 and "'style' and 'task'" in said.err and "--adapter style" in said.err
    said = say("lora", "merge", path, "--adapter", "task", "--weights", "0.5", "-o", out)
    assert said.code == 0 and "2 tensors of other adapters left out" in said.all
    assert_same(torch.load(out), expected(state, "task", 0.75))
    other = tmp_path / "other"
    other.mkdir()
    alone = write(other, {"base_model.model.x.lora_A.weight": torch.ones(2, 2)}, name="adapter_model.bin")
    said = say("lora", "merge", path, alone, "-o", tmp_path / "x.pth")
    assert said.code == 4 and "unmerged adapter inside" in said.err
    assert say("lora", "merge", alone, other, "--keep", "base", "-o", tmp_path / "x.pth").code == 2


def test_base_and_adapter_merge_to_the_same(tmp_path: Path) -> None:
    """The two parts are those that a base and a saved adapter would be; the rest of the file stays with the base."""
    state = inside()
    path = write(tmp_path, {"model": state, "epoch": 3}, {**CONFIG, "init_lora_weights": "pissa"})  # type: ignore[dict-item]
    assert say("lora", "merge", path, "--keep", "base", "--key", "model", "-o", tmp_path / "base.pth").code == 0
    assert say("lora", "merge", path, "--keep", "adapter", "--key", "model", "-o", tmp_path / "adapter").code == 0
    assert {item.name for item in (tmp_path / "adapter").iterdir()} == FOLDER
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings == {**CONFIG, "init_lora_weights": True}  # the base that was kept is the changed one
    base = torch.load(tmp_path / "base.pth")
    assert base["epoch"] == 3 and is_same(base["model"][f"{MODULE}.weight"], next(iter(state.values())))
    said = say("lora", "merge", tmp_path / "base.pth", tmp_path / "adapter", "--key", "model", "-o", tmp_path / "a.pth")
    assert said.code == 0, said.all
    assert say("lora", "merge", path, "--key", "model", "-o", tmp_path / "b.pth").code == 0
    for name in "ab":
        result = torch.load(tmp_path / f"{name}.pth")
        assert_same(result["model"], expected(state))
        assert result["epoch"] == 3


def test_shards_are_merged_in_their_folder(tmp_path: Path) -> None:
    state, folder = inside() | {"base_model.model.more.weight": torch.randn(300)}, tmp_path / "model"
    write(tmp_path, state, None)
    assert say("convert", tmp_path / "model.pth", "--max-shard-size", "1KB", "-o", folder).code == 0
    (folder / "config.json").write_text("{}")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    said = say("lora", "merge", folder, "-o", tmp_path / "out")
    assert said.code == 0, said.all
    names = {item.name for item in (tmp_path / "out").iterdir()}
    assert "config.json" in names and "adapter_config.json" not in names
    whole = expected(state) | {"more.weight": [*state.values()][-1]}
    parts = [load_file(file) for file in (tmp_path / "out").glob("model*.safetensors")]
    assert_same({key: value for part in parts for key, value in part.items()}, whole)
    assert say("lora", "merge", folder, "--keep", "adapter", "-o", tmp_path / "adapter").code == 0
    assert {item.name for item in (tmp_path / "adapter").iterdir()} == FOLDER


def test_a_conversion_takes_the_adapter_alone(tmp_path: Path) -> None:
    path = write(tmp_path, inside())
    with pytest.raises(RefusedError, match="a model with an adapter inside, not a LoRA") as caught:
        ckptool.convert_lora(path, "kohya")
    assert say(*shlex.split(str(caught.value.step))[1:]).code == 0


def test_what_cannot_be_merged_to_the_same_bytes_is_refused(tmp_path: Path) -> None:
    half = {key: value.bfloat16() for key, value in inside().items()}
    experts = {**CONFIG, "target_parameters": ["q_proj.weight"], "target_modules": []}
    with pytest.raises(RefusedError, match="in 16 bits"):
        ckptool.merge_lora(write(tmp_path, half, experts))
    with pytest.raises(RefusedError, match="no partner lora_B"):
        ckptool.merge_lora(write(tmp_path, {k: v for k, v in inside().items() if "lora_B" not in k}), keep="adapter")
    unknown = inside() | {f"base_model.model.{MODULE}.vera_lambda_d.x.y": torch.ones(2)}
    with pytest.raises(RefusedError, match="vera_lambda_d"):
        ckptool.merge_lora(write(tmp_path, unknown))
    codes = {f"base_model.model.{MODULE}.base_layer.weight": torch.zeros(32, 1, dtype=torch.uint8)}
    parts = {"absmax": torch.zeros(1), "quant_map": torch.zeros(16)}
    parts["quant_state.bitsandbytes__nf4"] = torch.zeros(90, dtype=torch.uint8)
    codes |= {f"base_model.model.{MODULE}.base_layer.weight.{name}": part for name, part in parts.items()}
    with pytest.raises(RefusedError, match="quantized"):
        ckptool.merge_lora(write(tmp_path, inside() | codes))
    assert "adapter inside" not in say("inspect", write(tmp_path, {"a.base_layer.weight": torch.ones(2)})).all


def test_a_flipped_bit_of_the_adapter_is_found(tmp_path: Path) -> None:
    state = inside()
    path = write(tmp_path, state)
    data, part = path.read_bytes(), [*state.values()][3].numpy().tobytes()
    at = data.index(part)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert say("lora", "merge", path, "-o", tmp_path / "out.pth").code in (3, 4)
    assert not (tmp_path / "out.pth").exists()
