"""TOML files whose dotted keys would take the library minutes are refused before it sees them."""

from __future__ import annotations

import pytest

from ckptool.base import toml
from ckptool.base.errors import MalformedError

MANY = ".".join("a" * 50_000)


@pytest.mark.parametrize(
    "text",
    [
        f"[{MANY}]",
        f"[[{MANY}]]",
        f"{MANY} = 1",
        f"x = {{ {MANY} = 1 }}",
        f'x = """a"""""\n{MANY} = 1',
        f"x = '''a'''''\n{MANY} = 1",
        f'x = "\\\\"\n{MANY} = 1 # "',
        f"x = ['\"', {{ {MANY} = '\"' }}]",
    ],
)
def test_long_dotted_keys_are_refused(text: str) -> None:
    with pytest.raises(MalformedError, match="more than 64 dots outside of texts"):
        toml.parsed(text.encode(), "x.toml", "the recipe")


@pytest.mark.parametrize(
    "text", [f'x = "{MANY}"', f"x = '{MANY}'", f'x = """\n{MANY}\n"""', f"x = '''\n{MANY}'''", f'x = "#" # {MANY}']
)
def test_texts_have_any_number_of_dots(text: str) -> None:
    assert list(toml.parsed(text.encode(), "x.toml", "the recipe")) == ["x"]


@pytest.mark.parametrize("text", ['"""\\"' * 9, '"\\"' * 9, "'''" * 9 + "\\", '"\\'])
def test_a_string_without_an_end_is_no_toml(text: str) -> None:
    with pytest.raises(MalformedError, match="is not TOML"):
        toml.parsed(f"x = {text}".encode(), "x.toml", "the recipe")
