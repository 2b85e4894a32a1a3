#include "tests/fuzz/json_mutator.h"

#include <random>
#include <vector>

#include "nlohmann/json.hpp"

namespace qwend::fuzz {
namespace {

using nlohmann::json;

void Collect(json& node, std::vector<json*>* nodes) {
  nodes->push_back(&node);
  if (!node.is_structured()) return;
  for (json& child : node) Collect(child, nodes);
}

json RandomValue(std::mt19937& random) {
  switch (random() % 12) {
    case 0:
      return nullptr;
    case 1:
      return random() % 2 == 0;
    case 2:
      return static_cast<int>(random() % 600) - 3;
    case 3:
      return static_cast<int64_t>(random()) << (random() % 32);
    case 4:
      return -1.5e300;
    case 5:
      return json::array();
    case 6:
      return json::object();
    case 7:
      return std::string(random() % 200, 'a');
    case 8:
      return "\u00E9\u4F60\U0001F600";
    case 9:
      return std::string("\0x", 2);
    case 10:
      return "(?i:a+)*[^\\s]\\p{L}";
    default:
      return std::string(1, static_cast<char>(' ' + random() % 95));
  }
}

// Changes one child of `node`, which is an object or an array and not empty.
void ChangeChild(json& node, std::mt19937& random, const json& donor) {
  auto child = node.begin();
  std::advance(child, random() % node.size());
  switch (random() % 5) {
    case 0:
      node.erase(child);
      break;
    case 1:
      *child = donor;
      break;
    case 2:
      if (node.is_array()) {
        node.push_back(*child);
      } else {
        const json copy = *child;
        node[child.key() + "x"] = copy;
      }
      break;
    case 3:
      if (child->is_string()) {
        *child = child->get<std::string>() + static_cast<char>(' ' + random() % 95);
        break;
      }
      [[fallthrough]];
    default:
      *child = RandomValue(random);
  }
}

}  // namespace

std::string MutateJson(const std::string& text, unsigned seed) {
  json root = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded()) return text;
  std::mt19937 random(seed);
  for (int n = random() % 3; n >= 0; --n) {
    std::vector<json*> nodes;
    Collect(root, &nodes);
    json& node = *nodes[random() % nodes.size()];
    const json donor = *nodes[random() % nodes.size()];
    if (node.is_structured() && !node.empty()) {
      ChangeChild(node, random, donor);
    } else {
      node = random() % 3 == 0 ? donor : RandomValue(random);
    }
  }
  return root.dump(-1, ' ', false, json::error_handler_t::replace);
}

}  // namespace qwend::fuzz
