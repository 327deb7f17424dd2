"""The documentation's site: `python .ci/site_pages.py` builds it strictly into site/, from a copy of docs/.

Links in Markdown are relative, so that they work in a checkout and on GitHub. In the site, and in the description of a
wheel (`clean_wheel.py`), links that leave docs/ become addresses of this version's files. The project's address is only
in pyproject.toml.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from string import Template

TREE = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\(|^\[[\w ]+\]: |(?:src|srcset|href)=\")([^)\s\"]+)", re.MULTILINE)


def addresses() -> tuple[str, str]:
    """Returns the addresses of the repository and of the site."""
    urls = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]["urls"]
    return urls["Source"], urls["Documentation"]


def with_addresses(text: str, page: Path, revision: str, root: Path | None = None) -> str:
    """Returns a page's text with addresses instead of its relative links, except links within `root`.

    Args:
        text: Markdown.
        page: the page's path in the tree.
        revision: the tag or branch to which the addresses lead.
        root: a folder in which links stay relative.
    """
    source, _ = addresses()

    def replace(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        target = Path(os.path.normpath(page.parent / path))
        if re.match(r"\w+:", path) or not path or (root and target.is_relative_to(root)):
            return link[0]
        # GitHub's page of a file is not an image, so images need the address of the raw file.
        kind = "raw" if target.suffix in (".png", ".svg") else "tree" if target.is_dir() else "blob"
        return f"{link[1]}{source}/{kind}/{revision}/{target.relative_to(TREE).as_posix()}{mark}{anchor}"

    return LINK.sub(replace, text)


def build() -> None:
    """Builds the site."""
    source, site = addresses()
    copy = TREE / "build/site"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(TREE / "docs", copy / "docs")
    for page in (copy / "docs").rglob("*.md"):
        original = TREE / page.relative_to(copy)
        page.write_text(with_addresses(page.read_text("utf-8"), original, "main", TREE / "docs"), "utf-8")
    settings = (TREE / "zensical.toml").read_text("utf-8")
    (copy / "zensical.toml").write_text(Template(settings).substitute(source=source, site=site), "utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict", "--clean"], cwd=copy, check=True)
    shutil.rmtree(TREE / "site", ignore_errors=True)
    shutil.move(copy / "site", TREE / "site")


if __name__ == "__main__":
    if sys.argv[1:] == ["--readme"]:  # in place, before an sdist is built, since a package index may show its README
        version = tomllib.loads((TREE / "Cargo.toml").read_text())["workspace"]["package"]["version"]
        readme = TREE / "README.md"
        readme.write_text(with_addresses(readme.read_text("utf-8"), readme, f"v{version}"), "utf-8")
    else:
        build()
