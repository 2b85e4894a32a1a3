// What the client prints: colours, errors, JSON lines, tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/message.h"
#include "grpcpp/support/status.h"

namespace qwend::client {

// Escape sequences, all empty unless the descriptor is a terminal and colours are wanted.
struct Palette {
  Palette(int fd, bool wanted);
  std::string bold, dim, red, green, reset;
};

bool IsTerminal(int fd);

// Writes to standard output at once. False when its reader is gone.
bool Write(std::string_view text);

// "qwend-client: message" on standard error.
void PrintError(const std::string& message);

// The status code's name ("INVALID_ARGUMENT").
std::string CodeName(grpc::StatusCode code);

// Code, message, every violation of a google.rpc.BadRequest and the delay of a RetryInfo among the
// status's details, on standard error.
void PrintStatus(const grpc::Status& status);

// One line, field names as in the proto, with its newline.
std::string JsonLine(const google::protobuf::Message& message);

// "1.5 GB": decimal units, three digits.
std::string Bytes(double bytes);

// Columns padded to their widest cell, the first to the left and the others to the right. Row 0 is
// the heading.
std::string Table(const std::vector<std::vector<std::string>>& rows);

}  // namespace qwend::client
