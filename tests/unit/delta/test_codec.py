"""Codecs give back every bit, and never take more memory than the tensor calls for."""

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slipstream.delta.codec import CHUNK, decompress, get_codec
from slipstream.errors import ConfigError, IntegrityError

CODECS = ("xor-zstd", "raw")


def round_trip(name: str, old: np.ndarray, new: np.ndarray, itemsize: int = 1) -> np.ndarray:
    codec = get_codec(name)
    out = np.full_like(old, 0xA5)
    codec.decode(old, codec.encode(old, new, itemsize), itemsize, out)
    return out


@pytest.mark.parametrize("name", CODECS)
@given(data=st.data())
def test_any_bytes_come_back(name: str, data: st.DataObject) -> None:
    old = data.draw(st.binary(max_size=300))
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    assert round_trip(name, np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)).tobytes() == new


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [0, 1, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_every_length_around_a_chunk_comes_back(name: str, size: int) -> None:
    random = np.random.default_rng(size)
    old = random.integers(0, 256, size, np.uint8)
    new = old.copy()
    new[::97] ^= 0x80
    assert np.array_equal(round_trip(name, old, new), new)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nan_payloads_infinities_and_minus_zero_keep_their_bits(dtype: type) -> None:
    unsigned: Any = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(dtype).itemsize]
    nan = np.array([np.nan], dtype).view(unsigned)[0]
    bits = np.array([nan | 1, nan | 5, ~unsigned(0), 0], unsigned)
    bits[3] = np.array([-0.0], dtype).view(unsigned)[0]
    old = np.array([0.0, np.inf, -np.inf, 0.0], dtype).view(np.uint8)
    assert np.array_equal(round_trip("xor-zstd", old, bits.view(np.uint8)), bits.view(np.uint8))


def test_small_changes_make_small_payloads() -> None:
    old = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    new = old.copy()
    new[::1000] ^= 1
    assert len(get_codec("xor-zstd").encode(old, new, 2)) < old.size / 50


@given(data=st.data())
def test_a_damaged_payload_is_an_error_or_other_bytes_but_nothing_else(data: st.DataObject) -> None:
    old = np.arange(200, dtype=np.uint8)
    payload = bytearray(get_codec("xor-zstd").encode(old, old[::-1].copy(), 1))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    out = np.empty_like(old)
    try:
        get_codec("xor-zstd").decode(old, bytes(payload), 1, out)
    except IntegrityError:
        return


@pytest.mark.parametrize("name", CODECS)
def test_a_payload_for_another_length_is_refused(name: str) -> None:
    old = np.zeros(100, np.uint8)
    payload = get_codec(name).encode(old, old + 1, 1)
    for size in (0, 99, 101, CHUNK + 100):
        other = np.zeros(size, np.uint8)
        with pytest.raises(IntegrityError):
            get_codec(name).decode(other, payload, 1, other.copy())


def test_a_bomb_is_refused_before_it_is_decompressed() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    old = np.zeros(1000, np.uint8)
    with pytest.raises(IntegrityError, match="states 268435456 bytes where 1000 belong"):
        get_codec("xor-zstd").decode(old, struct.pack("<I", len(bomb)) + bomb, 1, old.copy())


def test_a_frame_that_hides_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(IntegrityError):
        decompress(frame, 1000)


def test_bytes_after_a_frame_are_refused() -> None:
    with pytest.raises(IntegrityError):
        decompress(zstandard.ZstdCompressor().compress(bytes(10)) + b"x", 10)


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ConfigError, match="'middle-out'; known are raw, xor-zstd"):
        get_codec("middle-out")
