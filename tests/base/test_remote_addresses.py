"""Addresses of remote files: their parts, and what stands for them where they are printed."""

from __future__ import annotations

import pytest

from ckptool.base.addresses import Address, conceal, is_remote, join, parse, reveal, shown, split_member

#: (address, its parts, the text to show)
CASES = [
    ("s3://b/run/x.pth", Address("s3", "", "b", "run/x.pth", ""), "s3://b/run/x.pth"),
    ("s3://b/", Address("s3", "", "b", "", ""), "s3://b"),
    ("s3://b/run/", Address("s3", "", "b", "run/", ""), "s3://b/run/"),
    ("s3://AK:SK@b/x", Address("s3", "AK:SK", "b", "x", ""), "s3://b/x"),
    ("s3://AK:S/K@b/x", Address("s3", "AK:S/K", "b", "x", ""), "s3://b/x"),
    ("s3://b/x.pth?versionId=a", Address("s3", "", "b", "x.pth", "?versionId=a"), "s3://b/x.pth"),
    ("s3://b/a\nb/c", Address("s3", "", "b", "a\nb/c", ""), "s3://b/a\nb/c"),
    ("abfss://box@acc.net/x", Address("abfss", "", "box@acc.net", "x", ""), "abfss://box@acc.net/x"),
    ("az://box/x?sv=1&sig=a", Address("az", "", "box", "x", "?sv=1&sig=a"), "az://box/x"),
    ("hf://org/model@v1/x", Address("hf", "", "org", "model@v1/x", ""), "hf://org/model@v1/x"),
    ("https://h:8080/a@b/x", Address("https", "", "h:8080", "a@b/x", ""), "https://h:8080/a@b/x"),
    ("https://u:p@h/x?t#f", Address("https", "u:p", "h", "x", "?t#f"), "https://h/x"),
    ("https://h/o.zip!a.pth?t", Address("https", "", "h", "o.zip!a.pth", "?t"), "https://h/o.zip!a.pth"),
    ("https://h/o.zip?t=1!a.pth", Address("https", "", "h", "o.zip!a.pth", "?t=1"), "https://h/o.zip!a.pth"),
    ("sftp://me@h:22/x", Address("sftp", "me", "h:22", "x", ""), "sftp://h:22/x"),
]


@pytest.mark.parametrize(("address", "parts", "text"), CASES, ids=[case[0] for case in CASES])
def test_parts(address: str, parts: Address, text: str) -> None:
    assert is_remote(address)
    assert parse(address) == parts
    assert parse(str(parts)) == parts
    assert shown(address) == text


def test_what_is_no_address() -> None:
    for text in ("", "x.pth", "/a/b", "C://x", "a b://c", "./s3://b/x", "s3:/b/x", "-o=s3://b", "s3://b\nmore"):
        assert not is_remote(text)


def test_files_of_a_folder() -> None:
    assert join("s3://b/run", "data", "x.pth") == "s3://b/run/data/x.pth"
    assert join("s3://b", "x.pth") == join("s3://b/", "x.pth") == "s3://b/x.pth"
    assert join("s3://b//run/", "x.pth") == "s3://b//run/x.pth"
    assert join("s3://b/run", "../other/./x") == "s3://b/other/x"
    assert join("s3://b/run", "../../../x") == "s3://b/x"
    assert join("az://box/run?sig=a", "x") == "az://box/run/x?sig=a"


def test_a_text_stands_for_an_address() -> None:
    assert conceal("s3://b/x") == reveal("s3://b/x") == "s3://b/x"
    first, second = "https://host/get?id=1", "https://host/get?id=2"
    assert conceal(first) == conceal(first) == "https://host/get"
    assert conceal(conceal(first)) == "https://host/get"
    assert conceal(second) == conceal(conceal(second)) == "https://host/get#2"
    assert (reveal(conceal(first)), reveal(conceal(second))) == (first, second)
    plain, signed = "https://host/plain", "https://host/plain?id=1"
    assert (conceal(plain), conceal(signed)) == (plain, f"{plain}#2")
    assert (reveal(plain), reveal(f"{plain}#2")) == (plain, signed)


def test_members() -> None:
    assert split_member("s3://b/o.zip!run/x.pth") == ("s3://b/o.zip", "run/x.pth")
    assert split_member("s3://b/x!") == split_member("s3://b/x") == ("", "")
    outer, members = split_member(conceal("https://host/o.zip?id=1!x.pth!y"))
    assert (outer, reveal(outer), members) == ("https://host/o.zip", "https://host/o.zip?id=1", "x.pth!y")
