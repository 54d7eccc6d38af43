#define QWENRT_ISA avx2
#include "attention_kernel.h"
#include "integer_linear_kernel.h"
#include "linear_kernel.h"
#include "lora_kernel.h"
#include "prepare_kernel.h"
#include "sampling_kernel.h"
#include "swiglu_kernel.h"

namespace qwenrt {

extern const Isa kAvx2;
const Isa kAvx2 = {"avx2", avx2::kLanes,
    avx2::linear_columns, nullptr, nullptr, avx2::lora_columns, avx2::swiglu,
    avx2::kRounding, avx2::round_row, avx2::integer_panels,
    avx2::block_peaks, avx2::sampling_weights,
    avx2::prepare_token, avx2::attend, avx2::attend_chunk, avx2::merge_chunks};

}  // namespace qwenrt
