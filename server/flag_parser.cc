#include "server/flag_parser.h"

#include <algorithm>
#include <fstream>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace qwend {
namespace {

constexpr int kMaxFlagfileDepth = 8;

bool Contains(const std::vector<std::string>& names, absl::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Abseil explains bad values in lines; the first says it.
std::string OneLine(absl::string_view text) {
  return std::string(absl::StripAsciiWhitespace(text.substr(0, text.find('\n'))));
}

absl::Status SetFlag(const std::string& name, const std::string& value,
                     const std::string& written_as) {
  std::string error;
  if (absl::FindCommandLineFlag(name)->ParseFrom(value, &error)) return absl::OkStatus();
  const std::string help = absl::FindCommandLineFlag(name)->Help();
  return absl::InvalidArgumentError(
      absl::StrCat(written_as, ": cannot use the value \"", value, "\"", error.empty() ? "" : ": ",
                   OneLine(error), "; --", name, " is ", OneLine(help.substr(0, help.find(';')))));
}

class ArgumentParser {
 public:
  ArgumentParser(const std::vector<std::string>& flags, const std::vector<std::string>& known,
                 std::vector<std::string>* switches)
      : flags_(flags), known_switches_(known), switches_(switches) {}

  absl::Status Parse(const std::vector<std::string>& args, const std::string& where, int depth) {
    for (size_t i = 0; i < args.size(); ++i) {
      absl::string_view arg = args[i];
      if (!absl::StartsWith(arg, "-") || arg == "-" || arg == "--") {
        return absl::InvalidArgumentError(
            absl::StrCat(where, "unexpected argument \"", arg, "\"; flags start with --"));
      }
      arg.remove_prefix(absl::StartsWith(arg, "--") ? 2 : 1);
      const size_t equals = arg.find('=');
      const std::string name(arg.substr(0, equals));
      const bool has_value = equals != absl::string_view::npos;
      std::string value(has_value ? arg.substr(equals + 1) : absl::string_view());
      if (Contains(known_switches_, name) && !has_value) {
        switches_->push_back(name);
        continue;
      }
      const bool is_flagfile = name == "flagfile";
      if (!is_flagfile && !Contains(flags_, name)) {
        if (absl::StartsWith(name, "no") && !has_value && IsBool(name.substr(2))) {
          if (auto s = SetFlag(name.substr(2), "false", absl::StrCat(where, "--", name)); !s.ok()) {
            return s;
          }
          continue;
        }
        return absl::InvalidArgumentError(
            absl::StrCat(where, "unknown flag --", name, "; --help lists all flags"));
      }
      if (!has_value) {
        if (!is_flagfile && IsBool(name)) {
          value = "true";
        } else if (i + 1 < args.size()) {
          value = args[++i];
        } else {
          return absl::InvalidArgumentError(
              absl::StrCat(where, "--", name, " needs a value: --", name, "=VALUE"));
        }
      }
      const absl::Status status = is_flagfile
                                      ? ParseFile(value, depth + 1)
                                      : SetFlag(name, value, absl::StrCat(where, "--", name));
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  bool IsBool(const std::string& name) const {
    return Contains(flags_, name) && absl::FindCommandLineFlag(name)->IsOfType<bool>();
  }

  absl::Status ParseFile(const std::string& path, int depth) {
    if (depth > kMaxFlagfileDepth) {
      return absl::InvalidArgumentError(absl::StrCat("--flagfile=", path, ": more than ",
                                                     kMaxFlagfileDepth,
                                                     " files deep; does a file name itself?"));
    }
    std::ifstream file(path);
    if (!file) {
      return absl::InvalidArgumentError(
          absl::StrCat("--flagfile=", path, ": cannot be read; give the path of a text file"));
    }
    std::vector<std::string> args;
    for (std::string line; std::getline(file, line);) {
      const std::string text(absl::StripAsciiWhitespace(line));
      if (!text.empty() && text[0] != '#') args.push_back(text);
    }
    return Parse(args, absl::StrCat(path, ": "), depth);
  }

  const std::vector<std::string>& flags_;
  const std::vector<std::string>& known_switches_;
  std::vector<std::string>* switches_;
};

}  // namespace

std::vector<std::string> FlagsDefinedIn(const std::string& source) {
  std::vector<std::string> names;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (absl::EndsWith(flag->Filename(), source)) names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

void ResetFlags(const std::vector<std::string>& flags) {
  for (const std::string& name : flags) {
    absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    std::string error;
    flag->ParseFrom(flag->DefaultValue(), &error);
  }
}

absl::Status ParseEnvironment(const std::vector<std::string>& flags, const std::string& prefix,
                              const std::function<const char*(const std::string&)>& environment) {
  for (const std::string& name : flags) {
    const std::string variable = absl::StrCat(prefix, absl::AsciiStrToUpper(name));
    const char* value = environment(variable);
    if (value == nullptr) continue;
    if (auto s = SetFlag(name, value, absl::StrCat("environment variable ", variable)); !s.ok()) {
      return s;
    }
  }
  return absl::OkStatus();
}

absl::Status ParseArguments(const std::vector<std::string>& flags,
                            const std::vector<std::string>& known_switches,
                            const std::vector<std::string>& args,
                            std::vector<std::string>* switches) {
  return ArgumentParser(flags, known_switches, switches).Parse(args, "", 0);
}

std::string DescribeFlags(const std::vector<std::string>& flags) {
  std::string text;
  for (const std::string& name : flags) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    const std::string value = flag->DefaultValue();
    absl::StrAppend(&text, "  --", name, "  ", flag->Help(), " [", value.empty() ? "\"\"" : value,
                    "]\n");
  }
  return text;
}

}  // namespace qwend
