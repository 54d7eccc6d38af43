// The C API: checks, workspace, and the order of the kernels.
#include "experts.h"
#include "memory.h"

namespace qwenrt::cuda {
namespace {

constexpr int64_t kMaxPairs = 1 << 21;  // with kMaxExperts more tiles than rows fill, a grid has at most 65535
constexpr int32_t kMaxWidth = 1 << 20;

const char* unsupported(const MixtureOfExpertsShape& s) {
    if (s.num_experts < 1 || s.num_experts > kMaxExperts) return "num_experts must be from 1 to 1024";
    if (s.top_k < 1 || s.top_k > s.num_experts || s.top_k > kMaxTopK) return "top_k must be from 1 to num_experts, at most 32";
    if (s.hidden < 8 || s.hidden % 8 != 0 || s.hidden > kMaxWidth) return "hidden must be a multiple of 8 from 8 to 2^20";
    if (s.inner < 8 || s.inner % 8 != 0 || s.inner > kMaxWidth) return "inner must be a multiple of 8 from 8 to 2^20";
    if (s.dtype != DataType::kFloat16 && s.dtype != DataType::kBFloat16) return "dtype must be float16 or bfloat16";
    if (s.num_tokens < 0 || static_cast<int64_t>(s.num_tokens) * s.top_k > kMaxPairs) {
        return "num_tokens must not be negative, and num_tokens * top_k at most 2^21";
    }
    return nullptr;
}

bool ready(const MixtureOfExpertsArgs& a) {
    const void* const aligned[] = {a.x, a.gate_up, a.down, a.y, a.workspace};
    for (const void* pointer : aligned) {
        if (pointer == nullptr || misaligned(pointer)) return false;
    }
    return a.router_logits != nullptr && a.workspace_size >= qwenrt_mixture_of_experts_workspace_size(&a.shape);
}

}  // namespace

ExpertsWorkspace ExpertsWorkspace::at(void* memory, const MixtureOfExpertsShape& shape) {
    Divider divider(memory);
    const size_t pairs = static_cast<size_t>(shape.num_tokens) * static_cast<size_t>(shape.top_k);
    ExpertsWorkspace w{};
    w.pair_expert = divider.take<int32_t>(pairs);
    w.pair_share = divider.take<float>(pairs);
    w.pair_row = divider.take<int32_t>(pairs);
    w.row_token = divider.take<int32_t>(pairs);
    w.start = divider.take<int32_t>(static_cast<size_t>(shape.num_experts) + 1);
    w.inner = divider.take<uint16_t>(pairs * static_cast<size_t>(shape.inner));
    w.out = divider.take<uint16_t>(pairs * static_cast<size_t>(shape.hidden));
    w.bytes = divider.taken();
    return w;
}

}  // namespace qwenrt::cuda

using namespace qwenrt::cuda;

const char* qwenrt_mixture_of_experts_unsupported(const MixtureOfExpertsShape* shape) { return unsupported(*shape); }

size_t qwenrt_mixture_of_experts_workspace_size(const MixtureOfExpertsShape* shape) {
    return ExpertsWorkspace::at(nullptr, *shape).bytes;
}

cudaError_t qwenrt_mixture_of_experts(const MixtureOfExpertsArgs* args) {
    if (args == nullptr || unsupported(args->shape) != nullptr) return cudaErrorInvalidValue;
    if (args->shape.num_tokens == 0) return cudaSuccess;
    if (!ready(*args)) return cudaErrorInvalidValue;
    ExpertsParams p{};
    p.args = *args;
    p.workspace = ExpertsWorkspace::at(args->workspace, args->shape);
    p.pairs = args->shape.num_tokens * args->shape.top_k;
    QWENRT_TRY(launch_routing(p));
    QWENRT_TRY(launch_experts(p));
    return launch_gather(p);
}
