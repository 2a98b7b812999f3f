"""``scan`` calls text weights-only if it is understood as data, however it is escaped, encoded and packed.

Each way to write a payload is first given to the real parser, which must read from it what was meant.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import pickle
import re
import tarfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import sample
from crafted_files import by_key
from dcp_folders import archive
from packed_files import beside_tensors, tarred, zipped
from safetensors.torch import save

from ckptool.formats.search.inert import encoding_of
from ckptool.reports.scan import scan_file

yaml = pytest.importorskip("yaml")
jinja2 = pytest.importorskip("jinja2")


class Payload(NamedTuple):
    """Configuration, and the verdict on it; ``named`` is in the reason.

    ``of_files``: only in a file is it more than a name, because no program is known that reads it from a checkpoint.
    """

    value: Any
    named: str
    verdict: str = "unknown"
    of_files: bool = False


PAYLOADS = {
    "hydra": Payload({"model": {"_target_": "os.system", "command": "true"}}, "model._target_", "program"),
    "hydra in a list": Payload({"callbacks": [{"_target_": "torch.nn.Linear"}]}, "_target_", "program"),
    "torchtune": Payload({"model": {"_component_": "os.system"}}, "_component_", "program"),
    "lightning": Payload({"model": {"class_path": "os.system", "init_args": {}}}, "class_path"),
    "latent diffusion": Payload({"model": {"target": "ldm.models.Autoencoder", "params": {}}}, "target", of_files=True),
    "jsonpickle object": Payload({"p": {"py/object": "lib.Thing"}}, "py/object"),
    "jsonpickle reduce": Payload([{"py/reduce": [{"py/function": "os.system"}, {"py/tuple": ["true"]}]}], "py/"),
    "auto_map": Payload({"auto_map": {"AutoModel": "modeling_x.Model"}}, "auto_map", "program"),
    "trust_remote_code": Payload({"trust_remote_code": True}, "trust_remote_code", "program"),
    "custom_pipelines": Payload({"custom_pipelines": {"x": {"impl": "x.Pipeline"}}}, "custom_pipelines", "program"),
    "custom_pipeline": Payload({"custom_pipeline": "someone/pipeline"}, "custom_pipeline", "program"),
    "custom_generate": Payload({"custom_generate": "someone/generate"}, "custom_generate", "program"),
    "modules.json": Payload([{"idx": 0, "name": "0", "path": "", "type": "evil.Model"}], "type", of_files=True),
    "activation": Payload({"activation_function": "evil.run"}, "activation_function", of_files=True),
    "peft": Payload({"auto_mapping": {"base_model_class": "X", "parent_library": "evil"}}, "parent_library"),
    "megatron": Payload({"megatron_core": "evil"}, "megatron_core"),
    "mmengine": Payload({"custom_imports": {"imports": ["evil"]}}, "custom_imports"),
    "mlflow": Payload({"flavors": {"python_function": {"loader_module": "evil.loader"}}}, "loader_module"),
    "gluonts": Payload({"__kind__": "instance", "class": "os.system", "args": ["true"]}, "__kind__"),
    "lightning model": Payload({"hyper_parameters": {"_class_path": "evil.Model"}}, "_class_path"),
    "mmengine source": Payload({"meta": {"cfg": "import os\nos.system('true')\n"}}, "cfg"),
    "MONAI": Payload({"imports": ["$import os"]}, "imports"),
    "custom operators": Payload({"session_options": {"custom_ops_library": "./evil.so"}}, "custom_ops_library"),
    "tokenizer": Payload({"tokenizer_class": "evil.Tokenizer"}, "tokenizer_class", of_files=True),
    "router": Payload({"types": {"a": "evil.Model"}, "structure": {"query": ["a"]}}, "types", of_files=True),
    "YOLOv5": Payload({"backbone": [[-1, 1, "__import__('os').system('true')", [64]]]}, "__import__"),
    "OmegaConf": Payload({"x": "${eval:'1 + 1'}"}, "${eval:"),
    "template": Payload({"chat_template": "{{ ''.__class__.__mro__ }}"}, "__class__"),
    "keras lambda": Payload({"class_name": "Lambda", "config": {"function": ["", None]}}, "class_name", "program"),
    "keras module": Payload({"module": "os", "class_name": "function", "config": "system"}, "class_name"),
    "keras builtin": Payload({"module": "builtins", "class_name": "function", "config": "exec"}, "class_name"),
    "skops": Payload({"__loader__": "OperatorFuncNode", "__class__": "methodcaller"}, "__loader__"),
    "diffusers": Payload(
        {"_class_name": "P", "_diffusers_version": "0.3", "unet": ["evil", "U"]}, "unet", of_files=True
    ),
    "kernel": Payload({"attn_implementation": "someone/kernel"}, "attn_implementation"),
    "stable-baselines3": Payload({"policy": {":type:": "<class>", ":serialized:": "gAR9lC4="}}, ":serialized:"),
    "logging": Payload({"handlers": {"h": {"()": "os.system", "command": "true"}}}, "()"),
    "pyannote": Payload({"preprocessors": {"audio": {"name": "subprocess.Popen", "params": {"shell": 1}}}}, "name"),
    "smolagents": Payload({"tools": [{"name": "t", "code": "import os\nclass T(Tool):\n    pass\n"}]}, "code"),
}

# -- ways to write a value -------------------------------------------------------------------------------------------


def _escaped(text: str, form: str, every: int = 1) -> str:
    """Escape letters in the strings of a JSON text."""

    def one(match: re.Match[str]) -> str:
        letters = enumerate(json.loads(match[0]))
        escaped = (form.format(ord(c)) if c.isascii() and n % every == 0 else json.dumps(c)[1:-1] for n, c in letters)
        return f'"{"".join(escaped)}"'

    return re.sub(r'"(?:[^"\\]|\\.)*"', one, text)


JSON_WAYS: dict[str, Callable[[Any], bytes]] = {
    "plain": lambda value: json.dumps(value).encode(),
    "indented": lambda value: json.dumps(value, indent=2).encode(),
    "compact": lambda value: json.dumps(value, separators=(",", ":")).encode(),
    "escaped": lambda value: _escaped(json.dumps(value), "\\u{:04x}").encode(),
    "every third letter escaped": lambda value: _escaped(json.dumps(value), "\\u{:04X}", 3).encode(),
    "escaped slashes": lambda value: json.dumps(value).replace("/", "\\/").encode(),
    "with a mark": lambda value: b"\xef\xbb\xbf" + json.dumps(value).encode(),
    "UTF-16": lambda value: json.dumps(value).encode("utf-16"),
    "UTF-16, big": lambda value: json.dumps(value).encode("utf-16-be"),
    "UTF-16, little": lambda value: json.dumps(value).encode("utf-16-le"),
    "UTF-32": lambda value: json.dumps(value).encode("utf-32"),
    "behind blank lines": lambda value: b"\n" * 700 + json.dumps(value).encode(),
    "behind long text": lambda value: json.dumps({"notes": "word " * 20_000, "x": value}).encode(),
    "twice": lambda value: b'{"x": 1, "x": %s}' % json.dumps(value).encode(),
}
#: Ways that only YAML reads.
YAML_WAYS: dict[str, Callable[[Any], str]] = {
    "block": lambda value: yaml.safe_dump(value),
    "flow": lambda value: yaml.safe_dump(value, default_flow_style=True),
    "double quotes": lambda value: yaml.safe_dump(value, default_style='"'),
    "single quotes": lambda value: yaml.safe_dump(value, default_style="'"),
    "hexadecimal": lambda value: "a: " + _escaped(json.dumps(value), "\\x{:02x}"),
    "long escapes": lambda value: "- " + _escaped(json.dumps(value), "\\U{:08x}", 2),
    "comment": lambda value: f"# it's a \"comment\n{json.dumps(value)}",
    "behind a document": lambda value: f"---\nx: 1\n---\n{yaml.safe_dump(value)}",
    "tagged": lambda value: re.sub(r'(?<=[{ ])"([^"\\]*)":', r'!!str "\1":', "x: " + json.dumps(value)),
    "anchored": lambda value: re.sub(r'"([^"\\]*)": ', r'"\1": &a ', "x: " + json.dumps(value), count=1),
}


# -- ways to pack a text ---------------------------------------------------------------------------------------------


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "file": lambda data: data,
    "zip": lambda data: zipped(member="config.json", data=data),
    "deflated zip": lambda data: zipped(member="x/settings", data=data, method=zipfile.ZIP_DEFLATED),
    "tar": lambda data: tarred(member="./model_config.yaml", data=data),
    "tar.gz": lambda data: tarred(member="config.yaml", data=data, mode="w:gz"),
    "gzip": gzip.compress,
    "tar in a zip": lambda data: zipped(member="x.nemo", data=tarred(member="model_config.yaml", data=data)),
    "zip in a zip in a tar": lambda data: tarred(
        member="a.zip", data=zipped(member="b.zip", data=zipped(member="data", data=data))
    ),
    "torch archive": beside_tensors,
}


def _scanned(data: bytes, folder: Path, name: str = "download") -> tuple[str | None, str]:
    path = folder / name
    path.write_bytes(data)
    report = scan_file(str(path))
    return report["verdict"], "\n".join(report["reasons"])


def _contains(value: Any, part: Any) -> bool:
    """Return whether a value is, or has anywhere in it, another one."""
    if value == part:
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_contains(item, part) for item in inner)


def packings(name: str) -> list[str]:
    """Return a third of the names in ``PACKED``, other ones for other names; all of them in ``make torture``."""
    return sample([*PACKED], 3, first=zlib.crc32(name.encode()))


@pytest.mark.parametrize("way", JSON_WAYS)
@pytest.mark.parametrize("payload", by_key(PAYLOADS))
def test_json_is_judged_by_its_decoded_keys(payload: Payload, way: str, tmp_path: Path) -> None:
    data = JSON_WAYS[way](payload.value)
    assert _contains(json.loads(data.decode("utf-8-sig") if data[:3] == b"\xef\xbb\xbf" else data), payload.value)
    for pack in packings(f"{way} {payload.named}"):
        verdict, reasons = _scanned(PACKED[pack](data), tmp_path)
        assert (verdict, payload.named in reasons) == (payload.verdict, True), (pack, reasons)


@pytest.mark.parametrize("way", YAML_WAYS)
@pytest.mark.parametrize("payload", by_key(PAYLOADS))
def test_yaml_is_never_weights_only(payload: Payload, way: str, tmp_path: Path) -> None:
    text = YAML_WAYS[way](payload.value)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        for pack in packings(f"{way} {payload.named} {encoding}"):
            verdict, reasons = _scanned(PACKED[pack](text.encode(encoding)), tmp_path)
            assert verdict in ("unknown", "program", "unsafe"), (pack, reasons)


def _in_a_legacy_file(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


HELD: dict[str, Callable[[Any], Any]] = {
    "a value": lambda value: {"state_dict": {"w": torch.ones(2)}, "config": value},
    "an object": lambda value: argparse.Namespace(weight=torch.ones(2), config=value),
    "an ordered dict": lambda value: OrderedDict(w=torch.ones(2), config=[OrderedDict(inner=value)]),
    "JSON": lambda value: {"w": torch.ones(2), "config": json.dumps(value)},
    "JSON in JSON": lambda value: {"w": torch.ones(2), "config": json.dumps({"x": json.dumps(value)})},
    "YAML": lambda value: {"w": torch.ones(2), "config": "# settings\n" + yaml.safe_dump(value, default_style='"')},
}
SAVED: dict[str, Callable[[Any], bytes]] = {
    "torch.save": archive,
    "the legacy format": _in_a_legacy_file,
    "pickle": lambda value: pickle.dumps(value, 2),
    "in an archive": lambda value: tarred(member="x/model.pth", data=archive(value)),
}


@pytest.mark.parametrize("way", HELD)
@pytest.mark.parametrize("payload", by_key(PAYLOADS))
def test_configuration_in_a_pickle_is_judged_like_that_in_a_text(payload: Payload, way: str, tmp_path: Path) -> None:
    if payload.of_files or (way == "YAML" and "keras" in str(payload.value)):
        pytest.skip("nothing reads such names from a checkpoint")
    value = HELD[way](payload.value)
    for name, save_as in SAVED.items():
        verdict, reasons = _scanned(save_as(value), tmp_path)
        if way == "YAML":
            assert verdict in ("unknown", payload.verdict), (name, reasons)
            continue
        assert verdict == payload.verdict, (name, reasons)
        assert payload.named.rpartition(".")[2] in reasons, (name, reasons)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("payload", by_key(PAYLOADS))
def test_metadata_of_safetensors_is_judged_as_the_text_that_it_is(payload: Payload, tmp_path: Path) -> None:
    if payload.of_files:
        pytest.skip("nothing reads such names from a header")
    for way, write in JSON_WAYS.items():
        if "UTF" in way or way == "with a mark":
            continue  # a str has no encoding
        data = save({"w": torch.ones(2)}, {"config": write(payload.value).decode(), "format": "pt"})
        for pack in ("file", "zip", "tar.gz"):
            verdict, reasons = _scanned(PACKED[pack](data), tmp_path)
            assert (verdict, payload.named in reasons) == (payload.verdict, True), (way, pack, reasons)


def test_toml_is_never_weights_only(tmp_path: Path) -> None:
    tomllib = pytest.importorskip("tomllib")
    texts = ('[model]\n_target_ = "os.system"', 'model._target_ = "os.system"', "[model]\n'_target_'= 'os.system'")
    for text in (*texts, 'model = { "_targ\\u0065t_" = "os.system" }'):
        assert tomllib.loads(text) == {"model": {"_target_": "os.system"}}
        for name in ("x.toml", "x.txt", "x", "x.csv"):
            assert _scanned(text.encode(), tmp_path, name)[0] == "unknown", text


# -- tags of YAML ----------------------------------------------------------------------------------------------------

CORE = "tag:yaml.org,2002:"
TAGS = {
    "python/object/apply:os.system": "[true]",
    "python/object/new:os.system": "[true]",
    "python/object:os.system": "{}",
    "python/name:os.system": "''",
    "python/module:os": "''",
}


def _percent(text: str, every: int = 1) -> str:
    return "".join(f"%{ord(char):02x}" if number % every == 0 else char for number, char in enumerate(text))


TAG_WAYS: dict[str, Callable[[str, str], str]] = {
    "short": lambda tag, value: f"a: !!{tag} {value}",
    "percent": lambda tag, value: f"a: !!{_percent(tag)} {value}",
    "verbatim": lambda tag, value: f"a: !<{CORE}{tag}> {value}",
    "verbatim percent": lambda tag, value: f"a: !<{_percent(CORE + tag)}> {value}",
    "handle": lambda tag, value: f"%TAG !e! {CORE}python/\n---\na: !e!{tag[7:]} {value}",
    "handle of half a word": lambda tag, value: f"%TAG !e! {CORE}py\n---\na: !e!{tag[2:]} {value}",
    "primary handle": lambda tag, value: f"%TAG ! {CORE}python/\n---\na: !{tag[7:]} {value}",
    "secondary handle": lambda tag, value: f"%TAG !! {CORE}pyt\n---\na: !!{tag[3:]} {value}",
    "second document": lambda tag, value: f"x: 1\n...\n%TAG !e! {CORE}\n---\na: !e!{tag} {value}",
    "anchored": lambda tag, value: f"a: &x !!{tag} {value}",
    "in a flow": lambda tag, value: f"[x,!!{tag} {value}]",
    "a key": lambda tag, value: f"? !!{tag} {value}\n: x",
    "after a quote that looks like a comment": lambda tag, value: f'["x\n  # ", !!{tag} {value}]',
    "lines of a Mac": lambda tag, value: f"x: 1\ra: !!{tag} {value}\r",
}


@pytest.mark.parametrize("way", TAG_WAYS)
@pytest.mark.parametrize("tag", TAGS)
def test_text_with_tags_is_never_weights_only(tag: str, way: str, tmp_path: Path) -> None:
    text = TAG_WAYS[way](tag, TAGS[tag])
    for encoding in ("utf-8", "utf-16"):
        for pack, packed in PACKED.items():
            assert _scanned(packed(text.encode(encoding)), tmp_path)[0] == "unknown", pack
    if "%" not in text and way != "primary handle":  # a tag in a string is a note; a handle may be any text
        assert _scanned(archive({"x": text}), tmp_path)[0] == "unknown"


# -- templates -------------------------------------------------------------------------------------------------------

#: Templates that reach an attribute with underscores.
REACHING = (
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ ''['_' * 2 ~ 'class' ~ '_' * 2] }}",
    "{{ ''['%s%sclass%s%s'|format('_', '_', '_', '_')] }}",
    "{{ ''['%c%cclass%c%c' % (95, 95, 95, 95)] }}",
    "{{ ''['__ssalc__'|reverse] }}",
    "{{ ''[['__', 'class', '__']|join] }}",
    "{% set u = '_' %}{% set n = u ~ u ~ 'class' ~ u ~ u %}{{ ''[n] }}",
    "{% for n in ['__class__'] %}{{ ''[n] }}{% endfor %}",
    "{{ ''|attr('__class__') }}",
    "{{ ['']|map('attr', '__class__')|list }}",
    "{{ ['']|map(attribute='__class__')|list }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ {'a': {'b': ''.__class__}}}}",
    "{#- it's -#}{{ lipsum.__globals__ }}",
    "{{ ''['_' '_class_' '_'] }}",
    "{{ ['']|groupby('_' '_class_' '_') }}",
    "{{ ['']|map(attribute='_x_class_x_'|replace('x', ''))|list }}",
    "{% set u = '_' %}{% set c = 'class' %}{{ ''[u ~ u ~ c ~ u ~ u] }}",
    "{% set u, c = '_', 'class' %}{{ ''[u + (u + c + u) + u] }}",
    "{% set u = '_' %}{% set n = u + u + 'class' + u + u %}{{ ''[n] }}",
    "{% set ns = namespace(u='_', c='class') %}{{ ''[ns.u ~ ns.u ~ ns.c ~ ns.u ~ ns.u] }}",
    "{% set u %}_{% endset %}{% set n %}{{ u }}{{ u }}class{{ u }}{{ u }}{% endset %}{{ ''[n] }}",
    "{% macro u() %}_{% endmacro %}{% macro c() %}class{% endmacro %}{{ ''[u() ~ u() ~ c() ~ u() ~ u()] }}",
    "{% macro f(n) %}{{ ''[n] }}{% endmacro %}{% set u = 'a_b'[1] %}{{ f(u ~ u ~ 'class' ~ u ~ u) }}",
    "{% set u = dict(_=1)|first %}{{ ''[u ~ u ~ 'class' ~ u ~ u] }}",
)
TEMPLATES = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content']|trim + '<|im_end|>' }}{% endfor %}",
    "{%- set ns = namespace(last=messages|length - 1) -%}{%- for m in messages[::-1] -%}{{ messages[ns.last].role }}"
    "{%- set ns.last = (messages|length - 1) - loop.index0 -%}{%- endfor -%}",
    "{% set content = messages[0].content.split('</think>')[-1].lstrip('\\n') %}{{ content|tojson }}",
    "{{ {'a': {'b': 1}}|tojson }}{# __class__ #}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "{{ messages[0]['content']|replace('-', '_') }}{{ messages[messages|length - 1] if messages else '' }}",
    "{%- set offset = 1 if messages[0]['role'] == 'system' else 0 -%}{{ messages[offset:][0].role }}",
    "{%- set ns = namespace(text='', at=0) -%}{%- set ns.text = ns.text + '<s>' + messages[0].content -%}"
    "{{ ns.text }}{{ messages[ns.at].role }}{{ messages[ns.at + 1].role }}",
    "{%- for key, value in messages[0]|items -%}{{ key ~ '=' ~ value }}{%- endfor -%}",
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join('_') }}",
    "{%- set name = messages[0].content.replace('_', ' ') ~ '.' -%}{{ name.split('_')[0] }}",
    "{%- macro item(x) -%}- {{ x.role ~ ': ' ~ x.content }}{%- endmacro -%}{{ item(messages[0]) }}",
)
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think></think>hi"}]


def _reaches(template: str) -> bool:
    """Render a template as a program without a sandbox does, and return whether it asks for a private attribute."""
    asked: list[str] = []

    class Recording(jinja2.Environment):  # type: ignore[misc,name-defined]
        def getattr(self, obj: Any, attribute: str) -> Any:
            asked.append(attribute)
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            asked.append(str(argument))
            return super().getitem(obj, argument)

    environment = Recording()
    environment.filters["attr"] = lambda obj, name: environment.getattr(obj, name)
    environment.from_string(template).render(messages=MESSAGES, add_generation_prompt=True, loop_index=1)
    return any(name.startswith("_") for name in asked)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("template", REACHING)
def test_a_template_that_reaches_attributes_is_unknown(template: str, tmp_path: Path) -> None:
    assert _reaches(template)
    texts = {
        "chat_template.jinja": template,
        "tokenizer_config.json": json.dumps({"chat_template": template}),
        "processor.json": _escaped(json.dumps({"chat_template": [{"name": "a", "template": template}]}), "\\u{:04x}"),
        "x.yaml": yaml.safe_dump({"chat_template": template}),
    }
    for name, text in texts.items():
        for pack, packed in PACKED.items():
            verdict, reasons = _scanned(packed(text.encode()), tmp_path, name if pack == "file" else "x")
            assert verdict == "unknown", (name, pack, reasons)
    assert _scanned(archive({"chat_template": template}), tmp_path)[0] == "unknown"
    assert _scanned(save({"w": torch.ones(2)}, {"chat_template": template}), tmp_path)[0] == "unknown"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_does_not_is_text(template: str, tmp_path: Path) -> None:
    assert not _reaches(template)
    for name, text in (("x.jinja", template), ("x.json", json.dumps({"chat_template": template}))):
        assert _scanned(text.encode(), tmp_path, name) == (None, ""), name


# -- other files -----------------------------------------------------------------------------------------------------

#: Ordinary files of models, of which nothing is run.
HARMLESS = {
    "config.json": {"rope_scaling": {"type": "linear"}, "auto_map": {}, "trust_remote_code": False},
    "config_of_attention.json": {"activation_function": "gelu_new", "_attn_implementation": "sdpa"},
    "adapter_config.json": {"auto_mapping": None, "megatron_core": "megatron.core", "target_modules": ["q_proj"]},
    "adapter_of_transformers.json": {"auto_mapping": {"parent_library": "transformers.models.llama.modeling_llama"}},
    "adapter_of_a_module.json": {"auto_mapping": {"parent_library": "torch.nn.modules.container"}},
    "modules.json": [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}],
    "dense.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
    "model_index.json": {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.30.0"}
    | {"unet": ["diffusers", "UNet2DConditionModel"], "tokenizer": ["transformers", "CLIPTokenizer"]}
    | {"safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"], "feature_extractor": [None, None]},
    "tokenizer.json": {"model": {"type": "BPE", "vocab": {"_target_": 1, "auto_map": 2, "py/object": 3, "type": 4}}},
    "vocab.json": {"class_name": 1, "__kind__": 2, "trust_remote_code": 3, ":serialized": 4},
    "router_config.json": {"types": {"a": "sentence_transformers.models.Dense"}, "structure": {"query": ["a"]}},
    "generation_config.json": {"custom_generate": None, "do_sample": True},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_ordinary_configuration_is_text(name: str, tmp_path: Path) -> None:
    text = json.dumps(HARMLESS[name], indent=2)
    assert _scanned(text.encode(), tmp_path, name) == (None, "")
    assert _scanned(yaml.safe_dump(HARMLESS[name]).encode(), tmp_path, f"{name}.yaml")[0] == "unknown"
    assert _scanned(zipped(member=name, data=text.encode()), tmp_path, "x.zip") == ("weights-only", "")
    assert _scanned(save({"w": torch.ones(2)}, {"config": text}), tmp_path, "x.safetensors") == ("weights-only", "")
    for held in (HARMLESS[name], text):
        assert _scanned(archive({"w": torch.ones(2), "config": held}), tmp_path, "x.pth") == ("weights-only", "")


@pytest.mark.parametrize("line", ["import os; os.system('true')", "import\tos"])
@pytest.mark.parametrize("start", [b"", b"/some/path\n", b"\xef\xbb\xbf", b"# words\r", b"x\x0c"])
def test_lines_of_a_site_file_are_never_weights_only(line: str, start: bytes, tmp_path: Path) -> None:
    data = start + line.encode() + b"\n"
    for pack, packed in (
        ("file", data),
        ("zip", zipped(member="x.pth", data=data)),
        ("tar.gz", tarred(member="x.pth", data=data, mode="w:gz")),
    ):
        verdict, reasons = _scanned(packed, tmp_path, "distutils-precedence.pth" if pack == "file" else "x")
        assert verdict == "unknown", (pack, reasons)


@pytest.mark.parametrize("name", ["modeling.py", "lib.so", "run.sh", "x.pyc", "native.dll", "tool.exe", "train.gin"])
def test_code_in_an_archive_is_a_program(name: str, tmp_path: Path) -> None:
    for pack, packed in (
        ("zip", zipped(member=name, data=b"import os")),
        ("tar", tarred(member=f"x/{name}", data=b"import os")),
    ):
        verdict, reasons = _scanned(packed, tmp_path)
        assert verdict == "program" and name in reasons, pack


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("m.keras", {"metadata.json": "{}", "config.json": '{"class_name": "Functional", "config": {}}'}),
        ("download", {"metadata.json": '{"keras_version": "3.5.0"}', "config.json": "{}"}),
        ("m.skops", {"schema.json": '{"__class__": "LogisticRegression"}'}),
        ("download", {"model_config.yaml": "a: 1", "model_weights.txt": ""}),
    ],
)
def test_archives_that_are_loaded_by_their_configuration_are_never_weights_only(
    name: str, members: dict[str, str], tmp_path: Path
) -> None:
    out, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive, tarfile.open(fileobj=tarred, mode="w") as tar:
        for member, text in members.items():
            archive.writestr(member, text)
            info = tarfile.TarInfo(f"./{member}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    for data in (out.getvalue(), tarred.getvalue(), gzip.compress(tarred.getvalue())):
        assert _scanned(data, tmp_path, name)[0] == "unknown"
        assert _scanned(zipped(member=name, data=data), tmp_path, "outer.zip")[0] == "unknown"


def test_a_keras_config_in_hdf5_is_read(tmp_path: Path) -> None:
    head = b"\x89HDF\r\n\x1a\n" + bytes(range(256)) * 4
    config = b'{"class_name": "Sequential", "config": {"layers": [{"class_name": "%s", "config": {}}]}}'
    assert _scanned(head + config % b"Lambda" + bytes(500), tmp_path, "m.h5")[0] == "program"
    assert _scanned(head + config % b"Dense" + bytes(500), tmp_path, "m.h5")[0] == "unknown"


def test_text_beyond_what_is_read_is_unknown(tmp_path: Path) -> None:
    text = b'{"words": "' + b"word " * (9 << 20) + b'", "_target_": "os.system"}'
    verdict, reasons = _scanned(text, tmp_path, "x.json")
    assert verdict == "unknown" and "are read" in reasons


def test_base64_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    for value in ("=", "x", ["gAR9lC4="]):
        assert _scanned(json.dumps({"p": {":serialized:": value}}).encode(), tmp_path)[0] == "unknown", value


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-32-le"])
def test_a_character_that_is_cut_at_the_end_is_text(encoding: str) -> None:
    data = ("key: " + "\u00e9\u20ac\U0001f600" * 20).encode(encoding)
    for size in range(40, len(data)):
        assert encoding_of(data[:size]), size
