"""FlashAttention-3 for Hopper: exact attention, forward and backward, as CuTe kernels behind a thin Python API.

On CUDA the work is done by the kernels of ``flash3._C``; on CPU by the readable implementation in
:mod:`flash3.reference`, which is the specification of both. The package imports without the kernels.
"""

from flash3.checks import is_available
from flash3.fp8 import flash_attn_fp8_func
from flash3.functional import flash_attn_func, flash_attn_qkvpacked_func
from flash3.varlen import flash_attn_varlen_func

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "is_available",
]
