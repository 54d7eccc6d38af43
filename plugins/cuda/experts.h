// What the kernels of MixtureOfExperts share: the workspace, and the launchers that mixture_of_experts.cu calls.
//
// A pair is a token and one of its experts; pair t * top_k + k is token t's k-th, in the order of the experts' numbers. Sorted
// by expert, and by token where the expert is the same, pairs become rows: those that an expert computes lie together.
#pragma once

#include "element.h"
#include "launch.h"
#include "mixture_of_experts.h"
#include "warp.h"

namespace qwenrt::cuda {

constexpr int kMaxExperts = 1024;
constexpr int kMaxTopK = kWarp;   // a lane for each

// Device pointers into the workspace.
struct ExpertsWorkspace {
    int32_t* pair_expert;  // [pairs]
    float* pair_share;     // [pairs]
    int32_t* pair_row;     // [pairs]
    int32_t* row_token;    // [pairs]
    int32_t* start;        // [E+1]: expert e has rows start[e] to start[e+1]
    void* inner;           // [pairs, inner]: silu(gate) * up of each row
    void* out;             // [pairs, hidden]: each row after the expert's down projection

    size_t bytes;          // of it all

    static ExpertsWorkspace at(void* memory, const MixtureOfExpertsShape& shape);
};

// Everything a kernel may need, passed by value.
struct ExpertsParams {
    MixtureOfExpertsArgs args;
    ExpertsWorkspace workspace;
    int32_t pairs;         // T * top_k
};

// Which experts each token goes to, with what share, and where its rows then lie.
cudaError_t launch_routing(const ExpertsParams& params);

// Every row through its expert's two products.
cudaError_t launch_experts(const ExpertsParams& params);

// y: of each token the sum of its rows, by their shares.
cudaError_t launch_gather(const ExpertsParams& params);

// Calls launch(element{}) for the type of the shape, which must be a supported one.
template <typename Launch>
cudaError_t dispatch_element(const MixtureOfExpertsShape& shape, Launch launch) {
    return shape.dtype == DataType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace qwenrt::cuda
