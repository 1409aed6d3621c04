from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ParityDoneRequest(_message.Message):
    __slots__ = ("job", "epoch", "snapshot_epoch", "snapshot_step", "tag", "position")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_STEP_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    snapshot_epoch: int
    snapshot_step: int
    tag: str
    position: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., snapshot_epoch: _Optional[int] = ..., snapshot_step: _Optional[int] = ..., tag: _Optional[str] = ..., position: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("job", "node", "epoch", "revision")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    epoch: int
    revision: int
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...
