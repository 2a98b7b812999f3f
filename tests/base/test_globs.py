"""Patterns: against naive matchers, in linear time, with the nearest pattern where one matches nothing."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptool.base.errors import TargetError
from ckptool.base.globs import Glob, Globs, Renaming, escaped, split_globs
from ckptool.base.nearest import nearest, nearest_pattern

# -- globs -------------------------------------------------------------------------------------------------------------

_CLASSES = ["[ab]", "[!a]", "[^a.]", "[a-c]", "[]]", "[!]]", "[a]", "[*]", "[a-]"]
_TEXTS = ["a", "b", ".", "]", "\n"]


def _nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    options = st.lists(inner, min_size=2, max_size=3).map(lambda options: "{" + ",".join(options) + "}")
    return st.one_of(st.lists(inner, max_size=3).map("".join), options)


def _globs(texts: list[str]) -> st.SearchStrategy[str]:
    """Valid globs, whose braces all enclose alternatives; ``texts`` are outside of braces."""
    inside = st.recursive(st.sampled_from(["a", "b", ".", "*", "?", *_CLASSES]), _nested, max_leaves=6)
    parts = st.one_of(st.sampled_from([*texts, "*", "?", *_CLASSES]), inside)
    return st.lists(parts, max_size=6).map("".join)


# With more commas, braces can have more combinations than a glob may have.
_GLOBS = _globs([*_TEXTS, ","]).filter(lambda glob: glob.count(",") <= 8)


def _as_regex(glob: str) -> str:
    """Translate a glob piece by piece, for the backtracking matcher of ``re``; a group for each outermost wildcard."""
    regex, depth = "", 0
    for piece in re.findall(r"\[[!^]?.[^]]*\]|.", glob, re.DOTALL):
        if piece == "{":
            regex += "(?:" if depth else "("
            depth += 1
        elif piece == "}":
            regex += ")"
            depth -= 1
        elif piece == "," and depth:
            regex += "|"
        elif len(piece) == 3 and piece[0] == "[":
            regex += re.escape(piece[1])
        else:
            wild = ".*" if piece == "*" else "." if piece == "?" else ""
            if len(piece) > 1:
                sign, inside = ("^", piece[2:-1]) if piece[1] in "!^" else ("", piece[1:-1])
                wild = f"[{sign}{inside.replace(']', chr(92) + ']')}]"
            regex += re.escape(piece) if not wild else wild if depth else f"({wild})"
    return regex


@given(_GLOBS, st.text("abc.],\n", max_size=8))
def test_a_glob_matches_as_its_regular_expression(pattern: str, name: str) -> None:
    wanted = re.fullmatch(_as_regex(pattern), name, re.DOTALL) is not None
    assert Glob(pattern).matches(name) == (wanted or name == pattern)


@given(
    st.lists(st.sampled_from(["a", ".", "*", "?", "[ab]", "[!a]"]), max_size=7).map("".join), st.text("ab.", max_size=9)
)
def test_each_wildcard_takes_as_much_as_it_can(pattern: str, name: str) -> None:
    match = re.fullmatch(_as_regex(pattern), name, re.DOTALL)
    renaming = Renaming(pattern, re.sub(r"\*|\?|\[[^]]*\]", r"<\g<0>>", pattern))
    assert renaming.matches(name) == (match is not None)
    if match is not None:
        texts = iter(match.groups())
        wanted = "".join(
            f"<{next(texts)}>" if len(part) > 1 or part in "*?" else part
            for part in re.findall(r"\[[^]]*\]|.", pattern)
        )
        assert renaming.new_name(name) == wanted


@pytest.mark.parametrize(
    ("old", "new", "name", "wanted"),
    [
        ("layer[45].*", "block[45].*", "layer4.0.w", "block4.0.w"),
        ("layer[45].*", "blocks.*", "layer4.0.w", "blocks.0.w"),
        ("{module,_orig_mod}.*", "*", "_orig_mod.fc", "fc"),
        ("{a,a.b*}*", "<{a,a.b*}><*>", "a.bc", "<a.bc><>"),
        ("*.{q,k}.*", "*.{q,k}_proj.*", "a.q.b.k.w", "a.q.b.k_proj.w"),
        ("a.*", "b[[]0].*", "a.w", "b[0].w"),
        ("a.*", "b.*", "c.w", "c.w"),
    ],
)
def test_the_new_name_repeats_the_wildcards(old: str, new: str, name: str, wanted: str) -> None:
    assert Renaming(old, new).new_name(name) == wanted


@pytest.mark.parametrize("new", ["b", "b.?", "*.*", "[12].*", "{x,y}.*"])
def test_other_wildcards_are_refused(new: str) -> None:
    with pytest.raises(TargetError, match="needs the wildcards"):
        Renaming("a.*", new)


@given(st.text("ab*?[]{},!^-", max_size=8), st.text("ab*?[]{},!^-", max_size=8))
def test_an_escaped_key_matches_itself_alone(key: str, other: str) -> None:
    assert Glob(escaped(key) + "*").matches(key + "tail")
    assert Glob(escaped(key)).matches(other) == (other in (key, escaped(key)))


@given(st.lists(_globs(_TEXTS), min_size=1, max_size=3))
def test_commas_in_braces_and_classes_do_not_separate(globs: list[str]) -> None:
    assert split_globs(",".join(globs)) == globs


def test_a_regular_expression_takes_the_rest_of_a_list() -> None:
    assert split_globs("a,{b,c},[,],re:d{1,2},e") == ["a", "{b,c}", "[,]", "re:d{1,2},e"]
    assert split_globs("re:d{1,2},e") == ["re:d{1,2},e"]
    assert Glob(r"re:(?i)layer\d+\.(\w)\.\1").matches("Layer12.a.a")
    assert not any(map(Glob("re:fc|head").matches, ("fc.weight", "a.head")))


# -- regular expressions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("re:fc(", r"missing \), unterminated subpattern, at character 6, '\('"),
        ("re:[a", "unterminated character set, at character 4"),
        ("re:*", "nothing to repeat, at character 4"),
        ("re:a{3,2}", "min repeat greater than max repeat, at character"),
        ("[c-a]", "the range c-a runs backwards, at character 2, 'c-a]'"),
        ("{a," * 60 + "b" + "}" * 60, "braces within braces"),
        ("{a,aa}" * 9, "more than 256 combinations"),
        ("re:" + "(" * 5000 + ")" * 5000, "is not a regular expression"),
    ],
)
def test_an_invalid_pattern_is_a_wrong_request_that_shows_where(pattern: str, why: str) -> None:
    with pytest.raises(TargetError, match=why):
        Globs([pattern])


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*.attn.*.weight*.attn.*x", ".attn." * 20_000),  # to the power of five by backtracking
        ("{a,aa}" * 8 + "*b", "a" * 100_000),
        ("*{a*,b}*{ab,a*b}*c", "ab" * 20_000),
        ("*a?*a?*a?*a?*a[xy]", "ab" * 20_000),
    ],
)
def test_no_glob_takes_long(pattern: str, name: str) -> None:
    """By backtracking each of these takes hours, or longer than there is time."""
    assert not Glob(pattern).matches(name)


@pytest.mark.parametrize("old", ["*.attn.*.weight*.attn.*x", "*{a*,b}*{ab,a*b}*c", "{a,aa}{a,aa}{a,aa}*?*?*b"])
def test_no_renaming_takes_long(old: str) -> None:
    name = ".attn.a" * 10_000
    assert Renaming(old, old).new_name(name) == name


# -- the nearest -------------------------------------------------------------------------------------------------------

_KEYS = [f"module.{name}" for name in ("fc.weight", "fc.bias", "layer1.0.conv1.weight", "layer2.0.conv1.weight")]


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("fc.*", "*.fc.*"),
        ("module", "module.*"),
        ("conv1.*", "*.conv1.*"),
        ("{fc,head}.*", "*.{fc,head}.*"),
        ("model.fc.*", "module.fc.*"),
        ("model.module.fc.*", "module.fc.*"),
        ("module.fc.wieght", "module.fc.weight"),
        (r"re:fc\..*", r"re:.*(?:fc\..*).*"),
        ("zzz", ""),
    ],
)
def test_the_nearest_pattern(pattern: str, near: str) -> None:
    assert nearest_pattern(pattern, _KEYS) == near


@given(_GLOBS.filter(bool), st.lists(st.text("ab.[*", min_size=1, max_size=6), max_size=8))
def test_what_is_suggested_matches_something(pattern: str, names: list[str]) -> None:
    near = nearest_pattern(pattern, names)
    assert not near or any(map(Glob(near).matches, names))


def test_the_nearest_of_many_names_is_found_in_bounded_time() -> None:
    names = [f"block.{number}.weight" for number in range(100_000)] + ["head.weight", "x" * 1_000_000]
    assert nearest("haed.weight", names) == ["head.weight"]
    assert nearest_pattern("haed.*", names[-1000:]) == "head.*"
