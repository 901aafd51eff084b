"""A batch on arrival: its parts put together, checked and unpacked."""

import time

import numpy as np

from longhaul import codec
from longhaul.errors import Corruption
from longhaul.proto import longhaul_pb2 as pb
from longhaul.types import Batch, ExperienceSpec


class Assembly:
    """Puts a batch's parts together."""

    def __init__(self, message: pb.Batch):
        self.message = message
        self.rows = [message.rows]
        self.size = len(message.rows)

    def add(self, part: pb.RowsPart) -> None:
        if part.sequence != self.message.sequence or part.offset != self.size:
            raise Corruption(
                f"batch {self.message.sequence}: a part of {part.sequence} at {part.offset} is out of place"
            )
        self.rows.append(part.data)
        self.size += len(part.data)

    @property
    def complete(self) -> bool:
        if self.size > self.message.rows_wire_bytes:
            raise Corruption(
                f"batch {self.message.sequence}: more than the {self.message.rows_wire_bytes} bytes announced"
            )
        return self.size == self.message.rows_wire_bytes


def _slots(packed: bytes, name: str) -> np.ndarray:
    if len(packed) % 4:
        raise Corruption(f"{name}: {len(packed)} bytes are no list of slots")
    return np.frombuffer(packed, "<i4")


def unpack_batch(
    message: pb.Batch, rows_wire: bytes, spec: ExperienceSpec, opened: pb.Open, coder: codec.SlotCoder, rtt_s: float
) -> Batch:
    """Checks and unpacks a batch, the next one of the coder's stream.

    Raises:
      Corruption: sizes, slots or rows that can't be those of a batch asked for.
    """
    shape = (opened.minibatches, opened.batch_size)
    count = shape[0] * shape[1]
    name = f"batch {message.sequence}"
    if message.count != count:
        raise Corruption(f"{name}: {message.count} transitions, {count} were asked for")
    columns = codec.unpack_columns(message.columns, message.columns_bytes, count, spec.stack, coder)
    new_slots, audit_slots = _slots(message.new_slots, name), _slots(message.audit_slots, name)
    if len(new_slots) * spec.row_bytes != message.rows_bytes:
        raise Corruption(f"{name}: {message.rows_bytes} bytes of rows do not fill {len(new_slots)} slots")
    for slots in (new_slots, audit_slots):
        if slots.size and (slots.min() < 0 or slots.max() >= opened.cache_rows):
            raise Corruption(f"{name}: a slot outside the cache of {opened.cache_rows} rows")
    limit = 2 * spec.stack * count * spec.row_bytes
    raw = codec.decompress(rows_wire, message.rows_bytes, limit, f"rows of {name}") if message.rows_bytes else b""
    rows = np.frombuffer(raw, spec.row_dtype).reshape(len(new_slots), *spec.row_shape)
    marked = np.unpackbits(np.frombuffer(message.first_crossings, np.uint8)).astype(np.bool_)
    if marked.size and marked.size != (count + 7) // 8 * 8:
        raise Corruption(f"{name}: {marked.size} marks for {count} transitions")
    return Batch(
        sequence=message.sequence,
        slots=columns.slots.reshape(*shape, 2 * spec.stack),
        actions=columns.actions.reshape(shape),
        returns=columns.returns.reshape(shape),
        discounts=columns.discounts.reshape(shape),
        probabilities=columns.probabilities.reshape(shape),
        table_size=message.table_size,
        new_slots=new_slots,
        new_rows=rows,
        received_time_s=time.monotonic(),
        audit_slots=audit_slots,
        audit_crc32=message.audit_crc32,
        stats={
            "inserts": message.inserts,
            "samples": message.samples,
            "policy_version": message.policy_version,
            "mean_priority": message.mean_priority,
            "draw_age_s": message.draw_age_s + rtt_s / 2,
            "priority_age_s": message.priority_age_s,
        },
        first_crossings=marked[:count].reshape(shape) if marked.size else marked,
    )
