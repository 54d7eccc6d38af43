#define QWENRT_ISA avx512
#include "attention_kernel.h"
#include "integer_linear_kernel.h"
#include "linear_kernel.h"
#include "lora_kernel.h"
#include "prepare_kernel.h"
#include "sampling_kernel.h"
#include "swiglu_kernel.h"

namespace qwenrt {

extern const Isa kAvx512;
const Isa kAvx512 = {"avx512", avx512::kLanes,
    avx512::linear_columns, nullptr, nullptr, avx512::lora_columns, avx512::swiglu,
    avx512::kRounding, avx512::round_row, avx512::integer_panels,
    avx512::block_peaks, avx512::sampling_weights,
    avx512::prepare_token, avx512::attend, avx512::attend_chunk, avx512::merge_chunks};

}  // namespace qwenrt
