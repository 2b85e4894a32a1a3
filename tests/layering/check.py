#!/usr/bin/env python3
"""Checks who includes whom, where model families may be named, and how long files are.

The table in words: CONTRIBUTING.md. Prints file:line for each break of a rule and exits 1.
"""
import os
import re
import sys

# What each folder may include beside the standard library and the operating system. A path ending
# in "/" stands for everything under it. The first folder that matches a file counts.
RULES = [
    ("kernels/cuda/", ["kernels/", "CUDA"]),
    ("kernels/cpu/", ["kernels/*.h", "kernels/cpu/", "hwy/"]),
    ("kernels/", ["kernels/"]),
    ("engine/", ["kernels/*.h", "engine/", "absl/", "nlohmann/", "pcre2.h", "utf8proc.h", "spdlog/"]),
    ("server/", ["engine/engine.h", "engine/request.h", "engine/token_sink.h", "engine/tokenizer/",
                 "server/", "absl/", "nlohmann/", "spdlog/", "prometheus/", "GRPC"]),
    ("client/", ["client/", "absl/", "GRPC"]),
]
GROUPS = {
    "CUDA": re.compile(r"(cuda|cooperative_groups|mma\.h|nv|cub/)|.*\.cuh$"),
    "GRPC": re.compile(r"(qwend/v1|google|grpc|grpcpp)/"),
}
# Headers that are neither the standard library's nor the system's.
FOREIGN = re.compile(r"(kernels|engine|server|client|tests|absl|nlohmann|spdlog|prometheus|hwy|gtest|"
                     r"gmock|benchmark|qwend|google|grpc|grpcpp|civetweb|cub|cutlass|cute|thrust)/|"
                     r"(pcre2|utf8proc|cuda\w*|cooperative_groups|mma|nv\w*|cublas\w*)\.h$|.*\.cuh$")
INCLUDE = re.compile(r'\s*#\s*include\s*([<"])([^>"]+)[>"]')
FAMILY = re.compile(r"qwen[ _.-]?[23]|llama", re.IGNORECASE)
FAMILY_FREE = ("kernels/", "engine/", "server/", "client/")
FAMILY_HOME = "engine/models/"
SOURCES = (".h", ".cc", ".cu", ".cuh")
SCRIPTS = (".py", ".sh", ".cmake")
WARN_LINES, MAX_LINES = 400, 500
SKIPPED = ("build", ".git", ".cache", "third_party", "shared")


def allowed(include, entries):
    for entry in entries:
        if entry in GROUPS:
            if GROUPS[entry].match(include):
                return True
        elif entry.endswith("*.h"):
            if re.fullmatch(re.escape(entry[:-3]) + r"[^/]+\.h", include):
                return True
        elif include == entry or (entry.endswith("/") and include.startswith(entry)):
            return True
    return False


def without_comments(text):
    """The text with comments blanked and lines kept; string literals stay."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
    return pattern.sub(
        lambda m: m.group(0) if m.group(0)[0] in "\"'" else re.sub(r"[^\n]", " ", m.group(0)), text)


def check_source(path, text):
    rule = next(((folder, entries) for folder, entries in RULES if path.startswith(folder)), None)
    code = without_comments(text).split("\n")
    for number, line in enumerate(code, 1):
        match = INCLUDE.match(line)
        if match and rule:
            include = match.group(2)
            quoted_own = match.group(1) == '"' or FOREIGN.match(include)
            if quoted_own and not allowed(include, rule[1]):
                yield f"{path}:{number}: {rule[0]} may not include {include}"
        if path.startswith(FAMILY_FREE) and not path.startswith(FAMILY_HOME) and FAMILY.search(line):
            yield f"{path}:{number}: a model family is named outside {FAMILY_HOME}"


def files_under(root):
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names
                    if n not in SKIPPED and not n.startswith(("build-", ".git", "__pycache__"))]
        for name in sorted(files):
            if name.endswith(SOURCES + SCRIPTS):
                yield os.path.relpath(os.path.join(folder, name), root)


def check_tree(root):
    """(breaks of a rule, warnings), each a list of lines."""
    errors, warnings = [], []
    for path in sorted(files_under(root)):
        with open(os.path.join(root, path), encoding="utf-8") as f:
            text = f.read()
        if path.endswith(SOURCES):
            errors += check_source(path, text)
        lines = text.count("\n")
        if lines > MAX_LINES:
            errors.append(f"{path}:{MAX_LINES + 1}: {lines} lines; split it, {MAX_LINES} at most")
        elif lines > WARN_LINES:
            warnings.append(f"{path}: {lines} lines, above {WARN_LINES}")
    return errors, warnings


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "..", "..")
    errors, warnings = check_tree(root)
    for line in warnings:
        print("warning:", line)
    for line in errors:
        print("error:", line)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
