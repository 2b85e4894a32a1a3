#include "server/inference_service.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/tokenizer/tokenizer.h"
#include "server/chat_input.h"
#include "server/generate_reactor.h"
#include "server/request_validation.h"
#include "server/unary.h"

namespace qwend {
namespace {

// A fraction of a second's work: calls are answered on the threads that all of them share.
constexpr size_t kMaxTokenizeBytes = size_t{4} << 20;

absl::Status TokenizeWith(const ModelView& model, const v1::TokenizeRequest& request,
                          v1::TokenizeResponse* response) {
  std::string text;
  bool parse_special = request.parse_special();
  Violations violations;
  switch (request.input_case()) {
    case v1::TokenizeRequest::kText:
      if (model.tokenizer == nullptr) {
        return absl::FailedPreconditionError("text: this model folder has no tokenizer.json");
      }
      text = request.text();
      break;
    case v1::TokenizeRequest::kChat:
      if (auto s = RequireChat(model); !s.ok()) return s;
      text = RenderChat(request.chat(), model, &violations);
      response->set_rendered_text(text);
      parse_special = true;
      break;
    case v1::TokenizeRequest::INPUT_NOT_SET:
      violations.Add("input", "missing; give text or chat");
      break;
  }
  if (text.size() > kMaxTokenizeBytes) {
    violations.Add(request.has_text() ? "text" : "chat",
                   absl::StrCat("has ", text.size(), " bytes; one call tokenizes at most ",
                                kMaxTokenizeBytes, ": send it in parts"));
  }
  if (!violations.empty()) return violations.ToStatus();
  const auto ids = model.tokenizer->Encode(text, parse_special);
  if (!ids.ok()) {
    violations.Add(request.has_text() ? "text" : "chat", std::string(ids.status().message()));
    return violations.ToStatus();
  }
  for (const int32_t id : *ids) {
    response->add_ids(static_cast<uint32_t>(id));
    response->add_pieces(std::string(model.tokenizer->TokenBytes(id)));
  }
  return absl::OkStatus();
}

absl::Status DetokenizeWith(const ModelView& model, const v1::DetokenizeRequest& request,
                            v1::DetokenizeResponse* response) {
  if (model.tokenizer == nullptr) {
    return absl::FailedPreconditionError("ids: this model folder has no tokenizer.json");
  }
  Violations violations;
  const std::vector<int32_t> ids =
      CheckedIds(request.ids(), "ids", model.description->vocab_size, &violations);
  if (!violations.empty()) return violations.ToStatus();
  response->set_text(model.tokenizer->Decode(ids, request.skip_special_tokens()));
  return absl::OkStatus();
}

void DescribeModel(const ModelView& model, v1::ModelInfo* info) {
  const ModelDescription& m = *model.description;
  info->set_model_id(m.model_id);
  info->set_architecture(m.architecture);
  info->set_parameters(m.parameters);
  info->set_weight_dtype(m.weight_dtype);
  info->set_vocab_size(m.vocab_size);
  info->set_max_context_tokens(m.max_context_tokens);
  info->set_num_layers(m.num_layers);
  info->set_num_full_attention_layers(m.num_full_attention_layers);
  for (const int32_t id : m.eos_token_ids) info->add_eos_token_ids(static_cast<uint32_t>(id));
  info->set_has_tokenizer(model.tokenizer != nullptr);
  info->set_has_chat_template(model.chat_template != nullptr);
  v1::Sampling* sampling = info->mutable_default_sampling();
  sampling->set_temperature(m.default_sampling.temperature);
  sampling->set_top_p(m.default_sampling.top_p);
  sampling->set_top_k(m.default_sampling.top_k);
  sampling->set_min_p(m.default_sampling.min_p);
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* InferenceService::Generate(
    grpc::CallbackServerContext* call, const v1::GenerateRequest* request) {
  return StartGenerate(context_, call, *request);
}

grpc::ServerUnaryReactor* InferenceService::GenerateUnary(grpc::CallbackServerContext* call,
                                                          const v1::GenerateRequest* request,
                                                          v1::GenerateUnaryResponse* response) {
  return StartGenerateUnary(context_, call, *request, response);
}

grpc::ServerUnaryReactor* InferenceService::Tokenize(grpc::CallbackServerContext* call,
                                                     const v1::TokenizeRequest* request,
                                                     v1::TokenizeResponse* response) {
  return Answer(context_, call, [&]() -> absl::Status {
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    return TokenizeWith(ModelView::Of(**engine), *request, response);
  });
}

grpc::ServerUnaryReactor* InferenceService::Detokenize(grpc::CallbackServerContext* call,
                                                       const v1::DetokenizeRequest* request,
                                                       v1::DetokenizeResponse* response) {
  return Answer(context_, call, [&]() -> absl::Status {
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    return DetokenizeWith(ModelView::Of(**engine), *request, response);
  });
}

grpc::ServerUnaryReactor* InferenceService::GetModelInfo(grpc::CallbackServerContext* call,
                                                         const v1::GetModelInfoRequest*,
                                                         v1::ModelInfo* response) {
  return Answer(context_, call, [&]() -> absl::Status {
    const auto engine = context_->state.ForQuestion();
    if (!engine.ok()) return engine.status();
    DescribeModel(ModelView::Of(**engine), response);
    return absl::OkStatus();
  });
}

}  // namespace qwend
