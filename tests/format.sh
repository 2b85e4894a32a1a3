#!/bin/sh
# Every C++ file must look as clang-format leaves it. tests/format.sh --fix makes it so.
cd "$(dirname "$0")/.." || exit 1
files=$(git ls-files --cached --others --exclude-standard '*.h' '*.cc' '*.cu' '*.cuh' 2>/dev/null) ||
  files=$(find kernels engine server client tests -name '*.h' -o -name '*.cc' -o -name '*.cu' \
    -o -name '*.cuh')
present=""
for f in $files; do [ -f "$f" ] && present="$present $f"; done
if [ "${1:-}" = --fix ]; then exec clang-format -i $present; fi
exec clang-format --dry-run -Werror --ferror-limit=3 $present
