"""resize against torch, and against ``resize_token_embeddings`` of transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from command_line import say
from conftest import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_checks import saved

import ckptool
from ckptool.base.errors import RefusedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAME, HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: What transformers adds to the mean.
NOISE = 1e-4


def resized(state: Any, folder: Path, vocab: int, **how: Any) -> Any:
    path = saved(state, folder / "in.pth")
    with ckptool.open(path) as checkpoint:
        ckptool.save(ckptool.resize(checkpoint, vocab, **how), folder / "out.pth", force=True)
    return oracle.load(folder / "out.pth")


def naive(tensor: torch.Tensor, rows: int, fill: str) -> torch.Tensor:
    if rows == len(tensor):
        return tensor
    if rows < len(tensor):
        return torch.empty(rows, *tensor.shape[1:], dtype=tensor.dtype).copy_(tensor[:rows])
    mean = tensor.double().mean(0).to(tensor.dtype) if fill == "mean" else torch.zeros_like(tensor[0])
    return torch.cat([tensor, mean.expand(rows - len(tensor), *tensor.shape[1:])])


LAYOUTS = ("plain", "strided", "part")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.integers(1, 9), st.integers(1, 12), st.sampled_from([1, 4, 8]), st.sampled_from(["mean", "zero"]),
       st.sampled_from(DTYPES), st.sampled_from(list(LAYOUTS)), st.booleans(), st.booleans())  # fmt: skip
def test_rows_are_those_of_torch(
    old: int, vocab: int, multiple: int, fill: str, dtype: torch.dtype, layout: str, tied: bool, legacy: bool
) -> None:
    torch.manual_seed(old * 100 + vocab)
    # Sums of these numbers are exact, in any order.
    table = {
        "plain": torch.randint(-8, 8, (old, 3)).to(dtype),
        "strided": torch.randint(-8, 8, (3, old)).to(dtype).t(),
        "part": torch.randint(-8, 8, (old + 4, 3)).to(dtype)[2 : 2 + old],
    }[layout]
    head = table if tied else torch.randint(-8, 8, (old, 5)).to(dtype)
    bias = torch.arange(float(old))
    state = {NAME: table, HEAD: head, "lm_head.bias": bias, "norm.weight": torch.ones(old)}
    rows = -(-vocab // multiple) * multiple
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(state, folder / "in.pth", _use_new_zipfile_serialization=not legacy)
        with ckptool.open(folder / "in.pth") as checkpoint:
            ckptool.save(ckptool.resize(checkpoint, rows, fill=fill), folder / "out.pth")  # type: ignore[arg-type]
        found = oracle.load(folder / "out.pth")
    assert list(found) == list(state)
    for key in (NAME, HEAD, "lm_head.bias"):
        way = "zero" if tied and key == "lm_head.bias" else fill
        assert oracle.difference(naive(state[key], rows, way), found[key]) == "", key
    assert torch.equal(found["norm.weight"], state["norm.weight"])
    assert (found[NAME].data_ptr() == found[HEAD].data_ptr()) is tied


def model(kind: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "BartForConditionalGeneration":
        sizes |= {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
        sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = getattr(transformers, kind.partition("For")[0].replace("LMHeadModel", "") + "Config")
    made = getattr(transformers, kind)(config(**(sizes | more)))
    for parameter in made.parameters():
        parameter.data.normal_(std=0.5)
    return made


MODELS = {
    "LlamaForCausalLM": {"tie_word_embeddings": False},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "PhiForCausalLM": {},
    "BartForConditionalGeneration": {},
}


@pytest.mark.parametrize("vocab", [45, 33])
@pytest.mark.parametrize("kind", MODELS)
def test_models_are_resized_as_transformers_does(kind: str, vocab: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    own = model(kind, **MODELS[kind])
    own.save_pretrained(tmp_path / "in")
    before = {name: value.clone() for name, value in own.state_dict().items()}
    own.resize_token_embeddings(vocab)
    said = say("resize", tmp_path / "in", str(vocab), "-o", tmp_path / "out")
    assert said.code == 0, said.all
    found, info = getattr(transformers, kind).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert found.config.vocab_size == own.config.vocab_size == vocab
    theirs = own.state_dict()
    assert found.state_dict().keys() == theirs.keys()
    for name, value in found.state_dict().items():
        assert value.shape == theirs[name].shape
        old = value.flatten()[: before[name].numel()]
        assert torch.equal(old, before[name].flatten()[: len(old)]), name
        assert torch.allclose(value, theirs[name], rtol=0, atol=NOISE), name


def test_a_flipped_bit_in_a_row_that_is_read_is_found(tmp_path: Path) -> None:
    state = {NAME: torch.randn(50, 64)}
    path = saved(state, tmp_path / "in.pth")
    data = bytearray(path.read_bytes())
    data[data.index(state[NAME].numpy().tobytes()) + 40 * 64 * 4] ^= 1
    path.write_bytes(data)
    for vocab in ("60", "30"):
        said = say("resize", path, "--vocab", vocab, "-o", tmp_path / "out.pth")
        assert said.code == 3 and not (tmp_path / "out.pth").exists(), said.all


REFUSED: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no embedding": ({"fc.weight": torch.ones(4, 4)}, "no tensor has the name of a token embedding"),
    "two sizes": ({NAME: torch.ones(4, 4), HEAD: torch.ones(5, 4)}, "has 4 rows and 'lm_head.weight' 5"),
    "integers": ({NAME: torch.ones(4, 4, dtype=torch.int8)}, "is int8: only plain floating-point"),
    "packed head": ({NAME: torch.ones(4, 4), "lm_head.qweight": torch.ones(4, 4)}, "lm_head.qweight"),
    "scaled": ({NAME: torch.ones(4, 4), f"{NAME}_scale": torch.ones(1)}, "as quantized weights are"),
    "no rows": ({NAME: torch.ones(0, 4)}, "has no rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_resized_is_refused(name: str, tmp_path: Path) -> None:
    state, message = REFUSED[name]
    with pytest.raises(RefusedError, match=message):
        resized(state, tmp_path, 8)


def test_views_of_one_storage_are_refused(tmp_path: Path) -> None:
    whole = torch.randn(10, 4)
    with pytest.raises(RefusedError, match="shares its storage with other tensors"):
        resized({NAME: whole[:6], "other.weight": whole[6:]}, tmp_path, 8)
