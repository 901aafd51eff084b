"""The codec: exact round trips, and refusal of everything else before memory is spent."""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from longhaul import codec
from longhaul.errors import ConfigError, Corruption

SLOTS = 100_000


def _coder(stack: int, n_step: int = 3) -> codec.SlotCoder:
    return codec.SlotCoder(SLOTS, stack, n_step)


def _columns(count: int = 33, stack: int = 4, seed: int = 0) -> codec.Columns:
    rng = np.random.default_rng(seed)
    return codec.Columns(
        slots=rng.integers(0, SLOTS, (count, 2 * stack), dtype=np.int32),
        actions=rng.integers(0, 18, count, dtype=np.int32),
        returns=rng.normal(size=count).astype(np.float32),
        discounts=np.full(count, 0.99**3, np.float32),
        probabilities=rng.random(count).astype(np.float32),
    )


@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("count", [1, 33, 512])
def test_columns_come_back_bit_for_bit(count, stack):
    columns = _columns(count, stack)
    packed = codec.pack_columns(columns, _coder(stack))
    back = codec.unpack_columns(packed, codec.columns_bytes(count, stack), count, stack, _coder(stack))
    for sent, received in zip(columns, back):
        np.testing.assert_array_equal(sent, received)
        assert sent.dtype == received.dtype
        assert received.flags.writeable


def test_columns_of_another_count_are_refused():
    packed = codec.pack_columns(_columns(33, 4), _coder(4))
    with pytest.raises(Corruption, match="transitions"):
        codec.unpack_columns(packed, codec.columns_bytes(33, 4), 34, 4, _coder(4))


@pytest.mark.parametrize("stack,n_step", [(1, 1), (1, 3), (4, 1), (4, 3), (4, 4), (4, 7)])
def test_slots_come_back_batch_after_batch_and_soon_cost_little(stack, n_step):
    """Transitions of one long episode whose rows lie in slots without any order, drawn again and again."""
    rng = np.random.default_rng(0)
    slot_of = rng.permutation(1000).astype(np.int32)
    here, there, sizes = _coder(stack, n_step), _coder(stack, n_step), []
    for _ in range(30):
        first = rng.integers(0, 1000 - stack - n_step, (200, 1))
        slots = slot_of[first + np.concatenate([np.arange(stack), np.arange(stack) + n_step])]
        differences = here.encode(slots)
        sizes.append(np.count_nonzero(differences[:, 1:]))
        np.testing.assert_array_equal(there.decode(differences), slots)
    assert sizes[-1] < 0.1 * sizes[0]


def test_slots_out_of_bounds_are_refused_and_leave_the_coder_as_it_was():
    here, there = _coder(2), _coder(2)
    for wrong in ([[SLOTS, 0, 0, 0]], [[-1, 0, 0, 0]], [[5, 0, 2**31 - 1, 0]], [[5, 0, -(2**31), 0]]):
        with pytest.raises(Corruption, match="outside the cache"):
            there.decode(np.array(wrong, np.int32))
    slots = np.array([[3, 9, 9, 2], [9, 2, 2, 7]], np.int32)
    for _ in range(2):
        np.testing.assert_array_equal(there.decode(here.encode(slots)), slots)


def test_a_decompression_bomb_is_refused_before_allocating():
    bomb = codec.compress(bytes(200 * 2**20), 3)
    tracemalloc.start()
    for claimed in (200 * 2**20, 100):
        with pytest.raises(Corruption):
            codec.decompress(bomb, claimed, 1000, "rows")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_frame_that_hides_its_size_is_refused():
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(Corruption):
        codec.decompress(hidden, 100, 1000, "rows")


def test_any_single_damaged_byte_of_weights_is_noticed_or_harmless():
    rng = np.random.default_rng(0)
    flat = {"a/b": rng.normal(size=(7, 3)).astype(np.float32), "c": np.float32(2.5).reshape(())}
    payload = codec.pack_weights(flat, "float32")
    for position in range(len(payload)):
        damaged = bytearray(payload)
        damaged[position] ^= 0x10
        try:
            back = codec.unpack_weights(bytes(damaged))
        except Corruption:
            continue
        # Only the arrays' names, and case in JSON, can differ unnoticed: no value may.
        np.testing.assert_array_equal(
            np.concatenate([v.reshape(-1) for v in back.values()]),
            np.concatenate([flat[k].reshape(-1) for k in sorted(flat)]),
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_round_trip(dtype):
    rng = np.random.default_rng(1)
    flat = {"w": rng.normal(size=(16, 8)).astype(np.float32), "b": np.zeros(8, np.float32), "e": np.zeros((0, 4), "f4")}
    back = codec.unpack_weights(codec.pack_weights(flat, dtype))
    assert set(back) == set(flat)
    for name, value in flat.items():
        assert back[name].shape == value.shape and back[name].dtype == np.float32
        tolerance = 0 if dtype == "float32" else 2.0**-8
        np.testing.assert_allclose(back[name], value, rtol=tolerance)


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan_and_infinity():
    # 1 + 2^-8 is half-way between 1 and 1 + 2^-7: to even is 1. 1 + 3*2^-8 goes up to 1 + 2^-6.
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, np.inf, -np.inf, np.nan, -0.0], np.float32)
    back = codec.unpack_weights(codec.pack_weights({"x": values}, "bfloat16"))["x"]
    np.testing.assert_array_equal(back, np.array([1, 1 + 2.0**-6, np.inf, -np.inf, np.nan, -0.0], np.float32))


def test_unknown_weights_dtype_names_the_choices():
    with pytest.raises(ConfigError, match="bfloat16"):
        codec.pack_weights({}, "int8")


def test_weights_that_claim_absurd_shapes_are_refused():
    header = b'{"dtype":"float32","arrays":[["w",[1000000,1000000]]],"raw_bytes":4000000000000,"crc32":0}'
    payload = b"LHW1" + struct.pack("<I", len(header)) + header + codec.compress(b"", 1)
    with pytest.raises(Corruption, match="allowed"):
        codec.unpack_weights(payload)


@pytest.mark.parametrize("width,tolerance", [(4, 0), (2, 2.0**-11)])
def test_priorities_round_trip(width, tolerance):
    sent = np.array([[1e-3, 0.5], [7.25, 900.0]], np.float32)
    back = codec.unpack_priorities(codec.pack_priorities(sent, width), width, 4)
    np.testing.assert_allclose(back, sent.reshape(-1), rtol=tolerance)


def test_half_priorities_saturate_and_never_become_zero():
    back = codec.unpack_priorities(codec.pack_priorities(np.array([1e-12, 1e9, 0.0, np.nan]), 2), 2, 4)
    assert back[0] > 0 and back[1] == 65504 and back[2] == 0 and np.isnan(back[3])


def test_priorities_of_the_wrong_size_are_refused():
    with pytest.raises(Corruption):
        codec.unpack_priorities(bytes(9), 4, 2)


@pytest.mark.parametrize("row", [b"\0" * 7, b"\0" * 7056, bytes(range(256)) * 8, np.random.default_rng(0).bytes(7056)])
def test_a_stored_row_comes_back_with_its_id(row):
    packer = codec.CellPacker()
    cells = [packer.pack(row_id, row) for row_id in (0, 5, 2**62)]
    assert [codec.cell_id(cell) for cell in cells] == [0, 5, 2**62]
    assert codec.unpack_cells(cells, len(row)) == 3 * row
    assert all(len(cell) <= len(row) + 9 for cell in cells)


@pytest.mark.parametrize("cell", [b"", b"\0" * 8, b"\0" * 9 + b"12", b"\0" * 8 + b"\1" + b"12", b"\0" * 8 + b"\7123"])
def test_a_damaged_stored_row_is_refused(cell):
    with pytest.raises(Corruption):
        codec.unpack_cells([cell], 3)


def test_a_stored_row_that_unpacks_to_more_than_a_row_is_refused():
    bomb = bytes(8) + b"\1" + codec.compress(bytes(10**7), 1)
    with pytest.raises(Corruption):
        codec.unpack_cells([bomb], 100)
