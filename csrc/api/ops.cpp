// Gives torch the CUDA implementations. Python defines the schemas, and everything else about the
// ops.
#include "ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(flash3, CUDA, library) {
  library.impl("fwd", TORCH_BOX(&flash3::forward));
  library.impl("bwd", TORCH_BOX(&flash3::backward));
  library.impl("quantize_qkv", TORCH_BOX(&flash3::quantize_qkv));
  library.impl("fp8_fwd", TORCH_BOX(&flash3::fp8_forward));
  library.impl("sink_bwd", TORCH_BOX(&flash3::sink_backward));
  library.impl("merge", TORCH_BOX(&flash3::merge));
  library.impl("varlen_fwd", TORCH_BOX(&flash3::varlen_forward));
  library.impl("varlen_bwd", TORCH_BOX(&flash3::varlen_backward));
}
