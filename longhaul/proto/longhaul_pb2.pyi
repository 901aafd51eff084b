from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExperienceSpec(_message.Message):
    __slots__ = ("env_id", "row_shape", "row_dtype", "stack", "num_actions", "n_step", "gamma")
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_SHAPE_FIELD_NUMBER: _ClassVar[int]
    ROW_DTYPE_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    NUM_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    N_STEP_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    env_id: str
    row_shape: _containers.RepeatedScalarFieldContainer[int]
    row_dtype: str
    stack: int
    num_actions: int
    n_step: int
    gamma: float
    def __init__(self, env_id: _Optional[str] = ..., row_shape: _Optional[_Iterable[int]] = ..., row_dtype: _Optional[str] = ..., stack: _Optional[int] = ..., num_actions: _Optional[int] = ..., n_step: _Optional[int] = ..., gamma: _Optional[float] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("protocol_version", "role", "spec")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: str
    spec: ExperienceSpec
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[str] = ..., spec: _Optional[_Union[ExperienceSpec, _Mapping]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_version", "run_id", "spec", "capacity", "min_size", "priority_exponent", "weights_epoch", "weights_version")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MIN_SIZE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    spec: ExperienceSpec
    capacity: int
    min_size: int
    priority_exponent: float
    weights_epoch: int
    weights_version: int
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., spec: _Optional[_Union[ExperienceSpec, _Mapping]] = ..., capacity: _Optional[int] = ..., min_size: _Optional[int] = ..., priority_exponent: _Optional[float] = ..., weights_epoch: _Optional[int] = ..., weights_version: _Optional[int] = ...) -> None: ...

class SampleRequest(_message.Message):
    __slots__ = ("open", "ack", "ping")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    open: Open
    ack: Ack
    ping: Ping
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("learner_id", "epoch", "cache_rows", "batch_size", "minibatches", "window", "last_sequence", "run_id", "row_level", "budget_bytes_per_s", "mark_first")
    LEARNER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CACHE_ROWS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MINIBATCHES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROW_LEVEL_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    MARK_FIRST_FIELD_NUMBER: _ClassVar[int]
    learner_id: int
    epoch: int
    cache_rows: int
    batch_size: int
    minibatches: int
    window: int
    last_sequence: int
    run_id: str
    row_level: int
    budget_bytes_per_s: float
    mark_first: bool
    def __init__(self, learner_id: _Optional[int] = ..., epoch: _Optional[int] = ..., cache_rows: _Optional[int] = ..., batch_size: _Optional[int] = ..., minibatches: _Optional[int] = ..., window: _Optional[int] = ..., last_sequence: _Optional[int] = ..., run_id: _Optional[str] = ..., row_level: _Optional[int] = ..., budget_bytes_per_s: _Optional[float] = ..., mark_first: bool = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("sequence", "priorities", "width", "window", "hold_s")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    HOLD_S_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    priorities: bytes
    width: int
    window: int
    hold_s: float
    def __init__(self, sequence: _Optional[int] = ..., priorities: _Optional[bytes] = ..., width: _Optional[int] = ..., window: _Optional[int] = ..., hold_s: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class SampleResponse(_message.Message):
    __slots__ = ("opened", "batch", "part", "pong")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    batch: Batch
    part: RowsPart
    pong: Pong
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., part: _Optional[_Union[RowsPart, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("resumed", "next_sequence", "run_id")
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    resumed: bool
    next_sequence: int
    run_id: str
    def __init__(self, resumed: bool = ..., next_sequence: _Optional[int] = ..., run_id: _Optional[str] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("id", "acked_sequence", "received_s")
    ID_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_S_FIELD_NUMBER: _ClassVar[int]
    id: int
    acked_sequence: int
    received_s: float
    def __init__(self, id: _Optional[int] = ..., acked_sequence: _Optional[int] = ..., received_s: _Optional[float] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("sequence", "count", "columns", "columns_bytes", "table_size", "new_slots", "rows_bytes", "rows_wire_bytes", "rows", "draw_age_s", "acked_sequence", "inserts", "samples", "policy_version", "mean_priority", "audit_slots", "audit_crc32", "credit_wait_s", "service_s", "first_crossings", "priority_age_s")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_BYTES_FIELD_NUMBER: _ClassVar[int]
    TABLE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NEW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAW_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ACKED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    INSERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MEAN_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AUDIT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_CRC32_FIELD_NUMBER: _ClassVar[int]
    CREDIT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SERVICE_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_CROSSINGS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    count: int
    columns: bytes
    columns_bytes: int
    table_size: int
    new_slots: bytes
    rows_bytes: int
    rows_wire_bytes: int
    rows: bytes
    draw_age_s: float
    acked_sequence: int
    inserts: int
    samples: int
    policy_version: float
    mean_priority: float
    audit_slots: bytes
    audit_crc32: int
    credit_wait_s: float
    service_s: float
    first_crossings: bytes
    priority_age_s: float
    def __init__(self, sequence: _Optional[int] = ..., count: _Optional[int] = ..., columns: _Optional[bytes] = ..., columns_bytes: _Optional[int] = ..., table_size: _Optional[int] = ..., new_slots: _Optional[bytes] = ..., rows_bytes: _Optional[int] = ..., rows_wire_bytes: _Optional[int] = ..., rows: _Optional[bytes] = ..., draw_age_s: _Optional[float] = ..., acked_sequence: _Optional[int] = ..., inserts: _Optional[int] = ..., samples: _Optional[int] = ..., policy_version: _Optional[float] = ..., mean_priority: _Optional[float] = ..., audit_slots: _Optional[bytes] = ..., audit_crc32: _Optional[int] = ..., credit_wait_s: _Optional[float] = ..., service_s: _Optional[float] = ..., first_crossings: _Optional[bytes] = ..., priority_age_s: _Optional[float] = ...) -> None: ...

class RowsPart(_message.Message):
    __slots__ = ("sequence", "offset", "data")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    offset: int
    data: bytes
    def __init__(self, sequence: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class InsertRequest(_message.Message):
    __slots__ = ("run_id", "writer_id", "streams", "keep_rows", "places", "cells", "first_transition", "transitions")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    KEEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TRANSITION_FIELD_NUMBER: _ClassVar[int]
    TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    writer_id: int
    streams: int
    keep_rows: int
    places: bytes
    cells: _containers.RepeatedScalarFieldContainer[bytes]
    first_transition: int
    transitions: bytes
    def __init__(self, run_id: _Optional[str] = ..., writer_id: _Optional[int] = ..., streams: _Optional[int] = ..., keep_rows: _Optional[int] = ..., places: _Optional[bytes] = ..., cells: _Optional[_Iterable[bytes]] = ..., first_transition: _Optional[int] = ..., transitions: _Optional[bytes] = ...) -> None: ...

class InsertResponse(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...

class WeightsChunk(_message.Message):
    __slots__ = ("epoch", "version", "index", "count", "total_bytes", "crc32", "data")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    index: int
    count: int
    total_bytes: int
    crc32: int
    data: bytes
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., index: _Optional[int] = ..., count: _Optional[int] = ..., total_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("accepted", "epoch", "version")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    epoch: int
    version: int
    def __init__(self, accepted: bool = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("epoch", "version")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: str
    def __init__(self, checkpoint_id: _Optional[str] = ...) -> None: ...

class CheckpointResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class HealthRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HealthResponse(_message.Message):
    __slots__ = ("run_id", "table_size", "inserts", "samples", "learner_connected", "pause_inserts", "weights_epoch", "weights_version", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LEARNER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    PAUSE_INSERTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    table_size: int
    inserts: int
    samples: int
    learner_connected: bool
    pause_inserts: bool
    weights_epoch: int
    weights_version: int
    counters: _containers.ScalarMap[str, int]
    def __init__(self, run_id: _Optional[str] = ..., table_size: _Optional[int] = ..., inserts: _Optional[int] = ..., samples: _Optional[int] = ..., learner_connected: bool = ..., pause_inserts: bool = ..., weights_epoch: _Optional[int] = ..., weights_version: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...
