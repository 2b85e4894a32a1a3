#include "engine/step_input_writer.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

namespace qwend {

StepInputWriter::StepInputWriter(Backend& backend, int vocab_size, const StepSizes& sizes,
                                 const Workspace& workspace)
    : backend_(backend),
      vocab_size_(vocab_size),
      sizes_(sizes),
      device_(workspace.inputs),
      host_(std::make_unique<int64_t[]>((workspace.inputs_bytes + 7) / 8)) {}

// One sequence's entry among the inputs of a step.
void StepInputWriter::SetSequence(const StepInputs& host, int s, const SequenceView& sequence,
                                  int last_position, const SamplingRow& sampling) const {
  const auto pages = static_cast<int>(sequence.pages.size());
  Require(last_position >= 0 && last_position < sizes_.max_context, "position ", last_position,
          " is outside the context of ", sizes_.max_context);
  Require(last_position / kPageTokens < pages && pages <= sizes_.max_pages, "sequence with ", pages,
          " pages for position ", last_position);
  Require(sequence.state_slot >= 0 && sequence.state_slot < sizes_.slots, "state slot ",
          sequence.state_slot, " of ", sizes_.slots);
  std::copy(sequence.pages.begin(), sequence.pages.end(),
            host.sequences.block_table.As<int32_t>() + int64_t{s} * sizes_.max_pages);
  host.sequences.state_slot.As<int32_t>()[s] = sequence.state_slot;
  std::memcpy(host.sampling.As<char>() + s * sizeof(SamplingRow), &sampling, sizeof(SamplingRow));
}

void StepInputWriter::SetRow(const StepInputs& host, int row, int sequence, int32_t token,
                             int position) const {
  Require(token >= 0 && token < vocab_size_, "token ", token, " is outside the vocabulary");
  host.token_ids.As<int32_t>()[row] = token;
  host.sequences.row_sequence.As<int32_t>()[row] = sequence;
  host.sequences.positions.As<int32_t>()[row] = position;
}

StepInputs StepInputWriter::Prefill(const PrefillChunk& chunk) {
  const int rows = static_cast<int>(chunk.tokens.size());
  Require(rows >= 1 && rows <= sizes_.chunk, "Prefill: ", rows, " tokens; 1 to ", sizes_.chunk,
          " are possible");
  const StepInputs host = LayOutInputs(sizes_, rows, 1, host_.get());
  SetSequence(host, 0, chunk.sequence, chunk.start_position + rows - 1, chunk.sampling);
  host.sequences.query_start.As<int32_t>()[0] = 0;
  host.sequences.query_start.As<int32_t>()[1] = rows;
  for (int i = 0; i < rows; ++i) {
    SetRow(host, i, 0, chunk.tokens[i], chunk.start_position + i);
  }
  CopyToDevice({.image = host_.get(), .end = host.bytes});
  return LayOutInputs(sizes_, rows, 1, device_);
}

WrittenInputs StepInputWriter::Decode(std::span<const DecodeRow> rows, int bucket,
                                      bool tokens_on_device) {
  const StepInputs host = LayOutInputs(sizes_, bucket, bucket, host_.get());
  const int32_t dummy_page = sizes_.dummy_page();
  const DecodeRow padding{
      .sequence = {.pages = {&dummy_page, 1}, .state_slot = sizes_.dummy_slot()}, .sampling = {}};
  double lengths = 0;
  for (int i = 0; i < bucket; ++i) {
    const bool real = i < static_cast<int>(rows.size());
    const DecodeRow& row = real ? rows[i] : padding;
    SetSequence(host, i, row.sequence, row.position, row.sampling);
    SetRow(host, i, i, row.token, row.position);
    host.sequences.query_start.As<int32_t>()[i] = i;
    if (real) lengths += row.position + 1;
  }
  host.sequences.query_start.As<int32_t>()[bucket] = bucket;
  const int64_t kept = tokens_on_device ? host.sampling.As<char>() - host.token_ids.As<char>() : 0;
  return {.image = host_.get(),
          .begin = kept,
          .end = host.bytes,
          .mean_length = lengths / static_cast<double>(rows.size())};
}

void StepInputWriter::CopyToDevice(const WrittenInputs& inputs) {
  backend_.CopyToDevice(static_cast<char*>(device_) + inputs.begin,
                        static_cast<const char*>(inputs.image) + inputs.begin,
                        inputs.end - inputs.begin);
}

void StepInputWriter::Rehearse(int bucket) {
  const int positions = std::min(sizes_.max_context, 1024);
  std::vector<int32_t> pages((positions + kPageTokens - 1) / kPageTokens);
  std::iota(pages.begin(), pages.end(), 0);
  pages.back() = sizes_.dummy_page();
  const DecodeRow row{.sequence = {.pages = pages, .state_slot = sizes_.dummy_slot()},
                      .position = positions - 1,
                      .sampling = {}};
  CopyToDevice(Decode(std::vector<DecodeRow>(bucket, row), bucket, /*tokens_on_device=*/false));
}

}  // namespace qwend
