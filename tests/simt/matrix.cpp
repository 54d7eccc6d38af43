// The two operations that a whole warp does on fragments of matrices, lane by lane as the PTX ISA lays them out.
#include "race.h"
#include "simt.h"
#include "simt_ptx.h"

namespace simt {
namespace {

struct MatrixLane {
    uint32_t (&registers)[4];
    const uint16_t* row;
};

template <bool kTransposed>
void gather(Operands lanes) {
    for (int l = 0; l < kWarp; ++l) {
        for (int matrix = 0; matrix < 4; ++matrix) {
            uint32_t both = 0;
            for (int i = 0; i < 2; ++i) {
                const int r = kTransposed ? 2 * (l % 4) + i : l / 4, c = kTransposed ? l / 4 : 2 * (l % 4) + i;
                both |= static_cast<uint32_t>(static_cast<MatrixLane*>(lanes[matrix * 8 + r])->row[c]) << (16 * i);
            }
            static_cast<MatrixLane*>(lanes[l])->registers[matrix] = both;
        }
    }
}

}  // namespace

void load_matrices(uint32_t (&registers)[4], const void* row, bool transposed, int line) {
    if (!in_shared_memory(row, 16)) fail("ldmatrix at line %d reads outside shared memory", line);
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix at line %d with a row that is not 16-byte aligned", line);
    race::access(row, 16, false);
    MatrixLane lane{registers, static_cast<const uint16_t*>(row)};
    if (transposed) {
        warp_collective("ldmatrix.trans", line, 0xffffffffu, &lane, gather<true>);
    } else {
        warp_collective("ldmatrix", line, 0xffffffffu, &lane, gather<false>);
    }
}

void multiply(const Multiply& lane, int line) {
    Multiply own = lane;
    warp_collective("mma", line, 0xffffffffu, &own, [](Operands lanes) {
        ++work.products;
        float a[16][16], b[16][8];
        for (int l = 0; l < kWarp; ++l) {
            const Multiply& from = *static_cast<Multiply*>(lanes[l]);
            const int g = l / 4, t = l % 4;
            for (int i = 0; i < 4; ++i) {
                const float2 pair = from.unpack(from.a[i]);
                float* const target = &a[g + i % 2 * 8][2 * t + i / 2 * 8];
                target[0] = pair.x;
                target[1] = pair.y;
            }
            for (int i = 0; i < 2; ++i) {
                const float2 pair = from.unpack(from.b[i]);
                b[2 * t + i * 8][g] = pair.x;
                b[2 * t + i * 8 + 1][g] = pair.y;
            }
        }
        float d[16][8] = {};
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
            }
        }
        for (int l = 0; l < kWarp; ++l) {
            const Multiply& to = *static_cast<Multiply*>(lanes[l]);
            for (int i = 0; i < 4; ++i) to.d[i] += d[l / 4 + i / 2 * 8][2 * (l % 4) + i % 2];
        }
    });
}

}  // namespace simt
