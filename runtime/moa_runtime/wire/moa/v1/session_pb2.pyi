from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_OBJECT: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_DRAFTS: _ClassVar[Capability]
    CAPABILITY_PENALTIES: _ClassVar[Capability]
    CAPABILITY_GRAMMAR: _ClassVar[Capability]
    CAPABILITY_UNSOLICITED_DRAFTS: _ClassVar[Capability]
    CAPABILITY_LOGIT_BIAS: _ClassVar[Capability]
    CAPABILITY_LOGPROBS: _ClassVar[Capability]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_CONTEXT: _ClassVar[Finish]
    FINISH_GRAMMAR: _ClassVar[Finish]

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
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_OBJECT: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_DRAFTS: Capability
CAPABILITY_PENALTIES: Capability
CAPABILITY_GRAMMAR: Capability
CAPABILITY_UNSOLICITED_DRAFTS: Capability
CAPABILITY_LOGIT_BIAS: Capability
CAPABILITY_LOGPROBS: Capability
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish
FINISH_CONTEXT: Finish
FINISH_GRAMMAR: Finish
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
    __slots__ = ("hello", "prompt", "draft", "cancel", "bye", "credit", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prompt: Prompt
    draft: Draft
    cancel: Cancel
    bye: Bye
    credit: Credit
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("welcome", "verdict", "fault", "standing", "rows", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    verdict: Verdict
    fault: Fault
    standing: CreditRevoked
    rows: MemoryRows
    pong: Pong
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., standing: _Optional[_Union[CreditRevoked, _Mapping]] = ..., rows: _Optional[_Union[MemoryRows, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("token", "connection", "epoch", "marks", "answering", "rows", "credit")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    ANSWERING_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    token: str
    connection: int
    epoch: int
    marks: _containers.RepeatedCompositeFieldContainer[Mark]
    answering: bool
    rows: int
    credit: int
    def __init__(self, token: _Optional[str] = ..., connection: _Optional[int] = ..., epoch: _Optional[int] = ..., marks: _Optional[_Iterable[_Union[Mark, _Mapping]]] = ..., answering: bool = ..., rows: _Optional[int] = ..., credit: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("epoch", "base_len", "tokens", "rows_from", "sampling", "max_length", "while_away", "answer_from", "stamp")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    WHILE_AWAY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FROM_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    rows_from: int
    sampling: Sampling
    max_length: int
    while_away: bool
    answer_from: int
    stamp: int
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., rows_from: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_length: _Optional[int] = ..., while_away: bool = ..., answer_from: _Optional[int] = ..., stamp: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "grammar", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    seed: int
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_tokens: int
    grammar: Grammar
    logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("epoch", "base_len", "tokens", "parents", "stamp", "unsolicited", "confidences")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    UNSOLICITED_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    stamp: int
    unsolicited: bool
    confidences: bytes
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., stamp: _Optional[int] = ..., unsolicited: bool = ..., confidences: _Optional[bytes] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "position", "serial", "stamp", "round_trip_us")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    STAMP_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_US_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    position: int
    serial: int
    stamp: int
    round_trip_us: int
    def __init__(self, epoch: _Optional[int] = ..., position: _Optional[int] = ..., serial: _Optional[int] = ..., stamp: _Optional[int] = ..., round_trip_us: _Optional[int] = ...) -> None: ...

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

class Ping(_message.Message):
    __slots__ = ("stamp",)
    STAMP_FIELD_NUMBER: _ClassVar[int]
    stamp: int
    def __init__(self, stamp: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "resume_token", "limits", "committed_length", "epoch", "connection", "verdict_follows", "capabilities", "load", "dtype")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    resume_token: str
    limits: Limits
    committed_length: int
    epoch: int
    connection: int
    verdict_follows: bool
    capabilities: _containers.RepeatedScalarFieldContainer[Capability]
    load: Load
    dtype: str
    def __init__(self, protocol_version: _Optional[int] = ..., resume_token: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., committed_length: _Optional[int] = ..., epoch: _Optional[int] = ..., connection: _Optional[int] = ..., verdict_follows: bool = ..., capabilities: _Optional[_Iterable[_Union[Capability, str]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("answers", "queue_us", "step_us")
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    STEP_US_FIELD_NUMBER: _ClassVar[int]
    answers: int
    queue_us: int
    step_us: int
    def __init__(self, answers: _Optional[int] = ..., queue_us: _Optional[int] = ..., step_us: _Optional[int] = ...) -> None: ...

class Echo(_message.Message):
    __slots__ = ("stamp", "held_us")
    STAMP_FIELD_NUMBER: _ClassVar[int]
    HELD_US_FIELD_NUMBER: _ClassVar[int]
    stamp: int
    held_us: int
    def __init__(self, stamp: _Optional[int] = ..., held_us: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("epoch", "base_len", "tokens", "accepted", "finish", "compute_us", "pushed", "drafted", "draft_us", "rows_until", "echo", "draft_stamp", "logprobs")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    ROWS_UNTIL_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STAMP_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_len: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted: int
    finish: Finish
    compute_us: int
    pushed: bool
    drafted: int
    draft_us: int
    rows_until: int
    echo: Echo
    draft_stamp: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, epoch: _Optional[int] = ..., base_len: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., accepted: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., compute_us: _Optional[int] = ..., pushed: bool = ..., drafted: _Optional[int] = ..., draft_us: _Optional[int] = ..., rows_until: _Optional[int] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ..., draft_stamp: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_tokens", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class CreditRevoked(_message.Message):
    __slots__ = ("epoch", "serial", "echo")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    serial: int
    echo: Echo
    def __init__(self, epoch: _Optional[int] = ..., serial: _Optional[int] = ..., echo: _Optional[_Union[Echo, _Mapping]] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("echo",)
    ECHO_FIELD_NUMBER: _ClassVar[int]
    echo: Echo
    def __init__(self, echo: _Optional[_Union[Echo, _Mapping]] = ...) -> None: ...

class MemoryRows(_message.Message):
    __slots__ = ("start", "count", "kv_heads", "head_dim", "encoding", "data", "scales", "epoch")
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    start: int
    count: int
    kv_heads: int
    head_dim: int
    encoding: RowEncoding
    data: bytes
    scales: bytes
    epoch: int
    def __init__(self, start: _Optional[int] = ..., count: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., encoding: _Optional[_Union[RowEncoding, str]] = ..., data: _Optional[bytes] = ..., scales: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("code", "text", "retry_after_ms", "committed_length", "epoch")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    code: FaultCode
    text: str
    retry_after_ms: int
    committed_length: int
    epoch: int
    def __init__(self, code: _Optional[_Union[FaultCode, str]] = ..., text: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., committed_length: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...
