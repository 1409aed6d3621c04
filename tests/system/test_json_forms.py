"""What goes over a socket or lies in shared memory as JSON: it is read back the same, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.answers import read_trainer_request
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.messages import AskInventory, read_peer_bulk, read_peer_control
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.records import ParityRecord, ShardRecord
from holdfast.smp_daemon.shared.sources import Sources
from tests.sampling import costly
from tests.scripts import completed
from tests.strategies import (
    addresses,
    json_values,
    lacking_a_key,
    layouts,
    names,
    parity_records,
    ports,
    shard_records,
    snapshots,
    spoilt,
    tags,
    through_json,
)

INFINITE = float("inf")
positions = st.integers(0, 7)


@dataclass(frozen=True)
class Form:
    """One kind of message or record.

    Attributes:
        drawn: valid ones.
        refusal: a pattern for the error about an invalid one.
        needed: turns a valid one into one whose keys are all required; dictionaries may lack any key.
        infinite: changes that make a valid one invalid, each with an infinite number.
    """

    drawn: st.SearchStrategy[Any]
    tell: Callable[[Any], Any]
    read: Callable[[Any], Any]
    refusal: str
    needed: Callable[[Any], Any] = lambda value: value
    infinite: tuple[dict[str, Any], ...] = ()

    def told(self) -> st.SearchStrategy[Any]:
        return self.drawn.map(self.tell)


OPTIONAL = {"domains", "left", "parity_slots", "persisted", "kind", "start", "ends", "follows", "over"} | {
    field.name for field in fields(Inventory) if field.default is not MISSING or field.default_factory is not MISSING
} - {"layouts"}
"""Keys with defaults."""

FORMS = {
    "layout": Form(
        layouts(),
        to_plain,
        Layout.read,
        "not a layout",
        infinite=tuple({key: INFINITE} for key in ("epoch", "revision", "data", "parity", "unit_bytes", "slots")),
    ),
    "inventory": Form(
        st.builds(
            Inventory,
            node=names,
            host=names,
            control_port=ports,
            bulk_port=ports,
            epoch=st.integers(0, 9),
            protected=st.none() | snapshots,
            trainers=st.integers(0, 9),
            layouts=st.lists(layouts(), max_size=2).map(
                lambda some: {(each.epoch, each.revision): each for each in some}
            ),
            shards=st.frozensets(st.tuples(snapshots, names), max_size=4),
            parities=st.frozensets(st.tuples(snapshots, tags, positions), max_size=4),
            never_acknowledged=st.frozensets(snapshots, max_size=3),
        ),
        Inventory.to_plain,
        Inventory.read,
        ".",
        infinite=(
            {"epoch": INFINITE},
            {"trainers": INFINITE},
            {"protected": [1, INFINITE]},
            {"shards": [[[1, INFINITE], "dp0"]]},
            {"parities": [[[1, 2], "tag", INFINITE]]},
        ),
    ),
    "sources": Form(
        st.builds(
            Sources,
            snapshots,
            layouts(),
            st.dictionaries(names, addresses, min_size=1, max_size=4),
            st.dictionaries(positions, st.dictionaries(positions, addresses, max_size=3), max_size=3),
        ),
        to_plain,
        partial(from_plain, Sources),
        ".",
        needed=lambda sources: replace(sources, shards={}, parities={}),
        infinite=({"snapshot": [1, INFINITE]}, {"parities": {"0": {"0": ["host", INFINITE]}}}),
    ),
    "shard record": Form(
        shard_records,
        to_plain,
        partial(from_plain, ShardRecord),
        "not ShardRecord",
        infinite=({"unit_bytes": INFINITE},),
    ),
    "parity record": Form(
        parity_records,
        to_plain,
        partial(from_plain, ParityRecord),
        "ParityRecord|not of the same units|longer than a unit",
        needed=lambda record: replace(record, lengths=(), digests=(), sources=()),
        infinite=({"unit_bytes": INFINITE},),
    ),
}


each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


@each_form
@given(data=st.data())
def test_it_comes_back(form: Form, data: st.DataObject) -> None:
    value = data.draw(form.drawn)
    assert form.read(through_json(form.tell(value))) == value


@each_form
@given(data=json_values)
def test_random_json_is_refused(form: Form, data: Any) -> None:
    with pytest.raises(ProtocolError):
        form.read(data)


@each_form
@given(data=st.data())
def test_what_lacks_a_key_is_refused(form: Form, data: st.DataObject) -> None:
    lacking = data.draw(lacking_a_key(form.drawn.map(lambda value: form.tell(form.needed(value))), OPTIONAL))
    with pytest.raises(ProtocolError, match=form.refusal):
        form.read(lacking)


@each_form
@given(data=st.data())
def test_what_is_spoilt_is_refused_or_is_something_else_that_is_good(form: Form, data: st.DataObject) -> None:
    try:
        value = form.read(data.draw(spoilt(form.told())))
    except ProtocolError:
        return
    assert form.read(through_json(form.tell(value))) == value


@each_form
@costly()
@given(data=st.data())
def test_an_infinite_number_is_refused(form: Form, data: st.DataObject) -> None:
    good = data.draw(form.told())
    for bad in form.infinite:
        with pytest.raises(ProtocolError):
            form.read({**good, **bad})


# ---------------------------------------------------------------------- one by one


@given(shard_records, parity_records)
def test_one_kind_of_record_is_not_taken_for_the_other(shard: ShardRecord, parity: ParityRecord) -> None:
    with pytest.raises(ProtocolError, match="kind"):
        from_plain(ShardRecord, {**to_plain(parity), **to_plain(shard), "kind": "parity"})
    with pytest.raises(ProtocolError, match="kind"):
        from_plain(ParityRecord, {**to_plain(shard), **to_plain(parity), "kind": "shard"})


@given(layouts())
def test_layouts_of_one_epoch_are_told_apart_by_their_revision(layout: Layout) -> None:
    newer = replace(layout, revision=layout.revision + 1)
    both = {(layout.epoch, layout.revision): layout, (layout.epoch, newer.revision): newer}
    assert Inventory.read(through_json(Inventory("a", "h", 1, 2, layouts=both).to_plain())).layouts == both


def test_an_inventory_says_where_bytes_are_served() -> None:
    assert Inventory("a", "10.0.0.1", 7000, 7001).bulk == ("10.0.0.1", 7001)


def test_a_message_is_read_as_one_of_those_that_are_answered_there() -> None:
    message = to_plain(AskInventory())
    assert read_trainer_request(message) == AskInventory()
    for read in (read_peer_bulk, read_peer_control):
        with pytest.raises(ProtocolError, match="is answered"):
            read(message)


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_what_no_json_carries_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError, match="is answered"):
        read_trainer_request({"op": value})


THREADS_READ_A_CLASS_FOR_THE_FIRST_TIME = """
import dataclasses, sys, threading
from typing import Annotated
import msgspec
from holdfast.smp_daemon.shared.plain import decode_json, from_plain

sys.setswitchinterval(1e-6)
for _ in range(300):
    @dataclasses.dataclass
    class Inner:
        a: Annotated[int, msgspec.Meta(ge=0)]
        b: list[str]
    class Outer(msgspec.Struct):
        c: Inner
        d: dict[str, Inner]
    at_once = threading.Barrier(4, timeout=30)
    def read(thread):
        at_once.wait()
        if thread % 2:
            decode_json(Outer, b'{"c": {"a": 1, "b": []}, "d": {}}', "it")
        else:
            from_plain(Inner, {"a": 1, "b": ["x"]})
    threads = [threading.Thread(target=read, args=(thread,)) for thread in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_may_read_a_class_at_once_the_first_time() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", THREADS_READ_A_CLASS_FOR_THE_FIRST_TIME]
    done = completed(command)
    assert done.returncode == 0, done.stderr
