// The signed Hadamard rotation of a head, for INT8 rows.
//
// One scale covers a row, so one outlier channel would set the resolution of all. The rotation spreads every
// channel over the whole block; it is orthogonal, so queries rotated alike give the same scores (QuaRot,
// arXiv:2404.00456). x [head_dim] is cut into blocks of b elements and each becomes
//   y = H (s . x) / sqrt(b)
// b is the largest 2^k, 12 * 2^k or 20 * 2^k that divides head_dim, so the usual head sizes are one block.
// With m = b / 2^k in {1, 12, 20}, the block is a matrix [m][2^k]: Sylvester's Walsh-Hadamard matrix acts on
// its rows, H_m on its columns (Paley's first construction). s_i is the Rudin-Shapiro sequence, whose
// spectrum is as flat as one of signs can be: without it a constant offset, the commonest kind of outlier,
// would land in a single coefficient.
#pragma once

#include <cstdint>

namespace ringlm::kv {

struct Rotation {
  std::int32_t head_dim = 0;
  std::int32_t m = 1;      // 1, 12 or 20
  std::int32_t width = 1;  // 2^k
};

Rotation make_rotation(std::int32_t head_dim);

// -1 where the number of overlapping "11" in i's binary digits is odd, else 1.
float rotation_sign(std::int32_t i);

// In place, [head_dim].
void rotate(const Rotation& r, float* x);
void rotate_back(const Rotation& r, float* x);

}  // namespace ringlm::kv
