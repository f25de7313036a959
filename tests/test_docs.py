"""Documentation that runs: code blocks of README and docs, doctests of the package, links."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

import dask_controller

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
NOT_RUN = re.compile(r"<!--\s*not run:\s*(?P<reason>.*?)\s*-->", re.DOTALL)
FENCE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`\n]*)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    #: First line of its content, counted from 1.
    line: int
    #: The word after the fence, such as ``python``.
    language: str
    text: str
    #: Why it is not to be run; None where it is.
    skipped: str | None


def find_blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a markdown text.

    A comment ``<!-- not run: reason -->`` counts for the block that follows with nothing but blank lines in between.
    """
    blocks: list[Block] = []
    lines = text.splitlines()
    between_start = 0
    i = 0
    while i < len(lines):
        opening = FENCE.match(lines[i])
        if opening is None:
            i += 1
            continue
        before = "\n".join(lines[between_start:i]).rstrip()
        comments = [comment["reason"] for comment in NOT_RUN.finditer(before) if comment.end() == len(before)]
        skipped = comments[0] if comments else None
        start = i = i + 1
        while i < len(lines) and not re.fullmatch(rf" *{re.escape(opening['fence'])}[`~]* *", lines[i]):
            i += 1
        indent = len(opening["indent"])
        content = "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines[start:i])
        words = opening["info"].split()
        blocks.append(Block(start + 1, words[0] if words else "", content, skipped))
        i += 1
        between_start = i
    return blocks


def without_blocks(text: str) -> str:
    """Return a markdown text with fenced blocks and inline code blanked."""
    lines, fence = [], None
    for line in text.splitlines():
        match = FENCE.match(line)
        if fence is None and match:
            fence = match["fence"]
            lines.append("")
        elif fence is not None:
            if line.strip().startswith(fence):
                fence = None
            lines.append("")
        else:
            lines.append(re.sub(r"`[^`]*`", "``", line))
    return "\n".join(lines)


def as_script(page: Path, blocks: list[Block]) -> str:
    """Return the page's python blocks as one script, each line where it stands in the page.

    The lines make a traceback point into the page.
    """
    body: list[str] = []
    for block in blocks:
        body += [""] * (block.line - 1 - len(body))
        body += block.text.splitlines()
    source = "\n".join(body)
    ast.parse(source, filename=str(page))
    return source


# The guard: hosts that are processes of their own import the main script again.
RUNNER = """
import sys
if __name__ == "__main__":
    page, script = sys.argv[1:]
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), page, "exec")
    exec(code, globals())
"""


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    blocks = [block for block in find_blocks(page.read_text()) if block.language == "python"]
    for block in blocks:
        assert block.skipped != "", f"{ids(page)}:{block.line}: `not run` needs a reason"
    to_run = [block for block in blocks if block.skipped is None]
    if not to_run:
        return
    script, runner = tmp_path / "page.py", tmp_path / "runner.py"
    script.write_text(as_script(page, to_run))
    runner.write_text(RUNNER)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(runner), ids(page), str(script)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def module_names() -> list[str]:
    found = pkgutil.walk_packages(dask_controller.__path__, prefix="dask_controller.")
    return ["dask_controller", *(module.name for module in found if not module.name.endswith("__main__"))]


@pytest.mark.parametrize("name", module_names())
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert result.failed == 0, f"{result.failed} of {result.attempted} examples of {name} failed"


LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target><[^>]*>|[^()\s]*)(?:\s+\"[^\"]*\")?\)")


def slug(heading: str) -> str:
    """Return the anchor of a heading as GitHub makes it."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", lambda match: match[1] or "", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    found: set[str] = set()
    fence = None
    for line in page.read_text().splitlines():
        if match := FENCE.match(line):
            fence = None if fence else match["fence"]
        elif not fence and (heading := re.match(r"#+\s+(.*)", line)):
            name, number = slug(heading[1]), 0
            unique = name
            while unique in found:
                number += 1
                unique = f"{name}-{number}"
            found.add(unique)
    return found


def broken_links(page: Path) -> list[str]:
    """Return the relative links of a page that lead nowhere."""
    broken = []
    for match in LINK.finditer(without_blocks(page.read_text())):
        target = unquote(match["target"].strip("<>"))
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path) if path else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_resolve(page: Path) -> None:
    assert broken_links(page) == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    tree = "\n".join(block.text for block in find_blocks(index) if block.language == "{toctree}")
    listed = {line.strip() for line in tree.splitlines() if line.strip() and not line.strip().startswith(":")}
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert listed == pages - {"index"}


# The tools above, on pages made for them.


def test_blocks_are_found() -> None:
    text = "\n".join(
        [
            *("a", "```python", "x = 1", "```", ""),
            *("<!-- not run: needs a GPU -->", "", "```python", "y", "```"),
            *("<!-- not run: not next to a block -->", "text", "~~~python", "z", "~~~"),
            *("- item", "", "  ```python", "  if z:", "      w", "  ```"),
            *("````text", "```python", "no", "```", "````"),
        ]
    )
    found = [(block.line, block.language, block.text, block.skipped) for block in find_blocks(text)]
    assert found == [
        (3, "python", "x = 1", None),
        (9, "python", "y", "needs a GPU"),
        (14, "python", "z", None),
        (19, "python", "if z:\n    w", None),
        (23, "text", "```python\nno\n```", None),
    ]


def test_a_failing_block_fails_and_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / "probe.md"
    monkeypatch.setattr(
        Path, "read_text", lambda self: "# t\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n"
    )
    with pytest.raises(AssertionError, match=r'docs/probe\.md", line 8'):
        test_python_blocks_run(page, tmp_path)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Head `x`\n\n## Head x\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# A b, c\n[ok](other.md) [ok](other.md#head-x-1) [ok](#a-b-c) [ok](https://example.org/x) `[no](none.md)`\n"
        "[bad](none.md) ![bad](none.png) [bad](other.md#nowhere) [bad](#nowhere)\n"
    )
    assert broken_links(page) == ["none.md", "none.png", "other.md#nowhere", "#nowhere"]
