// The model families this build knows, and how each reads its part of config.json. The only place
// where a family's name decides anything.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/loader/json_fields.h"
#include "engine/models/model_spec.h"

namespace qwend {

struct Family {
  const char* name;                        // ModelSpec::family
  std::vector<const char*> model_types;    // values of config.json's model_type
  std::vector<const char*> architectures;  // values of its architectures
  int default_head_dim = 0;                // when head_dim is absent; 0: hidden / heads
  double default_partial_rotary = 1.0;     // when partial_rotary_factor is absent
  bool must_state_tying = false;           // published with and without: no default is safe
  // Fills in what sets the family apart. The common keys are read already; spec.layers are all full
  // attention and num_layers() long. Failures go to `fields`.
  void (*read)(JsonFields& fields, ModelSpec& spec) = nullptr;
};

// In the files of the same names.
Family LlamaFamily();
Family Qwen2Family();
Family Qwen3Family();
Family Qwen35Family();

std::span<const Family> Families();

// By model_type or, when that is empty, by architecture. Null when there is none.
const Family* FindFamily(std::string_view model_type, std::string_view architecture);

// Whether the family serves this architecture (a classifier of a known type is not served).
bool ServesArchitecture(const Family& family, std::string_view architecture);

// "LlamaForCausalLM, ...", for messages.
std::string SupportedArchitectures();

// The published shapes that can be made up for measurements.
struct PublishedShape {
  const char* name;
  ModelSpec spec;
};
std::vector<PublishedShape> PublishedShapes();

}  // namespace qwend
