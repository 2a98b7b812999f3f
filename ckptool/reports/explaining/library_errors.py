"""Errors of safetensors, transformers, diffusers, PEFT, DeepSpeed and torch.distributed. See ``known_errors``."""

from __future__ import annotations

from typing import Final

from ...base.steps import command, suggested_output
from .file_answers import (
    folder_answer,
    index_answer,
    meta_answer,
    metadata_answer,
    missing_key_answer,
    named_answer,
    quantized_answer,
    safetensors_answer,
    safetensors_copy,
)
from .finders import DAMAGE, FILE, KEYS, KnownError, converted, edited, either, raised, searched, shown

LIBRARY_ERRORS: Final = (
    KnownError(
        "safetensors-header",
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "The file is not safetensors, whatever its name says: a checkpoint of torch.save, a Git LFS pointer, or a web "
        "page. convert makes safetensors of a checkpoint, and names anything else.",
        searched(
            r"HeaderToo(?:Large|Small)|InvalidHeader(?:Deserialization|Length|Start)?\b"
            r"|(?i:header too (?:large|small)|invalid (?:UTF-8 in )?header)"
        ),
        converted,
        """\
from safetensors.torch import save_file
with open("model.safetensors", "rb") as file:
    save_file(torch.load(file, map_location="cpu"), "model.2.safetensors")""",
        (
            "Error while deserializing header: header too large",
            "Error while deserializing header: InvalidHeaderDeserialization",
            "Error while deserializing header: HeaderTooSmall",
        ),
        "model.safetensors",
        answer=safetensors_answer,
    ),
    KnownError(
        "safetensors-cut",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "The end of the file is missing: its header names more bytes than there are. Get the file again, or save the "
        "tensors that are whole.",
        searched(r"MetadataIncompleteBuffer|incomplete metadata, file not fully covered"),
        edited("salvage", word="saved"),
        "",
        ("Error while deserializing header: incomplete metadata, file not fully covered",),
        "model.safetensors",
        topic=DAMAGE,
    ),
    KnownError(
        "safetensors-metadata",
        "OSError: The safetensors archive passed at model.safetensors does not contain the valid metadata. Make sure "
        "you save your model with the `save_pretrained` method.",
        "transformers wants the header of the file to name the framework, and save_file writes that only on request.",
        either(
            searched(r"safetensors archive passed at .* does not contain the valid metadata"),
            raised(r"'NoneType' object has no attribute 'get'", r"safetensors|metadata|modeling_utils"),
        ),
        edited("convert", word="pt", metadata="format=pt"),
        """\
from safetensors.torch import load_file, save_file
save_file(load_file("model.safetensors"), "model.pt.safetensors", {"format": "pt"})""",
        ("AttributeError: 'NoneType' object has no attribute 'get'",),
        "model.safetensors",
        answer=metadata_answer,
    ),
    KnownError(
        "shared-memory",
        "RuntimeError: Some tensors share memory, this will lead to duplicate memory on disk and potential differences "
        "when loading them again",
        "safetensors holds no tensor twice, and tied weights are one tensor under two names. Save the model with "
        "torch.save, and let convert keep one of the names.",
        searched(r"Some tensors share memory|tensors sharing memory|share the same storage|shared tensors"),
        lambda path, details: command(
            "convert", path, output=suggested_output(path, extension=".safetensors"), tied="keep-first"
        ),
        'from safetensors.torch import save_model\nsave_model(model, "model.safetensors")',
        answer=safetensors_copy,
    ),
    KnownError(
        "non-contiguous",
        "ValueError: You are trying to save a non contiguous tensor: `layer.weight` which is not allowed.",
        "safetensors holds only tensors whose elements lie in order, and this one is a view, such as a transpose. Save "
        "the model with torch.save: convert writes the elements in order.",
        searched(r"trying to save a non[- ]contiguous tensor"),
        converted,
        """\
from safetensors.torch import save_file
save_file({key: value.contiguous() for key, value in state.items()}, "model.safetensors")""",
        answer=safetensors_copy,
    ),
    KnownError(
        "not-a-tensor",
        "ValueError: Key `state_dict` is invalid, expected torch.Tensor but received <class 'dict'>",
        "safetensors holds only tensors, and the file is a whole training run. convert writes its state dict.",
        searched(r"Key `?(?P<name>[^`\s]+)`? is invalid, expected torch\.Tensor but received"),
        converted,
        """\
from safetensors.torch import save_file
save_file(torch.load("model.pth", map_location="cpu")["state_dict"], "model.safetensors")""",
        answer=safetensors_copy,
    ),
    KnownError(
        "vulnerability",
        "ValueError: Due to a serious vulnerability issue in `torch.load`, even with `weights_only=True`, we now "
        "require users to upgrade torch to at least v2.6 in order to use the function.",
        "transformers loads a .bin file only with torch 2.6 or later. It loads safetensors with any torch.",
        searched(r"serious vulnerability issue in `?torch\.load"),
        converted,
        """\
from safetensors.torch import save_file
state = torch.load("pytorch_model.bin", map_location="cpu")
save_file(state, "pytorch_model.safetensors", {"format": "pt"})""",
        (),
        "pytorch_model.bin",
        answer=safetensors_answer,
    ),
    KnownError(
        "unable-to-load",
        "OSError: Unable to load weights from pytorch checkpoint file for 'pytorch_model.bin' at 'pytorch_model.bin'.",
        "transformers says this of every file that torch.load refuses: most often it is a Git LFS pointer, or its end "
        "is missing. inspect says which.",
        searched(
            r"Unable to load weights from (?:pytorch )?checkpoint file|Unable to locate the file .* which is necessary"
        ),
        shown("inspect"),
        "",
        ("ValueError: Unable to locate the file model.bin which is necessary to load this pretrained model.",),
        "pytorch_model.bin",
        topic=DAMAGE,
    ),
    KnownError(
        "no-weights-file",
        "OSError: Error no file named pytorch_model.bin, model.safetensors, tf_model.h5, model.ckpt.index or "
        "flax_model.msgpack found in directory model.",
        "transformers and diffusers look for weights under fixed names, such as model.safetensors, and the folder has "
        "none of them: the download is not complete, the weights are in another folder, or have another name.",
        searched(r"Error no file named .* found in directory"),
        shown("inspect"),
        example="model",
        answer=named_answer,
    ),
    KnownError(
        "index-metadata",
        "KeyError: 'metadata'",
        "transformers reads 'metadata' in the index of the shards, and the index has none. repack writes a new index.",
        searched(r"KeyError: 'metadata'"),
        edited("repack", word="clean"),
        example="model",
        answer=index_answer,
    ),
    KnownError(
        "quantized",
        "ValueError: Supplied state dict for layers.0.mlp.down_proj.weight does not contain `bitsandbytes__*` and "
        "possibly other `quantized_stats` components.",
        "The model is built as quantized, and the file has plain weights, or only some parts of quantized ones. Load "
        "it without load_in_4bit, or save it with save_pretrained of a quantized model.",
        searched(r"does not contain `?bitsandbytes__|quantized_stats`? components"),
        shown("keys"),
        example="model.safetensors",
        topic=KEYS,
    ),
    KnownError(
        "gguf-quantized",
        "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.weight_scale_inv'",
        "The model is quantized, and {key} is part of a quantized weight. The converter needs plain weights: give it "
        "the model before it was quantized, or dequantize it with the library that quantized it.",
        searched(
            r"Can ?not map tensor '(?P<key>[^'\n]*(?:_scale_inv|\.SCB|\.absmax|\.quant_map|\.quant_state\.[^'\n]*"
            r"|\.qweight|\.qzeros|\.scales|\.g_idx|\.weight_(?:packed|scale|scale_2|shape|global_scale|format)"
            r"|_blocks|_scales|\._scale|_qdata|\.input_scale))'"
        ),
        shown("inspect"),
        alike=(
            "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.SCB'",
            "ValueError: Can not map tensor 'model.layers.0.mlp.down_proj.weight.absmax'",
            "ValueError: Can not map tensor 'model.layers.0.self_attn.q_proj.qweight'",
        ),
        example="model.safetensors",
        topic=KEYS,
        answer=quantized_answer,
    ),
    KnownError(
        "meta-tensor",
        "NotImplementedError: Cannot copy out of meta tensor; no data!",
        "A parameter of the model still is on the device meta, without values: the file has no value for it, or "
        "load_state_dict was called without assign=True.",
        searched(r"Cannot copy out of meta tensor|copying from a non-meta parameter in the checkpoint to a meta"),
        shown("inspect"),
        'model.load_state_dict(torch.load("model.pth", map_location="cpu"), assign=True)',
        ("UserWarning: for fc.weight: copying from a non-meta parameter in the checkpoint to a meta parameter",),
        topic=FILE._replace(codes=FILE.codes | {"meta"}),
        answer=meta_answer,
    ),
    KnownError(
        "zero-to-fp32",
        "ValueError: Expected 8 of '*_optim_states.pt' under 'global_step500' but found 4 files. Possibly due to an "
        "overwrite of an old checkpoint, or a checkpoint didn't get saved by one or more processes.",
        "zero_to_fp32.py did not find what it expects in the folder of DeepSpeed: files of some ranks are missing, are "
        "left from another save, or belong to a stage that it does not know. inspect says which; convert reads every "
        "stage.",
        searched(
            r"Expected \d+ of '?\*_optim_states|consumed \d+ numels out of \d+|unknown zero stage|"
            r"is not a zero checkpoint|can't find \S*_(?:optim|model)_states"
            r"|_model_states\.pt' doesn't exist|fp16 module state dict is missing"
            r"|Unable to find 'latest' file|can't find files in directory"
        ),
        lambda path, details: command("convert", path, output=suggested_output(path, extension=".safetensors")),
        "",
        (
            "ValueError: consumed 255381772 numels out of 255381776 - something is wrong",
            "ValueError: unknown zero stage 0",
        ),
        "checkpoint",
        answer=folder_answer,
    ),
    KnownError(
        "zero-world-size",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but "
        "the current world size is 16. Automatic adjustment of ZeRO's optimizer state partitioning with a new world "
        "size is not currently supported.",
        "DeepSpeed resumes only with the number of GPUs that saved the optimizer. Start with that number, or begin "
        "from the weights alone: convert joins them.",
        searched(r"used a DP world size of \d+ but the current world size is \d+"),
        lambda path, details: command("convert", path, output=suggested_output(path, extension=".safetensors")),
        "",
        (),
        "checkpoint",
        answer=folder_answer,
    ),
    KnownError(
        "dcp-missing-key",
        "RuntimeError: Missing key in checkpoint state_dict: model.weight.",
        "The folder of torch.distributed.checkpoint has other names than the state dict to fill, such as {name}. keys "
        "lists its names, and rename changes them.",
        searched(r"Missing key in checkpoint state_dict: (?P<name>[^\s,]*[^\s,.])"),
        shown("keys"),
        """\
from torch.distributed.checkpoint import FileSystemReader
print(*FileSystemReader("checkpoint").read_metadata().state_dict_metadata, sep="\\n")""",
        (),
        "checkpoint",
        topic=KEYS,
        answer=missing_key_answer,
    ),
    KnownError(
        "old-tokenizers",
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 250373 column 3",
        "tokenizer.json is newer than your tokenizers, and the weights are not the cause. Upgrade it with pip install "
        "-U tokenizers transformers.",
        searched(r"did not match any variant of untagged enum (?:ModelWrapper|PyPreTokenizerTypeWrapper)"),
        shown("inspect"),
        example="model",
        topic=FILE._replace(
            absent="The message is about tokenizer.json, which is newer than your tokenizers: upgrade it with pip "
            "install -U tokenizers transformers"
        ),
    ),
    KnownError(
        "vocabulary-index",
        "IndexError: index out of range in self",
        "An embedding has no row with this number: the tokenizer has more tokens than the model, or the text is longer "
        "than its positions. keys shows the rows; ckptool resize adds some, up to len(tokenizer).",
        searched(r"index out of range in self|indexSelectLargeIndex.*srcIndex < srcSelectDimSize"),
        shown("keys"),
        example="model",
        topic=KEYS,
    ),
    KnownError(
        "dcp-failed",
        "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0, 1])",
        "A rank could not read or write its part of the folder. The error of that rank stands below this line: explain "
        "its last line. inspect says whether files are missing.",
        searched(r"CheckpointException ranks:"),
        shown("inspect"),
        example="checkpoint",
    ),
)
