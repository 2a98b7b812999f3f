"""What setup.cfg cannot say: the description, the addresses, and archives that are the same wherever they are built.

An index knows no relative links, so the description is the README with names of files in their place. Times are those
of SOURCE_DATE_EPOCH, or a constant; modes are those that the owner has, without the umask.
"""

import gzip
import os
import re
import tarfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
README = (HERE / "README.md").read_text(encoding="utf-8")
#: 2020-02-02, as other builders have it; a zip knows no year before 1980.
EPOCH = int(os.environ.setdefault("SOURCE_DATE_EPOCH", "1580601600"))


def _named(link: "re.Match[str]") -> str:
    text, file = link.groups()
    return f"`{file}`" if text == file else f"{text} (`{file}`)"


def _mode(mode: int) -> int:
    return 0o755 if mode & 0o100 else 0o644


def _addresses() -> "dict[str, str]":
    config = ConfigParser()
    config.read(HERE / "setup.cfg", encoding="utf-8")
    url = config["metadata"]["url"]
    return {
        "Source": url,
        "Issues": f"{url}/issues",
        "Documentation": f"{url}/tree/main/docs",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
    }


class Sdist(sdist):
    """An archive in which only names and contents count."""

    def make_archive(self, base_name: str, format: str, root_dir: Any = None, base_dir: Any = None, **_: Any) -> str:
        """Write the folder ``base_dir`` as the archive ``base_name``."""
        path = f"{base_name}.tar.gz"
        with (
            Path(path).open("wb") as file,
            gzip.GzipFile("", "wb", 9, file, mtime=EPOCH) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as made,
        ):
            for item in sorted(path for path in Path(root_dir or ".", base_dir).rglob("*") if path.is_file()):
                info = tarfile.TarInfo(item.relative_to(root_dir or ".").as_posix())
                info.size, info.mtime, info.mode = item.stat().st_size, EPOCH, _mode(item.stat().st_mode)
                with item.open("rb") as data:
                    made.addfile(info, data)
        return path


class Wheel(bdist_wheel):
    """A wheel whose files have no modes of whoever builds it."""

    def write_wheelfile(self, *args: Any, **kwargs: Any) -> None:
        """Write the last file, and give all of them their modes."""
        super().write_wheelfile(*args, **kwargs)
        for path in Path(self.bdist_dir).rglob("*"):
            path.chmod(_mode(path.stat().st_mode))


setup(
    long_description=re.sub(r"\[([^]]*)\]\((?!https?:|#)([^)]*)\)", _named, README),
    project_urls=_addresses(),
    cmdclass={"sdist": Sdist, "bdist_wheel": Wheel},
)
