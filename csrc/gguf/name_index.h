// From a name to its position in a list, for names that a hostile file may have chosen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace ringlm::gguf {

// Sorted rather than hashed: no choice of names makes it slower than O(n log n) comparisons.
class NameIndex {
 public:
  void add(std::string_view name, std::size_t position) { names_.emplace_back(name, position); }

  // Sorts. Returns the positions of two equal names, if there are any.
  std::optional<std::pair<std::size_t, std::size_t>> finish() {
    std::sort(names_.begin(), names_.end());
    const auto same = [](const Item& a, const Item& b) { return a.first == b.first; };
    const auto twin = std::adjacent_find(names_.begin(), names_.end(), same);
    if (twin == names_.end()) return std::nullopt;
    return std::pair{twin->second, std::next(twin)->second};
  }

  std::optional<std::size_t> find(std::string_view name) const noexcept {
    const auto before = [](const Item& item, std::string_view key) { return item.first < key; };
    const auto at = std::lower_bound(names_.begin(), names_.end(), name, before);
    if (at == names_.end() || at->first != name) return std::nullopt;
    return at->second;
  }

 private:
  using Item = std::pair<std::string_view, std::size_t>;
  std::vector<Item> names_;
};

}  // namespace ringlm::gguf
