from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_CONTEXT: _ClassVar[Finish]

class RowEncoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_ENCODING_UNSPECIFIED: _ClassVar[RowEncoding]
    ROW_ENCODING_INT8: _ClassVar[RowEncoding]
    ROW_ENCODING_FLOAT16: _ClassVar[RowEncoding]

class FaultCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAULT_CODE_UNSPECIFIED: _ClassVar[FaultCode]
    FAULT_CODE_PROTOCOL: _ClassVar[FaultCode]
    FAULT_CODE_VERSION_MISMATCH: _ClassVar[FaultCode]
    FAULT_CODE_FINGERPRINT_MISMATCH: _ClassVar[FaultCode]
    FAULT_CODE_OUT_OF_SYNC: _ClassVar[FaultCode]
    FAULT_CODE_CONTEXT_FULL: _ClassVar[FaultCode]
    FAULT_CODE_TOO_LARGE: _ClassVar[FaultCode]
    FAULT_CODE_BUSY: _ClassVar[FaultCode]
    FAULT_CODE_INTERNAL: _ClassVar[FaultCode]
    FAULT_CODE_REPLACED: _ClassVar[FaultCode]
    FAULT_CODE_IDLE: _ClassVar[FaultCode]
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_CONTEXT: Finish
ROW_ENCODING_UNSPECIFIED: RowEncoding
ROW_ENCODING_INT8: RowEncoding
ROW_ENCODING_FLOAT16: RowEncoding
FAULT_CODE_UNSPECIFIED: FaultCode
FAULT_CODE_PROTOCOL: FaultCode
FAULT_CODE_VERSION_MISMATCH: FaultCode
FAULT_CODE_FINGERPRINT_MISMATCH: FaultCode
FAULT_CODE_OUT_OF_SYNC: FaultCode
FAULT_CODE_CONTEXT_FULL: FaultCode
FAULT_CODE_TOO_LARGE: FaultCode
FAULT_CODE_BUSY: FaultCode
FAULT_CODE_INTERNAL: FaultCode
FAULT_CODE_REPLACED: FaultCode
FAULT_CODE_IDLE: FaultCode

class ClientMessage(_message.Message):
    __slots__ = ("hello", "prompt", "draft", "cancel", "bye")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prompt: Prompt
    draft: Draft
    cancel: Cancel
    bye: Bye
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "verdict", "fault")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    verdict: Verdict
    fault: Fault
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "newest_version", "fingerprints", "row_encoding", "resume")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    ROW_ENCODING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    newest_version: int
    fingerprints: Fingerprints
    row_encoding: RowEncoding
    resume: Resume
    def __init__(self, protocol_version: _Optional[int] = ..., newest_version: _Optional[int] = ..., fingerprints: _Optional[_Union[Fingerprints, _Mapping]] = ..., row_encoding: _Optional[_Union[RowEncoding, str]] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("token", "connection", "epoch", "marks", "answering", "rows")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    ANSWERING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    token: str
    connection: int
    epoch: int
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    answering: bool
    rows: int
    def __init__(self, token: _Optional[str] = ..., connection: _Optional[int] = ..., epoch: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ..., answering: bool = ..., rows: _Optional[int] = ...) -> None: ...

class Mark(_message.Message):
    __slots__ = ("length", "digest")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    length: int
    digest: int
    def __init__(self, length: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class Fingerprints(_message.Message):
    __slots__ = ("target", "tokenizer", "drafter")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    target: str
    tokenizer: str
    drafter: str
    def __init__(self, target: _Optional[str] = ..., tokenizer: _Optional[str] = ..., drafter: _Optional[str] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("epoch", "base_len", "tokens", "rows_from", "sampling", "max_length", "while_away")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WHILE_AWAY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    rows_from: int
    sampling: Sampling
    max_length: int
    while_away: bool
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., rows_from: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_length: _Optional[int] = ..., while_away: bool = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("epoch", "base_len", "tokens", "parents")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("epoch", "base_len")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "resume_token", "limits", "committed_length", "epoch", "connection", "verdict_follows")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    resume_token: str
    limits: Limits
    committed_length: int
    epoch: int
    connection: int
    verdict_follows: bool
    def __init__(self, protocol_version: _Optional[int] = ..., resume_token: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., committed_length: _Optional[int] = ..., epoch: _Optional[int] = ..., connection: _Optional[int] = ..., verdict_follows: bool = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_context", "max_draft_tokens", "max_frame_bytes", "idle_seconds", "chains_only", "away_seconds", "keep_seconds")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHAINS_ONLY_FIELD_NUMBER: _ClassVar[int]
    AWAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_draft_tokens: int
    max_frame_bytes: int
    idle_seconds: int
    chains_only: bool
    away_seconds: int
    keep_seconds: int
    def __init__(self, max_context: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., idle_seconds: _Optional[int] = ..., chains_only: bool = ..., away_seconds: _Optional[int] = ..., keep_seconds: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("epoch", "base_len", "tokens", "accepted", "finish", "rows", "compute_us")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    finish: Finish
    rows: MemoryRows
    compute_us: int
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., rows: _Optional[_Union[MemoryRows, _Mapping]] = ..., compute_us: _Optional[int] = ...) -> None: ...

class MemoryRows(_message.Message):
    __slots__ = ("start", "count", "kv_heads", "head_dim", "encoding", "data", "scales")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    kv_heads: int
    head_dim: int
    encoding: RowEncoding
    data: bytes
    scales: bytes
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., encoding: _Optional[_Union[RowEncoding, str]] = ..., data: _Optional[bytes] = ..., scales: _Optional[bytes] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("code", "text", "retry_after_ms", "committed_length")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    code: FaultCode
    text: str
    retry_after_ms: int
    committed_length: int
    def __init__(self, code: _Optional[_Union[FaultCode, str]] = ..., text: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., committed_length: _Optional[int] = ...) -> None: ...
