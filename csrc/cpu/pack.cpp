#include "cpu/pack.h"

#include <algorithm>
#include <cstring>
#include <span>

namespace ringlm::cpu {
namespace {

// `count` units of a block, from byte `offset` on.
struct Field {
  std::uint16_t offset;
  enum Unit : std::uint8_t { Scale = 2, Word = 4, Nibbles = 0 } unit;
  std::uint16_t count;  // of scales or words; of words that are cut into nibbles
};

// In packed order: what a kernel reads first comes first. The layouts are those of gguf/blocks.h.
std::span<const Field> fields(gguf::DType type) {
  using enum Field::Unit;
  static constexpr Field f32[] = {{0, Word, 1}};
  static constexpr Field f16[] = {{0, Scale, 1}};
  static constexpr Field q4_0[] = {{0, Scale, 1}, {2, Word, 4}};
  static constexpr Field q4_1[] = {{0, Scale, 2}, {4, Word, 4}};
  static constexpr Field q5_0[] = {{0, Scale, 1}, {2, Nibbles, 1}, {6, Word, 4}};
  static constexpr Field q5_1[] = {{0, Scale, 2}, {4, Nibbles, 1}, {8, Word, 4}};
  static constexpr Field q8_0[] = {{0, Scale, 1}, {2, Word, 8}};
  static constexpr Field q2_k[] = {{80, Scale, 2}, {0, Word, 4}, {16, Word, 16}};
  static constexpr Field q3_k[] = {{108, Scale, 1}, {96, Word, 3}, {0, Word, 8}, {32, Word, 16}};
  static constexpr Field q4_k[] = {{0, Scale, 2}, {4, Word, 3}, {16, Word, 32}};
  static constexpr Field q5_k[] = {{0, Scale, 2}, {4, Word, 3}, {16, Word, 8}, {48, Word, 32}};
  static constexpr Field q6_k[] = {{208, Scale, 1}, {192, Word, 4}, {128, Word, 16}, {0, Word, 32}};
  static constexpr Field iq4_xs[] = {{0, Scale, 2}, {4, Word, 1}, {8, Word, 32}};
  switch (type) {
    case gguf::DType::F32:
      return f32;
    case gguf::DType::F16:
    case gguf::DType::BF16:
      return f16;
    case gguf::DType::Q4_0:
    case gguf::DType::IQ4_NL:
      return q4_0;
    case gguf::DType::Q4_1:
      return q4_1;
    case gguf::DType::Q5_0:
      return q5_0;
    case gguf::DType::Q5_1:
      return q5_1;
    case gguf::DType::Q8_0:
      return q8_0;
    case gguf::DType::Q2_K:
      return q2_k;
    case gguf::DType::Q3_K:
      return q3_k;
    case gguf::DType::Q4_K:
      return q4_k;
    case gguf::DType::Q5_K:
      return q5_k;
    case gguf::DType::Q6_K:
      return q6_k;
    case gguf::DType::IQ4_XS:
      return iq4_xs;
    default:
      return {};
  }
}

// Bits 4 w to 4 w + 3 of the row's word are bits 4 lane to 4 lane + 3 of the packed 64-bit word w.
void pack_nibbles(std::uint8_t* packed, const std::uint8_t* row, std::int32_t lane) {
  std::uint32_t word;
  std::memcpy(&word, row, sizeof word);
  for (int w = 0; w < 8; ++w) {
    const auto nibble = static_cast<std::uint8_t>(word >> (4 * w) & 15);
    packed[8 * w + lane / 2] |= static_cast<std::uint8_t>(nibble << (4 * (lane % 2)));
  }
}

void unpack_nibbles(const std::uint8_t* packed, std::uint8_t* row, std::int32_t lane) {
  std::uint32_t word = 0;
  for (int w = 0; w < 8; ++w) {
    const std::uint32_t nibble = packed[8 * w + lane / 2] >> (4 * (lane % 2)) & 15u;
    word |= nibble << (4 * w);
  }
  std::memcpy(row, &word, sizeof word);
}

}  // namespace

bool can_pack(gguf::DType type) { return !fields(type).empty(); }

void pack(const MatrixView& to, const std::uint8_t* rows, std::int32_t begin, std::int32_t end,
          std::uint8_t* out) {
  const std::size_t block_bytes = gguf::traits(to.type).block_bytes;
  const std::size_t blocks = to.row_bytes / block_bytes;
  const std::span<const Field> all = fields(to.type);
  for (std::int32_t group = begin; group < end; ++group) {
    std::uint8_t* packed = out + static_cast<std::size_t>(group) * to.group_bytes();
    const std::int32_t lanes = std::min(kGroup, to.rows - group * kGroup);
    if (lanes < kGroup || to.type == gguf::DType::Q5_0 || to.type == gguf::DType::Q5_1) {
      std::memset(packed, 0, to.group_bytes());
    }
    const std::uint8_t* first = rows + static_cast<std::size_t>(group) * kGroup * to.row_bytes;
    for (std::size_t b = 0; b < blocks; ++b) {
      for (const Field& f : all) {
        for (std::int32_t lane = 0; lane < lanes; ++lane) {
          const std::uint8_t* row =
              first + static_cast<std::size_t>(lane) * to.row_bytes + b * block_bytes + f.offset;
          if (f.unit == Field::Nibbles) {
            pack_nibbles(packed, row, lane);
          } else if (f.unit == Field::Scale) {
            for (int i = 0; i < f.count; ++i) std::memcpy(packed + 2 * (kGroup * i + lane), row + 2 * i, 2);
          } else {
            for (int i = 0; i < f.count; ++i) std::memcpy(packed + 4 * (kGroup * i + lane), row + 4 * i, 4);
          }
        }
        packed += static_cast<std::size_t>(kGroup * f.count * (f.unit == Field::Scale ? 2 : 4));
      }
    }
  }
}

void unpack_row(const MatrixView& from, std::int32_t r, std::uint8_t* out) {
  const std::size_t block_bytes = gguf::traits(from.type).block_bytes;
  const std::size_t blocks = from.row_bytes / block_bytes;
  const std::uint8_t* packed = from.data + static_cast<std::size_t>(r / kGroup) * from.group_bytes();
  const std::int32_t lane = r % kGroup;
  for (std::size_t b = 0; b < blocks; ++b, out += block_bytes) {
    for (const Field& f : fields(from.type)) {
      std::uint8_t* row = out + f.offset;
      if (f.unit == Field::Nibbles) {
        unpack_nibbles(packed, row, lane);
      } else if (f.unit == Field::Scale) {
        for (int i = 0; i < f.count; ++i) std::memcpy(row + 2 * i, packed + 2 * (kGroup * i + lane), 2);
      } else {
        for (int i = 0; i < f.count; ++i) std::memcpy(row + 4 * i, packed + 4 * (kGroup * i + lane), 4);
      }
      packed += static_cast<std::size_t>(kGroup * f.count * (f.unit == Field::Scale ? 2 : 4));
    }
  }
}

}  // namespace ringlm::cpu
