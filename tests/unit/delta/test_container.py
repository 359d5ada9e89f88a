"""Delta files are exact, recognise the wrong weights, and show every damage."""

import json
import struct

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from slipstream.delta import RawTensor, Weights, apply_delta, encode_delta, read_info
from slipstream.delta.container import TensorSetError, TensorTypeError
from slipstream.errors import IntegrityError, WrongBaseError
from tests.support.weights import make_model, pairs, same, step, tensor


@given(pairs())
def test_any_weights_come_back_bit_for_bit(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    blob, entries = encode_delta(old, new)
    assert same(apply_delta(old, blob), new)
    assert read_info(blob).entries == entries
    assert [(e.name, e.dtype, tuple(e.shape)) for e in entries] == [
        (n, t.dtype, t.shape) for n, t in new.items()
    ]


@given(pairs())
def test_applying_twice_is_harmless(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    blob, _ = encode_delta(old, new)
    once = apply_delta(old, blob)
    assert all(apply_delta(once, blob)[name] is tensor for name, tensor in once.items())


def test_some_tensors_may_be_ahead_of_others() -> None:
    old, new = make_model(), step(make_model(), 1)
    blob, _ = encode_delta(old, new)
    assert same(apply_delta({**old, "embed": new["embed"]}, blob), new)


def test_the_old_weights_are_not_touched_and_unchanged_tensors_are_the_same_objects() -> None:
    old, new = make_model(), step(make_model(), 1, names=("embed",))
    before = {name: t.data.tobytes() for name, t in old.items()}
    after = apply_delta(old, encode_delta(old, new)[0])
    assert {name: t.data.tobytes() for name, t in old.items()} == before
    assert [name for name in old if after[name] is not old[name]] == ["embed"]


def test_equal_input_makes_equal_files() -> None:
    old, new = make_model(size=200_000), step(make_model(size=200_000), 1)
    assert encode_delta(old, new)[0] == encode_delta(old, new)[0]


def test_a_tensor_that_does_not_compress_is_stored_as_it_is() -> None:
    old, new = make_model(0), make_model(1)
    blob, entries = encode_delta(old, new)
    assert {e.codec for e in entries if e.name == "embed"} == {"raw"}
    assert len(blob) < sum(t.data.nbytes for t in new.values()) + 1000
    assert same(apply_delta(old, blob), new)


def test_metadata_comes_back() -> None:
    old = make_model()
    assert read_info(encode_delta(old, old, metadata={"a": "ü\n"})[0]).metadata == {"a": "ü\n"}


@pytest.mark.parametrize("name", ["embed", "norm"])
def test_the_wrong_base_is_recognised_even_in_a_tensor_that_did_not_change(name: str) -> None:
    old, new = make_model(), step(make_model(), 1)
    blob, _ = encode_delta(old, new)
    data = old[name].data.copy()
    data[-1] ^= 1
    with pytest.raises(WrongBaseError, match=name):
        apply_delta({**old, name: RawTensor("BF16", old[name].shape, data)}, blob)


def test_missing_and_extra_tensors_are_named() -> None:
    old = make_model()
    less = {name: t for name, t in old.items() if name != "norm"}
    blob, _ = encode_delta(old, old)
    for call in (
        lambda: encode_delta(old, less),
        lambda: encode_delta(less, old),
        lambda: apply_delta(less, blob),
        lambda: apply_delta({**old, "norm2": old["norm"]}, blob),
    ):
        with pytest.raises(TensorSetError, match="norm"):
            call()


@pytest.mark.parametrize(
    "other", [tensor(bytes(6), "BF16", (1, 3)), tensor(bytes(6), "F16", (3,)), tensor(bytes(8), "BF16", (4,))]
)
def test_a_changed_shape_or_type_is_named(other: RawTensor) -> None:
    old = make_model()
    blob, _ = encode_delta(old, old)
    with pytest.raises(TensorTypeError, match="norm"):
        encode_delta(old, {**old, "norm": other})
    with pytest.raises(TensorTypeError, match="norm"):
        apply_delta({**old, "norm": other}, blob)


def test_every_flipped_byte_is_found() -> None:
    old, new = make_model(size=20), step(make_model(size=20), 1)
    blob = encode_delta(old, new)[0]
    for place in range(len(blob)):
        damaged = bytearray(blob)
        damaged[place] ^= 0x10
        with pytest.raises(IntegrityError):
            apply_delta(old, bytes(damaged))


def test_every_cut_and_every_addition_is_found() -> None:
    old, new = make_model(size=20), step(make_model(size=20), 1)
    blob = encode_delta(old, new)[0]
    for end in range(len(blob)):
        with pytest.raises(IntegrityError):
            apply_delta(old, blob[:end])
    with pytest.raises(IntegrityError):
        apply_delta(old, blob + b"\0")


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for blob in (noise, b"SLPDELTA" + noise):
        with pytest.raises(IntegrityError):
            read_info(blob)


def forge(header: object, payloads: bytes = b"", *, claim: int | None = None) -> bytes:
    """A file with a right checksum around a header of one's own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    packed = zstandard.ZstdCompressor().compress(text)
    fixed = struct.pack("<8sIIIQ", b"SLPDELTA", 1, len(packed), claim or len(text), len(payloads))
    body = fixed + packed + payloads
    return body + xxhash.xxh3_128_digest(body)


ENTRY = {
    "name": "a",
    "dtype": "U8",
    "shape": [4],
    "codec": "raw",
    "before": "0" * 32,
    "after": "1" * 32,
    "bytes": 4,
}


@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {},
        {"tensors": [ENTRY]},
        {"tensors": [ENTRY, {**ENTRY, "bytes": 0}], "metadata": {}},
        {"tensors": [{**ENTRY, "bytes": -4}, {**ENTRY, "name": "b", "bytes": 8}], "metadata": {}},
        {"tensors": [{**ENTRY, "bytes": 4.0}], "metadata": {}},
        {"tensors": [{**ENTRY, "bytes": 5}], "metadata": {}},
        {"tensors": [{**ENTRY, "shape": [-4]}], "metadata": {}},
        {"tensors": [{**ENTRY, "shape": [2**70]}], "metadata": {}},
        {"tensors": [{**ENTRY, "dtype": "U9"}], "metadata": {}},
        {"tensors": [{**ENTRY, "name": 3}], "metadata": {}},
        {"tensors": [{**ENTRY, "before": "1" * 32}], "metadata": {}},
    ],
)
def test_a_forged_header_is_refused(header: object) -> None:
    with pytest.raises(IntegrityError):
        read_info(forge(header, b"1234"))


def test_a_header_that_claims_too_much_is_refused() -> None:
    with pytest.raises(IntegrityError, match="at most"):
        read_info(forge({"tensors": [], "metadata": {}}, claim=2**32 - 1))


def test_a_newer_format_says_to_update() -> None:
    blob = bytearray(encode_delta({}, {})[0])
    blob[8] = 2
    with pytest.raises(IntegrityError, match=r"format 2 is not known here .* update Slipstream"):
        read_info(bytes(blob))


def test_a_payload_swapped_for_another_is_found_by_the_digest() -> None:
    old = {"a": tensor(bytes(4), "U8")}
    entry = dict(ENTRY, before=xxhash.xxh3_128_hexdigest(bytes(4)), after=xxhash.xxh3_128_hexdigest(b"wxyz"))
    assert (
        apply_delta(old, forge({"tensors": [entry], "metadata": {}}, b"wxyz"))["a"].data.tobytes() == b"wxyz"
    )
    with pytest.raises(IntegrityError, match="promised digest"):
        apply_delta(old, forge({"tensors": [entry], "metadata": {}}, b"wxyy"))


def test_the_base_may_be_a_read_only_view() -> None:
    old, new = make_model(), step(make_model(), 1)
    for t in old.values():
        t.data.flags.writeable = False
    out = apply_delta(old, memoryview(encode_delta(old, new)[0]))
    assert same(out, new)
    assert isinstance(out["embed"].data, np.ndarray)
