// qwend-client info, health and abort.

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"
#include "qwend/v1/inference.grpc.pb.h"

namespace qwend::client {
namespace {

std::string DefaultSampling(const v1::Sampling& s) {
  std::vector<std::string> parts;
  if (s.has_temperature()) parts.push_back(absl::StrFormat("temperature %g", s.temperature()));
  if (s.has_top_p()) parts.push_back(absl::StrFormat("top_p %g", s.top_p()));
  if (s.has_top_k()) parts.push_back(absl::StrCat("top_k ", s.top_k()));
  if (s.has_min_p() && s.min_p() > 0) parts.push_back(absl::StrFormat("min_p %g", s.min_p()));
  return absl::StrJoin(parts, ", ");
}

std::string Describe(const v1::ModelInfo& m, const v1::ServerInfo& s) {
  using Row = std::pair<const char*, std::string>;
  const std::vector<Row> rows = {
      {"model", absl::StrCat(m.model_id(), " (", m.architecture(), ")")},
      {"parameters", absl::StrFormat("%.4g million, %s", m.parameters() / 1e6, m.weight_dtype())},
      {"layers", absl::StrCat(m.num_layers(), ", ", m.num_full_attention_layers(),
                              " of them with full attention")},
      {"vocabulary", absl::StrCat(m.vocab_size(), " tokens")},
      {"context", absl::StrCat(m.max_context_tokens(), " tokens")},
      {"end of sequence", absl::StrJoin(m.eos_token_ids(), ", ")},
      {"tokenizer", absl::StrCat(m.has_tokenizer() ? "yes" : "no", ", chat template ",
                                 m.has_chat_template() ? "yes" : "no")},
      {"default sampling", DefaultSampling(m.default_sampling())},
      {"server",
       absl::StrCat("qwend ", s.version(), ", up ",
                    absl::FormatDuration(absl::Seconds(static_cast<int64_t>(s.uptime_seconds()))))},
      {"backend", absl::StrCat(s.backend(), ", ", s.device_name())},
      {"decode plan", absl::StrCat(s.decode_plan(), ", batch sizes ",
                                   absl::StrJoin(s.captured_batch_sizes(), " "))},
      {"sequences", absl::StrCat(s.running(), " running, ", s.waiting(), " waiting, at most ",
                                 s.max_sequences())},
      {"cache pages", absl::StrCat(s.kv_pages_used(), " of ", s.kv_pages_total(), " used, ",
                                   s.kv_page_tokens(), " tokens each")},
      {"memory", absl::StrCat("weights ", Bytes(s.weight_bytes()), ", caches ",
                              Bytes(s.cache_bytes()), ", work ", Bytes(s.workspace_bytes()))},
  };
  std::string out;
  for (const auto& [name, value] : rows) absl::StrAppendFormat(&out, "%-17s %s\n", name, value);
  return out;
}

}  // namespace

int Info(const Options& options) {
  if (!options.arguments.empty()) {
    PrintError("info takes no argument");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  grpc::ClientContext model_context, server_context;
  Prepare(options.connection, &model_context);
  Prepare(options.connection, &server_context);
  v1::ModelInfo model;
  v1::ServerInfo server;
  grpc::Status status = v1::Inference::NewStub(channel)->GetModelInfo(&model_context, {}, &model);
  if (status.ok()) {
    status = v1::Control::NewStub(channel)->GetServerInfo(&server_context, {}, &server);
  }
  if (!status.ok()) {
    PrintStatus(status);
    return kFailed;
  }
  const std::string out =
      options.json ? JsonLine(model) + JsonLine(server) : Describe(model, server);
  return Write(out) ? kOk : kClosedPipe;
}

int Health(const Options& options) {
  if (!options.arguments.empty()) {
    PrintError("health takes no argument; --service NAME asks for one service");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  std::string serving;
  const grpc::Status status = CheckHealth(options.connection, channel, options.service, &serving);
  if (!status.ok()) {
    PrintStatus(status);
    return kFailed;
  }
  const std::string out =
      options.json ? absl::StrCat("{\"status\":\"", serving, "\"}\n") : serving + "\n";
  if (!Write(out)) return kClosedPipe;
  return serving == "SERVING" ? kOk : kFailed;
}

int Abort(const Options& options) {
  if (options.arguments.empty()) {
    PrintError("abort: give the ids of the requests to end");
    return kUsage;
  }
  auto channel = Connect(options.connection);
  if (channel == nullptr) return kFailed;
  auto stub = v1::Control::NewStub(channel);
  int exit_code = kOk;
  for (const std::string& id : options.arguments) {
    grpc::ClientContext context;
    Prepare(options.connection, &context);
    v1::AbortRequest request;
    request.set_request_id(id);
    v1::AbortResponse response;
    const grpc::Status status = stub->Abort(&context, request, &response);
    if (!status.ok()) {
      PrintStatus(status);
      exit_code = kFailed;
    }
  }
  return exit_code;
}

}  // namespace qwend::client
