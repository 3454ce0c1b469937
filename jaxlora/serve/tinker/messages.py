"""Protobuf messages of the Tinker API: passes, and results of passes and samples.

The fields that this server reads and writes have the numbers and types of the client's
own messages. Others, such as the origin of tokens, are skipped as protobuf skips any
field that it does not know. Arrays are bytes, little-endian, in row-major order.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# Each line is NUMBER NAME: TYPE, where TYPE is a scalar, an enumeration or a message.
# TYPE[] is repeated, TYPE? knows whether it was set, TYPE|NAME is one of several, of
# which one is set, and map TYPE has text as keys.
_MESSAGES = {
    "ForwardBackwardRequest": """
        1 model_id: string
        2 seq_id: int32
        3 data: Datum[]
        4 loss_fn: string
        5 loss_fn_config: map double
        6 forward_only: bool
        7 loss_fn_config_v2: map LossConfigValue""",
    "LossConfigValue": """
        1 number: double|value
        2 text: string|value""",
    "Datum": """
        1 model_input: Chunk[]
        2 loss_fn_inputs: map Tensor""",
    "Chunk": """
        1 encoded_text: EncodedTextChunk|chunk
        2 image: ImageChunk|chunk
        3 dmel: DmelChunk|chunk""",
    "EncodedTextChunk": "1 tokens: bytes",
    "ImageChunk": "1 data: bytes",
    "DmelChunk": "1 dmel: bytes",
    "Tensor": """
        1 dense: bytes|encoding
        2 sparse_csr: SparseCsr|encoding
        3 dtype: DType
        4 shape: int64[]""",
    "SparseCsr": """
        1 values: bytes
        2 crow_indices: bytes
        3 col_indices: bytes""",
    "ForwardBackwardOutput": """
        1 loss_fn_output_type: string
        2 loss_fn_outputs: ArrayRecord[]
        3 metrics: map double""",
    "ArrayRecord": """
        1 type_tag: string
        2 fields: map BatchedTensor
        3 num_datums: int64""",
    "BatchedTensor": """
        1 data: bytes
        2 offsets: bytes
        3 dtype: DType
        4 trailing_shape: int64[]""",
    "SampleResponse": """
        1 sequences: SampledSequence[]
        2 prompt_logprobs: bytes?
        3 topk_prompt_logprobs: TopkLogprobs?
        4 prompt_cache_hit_tokens: int32""",
    "SampledSequence": """
        1 stop_reason: StopReason
        2 tokens: bytes
        3 logprobs: bytes?""",
    "TopkLogprobs": """
        1 token_ids: bytes
        2 logprobs: bytes
        3 k: uint32
        4 length: uint32""",
}
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": tuple(
        f"DTYPE_{name}"
        for name in ("UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16")
    ),
}
STOP, LENGTH = range(2)
FLOAT32, INT64, INT32, BFLOAT16 = range(1, 5)

_PACKAGE = "jaxlora.tinker"
_Field = descriptor_pb2.FieldDescriptorProto


def _add_field(message: Any, line: str) -> None:
    """Adds a field to the descriptor of a message."""
    left, kind = line.strip().split(": ")
    number, name = left.split()
    field = message.field.add(
        name=name, number=int(number), label=_Field.LABEL_OPTIONAL
    )
    if kind.startswith("map "):
        entry = message.nested_type.add(name=name.title().replace("_", "") + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "1 key: string")
        _add_field(entry, f"2 value: {kind.removeprefix('map ')}")
        kind = f"{message.name}.{entry.name}[]"
    if kind.endswith("[]"):
        field.label = _Field.LABEL_REPEATED
    kind, _, group = kind.removesuffix("[]").partition("|")
    if kind.endswith("?"):
        kind, group, field.proto3_optional = kind[:-1], f"_{name}", True
    if group:
        if group not in (groups := [one.name for one in message.oneof_decl]):
            message.oneof_decl.add(name=group)
            groups.append(group)
        field.oneof_index = groups.index(group)
    if kind in _ENUMS:
        field.type, field.type_name = _Field.TYPE_ENUM, f".{_PACKAGE}.{kind}"
    elif kind[0].isupper():
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = _Field.Type.Value(f"TYPE_{kind.upper()}")


def _build() -> dict[str, Any]:
    """Returns the class of each message."""
    file = descriptor_pb2.FileDescriptorProto(
        name="jaxlora/tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.strip().splitlines():
            _add_field(message, line)
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {
        name: pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in _MESSAGES
    }
    return {name: message_factory.GetMessageClass(one) for name, one in found.items()}


CLASSES = _build()
ForwardBackwardRequest = CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = CLASSES["ForwardBackwardOutput"]
SampleResponse = CLASSES["SampleResponse"]
