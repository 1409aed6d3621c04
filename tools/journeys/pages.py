"""The commands and programs that the documentation tells its readers to run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


class Stale(Exception):
    """A page does not contain what a newcomer needs."""


@dataclass(frozen=True, slots=True)
class Docs:
    """The pages of a checkout."""

    root: Path

    def section(self, page: str, heading: str) -> str:
        """The text below a heading, up to the next heading. Raises `Stale`."""
        text = (self.root / page).read_text()
        code = re.compile(r"^```.*?^```", re.M | re.S)  # comments in code look like headings
        blank = code.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
        begin = re.search(rf"^(#+) {re.escape(heading)}$", blank, re.M)
        if begin is None:
            raise Stale(f"{page} has no section {heading!r}")
        end = re.compile(r"^#+ ", re.M).search(blank, begin.end())
        return text[begin.end() : end.start() if end else None]

    def command(self, page: str, heading: str, words: str, own: Mapping[str, str] | None = None) -> str:
        """The only command of a section that contains these words; a command that equals them takes precedence.

        Args:
            own: replacements of the page's values by the reader's own.

        Raises:
            Stale: there is no such command, there are several, or the command lacks a value to be replaced.
        """
        found = {each for each in _commands(self.section(page, heading)) if words in each}
        found = {words} if words in found else found
        if len(found) != 1:
            raise Stale(f"{page}, {heading!r}: {len(found)} commands with {words!r}")
        [command] = found
        for theirs, mine in (own or {}).items():
            if theirs not in command:
                raise Stale(f"{page}, {heading!r}: {command!r} does not have {theirs!r}")
            command = command.replace(theirs, mine)
        return command

    def program(self, page: str, heading: str) -> str:
        """The first Python block of a section. Raises `Stale`."""
        found = re.search(r"^```python\n(.*?)^```", self.section(page, heading), re.M | re.S)
        if found is None:
            raise Stale(f"{page}, {heading!r}, has no program")
        return found[1]


def _commands(text: str) -> list[str]:
    """The commands in console blocks and in the running text."""
    found = re.findall(r"(?<!`)`([a-zA-Z][^`\n]* [^`\n]*)`(?!`)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        joined = re.sub(r"\\\n\s*", "", block)
        found += [line[2:].split("   #")[0].strip() for line in joined.splitlines() if line.startswith("$ ")]
    return found
