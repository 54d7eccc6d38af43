// The way of tokens to their experts and back: the choice, its order by expert, and each token's sum at the end.
//
// No step depends on the order of threads: an expert's rows are in the order of the tokens, a token's sum in that of experts.
#include "experts.h"
#include "ptx.h"

namespace qwenrt::cuda {
namespace {

constexpr int kChooseWarps = 4;
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr int kGatherThreads = 256;
constexpr float kLog2E = 1.4426950408889634f;

struct Candidate {
    float logit;
    int expert;
};

// Larger logits go first, among equals the lower number.
__device__ __forceinline__ bool before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.expert < b.expert);
}

// A NaN is as -inf here, so that there is always an order; it spoils the shares.
template <typename T>
__device__ __forceinline__ Candidate candidate(const T* logits, int expert) {
    const float logit = static_cast<float>(logits[expert]);
    return {logit == logit ? logit : -INFINITY, expert};
}

// The next after `last` in a token's order. The same in all lanes.
template <typename T>
__device__ __forceinline__ Candidate next(const T* logits, int num_experts, const Candidate& last) {
    Candidate best{-INFINITY, INT32_MAX};
    for (int expert = static_cast<int>(threadIdx.x) % kWarp; expert < num_experts; expert += kWarp) {
        const Candidate one = candidate(logits, expert);
        if (before(last, one) && before(one, best)) best = one;
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
        const Candidate other{__shfl_xor_sync(kFullWarp, best.logit, step), __shfl_xor_sync(kFullWarp, best.expert, step)};
        if (before(other, best)) best = other;
    }
    return best;
}

// Of the softmax's denominator, all logits less their largest. The same in all lanes.
template <typename T>
__device__ __forceinline__ float sum_of_exponentials(const T* logits, int num_experts, float largest) {
    float sum = 0.0f;
    for (int expert = static_cast<int>(threadIdx.x) % kWarp; expert < num_experts; expert += kWarp) {
        sum += fast_exp2((static_cast<float>(logits[expert]) - largest) * kLog2E);
    }
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    return sum;
}

// A warp a token: lane k finds the k-th of its experts, then writes it where the order by number has it.
template <typename T>
__global__ void __launch_bounds__(kChooseWarps* kWarp) choose_kernel(const ExpertsParams p) {
    const MixtureOfExpertsShape& shape = p.args.shape;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int token = static_cast<int>(blockIdx.x) * kChooseWarps + static_cast<int>(threadIdx.x) / kWarp;
    if (token >= shape.num_tokens) return;
    const T* const logits = static_cast<const T*>(p.args.router_logits) + static_cast<int64_t>(token) * shape.num_experts;
    Candidate own{-INFINITY, 0}, last{INFINITY, -1};
    float largest = 0.0f;
    for (int rank = 0; rank < shape.top_k; ++rank) {
        last = next(logits, shape.num_experts, last);
        if (rank == 0) largest = last.logit;
        if (lane == rank) own = last;
    }
    float share = fast_exp2((own.logit - largest) * kLog2E) / sum_of_exponentials(logits, shape.num_experts, largest);
    float kept = 0.0f;
    int place = 0;
    for (int rank = 0; rank < shape.top_k; ++rank) {
        kept += __shfl_sync(kFullWarp, share, rank);
        place += __shfl_sync(kFullWarp, own.expert, rank) < own.expert ? 1 : 0;
    }
    if (shape.norm_topk_prob != 0) share /= kept;
    if (lane >= shape.top_k) return;
    const int pair = token * shape.top_k + place;
    p.workspace.pair_expert[pair] = own.expert;
    p.workspace.pair_share[pair] = share;
}

struct Count {
    int below;  // pairs of experts with lower numbers
    int equal;  // pairs of this expert
};

__device__ __forceinline__ Count plus(const Count& a, const Count& b) { return {a.below + b.below, a.equal + b.equal}; }

// What all threads of the block have together, and in `earlier` what those before this one have.
__device__ __forceinline__ Count scan(const Count& own, Count& earlier, Count* warps) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    Count sum = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
        const Count other{__shfl_up_sync(kFullWarp, sum.below, step), __shfl_up_sync(kFullWarp, sum.equal, step)};
        if (lane >= step) sum = plus(sum, other);
    }
    if (lane == kWarp - 1) warps[warp] = sum;
    __syncthreads();  // every warp's sum is there
    earlier = {sum.below - own.below, sum.equal - own.equal};
    Count all{0, 0};
    for (int i = 0; i < kSortWarps; ++i) {
        if (i < warp) earlier = plus(earlier, warps[i]);
        all = plus(all, warps[i]);
    }
    return all;
}

// A block an expert: its rows begin after those of lower numbers. Each thread looks through a run of the pairs.
__global__ void __launch_bounds__(kSortThreads) sort_kernel(const ExpertsParams p) {
    QWENRT_SHARED_MEMORY(shared);
    const int expert = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
    const int run = (p.pairs + kSortThreads - 1) / kSortThreads;
    const int begin = min(thread * run, p.pairs), end = min(begin + run, p.pairs);
    Count own{0, 0}, earlier{0, 0};
    for (int pair = begin; pair < end; ++pair) {
        const int other = p.workspace.pair_expert[pair];
        own = plus(own, {other < expert ? 1 : 0, other == expert ? 1 : 0});
    }
    const Count all = scan(own, earlier, reinterpret_cast<Count*>(shared));
    if (thread == 0) {
        p.workspace.start[expert] = all.below;
        if (expert == p.args.shape.num_experts - 1) p.workspace.start[expert + 1] = p.pairs;
    }
    int row = all.below + earlier.equal;
    for (int pair = begin; own.equal != 0 && pair < end; ++pair) {
        if (p.workspace.pair_expert[pair] != expert) continue;
        p.workspace.row_token[row] = pair / p.args.shape.top_k;
        p.workspace.pair_row[pair] = row;
        ++row;
    }
}

// A block a token.
template <typename T>
__global__ void __launch_bounds__(kGatherThreads) gather_kernel(const ExpertsParams p) {
    const MixtureOfExpertsShape& shape = p.args.shape;
    const int token = static_cast<int>(blockIdx.x), first = token * shape.top_k;
    const T* const out = static_cast<const T*>(p.workspace.out);
    T* const y = static_cast<T*>(p.args.y) + static_cast<int64_t>(token) * shape.hidden;
    for (int i = static_cast<int>(threadIdx.x) * 8; i < shape.hidden; i += static_cast<int>(blockDim.x) * 8) {
        Eight sum{};
        for (int pair = first; pair < first + shape.top_k; ++pair) {
            const float share = p.workspace.pair_share[pair];
            const Eight one = load_eight(out + static_cast<int64_t>(p.workspace.pair_row[pair]) * shape.hidden + i);
#pragma unroll
            for (int k = 0; k < 8; ++k) sum.v[k] += share * one.v[k];
        }
        store_eight(y + i, sum);
    }
}

}  // namespace

cudaError_t launch_routing(const ExpertsParams& p) {
    const MixtureOfExpertsShape& shape = p.args.shape;
    const dim3 tokens((shape.num_tokens + kChooseWarps - 1) / kChooseWarps);
    QWENRT_TRY(dispatch_element(shape, [&](auto element) {
        const auto kernel = &choose_kernel<decltype(element)>;
        return QWENRT_LAUNCH(kernel, tokens, dim3(kChooseWarps * kWarp), 0, p.args.stream, p);
    }));
    const auto kernel = &sort_kernel;
    const size_t shared = kSortWarps * sizeof(Count);
    return QWENRT_LAUNCH(kernel, dim3(shape.num_experts), dim3(kSortThreads), shared, p.args.stream, p);
}

cudaError_t launch_gather(const ExpertsParams& p) {
    const int pieces = p.args.shape.hidden / 8;
    const int threads = pieces < kGatherThreads ? (pieces + kWarp - 1) / kWarp * kWarp : kGatherThreads;
    return dispatch_element(p.args.shape, [&](auto element) {
        const auto kernel = &gather_kernel<decltype(element)>;
        return QWENRT_LAUNCH(kernel, dim3(p.args.shape.num_tokens), dim3(threads), 0, p.args.stream, p);
    });
}

}  // namespace qwenrt::cuda
