#include "tensors.h"

#include <limits>
#include <stdexcept>
#include <vector>

namespace qwenrt::tensorrt {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using namespace ops::paged_attention;

std::string text(const Dims& dims) {
    std::string text = "[";
    for (int32_t i = 0; i < dims.nbDims; ++i) {
        text += (i == 0 ? "" : ", ") + (dims.d[i] == kUnknown ? "?" : std::to_string(dims.d[i]));
    }
    return text + "]";
}

bool agree(int64_t a, int64_t b) { return a == b || a == kUnknown || b == kUnknown; }

bool matches(const Dims& dims, const std::vector<int64_t>& expected) {
    if (dims.nbDims != static_cast<int32_t>(expected.size())) return false;
    for (size_t i = 0; i < expected.size(); ++i) {
        if (!agree(dims.d[i], expected[i])) return false;
    }
    return true;
}

int32_t size(int64_t value, const char* what) {
    if (value > std::numeric_limits<int32_t>::max()) {
        throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + ", must be below 2^31");
    }
    return value == kUnknown ? 0 : static_cast<int32_t>(value);
}

}  // namespace

void check_dims(const InputDims& dims, const Attributes& a) {
    const auto expect = [&dims](Input input, const std::vector<int64_t>& expected, const char* meaning) {
        if (!matches(dims[input], expected)) {
            throw std::invalid_argument(std::string(kInputNames[input]) + " has shape " + text(dims[input]) + ", must be " + meaning);
        }
    };
    const auto first = [&dims](Input input) { return dims[input].nbDims < 1 ? kUnknown : dims[input].d[0]; };
    const int64_t width = (static_cast<int64_t>(a.num_heads) + 2 * static_cast<int64_t>(a.num_kv_heads)) * a.head_dim;
    expect(kQkv, {kUnknown, width}, ("[T, " + std::to_string(width) + "]").c_str());
    for (const Input norm : {kQNorm, kKNorm}) {
        const int64_t length = first(norm) == 0 ? 0 : a.head_dim;
        expect(norm, {length}, ("[" + std::to_string(a.head_dim) + "] or [0]").c_str());
    }
    if ((first(kQNorm) == 0) != (first(kKNorm) == 0)) {
        throw std::invalid_argument("of q_norm and k_norm one is empty, both must be or none");
    }
    expect(kRope, {kUnknown, a.head_dim}, ("[max_positions, " + std::to_string(a.head_dim) + "]").c_str());
    expect(kPositions, {first(kQkv)}, "[T], one for each row of qkv");
    expect(kKvCache, {kUnknown, 2, a.num_kv_heads, a.block_size, a.head_dim},
           ("[num_blocks, 2, " + std::to_string(a.num_kv_heads) + ", " + std::to_string(a.block_size) + ", " +
            std::to_string(a.head_dim) + "]").c_str());
    expect(kSeqLens, {kUnknown}, "[S]");
    const int64_t num_seqs = first(kSeqLens);
    expect(kBlockTables, {num_seqs, kUnknown}, "[S, max_blocks], S as in seq_lens");
    expect(kQueryStart, {num_seqs == kUnknown ? kUnknown : num_seqs + 1}, "[S + 1], S as in seq_lens");
}

void set_sizes(cuda::PagedAttentionShape& shape, const InputDims& dims) {
    shape.num_tokens = size(dims[kQkv].d[0], "the number of tokens");
    shape.num_seqs = size(dims[kSeqLens].d[0], "the number of sequences");
    shape.max_blocks = size(dims[kBlockTables].d[1], "max_blocks");
    shape.num_blocks = size(dims[kKvCache].d[0], "the number of blocks");
    shape.max_positions = size(dims[kRope].d[0], "max_positions");
}

std::optional<cuda::DataType> cuda_type(DataType type) {
    switch (type) {
        case DataType::kHALF: return cuda::DataType::kFloat16;
        case DataType::kBF16: return cuda::DataType::kBFloat16;
        case DataType::kFP8: return cuda::DataType::kFloat8E4M3;
        default: return std::nullopt;
    }
}

bool supports_type(int32_t position, const DataType* types, const Attributes& attributes) {
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
            const cuda::PagedAttentionShape shape = attributes.shape(*dtype, *kv_dtype);
            return qwenrt_paged_attention_unsupported(&shape) == nullptr;
        }
        case kNumInputs + kKvCacheOut: return type == types[kKvCache];
        default: return type == DataType::kINT32;
    }
}

}  // namespace qwenrt::tensorrt
