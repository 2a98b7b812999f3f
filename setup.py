"""The description on a package index: the README, with file names in place of links into the repository.

An index knows no relative links. Everything else about the package is in setup.cfg.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def _named(link: "re.Match[str]") -> str:
    text, file = link.groups()
    return f"`{file}`" if text == file else f"{text} (`{file}`)"


setup(long_description=re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)", _named, README))
