"""Manifests that contradict themselves or their parent are refused."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, IntegrityError
from slipstream.v1.common_pb2 import BlobRef, Version
from slipstream.v1.weights_pb2 import (
    VERSION_KIND_ANCHOR,
    VERSION_KIND_DELTA,
    VERSION_KIND_UNSPECIFIED,
    Manifest,
    Shard,
    TensorEntry,
    VersionKind,
)
from slipstream.weights.manifest import (
    check_follows,
    check_manifest,
    check_run_id,
    order,
    parse_manifest,
    parse_version,
    version_key,
    version_str,
)

versions = st.builds(
    lambda epoch, number: Version(epoch=epoch, number=number), st.integers(1, 10**7), st.integers(0, 10**11)
)


def good(kind: VersionKind = VERSION_KIND_DELTA) -> Manifest:
    delta = kind == VERSION_KIND_DELTA
    return Manifest(
        format=1,
        run_id="run",
        version=Version(epoch=1, number=2),
        kind=kind,
        parent=Version(epoch=1, number=1) if delta else None,
        shards=[
            Shard(
                blob=BlobRef(key="k", sha256="s", size_bytes=1),
                tensors=[
                    TensorEntry(
                        name=name,
                        dtype="BF16",
                        shape=[2, 3],
                        codec="xor-zstd" if delta else "",
                        digest_before="0" * 32 if delta else "",
                        digest_after="1" * 32,
                    )
                ],
            )
            for name in ("a", "b")
        ],
        full_size_bytes=24,
    )


def changed(change: Callable[[Manifest], object], manifest: Manifest | None = None) -> Manifest:
    manifest = manifest or good()
    change(manifest)
    return manifest


@given(versions)
def test_a_version_reads_as_it_is_written(version: Version) -> None:
    assert parse_version(version_str(version)) == version


@given(versions, versions)
def test_keys_sort_as_versions_do(a: Version, b: Version) -> None:
    assert (version_key("r", a) < version_key("r", b)) == (order(a) < order(b))


@pytest.mark.parametrize("text", ["", "1", "1-", "-1-2", "1-2-3", "a-b", "1.0-2", " 1-2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 1-12"):
        parse_version(text)


@pytest.mark.parametrize("run_id", ["", "a/b", "../x", "A", ".a", "a" * 101, "a b", "a\n"])
def test_what_is_no_run_name_is_refused(run_id: str) -> None:
    with pytest.raises(ConfigError, match="run name"):
        check_run_id(run_id)


def test_good_manifests_pass_and_come_back() -> None:
    for kind in (VERSION_KIND_DELTA, VERSION_KIND_ANCHOR):
        manifest = good(kind)
        check_manifest(manifest)
        key = version_key("run", manifest.version)
        assert parse_manifest(manifest.SerializeToString(), key) == manifest


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "format", 2),
        lambda m: setattr(m, "run_id", "../x"),
        lambda m: setattr(m.version, "epoch", 0),
        lambda m: setattr(m.version, "number", -1),
        lambda m: setattr(m, "kind", VERSION_KIND_UNSPECIFIED),
        lambda m: setattr(m, "kind", VERSION_KIND_ANCHOR),
        lambda m: m.ClearField("parent"),
        lambda m: m.parent.CopyFrom(m.version),
        lambda m: m.ClearField("shards"),
        lambda m: setattr(m.shards[1].tensors[0], "name", "a"),
        lambda m: setattr(m.shards[1].tensors[0], "digest_after", ""),
        lambda m: setattr(m.shards[1].tensors[0], "digest_before", ""),
        lambda m: setattr(m.shards[1].tensors[0], "codec", ""),
        lambda m: setattr(m.shards[1].tensors[0], "dtype", "BF17"),
        lambda m: m.shards[1].tensors[0].shape.append(-1),
        lambda m: setattr(m, "full_size_bytes", 25),
    ],
)
def test_a_contradiction_is_refused(change: Callable[[Manifest], object]) -> None:
    manifest = changed(change)
    with pytest.raises(ConfigError):
        check_manifest(manifest)
    with pytest.raises(IntegrityError):
        parse_manifest(manifest.SerializeToString(), version_key(manifest.run_id, manifest.version))


def test_a_manifest_under_another_key_is_refused() -> None:
    data = good().SerializeToString()
    for run_id, number in (("run", 3), ("other", 2)):
        with pytest.raises(IntegrityError, match="is for run 1-2"):
            parse_manifest(data, version_key(run_id, Version(epoch=1, number=number)))
    with pytest.raises(IntegrityError, match="damaged"):
        parse_manifest(b"\xff\xff", "key")


def parent() -> Manifest:
    manifest = good()
    for shard in manifest.shards:
        shard.tensors[0].digest_after = "0" * 32
    return manifest


def test_a_delta_that_leads_on_from_its_parent_passes() -> None:
    check_follows(good(), parent())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.shards[0].tensors[0], "digest_before", "2" * 32), "does not begin where"),
        (lambda m: setattr(m.shards[0].tensors[0], "name", "c"), "'c' is not in the parent"),
        (lambda m: m.shards.pop(), "'b' of the parent is missing"),
        (lambda m: setattr(m.shards[0].tensors[0], "dtype", "F16"), "another type or shape"),
        (lambda m: m.shards[0].tensors[0].shape.append(1), "another type or shape"),
    ],
)
def test_a_delta_that_does_not_is_refused(change: Callable[[Manifest], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_follows(changed(change), parent())
