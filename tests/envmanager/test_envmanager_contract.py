"""The edge of the environment: anything comes in, only plain values pass."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envmanager import DataError
from envmanager.contract import check_reset, check_step, plain

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(codec=None)),
    st.binary(),
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.bool_, st.booleans()),
    st.just(np.zeros(3)),
    st.just(object()),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(st.characters(codec=None)), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)
infos = st.dictionaries(st.text(st.characters(codec=None)), values, max_size=4)


@given(st.one_of(values, st.tuples(values, values, values, values, values), st.tuples(values, values)))
def test_anything_is_plain_or_a_data_error(value):
    for check in (check_reset, check_step):
        try:
            checked: tuple[Any, ...] = check(value)
        except DataError:
            continue
        checked[0].encode()
        plain(checked[-1])
        if check is check_step:
            assert type(checked[1]) is float and math.isfinite(checked[1])
            assert type(checked[2]) is bool and type(checked[3]) is bool


@given(infos)
def test_metadata_can_be_written_and_read(info):
    kept = plain(info)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept)) == kept
    assert msgspec.json.decode(msgspec.json.encode(kept)) == kept


def test_numpy_scalars_are_unboxed():
    step = check_step(("o", np.float64(0.5), np.bool_(True), np.bool_(False), {}))
    assert step[1:4] == (0.5, True, False) and type(step[2]) is bool
    assert plain({"n": np.int64(3), "board": np.zeros(2), "name": np.str_("x")}) == {"n": 3, "name": "x"}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (("o", 1.0, True, {}), r"4.*return the 5-tuple"),
        ("observation", r"str .*5-tuple"),
        ((b"o", 1.0, True, False, {}), r"observation is bytes .*decode bytes"),
        (("\udc80", 1.0, True, False, {}), r"lone surrogates"),
        (("o", math.nan, True, False, {}), r"reward is float nan.*finite"),
        (("o", 10**400, True, False, {}), r"reward is int of 1329 bits"),
        (("o", -(10**5000), True, False, {}), r"reward is int of .* bits"),
        (("o", True, True, False, {}), r"reward is bool"),
        (("o", None, True, False, {}), r"reward is NoneType"),
        (("o", 1.0, 1, False, {}), r"terminated is int 1.*True or False"),
        (("o", 1.0, False, "no", {}), r"truncated is str"),
        (("o", 1.0, False, False, None), r"info is NoneType.*\{\}"),
    ],
)
def test_what_is_wrong_is_named(value, said):
    with pytest.raises(DataError, match=said):
        check_step(value)


def test_message_about_a_huge_value_is_short():
    with pytest.raises(DataError) as error:
        check_step((b"x" * 10**7, 1.0, True, False, {}))
    assert len(str(error.value)) < 300
