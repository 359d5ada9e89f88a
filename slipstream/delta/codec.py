"""How the difference between two tensors becomes bytes. A codec is named in every file that it wrote."""

from typing import Protocol

import numpy as np
import zstandard

from slipstream.delta.tensors import Bytes
from slipstream.errors import ConfigError, IntegrityError


class Codec(Protocol):
    """Pure functions on bytes; lossless for any bit pattern of any type."""

    name: str

    def encode(self, old: Bytes, new: Bytes, itemsize: int) -> bytes:
        """Payload from which `decode` makes `new`, given `old`.

        Args:
            old, new: uint8, 1-D, of equal length, not empty.
            itemsize: bytes per element; the length is a multiple of it.
        """
        ...

    def decode(self, old: Bytes, payload: bytes | memoryview, itemsize: int, out: Bytes) -> None:
        """Writes the new bytes to `out` (uint8, 1-D, as long as `old`).

        Raises:
            IntegrityError: the payload is damaged or was made for another length.
        """
        ...


class XorZstd:
    """XOR with the old bytes, then zstd at level 1: the published baseline of delta weight sync."""

    name = "xor-zstd"
    _LEVEL = 1

    def encode(self, old: Bytes, new: Bytes, itemsize: int) -> bytes:
        difference = np.bitwise_xor(old, new)
        return zstandard.ZstdCompressor(level=self._LEVEL, write_checksum=True).compress(difference.data)

    def decode(self, old: Bytes, payload: bytes | memoryview, itemsize: int, out: Bytes) -> None:
        # The frame's own size is checked first, so that a damaged one cannot ask for more memory.
        try:
            size = zstandard.frame_content_size(bytes(payload[:32]))
            if size != old.nbytes:
                raise IntegrityError(f"a payload for {size} bytes meets a tensor of {old.nbytes}")
            data = zstandard.ZstdDecompressor().decompress(
                payload, max_output_size=old.nbytes, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise IntegrityError(f"a payload is damaged: {error}") from None
        if len(data) != old.nbytes:
            raise IntegrityError(f"a payload of {len(data)} bytes meets a tensor of {old.nbytes}")
        np.bitwise_xor(old, np.frombuffer(data, dtype=np.uint8), out=out)


_CODECS: dict[str, Codec] = {codec.name: codec for codec in (XorZstd(),)}


def get_codec(name: str) -> Codec:
    """A codec by name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"unknown delta codec {name!r}; known are {', '.join(sorted(_CODECS))}") from None
