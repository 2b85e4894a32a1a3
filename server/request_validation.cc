#include "server/request_validation.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/chat_input.h"

namespace qwend {
namespace {

uint64_t RandomSeed() {
  thread_local std::mt19937_64 generator{[] {
    std::random_device device;
    return (static_cast<uint64_t>(device()) << 32) | device();
  }()};
  return generator();
}

std::string OutsideVocabulary(uint32_t id, int64_t vocab) {
  return absl::StrCat(id, " is outside the vocabulary of ", vocab, " ids");
}

class Preparation {
 public:
  Preparation(const v1::GenerateRequest& request, const ModelView& model,
              const RequestLimits& limits)
      : request_(request), model_(model), limits_(limits) {}

  absl::StatusOr<PreparedRequest> Run() {
    CheckId();
    CheckSampling();
    CheckConstraint();
    CheckStopping();
    CheckOutput();
    CheckPrompt();
    CheckLengths();
    if (!violations_.empty()) return violations_.ToStatus();
    if (!missing_.empty()) {
      return absl::FailedPreconditionError(absl::StrJoin(missing_, "; "));
    }
    if (!unbuilt_.empty()) {
      return absl::UnimplementedError(
          absl::StrCat("not built in this server: ", absl::StrJoin(unbuilt_, ", "), "; leave ",
                       unbuilt_.size() == 1 ? "it" : "them", " unset"));
    }
    return std::move(out_);
  }

 private:
  void CheckId() {
    const std::string& id = request_.request_id();
    if (id.size() > RequestLimits::kMaxRequestIdBytes) {
      violations_.Add("request_id", absl::StrCat(id.size(), " bytes long; at most ",
                                                 RequestLimits::kMaxRequestIdBytes, " are taken"));
    }
    if (std::any_of(id.begin(), id.end(), [](char c) { return c < 0x20 || c > 0x7e; })) {
      violations_.Add("request_id", "holds a character that is not printable ASCII");
    }
    out_.engine.id = id;
    out_.engine.priority = request_.priority();
  }

  // A float within its bounds, or a violation. NaN and infinity are within none.
  std::optional<float> Checked(const char* field, float value, bool in_range, const char* range) {
    if (std::isfinite(value) && in_range) return value;
    violations_.Add(absl::StrCat("sampling.", field), absl::StrCat(value, " is not in ", range));
    return std::nullopt;
  }

  void CheckSampling() {
    const v1::Sampling& s = request_.sampling();
    SamplingParams& out = out_.engine.sampling;
    out = model_.description->default_sampling;
    if (s.has_temperature()) {
      const float t = s.temperature();
      out.temperature = Checked("temperature", t, t >= 0 && t <= RequestLimits::kMaxTemperature,
                                "[0, 100]; 0 is greedy")
                            .value_or(0);
    }
    if (out.temperature < RequestLimits::kGreedyTemperature) out.temperature = 0;
    if (s.has_top_p()) {
      const float p = s.top_p();
      out.top_p = Checked("top_p", p, p > 0 && p <= 1, "(0, 1]; 1 turns it off").value_or(1);
    }
    if (s.has_min_p()) {
      const float p = s.min_p();
      out.min_p = Checked("min_p", p, p >= 0 && p < 1, "[0, 1); 0 turns it off").value_or(0);
    }
    if (s.has_top_k()) {
      if (s.top_k() < 0) {
        violations_.Add("sampling.top_k", absl::StrCat(s.top_k(), " is negative; 0 turns it off"));
      }
      out.top_k = std::max(0, s.top_k());
    }
    out.seed = s.has_seed() ? s.seed() : RandomSeed();

    if (s.has_repetition_penalty()) {
      const float p = s.repetition_penalty();
      Checked("repetition_penalty", p, p > 0, "(0, inf); 1 turns it off");
      if (p != 1) unbuilt_.push_back("sampling.repetition_penalty");
    }
    const auto penalty = [&](bool set, const char* field, float p) {
      if (!set) return;
      Checked(field, p, p >= -2 && p <= 2, "[-2, 2]; 0 turns it off");
      if (p != 0) unbuilt_.push_back(absl::StrCat("sampling.", field));
    };
    penalty(s.has_presence_penalty(), "presence_penalty", s.presence_penalty());
    penalty(s.has_frequency_penalty(), "frequency_penalty", s.frequency_penalty());

    const uint32_t vocab = static_cast<uint32_t>(model_.description->vocab_size);
    for (const auto& [id, bias] : s.logit_bias()) {
      const std::string field = absl::StrCat("sampling.logit_bias[", id, "]");
      if (id >= vocab) violations_.Add(field, OutsideVocabulary(id, vocab));
      if (!std::isfinite(bias)) violations_.Add(field, absl::StrCat(bias, " is not finite"));
    }
    if (!s.logit_bias().empty()) unbuilt_.push_back("sampling.logit_bias");
    CheckedIds(s.allowed_token_ids(), "sampling.allowed_token_ids", vocab, &violations_);
    if (!s.allowed_token_ids().empty()) unbuilt_.push_back("sampling.allowed_token_ids");
    if (s.num_outputs() > 1) unbuilt_.push_back("sampling.num_outputs");
    if (s.beam_width() > 0) unbuilt_.push_back("sampling.beam_width");
    Checked("length_penalty", s.length_penalty(), true, "the finite numbers");
  }

  void CheckConstraint() {
    if (!request_.sampling().has_constraint()) return;
    const v1::Constraint& c = request_.sampling().constraint();
    switch (c.kind_case()) {
      case v1::Constraint::kJsonSchema: {
        const auto schema = ParseCallerJson(c.json_schema());
        if (!schema.ok()) {
          violations_.Add("sampling.constraint.json_schema",
                          std::string(schema.status().message()));
        } else if (!schema->is_object() && !schema->is_boolean()) {
          violations_.Add("sampling.constraint.json_schema",
                          "a schema is a JSON object, true or false");
        }
        break;
      }
      case v1::Constraint::kRegex:
        if (c.regex().empty()) violations_.Add("sampling.constraint.regex", "empty");
        break;
      case v1::Constraint::kChoice:
        if (c.choice().options().empty()) {
          violations_.Add("sampling.constraint.choice.options", "empty; give at least one");
        }
        for (int i = 0; i < c.choice().options_size(); ++i) {
          if (c.choice().options(i).empty()) {
            violations_.Add(absl::StrCat("sampling.constraint.choice.options[", i, "]"), "empty");
          }
        }
        break;
      case v1::Constraint::KIND_NOT_SET:
        violations_.Add("sampling.constraint", "empty; give json_schema, regex or choice");
        break;
    }
    unbuilt_.push_back("sampling.constraint");
  }

  void CheckStopping() {
    const v1::Stopping& s = request_.stopping();
    if (s.stop_strings_size() > limits_.max_stop_strings) {
      violations_.Add("stopping.stop_strings",
                      absl::StrCat(s.stop_strings_size(), " given; at most ",
                                   limits_.max_stop_strings, " are taken (--max_stop_strings)"));
    }
    for (int i = 0; i < s.stop_strings_size(); ++i) {
      const std::string& stop = s.stop_strings(i);
      const std::string field = absl::StrCat("stopping.stop_strings[", i, "]");
      if (stop.empty()) violations_.Add(field, "empty; every text would end at once");
      if (stop.size() > RequestLimits::kMaxStopStringBytes) {
        violations_.Add(field, absl::StrCat(stop.size(), " bytes long; at most ",
                                            RequestLimits::kMaxStopStringBytes, " are taken"));
      }
      out_.output.stop_strings.push_back(stop);
    }
    if (!s.stop_strings().empty() && model_.tokenizer == nullptr) {
      missing_.push_back(
          "stopping.stop_strings: this model folder has no tokenizer.json; use stop_token_ids");
    }
    const auto& eos = model_.description->eos_token_ids;
    const int room = std::max(0, RequestLimits::kMaxBannedIds - static_cast<int>(eos.size()));
    if (s.stop_token_ids_size() > room) {
      violations_.Add(
          "stopping.stop_token_ids",
          absl::StrCat(s.stop_token_ids_size(), " given; at most ", room, " are taken"));
    }
    out_.engine.stop_token_ids = CheckedIds(s.stop_token_ids(), "stopping.stop_token_ids",
                                            model_.description->vocab_size, &violations_);
    out_.engine.ignore_eos = s.ignore_eos();
    out_.output.include_stop_string = s.include_stop_string();
  }

  void CheckOutput() {
    const v1::Output& o = request_.output();
    if (o.top_logprobs() > RequestLimits::kMaxTopLogprobs) {
      violations_.Add("output.top_logprobs",
                      absl::StrCat(o.top_logprobs(), " asked for; at most ",
                                   RequestLimits::kMaxTopLogprobs, " are given"));
    }
    if (o.logprobs()) unbuilt_.push_back("output.logprobs");
    if (o.top_logprobs() > 0) unbuilt_.push_back("output.top_logprobs");
    if (o.prompt_logprobs()) unbuilt_.push_back("output.prompt_logprobs");
    out_.output.omit_text = o.omit_text();
    out_.output.omit_token_ids = o.omit_token_ids();
    out_.output.skip_special_tokens = o.skip_special_tokens();
  }

  void CheckPrompt() {
    switch (request_.prompt_case()) {
      case v1::GenerateRequest::kText:
        prompt_field_ = "text";
        if (request_.text().empty())
          violations_.Add("text", "empty; a prompt has at least one token");
        if (model_.tokenizer == nullptr) {
          missing_.push_back("text: this model folder has no tokenizer.json; send token_ids");
        } else {
          Encode(request_.text(), request_.parse_special());
        }
        break;
      case v1::GenerateRequest::kTokenIds:
        prompt_field_ = "token_ids";
        if (request_.token_ids().ids().empty()) {
          violations_.Add("token_ids.ids", "empty; a prompt has at least one token");
        }
        out_.engine.prompt = CheckedIds(request_.token_ids().ids(), "token_ids.ids",
                                        model_.description->vocab_size, &violations_);
        break;
      case v1::GenerateRequest::kChat: {
        prompt_field_ = "chat";
        if (const absl::Status s = RequireChat(model_); !s.ok()) {
          CheckChat(request_.chat(), &violations_);
          missing_.push_back(std::string(s.message()));
          break;
        }
        const size_t before = violations_.size();
        const std::string rendered = RenderChat(request_.chat(), model_, &violations_);
        if (violations_.size() != before) break;
        if (rendered.empty()) violations_.Add("chat", "renders to an empty prompt");
        Encode(rendered, /*parse_special=*/true);
        break;
      }
      case v1::GenerateRequest::PROMPT_NOT_SET:
        violations_.Add("prompt", "missing; give text, token_ids or chat");
        break;
    }
  }

  void Encode(const std::string& text, bool parse_special) {
    const int64_t least = model_.tokenizer->LeastTokens(text);
    if (least > model_.description->max_context_tokens) {
      violations_.Add(prompt_field_, absl::StrCat("has ", text.size(), " bytes, at least ", least,
                                                  " tokens; the context holds ",
                                                  model_.description->max_context_tokens));
      return;
    }
    auto ids = model_.tokenizer->Encode(text, parse_special);
    if (ids.ok()) {
      out_.engine.prompt = *std::move(ids);
    } else {
      violations_.Add(prompt_field_, std::string(ids.status().message()));
    }
  }

  // Prompt, max_tokens and min_tokens against one another and the context.
  void CheckLengths() {
    const v1::Stopping& s = request_.stopping();
    const int64_t context = model_.description->max_context_tokens;
    const int64_t prompt = static_cast<int64_t>(out_.engine.prompt.size());
    const int64_t room = context - prompt;
    const int64_t min_tokens = s.min_tokens();
    int64_t max_tokens = room;
    if (s.has_max_tokens()) {
      max_tokens = s.max_tokens();
      if (max_tokens == 0) violations_.Add("stopping.max_tokens", "0; at least 1 is generated");
    }
    if (room < 1) {
      violations_.Add(prompt_field_, absl::StrCat("the prompt has ", prompt,
                                                  " tokens, which leaves no room for an "
                                                  "answer in the context of ",
                                                  context, "; shorten it"));
    } else if (max_tokens > room) {
      violations_.Add("stopping.max_tokens", absl::StrCat(max_tokens, " and the prompt's ", prompt,
                                                          " tokens exceed the context of ", context,
                                                          "; at most ", room, " fit"));
    }
    if (s.has_max_tokens() && min_tokens > max_tokens) {
      violations_.Add("stopping.min_tokens",
                      absl::StrCat(min_tokens, " is above max_tokens, ", max_tokens));
    } else if (room >= 1 && min_tokens > room) {
      violations_.Add("stopping.min_tokens",
                      absl::StrCat(min_tokens, " and the prompt's ", prompt,
                                   " tokens exceed the context of ", context));
    }
    constexpr int64_t kMax = std::numeric_limits<int>::max();
    out_.engine.max_tokens = static_cast<int>(std::clamp<int64_t>(max_tokens, 0, kMax));
    out_.engine.min_tokens = static_cast<int>(std::min(min_tokens, kMax));
  }

  const v1::GenerateRequest& request_;
  const ModelView& model_;
  const RequestLimits& limits_;
  PreparedRequest out_;
  Violations violations_;
  std::vector<std::string> missing_;
  std::vector<std::string> unbuilt_;
  std::string prompt_field_ = "prompt";
};

}  // namespace

absl::StatusOr<PreparedRequest> PrepareRequest(const v1::GenerateRequest& request,
                                               const ModelView& model,
                                               const RequestLimits& limits) {
  return Preparation(request, model, limits).Run();
}

std::vector<int32_t> CheckedIds(const google::protobuf::RepeatedField<uint32_t>& ids,
                                const std::string& field, int vocab_size, Violations* violations) {
  std::vector<int32_t> out;
  out.reserve(ids.size());
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] >= static_cast<uint32_t>(vocab_size)) {
      violations->Add(absl::StrCat(field, "[", i, "]"), OutsideVocabulary(ids[i], vocab_size));
    }
    out.push_back(static_cast<int32_t>(ids[i]));
  }
  return out;
}

}  // namespace qwend
