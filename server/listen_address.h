#pragma once

#include <string>

namespace qwend {

// Why a server cannot listen on host:port, found by trying: "address already in use", or another
// reason of the operating system's. "cannot listen" when a plain socket could.
std::string WhyNotListening(const std::string& address);

}  // namespace qwend
