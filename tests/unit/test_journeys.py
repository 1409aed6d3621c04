"""The kit for newcomers' journeys: commands are read from pages, and hosts share nothing but a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.journeys.hosts import Failed, Shell, network, why_no_hosts
from tools.journeys.newcomer import STEPS, check_same, training
from tools.journeys.pages import Docs, Stale
from tools.pythons import ROOT

CONNECT = "import os, socket; print(os.strerror(socket.socket().connect_ex(('alpha', 9))))"

PAGE = """# Top

Say `tool look` or `tool look --all`.

## Start

```console
$ tool start --size 64GB \\
      --quiet        # in the foreground
# Not a heading
$ tool stop
```

```python
print("one")
```

## Next

`tool start --later`
"""


@pytest.fixture
def docs(tmp_path: Path) -> Docs:
    (tmp_path / "page.md").write_text(PAGE)
    return Docs(tmp_path)


def test_commands_and_programs_are_read_out_of_a_section(docs: Docs) -> None:
    assert docs.command("page.md", "Start", "tool start", {"64GB": "1MB"}) == "tool start --size 1MB --quiet"
    assert docs.command("page.md", "Next", "tool start") == "tool start --later"
    assert docs.command("page.md", "Top", "tool look") == "tool look"
    assert docs.program("page.md", "Start") == 'print("one")\n'


@pytest.mark.parametrize(
    ("heading", "words", "own"),
    [("Start", "tool begin", {}), ("Start", "tool", {}), ("Gone", "tool", {}), ("Start", "tool stop", {"64GB": "1MB"})],
)
def test_a_page_that_does_not_say_it_is_stale(docs: Docs, heading: str, words: str, own: dict[str, str]) -> None:
    with pytest.raises(Stale, match=r"page\.md"):
        docs.command("page.md", heading, words, own)


def test_the_loop_of_the_first_page_is_a_program() -> None:
    assert "InMemorySnapshot" in compile(training(Docs(ROOT)), "train.py", "exec").co_names


def test_runs_that_differ_in_one_bit_are_told_apart() -> None:
    one = [f"step {step} loss 0x1.0p-{step}" for step in range(STEPS)]
    check_same([*one, "weights 0x1.8p+1"], [*one[:60], *one[55:], "weights 0x1.8p+1"])
    for other in ([*one, "weights 0x1.9p+1"], [*one[:-1], "weights 0x1.8p+1"], one):
        with pytest.raises(Failed):
            check_same([*one, "weights 0x1.8p+1"], other)


@pytest.mark.skipif(bool(why_no_hosts()), reason=f"there can be no hosts: {why_no_hosts()}")
def test_hosts_have_all_of_their_own_and_lose_it_with_the_power(tmp_path: Path) -> None:
    python = Path(sys.executable)
    devices = {path.name for path in Path("/sys/class/net").iterdir()}
    with network(tmp_path) as wires:
        one, other = wires.host("alpha", 1), wires.host("beta", 2)
        here, there = (Shell(tmp_path, python, host) for host in (one, other))
        assert here.run("hostname; hostname -I").split() == ["alpha", one.address]
        here.run("export KEPT=$(getent hosts beta)")
        assert here.run("echo $KEPT").split() == [other.address, "beta"]
        assert there.run(f'python3 -c "{CONNECT}"').strip() == "Connection refused"  # the host is there
        there.run("touch /dev/shm/mine; ! [ -e /dev/shm/theirs ]")
        running = there.start("sleep infinity")
        assert not Path("/dev/shm/mine").exists()
        other.cut_power()
        running.process.wait(30)
        again = Shell(tmp_path, python, wires.host("beta", 2))
        again.run("! [ -e /dev/shm/mine ]")
        with pytest.raises(Failed, match="status 3"):
            again.run("exit 3")
    assert {path.name for path in Path("/sys/class/net").iterdir()} == devices
