#include "engine/kv_pages.h"

#include "kernels/ops.h"
#include "kernels/tensor.h"

namespace qwend {

KvPages::KvPages(int total) : total_(total) {
  Require(total > 0, "KvPages: a pool of ", total, " pages");
  free_.reserve(total);
  for (int page = total - 1; page >= 0; --page) free_.push_back(page);
}

int KvPages::PagesFor(int64_t positions) {
  return static_cast<int>((positions + kPageTokens - 1) / kPageTokens);
}

std::optional<KvPages::Lease> KvPages::Reserve(int count) {
  if (count > free()) return std::nullopt;
  std::vector<int32_t> pages(free_.rbegin(), free_.rbegin() + count);
  free_.resize(free_.size() - count);
  return Lease(this, std::move(pages));
}

void KvPages::Lease::Release() {
  if (pool_ == nullptr) return;
  pool_->free_.insert(pool_->free_.end(), pages_.rbegin(), pages_.rend());
  pages_.clear();
  pool_ = nullptr;
}

}  // namespace qwend
