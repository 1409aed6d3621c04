"""The page of an SMP in a real browser: on a phone and a wide screen, in light and dark mode, for all colour vision.

``make pictures`` renews the pictures in docs/.
"""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast.smp_daemon.recovery.recoveries import SPANS
from tests.deadlines import DEADLINE_S, await_that
from tests.smp_kit import Ground, Run, SmpProcess, Trainer, playground, run_on
from tools.browser import CHROMIUM, SIGHTS, Browser, browser

PHONE, WIDE = 375, 1000
WORD = 20
"""Length in characters up to which a word must always fit on one line."""
FEW_PIXELS = 1.0
APART = 15.0
"""Least distance of two colours in CIE L*a*b*. Side by side, 2 is enough to tell them apart."""
READABLE, VISIBLE = 4.5, 3.0
"""Least contrast of text, and of shapes, with their background (WCAG 2.2, 1.4.3 and 1.4.11)."""
LONG = "gke-train-a3-mega-7f3e9c21-x4k2.c.a-project.internal"
"""A node name as clouds assign them."""

DIE = """
import os, signal, sys
from pathlib import Path
from holdfast.smp_daemon.shared.board import TrainerPhase
from holdfast.smp_daemon.shared.client import SmpClient

client = SmpClient(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
client.join(1)
client.heartbeat(TrainerPhase.STEP, 12338)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""The program of a trainer that connects and dies."""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def job() -> Iterator[SmpProcess]:
    """An SMP of a job that has recovered from the loss of a node and of trainers, and has just lost another node."""
    with playground() as ground:
        yield been_through(ground)


def been_through(ground: Ground) -> SmpProcess:
    smps = [*ground.smps(7), ground.smp(LONG)]
    before = run_on(smps, [[300_000]] * len(smps), protect="2+2")
    for step in (12337, 12338):
        before.protect(step)
    dying = [
        subprocess.Popen([sys.executable, "-c", DIE, str(smp.arena), smp.job, f"dp{rank}"])
        for rank, smp in enumerate(smps)
        if rank in (2, 3, 6)
    ]
    for process in dying:
        process.wait(DEADLINE_S)
    smps[1].lose().launch().wait_ready()
    after = Run([Trainer(smp, f"dp{rank}", 300_000) for rank, smp in enumerate(smps)], protect="2+2")
    plan = after.plan()
    after.join(2)
    for trainer in after:
        trainer.recover(plan)
    after.start(2)
    for step in (12339, 12340):
        after.protect(step)
    smps[5].lose()
    status = f"http://127.0.0.1:{smps[0].owner.http_port}/status.json"  # asking makes it notice; the next answer tells
    await_that(lambda: b"does not answer: " in urllib.request.urlopen(status, timeout=DEADLINE_S).read())
    return smps[0]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def show(window: Browser, smp: SmpProcess, width: int, *, dark: bool = False) -> None:
    """Show the page at this width, as first loaded: later updates are ignored."""
    window.resize(width, phone=width == PHONE)
    window.see(dark=dark)
    window.open(f"http://127.0.0.1:{smp.owner.http_port}/", "document.querySelector('#nodes td')")
    window.run("show = () => {}")


@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (PHONE, True), (WIDE, False), (320, False), (700, True)])
def test_all_of_it_fits_and_can_be_read(
    window: Browser, job: SmpProcess, tmp_path: Path, width: int, dark: bool
) -> None:
    show(window, job, width, dark=dark)
    assert window.run("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    assert window.run(CUT_OFF) == []
    assert window.run(BROKEN) == []
    faint = [each for each in window.run(TEXTS) if contrast(each["ink"], each["paper"]) < READABLE]
    assert faint == []
    picture = window.picture(tmp_path / "picture.png")
    assert matplotlib.image.imread(picture).shape[1] == (2 if width == PHONE else 1) * width


CUT_OFF = """[...document.querySelectorAll("body *")].filter(each => {
  const box = each.getBoundingClientRect();
  return box.width && each.innerText && (box.left < 0 || box.right > innerWidth + 0.5
    || each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline");
}).map(each => each.outerHTML.slice(0, 200))"""
"""Elements that are off the screen, or too small for their contents."""

BROKEN = f"""(() => {{
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [], range = new Range();
  for (let text; text = walk.nextNode();)
    for (const word of text.data.matchAll(/\\S+/g)) {{
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (word[0].length <= {WORD} && new Set([...range.getClientRects()].map(box => box.top)).size > 1)
        found.push(word[0]);
    }}
  return found;
}})()"""
"""Words of at most `WORD` characters that are broken across lines."""

TEXTS = """(() => {
  const colour = text => text.match(/[\\d.]+/g).map(Number);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), found = [];
  for (let text; text = walk.nextNode();) {
    const owner = text.parentElement;
    if (!text.data.trim() || !owner.checkVisibility() || !owner.getClientRects().length) continue;
    let behind = owner;
    while (getComputedStyle(behind).backgroundColor.endsWith(", 0)")) behind = behind.parentElement;
    found.push({ text: text.data, ink: colour(getComputedStyle(owner).color),
      paper: colour(getComputedStyle(behind).backgroundColor) });
  }
  return found;
})()"""
"""Every visible text, its colour and its background colour."""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("sight", SIGHTS)
def test_phases_are_told_apart(window: Browser, job: SmpProcess, tmp_path: Path, dark: bool, sight: str) -> None:
    show(window, job, PHONE, dark=dark)
    window.see(dark=dark, sight=sight)
    picture = matplotlib.image.imread(window.picture(tmp_path / "picture.png"))
    places = window.run(
        "[...document.querySelectorAll('.phases li')].map(each => { const box = each.getBoundingClientRect();"
        "return [each.innerText, 2 * (box.left + scrollX + 5), 2 * (box.top + scrollY + box.height / 2)]; })"
    )
    seen = {text.rpartition(" ")[0].rpartition(" ")[0]: picture[int(y), int(x), :3] for text, x, y in places}
    assert list(seen) == [name for name, _, _ in SPANS]
    for (one, colour), (other, another) in combinations(seen.items(), 2):
        assert np.linalg.norm(lab(colour) - lab(another)) > APART, (one, other)
    paper = picture[4, 4, :3]
    assert all(contrast(255 * colour, 255 * paper) > VISIBLE for colour in seen.values())


def test_a_lane_is_as_long_as_its_phases(window: Browser, job: SmpProcess) -> None:
    show(window, job, WIDE)
    lanes: list[dict[str, Any]] = window.run(
        "[...document.querySelectorAll('.lane')].map(each => ({ name: each.children[0].innerText,"
        "total: parseFloat(each.children[1].innerText),"
        "wide: [...each.querySelectorAll('i')].reduce((sum, piece) => sum + piece.getBoundingClientRect().width, 0) }))"
    )
    assert {lane["name"] for lane in lanes} == {
        *("node0", "node1", "node4", LONG),
        *(f"node{rank}, lost dp{rank}" for rank in (2, 3, 6)),
    }
    assert [lane["total"] for lane in lanes] == sorted((lane["total"] for lane in lanes), reverse=True)
    for slower, faster in pairwise(lanes):
        assert slower["wide"] >= faster["wide"] - 4 * FEW_PIXELS


def test_events_are_sentences_and_what_all_say_is_said_once(window: Browser, job: SmpProcess) -> None:
    show(window, job, WIDE)
    events: list[list[str]] = window.run(
        "[...document.querySelectorAll('.event')].map(each => [...each.children].map(part => part.innerText))"
    )
    texts = [text for _, _, text in events]
    assert len(texts) == len(set(texts))
    died = [text for text in texts if text.startswith("error: trainer dp")]
    assert len(died) == 3
    [gone] = [text for text in texts if "does not answer" in text]
    assert re.fullmatch(r"[\d.]+:\d+ .*: unavailable, [A-Z][\w ()]+", gone)
    assert all(" died " in text and text.endswith(" 12,338") for text in died)
    [codec] = [nodes for _, nodes, text in events if text.startswith("parity is ")]
    assert codec == "7 nodes"


def test_who_does_not_answer_is_named(window: Browser, job: SmpProcess) -> None:
    show(window, job, PHONE)
    body = window.run("document.body.innerText")
    assert re.search("step 12,340 .*safe .* 1 node", body) and re.search("survives .* 1 node", body)
    assert body.count("node5 does not answer") == 1
    assert "✗ node5" in body
    assert window.run("document.querySelectorAll('.node.bad').length") == 1
    assert window.run("document.querySelectorAll('.node').length") == 8


def test_a_page_whose_smp_is_gone_says_so(window: Browser, ground: Ground) -> None:
    smp = ground.smp()
    run_on([smp], [[3000]]).protect(1)
    show(window, smp, PHONE)
    smp.kill()
    gone = "new Promise(done => setTimeout(() => done(document.getElementById('stale').style.display), 100))"
    while window.run(gone) != "block":
        pass
    assert "does not answer" in window.run("document.body.innerText")


def contrast(one: Any, other: Any) -> float:
    """Contrast of two sRGB colours from 0 to 255, by WCAG."""
    dark, light = sorted(float(linear(np.asarray(each[:3]) / 255) @ [0.2126, 0.7152, 0.0722]) for each in (one, other))
    return (light + 0.05) / (dark + 0.05)


def linear(colour: NDArray[Any]) -> NDArray[Any]:
    return np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)


def lab(colour: NDArray[Any]) -> NDArray[Any]:
    """CIE L*a*b* (white D65) of an sRGB colour from 0 to 1."""
    primaries = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.asarray(primaries) @ linear(colour) / [0.9505, 1.0, 1.089]
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_contrast_and_distance_are_as_published() -> None:
    """Black and white, and a pair of colours whose values are in many tables."""
    assert contrast((0, 0, 0), (255, 255, 255)) == pytest.approx(21.0)
    assert contrast((0x77, 0x77, 0x77), (255, 255, 255)) == pytest.approx(4.48, abs=0.01)
    assert lab(np.array([1.0, 0.0, 0.0])) == pytest.approx([53.24, 80.09, 67.20], abs=0.1)
