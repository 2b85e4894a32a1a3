// Runs a libFuzzer target without libFuzzer: random mutations of seed files, for a bounded time.
//
//   TARGET [--seconds=N] [--runs=N] [--seed=N] [--max_len=N] FILE_OR_FOLDER...
//
// All seeds run as they are first, so that `TARGET --runs=0 FILE` replays one input. An input that
// aborts or crashes is written to crash-TARGET in the working directory. The same seed, binary and
// files give the same inputs in the same order.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" {
int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Both may be absent.
size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed)
    __attribute__((weak));
void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));
}

namespace {

using Input = std::string;

struct Options {
  int64_t seconds = 5;
  int64_t runs = 1 << 30;
  int64_t seed = 1;
  int64_t max_len = 4096;
  std::vector<std::filesystem::path> paths;
};

// What the crash handler needs; set before anything can crash.
std::string crash_path;
const Input* current = nullptr;

void SaveCurrent() {
  if (current == nullptr) return;
  FILE* file = std::fopen(crash_path.c_str(), "wb");
  if (file == nullptr) return;
  std::fwrite(current->data(), 1, current->size(), file);
  std::fclose(file);
  std::fprintf(stderr, "input of %zu bytes written to %s\n", current->size(), crash_path.c_str());
  current = nullptr;
}

void OnSignal(int signal) {
  SaveCurrent();
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

void Run(const Input& input) {
  current = &input;
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
  current = nullptr;
}

// One random change of bytes.
void MutateBytes(Input* input, const std::vector<Input>& seeds, std::mt19937& random) {
  const auto below = [&](size_t n) { return n == 0 ? 0 : random() % n; };
  const size_t at = below(input->size() + 1);
  const size_t length = std::min<size_t>(1 + below(8), input->size() - at);
  switch (random() % 7) {
    case 0:
      if (at < input->size()) (*input)[at] ^= static_cast<char>(1 << random() % 8);
      break;
    case 1:
      input->insert(at, 1 + random() % 4, static_cast<char>(random()));
      break;
    case 2:
      input->erase(at, length);
      break;
    case 3:
      input->insert(at, input->substr(at, length));
      break;
    case 4: {  // a part of another seed
      const Input& other = seeds[below(seeds.size())];
      const size_t from = below(other.size());
      input->insert(at, other, from, 1 + below(64));
      break;
    }
    case 5:
      for (size_t i = at; i < at + length; ++i) (*input)[i] = static_cast<char>(random());
      break;
    default: {  // a long run
      const Input part = input->substr(at, length);
      for (int n = random() % 40; n > 0; --n) input->insert(at, part);
    }
  }
}

Input Mutate(Input input, const std::vector<Input>& seeds, size_t max_len, std::mt19937& random) {
  if (LLVMFuzzerCustomMutator != nullptr && random() % 2 == 0) {
    const size_t size = input.size();
    input.resize(std::max(size, max_len));
    input.resize(LLVMFuzzerCustomMutator(reinterpret_cast<uint8_t*>(input.data()), size,
                                         input.size(), random()));
    return input;
  }
  for (int n = random() % 6; n >= 0; --n) MutateBytes(&input, seeds, random);
  if (input.size() > max_len) input.resize(max_len);
  return input;
}

bool ParseNumber(const char* argument, const char* name, int64_t* value) {
  const size_t length = std::strlen(name);
  if (std::strncmp(argument, name, length) != 0) return false;
  char* end = nullptr;
  *value = std::strtoll(argument + length, &end, 10);
  return *end == '\0' && end != argument + length;
}

bool ParseArguments(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    if (ParseNumber(argv[i], "--seconds=", &options->seconds) ||
        ParseNumber(argv[i], "--runs=", &options->runs) ||
        ParseNumber(argv[i], "--seed=", &options->seed) ||
        ParseNumber(argv[i], "--max_len=", &options->max_len)) {
      continue;
    }
    if (argv[i][0] == '-' || !std::filesystem::exists(argv[i])) {
      std::fprintf(stderr, "%s: no such option or file: %s\n", argv[0], argv[i]);
      return false;
    }
    options->paths.emplace_back(argv[i]);
  }
  return true;
}

std::vector<Input> ReadSeeds(const std::vector<std::filesystem::path>& paths) {
  std::vector<std::filesystem::path> files;
  for (const auto& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
      if (entry.is_regular_file()) files.push_back(entry.path());
    }
  }
  std::sort(files.begin(), files.end());
  std::vector<Input> seeds = {Input()};
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return seeds;
}

int Fuzz(const Options& options) {
  const std::vector<Input> seeds = ReadSeeds(options.paths);
  for (const Input& seed : seeds) Run(seed);
  std::mt19937 random(static_cast<unsigned>(options.seed));
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(options.seconds);
  int64_t runs = 0;
  for (; runs < options.runs && std::chrono::steady_clock::now() < end; ++runs) {
    Run(Mutate(seeds[random() % seeds.size()], seeds, options.max_len, random));
  }
  std::printf("%zu seeds and %lld mutated inputs, no failure\n", seeds.size(),
              static_cast<long long>(runs));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!ParseArguments(argc, argv, &options)) return 2;
  crash_path = "crash-" + std::filesystem::path(argv[0]).filename().string();
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) {
    std::signal(signal, OnSignal);
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(SaveCurrent);
  return Fuzz(options);
}
