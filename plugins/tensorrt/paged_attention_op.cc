#include "paged_attention_op.h"

#include <atomic>

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using namespace ops::paged_attention;

void warn_of_copy() {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
        log(kName, Severity::kWARNING,
            "kv_cache_out is not bound to the memory of kv_cache, so every step copies the whole pool; build with "
            "PreviewFeature::kALIASED_PLUGIN_IO_10_03 and bind one buffer to both");
    }
}

}  // namespace

void PagedAttentionAttributes::check() const {
    const cuda::PagedAttentionShape any = shape(cuda::DataType::kFloat16, cuda::DataType::kFloat16);
    if (const char* const reason = qwenrt_paged_attention_unsupported(&any)) {
        throw std::invalid_argument(std::string(reason) + " (" + text_of(*this) + ")");
    }
}

cuda::PagedAttentionShape PagedAttentionAttributes::shape(cuda::DataType dtype, cuda::DataType kv_dtype) const {
    cuda::PagedAttentionShape shape{};
    shape.num_heads = num_heads;
    shape.num_kv_heads = num_kv_heads;
    shape.head_dim = head_dim;
    shape.block_size = block_size;
    shape.sliding_window = sliding_window;
    shape.scale = scale;
    shape.norm_eps = norm_eps;
    shape.dtype = dtype;
    shape.kv_dtype = kv_dtype;
    return shape;
}

int32_t PagedAttentionOp::aliased_input(int32_t output) { return output == kKvCacheOut ? kKvCache : -1; }

void PagedAttentionOp::output_types(DataType* outputs, const DataType* inputs) {
    outputs[kAttn] = inputs[kQkv];
    outputs[kKvCacheOut] = inputs[kKvCache];
}

bool PagedAttentionOp::supports_type(const Attributes& attributes, int32_t position, const DataType* types) {
    const DataType type = types[position];
    switch (position) {
        case kQkv: return type == DataType::kHALF || type == DataType::kBF16;
        case kQNorm:
        case kKNorm:
        case kNumInputs + kAttn: return type == types[kQkv];
        case kRope: return type == DataType::kFLOAT;
        case kKvCache: {
            const std::optional<cuda::DataType> dtype = cuda_type(types[kQkv]), kv_dtype = cuda_type(type);
            if (!dtype || !kv_dtype) return false;
            const Shape shape = attributes.shape(*dtype, *kv_dtype);
            return qwenrt_paged_attention_unsupported(&shape) == nullptr;
        }
        case kNumInputs + kKvCacheOut: return type == types[kKvCache];
        default: return type == DataType::kINT32;
    }
}

void PagedAttentionOp::check_dims(const Attributes& a, const InputDims<PagedAttentionOp>& dims) {
    const auto expect = [&dims](Input input, const std::vector<int64_t>& expected, const std::string& meaning) {
        expect_dims(kInputNames[input], dims[input], expected, meaning);
    };
    const auto first = [&dims](Input input) { return dimension(dims[input], 0); };
    const int64_t width = (static_cast<int64_t>(a.num_heads) + 2 * static_cast<int64_t>(a.num_kv_heads)) * a.head_dim;
    expect(kQkv, {kUnknown, width}, "[T, " + std::to_string(width) + "]");
    for (const Input norm : {kQNorm, kKNorm}) {
        const int64_t length = first(norm) == 0 ? 0 : a.head_dim;
        expect(norm, {length}, "[" + std::to_string(a.head_dim) + "] or [0]");
    }
    if ((first(kQNorm) == 0) != (first(kKNorm) == 0)) {
        throw std::invalid_argument("of q_norm and k_norm one is empty, both must be or none");
    }
    expect(kRope, {kUnknown, a.head_dim}, "[max_positions, " + std::to_string(a.head_dim) + "]");
    expect(kPositions, {first(kQkv)}, "[T], one for each row of qkv");
    expect(kKvCache, {kUnknown, 2, a.num_kv_heads, a.block_size, a.head_dim},
           "[num_blocks, 2, " + std::to_string(a.num_kv_heads) + ", " + std::to_string(a.block_size) + ", " +
               std::to_string(a.head_dim) + "]");
    expect(kSeqLens, {kUnknown}, "[S]");
    const int64_t num_seqs = first(kSeqLens);
    expect(kBlockTables, {num_seqs, kUnknown}, "[S, max_blocks], S as in seq_lens");
    expect(kQueryStart, {num_seqs == kUnknown ? kUnknown : num_seqs + 1}, "[S + 1], S as in seq_lens");
}

void PagedAttentionOp::output_shapes(const Attributes& attributes, const DimsExprs* inputs, DimsExprs* outputs,
                                     nvinfer1::IExprBuilder& builder) {
    outputs[kAttn].nbDims = 2;
    outputs[kAttn].d[0] = inputs[kQkv].d[0];
    outputs[kAttn].d[1] = builder.constant(static_cast<int64_t>(attributes.num_heads) * attributes.head_dim);
    outputs[kKvCacheOut] = inputs[kKvCache];
}

PagedAttentionOp::Shape PagedAttentionOp::shape(const Attributes& attributes, const InputDims<PagedAttentionOp>& dims,
                                                const InputTypes<PagedAttentionOp>& types) {
    const std::optional<cuda::DataType> dtype = cuda_type(types[kQkv]), kv_dtype = cuda_type(types[kKvCache]);
    if (!dtype || !kv_dtype) throw std::invalid_argument("qkv must be float16 or bfloat16, kv_cache of the same type");
    Shape shape = attributes.shape(*dtype, *kv_dtype);
    shape.num_tokens = size_of(dims[kQkv].d[0], "the number of tokens");
    shape.num_seqs = size_of(dims[kSeqLens].d[0], "the number of sequences");
    shape.max_blocks = size_of(dims[kBlockTables].d[1], "max_blocks");
    shape.num_blocks = size_of(dims[kKvCache].d[0], "the number of blocks");
    shape.max_positions = size_of(dims[kRope].d[0], "max_positions");
    if (const char* const reason = qwenrt_paged_attention_unsupported(&shape)) throw std::invalid_argument(reason);
    return shape;
}

size_t PagedAttentionOp::workspace_size(const Shape& shape) { return qwenrt_paged_attention_workspace_size(&shape); }

cudaError_t PagedAttentionOp::run(const Step<Shape>& step) {
    const bool norm = step.descs[kQNorm].dims.d[0] != 0;
    cuda::PagedAttentionArgs args{};
    args.shape = step.shape;
    args.qkv = step.inputs[kQkv];
    args.q_norm = norm ? step.inputs[kQNorm] : nullptr;
    args.k_norm = norm ? step.inputs[kKNorm] : nullptr;
    args.rope = static_cast<const float*>(step.inputs[kRope]);
    args.positions = static_cast<const int32_t*>(step.inputs[kPositions]);
    args.kv_cache = step.inputs[kKvCache];
    args.kv_cache_out = step.outputs[kKvCacheOut];
    args.block_tables = static_cast<const int32_t*>(step.inputs[kBlockTables]);
    args.seq_lens = static_cast<const int32_t*>(step.inputs[kSeqLens]);
    args.query_start = static_cast<const int32_t*>(step.inputs[kQueryStart]);
    args.attn = step.outputs[kAttn];
    args.workspace = step.workspace;
    args.workspace_size = workspace_size(step.shape);
    args.stream = step.stream;
    if (args.kv_cache != args.kv_cache_out) warn_of_copy();
    return qwenrt_paged_attention(&args);
}

}  // namespace qwenrt::tensorrt
