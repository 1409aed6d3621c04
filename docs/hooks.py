"""mkdocs hooks that add the pages at the top of the repository, and files outside docs/ that pages link to.

Links in the repository's Markdown are relative, so that they also work unbuilt. These hooks turn each into a link to
the same file in the site: a page, a figure, or a page that shows a file of code. A broken link is a warning.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
TOP = {"README.md": "index.md"} | {
    f"{name}.md": f"{name.lower()}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")
}
"""Pages at the top of the repository, and their names in the site."""
AS_THEY_ARE = dict.fromkeys((".md", ".html", ".svg", ".png", ".json"), "")
SHOWN = AS_THEY_ARE | {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", "": "text"}
"""Suffixes of files that may be linked to, with the language of the page that shows the file; empty: copied as is."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")

log = logging.getLogger("mkdocs.plugins")


def on_files(files: Files, config: Any) -> Files:
    for source, target in TOP.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    waiting = [file for file in files if file.src_uri.endswith(".md")]
    while waiting:
        file = waiting.pop()
        for path in outside(file.src_uri, file.content_string):
            target = place(path)
            if target in files.src_uris:
                continue
            language = SHOWN[Path(path).suffix]
            if language:
                code = f"# {path}\n\n```{language}\n{(ROOT / path).read_text()}\n```\n"
                made = File.generated(config, target, content=code)
            else:
                made = File.generated(config, target, abs_src_path=str(ROOT / path))
            files.append(made)
            if target.endswith(".md") and not language:
                waiting.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = page.file.src_uri

    def turn(match: re.Match[str]) -> str:
        path = target_of(here, match[1])
        return os.path.relpath(place(path), Path(here).parent) + (match[2] or "") if path else match[0]

    return LINK.sub(turn, markdown)


def outside(uri: str, text: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page links to, without the pages at the top."""
    for match in LINK.finditer(text):
        path = target_of(uri, match[1])
        if path and path not in TOP and not path.startswith("docs/"):
            if (ROOT / path).is_file() and Path(path).suffix in SHOWN:
                yield path
            else:
                log.warning("%s links to %s, which cannot be shown", uri, match[1])


def target_of(uri: str, link: str) -> str:
    """The target of a link on a page of the site, relative to the top of the repository."""
    return os.path.normpath(Path(origin(uri)).parent / link)


def origin(uri: str) -> str:
    """The path in the repository of a page of the site."""
    if uri.startswith("source/"):
        return uri.removeprefix("source/")
    return next((source for source, target in TOP.items() if target == uri), f"docs/{uri}")


def place(path: str) -> str:
    """The path in the site of a file of the repository."""
    if path in TOP:
        return TOP[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}.md" if SHOWN.get(Path(path).suffix) else f"source/{path}"
