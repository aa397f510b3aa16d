"""One registry entry per element type, quantisation format and KV type: facts that every part of the compiler needs.

The entries hold names and sizes only and import nothing heavy, so that the runtime, the command line and the hardware
model read the same facts as the passes and the back ends. docs/extending.md lists the files that add one.
"""

from fastcar_compile.formats.dtypes import DTYPES, DType
from fastcar_compile.formats.kv import KV_TYPES, KvType, kv_type
from fastcar_compile.formats.quant import GROUP, QUANT_FORMATS, QuantFormat, quant_format

__all__ = ["DTYPES", "GROUP", "KV_TYPES", "QUANT_FORMATS", "DType", "KvType", "QuantFormat", "kv_type", "quant_format"]
