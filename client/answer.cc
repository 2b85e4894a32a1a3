#include "client/answer.h"

#include <unistd.h>

#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/channel.h"
#include "client/commands.h"
#include "client/format.h"
#include "client/interrupt.h"

namespace qwend::client {
namespace {

std::string FinishText(const v1::Finish& finish) {
  switch (finish.reason()) {
    case v1::FINISH_REASON_EOS:
      return "end of answer";
    case v1::FINISH_REASON_STOP_STRING:
      return absl::StrCat("stop string \"", finish.stop_string(), "\"");
    case v1::FINISH_REASON_STOP_TOKEN:
      return absl::StrCat("stop token ", finish.stop_token_id());
    case v1::FINISH_REASON_LENGTH:
      return "length limit";
    case v1::FINISH_REASON_ABORTED:
      return "aborted";
    default:
      return "no finish reason";
  }
}

// Writes one stream's messages. Of several outputs, one at a time: the others wait until it ends.
class Printer {
 public:
  explicit Printer(const Options& options)
      : json_(options.json), ids_(options.generation.ids), palette_(STDOUT_FILENO, options.color) {
    several_ = options.generation.num_outputs > 1;
  }

  bool Print(const v1::GenerateResponse& message) {
    if (json_) return Write(JsonLine(message));
    std::string piece = ids_ ? Ids(message) : message.text();
    if (!several_) return Write(piece);
    std::string& held = held_[message.index()];
    held += piece;
    if (!message.has_finish()) return true;
    return Write(absl::StrCat(palette_.dim, "[", message.index(), "] ", palette_.reset, held,
                              message.has_usage() ? "" : "\n"));
  }

 private:
  static std::string Ids(const v1::GenerateResponse& message) {
    std::string out;
    for (uint32_t id : message.token_ids()) absl::StrAppend(&out, id, " ");
    return out;
  }

  bool json_, ids_, several_;
  Palette palette_;
  std::map<uint32_t, std::string> held_;
};

void PrintSummary(const Options& options, const v1::Finish& finish, const v1::Usage& usage,
                  absl::Duration first, absl::Duration total) {
  const Palette palette(STDERR_FILENO, options.color);
  const double decode = absl::ToDoubleSeconds(total - first);
  std::string speed;
  if (usage.completion_tokens() > 1 && decode > 0) {
    speed = absl::StrFormat(", %.1f tokens/s", (usage.completion_tokens() - 1) / decode);
  }
  fprintf(stderr, "%s[%u prompt + %u tokens%s, first after %.0f ms; %s]%s\n", palette.dim.c_str(),
          usage.prompt_tokens(), usage.completion_tokens(), speed.c_str(),
          absl::ToDoubleMilliseconds(first), FinishText(finish).c_str(), palette.reset.c_str());
}

}  // namespace

void FillRequest(const GenerationOptions& options, v1::GenerateRequest* request) {
  request->set_request_id(options.request_id);
  request->set_priority(options.priority);
  request->set_parse_special(options.parse_special);
  v1::Sampling* sampling = request->mutable_sampling();
  if (options.temperature) sampling->set_temperature(*options.temperature);
  if (options.top_p) sampling->set_top_p(*options.top_p);
  if (options.top_k) sampling->set_top_k(*options.top_k);
  if (options.min_p) sampling->set_min_p(*options.min_p);
  if (options.repetition_penalty) sampling->set_repetition_penalty(*options.repetition_penalty);
  if (options.presence_penalty) sampling->set_presence_penalty(*options.presence_penalty);
  if (options.frequency_penalty) sampling->set_frequency_penalty(*options.frequency_penalty);
  if (options.seed) sampling->set_seed(*options.seed);
  sampling->set_num_outputs(options.num_outputs);
  v1::Stopping* stopping = request->mutable_stopping();
  if (options.max_tokens) stopping->set_max_tokens(*options.max_tokens);
  stopping->set_min_tokens(options.min_tokens);
  for (const std::string& stop : options.stop_strings) stopping->add_stop_strings(stop);
  for (uint32_t id : options.stop_token_ids) stopping->add_stop_token_ids(id);
  stopping->set_ignore_eos(options.ignore_eos);
  stopping->set_include_stop_string(options.include_stop_string);
  request->mutable_output()->set_skip_special_tokens(!options.show_special);
}

Answer StreamAnswer(v1::Inference::Stub& stub, const Options& options,
                    const v1::GenerateRequest& request) {
  grpc::ClientContext context;
  Prepare(options.connection, &context);
  InterruptScope interrupt([&context] { context.TryCancel(); });

  Answer answer;
  Printer printer(options);
  const absl::Time start = absl::Now();
  absl::Time first = absl::InfiniteFuture();
  v1::Finish finish;
  v1::Usage usage;
  auto stream = stub.Generate(&context, request);
  v1::GenerateResponse message;
  bool any_text = false;
  while (stream->Read(&message)) {
    if (first == absl::InfiniteFuture()) first = absl::Now();
    if (message.index() == 0) answer.text += message.text();
    any_text = any_text || !message.text().empty();
    if (message.has_finish()) {
      finish = message.finish();
      answer.aborted |= finish.reason() == v1::FINISH_REASON_ABORTED;
    }
    if (message.has_usage()) usage = message.usage();
    if (!answer.closed_pipe && !printer.Print(message)) {
      answer.closed_pipe = true;
      context.TryCancel();
    }
  }
  answer.status = stream->Finish();
  answer.interrupted = interrupt.interrupted();
  const absl::Time end = absl::Now();

  if (!options.json && !answer.closed_pipe && (answer.status.ok() || first <= end)) Write("\n");
  if (answer.status.ok() && !options.json) {
    if (IsTerminal(STDERR_FILENO)) {
      PrintSummary(options, finish, usage, first - start, end - start);
    }
    if (!any_text && !options.generation.ids && usage.completion_tokens() > 1) {
      PrintError(
          "no text came with the tokens (a model without tokenizer?); --ids prints their ids");
    }
  }
  return answer;
}

int Conclude(v1::Inference::Stub& stub, const Options& options, const Answer& answer) {
  if (answer.closed_pipe) return kClosedPipe;
  if (answer.interrupted) return kInterrupted;
  if (answer.status.ok()) {
    if (!answer.aborted) return kOk;
    PrintError("the request was aborted; the answer is not complete");
    return kFailed;
  }
  PrintStatus(answer.status);
  if (answer.status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) {
    grpc::ClientContext context;
    Prepare(options.connection, &context);
    v1::ModelInfo info;
    if (stub.GetModelInfo(&context, v1::GetModelInfoRequest(), &info).ok()) {
      if (!info.has_tokenizer()) {
        PrintError("the model has no tokenizer: give --token_ids, and --ids to print the answer's");
      } else if (!info.has_chat_template() && !options.generation.raw) {
        PrintError("the model has no chat template: --raw sends the prompt as plain text");
      }
    }
  }
  return kFailed;
}

}  // namespace qwend::client
