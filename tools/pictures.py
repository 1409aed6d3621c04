"""``make pictures``: takes the pictures of the page in docs/, with the job of tests/system/test_page.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

from tests.smp_kit import playground
from tests.system.test_page import PHONE, WIDE, been_through, show
from tools.browser import browser

DOCS = Path(__file__).parent.parent / "docs"
PHONE_HEIGHT = 950
"""Height of the phone's picture in CSS pixels; the rest of the page is a long list of nodes."""
COLOURS = 64


def main() -> None:
    """Take and write the pictures."""
    with tempfile.TemporaryDirectory() as text, playground() as ground, browser(Path(text) / "browser") as window:
        smp, folder = been_through(ground), Path(text)
        show(window, smp, WIDE)
        write(Image.open(window.picture(folder / "wide.png")), "page.png")
        phones = []
        for dark in (False, True):
            show(window, smp, PHONE, dark=dark)
            whole = Image.open(window.picture(folder / f"{dark}.png"))
            phones.append(whole.crop((0, 0, whole.width, 2 * PHONE_HEIGHT)))
        both = Image.new("RGB", (2 * phones[0].width, phones[0].height))
        for place, phone in enumerate(phones):
            both.paste(phone, (place * phone.width, 0))
        write(both, "page-phone.png")


def write(image: Image.Image, name: str) -> None:
    """Write an image with few colours, which are enough for the page."""
    few = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(DOCS / name, optimize=True)
    print(f"docs/{name}  {(DOCS / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
