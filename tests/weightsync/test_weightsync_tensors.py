"""Tensors as bytes: views where possible, and right whatever the strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import BadTensor, Plan, TensorMeta
from weightsync.dtypes import ITEMSIZE
from weightsync.tensors import Tensor, describe, fill, raw


class Distributed:
    """As torch's DTensor looks."""

    def untyped_storage(self) -> None: ...
    def to_local(self) -> None: ...


BASE = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
ARRAYS = [BASE, BASE.T, BASE[:, ::2], BASE[::-1], np.array(7), BASE[:0], np.broadcast_to(BASE[0, 0], (5, 4))]
TORCH = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
TENSORS = [TORCH, TORCH.permute(2, 0, 1), TORCH[:, ::2], TORCH[1, 2, 3], TORCH[:0], TORCH[0, 0].expand(5, 4)]


@given(st.sampled_from([*ARRAYS, *TENSORS]), st.data())
def test_any_piece_of_any_layout(tensor: Any, data: st.DataObject) -> None:
    expected = np.ascontiguousarray(np.asarray(tensor)).tobytes()
    stop = 2 * data.draw(st.integers(0, len(expected) // 2))
    start = 2 * data.draw(st.integers(0, stop // 2))
    if start < stop:
        out = np.zeros(stop - start, np.uint8)
        fill(tensor, start, stop, out)
        assert out.tobytes() == expected[start:stop]


@pytest.mark.parametrize("dtype", ITEMSIZE)
def test_strided_elements_are_copied_bit_for_bit(dtype: str) -> None:
    size, rng = ITEMSIZE[dtype], np.random.default_rng(0)
    bits = rng.integers(0, 2 if dtype == "bool" else 256, (6, 5, size), dtype=np.uint8)
    tensor = torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(6, 5).t()
    out = np.zeros(bits.size, np.uint8)
    fill(tensor, 0, out.size, out)
    assert out.tobytes() == bits.transpose(1, 0, 2).tobytes()


def test_conjugates_are_carried_as_they_are_seen() -> None:
    tensor = torch.tensor([[1 + 2j, 3 - 4j]]).conj()
    assert raw(tensor) is None
    out = np.zeros(16, np.uint8)
    fill(tensor, 0, 16, out)
    assert out.view(np.complex64).tolist() == [1 - 2j, 3 + 4j]


def test_a_contiguous_tensor_is_not_copied() -> None:
    array = np.arange(100, dtype=np.float32)
    view = raw(array)
    assert view is not None and np.shares_memory(view, array)
    weights = torch.arange(100.0)
    view = raw(weights)
    assert view is not None
    weights[2] = 7.0
    assert view.view(np.float32)[2] == 7.0
    assert raw(array[::2]) is None and raw(weights[::2]) is None


def test_ties_are_found_by_storage_and_views_are_not_ties() -> None:
    weights = torch.zeros(4, 4)
    metas, _ = describe({"a": weights, "b": weights, "row": weights[0], "t": weights.t(), "empty": weights[:0]})
    assert [meta.tied_to for meta in metas] == ["", "a", "", "", ""]
    array = np.zeros(4)
    assert [meta.tied_to for meta in describe({"a": array, "b": array[:], "c": array.copy()})[0]] == ["", "a", ""]
    assert [meta.tied_to for meta in describe({"a": array[:0], "b": array[:0]})[0]] == ["", ""]


def test_names_and_dtypes_are_those_that_both_libraries_share() -> None:
    metas, _ = describe([("a", torch.zeros(2, dtype=torch.bfloat16)), ("b", np.zeros((), np.bool_))])
    assert metas == (TensorMeta("a", "bfloat16", (2,)), TensorMeta("b", "bool", ()))


def test_what_is_no_tensor_is_named() -> None:
    with pytest.raises(BadTensor, match="'w' is a list"):
        describe({"w": [1, 2]})


@pytest.mark.parametrize(
    ("tensor", "remedy"),
    [
        (np.zeros(2, ">f4"), "newbyteorder"),
        (torch.zeros(2, 2).to_sparse(), "to_dense"),
        (torch.zeros(2, device="meta"), "materialize it"),
        (Distributed(), "full_tensor"),
    ],
)
def test_what_cannot_be_carried_is_named_with_a_remedy(tensor: Any, remedy: str) -> None:
    with pytest.raises(BadTensor, match=f"'w' .*{remedy}"):
        describe({"w": tensor})


@pytest.mark.parametrize(
    "tensor",
    [np.array(["a"]), np.array([None]), np.zeros(2, np.longdouble)],
)
def test_a_dtype_that_nobody_knows_is_named(tensor: Any) -> None:
    with pytest.raises(BadTensor, match=r"'w' has unknown dtype .* known: bool"):
        Plan(describe({"w": tensor})[0], 64)


def test_views_of_a_staged_tensor() -> None:
    data = np.arange(8, dtype=np.uint8)
    staged = Tensor(TensorMeta("w", "uint16", (2, 2)), data)
    assert np.shares_memory(staged.numpy(), data) and staged.numpy().shape == (2, 2)
    half = Tensor(TensorMeta("w", "bfloat16", (2, 2)), data)
    assert half.torch().dtype is torch.bfloat16 and half.torch().data_ptr() == data.ctypes.data
    with pytest.raises(BadTensor, match="bfloat16"):
        half.numpy()
    assert Tensor(TensorMeta("e", "bfloat16", (0, 3)), data[:0]).torch().shape == (0, 3)
