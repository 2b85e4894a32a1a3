// The pool of key-value pages: kPageTokens positions each, of every full-attention layer at once.
//
// Pages 0 .. total - 1 are handed out here. The page after them is the dummy page of the executor's
// padded rows; it is never handed out and never counted.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace qwend {

// Thread: the engine thread. The pool must outlive its leases.
class KvPages {
 public:
  // Pages that belong to one sequence until the lease ends.
  class Lease {
   public:
    Lease() = default;
    Lease(Lease&& other) noexcept { *this = std::move(other); }
    Lease& operator=(Lease&& other) noexcept {
      std::swap(pool_, other.pool_);
      std::swap(pages_, other.pages_);
      return *this;
    }
    ~Lease() { Release(); }
    void Release();  // gives the pages back now
    std::span<const int32_t> pages() const { return pages_; }

   private:
    friend class KvPages;
    Lease(KvPages* pool, std::vector<int32_t> pages) : pool_(pool), pages_(std::move(pages)) {}
    KvPages* pool_ = nullptr;
    std::vector<int32_t> pages_;
  };

  explicit KvPages(int total);
  KvPages(const KvPages&) = delete;
  KvPages& operator=(const KvPages&) = delete;

  static int PagesFor(int64_t positions);

  // All `count` pages or none.
  std::optional<Lease> Reserve(int count);

  int total() const { return total_; }
  int free() const { return static_cast<int>(free_.size()); }
  int used() const { return total() - free(); }

 private:
  int total_;
  std::vector<int32_t> free_;  // the last one goes out first
};

}  // namespace qwend
