"""The plan covers every byte once and is the same for everyone; a manifest is refused whole or accepted whole."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import BadManifest, BadTensor, Bucket, Manifest, Plan, TensorMeta
from weightsync.dtypes import ITEMSIZE
from weightsync.manifest import ALIGNMENT

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
METAS = st.lists(st.tuples(st.sampled_from(sorted(ITEMSIZE)), SHAPES), max_size=12).map(
    lambda found: tuple(TensorMeta(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(found))
)
BUCKET_BYTES = st.integers(1, 8).map(lambda n: n * ALIGNMENT)


@given(METAS, BUCKET_BYTES)
def test_every_byte_lies_in_exactly_one_bucket(metas: tuple[TensorMeta, ...], bucket_bytes: int) -> None:
    plan = Plan(metas, bucket_bytes)
    covered: dict[int, list[tuple[int, int]]] = {number: [] for number in range(len(metas))}
    for index, pieces in enumerate(plan.pieces()):
        end = 0
        for number, start, stop, offset in pieces:
            assert end <= offset and offset + stop - start <= plan.size(index)
            assert plan.offsets[number] + start == plan.span(index).start + offset
            assert (stop - start) % ITEMSIZE[metas[number].dtype] == 0, "no element is split"
            covered[number].append((start, stop))
            end = offset + stop - start
    for number, spans in covered.items():
        edges = [0, *(stop for _, stop in spans)]
        assert edges[:-1] == [start for start, _ in spans] and edges[-1] == metas[number].nbytes
    assert sum(plan.size(index) for index in range(len(plan))) == plan.total


@given(METAS, BUCKET_BYTES)
def test_runs_cover_each_bucket_in_whole_elements(metas: tuple[TensorMeta, ...], bucket_bytes: int) -> None:
    plan = Plan(metas, bucket_bytes)
    for index, runs in enumerate(plan.runs()):
        assert sum(size for _, size in runs) == plan.size(index)
        assert all(size % width == 0 for width, size in runs)


def test_tied_tensors_lie_there_once() -> None:
    plan = Plan((TensorMeta("a", "float32", (64,)), TensorMeta("b", "float32", (64,), tied_to="a")), 64)
    assert plan.total == 256 and plan.offsets == [0, 0] and plan.elements == 64


@pytest.mark.parametrize(
    ("metas", "name"),
    [
        ([TensorMeta("w", "float12", (2,))], "w"),
        ([TensorMeta("w", "int8", (2,)), TensorMeta("w", "int8", (2,))], "w"),
        ([TensorMeta("w", "int8", (2,), tied_to="v")], "w"),
        ([TensorMeta("w", "int8", (2,)), TensorMeta("v", "int8", (3,), tied_to="w")], "v"),
        ([TensorMeta("w", "int8", (-2,))], "w"),
        ([TensorMeta("", "int8", (2,))], "empty name"),
        ([TensorMeta(3, "int8", (2,))], "name is 3"),  # type: ignore[arg-type]
    ],
)
def test_a_bad_tensor_is_named(metas: list[TensorMeta], name: str) -> None:
    with pytest.raises(BadTensor, match=name):
        Plan(metas, 64)


@pytest.mark.parametrize("size", [0, -64, 100])
def test_bucket_bytes_must_keep_elements_whole(size: int) -> None:
    with pytest.raises(BadTensor, match="bucket_bytes"):
        Plan((), size)


def manifest() -> Manifest:
    return Manifest(
        version=3,
        attempt="ab",
        bucket_bytes=64,
        tensors=(TensorMeta("w", "float32", (20,)),),
        buckets=(Bucket("d1", 64, "d1"), Bucket("d2", 64, "d2")),
    )


def test_a_manifest_survives_encoding() -> None:
    assert Manifest.decode(manifest().encode()) == manifest()


def test_the_digest_tells_contents_apart_but_not_encodings() -> None:
    first = manifest()
    delta = msgspec.structs.replace(
        first, base=2, attempt="x", buckets=(Bucket("d1", 3, "x", True), first.buckets[1])
    )
    assert delta.digest == first.digest
    for other in ({"buckets": (Bucket("d3", 64, "d3"), first.buckets[1])}, {"tensors": ()}):
        assert msgspec.structs.replace(first, **other).digest != first.digest


def test_a_manifest_from_the_future_is_refused() -> None:
    data = msgspec.msgpack.encode({"format": 2, "whatever": 1})
    with pytest.raises(BadManifest, match="format 2 is newer"):
        Manifest.decode(data)


@given(st.integers(0, 200))
def test_a_truncated_manifest_is_refused(length: int) -> None:
    data = manifest().encode()
    if length < len(data):
        with pytest.raises(BadManifest):
            Manifest.decode(data[:length])


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(BadManifest, match="1 buckets, planned 2"):
        Manifest.decode(msgspec.structs.replace(manifest(), buckets=manifest().buckets[:1]).encode())
    unknown = msgspec.structs.replace(manifest(), tensors=(TensorMeta("w", "float12", (2,)),))
    with pytest.raises(BadManifest, match="float12"):
        Manifest.decode(unknown.encode())
