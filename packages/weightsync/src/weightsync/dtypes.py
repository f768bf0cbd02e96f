"""The element types that can be carried, by the names torch and numpy share, and their sizes in bytes.

Elements travel as raw bytes, so that NaN payloads, -0.0, bfloat16 and fp8 arrive bit for bit
(`test_weightsync_roundtrip.py::test_every_dtype_arrives_bit_for_bit`).
"""

__all__ = ["ITEMSIZE"]

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
