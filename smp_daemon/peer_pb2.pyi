from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ParityDoneRequest(_message.Message):
    __slots__ = ("job", "epoch", "step", "group", "position")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    job: str
    epoch: int
    step: int
    group: int
    position: int
    def __init__(self, job: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., group: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class PingReply(_message.Message):
    __slots__ = ("job", "node", "epoch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    node: str
    epoch: int
    def __init__(self, job: _Optional[str] = ..., node: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...
