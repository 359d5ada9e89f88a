"""Kafka's choice of a partition for a key, so that all producers agree."""


def murmur2(data: bytes) -> int:
    """MurmurHash2, 32 bits, with Kafka's seed."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if tail := data[whole:]:
        h = (h ^ int.from_bytes(tail, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def partition_of(key: bytes, count: int) -> int:
    """Partition of a key in a topic with `count` partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % count
