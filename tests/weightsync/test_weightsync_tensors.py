"""Tensors as bytes: views where possible, and right whatever the strides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync import BadTensor, TensorMeta
from weightsync.tensors import Tensor, describe, piece

BASE = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
ARRAYS = [BASE, BASE.T, BASE[:, ::2], BASE[::-1], np.array(7), BASE[:0], np.broadcast_to(BASE[0, 0], (5, 4))]
TORCH = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
TENSORS = [TORCH, TORCH.permute(2, 0, 1), TORCH[:, ::2], TORCH[1, 2, 3], TORCH[:0], TORCH[0, 0].expand(5, 4)]


@given(st.sampled_from([*ARRAYS, *TENSORS]), st.data())
def test_any_piece_of_any_layout(tensor: Any, data: st.DataObject) -> None:
    expected = np.ascontiguousarray(np.asarray(tensor)).tobytes()
    stop = data.draw(st.integers(0, len(expected)))
    start = data.draw(st.integers(0, stop))
    if start < stop:
        assert piece("w", tensor, start, stop).tobytes() == expected[start:stop]


def test_a_contiguous_tensor_is_not_copied() -> None:
    array = np.arange(100, dtype=np.float32)
    assert np.shares_memory(piece("w", array, 8, 80), array)
    weights = torch.arange(100.0)
    view = piece("w", weights, 8, 80)
    weights[2] = 7.0
    assert view[:4].view(np.float32)[0] == 7.0


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


def test_foreign_byte_order_is_not_a_known_dtype() -> None:
    assert "byte order" in describe({"w": np.zeros(2, ">f4")})[0][0].dtype


def test_views_of_a_staged_tensor() -> None:
    data = np.arange(8, dtype=np.uint8)
    staged = Tensor(TensorMeta("w", "uint16", (2, 2)), data)
    assert np.shares_memory(staged.numpy(), data) and staged.numpy().shape == (2, 2)
    half = Tensor(TensorMeta("w", "bfloat16", (2, 2)), data)
    assert half.torch().dtype is torch.bfloat16 and half.torch().data_ptr() == data.ctypes.data
    with pytest.raises(BadTensor, match="bfloat16"):
        half.numpy()
    assert Tensor(TensorMeta("e", "bfloat16", (0, 3)), data[:0]).torch().shape == (0, 3)
