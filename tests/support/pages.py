"""Pages whose Python runs: blocks in order, in one namespace, each with what it prints in the `text` block that follows.

python -m support.pages check docs/spark-tutorial.md magnetar://127.0.0.1:7650
python -m support.pages write ...                # puts what is printed into the page
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = re.compile(
    r"^```(?P<language>python|console)\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


# As pages name the service.
SERVICE = "magnetar://127.0.0.1:7650"


class Block(NamedTuple):
    """`output`: None where the page shows none. A line `...` stands for any lines."""

    language: str
    code: str
    output: str | None
    line: int


def blocks_of(page: str) -> list[Block]:
    """In the order of the page."""
    return [
        Block(found["language"], found["code"], found["output"], page.count("\n", 0, found.start()) + 2)
        for found in BLOCK.finditer(page)
    ]


def run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Runs Python; returns what it printed."""
    printed = io.StringIO()
    # Tracebacks and warnings name the line of the page.
    code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return tidy(printed.getvalue())


def tidy(text: str) -> str:
    """Without blanks at the ends of lines, and empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n" if text.strip() else ""


def same(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed."""
    pattern = ".*".join(re.escape(part) for part in re.split(r"(?<=\n)\.\.\.\n", shown))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def run_page(page: Path, url: str) -> Iterator[tuple[Block, str]]:
    """Each block of Python and what it printed; `magnetar://127.0.0.1:7650` stands for the service."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    for block in blocks_of(page.read_text()):
        if block.language == "python":
            block = block._replace(code=block.code.replace(SERVICE, url))
            yield block, run(block, page, namespace)


def write(page: Path, url: str) -> None:
    """Runs the Python of a page, in the working directory, and writes what it prints into the page."""
    printed = {block.line: out for block, out in run_page(page, url)}
    text = page.read_text()

    def renew(found: re.Match[str]) -> str:
        out = printed.get(text.count("\n", 0, found.start()) + 2)
        if out is None or (found["output"] is not None and same(found["output"], out)):
            return found[0]
        shown = f"\n```text\n{out}```\n" if out else ""
        return f"```{found['language']}\n{found['code']}```\n{shown}"

    page.write_text(BLOCK.sub(renew, text))


def check(page: Path, url: str) -> bool:
    """Runs the Python of a page, in the working directory, and says where it prints what the page does not show."""
    good = True
    for block, out in run_page(page, url):
        print(f"{page.name}:{block.line}", file=sys.stderr, flush=True)
        if not same(block.output or "", out):
            print(f"it shows\n{block.output}\nand this was printed\n{out}", file=sys.stderr, flush=True)
            good = False
    return good


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]).resolve(), sys.argv[3])
    elif not check(Path(sys.argv[2]), sys.argv[3]):
        sys.exit(1)

__all__ = ["Block", "blocks_of", "check", "run", "run_page", "same", "tidy", "write"]
