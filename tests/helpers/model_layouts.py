"""One model's values in the layouts of several libraries, for the law of ``match``.

A family is a model with random values in one layout, and functions that give the same values in other layouts. All
matrices are square where the real model can have square ones, so shapes alone tell as little as possible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

State: TypeAlias = dict[str, torch.Tensor]
Layout: TypeAlias = Callable[[State], State]

WIDTH, HEADS, LAYERS = 8, 2, 3


def renamed(state: Mapping[str, torch.Tensor], *rules: tuple[str, str]) -> State:
    """Return the tensors under other names; each rule is a pattern and its replacement, applied in this order."""
    result = {}
    for name, value in state.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        result[name] = value
    assert len(result) == len(state)
    return result


def mapped(state: State, pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> State:
    """Return the tensors, those changed whose names the pattern matches."""
    return {name: change(value) if re.search(pattern, name) else value for name, value in state.items()}


def fused(state: State, pattern: str, parts: tuple[str, ...], whole: str, axis: int = 0) -> State:
    """Return the tensors with those whose names differ in ``parts`` joined under one name.

    ``pattern`` has one group around the part of a name that is one of ``parts`` and becomes ``whole``.
    """
    result: State = {}
    for name, value in state.items():
        match = re.search(pattern, name)
        if match is None or match[1] not in parts:
            result[name] = value
            continue
        begin, end = match.span(1)
        names = [name[:begin] + part + name[end:] for part in parts]
        result.setdefault(name[:begin] + whole + name[end:], torch.cat([state[one] for one in names], dim=axis))
    return result


def transposed(value: torch.Tensor) -> torch.Tensor:
    return value.T.contiguous() if value.dim() == 2 else value


def rotary_pairs(value: torch.Tensor) -> torch.Tensor:
    """Return the rows of a projection with the pairs of its rotary embedding side by side, as Meta keeps them."""
    halves = value.reshape(HEADS, 2, -1, *value.shape[1:])
    return halves.transpose(1, 2).reshape(value.shape).contiguous()


def by_head(value: torch.Tensor) -> torch.Tensor:
    """Return the rows of fused queries, keys and values ordered by head, as GPT-NeoX and Megatron-LM keep them."""
    sections = value.reshape(3, HEADS, -1, *value.shape[1:])
    return sections.transpose(0, 1).reshape(value.shape).contiguous()


# -- Families: the first layout has the values; the others are made from it


def _values(shapes: Mapping[str, tuple[int, ...]]) -> State:
    torch.manual_seed(7)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def llama() -> State:
    """Llama as transformers names it."""
    square = (WIDTH, WIDTH)
    shapes = {"model.embed_tokens.weight": (16, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": square for part in "qkvo"}
        shapes |= {f"{at}mlp.{part}_proj.weight": square for part in ("gate", "up", "down")}
        shapes |= {f"{at}{norm}.weight": (WIDTH,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return _values(shapes | {"model.norm.weight": (WIDTH,), "lm_head.weight": (16, WIDTH)})


_META = (
    (r"^model\.", ""),
    ("embed_tokens", "tok_embeddings"),
    ("^lm_head", "output"),
    (r"self_attn\.(.)_proj", r"attention.w\1"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.down_proj", "feed_forward.w2"),
    (r"mlp\.up_proj", "feed_forward.w3"),
)


def _fused_llama(state: State) -> State:
    state = fused(state, r"self_attn\.(\w)_proj", ("q", "k", "v"), "qkv")
    return fused(state, r"mlp\.(\w+)_proj", ("gate", "up"), "gate_up")


def _megatron(state: State) -> State:
    state = mapped(_fused_llama(state), "qkv_proj", by_head)
    return renamed(
        state,
        (r"^model\.embed_tokens", "embedding.word_embeddings"),
        (r"^model\.layers", "decoder.layers"),
        (r"^model\.norm", "decoder.final_layernorm"),
        ("^lm_head", "output_layer"),
        (r"self_attn\.qkv_proj", "self_attention.linear_qkv"),
        (r"self_attn\.o_proj", "self_attention.linear_proj"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
        (r"mlp\.gate_up_proj", "mlp.linear_fc1"),
        (r"mlp\.down_proj", "mlp.linear_fc2"),
    )


def gpt2() -> State:
    """GPT-2 as transformers names it, its Conv1D weights as (input, output), its feed-forward square."""
    square = (WIDTH, WIDTH)
    shapes = {"transformer.wte.weight": (16, WIDTH), "transformer.wpe.weight": (WIDTH, WIDTH)}
    for layer in range(LAYERS):
        at = f"transformer.h.{layer}."
        for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            shapes |= {f"{at}{part}.weight": square, f"{at}{part}.bias": (WIDTH,)}
        shapes |= {f"{at}attn.c_attn.weight": (WIDTH, 3 * WIDTH), f"{at}attn.c_attn.bias": (3 * WIDTH,)}
        shapes |= {f"{at}{norm}.{end}": (WIDTH,) for norm in ("ln_1", "ln_2") for end in ("weight", "bias")}
    return _values(shapes | {f"transformer.ln_f.{end}": (WIDTH,) for end in ("weight", "bias")})


def _square_gpt2(state: State) -> State:
    """Return GPT-2 without its fused projections, so that every transpose is square."""
    return {name: value for name, value in state.items() if "c_attn" not in name}


def _linear(state: State) -> State:
    """Return GPT-2 with weights of nn.Linear: (output, input)."""
    return mapped(state, r"\.c_\w+\.weight", transposed)


def vit() -> State:
    """A vision transformer as timm names it, its feed-forward square."""
    shapes: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, WIDTH), "pos_embed": (1, 5, WIDTH)}
    shapes |= {"patch_embed.proj.weight": (WIDTH, 3, 2, 2), "patch_embed.proj.bias": (WIDTH,)}
    for layer in range(LAYERS):
        at = f"blocks.{layer}."
        shapes |= {f"{at}attn.qkv.weight": (3 * WIDTH, WIDTH), f"{at}attn.qkv.bias": (3 * WIDTH,)}
        for part in ("attn.proj", "mlp.fc1", "mlp.fc2"):
            shapes |= {f"{at}{part}.weight": (WIDTH, WIDTH), f"{at}{part}.bias": (WIDTH,)}
        shapes |= {f"{at}{norm}.{end}": (WIDTH,) for norm in ("norm1", "norm2") for end in ("weight", "bias")}
    ends = ("weight", "bias")
    return _values(shapes | {f"norm.{end}": (WIDTH,) for end in ends} | {"head.weight": (5, WIDTH), "head.bias": (5,)})


def _split_qkv(state: State, parts: tuple[str, str, str]) -> State:
    result: State = {}
    for name, value in state.items():
        if ".qkv." in name:
            result |= {name.replace("qkv", part): rows.clone() for part, rows in zip(parts, value.chunk(3))}
        else:
            result[name] = value
    return result


def _hf_vit(state: State) -> State:
    return renamed(
        _split_qkv(state, ("query", "key", "value")),
        ("^cls_token", "vit.embeddings.cls_token"),
        ("^pos_embed", "vit.embeddings.position_embeddings"),
        (r"^patch_embed\.proj", "vit.embeddings.patch_embeddings.projection"),
        (r"^blocks\.", "vit.encoder.layer."),
        (r"attn\.(query|key|value)", r"attention.attention.\1"),
        (r"attn\.proj", "attention.output.dense"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
        ("norm1", "layernorm_before"),
        ("norm2", "layernorm_after"),
        (r"^norm\.", "vit.layernorm."),
        ("^head", "classifier"),
    )


def resnet() -> State:
    """Residual blocks as torchvision names them, all of one width."""
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (WIDTH, 3, 3, 3)}
    norms = ["bn1"]
    for stage in range(1, 4):
        for block in range(2):
            at = f"layer{stage}.{block}."
            shapes |= {f"{at}conv{number}.weight": (WIDTH, WIDTH, 3, 3) for number in (1, 2)}
            norms += [f"{at}bn{number}" for number in (1, 2)]
    for norm in norms:
        shapes |= {f"{norm}.{end}": (WIDTH,) for end in ("weight", "bias", "running_mean", "running_var")}
    return _values(shapes | {"fc.weight": (WIDTH, WIDTH), "fc.bias": (WIDTH,)})


def _hf_resnet(state: State) -> State:
    return renamed(
        state,
        (r"^layer(\d)\.", lambda match: f"resnet.encoder.stages.{int(match[1]) - 1}.layers."),  # type: ignore[arg-type]
        (r"\.conv(\d)\.", lambda match: f".layer.{int(match[1]) - 1}.convolution."),  # type: ignore[arg-type]
        (r"\.bn(\d)\.", lambda match: f".layer.{int(match[1]) - 1}.normalization."),  # type: ignore[arg-type]
        (r"^conv1\.", "resnet.embedder.embedder.convolution."),
        (r"^bn1\.", "resnet.embedder.embedder.normalization."),
        (r"^fc\.", "classifier.1."),
    )


def decoder() -> State:
    """The upsampling half of a VAE as diffusers names it: every block has one shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in range(4):
        for number in range(2):
            at = f"decoder.up_blocks.{block}.resnets.{number}."
            shapes |= {f"{at}conv{one}.weight": (WIDTH, WIDTH, 3, 3) for one in (1, 2)}
            shapes |= {f"{at}conv{one}.bias": (WIDTH,) for one in (1, 2)}
            shapes |= {f"{at}norm{one}.{end}": (WIDTH,) for one in (1, 2) for end in ("weight", "bias")}
    return _values(shapes | {"decoder.conv_out.weight": (3, WIDTH, 3, 3), "decoder.conv_out.bias": (3,)})


def _reversed_blocks(state: State) -> State:
    """Return the decoder as latent diffusion names it: its blocks are counted from the other end."""
    return renamed(
        state,
        (r"up_blocks\.(\d)", lambda match: f"up.{3 - int(match[1])}"),  # type: ignore[arg-type]
        ("resnets", "block"),
    )


def experts() -> State:
    """The experts of Mixtral, one tensor for each."""
    shapes = {f"model.layers.{n}.block_sparse_moe.gate.weight": (4, WIDTH) for n in range(LAYERS)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.block_sparse_moe.experts."
        shapes |= {f"{at}{expert}.w{n}.weight": (WIDTH, WIDTH) for expert in range(4) for n in (1, 2, 3)}
    return _values(shapes)


def _stacked_experts(state: State) -> State:
    result: State = {}
    for name, value in state.items():
        layer = re.search(r"layers\.(\d+)", name)
        assert layer is not None
        at = f"model.layers.{layer[1]}."
        if ".gate." in name:
            result[at + "mlp.gate.weight"] = value
            continue
        old = at + "block_sparse_moe.experts."
        gate_up = [torch.cat([state[f"{old}{expert}.w{n}.weight"] for n in (1, 3)]) for expert in range(4)]
        result[at + "mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        result[at + "mlp.experts.down_proj"] = torch.stack([state[f"{old}{n}.w2.weight"] for n in range(4)])
    return result


def bert() -> State:
    """BERT as transformers names it, its feed-forward square."""
    shapes = {f"bert.embeddings.{name}_embeddings.weight": (WIDTH, WIDTH) for name in ("word", "position")}
    for layer in range(LAYERS):
        at = f"bert.encoder.layer.{layer}."
        for part in (*(f"attention.self.{one}" for one in ("query", "key", "value")), "attention.output.dense"):
            shapes |= {f"{at}{part}.weight": (WIDTH, WIDTH), f"{at}{part}.bias": (WIDTH,)}
        for part in ("intermediate.dense", "output.dense"):
            shapes |= {f"{at}{part}.weight": (WIDTH, WIDTH), f"{at}{part}.bias": (WIDTH,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{at}{part}.{end}": (WIDTH,) for end in ("weight", "bias")}
    return _values(shapes)


def _torch_encoder(state: State) -> State:
    """Return BERT as ``nn.TransformerEncoder`` names it."""
    state = {name: value for name, value in state.items() if ".embeddings." not in name}
    state = fused(state, r"attention\.self\.(\w+)\.", ("query", "key", "value"), "qkv")
    return renamed(
        state,
        (r"^bert\.encoder\.layer", "layers"),
        (r"attention\.self\.qkv\.", "self_attn.in_proj_"),
        (r"attention\.output\.dense", "self_attn.out_proj"),
        (r"attention\.output\.LayerNorm", "norm1"),
        (r"intermediate\.dense", "linear1"),
        (r"output\.dense", "linear2"),
        (r"output\.LayerNorm", "norm2"),
    )


#: Families of layouts with the same values: the model, and each layout as a function of it.
FAMILIES: dict[str, tuple[Callable[[], State], dict[str, Layout]]] = {
    "llama": (
        llama,
        {
            "hf": dict,
            "meta": lambda state: renamed(mapped(state, "[qk]_proj", rotary_pairs), *_META),
            "fused": _fused_llama,
            "megatron": _megatron,
            "rotary pairs": lambda state: mapped(state, "[qk]_proj", rotary_pairs),
        },
    ),
    "gpt2": (
        gpt2,
        {
            "hf": dict,
            "no prefix": lambda state: renamed(state, (r"^transformer\.", "")),
            "linear": _linear,
            "linear, no prefix": lambda state: renamed(_linear(state), (r"^transformer\.", "")),
            "split": lambda state: {
                name: value
                for key, whole in state.items()
                for name, value in (
                    ((key.replace("c_attn", part), one.clone()) for part, one in zip("qkv", whole.chunk(3, dim=-1)))
                    if "c_attn" in key
                    else ((key, whole),)
                )
            },
        },
    ),
    "square gpt2": (
        lambda: _square_gpt2(gpt2()),
        {
            "hf": dict,
            "linear": _linear,
            "linear, no prefix": lambda state: renamed(_linear(state), (r"^transformer\.", "")),
        },
    ),
    "projections": (lambda: {name: value for name, value in llama().items() if "proj" in name}, {"hf": dict}),
    "vit": (
        vit,
        {
            "timm": dict,
            "hf": _hf_vit,
            "by head": lambda state: mapped(state, "qkv", by_head),
            "keys first": lambda state: mapped(state, "qkv", lambda value: value.roll(WIDTH, 0)),
        },
    ),
    "resnet": (
        resnet,
        {
            "torchvision": dict,
            "hf": _hf_resnet,
            "gamma": lambda state: renamed(state, (r"(bn\d)\.weight", r"\1.gamma"), (r"(bn\d)\.bias", r"\1.beta")),
        },
    ),
    "decoder": (decoder, {"diffusers": dict, "reversed": _reversed_blocks}),
    "experts": (experts, {"each": dict, "stacked": _stacked_experts}),
    "bert": (bert, {"hf": dict, "no prefix": lambda state: renamed(state, (r"^bert\.", "")), "torch": _torch_encoder}),
}


# -- What may be wrong under the right names, and what is always harmless


def _numbers(state: State, change: Callable[[int, int], int]) -> State:
    """Return the values with other layer numbers: ``change`` gives the number from it and the count of layers."""
    pattern = re.compile(r"(?:layers?|h|blocks|up_blocks|up|stages)\.(\d+)|(?<=layer)(\d)(?=\.)")
    found = [int(match[1] or match[2]) for name in state if (match := pattern.search(name))]
    first, count = min(found, default=0), max(found, default=0) + 1

    def moved(match: re.Match[str]) -> str:
        group = 1 if match[1] else 2
        old = int(match[group])
        begin, end = (at - match.start() for at in match.span(group))
        return match[0][:begin] + str(first + change(old - first, count - first)) + match[0][end:]

    values = {pattern.sub(moved, name, count=1): value for name, value in state.items()}
    return {name: values[name] for name in state}


def _swapped(state: State, one: str, other: str) -> State:
    """Return the values with those of two parts of a module exchanged where they have one shape."""
    result = dict(state)
    for name in state:
        there = re.sub(one, other, name)
        if there != name and there in state and state[there].shape == state[name].shape:
            result[name], result[there] = state[there], state[name]
    return result


def _shuffled(value: torch.Tensor, axis: int) -> torch.Tensor:
    order = torch.randperm(value.shape[axis], generator=torch.Generator().manual_seed(3))
    return value.index_select(axis, order)


#: Values in other places, under names that stay: nothing may claim that they fit.
REARRANGED: dict[str, Layout] = {
    "layers reversed": lambda state: _numbers(state, lambda number, count: count - 1 - number),
    "layers moved by one": lambda state: _numbers(state, lambda number, count: (number + 1) % count),
    "queries and keys exchanged": lambda state: _swapped(
        _swapped(state, r"\.(q|wq)_proj", ".k_proj"), r"\.query\.", ".key."
    ),
    "up and gate exchanged": lambda state: _swapped(_swapped(state, "gate_proj", "up_proj"), "fc1", "fc2"),
    "squares transposed": lambda state: {
        name: transposed(value) if value.dim() == 2 and value.shape[0] == value.shape[1] else value
        for name, value in state.items()
    },
    "one square transposed": lambda state: {
        name: transposed(value) if value.shape == (WIDTH, WIDTH) and ".1." in name and "c_proj" in name else value
        for name, value in state.items()
    },
    "rows shuffled": lambda state: {
        name: _shuffled(value, 0) if value.dim() > 1 and ".1." in name else value for name, value in state.items()
    },
    "columns shuffled": lambda state: {
        name: _shuffled(value, 1) if value.dim() > 1 and ".1." in name else value for name, value in state.items()
    },
    "a vector shuffled": lambda state: {
        name: _shuffled(value, 0) if value.dim() == 1 and ".1." in name else value for name, value in state.items()
    },
}

#: What training does around a state dict: a fit is found in spite of it.
HARMLESS: dict[str, Callable[[State], object]] = {
    "plain": dict,
    "parallel": lambda state: {f"module.{name}": value for name, value in state.items()},
    "wrapped": lambda state: {"state_dict": {f"model.{name}": value for name, value in state.items()}, "epoch": 3},
    "keys in another order": lambda state: dict(sorted(state.items(), reverse=True)),
}
