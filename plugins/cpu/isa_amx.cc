#define QWENRT_ISA amx
#include "attention_kernel.h"
#include "integer_linear_kernel.h"
#include "linear_kernel.h"
#include "linear_tiles.h"
#include "lora_kernel.h"
#include "prepare_kernel.h"
#include "sampling_kernel.h"
#include "swiglu_kernel.h"

namespace qwenrt {

extern const Isa kAmx;
const Isa kAmx = {"amx", amx::kLanes,
    amx::linear_columns, amx::split_rows, amx::tiled_columns, amx::lora_columns, amx::swiglu,
    amx::kRounding, amx::round_row, amx::integer_panels,
    amx::block_peaks, amx::sampling_weights,
    amx::prepare_token, amx::attend, amx::attend_chunk, amx::merge_chunks};

}  // namespace qwenrt
