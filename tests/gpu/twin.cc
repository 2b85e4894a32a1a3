#include "tests/gpu/twin.h"

#include <cstdlib>

#include "kernels/bf16.h"
#include "kernels/cuda/page_layout.h"
#include "kernels/op_check.h"

namespace qwend::gpu {
namespace {

std::vector<char> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<char> bytes(values.size() * SizeOf(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + i * 4, &values[i], 4);
    } else if (dtype == DType::kBF16) {
      const uint16_t v = FloatToBf16(values[i]);
      std::memcpy(bytes.data() + i * 2, &v, 2);
    } else if (dtype == DType::kF16) {
      const _Float16 v = static_cast<_Float16>(values[i]);
      std::memcpy(bytes.data() + i * 2, &v, 2);
    } else {
      const int32_t v = static_cast<int32_t>(values[i]);
      std::memcpy(bytes.data() + i * 4, &v, 4);
    }
  }
  return bytes;
}

int64_t Count(std::initializer_list<int64_t> shape) {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return n;
}

}  // namespace

Handle Twin::Add(const std::vector<char>& bytes, DType dtype,
                 std::initializer_list<int64_t> shape) {
  return Add(bytes, bytes, dtype, shape);
}

Handle Twin::Add(const std::vector<char>& cpu_bytes, const std::vector<char>& cuda_bytes,
                 DType dtype, std::initializer_list<int64_t> shape) {
  const int64_t size = static_cast<int64_t>(cpu_bytes.size());
  for (Backend* backend : {&cpu_, &cuda_}) {
    const std::vector<char>& bytes = backend == &cpu_ ? cpu_bytes : cuda_bytes;
    Buffer buffer = backend->Allocate(size + 2 * kGuard);
    const std::vector<unsigned char> guard(kGuard, kGuardByte);
    char* base = static_cast<char*>(buffer.data());
    backend->CopyToDevice(base, guard.data(), kGuard);
    backend->CopyToDevice(base + kGuard, bytes.data(), size);
    backend->CopyToDevice(base + kGuard + size, guard.data(), kGuard);
    backend->Synchronize();
    (backend == &cpu_ ? cpu_views_ : cuda_views_)
        .push_back(TensorView::Of(base + kGuard, dtype, shape));
    if (backend == &cuda_) guards_.push_back(base);
    buffers_.push_back(std::move(buffer));
  }
  return {static_cast<int>(cpu_views_.size()) - 1};
}

std::vector<float> Twin::Normal(int64_t count, float spread) {
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> values(count);
  for (float& v : values) v = normal(random_);
  return values;
}

Handle Twin::Random(DType dtype, std::initializer_list<int64_t> shape, float spread) {
  return Add(Encode(Normal(Count(shape), spread), dtype), dtype, shape);
}

// Each way: whose place an element has also has its.
std::vector<float> Twin::InPageLayout(const std::vector<float>& values, int64_t head_dim) const {
  if (!on_cuda_) return values;
  const int dim = static_cast<int>(head_dim);
  std::vector<float> moved(values.size());
  for (size_t row = 0; row < values.size() / dim; ++row) {
    const int position = static_cast<int>(row % kPageTokens);
    for (int i = 0; i < dim; ++i)
      moved[row * dim + cuda::PageColumn(i, position, dim)] = values[row * dim + i];
  }
  return moved;
}

Handle Twin::Pages(int64_t pages, int64_t kv_heads, int64_t head_dim) {
  const std::vector<float> values = Normal(pages * kv_heads * kPageTokens * head_dim, 1.0f);
  const Handle h =
      Add(Encode(values, DType::kBF16), Encode(InPageLayout(values, head_dim), DType::kBF16),
          DType::kBF16, {pages, kv_heads, kPageTokens, head_dim});
  pages_.insert(h.index);
  return h;
}

std::vector<float> Twin::Cuda(Handle h) {
  const TensorView& view = cuda_views_[h.index];
  const std::vector<float> values = Read(cuda_, view);
  return pages_.contains(h.index) ? InPageLayout(values, view.dim(3)) : values;
}

Handle Twin::Poisoned(DType dtype, std::initializer_list<int64_t> shape) {
  const float poison = dtype == DType::kI32 ? -1.0f : std::nanf("");
  return Add(Encode(std::vector<float>(Count(shape), poison), dtype), dtype, shape);
}

Handle Twin::Ints(const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
  return Add(Encode(std::vector<float>(values.begin(), values.end()), DType::kI32), DType::kI32,
             shape);
}

Handle Twin::Floats(const std::vector<float>& values, std::initializer_list<int64_t> shape) {
  return Add(Encode(values, DType::kF32), DType::kF32, shape);
}

Handle Twin::Bytes(const void* data, std::initializer_list<int64_t> shape) {
  const char* begin = static_cast<const char*>(data);
  return Add(std::vector<char>(begin, begin + Count(shape)), DType::kU8, shape);
}

Handle Twin::Weight(DType dtype, int64_t rows, int64_t cols, float spread) {
  return Weight(dtype, rows, cols, Normal(rows * cols, spread));
}

Handle Twin::Weight(DType dtype, int64_t rows, int64_t cols, const std::vector<float>& values) {
  std::vector<char> host = Encode(values, dtype);
  const TensorView view = TensorView::Of(host.data(), dtype, {rows, cols});
  for (Backend* backend : {&cpu_, &cuda_}) {
    buffers_.push_back(backend->Allocate(backend->PackedBytes(dtype, rows, cols)));
    (backend == &cpu_ ? cpu_views_ : cuda_views_)
        .push_back(backend->Pack(view, buffers_.back().data()));
  }
  guards_.push_back(nullptr);
  return {static_cast<int>(cpu_views_.size()) - 1};
}

Handle Twin::Cut(Handle from, const std::function<TensorView(const TensorView&)>& cut) {
  cpu_views_.push_back(cut(cpu_views_[from.index]));
  cuda_views_.push_back(cut(cuda_views_[from.index]));
  guards_.push_back(nullptr);
  return {static_cast<int>(cpu_views_.size()) - 1};
}

void Twin::Restore(Handle to, Handle from) {
  std::vector<char> bytes(cpu_views_[from.index].bytes());
  const int64_t size = static_cast<int64_t>(bytes.size());
  cpu_.CopyToHost(bytes.data(), cpu_views_[from.index].data, size);
  cpu_.CopyToDevice(cpu_views_[to.index].data, bytes.data(), size);
  cuda_.CopyToHost(bytes.data(), cuda_views_[from.index].data, size);
  cuda_.CopyToDevice(cuda_views_[to.index].data, bytes.data(), size);
  cuda_.Synchronize();
}

void Twin::Run(const std::function<Op(const Side&)>& make) {
  const auto pick = [](const std::vector<TensorView>& views) {
    return [&views](Handle h) { return h.index < 0 ? TensorView{} : views[h.index]; };
  };
  for (Backend* backend : {&cpu_, &cuda_}) {
    const Op op = make(pick(backend == &cpu_ ? cpu_views_ : cuda_views_));
    CheckOp({.op = op, .tag = "test"});
    backend->Run(op);
    backend->Synchronize();
  }
}

std::vector<float> Twin::Read(Backend& backend, const TensorView& view) {
  // The whole span of the view comes over, then its elements are picked by their strides.
  int64_t span = 1;
  for (int i = 0; i < view.rank; ++i) span += (view.shape[i] - 1) * view.strides[i];
  std::vector<char> raw(span * SizeOf(view.dtype));
  backend.CopyToHost(raw.data(), view.data, static_cast<int64_t>(raw.size()));
  std::vector<float> values(view.elements());
  const bool whole = view.contiguous();
  for (int64_t i = 0; i < view.elements(); ++i) {
    int64_t rest = i, at = whole ? i : 0;
    for (int d = view.rank - 1; d >= 0 && !whole; --d) {
      at += rest % view.shape[d] * view.strides[d];
      rest /= view.shape[d];
    }
    const char* p = raw.data() + at * SizeOf(view.dtype);
    if (view.dtype == DType::kF32) {
      std::memcpy(&values[i], p, 4);
    } else if (view.dtype == DType::kBF16) {
      uint16_t v;
      std::memcpy(&v, p, 2);
      values[i] = Bf16ToFloat(v);
    } else if (view.dtype == DType::kU8) {
      values[i] = static_cast<unsigned char>(*p);
    } else {
      int32_t v;
      std::memcpy(&v, p, 4);
      values[i] = static_cast<float>(v);
    }
  }
  return values;
}

void Twin::ExpectGuards(Handle h, const std::string& what) {
  char* base = guards_[h.index];
  if (base == nullptr) return;
  const int64_t size = cuda_views_[h.index].bytes();
  std::vector<unsigned char> guard(kGuard);
  for (const char* at : {base, base + kGuard + size}) {
    cuda_.CopyToHost(guard.data(), at, kGuard);
    for (unsigned char b : guard) ASSERT_EQ(b, kGuardByte) << what << ": wrote outside its output";
  }
}

void Twin::ExpectClose(Handle h, double tolerance, const std::string& what) {
  const std::vector<float> want = Cpu(h), got = Cuda(h);
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_FALSE(std::isnan(want[i]))
        << what << ": the CPU left element " << i << " unwritten or NaN";
    ASSERT_FALSE(std::isnan(got[i])) << what << ": CUDA left element " << i << " unwritten or NaN";
    difference += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
    norm += double(want[i]) * want[i];
  }
  EXPECT_LE(std::sqrt(difference), tolerance * std::sqrt(norm) + 1e-12) << what;
  ExpectGuards(h, what);
}

void Twin::ExpectEqual(Handle h, const std::string& what) {
  EXPECT_EQ(Cuda(h), Cpu(h)) << what;
  ExpectGuards(h, what);
}

std::unique_ptr<Backend> TwinTest::cpu_, TwinTest::cuda_;

bool TwinTest::OnCuda() {
  const char* given = std::getenv("QWEND_OPS_TEST_BACKEND");
  return given == nullptr || std::strcmp(given, "cpu") != 0;
}

void TwinTest::SetUpTestSuite() {
  if (OnCuda() && CudaDeviceCount() == 0) return;
  cpu_ = MakeCpuBackend();
  cuda_ = OnCuda() ? MakeCudaBackend() : MakeCpuBackend();
}

void TwinTest::TearDownTestSuite() {
  cuda_.reset();
  cpu_.reset();
}

void TwinTest::SetUp() {
  if (OnCuda()) {
    QWEND_REQUIRE_GPU();
  }
  const char* given = std::getenv("QWEND_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  RecordProperty("seed", std::to_string(seed));
  trace_ =
      std::make_unique<::testing::ScopedTrace>(__FILE__, __LINE__, "seed " + std::to_string(seed));
  twin_ = std::make_unique<Twin>(*cpu_, *cuda_, OnCuda(), seed);
}

}  // namespace qwend::gpu
