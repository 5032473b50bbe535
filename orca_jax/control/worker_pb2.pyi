from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Join(_message.Message):
    __slots__ = ("role", "model", "digest", "dtype", "stage", "n_stages", "first_layer", "n_layers", "data_address")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    N_STAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    N_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    digest: str
    dtype: str
    stage: int
    n_stages: int
    first_layer: int
    n_layers: int
    data_address: str
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., digest: _Optional[str] = ..., dtype: _Optional[str] = ..., stage: _Optional[int] = ..., n_stages: _Optional[int] = ..., first_layer: _Optional[int] = ..., n_layers: _Optional[int] = ..., data_address: _Optional[str] = ...) -> None: ...

class About(_message.Message):
    __slots__ = ("dtype", "room", "modest", "n_devices", "device", "attention", "path")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    MODEST_FIELD_NUMBER: _ClassVar[int]
    N_DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    room: int
    modest: int
    n_devices: int
    device: str
    attention: str
    path: str
    def __init__(self, dtype: _Optional[str] = ..., room: _Optional[int] = ..., modest: _Optional[int] = ..., n_devices: _Optional[int] = ..., device: _Optional[str] = ..., attention: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("up_to_version_4", "version", "checksum", "body")
    UP_TO_VERSION_4_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    up_to_version_4: bytes
    version: int
    checksum: int
    body: bytes
    def __init__(self, up_to_version_4: _Optional[bytes] = ..., version: _Optional[int] = ..., checksum: _Optional[int] = ..., body: _Optional[bytes] = ...) -> None: ...

class Body(_message.Message):
    __slots__ = ("epoch", "iteration", "stage", "start", "message", "words", "ready", "received", "done", "tokens", "trouble", "passed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    iteration: int
    stage: int
    start: Start
    message: Iteration
    words: bytes
    ready: Nothing
    received: StageTime
    done: StageTime
    tokens: Tokens
    trouble: str
    passed: Nothing
    def __init__(self, epoch: _Optional[int] = ..., iteration: _Optional[int] = ..., stage: _Optional[int] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., message: _Optional[_Union[Iteration, _Mapping]] = ..., words: _Optional[bytes] = ..., ready: _Optional[_Union[Nothing, _Mapping]] = ..., received: _Optional[_Union[StageTime, _Mapping]] = ..., done: _Optional[_Union[StageTime, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., trouble: _Optional[str] = ..., passed: _Optional[_Union[Nothing, _Mapping]] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterPart(_message.Message):
    __slots__ = ("epoch", "version", "weight", "part", "rank", "a", "b", "checksum")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    version: int
    weight: str
    part: int
    rank: int
    a: bytes
    b: bytes
    checksum: int
    def __init__(self, epoch: _Optional[int] = ..., version: _Optional[int] = ..., weight: _Optional[str] = ..., part: _Optional[int] = ..., rank: _Optional[int] = ..., a: _Optional[bytes] = ..., b: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("shape", "next_address", "worker_seconds", "ready_seconds", "weights_version", "weights_directory", "sleep_level", "adapters_version", "adapters_directory")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    NEXT_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    shape: Shape
    next_address: str
    worker_seconds: float
    ready_seconds: float
    weights_version: int
    weights_directory: str
    sleep_level: int
    adapters_version: int
    adapters_directory: str
    def __init__(self, shape: _Optional[_Union[Shape, _Mapping]] = ..., next_address: _Optional[str] = ..., worker_seconds: _Optional[float] = ..., ready_seconds: _Optional[float] = ..., weights_version: _Optional[int] = ..., weights_directory: _Optional[str] = ..., sleep_level: _Optional[int] = ..., adapters_version: _Optional[int] = ..., adapters_directory: _Optional[str] = ...) -> None: ...

class Shape(_message.Message):
    __slots__ = ("block_size", "max_blocks", "max_rows", "max_tokens", "n_rows", "n_blocks", "vocab_size", "deterministic", "coarse_buckets", "max_encoder_blocks", "embedding_size", "sparse_layers", "top_k", "n_experts", "states", "n_snapshots", "drafts", "max_adapters", "adapter_rank", "adapted_embedding", "adapted_head", "adapted_experts", "n_host_blocks", "n_host_states", "n_draft_states", "max_drafts")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_ROWS_FIELD_NUMBER: _ClassVar[int]
    N_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    COARSE_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    MAX_ENCODER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    N_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    N_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_RANK_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_HEAD_FIELD_NUMBER: _ClassVar[int]
    ADAPTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    N_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    N_HOST_STATES_FIELD_NUMBER: _ClassVar[int]
    N_DRAFT_STATES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    max_blocks: int
    max_rows: int
    max_tokens: int
    n_rows: int
    n_blocks: int
    vocab_size: int
    deterministic: bool
    coarse_buckets: bool
    max_encoder_blocks: int
    embedding_size: int
    sparse_layers: int
    top_k: int
    n_experts: int
    states: bool
    n_snapshots: int
    drafts: bool
    max_adapters: int
    adapter_rank: int
    adapted_embedding: bool
    adapted_head: bool
    adapted_experts: bool
    n_host_blocks: int
    n_host_states: int
    n_draft_states: int
    max_drafts: int
    def __init__(self, block_size: _Optional[int] = ..., max_blocks: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_tokens: _Optional[int] = ..., n_rows: _Optional[int] = ..., n_blocks: _Optional[int] = ..., vocab_size: _Optional[int] = ..., deterministic: _Optional[bool] = ..., coarse_buckets: _Optional[bool] = ..., max_encoder_blocks: _Optional[int] = ..., embedding_size: _Optional[int] = ..., sparse_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., n_experts: _Optional[int] = ..., states: _Optional[bool] = ..., n_snapshots: _Optional[int] = ..., drafts: _Optional[bool] = ..., max_adapters: _Optional[int] = ..., adapter_rank: _Optional[int] = ..., adapted_embedding: _Optional[bool] = ..., adapted_head: _Optional[bool] = ..., adapted_experts: _Optional[bool] = ..., n_host_blocks: _Optional[int] = ..., n_host_states: _Optional[int] = ..., n_draft_states: _Optional[int] = ..., max_drafts: _Optional[int] = ...) -> None: ...

class Iteration(_message.Message):
    __slots__ = ("sampling", "integers", "flags", "token_ids", "earlier_ids", "blocks", "bias", "encoder_length", "encoder_ids", "encoder_blocks", "adapters", "put_adapters", "copies", "to_host", "from_host", "states_before", "states_after", "states_kept")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    INTEGERS_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EARLIER_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ENCODER_IDS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PUT_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    TO_HOST_FIELD_NUMBER: _ClassVar[int]
    FROM_HOST_FIELD_NUMBER: _ClassVar[int]
    STATES_BEFORE_FIELD_NUMBER: _ClassVar[int]
    STATES_AFTER_FIELD_NUMBER: _ClassVar[int]
    STATES_KEPT_FIELD_NUMBER: _ClassVar[int]
    sampling: bytes
    integers: bytes
    flags: bytes
    token_ids: bytes
    earlier_ids: bytes
    blocks: bytes
    bias: bytes
    encoder_length: bytes
    encoder_ids: bytes
    encoder_blocks: bytes
    adapters: bytes
    put_adapters: bytes
    copies: bytes
    to_host: bytes
    from_host: bytes
    states_before: bytes
    states_after: bytes
    states_kept: bytes
    def __init__(self, sampling: _Optional[bytes] = ..., integers: _Optional[bytes] = ..., flags: _Optional[bytes] = ..., token_ids: _Optional[bytes] = ..., earlier_ids: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., bias: _Optional[bytes] = ..., encoder_length: _Optional[bytes] = ..., encoder_ids: _Optional[bytes] = ..., encoder_blocks: _Optional[bytes] = ..., adapters: _Optional[bytes] = ..., put_adapters: _Optional[bytes] = ..., copies: _Optional[bytes] = ..., to_host: _Optional[bytes] = ..., from_host: _Optional[bytes] = ..., states_before: _Optional[bytes] = ..., states_after: _Optional[bytes] = ..., states_kept: _Optional[bytes] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("seconds", "link_bytes", "routed")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    link_bytes: int
    routed: bytes
    def __init__(self, seconds: _Optional[float] = ..., link_bytes: _Optional[int] = ..., routed: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "prompt_logprobs", "pooled", "routed")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    prompt_logprobs: bytes
    pooled: bytes
    routed: bytes
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., prompt_logprobs: _Optional[bytes] = ..., pooled: _Optional[bytes] = ..., routed: _Optional[bytes] = ...) -> None: ...
