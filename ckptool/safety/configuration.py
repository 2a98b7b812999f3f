"""Configuration that makes a loader run code: the key or tag, the library that loads it, and the evidence.

``RULES`` is the table. ``text_findings`` and ``mapping_findings`` apply it to a text and to the metadata of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from ..base.lazy import regex
from ..base.records import NamedTuple
from ..base.text import cut, quoted, words
from .documents import NUMBER, UNSEEN, LooseItem, Nested, Unseen, loose_items, read_json, tags, unescaped
from .outcomes import PROGRAM, UNKNOWN
from .templates import TOO_LONG, is_template, reached_attribute

#: Maximum depth of texts within texts. JSON inside a JSON file's metadata occurs; deeper nesting is hostile.
_MAX_DEPTH: Final = 4
#: Maximum number of findings listed for one text.
_MAX_FINDINGS: Final = 50
_TOO_DEEP: Final = f"texts within texts more than {_MAX_DEPTH} deep are not followed"


class ActivePart(NamedTuple):
    """A key, tag or line that makes a loader run code: ``verdict`` is PROGRAM, or UNKNOWN if that is uncertain.

    ``keys`` are the paths that lead to it, one for each nested text. ``payload`` has bytes from base64 that a loader
    unpickles; they must be judged separately.
    """

    message: str
    verdict: str = PROGRAM
    payload: bytes = b""
    keys: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The finding as a sentence: 'key "model._target_" (os.system): ...'."""
        return f"key {quoted(cut(' > '.join(self.keys), 120))}{self.message}" if self.keys else self.message


class Rule(NamedTuple):
    """Keys, and when their values are dangerous.

    ``names`` gets the value and its whole object (empty in text that is not JSON). It returns the part of the value to
    show, or None if the value is harmless. ``loader`` says which library does what; ``source`` is where this can be
    read. ``common`` keys occur in many other texts, so they count only alone on a line, or with a quoted value.
    """

    keys: tuple[str, ...]
    names: Callable[[Any, Mapping[str, Any]], str | None]
    loader: str
    source: str
    verdict: str = PROGRAM
    common: bool = False


_DOTTED: Final = regex(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
#: Endings of file and host names, which look like dotted names.
_ENDINGS: Final = (".json", ".safetensors", ".txt", ".md", ".csv", ".onnx", ".gguf", ".com", ".org")
_NOTHING: Final = frozenset(("", "null", "~", "none", "false", "{}", "[]"))


def _given(value: Any, others: Mapping[str, Any]) -> str | None:
    """Accept everything except empty values, false and numbers: vocabularies have numbers under keys of any name."""
    if isinstance(value, Unseen | Nested):
        return None if isinstance(value, Nested) and value.empty else ""
    if type(value) is list:
        return ("" if any(item is not NUMBER for item in value) else None) if value else None
    if type(value) is not str or value.lower() in _NOTHING or value.lstrip("-").replace(".", "").isdigit():
        return "" if value is True else None
    return value


def _text(value: Any, others: Mapping[str, Any]) -> str | None:
    return _given(value, others) if type(value) is str or value is UNSEEN else None


def _true(value: Any, others: Mapping[str, Any]) -> str | None:
    return "" if value is True or (type(value) is str and value.lower() in ("true", "yes", "on", "1")) else None


def _dotted(*inside: str) -> Callable[[Any, Mapping[str, Any]], str | None]:
    """Accept dotted names outside of the modules ``inside``."""

    def names(value: Any, others: Mapping[str, Any]) -> str | None:
        text = value if type(value) is str else ""
        dotted = _DOTTED.fullmatch(text) and not text.lower().endswith(_ENDINGS)
        return text if dotted and not text.startswith(tuple(f"{module}." for module in inside)) else None

    return names


def _outside(*modules: str) -> Callable[[Any, Mapping[str, Any]], str | None]:
    """Accept names outside of these modules and their submodules."""

    def names(value: Any, others: Mapping[str, Any]) -> str | None:
        text = _text(value, others)
        return None if text is None or any(f"{text}.".startswith(f"{module}.") for module in modules) else text

    return names


#: Keras layers that hold code: a function as marshalled bytecode or source, or a torch pickle.
_KERAS_CODE: Final = frozenset(("Lambda", "TFOpLambda", "SlicingOpLambda", "__lambda__", "TorchModuleWrapper"))
_KERAS: Final = (
    "keras",
    "tf_keras",
    "keras_hub",
    "keras_cv",
    "keras_nlp",
    "tensorflow.keras",
    "tensorflow.python.keras",
)
#: Keras modules whose functions act on files and processes, and are not layers.
_KERAS_TOOLS: Final = regex(r"keras\.(?:src\.)?(?:utils|saving|models|config|ops|export)\b")
_BUILTINS: Final = words("exec eval compile open __import__ getattr setattr breakpoint input vars globals")


def _keras_class(value: Any, others: Mapping[str, Any]) -> str | None:
    """Accept layers that hold code, and classes and functions outside of Keras modules."""
    if type(value) is not str:
        return None
    if re.split(r"[.>]", value)[-1] in _KERAS_CODE:
        return value
    module, config = others.get("module"), others.get("config")
    if type(module) is not str or "config" not in others:
        return None
    name = config if value == "function" and type(config) is str else value
    if module == "builtins":
        return f"builtins.{name}" if name in _BUILTINS else None
    inside = any(f"{module}.".startswith(f"{known}.") for known in _KERAS)
    tool = value == "function" and _KERAS_TOOLS.match(module)
    return f"{module}.{name}" if tool or not inside else None


def _keras_config(value: Any, others: Mapping[str, Any]) -> str | None:
    whole = type(value) is str and "config" in others and _keras_class(value, others) is None
    return value if whole and ("module" in others or "keras_version" in others or "build_config" in others) else None


#: Node types of skops that call a function named in the file, directly or as part of a reduction.
_SKOPS_CALLS: Final = words("OperatorFuncNode MethodNode PartialNode ConstructorFromReduceNode")
_SKOPS_MODULES: Final = words("sklearn numpy scipy builtins collections skops pandas quantile_forest")


def _skops_call(value: Any, others: Mapping[str, Any]) -> str | None:
    module, name = others.get("__module__"), others.get("__class__")
    known = type(module) is str and module.partition(".")[0] in _SKOPS_MODULES
    if type(value) is not str or not value.endswith("Node") or (known and value not in _SKOPS_CALLS):
        return None
    return f"{value} of {module}.{name}" if type(module) is str else value


def _skops_node(value: Any, others: Mapping[str, Any]) -> str | None:
    return _text(value, others) if _skops_call(value, others) is None and "__module__" in others else None


#: Libraries that a component of a diffusers pipeline may come from. Others are imported, or are files beside it.
_DIFFUSERS: Final = words("diffusers transformers optimum onnxruntime flax peft")


def _pipeline(value: Any, others: Mapping[str, Any]) -> str | None:
    """Accept pipelines with their own code, and components from libraries that diffusers does not use."""
    if type(value) is list:
        return str(value[0]) if value else None
    for pair in others.values() if "_diffusers_version" in others else ():
        if type(pair) is list and len(pair) >= 2 and type(pair[0]) is str and type(pair[1]) is str:
            library = pair[0].partition(".")[0]
            own = library == "stable_diffusion" or library.startswith(("pipeline", "flux", "wan"))
            if library not in _DIFFUSERS and not own:
                return f"{pair[0]}.{pair[1]}"
    return None


def _kernel(value: Any, others: Mapping[str, Any]) -> str | None:
    other = type(value) is str and "/" in value and not value.startswith("kernels-community/")
    return value if other else None


#: Statements that mmengine's configuration never needs: it assigns literals and calls of dict.
_STATEMENT: Final = regex(r"(?m)^[ \t]*(?:import|from|exec|def|class|with|for)\b|;[ \t]*import\b|__\w+__")


def _python(value: Any, others: Mapping[str, Any]) -> str | None:
    statement = _STATEMENT.search(value) or _CODE.search(value) if type(value) is str and "\n" in value else None
    return statement[0].strip() if statement else None


def _expression(value: Any, others: Mapping[str, Any]) -> str | None:
    for item in value if type(value) is list else [value]:
        if type(item) is str and "$" in item[:4]:
            return item
    return None


def _router(value: Any, others: Mapping[str, Any]) -> str | None:
    named = _dotted("sentence_transformers")
    inside = value.texts if isinstance(value, Nested) and "structure" in others else ()
    return next((text for text in inside if named(text, others) is not None), None)


#: Code inside values: a call that imports a module or starts a process, and OmegaConf's usual name of a resolver that
#: evaluates Python.
_CODE: Final = regex(
    r"""__import__\s*\(\s*\\?['"]|\b(?:os|posix|nt)\.(?:system|popen|exec[lv]\w*|spawn\w+)\s*\("""
    r"""|\bsubprocess\.\w+\s*\(|\bimportlib\.import_module\s*\(|\$\{(?:eval|exec|py|python):"""
)
#: Tags of jsonpickle that name a module (jsonpickle/tags.py); other tags hold plain values.
_JSONPICKLE: Final = words("object reduce type function repr newobj newargs newargsex mod property iterator")
_IMPORTS: Final = "imports and calls what it names"
RULES: Final = (
    Rule(("_target_",), _text, f"hydra.utils.instantiate {_IMPORTS}", "hydra/_internal/instantiate/_instantiate2.py"),
    Rule(("_component_",), _text, f"torchtune {_IMPORTS}", "torchtune/config/_instantiate.py"),
    Rule(
        ("class_path", "_class_path"),
        _dotted(),
        f"jsonargparse and LightningCLI: {_IMPORTS}",
        "jsonargparse/_typehints.py, lightning/pytorch/cli.py",
    ),
    Rule(
        ("_instantiator",),
        _outside("lightning.pytorch.cli", "pytorch_lightning.cli"),
        f"load_from_checkpoint of Lightning {_IMPORTS}",
        "lightning/pytorch/core/saving.py",
    ),
    Rule(("cfg",), _python, "mmengine runs it as Python (Config.fromstring)", "mmengine/infer/infer.py"),
    Rule(("imports",), _expression, "MONAI runs it as Python", "monai/bundle/config_item.py"),
    Rule(
        ("types",),
        _router,
        f"sentence-transformers {_IMPORTS}",
        "sentence_transformers/models/Router.py",
    ),
    Rule(
        ("tokenizer_class",),
        _dotted("sentence_transformers"),
        f"sentence-transformers {_IMPORTS}",
        "sentence_transformers/models/WordEmbeddings.py",
    ),
    Rule(("custom_ops_library",), _text, "onnxruntime-genai loads the library that it names", "onnxruntime-genai docs"),
    Rule(
        ("target",),
        _dotted(),
        f"instantiate_from_config of latent diffusion, and NeMo: {_IMPORTS}",
        "ldm/util.py, nemo/core/classes/common.py",
        common=True,
    ),
    Rule(
        tuple(f"py/{tag}" for tag in sorted(_JSONPICKLE)),
        _given,
        f"jsonpickle.decode {_IMPORTS}",
        "jsonpickle/unpickler.py",
    ),
    Rule(("__kind__",), _text, f"gluonts.core.serde.decode {_IMPORTS}", "gluonts/core/serde/_base.py"),
    Rule(
        ("auto_map",),
        _given,
        "transformers runs the code that it names (trust_remote_code)",
        "transformers/dynamic_module_utils.py",
    ),
    Rule(("trust_remote_code",), _true, "it lets transformers run code of the repository", "transformers docs"),
    Rule(
        ("custom_pipelines", "custom_pipeline", "custom_generate"),
        _given,
        "transformers and diffusers run the code that it names",
        "transformers/pipelines/__init__.py, diffusers/pipelines/pipeline_loading_utils.py",
    ),
    Rule(
        ("_class_name",),
        _pipeline,
        "diffusers imports it, or runs the file of that name beside it",
        "diffusers/pipelines/pipeline_loading_utils.py",
    ),
    Rule(
        ("_attn_implementation", "attn_implementation"),
        _kernel,
        "transformers downloads and runs this kernel",
        "transformers/integrations/hub_kernels.py",
    ),
    Rule(
        ("parent_library",),
        _outside("transformers", "diffusers", "lerobot", "megatron-core", "__main__", "torch.nn"),
        "peft imports the module that auto_mapping names",
        "peft/auto.py",
    ),
    Rule(("megatron_core",), _outside("megatron.core"), "peft imports it", "peft/tuners/lora/tp_layer.py"),
    Rule(
        ("type",),
        _dotted("sentence_transformers"),
        f"sentence-transformers (modules.json), mmengine, AllenNLP: {_IMPORTS}",
        "sentence_transformers/util/misc.py, mmengine/registry/registry.py, allennlp/common/registrable.py",
        common=True,
    ),
    Rule(
        ("activation_function", "activation_fn", "sbert_ce_default_activation_function"),
        _dotted("torch.nn"),
        f"sentence-transformers {_IMPORTS}",
        "sentence_transformers/models/Dense.py",
    ),
    Rule(("custom_imports",), _given, "mmengine imports the modules that it names", "mmengine/config/config.py"),
    Rule(("loader_module",), _text, "mlflow.pyfunc imports it", "mlflow/pyfunc/__init__.py"),
    Rule(
        ("class_name",),
        _keras_class,
        "keras runs code that is in the model, or imports what it names",
        "keras/src/saving/serialization_lib.py",
    ),
    Rule(
        ("class_name",),
        _keras_config,
        "keras builds what it names; it is not a file of torch",
        "keras/src/saving/serialization_lib.py",
        UNKNOWN,
    ),
    Rule(("__loader__",), _skops_call, f"skops {_IMPORTS}", "skops/io/_general.py"),
    Rule(("__loader__",), _skops_node, "skops imports what it names", "skops/io/_general.py", UNKNOWN),
)
_BY_KEY: Final = {key: [rule for rule in RULES if key in rule.keys] for rule in RULES for key in rule.keys}
#: A key whose value is a base64 pickle (stable_baselines3/common/save_util.py: ``json_to_data``).
_SERIALIZED: Final = ":serialized:"
#: The keys that are judged.
RULE_KEYS: Final = frozenset((*_BY_KEY, _SERIALIZED))
#: The first characters, in base64, of a pickle with protocol 2 to 5 and of a zip archive.
_BASE64: Final = regex(r"gA[I-X]|UEsDB")


def _judged(key: str, value: Any, others: Mapping[str, Any]) -> Iterator[ActivePart]:
    """Yield the results of the rules for a key and its value."""
    for rule in _BY_KEY.get(key, ()):
        shown = rule.names(value, others)
        if shown is not None:
            named = f" ({cut(shown, 80)})" if shown else ""
            yield ActivePart(f"{named}: {rule.loader}", rule.verdict)
            return
    if type(value) is str and (key == _SERIALIZED or (len(value) > 8 and _BASE64.match(value.lstrip()[:5]))):
        import base64  # imported only for pickles in text

        try:
            data = base64.b64decode(value.encode("ascii", "ignore"))
        except ValueError:
            data = b""
        if data:
            yield ActivePart(": base64 of a pickle", UNKNOWN, data)
    if key == _SERIALIZED:
        yield ActivePart(": stable-baselines3 unpickles it", UNKNOWN)


def key_findings(key: str, value: Any, others: Mapping[str, Any]) -> list[ActivePart]:
    """Return the findings in a key and its value, which has the form returned by ``read_json``."""
    return [_at(key, item) for item in _judged(key, value, others)]


# -- texts ---------------------------------------------------------------------------------------------------------


def mapping_findings(mapping: Mapping[str, str]) -> list[ActivePart]:
    """Return the findings in named texts, such as ``__metadata__`` of safetensors."""
    found: list[ActivePart] = []
    for key, value in mapping.items():
        found += (_at(key, item) for item in _visit(key, value, mapping, 1))
    return _unique(found)


def text_findings(text: str, *, prose: bool = False) -> list[ActivePart]:
    """Return the findings in a text.

    ``prose`` marks a text for people, such as README.md, in which programs read only the YAML front matter; YAML tags
    count everywhere.
    """
    return _unique(_in_text(text, 0, prose))


def _unique(found: list[ActivePart]) -> list[ActivePart]:
    """Return each finding once; if a finding only makes a text UNKNOWN, return one per rule."""
    kept: dict[object, ActivePart] = {}
    for item in found:
        if item.payload or len(kept) < _MAX_FINDINGS:  # payloads are never omitted
            key = item.message.rpartition(": ")[2] if item.verdict == UNKNOWN and not item.payload else item
            kept.setdefault(key, item)
    return sorted(kept.values(), key=lambda item: item.verdict != PROGRAM)


def _visit(key: str, value: Any, others: Mapping[str, Any], depth: int) -> list[ActivePart]:
    """Return the findings in one value of a structured text, and in nested texts."""
    found = list(_judged(key, value, others))
    if key.startswith("json://"):  # jsonpickle encodes keys that are not strings
        found += _in_text(key[7:], depth + 1, False)
    if type(value) is str and len(value) > 3 and not any(item.payload for item in found):
        found += _in_text(value, depth + 1, False)
    return found


def _in_text(text: str, depth: int, prose: bool) -> list[ActivePart]:
    if depth > _MAX_DEPTH:
        return [ActivePart(_TOO_DEEP, UNKNOWN)] if _may_matter(text) else []
    variants = unescaped(text)
    found = [] if prose else [*_template_findings(text, variants), *_code_findings(variants[0])]
    inner = variants[0]
    for _ in range(_MAX_DEPTH):  # a nested text has its own escapes
        if is_template(inner) or _may_matter(inner) or any(map(_may_matter, variants)):
            break
        inner, outer = unescaped(inner)[0], inner
        if inner == outer:
            return found
    visit = partial(_visit, depth=depth)
    exact = read_json(text, visit) if _STARTS.match(text) else None
    if exact is not None:
        return [*found, *(_at(path, item) for path, item in exact)]
    for variant in variants:
        found += _tag_findings(variant)
        found += _loose_findings(_front_matter(variant) if prose else variant)
    return found


def _template_findings(text: str, variants: list[str]) -> Iterator[ActivePart]:
    if any(map(is_template, variants)):
        quoted_once = text.replace("''", "'")  # YAML doubles a quote within quotes
        reached = reached_attribute(tuple(dict.fromkeys((text, quoted_once, *variants))))
        if reached == TOO_LONG:
            yield ActivePart(f"it holds {reached}", UNKNOWN)
        elif reached:
            yield ActivePart(f"a template that reaches {reached}: Jinja without a sandbox runs code by it")


def _code_findings(text: str) -> Iterator[ActivePart]:
    code = _CODE.search(text)
    if code:
        what = f"it holds Python code ({cut(code[0], 40)}): programs that evaluate values, such as YOLOv5, run it"
        yield ActivePart(what, UNKNOWN)


def _at(path: str, item: ActivePart) -> ActivePart:
    """Return a finding with the path of the value that contains it."""
    return item._replace(keys=(path, *item.keys)) if path else item


_STARTS: Final = regex(r"\ufeff?\s*[{\[]")


def _may_matter(text: str) -> bool:
    """Return whether a text contains any word from the rules: a fast test for large texts."""
    return (
        "%TAG" in text
        or any(word in text for word in _WORDS)
        or ("!" in text and "%" in text and _TAG_ESCAPE.search(text) is not None)
    )


_WORDS: Final = (
    *_BY_KEY,
    *(
        _SERIALIZED,
        "gA",
        "UEsDB",
        "python/",
        "!<",
        "!new:",
        "!name:",
        "!apply",
        "!module:",
        "!obj:",
        "!pkl:",
        "!import",
    ),
)
_TAG_ESCAPE: Final = regex("%[0-9a-fA-F]{2}")
_FRONT: Final = regex(r"\ufeff?\s*---[ \t]*\r?\n([\s\S]*?)\n(?:---|\.\.\.)")


def _front_matter(text: str) -> str:
    match = _FRONT.match(text)
    return match[1] if match else ""


#: Python tags that PyYAML turns into plain values (yaml/constructor.py: FullConstructor).
_PLAIN_TAGS: Final = regex(r"python/(?:none|bool|str|unicode|bytes|int|long|float|complex|list|tuple|dict)(?![\w/:])")
_ACTIVE_TAG: Final = regex(r"tag:yaml\.org,2002:((?:python|js|ruby|perl|php|java|javascript|net)/[^\s,\[\]{}]*)")
#: Tags of hyperpyyaml (SpeechBrain), pylearn2 and torchdistill.
_OTHER_TAG: Final = regex(
    r"!((?:new|apply|applyref|name|module|obj|pkl|import):[^\s,\[\]{}]*|import_(?:call|call_method|get)(?!\w)|import(?=\Z))"
)


def _tag_findings(text: str) -> Iterator[ActivePart]:
    for tag in tags(text):
        if tag is None:
            yield ActivePart("it has more tags than are followed", UNKNOWN)
            return
        active, other = _ACTIVE_TAG.match(tag), _OTHER_TAG.match(tag)
        if active and not _PLAIN_TAGS.match(active[1]):
            yield ActivePart(f"tag {quoted(cut('!!' + active[1].rstrip('>'), 80))}: yaml.unsafe_load {_IMPORTS}")
        elif other:
            yield ActivePart(
                f"tag {quoted(cut('!' + other[1], 80))}: hyperpyyaml (SpeechBrain), pylearn2, torchdistill: {_IMPORTS}"
            )


def _loose_findings(text: str) -> Iterator[ActivePart]:
    template = is_template(text)
    for item in loose_items(text, (*_BY_KEY, _SERIALIZED)):
        if item is None:
            yield ActivePart("it has more keys than are followed", UNKNOWN)
            return
        if _counts(item, template):
            yield from (_at(item.key, found) for found in _judged(item.key, item.value, {}))


def _counts(item: LooseItem, template: bool) -> bool:
    rules = _BY_KEY.get(item.key, ())
    if item.key == "trust_remote_code" and item.separator == "=" and item.value != "true":
        return False  # this is an argument in Python, not TOML
    if not all(rule.common for rule in rules) or not rules:
        return True
    return (item.first or item.quoted) if template or item.separator == "=" else True
