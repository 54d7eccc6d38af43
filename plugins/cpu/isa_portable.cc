#define QWENRT_ISA portable
#include "attention_kernel.h"
#include "integer_linear_kernel.h"
#include "linear_kernel.h"
#include "lora_kernel.h"
#include "prepare_kernel.h"
#include "sampling_kernel.h"
#include "swiglu_kernel.h"

namespace qwenrt {

extern const Isa kPortable;
const Isa kPortable = {"portable", portable::kLanes,
    portable::linear_columns, nullptr, nullptr, portable::lora_columns, portable::swiglu,
    portable::kRounding, portable::round_row, portable::integer_panels,
    portable::block_peaks, portable::sampling_weights,
    portable::prepare_token, portable::attend, portable::attend_chunk, portable::merge_chunks};

}  // namespace qwenrt
