"""lora merge with other types than LoRA, against the formulas of PEFT, and PEFT itself where it is installed."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_adapters import write_adapter
from safetensors.torch import load_file, save_file

import ckptool
from ckptool.base.errors import RefusedError

State = dict[str, torch.Tensor]
MODULE = "layer.proj"
PREFIX = f"base_model.model.{MODULE}"
OUT, INNER, RANK = 150, 96, 4


def merged(base: State, adapter: State, tmp_path: Path, weight: float = 1, **settings: Any) -> torch.Tensor:
    save_file(base, tmp_path / "base.safetensors")
    folder = write_adapter(tmp_path / "adapter", adapter, **settings)
    with ckptool.open(folder) as opened:
        edited = ckptool.merge_lora(tmp_path / "base.safetensors", opened, weights=[weight])
        ckptool.save(edited, tmp_path / "out.safetensors", force=True)
    return load_file(tmp_path / "out.safetensors")[f"{MODULE}.weight"]


def adalora(out: int = OUT, inner: int = INNER) -> State:
    torch.manual_seed(6)
    a, b, e = torch.randn(RANK, inner), torch.randn(out, RANK), torch.randn(RANK, 1)
    return {f"{PREFIX}.lora_A": a, f"{PREFIX}.lora_B": b, f"{PREFIX}.lora_E": e}


def loha(out: int = OUT, inner: int = INNER) -> State:
    torch.manual_seed(7)
    shapes = {"a": (out, RANK), "b": (RANK, inner)}
    return {f"{PREFIX}.hada_w{n}_{which}": torch.randn(shapes[which]) for n in (1, 2) for which in "ab"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("alpha", "transposed"), [(8, False), (-1, False), (8, True)])
def test_adalora_is_divided_by_its_first_rank(alpha: int, transposed: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """An alpha of 0 or less means the rank. The file may hold fewer values than ``init_r``, after pruning."""
    weight = torch.randn((INNER, OUT) if transposed else (OUT, INNER)).to(dtype)
    a, b, e = adalora().values()
    settings = {"peft_type": "ADALORA", "init_r": 12, "lora_alpha": alpha, "r": 8, "fan_in_fan_out": transposed}
    result = merged({f"{MODULE}.weight": weight}, adalora(), tmp_path, **settings)
    product = (b @ (a * e)).T if transposed else b @ (a * e)
    delta = product * (alpha if alpha > 0 else 12) / (torch.tensor([12.0]) + 1e-5)
    assert torch.equal(result, (weight.float() + delta).to(dtype))


@pytest.mark.parametrize("weight", [1, 0.5])
def test_loha_multiplies_two_products(weight: float, tmp_path: Path) -> None:
    base = torch.randn(OUT, INNER)
    a, b, c, d = loha().values()
    settings = {"peft_type": "LOHA", "r": RANK, "alpha": 3, "lora_alpha": 99}
    result = merged({f"{MODULE}.weight": base}, loha(), tmp_path, weight, **settings)
    assert torch.equal(result, base + ((a @ b) * (c @ d)) * (3 / RANK * weight))


def numbers(*shape: int) -> torch.Tensor:
    """Return numbers in eighths, which do not depend on a random generator."""
    return ((torch.arange(prod(shape)) * 7) % 11 - 5).view(shape) / 8


def boft(weight: torch.Tensor, size: int, factors: int = 1) -> State:
    columns, rows = prod(weight.shape[1:]), len(weight)
    scales = 1 + numbers(*((rows, 1) if weight.dim() == 2 else (1, rows)))
    return {f"{PREFIX}.boft_R": numbers(factors, columns // size, size, size), f"{PREFIX}.boft_s": scales}


BOFT = {"peft_type": "BOFT", "r": None, "lora_alpha": None, "boft_block_size": 3, "boft_block_num": 0}
LOKR = {"peft_type": "LOKR", "r": 2, "alpha": 3, "lora_alpha": None}


def lokr(*shape: int, names: str = "w1 w2_a w2_b") -> State:
    """Return an adapter whose first factor is 2 x 3."""
    (below, inside), kernel = (shape[0] // 2, shape[1] // 3), shape[2:]
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (2, 3),
        "w1_a": (2, 2),
        "w1_b": (2, 3),
        "w2": (below, inside, *kernel),
        "w2_a": (2, below) if "t2" in names else (below, 2),
        "w2_b": (2, inside * (1 if "t2" in names else prod(kernel))),
        "t2": (2, 2, *kernel),
    }
    return {f"{PREFIX}.lokr_{name}": numbers(*shapes[name]) for name in names.split()}


OFT = {"peft_type": "OFT", "r": 0, "lora_alpha": None, "peft_version": "0.21.2", "use_cayley_neumann": True}


def rotation(parameters: torch.Tensor) -> torch.Tensor:
    """Return the rotation of all columns as one matrix."""
    skew = (parameters - parameters.transpose(-1, -2)) / 2
    unit = torch.eye(skew.shape[-1])
    blocks = torch.linalg.solve(unit + skew, (unit - skew).expand_as(skew), left=False)
    return torch.block_diag(*blocks[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("columns", "size", "outs"), [(96, 4, 150), (1280, 20, 67), (1600, 5, 200), (5184, 12, 64), (9216, 64, 70)]
)
def test_boft_of_parts_has_the_values_of_one_matrix(
    columns: int, size: int, outs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Columns are rotated some at a time, and rows in blocks. The order of sums depends on the CPU for many columns."""
    torch.manual_seed(9)
    weight = torch.randn(outs, columns).to(dtype)
    adapter = boft(weight, size)
    adapter[f"{PREFIX}.boft_R"] = torch.randn(1, columns // size, size, size) / 9
    result = merged({f"{MODULE}.weight": weight}, adapter, tmp_path, **{**BOFT, "boft_block_size": size})
    whole = (rotation(adapter[f"{PREFIX}.boft_R"]) @ weight.float().T).T * adapter[f"{PREFIX}.boft_s"]
    if columns < 768 and torch.backends.mkl.is_available():
        assert torch.equal(result, whole.to(dtype))
    torch.testing.assert_close(result, whole.to(dtype))


def vera(out: int = OUT, inner: int = INNER) -> State:
    """Return an adapter whose shared matrices are larger than the weight."""
    torch.manual_seed(8)
    shared = {"base_model.vera_A": torch.randn(RANK, inner + 9), "base_model.vera_B": torch.randn(out + 5, RANK)}
    return {**shared, f"{PREFIX}.vera_lambda_b": torch.randn(out), f"{PREFIX}.vera_lambda_d": torch.randn(RANK)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_vera_scales_the_rows_of_shared_matrices(dtype: torch.dtype, transposed: bool, tmp_path: Path) -> None:
    weight = torch.randn(INNER, OUT) if transposed else torch.randn(OUT, INNER)
    result = merged({f"{MODULE}.weight": weight.to(dtype)}, vera(), tmp_path, **{**VERA, "fan_in_fan_out": transposed})
    a, b, out, inner = vera().values()
    delta = (out[:, None] * b[:OUT]) @ (inner[:, None] * a[:, :INNER])
    assert torch.equal(result, (weight.to(dtype).float() + (delta.T if transposed else delta)).to(dtype))


VERA = {"peft_type": "VERA", "r": RANK, "lora_alpha": None, "save_projection": True}
LOHA = {"peft_type": "LOHA", "r": RANK, "lora_alpha": None}
ADALORA = {"peft_type": "ADALORA"}
ROTATED = boft(torch.ones(OUT, INNER), 3)
TURNED = {f"{PREFIX}.oft_R.weight": numbers(32, 3)}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("adapter", "settings", "words"),
    [
        (dict([*loha().items()][:3]), LOHA, "has no partner hada_w2_b"),
        ({**loha(), f"{PREFIX}.hada_t3": torch.ones(2, 2)}, LOHA, "is not known"),
        (loha(inner=7), LOHA, "another base"),
        (dict([*adalora().items()][:2]), ADALORA, "needs lora_E with AdaLoRA"),
        ({**adalora(), f"{PREFIX}.lora_E": torch.ones(3, 1)}, ADALORA, "do not fit together: .*lora_E' is 3x1"),
        (adalora(), {**ADALORA, "init_r": "x"}, "its init_r .* is not a number"),
        (dict([*ROTATED.items()][:1]), BOFT, "has no partner boft_s"),
        ({**ROTATED, f"{PREFIX}.boft_R": torch.ones(1, 2, 3, 4)}, BOFT, "boft_R' is 1x2x3x4"),
        ({**ROTATED, f"{PREFIX}.boft_s": torch.ones(1, OUT)}, BOFT, "is 1x150: the weight needs 150x1"),
        (ROTATED, {**BOFT, "boft_block_size": 4}, "is 1x32x3x3: adapter_config.json gives boft_block_size 4"),
        (loha(), {**LOHA, "peft_type": "LORA"}, "hada_w1_a' is not known"),
        (boft(torch.ones(OUT, 96), 3, 2), BOFT, "only 1 butterfly factor is supported"),
        (boft(torch.ones(OUT, 66), 3), BOFT, "another base"),
        (lokr(150, 96, names="w2"), LOKR, "and its partners are not the two factors of LoKr"),
        (lokr(150, 96, names="w1 w2 w2_a"), LOKR, "w2_a' is not known"),
        (lokr(150, 96), {**LOKR, "r": 3}, "w2_a' has the rank 2, and adapter_config.json says 3"),
        (lokr(150, 93), LOKR, "another base"),
        ({f"{PREFIX}.lokr_w1": torch.tensor(1.0), f"{PREFIX}.lokr_w2": torch.ones(150, 96)}, LOKR, "do not fit"),
        (dict([*vera().items()][:3]), VERA, "vera_lambda_b' has no partner"),
        (dict([*vera().items()][2:]), VERA, "lacks the random matrices that its modules share"),
        ({**vera(), "base_model.vera_B": torch.ones(OUT - 1, RANK)}, VERA, "does not fit the shared matrices"),
        (vera(out=OUT - 1), VERA, "another base"),
        (TURNED, {**OFT, "peft_type": "LORA"}, "oft_R.weight' is not known"),
        ({f"{PREFIX}.oft_R.weight": torch.ones(32, 4)}, OFT, "is 32x4: not the shape of OFT rotations"),
        ({f"{PREFIX}.oft_R.weight": torch.ones(31, 3)}, OFT, "another base"),
        (TURNED, {**OFT, "use_cayley_neumann": None}, "a rotation of OFT that is not supported"),
        (TURNED, {**OFT, "peft_version": "0.17.1"}, "one that PEFT 0.18 and later do not have"),
        ({**ROTATED, f"{PREFIX}.boft_R": torch.full((1, 32, 3, 3), torch.nan)}, BOFT, "boft_R .* holds NaN"),
    ],
)
def test_a_refusal_says_what_is_wrong(adapter: State, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=words):
        merged({f"{MODULE}.weight": torch.ones(OUT, INNER)}, adapter, tmp_path, **settings)


def test_some_convolutions_are_refused(tmp_path: Path) -> None:
    """PEFT orders the elements of a product for Conv1d in another way."""
    weight, oblong = numbers(4, 6, 3), torch.ones(4, 2, 3, 1)
    with pytest.raises(RefusedError, match="changes a Conv1d, which is not supported"):
        merged({f"{MODULE}.weight": weight}, lokr(4, 6, 3, names="w1 w2"), tmp_path, **LOKR)
    with pytest.raises(RefusedError, match="4x2x3x1: PEFT rotates only linear layers and convolutions with square"):
        merged({f"{MODULE}.weight": oblong}, boft(oblong, 3), tmp_path, **BOFT)


OWN: dict[str, dict[str, Any]] = {
    "AdaLora": {"target_r": 2, "init_r": 4, "tinit": 1, "tfinal": 2, "total_step": 10},
    "LoHa": {"r": 4},
    "LoKr": {"r": 4, "decompose_both": True, "rank_pattern": {"up_proj": 9}, "alpha_pattern": {"q_proj": 5}},
    "Vera": {"r": 16, "bias": "vera_only"},
    "OFT": {"oft_block_size": 32, "bias": "oft_only"},
    "BOFT": {"bias": "boft_only", "boft_block_size": 8, "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("kind", OWN)
def test_peft_merges_to_the_same_bytes(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 131, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=150, attention_bias=True)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "base")
    own = getattr(peft, f"{kind}Config")(target_modules=["q_proj", "up_proj"], **OWN[kind])
    wrapped = peft.get_peft_model(model, own)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape) * 0.1
    wrapped.save_pretrained(tmp_path / "adapter")
    again = type(model).from_pretrained(tmp_path / "base", dtype="auto")
    peft.PeftModel.from_pretrained(again, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "merged")
    with ckptool.open(tmp_path / "adapter") as opened:
        ckptool.save(ckptool.merge_lora(tmp_path / "base", opened), tmp_path / "out")
    result, wanted = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "merged"))
    assert result.keys() == wanted.keys() and [key for key in wanted if not torch.equal(result[key], wanted[key])] == []


OFT_LAYERS = {"target_modules": ["0", "2"], "bias": "all"}
LOKR_LAYERS = {"target_modules": ["0", "1", "2", "3"]}


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("BOFT", {**OFT_LAYERS, "boft_block_size": 0, "boft_block_num": 8}),
        # PEFT adjusts the block size of a layer that cannot be divided by it.
        *(("OFT", {**OFT_LAYERS, "oft_block_size": size}) for size in (7, 32)),
        ("OFT", {**OFT_LAYERS, "oft_block_size": 0, "r": 4}),
        ("OFT", {**OFT_LAYERS, "oft_block_size": 16, "block_share": True}),
        ("OFT", {**OFT_LAYERS, "oft_block_size": 24, "use_cayley_neumann": False}),
        *(("OFT", {**OFT_LAYERS, "oft_block_size": 16, "num_cayley_neumann_terms": n}) for n in (1, 2, 3, 4, 6)),
        ("LoKr", {**LOKR_LAYERS, "r": 40, "alpha": 3, "rank_pattern": {"3": 3}}),
        ("LoKr", {**LOKR_LAYERS, "r": 2}),
        ("LoKr", {**LOKR_LAYERS, "r": 2, "decompose_both": True, "decompose_factor": 8}),
        ("LoKr", {**LOKR_LAYERS, "r": 3, "use_effective_conv2d": True, "alpha_pattern": {"0": 5}}),
        ("LoKr", {**LOKR_LAYERS, "r": 8, "rank_pattern": {"2": 2, "0": 70, "3": 3}, "use_effective_conv2d": True}),
    ],
    ids=str,
)
def test_convolutions_have_the_bytes_of_peft(kind: str, own: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    result, wanted = results_of_both(peft, getattr(peft, f"{kind}Config")(**own), tmp_path)
    assert result.keys() == wanted.keys()
    assert [key for key, value in wanted.items() if not torch.equal(result[key], value)] == []


def results_of_both(peft: Any, config: Any, tmp_path: Path) -> tuple[State, State]:
    """Return what ckptool and PEFT make of a new adapter for convolutions and a linear layer."""
    torch.manual_seed(2)
    layers = torch.nn.Conv2d(32, 70, 3), torch.nn.Conv2d(70, 16, 1), torch.nn.Linear(48, 80), torch.nn.Conv1d(64, 96, 3)
    model = torch.nn.Sequential(*layers)
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    wrapped = peft.get_peft_model(model, config)
    for parameter in wrapped.parameters():
        parameter.data += torch.randn(parameter.shape) / 20 if parameter.requires_grad else 0
    wrapped.save_pretrained(tmp_path / "adapter")
    with ckptool.open(tmp_path / "adapter") as opened:
        ckptool.save(ckptool.merge_lora(tmp_path / "base.safetensors", opened), tmp_path / "out.safetensors")
    return load_file(tmp_path / "out.safetensors"), wrapped.merge_and_unload().state_dict()


@pytest.mark.parametrize("kernel", [(3,), (3, 3), (1, 1)])
@pytest.mark.parametrize("with_core", [False, True])
def test_loha_of_convolutions(with_core: bool, kernel: tuple[int, ...], tmp_path: Path) -> None:
    """PEFT's LoHa: a matrix with a row for each output, or cores for the kernel (``HadaWeightCP`` in loha/layer.py)."""
    torch.manual_seed(11)
    base = torch.randn(OUT, 6, *kernel)
    adapter = {}
    for n in (1, 2):
        side, inner = ((RANK, OUT), 6) if with_core else ((OUT, RANK), 6 * prod(kernel))
        adapter |= {f"{PREFIX}.hada_w{n}_a": torch.randn(side), f"{PREFIX}.hada_w{n}_b": torch.randn(RANK, inner)}
        core = torch.randn(RANK, RANK, *kernel, *(1,) * (2 - len(kernel)))
        adapter |= {f"{PREFIX}.hada_t{n}": core} if with_core else {}
    parts = [{name: adapter[f"{PREFIX}.hada_{name.format(n)}"] for name in ("w{}_a", "w{}_b")} for n in (1, 2)]
    if with_core:
        cores = [adapter[f"{PREFIX}.hada_t{n}"] for n in (1, 2)]
        einsum = "i j k l, j r, i p -> p r k l"
        made = [torch.einsum(einsum, core, p["w{}_b"], p["w{}_a"]) for core, p in zip(cores, parts)]
    else:
        made = [part["w{}_a"] @ part["w{}_b"] for part in parts]
    result = merged({f"{MODULE}.weight": base}, adapter, tmp_path, peft_type="LOHA", r=RANK, alpha=3)
    assert torch.equal(result, base + (made[0] * made[1] * (3 / RANK)).reshape(base.shape))


def test_a_rotation_has_no_weight(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"a weight of 0.5 does not describe"):
        merged({f"{MODULE}.weight": torch.ones(OUT, INNER)}, ROTATED, tmp_path, 0.5, **BOFT)
