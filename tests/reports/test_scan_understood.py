"""Text that a program may evaluate is never weights-only, wherever it is; an ordinary model folder always is."""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickle
import string
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from conftest import sample
from packed_files import Recorded, beside_tensors, tarred, zipped
from safetensors.torch import save, save_file

from ckptool.reports.scan import scan, scan_file
from ckptool.safety.templates import unclear_part

#: Texts on which programs act, besides those of test_scan_text.py: (file name, text).
TEXTS = {
    "Python": ("settings.txt", "import os\nos.system('true')\n"),
    "Python in one line": ("settings.txt", "__import__('os').system('true')"),
    "Python with a space": ("notes.txt", "exec ('import os')"),
    "Python over a line": ("notes.txt", "(exec #dict\n('import os'))"),
    "a renamed function": ("notes.txt", "dict = exec\ndict('import os')"),
    "numbers that are text": ("notes.txt", "x = chr(101) + chr(120)\nexec(x)"),
    "mmengine": ("config", "model = dict(type='ResNet')\nx = eval('1')\n"),
    "MONAI under a plain key": ("config.json", json.dumps({"model_type": "$__import__('os').system('true')"})),
    "YAML tag of hyperpyyaml": ("hyper.yaml", "a: !new:os.system ['true']\n"),
    "logging in INI": ("logging.ini", "[handler_h]\nclass=StreamHandler\nargs=(exec('1'),)\n"),
    "template of a frame": ("chat_template.jinja", "{{ (x|map('upper')).gi_frame.f_builtins['eval']('1') }}"),
    "template of a caller": (
        "x.jinja",
        "{% macro m() %}{{ x[caller()]() }}{% endmacro %}{% call m() %}{% endcall %}",
    ),
    "import after a tab": ("notes.txt", "import\tevil"),
    "attributes of a class": ("notes.txt", "x.__class__.__subclasses__"),
    "a second name": ("notes.txt", "mylib.Linear,os.system"),
}


def _saved(value: Any, new: bool = True) -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.ones(2), "meta": value}, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


#: Files that hold the text: a function of its file name and text, and the name of the file that it makes.
PLACES: dict[str, tuple[Callable[[str, str], bytes], str]] = {
    "zip": (lambda name, text: zipped(member=name, data=text.encode()), "x.zip"),
    "tar": (lambda name, text: tarred(member=f"./{name}", data=text.encode()), "x.tar"),
    "tar.gz": (lambda name, text: gzip.compress(tarred(member=name, data=text.encode())), "x.tar.gz"),
    "torch archive": (lambda name, text: beside_tensors(text.encode(), name), "x.pt"),
    "torch.save": (lambda name, text: _saved({"cfg": text}), "x.pth"),
    "legacy": (lambda name, text: _saved({"cfg": text}, False), "x.pth"),
    "pickle": (lambda name, text: pickle.dumps({"cfg": text}, 2), "x.pkl"),
    "safetensors": (lambda name, text: save({"w": torch.ones(2)}, {"cfg": text}), "x.safetensors"),
    "header": (lambda name, text: save({"w": torch.ones(2)}, {"a": json.dumps({"b": text})}), "x.safetensors"),
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("text", TEXTS)
def test_text_that_may_be_evaluated_is_never_weights_only(text: str, tmp_path: Path) -> None:
    name, content = TEXTS[text]
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert scan_file(str(tmp_path / name))["verdict"] in ("unknown", "program")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert scan(str(folder))["verdict"] == "weights-only"
    (folder / name).write_text(content, encoding="utf-8")
    assert scan(str(folder))["verdict"] in ("unknown", "program")
    for place in sample([*PLACES], 3, first=len(content)):
        write, file = PLACES[place]
        (tmp_path / file).write_bytes(write(name, content))
        report = scan_file(str(tmp_path / file))
        assert report["verdict"] in ("unknown", "program"), (place, report["reasons"])


#: Values of a checkpoint that look a little like code, and are none.
PLAIN_VALUES = (
    *("yolo11n.pt", "nn.ReLU", "encoder.layers", "a photo of a cat (studio light)", "it's 3 epoch(s)", "cuda:1"),
    *("lr=0.1, momentum=0.9", "s3://bucket/file (1).pt", '{"conv_dim": "4", "tags": {"1girl": 3}}'),
    *(string.printable, string.punctuation, "0123456789 !\"#$%&'()*+,-./", "C:\\models\\run"),
    "model = dict(type='ResNet', depth=50)\nlr = 0.1\noptimizer = dict(type='SGD')\n",
    "Python: 3.8.13 (default, Mar 28 2022)\nMKL: Intel(R) Math Kernel Library\nCUDA available: True",
)


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_plain_values_are_data(value: str, tmp_path: Path) -> None:
    for key in ("type", "target", "activation_fn", "cfg", "anything"):
        (tmp_path / "x.pth").write_bytes(_saved({key: value}))
        report = scan_file(str(tmp_path / "x.pth"))
        assert (report["verdict"], report["reasons"]) == ("weights-only", [])


#: Templates of models with what those of test_scan_text.py lack.
TEMPLATES = (
    "{%- macro kind(spec) %}{{ {'string': 'str'}.get(spec.type) }}{{ kind({'type': spec.items.type}) }}{%- endmacro %}"
    "{{ kind(tools[0].parameters) }}",
    "{%- if not (messages[0].content.startswith('<a>') and messages[0].content.endswith('</a>')) %}"
    "{{ raise_exception('roles must alternate (user, assistant)') }}{%- endif %}",
    "{{ strftime_now('%d %b %Y') }}{{ messages[0].content.split('</think>')[-1].lstrip('\\n') }}",
    "{% generation %}{{ messages[0].content is string and messages[0].tool_calls is not none }}{% endgeneration %}",
    "{%- for k, v in tools[0].properties|dictsort %}{{ k }}{{ v['type']|upper }}{%- endfor %}",
    "{#- it's a comment with {{ x.__class__ }} -#}{{ '{% x.__class__ %}' }}{{ {'a': {'b': 1}}|tojson }}",
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_templates_of_models_are_data(template: str, tmp_path: Path) -> None:
    assert unclear_part(template) == ""
    texts = {
        "chat_template.jinja": template,
        "tokenizer_config.json": json.dumps({"chat_template": template, "eos_token": "</s>"}),
        "processor_config.json": json.dumps({"chat_template": [{"name": "default", "template": template}]}),
    }
    for name, text in texts.items():
        (tmp_path / "x.zip").write_bytes(zipped(member=name, data=text.encode()))
        report = scan_file(str(tmp_path / "x.zip"))
        assert report["verdict"] == "weights-only", report["reasons"]


#: Templates that call what is no macro or function of the renderer, or reach for what leads there.
CALLING = (
    "{{ x['a']() }}",
    "{{ (x)() }}",
    "{{ x.system('true') }}",
    "{% set range = x %}{{ range(1) }}",
    "{% macro m(m) %}{{ m() }}{% endmacro %}",
    "{{ x|attr('a') }}",
    "{{ x|map(attribute='a.gi_frame')|list }}",
    "{{ x.f_globals }}",
    "{{ x['\\x5f'] }}",
    "{% for n in ['gi' ~ '_frame'] %}{{ x[n] }}{% endfor %}",
    "{% macro m(n) %}{{ x[n] }}{% endmacro %}{{ m('a' ~ 'b') }}",
    "{% set n %}a{% endset %}{{ x[n] }}",
    "{% set ns = namespace(x) %}{{ ns.a }}",
    "{% for k in x %}{{ x[k] }}{% endfor %}",
    "{% set loop = x %}{{ x[loop.index0] }}",
    "{% set i = 1 %}{% for i in x %}{{ x[i] }}{% endfor %}",
    "{% set ns = namespace(i=0) %}{% set ns.i = x %}{{ x[ns.i] }}",
    "{% import x as y %}{{ y.z() }}",
    "{% raw %}{{ {% endraw %}",
    "{{ kwargs }}",
    "{{ self.x() }}",
    "{{ cycler }}",
    "{{ x",
    "{{ \uff41 }}",
)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("template", CALLING)
def test_other_templates_are_unknown(template: str, tmp_path: Path) -> None:
    assert unclear_part(template)
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    assert scan_file(str(tmp_path / "chat_template.jinja"))["verdict"] == "unknown"


def test_a_folder_from_the_hub_is_weights_only(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    transformers.GenerationConfig(eos_token_id=2).save_pretrained(tmp_path)
    model = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "__import__('os')": 3, "{{": 4}, [("a", "b")])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\p{N}{1,3}| ?[^\s\p{L}]+[\r\n]*"), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATES[0]
    fast.save_pretrained(tmp_path)
    texts = {
        "README.md": "---\nlicense: mit\ntags:\n- x\n---\n# Use\n```\nf(trust_remote_code=True)\n```\n",
        "LICENSE": 'Permission is hereby granted (free of charge): "as is"\n',
        ".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n",
        "vocab.json": json.dumps({"a": 0, "_target_": 1, "exec('x')": 2}),
        "merges.txt": "#version: 0.2\na b\n( )\n! !\n",
        "special_tokens_map.json": json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}),
        "added_tokens.json": json.dumps({"<think>": 5}),
        "trainer_state.json": json.dumps({"best_model_checkpoint": "out/step-1", "log_history": [{"loss": 1.0}]}),
        "preprocessor_config.json": json.dumps({"image_processor_type": "ViTImageProcessor", "size": {"height": 1}}),
        **{"labels.csv": "id,label\n0,cat\n1,dog\n", "tokens.txt": "@@UNKNOWN@@\n<|end|>\n.\n*tags\n"},
        "adapter_config.json": json.dumps({"peft_type": "LORA", "target_modules": ["self_attn.q_proj"], "r": 8}),
        "modules.json": json.dumps([{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokens = gguf_files.entry("tokenizer.ggml.tokens", 9, LISTED)
    (tmp_path / "x.gguf").write_bytes(gguf_files.made([tokens]))
    (tmp_path / "figure.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    report = scan(str(tmp_path))
    assert report["verdict"] == "weights-only", report["files"][0]["reasons"]
    # One name of another library, and it no longer is.
    (tmp_path / "modules.json").write_text(
        texts["modules.json"].replace("sentence_transformers", "evil"), encoding="utf-8"
    )
    assert scan(str(tmp_path))["verdict"] == "unknown"


#: Files that are understood by neither their names nor their contents.
ENCODED = base64.b64encode(pickle.dumps(Recorded(), 2)).decode()
LISTED = struct.pack("<IQ", 8, 2001) + gguf_files.text(CALLING[0]) + gguf_files.text("x") * 2000
UNKNOWN: dict[str, bytes] = {
    **dict.fromkeys(("README.yaml", "license.cfg", "Notice.ini"), b"a: !new:x.y ['true']\n"),
    **dict.fromkeys(("notes.txt", "a.csv", "x.bpe", "y.vocab"), b"print(open('x'))\n"),
    **{".rc": b"run this", "VERSION.cfg": b"a-b", "requirements.txt": b"a-b\n", "ids.txt": ENCODED.encode()},
    "a.json": json.dumps({"model_type": ENCODED, "id2label": {"0": ENCODED.encode().hex()}}).encode(),
    **{"b.json": b'{"model_type": "\\u0067A=="}', "x.gguf": gguf_files.made([gguf_files.entry("x.t", 9, LISTED)])},
    **{"a.raw": bytes(600) + b"x", "x.h5": b"\x89HDF\r\n\x1a\n" + bytes(99), "x.st": save({}, {"x": ENCODED})},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_names_and_plain_keys_vouch_for_no_content(name: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / name).write_bytes(UNKNOWN[name])
    assert scan(str(tmp_path))["verdict"] in ("unknown", "unsafe")
    for packed in (zipped(member=name, data=UNKNOWN[name]), beside_tensors(UNKNOWN[name], name)):
        (tmp_path / "x.pt").write_bytes(packed)
        assert scan_file(str(tmp_path / "x.pt"))["verdict"] in ("unknown", "unsafe")
