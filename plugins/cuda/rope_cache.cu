// RMSNorm and RoPE of q and k, the write of k and v into the pool, and the plan of the attention kernels.
//
// Block 0 makes the plan; block 1 + t does row t: D/16 lanes a head, each with 8 elements of the first half of the head
// and the 8 of the second half that RoPE pairs them with, so that a pair never crosses lanes and every access is 16 bytes.
#include "paging.cuh"

namespace qwenrt::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kPiece = 8;  // elements in 16 bytes

struct Work {
    int decode;
    int prefill;
};

__device__ Work work_of(const Params& p, int index) {
    const Sequence sequence = load_sequence(p, index);
    if (sequence.rows <= 0) return {0, 0};
    if (decodes(p, sequence.rows)) return {max(1, tiles_of(visible_to_any(p, sequence))), 0};
    const int tile_tokens = kPrefillRows / p.group;
    return {0, (sequence.rows + tile_tokens - 1) / tile_tokens};
}

// One warp's work. Each lane sums a run of sequences, the warp scans the sums, each lane writes its run.
__device__ void make_plan(const Params& p) {
    const int lane = static_cast<int>(threadIdx.x);
    const int num = p.args.shape.num_seqs;
    const int run = (num + kWarp - 1) / kWarp;
    const int begin = min(lane * run, num), end = min(begin + run, num);
    Work before{0, 0};
    for (int s = begin; s < end; ++s) {
        const Work work = work_of(p, s);
        before = {before.decode + work.decode, before.prefill + work.prefill};
    }
    const Work own = before;
    for (int step = 1; step < kWarp; step *= 2) {
        const int decode = __shfl_up_sync(kFullWarp, before.decode, step);
        const int prefill = __shfl_up_sync(kFullWarp, before.prefill, step);
        if (lane >= step) before = {before.decode + decode, before.prefill + prefill};
    }
    before = {before.decode - own.decode, before.prefill - own.prefill};
    for (int s = begin; s < end; ++s) {
        p.workspace.decode_start[s] = before.decode;
        p.workspace.prefill_start[s] = before.prefill;
        const Work work = work_of(p, s);
        before = {before.decode + work.decode, before.prefill + work.prefill};
    }
    if (lane == kWarp - 1) {
        p.workspace.decode_start[num] = before.decode;
        p.workspace.prefill_start[num] = before.prefill;
    }
}

template <int kLanes>
__device__ __forceinline__ float sum_of_squares(const Eight& a, const Eight& b) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPiece; ++i) sum += a.v[i] * a.v[i] + b.v[i] * b.v[i];
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    return sum;
}

template <typename T>
__device__ __forceinline__ void multiply(Eight& x, float factor, const T* weight) {
    const Eight w = load_eight(weight);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x.v[i] *= factor * w.v[i];
}

__device__ __forceinline__ void rotate(Eight& a, Eight& b, const Eight& cos, const Eight& sin) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
        const float first = a.v[i], second = b.v[i];
        a.v[i] = first * cos.v[i] - second * sin.v[i];
        b.v[i] = second * cos.v[i] + first * sin.v[i];
    }
}

// Where the slot of K head `head` or, from num_kv_heads on, of a V head begins.
template <typename C>
__device__ __forceinline__ C* slot_address(const Params& p, int head, int block, int slot, int head_dim) {
    return static_cast<C*>(p.args.kv_cache_out) + block * p.block_stride + head * p.head_stride + slot * head_dim;
}

__device__ __forceinline__ void divide(Eight& x, float scale) {
#pragma unroll
    for (int i = 0; i < kPiece; ++i) x.v[i] /= scale;
}

// What a padding row of attn holds.
template <typename T>
__device__ __forceinline__ void clear_row(const Params& p, int row, int width) {
    T* const target = static_cast<T*>(p.args.attn) + static_cast<int64_t>(row) * width;
    for (int i = static_cast<int>(threadIdx.x) * kPiece; i < width; i += static_cast<int>(blockDim.x) * kPiece) {
        store_eight(target + i, Eight{});
    }
}

template <typename T, typename C, int D>
__global__ void __launch_bounds__(kMaxThreads) rope_cache_kernel(const Params p) {
    constexpr int kLanes = D / (2 * kPiece);
    const PagedAttentionArgs& args = p.args;
    const PagedAttentionShape& shape = args.shape;
    if (blockIdx.x == 0) {
        if (threadIdx.x < kWarp) make_plan(p);
        return;
    }
    const int row = static_cast<int>(blockIdx.x) - 1;
    const int sequence = owner(args.query_start, shape.num_seqs, row);
    if (sequence < 0) {
        clear_row<T>(p, row, shape.num_heads * D);
        return;
    }
    const int position = args.positions[row];
    const int column = position >> p.block_shift;
    if (position < 0 || position >= shape.max_positions || column >= shape.max_blocks) return;
    const int block = args.block_tables[static_cast<int64_t>(sequence) * shape.max_blocks + column];
    const bool in_pool = static_cast<unsigned>(block) < static_cast<unsigned>(shape.num_blocks);
    const int slot = position & (shape.block_size - 1);

    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    const float* angles = args.rope + static_cast<int64_t>(position) * D + lane * kPiece;
    const Eight cos = load_eight(angles), sin = load_eight(angles + D / 2);
    const int num_rotated = shape.num_heads + shape.num_kv_heads, num_all = num_rotated + shape.num_kv_heads;
    const T* source = static_cast<const T*>(args.qkv) + static_cast<int64_t>(row) * num_all * D + lane * kPiece;
    const int stride = static_cast<int>(blockDim.x) / kLanes;
    for (int first = 0; first < num_all; first += stride) {
        const int head = first + static_cast<int>(threadIdx.x) / kLanes;
        const bool mine = head < num_all;
        Eight a{}, b{};
        if (mine) {
            a = load_eight(source + head * D);
            b = load_eight(source + head * D + D / 2);
        }
        const float inverse_rms = rsqrtf(sum_of_squares<kLanes>(a, b) / D + shape.norm_eps);
        if (!mine) continue;
        if (head < num_rotated) {
            const void* weights = head < shape.num_heads ? args.q_norm : args.k_norm;
            if (weights != nullptr) {
                const T* weight = static_cast<const T*>(weights) + lane * kPiece;
                multiply(a, inverse_rms, weight);
                multiply(b, inverse_rms, weight + D / 2);
            }
            rotate(a, b, cos, sin);
        }
        if (head < shape.num_heads) {
            const int64_t head_row = static_cast<int64_t>(row) * shape.num_heads + head;
            T* const target = static_cast<T*>(args.attn) + head_row * D + lane * kPiece;
            store_eight(target, a);
            store_eight(target + D / 2, b);
        } else if (in_pool) {
            const int cache_head = head - shape.num_heads;
            if constexpr (sizeof(C) == 1) {
                const float scale = head < num_rotated ? scale_of(args.k_scale, cache_head)
                                                       : scale_of(args.v_scale, cache_head - shape.num_kv_heads);
                divide(a, scale);
                divide(b, scale);
            }
            C* const target = slot_address<C>(p, cache_head, block, slot, D) + lane * kPiece;
            store_eight(target, a);
            store_eight(target + D / 2, b);
        }
    }
}

}  // namespace

cudaError_t launch_rope_cache(const Params& p) {
    const PagedAttentionShape& shape = p.args.shape;
    return dispatch(shape, [&](auto types) {
        using Types = decltype(types);
        const int lanes = (shape.num_heads + 2 * shape.num_kv_heads) * (Types::kHeadDim / (2 * kPiece));
        const int threads = std::min(kMaxThreads, (lanes + kWarp - 1) / kWarp * kWarp);
        const auto kernel = &rope_cache_kernel<typename Types::Element, typename Types::CacheElement, Types::kHeadDim>;
        return QWENRT_LAUNCH(kernel, dim3(1 + shape.num_tokens), dim3(threads), 0, p.args.stream, p);
    });
}

}  // namespace qwenrt::cuda
